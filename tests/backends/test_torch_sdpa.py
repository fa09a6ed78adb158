"""PyTorch's paths: what reaches an operator, and what becomes of what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal import oracle, plugins, sdpa
from hal.backends.torch_sdpa import CPU, EFFICIENT, FLASH, FUSED, MATH
from hal.backends.torch_sdpa import kernels as bound
from hal.errors import CallError
from hal.facts import Call
from hal.facts.flat import facts_of
from hal.policy import Policy, Request
from hal.resolver import resolve

INF = torch.inf


def tensors(
    b: int = 2, sq: int = 6, sk: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, 2, n, 8, generator=g).to(dtype) for n in (sq, sk, sk)]


def call(q: Any, k: Any, **more: Any) -> Call:
    sizes = {"batch": q.shape[0], "heads": 2, "head_dim": 8, "q_len": q.shape[2], "kv_len": k.shape[2]}
    return Call(**{"dtype": "float32", "layout": "bhsd", **sizes, **more})


def fragile(q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Any:
    """A kernel that gives NaN for a row without keys, and in every gradient then."""
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        assert mask.shape[3] == k.shape[2]
        scores = scores.masked_fill(~mask, -INF) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


keep = torch.tensor([[1, 1, 0, 0, 0, 0], [0] * 6]).bool()[:, None, None]  # the second has no key at all
bias = torch.zeros(1, 1, 6, 6).masked_fill(torch.arange(6)[:, None] == 2, -INF)
EMPTY = {
    "key padding": ({}, 6, 6, keep),
    "additive": ({}, 6, 6, bias),
    "causal": ({"causal": True}, 6, 4, None),
    "window": ({"window": (1, 0)}, 6, 3, None),
    "mask and causal": ({"causal": True}, 6, 6, keep),
    "one column": ({}, 6, 6, torch.tensor([True, False]).view(2, 1, 1, 1)),
}


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("case", EMPTY)
def test_a_kernel_is_shown_no_row_without_keys(case: str, lse: bool) -> None:
    """It need not know of such rows: they are 0 and -inf, and no gradient has a NaN."""
    more, sq, sk, mask = EMPTY[case]
    q, k, v = (t.requires_grad_() for t in tensors(2, sq, sk))
    kind = "none" if mask is None else "bool" if mask.dtype is torch.bool else "additive"
    run = sdpa.assembled(call(q, k, mask=kind, lse=lse, **more), lambda *a: fragile(*a) if lse else fragile(*a)[0])
    out, stats = run(q, k, v, mask, None) if lse else (run(q, k, v, mask, None), None)
    arguments: dict[str, Any] = {"attn_mask": mask, "is_causal": bool(more.get("causal")), "window": more.get("window")}
    want, want_stats = oracle.attention(q, k, v, layout="bhsd", **arguments)
    assert (want_stats == -INF).any()
    torch.testing.assert_close(out, want.float(), atol=2e-5, rtol=2e-5)
    if stats is not None:
        torch.testing.assert_close(stats, want_stats.float(), atol=2e-5, rtol=2e-5)
    got, ref = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, want))
    for a, b in zip(got, ref):
        torch.testing.assert_close(a, b.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_one_column_reaches_a_kernel_with_all(dtype: torch.dtype) -> None:
    q, k, v = tensors()
    seen: list[Any] = []
    run = sdpa.assembled(call(q, k, mask="bool"), lambda q, k, v, mask, causal: seen.append(mask) or q)
    run(q, k, v, torch.ones(2, 1, 6, 1, dtype=dtype), None)
    assert seen[0].shape == (2, 1, 6, 6) and seen[0].is_contiguous()


def test_a_bias_is_copied_only_where_its_rows_are_not_aligned() -> None:
    for n, stored, offset, copied in (
        (32, 32, 0, False),
        (32, 33, 0, True),
        (20, 20, 0, True),
        (20, 32, 0, False),
        (32, 64, 1, True),
    ):
        q, k, _ = tensors(2, n, n)
        mask = torch.zeros(2, 1, n, stored)[..., offset : offset + n]
        got = bound.aligned(mask, q, k)
        assert got is not None and got.shape == (2, 2, n, n)
        assert (got.untyped_storage().data_ptr() != mask.untyped_storage().data_ptr()) is copied, (n, stored, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_definition_and_the_oracle_do_not_heed_autocast(dtype: torch.dtype) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(dtype=dtype))
    run = bound.math(call(q, k, dtype=str(dtype)[6:], lse=True))
    (plain, stats), (want, want_stats) = run(q, k, v, None, None), oracle.attention(q, k, v, layout="bhsd")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out, lse), (again, again_stats) = run(q, k, v, None, None), oracle.attention(q, k, v, layout="bhsd")
        assert (q @ k.transpose(-1, -2)).dtype is torch.bfloat16 or dtype is torch.float64, "autocast is on"
    assert torch.equal(out, plain) and torch.equal(lse, stats)
    assert torch.equal(again, want) and torch.equal(again_stats, want_stats)
    got, ref = (torch.autograd.grad(o.double().square().sum(), (q, k, v)) for o in (out, want))
    for a, b in zip(got, ref):
        torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=2e-5)


def test_the_oracle_reads_a_mask_as_attention_does() -> None:
    q, k, v = (t.transpose(1, 2) for t in tensors(1, 3, 1))
    one = torch.ones(1, 1, dtype=torch.bool)  # one sequence: no key padding, so it broadcasts
    assert torch.isfinite(oracle.attention(q, k, v, attn_mask=one)[1]).all()
    with pytest.raises(CallError, match=r"write mask\[None, None\]"):
        q, k, v = (t.transpose(1, 2) for t in tensors(3, 3, 5))
        oracle.attention(q, k, v, attn_mask=torch.ones(3, 5, dtype=torch.bool))


# ---- declarations


@pytest.mark.parametrize("kernel", [CPU, FLASH, EFFICIENT, FUSED, MATH], ids=lambda k: k.name)
@pytest.mark.parametrize("varlen, graph, refused", [(True, True, True), (True, False, False), (False, True, False)])
def test_packed_sequences_are_not_captured_in_a_graph(kernel: Any, varlen: bool, graph: bool, refused: bool) -> None:
    """Their lengths are read one sequence after the other."""
    c = plugins.catalog()
    given = {"dtype": "fp16", "head_dim": 64, "heads": 2, "batch": 2, "q_len": 20, "varlen": varlen, "graph": graph}
    machine = {CPU: "x86", FUSED: "b580"}.get(kernel, "h100")
    d = resolve(Call.of(given), c.machine(machine), c, Policy((Request("torch_sdpa", kernel=kernel.name),)))
    mine = next(x for x in d.candidates if x.kernel is kernel)
    assert ("varlen.graph" in [r.id for r in mine.reasons]) is refused


@pytest.mark.parametrize(
    "text, sequences",
    [
        ("", 4),
        ("varlen=true", 1),
        ("varlen=true,grad=true", 4),
        ("varlen=?", None),
        ("varlen=true,grad=?", None),
        ("batch=0,varlen=true", 0),
    ],
)
def test_the_math_path_holds_one_packed_sequence_at_a_time(text: str, sequences: int | None) -> None:
    """A backward needs the weights of all."""
    c = plugins.catalog()
    facts = facts_of(
        Call.parse([f"dtype=bf16,head_dim=64,heads=2,batch=4,q_len=32,kv_len=48,{text}"]), c.machine("h100")
    )
    assert facts["math_bytes"] == (None if sequences is None else sequences * 2 * 4 * 2 * 32 * 48)
