"""Apple GPUs: PyTorch always, in chunks of queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated import MPS, catalog, decide, host, reasons, took

from hal.errors import FactError

# ---- architectures


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("m1", "m1"),
        ("M3", "m3"),
        ("Apple M3 Max", "m3"),
        ("apple m2 ultra", "m2"),
        ("m4-pro", "m4"),
        ("Apple M5", "m5"),
    ],
)
def test_every_form_of_an_architecture(text: str, arch: str) -> None:
    assert MPS.parse_arch(text) == arch


@pytest.mark.parametrize("text", ["", "m0", "m12", "sm90", "Apple", "m3 maxx", None])
def test_a_bad_architecture_is_quoted_with_the_forms(text: Any) -> None:
    with pytest.raises(FactError, match="Apple M3 Max"):
        MPS.parse_arch(text)


# ---- detection

PLIST = {"/System/Library/CoreServices/SystemVersion.plist": "<key>ProductVersion</key>\n\t<string>15.3.2</string>"}


@pytest.mark.parametrize(
    ("system", "processor", "torch", "state", "words"),
    [
        ("linux", "x86_64", {}, "absent", "not macOS"),
        ("darwin", "arm64", {}, "present", "macOS 15.3.2 on arm64"),
        ("darwin", "arm64", None, "unusable", "torch is not installed"),
        ("darwin", "x86_64", {}, "absent", "Rosetta"),
    ],
)
def test_detection(tmp_path: Path, system: str, processor: str, torch: Any, state: str, words: str) -> None:
    h = host(tmp_path, PLIST, torch)
    h.system, h.processor = system, processor
    found = MPS.detect(h)
    assert (found.platform, found.state) == ("mps", state)
    assert any(words in f for f in found.found)


# ---- decisions


@pytest.mark.parametrize("preset", ["m1", "m3"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 128, 160, 256, 512])
def test_always_pytorch(preset: str, dtype: str, head_dim: int) -> None:
    assert took(decide(preset, f"dtype={dtype},head_dim={head_dim}")) == "torch_sdpa/sdpa.mps"


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        ("mask=key_padding", "sdpa.mps"),
        ("mask=additive", "sdpa.mps"),
        ("causal=true,kv_len=77", "sdpa.mps"),
        ("kv_heads=8", "sdpa.mps"),
        ("window=512", "sdpa.mps"),
        ("varlen=true", "sdpa.mps"),
        ("grad=true", "sdpa.mps"),
        ("lse=true,q_len=256", "sdpa.math"),
        ("dropout=0.1,q_len=256", "sdpa.math"),
        ("q_len=0", "sdpa.math"),
    ],
)
def test_what_the_chunked_kernel_honours(call: str, kernel: str) -> None:
    assert decide("m3", call).kernel == kernel


def test_flash_attention_is_refused_with_the_fallback_as_advice() -> None:
    d = decide("m3", backend="fa")
    assert d.error
    assert "torch_sdpa" in d.error


def test_there_is_no_float64() -> None:
    assert "dtype.device" in reasons(decide("m1", "dtype=fp64"), "sdpa.math")


@pytest.mark.parametrize(
    ("call", "torch", "rule"),
    [
        ("v_head_dim=64", "2.11.0", "known_bad.mps-value-head-dim"),
        ("v_head_dim=64", "2.12.0", None),
        ("q_len=8,kv_len=38", "2.9.1", "known_bad.mps-few-queries"),
        ("q_len=8,kv_len=64", "2.9.1", None),
        ("q_len=9,kv_len=38", "2.9.1", None),
        ("q_len=8,kv_len=38", "2.10.0", None),
    ],
)
def test_known_bad(call: str, torch: str, rule: str | None) -> None:
    assert reasons(decide("m1", call, torch=torch), "sdpa.mps") == ({rule} if rule else set())


def test_half_types_over_many_keys_warn() -> None:
    assert any("mps-half-softmax" in w for w in decide("m1").warnings)
    assert not decide("m1", "q_len=2048").warnings


def test_the_math_path_over_its_budget_is_never_needed() -> None:
    d = decide("m1", "q_len=100000")
    assert d.kernel == "sdpa.mps"
    assert "memory.math" in reasons(d, "sdpa.math")


# ---- the kernel: what it computes is device-independent


def run(call: str, q: Any, k: Any, v: Any, mask: Any = None, varlen: Any = None) -> Any:
    """The kernel's run for tensors [B, H, S, D]."""
    from hal.facts import Call
    from hal.platforms.mps.kernels import bind_sdpa

    sizes = f"head_dim={q.shape[-1]},heads={q.shape[-3]},kv_heads={k.shape[-3]},q_len={q.shape[-2]},kv_len={k.shape[-2]},layout=bhsd"
    return bind_sdpa(Call.parse([sizes, call]))(q, k, v, mask, varlen)


@pytest.mark.parametrize("sq", [1, 64, 128, 129, 130, 257, 300])
@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("", {}),
        ("scale=0.3", {"scale": 0.3}),
        ("causal=true", {"is_causal": True}),
        ("window=20:5", {"window": (20, 5)}),
        ("causal=true,window=20:-1", {"is_causal": True, "window": (20, -1)}),
    ],
)
def test_chunks_give_the_numbers_of_the_whole(sq: int, call: str, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")

    from hal import oracle

    torch.manual_seed(sq)
    q, k, v = torch.randn(2, 4, sq, 16), torch.randn(2, 2, 200, 16), torch.randn(2, 2, 200, 16)
    for mask in (None, torch.rand(2, 1, 1, 200) < 0.7, torch.rand(1, 4, sq, 200) < 0.5, torch.randn(2, 1, sq, 200)):
        want, _ = oracle.attention(q, k, v, attn_mask=mask, layout="bhsd", **options)
        torch.testing.assert_close(run(call, q, k, v, mask), want.float(), atol=2e-5, rtol=2e-5)


def test_no_more_than_128_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    seen: list[int] = []
    true_sdpa = torch.nn.functional.scaled_dot_product_attention

    def watched(q: Any, *rest: Any, **options: Any) -> Any:
        seen.append(q.shape[2])
        return true_sdpa(q, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    q = torch.randn(1, 2, 1000, 8)
    run("", q, q, q)
    assert sum(seen) == 1000
    assert 8 < min(seen) <= max(seen) <= 128


def test_fewer_queries_where_128_would_not_fit_a_metal_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    from hal.platforms.mps import kernels

    seen: list[int] = []
    true_sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, *rest, **o: (seen.append(q.shape[2]), true_sdpa(q, *rest, **o))[1],
    )
    monkeypatch.setattr(kernels, "SCORES", 2 * 60 * 10)
    q = torch.randn(1, 2, 60, 8)
    torch.testing.assert_close(run("", q, q, q), true_sdpa(q, q, q))
    assert max(seen) == 10


def test_packed_sequences_and_empty_ones() -> None:
    torch = pytest.importorskip("torch")

    from hal import oracle
    from hal.fittings import Varlen

    torch.manual_seed(0)
    cu_q, cu_k = torch.tensor([0, 5, 5, 150], dtype=torch.int32), torch.tensor([0, 7, 9, 9], dtype=torch.int32)
    q, k, v = torch.randn(150, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    from hal.facts import Call
    from hal.platforms.mps.kernels import bind_sdpa

    for causal in (False, True):
        call = Call(head_dim=8, heads=4, kv_heads=2, q_len=145, kv_len=7, varlen=True, causal=causal)
        want, _ = oracle.attention_varlen(q, k, v, cu_q, cu_k, is_causal=causal)
        got = bind_sdpa(call)(q, k, v, None, Varlen(cu_q, cu_k, 145, 7))
        torch.testing.assert_close(got, want.float(), atol=2e-5, rtol=2e-5)


def test_gradients_flow_through_the_chunks() -> None:
    torch = pytest.importorskip("torch")

    from hal import oracle

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 140, 8, dtype=torch.float32, requires_grad=True) for _ in range(3))
    weight = torch.randn(1, 2, 140, 8)
    got = torch.autograd.grad((run("causal=true", q, k, v) * weight).sum(), (q, k, v))
    want = torch.autograd.grad((oracle.attention(q, k, v, is_causal=True, layout="bhsd")[0] * weight).sum(), (q, k, v))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b.float(), atol=2e-5, rtol=2e-5)


def test_the_kernel_traces_with_dynamic_lengths() -> None:
    torch = pytest.importorskip("torch")

    from hal import oracle
    from hal.facts import Call
    from hal.platforms.mps.kernels import bind_sdpa

    bound = bind_sdpa(
        Call(head_dim=8, heads=2, kv_heads=2, q_len=None, kv_len=None, layout="bhsd", causal=True, compile=True)
    )
    compiled = torch.compile(lambda q, k, v: bound(q, k, v, None, None), fullgraph=True, dynamic=True, backend="eager")
    for n in (100, 130, 300):
        q, k, v = (torch.randn(1, 2, n, 8) for _ in range(3))
        want, _ = oracle.attention(q, k, v, is_causal=True, layout="bhsd")
        torch.testing.assert_close(compiled(q, k, v), want.float(), atol=2e-5, rtol=2e-5)


def test_presets_and_rules_are_read() -> None:
    assert {"m1", "m3"} <= set(catalog().presets)
    assert {k.rule.id for k in catalog().known_bad if k.platform == "mps"} >= {"known_bad.mps-value-head-dim"}
