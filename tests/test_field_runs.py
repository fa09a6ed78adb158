"""Field cases that need a run: what was chosen is what is called, with the numbers of the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hal
from hal import context, oracle, plugins, run
from hal.backend import Backend, Kernel
from hal.backends.fa import BACKEND as FA
from hal.catalog import Catalog
from hal.errors import NoKernelError, PolicyError
from hal.facts import Call
from hal.facts.flat import FEATURES
from hal.policy import Policy, Request
from hal.resolver import resolve
from hal.testing import fakes


def tensors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype) for _ in range(3)]


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    some = want.isfinite()
    assert got.shape == want.shape and torch.equal(got[~some].double(), want[~some])
    assert bool(((got[some].double() - want[some]).abs() <= tolerance).all())


def test_a_padded_batch_equals_the_oracle_through_packing() -> None:
    q, k, v = tensors(3, 9, 2, 64, dtype=torch.bfloat16)
    keep = torch.arange(9) < torch.tensor([[9], [4], [0]])  # the last has no key at all
    with fakes.installed("flash_attn-2.8.3.post1") as fake, fakes.workbench(FA, flash_attn="2.8.3"):
        out, lse = hal.attention(q, k, v, attn_mask=keep, backend="fa", return_lse=True)
        d = hal.explain(q, k, v, attn_mask=keep, backend="fa", return_lse=True)
    want, want_lse = oracle.attention(q, k, v, attn_mask=keep[:, None, None])
    assert d.fittings == ("key_padding_to_varlen",)
    assert [c["symbol"] for c in fake.calls] == ["flash_attn_varlen_func"]
    assert fake.calls[0]["cu_seqlens_k"].tolist() == [0, 9, 13, 13]
    near(out, want, FA.tolerance["bfloat16"])
    near(lse, want_lse, 1e-4)
    assert not out[2].any() and (lse[2] == -torch.inf).all()


OPERATORS = [f"_scaled_dot_product_{n}" for n in (
    "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "fused_attention_overrideable",
    "attention_math",
)]  # fmt: skip


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Every call of one of PyTorch's attention operators, as (name, arguments); none is run."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def recorder(name: str) -> Any:
        def record(q: torch.Tensor, *rest: Any, **keywords: Any) -> list[Any]:
            calls.append((name, (q, *rest)))
            return [q.new_zeros(q.shape), q.new_zeros(q.shape[:3]), *(None,) * 7]

        return record

    for name in OPERATORS:
        monkeypatch.setattr(getattr(torch.ops.aten, name), "default", recorder(name))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorder("scaled_dot_product_attention"))
    return calls


PATHS = {
    "sdpa.flash": "_scaled_dot_product_flash_attention",
    "sdpa.efficient": "_scaled_dot_product_efficient_attention",
    "sdpa.cudnn": "_scaled_dot_product_cudnn_attention",
}
SWITCHES = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


def switches() -> list[bool]:
    return [getattr(torch.backends.cuda, name)() for name in SWITCHES]


def bound(kernel: str, **call: Any) -> Any:
    c = plugins.catalog()
    backend = "torch_cudnn_sdpa" if kernel == "sdpa.cudnn" else "torch_sdpa"
    given = {"dtype": "bf16", "head_dim": 64, "heads": 2, "batch": 2, "q_len": 20, **call}
    d = resolve(Call.of(given), c.machine("h100"), c, Policy((Request(backend, kernel=kernel),)))
    assert d.kernel == kernel, d.error
    return d.bind()


@pytest.mark.parametrize("kernel, operator", PATHS.items())
def test_each_path_of_pytorch_is_called_by_its_own_operator(kernel: str, operator: str, operators: Any) -> None:
    q, k, v = tensors(2, 20, 2, 64, dtype=torch.bfloat16)
    before = switches()
    bound(kernel)(q, k, v, None, None)
    assert [name for name, _ in operators] == [operator]
    assert switches() == before, "a process-wide switch was used"


def test_the_math_path_calls_no_sdpa(operators: Any) -> None:
    q, k, v = tensors(2, 20, 2, 64, dtype=torch.bfloat16)
    out = bound("sdpa.math")(q, k, v, None, None)
    near(out, oracle.attention(q, k, v)[0], 3e-2)
    assert not operators


def test_a_bias_reaches_the_efficient_operator_aligned(operators: Any) -> None:
    for n in (1, 15, 16, 20):
        q, k, v = (t[:, :n] for t in tensors(2, 20, 2, 64, dtype=torch.bfloat16))
        for mask in (torch.ones(2, 1, n, n, dtype=torch.bool), torch.zeros(1, 1, 1, n, dtype=torch.float32)):
            bound("sdpa.efficient", q_len=n, mask="bool" if mask.dtype is torch.bool else "additive")(
                q, k, v, mask, None
            )
            bias = operators[-1][1][3]
            assert bias.shape == (2, 2, n, n) and bias.dtype is torch.bfloat16 and bias.stride(-1) == 1
            assert all(s % 8 == 0 for s in bias.stride()[:-1]) and bias.storage_offset() % 8 == 0


@pytest.mark.parametrize("causal", [False, True])
def test_causality_is_what_the_call_says(causal: bool) -> None:
    q, k, v = tensors(1, 6, 2, 64, dtype=torch.bfloat16)
    want, _ = oracle.attention(q, k, v, is_causal=causal)
    with fakes.installed("flash_attn-2.8.3.post1") as fake, fakes.workbench(FA, flash_attn="2.8.3"):
        out = hal.attention(q, k, v, attn_mask=None, is_causal=causal, backend="fa")
    assert fake.calls[0]["causal"] is causal
    near(out, want, FA.tolerance["bfloat16"])
    everything = torch.ones(6, 6, dtype=torch.bool)  # a mask says nothing of causality
    masked = hal.attention(q, k, v, attn_mask=everything, is_causal=causal)
    near(masked, want, FA.tolerance["bfloat16"])


@pytest.mark.parametrize("kernel", ["sdpa.cpu", "sdpa.math"])
def test_heads_and_tokens_of_equal_number_are_not_mixed_up(kernel: str) -> None:
    q, k, v = tensors(2, 6, 6, 8)
    policy = Policy((Request("torch_sdpa", kernel=kernel),))
    for layout in ("bshd", "bhsd"):
        with context.changed(policy=policy):
            out = hal.attention(q, k, v, layout=layout, is_causal=True)
        want, _ = oracle.attention(q, k, v, layout=layout, is_causal=True)
        near(out, want, 2e-5)
    other, _ = oracle.attention(q, k, v, layout="bshd", is_causal=True)
    assert (want - other).abs().max() > 0.1, "a swap would not be seen"


# ---- who asked for what, where


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a backend whose output is zero."""
    made = Kernel(
        "zeros", lambda call: lambda q, k, v, mask, varlen: q.new_zeros(q.shape), layout="any", honours=FEATURES
    )
    catalog = plugins.catalog()
    wider = Catalog(catalog.platforms, {**catalog.backends, "zeros": Backend("zeros", portable=made)}, catalog.problems)
    monkeypatch.setattr(plugins, "catalog", lambda ignore=frozenset(): wider)
    run.forget()
    hal.clear_receipts()
    yield "zeros"
    run.forget()


def ran() -> dict[tuple[str, str], str]:
    """What ran, by component and role, with who asked for it."""
    return {(r.component, r.role): f"{r.backend} by {r.source}" for r in hal.receipts()}


def test_an_override_ends_with_its_component(zeros: str) -> None:
    q, k, v = tensors(1, 6, 2, 8)
    want, _ = oracle.attention(q, k, v)
    with hal.component("transformer", backend=zeros):
        assert not hal.attention(q, k, v).any()
        with hal.component("text_encoder"):
            near(hal.attention(q, k, v), want, 2e-5)
    near(hal.attention(q, k, v), want, 2e-5)
    assert ran() == {
        ("transformer", "self"): "zeros by hal.component('transformer', backend='zeros')",
        ("text_encoder", "self"): "torch_sdpa by automatic",
        ("", "self"): "torch_sdpa by automatic",
    }


def test_an_override_that_every_layer_outranks_is_an_error(zeros: str) -> None:
    chose = "its layers: transformer.self chose torch_sdpa .the layer, for correctness: it needs it."
    with pytest.raises(PolicyError, match=f"no attention layer of 'transformer' used zeros; {chose}"):
        with hal.component("transformer", backend=zeros):
            hal.LocalAttention(2, 8, required_backend="torch_sdpa", why="it needs it")
    with pytest.raises(PolicyError, match="'tokenizer' used zeros; no attention that hal can reach ran there"):
        with hal.component("tokenizer", backend=zeros):
            pass
    with hal.component("transformer", backend=zeros):
        hal.LocalAttention(2, 8, deferred=True)
    with pytest.raises(ZeroDivisionError), hal.component("transformer", backend=zeros):
        1 / 0  # noqa: B018
    assert context.current.get() is context.NOTHING


def test_a_misspelt_backend_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run.forget()
    monkeypatch.setenv("HAL_ATTENTION_BACKEND", "torch_spda")
    said = "HAL_ATTENTION_BACKEND=torch_spda: unknown attention backend 'torch_spda'; did you mean 'torch_sdpa'"
    with pytest.raises(PolicyError, match=said):
        hal.attention(*tensors(1, 6, 2, 8))
    with pytest.raises(PolicyError, match=said):
        hal.LocalAttention(2, 8)


def test_what_the_environment_asks_for_runs_or_is_an_error(zeros: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, 6, 2, 8)
    monkeypatch.setenv("HAL_ATTENTION_BACKEND", zeros)
    with hal.component("transformer"):
        assert not hal.attention(q, k, v).any()
    assert ran() == {("transformer", "self"): "zeros by HAL_ATTENTION_BACKEND=zeros"}
    run.forget()
    hal.clear_receipts()
    monkeypatch.setenv("HAL_ATTENTION_BACKEND", "aiter")
    said = "'aiter', asked for by HAL_ATTENTION_BACKEND=aiter, cannot serve transformer.self"
    with hal.component("transformer"), pytest.raises(NoKernelError, match=said):
        hal.attention(q, k, v)
    with hal.component("text_encoder"):
        near(hal.attention(q, k, v), oracle.attention(q, k, v)[0], 2e-5)
    (receipt,) = hal.receipts()
    assert receipt.notes == ("aiter (HAL_ATTENTION_BACKEND=aiter) is passed: cpu has no kernel for it",)


def test_a_layer_and_what_runs_in_it_read_one_decision(zeros: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_ATTENTION_BACKEND", "torch_sdpa")
    with hal.component("transformer", backend=zeros):
        layer = hal.LocalAttention(2, 8)
    assert layer.backend == zeros and layer.decision
    assert [(str(s.request), s.outcome) for s in layer.decision.steps] == [
        ("zeros", "taken"),
        ("torch_sdpa", "outranked"),
    ]
    assert not layer(*tensors(1, 6, 2, 8)).any(), "what was asked for where it was built stays with it"
    assert ran() == {("transformer", "self"): "zeros by hal.component('transformer', backend='zeros')"}
