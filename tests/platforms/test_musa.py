"""Moore Threads GPUs: MATE's flash attention, the vendor's flash_attn, else torch_musa's SDPA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated import MUSA, catalog, decide, host, reasons, took

from hal.errors import FactError

# ---- architectures


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("mp22", "mp22"),
        ("MP31", "mp31"),
        ("mp_31", "mp31"),
        ("22", "mp22"),
        (22, "mp22"),
        ("3.1", "mp31"),
        (3.1, "mp31"),
        ((2, 2), "mp22"),
        ("(3, 1)", "mp31"),
        ("S4000", "mp22"),
        ("MTT S5000", "mp31"),
        ("mtt s80", "mp21"),
        ("S3000", "mp21"),
        ("Pinghu", "mp31"),
    ],
)
def test_every_form_of_an_architecture(text: Any, arch: str) -> None:
    assert MUSA.parse_arch(text) == arch


@pytest.mark.parametrize("text", ["", "mp", "mp99", "S9000", "sm90", "9.0", "A100", None])
def test_a_bad_architecture_is_quoted_with_the_forms(text: Any) -> None:
    with pytest.raises(FactError, match="S4000") as e:
        MUSA.parse_arch(text)
    assert repr(text) in str(e.value)


# ---- detection

GPU = {"/dev/mtgpu.0": "", "/dev/mtgpu.1": ""}
RUNTIME = {"/usr/local/musa/lib/libmusart.so": ""}
PLUGIN = ("torch_musa",)
BUILD = {"__version__": "2.7.1"}


@pytest.mark.parametrize(
    ("files", "torch", "modules", "env", "state", "words"),
    [
        (GPU | RUNTIME, BUILD, PLUGIN, {}, "present", "/dev/mtgpu.0, /dev/mtgpu.1: 2 Moore Threads GPUs"),
        (GPU | RUNTIME, BUILD, PLUGIN, {"MUSA_VISIBLE_DEVICES": "1"}, "present", "torch_musa is installed"),
        (GPU | RUNTIME, BUILD, PLUGIN, {"MUSA_VISIBLE_DEVICES": ""}, "hidden", "MUSA_VISIBLE_DEVICES= hides every GPU"),
        (GPU | RUNTIME, BUILD, PLUGIN, {"MUSA_VISIBLE_DEVICES": "-1"}, "hidden", "MUSA_VISIBLE_DEVICES=-1"),
        (GPU | RUNTIME, BUILD, (), {}, "unusable", "torch_musa is not installed"),
        (GPU | RUNTIME, None, PLUGIN, {}, "unusable", "torch is not installed"),
        (GPU, BUILD, PLUGIN, {}, "unusable", "the MUSA runtime is not here"),
        (
            GPU | {"/opt/musa/libmusart.so": ""},
            BUILD,
            PLUGIN,
            {"LD_LIBRARY_PATH": "/opt/musa"},
            "present",
            "/opt/musa/libmusart.so",
        ),
        (RUNTIME, BUILD, PLUGIN, {}, "unusable", "no Moore Threads GPU is here"),
        ({}, BUILD, (), {}, "absent", "neither torch_musa nor a GPU"),
    ],
)
def test_detection(
    tmp_path: Path,
    files: dict[str, str],
    torch: Any,
    modules: tuple[str, ...],
    env: dict[str, str],
    state: str,
    words: str,
) -> None:
    found = MUSA.detect(host(tmp_path, files, torch, modules, **env))
    assert found.state == state
    assert any(words in f for f in found.found), found.found
    assert bool(found.fix) == (state in ("unusable", "hidden"))


def test_the_real_devices_come_from_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from types import SimpleNamespace as New

    listed = [
        New(name="MTT S4000", major=2, minor=2, total_memory=48),
        New(name="MTT X", major=9, minor=9, total_memory=1),
    ]
    fake = New(device_count=lambda: len(listed), get_device_properties=lambda i: listed[i])
    monkeypatch.setattr(MUSA, "module", lambda: fake)
    m = MUSA.machine(host(tmp_path, GPU | RUNTIME, BUILD, PLUGIN))
    assert [(d.index, d.arch, d.memory) for d in m.devices] == [(0, "mp22", 48), (1, "other", 1)]


# ---- decisions

MATE = "flash_attn_3==0.1.4"
FA2 = "flash-attn==2.7.4"


@pytest.mark.parametrize(
    ("on", "packages", "call", "kernel"),
    [
        ("s5000", MATE, "", "fa/musa_flash"),
        ("s5000", "mate-flash-attention==0.1.3", "", "fa/musa_flash"),
        ("s5000", f"{MATE} {FA2}", "", "fa/musa_flash"),
        ("s5000", MATE, "head_dim=72", "fa/musa_flash"),
        ("s5000", MATE, "head_dim=192,v_head_dim=128", "fa/musa_flash"),
        ("s5000", MATE, "lse=true", "fa/musa_flash"),
        ("s5000", MATE, "ring=2", "fa/musa_flash"),
        ("s5000", MATE, "causal=true,kv_len=100", "fa/musa_flash"),
        ("s5000", MATE, "window=128,kv_heads=8", "fa/musa_flash"),
        ("s5000", MATE, "dtype=fp32,q_len=512", "torch_sdpa/sdpa.math"),
        ("s5000", MATE, "mask=bool", "torch_sdpa/sdpa.fused"),
        ("s5000", MATE, "grad=true", "torch_sdpa/sdpa.fused"),
        ("s4000", MATE, "", "torch_sdpa/sdpa.fused"),  # MATE is for MP31
        ("s4000", FA2, "", "fa/musa_fa2"),
        ("s5000", FA2, "", "fa/musa_fa2"),
        ("s4000", FA2, "window=128", "torch_sdpa/sdpa.fused"),
        ("s4000", "", "", "torch_sdpa/sdpa.fused"),
        ("s4000", "", "head_dim=160", "torch_sdpa/sdpa.fused"),
        ("s4000", "", "head_dim=256,q_len=512", "torch_sdpa/sdpa.math"),
        ("s4000", "", "mask=additive", "torch_sdpa/sdpa.fused"),
        ("musa:mp21", FA2, "q_len=512", "torch_sdpa/sdpa.math"),
    ],
)
def test_the_automatic_choice(on: str, packages: str, call: str, kernel: str) -> None:
    assert took(decide(on, call, packages)) == kernel


def test_the_advice_does_not_send_anyone_to_pypi() -> None:
    advice = " ".join(decide("s5000").advice)
    assert "github.com/MooreThreads/mate" in advice
    assert "pip install flash-attn" not in advice


def test_a_scale_before_sdk_4_2_is_refused() -> None:
    assert reasons(decide("s4000", "scale=0.5", runtime="4.1.0"), "sdpa.fused") == {"known_bad.musa-sdpa-scale"}
    assert not reasons(decide("s4000", "scale=0.5"), "sdpa.fused")
    assert not reasons(decide("s4000", runtime="4.1.0"), "sdpa.fused")


def test_the_presets() -> None:
    assert {n for n, p in catalog().presets.items() if p == "musa"} == {"s4000", "s5000"}
    assert catalog().machine("s5000").packages["torch_musa"].version == "2.7.1"


# ---- the kernel, through a fake with the recorded signature

RECORD = Path(__file__).parent / "signatures" / "mate_flash_attn_3.json"


def on_musa() -> Any:
    """A machine where MATE's kernel is the one that ``fa`` has."""
    from dataclasses import replace

    from hal.backends.fa import BACKEND
    from hal.platforms.musa.kernels import MUSA_FLASH
    from hal.testing import fakes

    return fakes.workbench(replace(BACKEND, kernels=(MUSA_FLASH,), known_bad=""), flash_attn_3="0.1.4")


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        ({}, {"causal": False, "window_size": (-1, -1)}),
        ({"scale": 0.3}, {"softmax_scale": 0.3}),
        ({"is_causal": True}, {"causal": True}),
        ({"window": (5, 2)}, {"window_size": (5, 2), "causal": False}),
        ({"window": (-1, 0)}, {"window_size": (-1, -1), "causal": True}),  # MATE asserts on (-1, 0)
        ({"return_lse": True}, {"return_softmax_lse": True}),
        ({"is_causal": True, "return_lse": True}, {"return_softmax_lse": True}),
    ],
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("sizes", [(20, 33), (9, 4)])
def test_what_the_package_is_called_with_and_what_comes_back(
    layout: str, arguments: dict[str, Any], bound: dict[str, Any], sizes: tuple[int, int]
) -> None:
    torch = pytest.importorskip("torch")

    import hal
    from hal import oracle
    from hal.testing import fakes

    torch.manual_seed(0)
    sq, sk = sizes
    q, k, v = (torch.randn(2, n, h, 64).bfloat16() for n, h in ((sq, 4), (sk, 2), (sk, 2)))
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with fakes.installed(RECORD) as fake, on_musa():
        got = hal.attention(q, k, v, backend="fa", enable_gqa=True, layout=layout, **arguments)
    call = fake.calls[-1]
    assert call["symbol"] == "flash_attn_func"
    assert bound.items() <= call.items()
    assert call["q"].shape == (2, sq, 4, 64)
    lse = arguments.get("return_lse", False)
    want, stats = oracle.attention(q, k, v, layout=layout, **{n: x for n, x in arguments.items() if n != "return_lse"})
    torch.testing.assert_close(got[0] if lse else got, want.bfloat16(), atol=2e-2, rtol=2e-2)
    if lse:
        torch.testing.assert_close(got[1], stats.float(), atol=1e-4, rtol=1e-4)


def test_packed_sequences() -> None:
    torch = pytest.importorskip("torch")

    import hal
    from hal import oracle
    from hal.testing import fakes

    torch.manual_seed(0)
    cu_q, cu_k = torch.tensor([0, 3, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 9, 9], dtype=torch.int32)
    q, k, v = (torch.randn(n, 2, 64).bfloat16() for n in (10, 9, 9))
    with fakes.installed(RECORD) as fake, on_musa():
        out, stats = hal.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend="fa", return_lse=True)
    assert fake.calls[-1]["symbol"] == "flash_attn_varlen_func"
    want, true = oracle.attention_varlen(q, k, v, cu_q, cu_k)
    torch.testing.assert_close(stats, true.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out, want.bfloat16(), atol=2e-2, rtol=2e-2)
