"""Intel GPUs: sgl-kernel-xpu's flash attention where it takes the call, else PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated import XPU, catalog, decide, host, reasons, took

from hal.errors import FactError

# ---- architectures


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("pvc", "pvc"),
        ("PVC", "pvc"),
        ("intel_gpu_pvc_vg", "pvc"),
        ("0x0bd5", "pvc"),
        ("0xBD5", "pvc"),
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
        ("max1550", "pvc"),
        ("acm", "acm"),
        ("acm-g10", "acm"),
        ("dg2", "acm"),
        ("dg2-g11", "acm"),
        ("ats-m150", "acm"),
        ("0x56a0", "acm"),
        ("a770", "acm"),
        ("Intel(R) Arc(TM) A770 Graphics", "acm"),
        ("Intel(R) Data Center GPU Flex 170", "acm"),
        ("bmg", "bmg"),
        ("intel_gpu_bmg_g21", "bmg"),
        ("0xe20b", "bmg"),
        ("8086:e20b", "bmg"),
        (0xE20B, "bmg"),
        ("Intel(R) Arc(TM) B580 Graphics", "bmg"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "bmg"),
        ("lnl", "lnl"),
        ("Intel(R) Arc(TM) 140V GPU", "lnl"),
        ("0x64a0", "lnl"),
        ("arl-h", "arl"),
        ("Intel(R) Arc(TM) 140T GPU", "arl"),
        ("0xb640", "arl"),
        ("mtl", "mtl"),
        ("Intel(R) Arc(TM) Graphics", "mtl"),
        ("ptl", "ptl"),
        ("0xb080", "ptl"),
    ],
)
def test_every_form_of_an_architecture(text: Any, arch: str) -> None:
    assert XPU.parse_arch(text) == arch


@pytest.mark.parametrize("text", ["", "0x1234", "sm90", "a100", "gfx942", "arc z999", "1550x", None, 3.1])
def test_a_bad_architecture_is_quoted_with_the_forms(text: Any) -> None:
    with pytest.raises(FactError, match="0xe20b") as e:
        XPU.parse_arch(text)
    assert repr(text) in str(e.value)


# ---- detection

B580 = {"/sys/class/drm/renderD128/device/vendor": "0x8086\n", "/sys/class/drm/renderD128/device/device": "0xe20b\n"}
NODE = {"/dev/dri/renderD128": ""}
NVIDIA = {"/sys/class/drm/renderD128/device/vendor": "0x10de\n", "/dev/dri/renderD128": ""}
BUILD = {"__version__": "2.13.0+xpu", "xpu": "20250302"}
CPU_BUILD = {"__version__": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("files", "torch", "modules", "env", "state", "words"),
    [
        (B580 | NODE, BUILD, (), {}, "present", "renderD128 is an Intel GPU (bmg, device 0xe20b)"),
        (B580 | NODE, BUILD, (), {"ZE_AFFINITY_MASK": "0"}, "present", "is built for XPU"),
        (B580 | NODE, BUILD, (), {"ZE_AFFINITY_MASK": "0.1,0.0"}, "present", "is built for XPU"),
        (B580 | NODE, BUILD, (), {"ZE_AFFINITY_MASK": ""}, "present", "is built for XPU"),
        (B580 | NODE, BUILD, (), {"ZE_AFFINITY_MASK": "3"}, "hidden", "ZE_AFFINITY_MASK=3 hides it"),
        (B580 | NODE, BUILD, (), {"ZE_AFFINITY_MASK": "-1"}, "hidden", "ZE_AFFINITY_MASK=-1 hides it"),
        (B580 | NODE, BUILD, (), {"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, "present", "is built for XPU"),
        (B580 | NODE, BUILD, (), {"ONEAPI_DEVICE_SELECTOR": "!opencl:*"}, "present", "is built for XPU"),
        (B580 | NODE, BUILD, (), {"ONEAPI_DEVICE_SELECTOR": "*:cpu"}, "hidden", "ONEAPI_DEVICE_SELECTOR"),
        (B580 | NODE, BUILD, (), {"ONEAPI_DEVICE_SELECTOR": "opencl:*"}, "hidden", "ONEAPI_DEVICE_SELECTOR"),
        (B580, BUILD, (), {}, "unusable", "/dev/dri/renderD128 is not here"),
        (B580 | NODE, CPU_BUILD, (), {}, "unusable", "torch 2.13.0+cpu is not built for XPU"),
        (B580 | NODE, None, (), {}, "unusable", "torch is not installed"),
        ({}, BUILD, (), {}, "unusable", "no Intel GPU is here"),
        (NVIDIA, BUILD, (), {}, "unusable", "no Intel GPU is here"),
        ({}, CPU_BUILD, (), {}, "absent", "is not built for XPU"),
        ({}, CPU_BUILD, ("intel_extension_for_pytorch",), {}, "absent", "the package alone makes no XPU"),
        (B580 | NODE, CPU_BUILD, ("intel_extension_for_pytorch",), {}, "unusable", "not built for XPU"),
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
    found = XPU.detect(host(tmp_path, files, torch, modules, **env))
    assert found.state == state
    assert any(words in f for f in found.found), found.found


def test_an_unusable_gpu_comes_with_a_fix(tmp_path: Path) -> None:
    assert "--index-url" in XPU.detect(host(tmp_path, B580 | NODE, CPU_BUILD)).fix


def test_the_real_devices_come_from_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from types import SimpleNamespace as New

    listed = [
        New(
            name="Intel(R) Arc(TM) B580 Graphics",
            device_id=0xE20B,
            total_memory=12,
            has_fp64=True,
            driver_version="1.6.3",
        ),
        New(name="Intel(R) Arc(TM) A770 Graphics", total_memory=16, has_fp64=False, driver_version="1.6.3"),
        New(name="Intel(R) Graphics [0xabcd]", device_id=0xABCD, total_memory=1, has_fp64=True, driver_version="1.6.3"),
    ]
    fake = New(device_count=lambda: len(listed), get_device_properties=lambda i: listed[i])
    monkeypatch.setattr(XPU, "module", lambda: fake)
    m = XPU.machine(host(tmp_path, B580 | NODE, BUILD))
    assert [d.arch for d in m.devices] == ["bmg", "acm", "other"]
    assert [("float64" in (d.dtypes or ())) for d in m.devices] == [True, False, True]
    assert m.software["driver"] == "1.6.3"


# ---- decisions

SGL = "sgl-kernel==0.11.0"


@pytest.mark.parametrize(
    ("on", "packages", "call", "kernel"),
    [
        ("b580", SGL, "", "fa/xpu_flash"),
        ("b580", "sgl-kernel-xpu==0.4.0", "", "fa/xpu_flash"),
        ("b580", "sglang-kernel-xpu==0.4.0", "", "fa/xpu_flash"),
        ("b580", "sgl_kernel==0.11.0", "dtype=fp16", "fa/xpu_flash"),
        ("max1550", SGL, "", "fa/xpu_flash"),
        *(("b580", SGL, f"head_dim={d}", "fa/xpu_flash") for d in (64, 96, 128, 192, 256)),
        *(("b580", SGL, f"head_dim={d}", "torch_sdpa/sdpa.fused") for d in (32, 40, 72, 80, 160, 320, 512)),
        ("b580", SGL, "dtype=fp32", "torch_sdpa/sdpa.fused"),
        ("b580", SGL, "causal=true,kv_len=512", "fa/xpu_flash"),
        ("b580", SGL, "kv_heads=1", "fa/xpu_flash"),
        ("b580", SGL, "kv_heads=1,q_len=1,kv_len=512", "torch_sdpa/sdpa.fused"),
        ("b580", SGL, "window=256", "fa/xpu_flash"),
        ("b580", SGL, "varlen=true", "fa/xpu_flash"),
        ("b580", SGL, "lse=true", "fa/xpu_flash"),
        ("b580", SGL, "ring=2", "fa/xpu_flash"),
        ("b580", SGL, "mask=bool", "torch_sdpa/sdpa.fused"),
        ("b580", SGL, "mask=additive", "torch_sdpa/sdpa.fused"),
        ("b580", SGL, "mask=key_padding", "fa/xpu_flash"),  # packed
        ("b580", SGL, "grad=true", "torch_sdpa/sdpa.flash_xpu"),
        ("b580", "", "", "torch_sdpa/sdpa.fused"),
        ("b580", "", "grad=true", "torch_sdpa/sdpa.flash_xpu"),
        ("b580", "", "grad=true,mask=bool,q_len=512", "torch_sdpa/sdpa.math"),
        ("b580", "", "grad=true,head_dim=256,q_len=512", "torch_sdpa/sdpa.math"),
        ("b580", "", "head_dim=640,q_len=512", "torch_sdpa/sdpa.math"),
        ("b580", "", "lse=true,q_len=512", "torch_sdpa/sdpa.math"),
        ("a770", SGL, "", "torch_sdpa/sdpa.fused"),  # its kernels need chips with fp64
        ("a770", "", "grad=true,q_len=512", "torch_sdpa/sdpa.math"),
        ("xpu:lnl", SGL, "", "torch_sdpa/sdpa.fused"),
    ],
)
def test_the_automatic_choice(on: str, packages: str, call: str, kernel: str) -> None:
    assert took(decide(on, call, packages)) == kernel


def test_head_dim_72_is_pytorchs_with_the_advice_to_pad() -> None:
    d = decide("b580", "head_dim=72", SGL)
    assert took(d) == "torch_sdpa/sdpa.fused"
    assert any("head_dim 72 to 96" in a for a in d.advice)
    asked = decide("b580", "head_dim=72", SGL, backend="fa", fit="pad_head_dim")
    assert (took(asked), asked.fittings) == ("fa/xpu_flash", ("pad_head_dim",))


def test_every_reason_at_once() -> None:
    d = decide("a770", "dtype=fp32,head_dim=72,mask=bool,grad=true,dropout=0.1", backend="fa")
    assert not d.chosen
    assert reasons(d, "xpu_flash") >= {"package.absent", "arch", "dtype", "head_dim", "mask.bool", "grad", "dropout"}


def test_the_package_is_advised_with_its_source() -> None:
    assert any("sgl-kernel-xpu" in a for a in decide("b580").advice)


def test_the_math_path_can_be_asked_for() -> None:
    """torch.nn.attention.sdpa_kernel(MATH) had no effect on XPU (torch-xpu-ops#1724); hal writes the path out itself."""
    assert took(decide("b580", "q_len=512", backend="torch_sdpa", kernel="sdpa.math")) == "torch_sdpa/sdpa.math"


@pytest.mark.parametrize(
    ("on", "call", "torch", "kernel", "rule"),
    [
        ("a770", "head_dim=64,mask=bool", "2.13.0", "sdpa.fused", "xpu-sdpa-mask-crash"),
        ("a770", "head_dim=64,causal=true,kv_len=256", "2.14.0", "sdpa.fused", "xpu-sdpa-mask-crash"),
        ("a770", "head_dim=64,window=128:128", "2.14.0", "sdpa.fused", "xpu-sdpa-mask-crash"),
        ("a770", "head_dim=64,mask=bool", "2.15.0", "sdpa.fused", None),
        ("a770", "head_dim=64,mask=bool,q_len=16", "2.13.0", "sdpa.fused", None),
        ("a770", "head_dim=128,mask=bool", "2.13.0", "sdpa.fused", None),
        ("b580", "head_dim=64,mask=bool", "2.13.0", "sdpa.fused", None),
        ("b580", "kv_heads=8,mask=bool,mask_shape=bhqk", "2.13.0", "sdpa.fused", "xpu-sdpa-gqa-head-mask"),
        ("b580", "kv_heads=8,mask=bool,mask_shape=b1qk", "2.13.0", "sdpa.fused", None),
        ("b580", "dtype=fp32,heads=1,q_len=65536", "2.13.0", "sdpa.fused", "xpu-sdpa-large-float32"),
        ("b580", "dtype=bf16,heads=1,q_len=65536", "2.13.0", "sdpa.fused", None),
        ("b580", "head_dim=256", "2.13.0", "sdpa.flash_xpu", "xpu-flash-head-dim"),
        ("b580", "head_dim=256", "2.14.0", "sdpa.flash_xpu", None),
        ("b580", "head_dim=192", "2.12.0", "sdpa.flash_xpu", None),
    ],
)
def test_known_bad(on: str, call: str, torch: str, kernel: str, rule: str | None) -> None:
    found = {r for r in reasons(decide(on, call, torch=torch), kernel) if r.startswith("known_bad")}
    assert found == ({f"known_bad.{rule}"} if rule else set())


def test_pytorchs_flash_path_is_not_taken_before_it_had_a_backward() -> None:
    assert "torch" in reasons(decide("b580", "grad=true", torch="2.10.0"), "sdpa.flash_xpu")


@pytest.mark.parametrize(
    ("on", "torch", "warns"),
    [
        ("max1550", "2.8.0", "xpu-sdpa-nan-pvc"),
        ("max1550", "2.9.0", ""),
        ("b580", "2.13.0", "xpu-sdpa-nan-bmg"),
        ("b580", "2.12.0", ""),
    ],
)
def test_reported_nans_warn(on: str, torch: str, warns: str) -> None:
    d = decide(on, torch=torch)
    assert took(d) == "torch_sdpa/sdpa.fused"
    assert bool(warns) == bool(d.warnings)
    assert warns in "".join(d.warnings)


@pytest.mark.parametrize(
    ("ipex", "torch", "warns"),
    [("2.8.10+xpu", "2.13.0", True), ("2.8.10+xpu", "2.8.0", False), ("2.7.10", "2.8.0", True)],
)
def test_an_ipex_of_another_torch_warns(ipex: str, torch: str, warns: bool) -> None:
    d = decide("a770", packages=f"intel-extension-for-pytorch=={ipex}", torch=torch)
    assert any("ipex" in w for w in d.warnings) == warns


def test_float64_is_no_dtype_of_arc_a() -> None:
    assert "dtype.device" in reasons(decide("a770", "dtype=fp64"), "sdpa.math")
    assert "dtype.device" not in reasons(decide("max1550", "dtype=fp64"), "sdpa.math")


def test_the_presets() -> None:
    assert {n for n, p in catalog().presets.items() if p == "xpu"} == {"max1550", "a770", "b580"}


# ---- the kernel, through a fake with the recorded signature

RECORD = Path(__file__).parent / "signatures" / "sgl_kernel_xpu-0.11.0.json"


def tensors(layout: str = "bshd", sq: int = 20, sk: int = 33, heads: int = 4, kv_heads: int = 2, d: int = 64) -> Any:
    torch = pytest.importorskip("torch")

    torch.manual_seed(0)
    shapes = [(2, sq, heads, d), (2, sk, kv_heads, d), (2, sk, kv_heads, d)]
    made = [torch.randn(s).to(torch.bfloat16) for s in shapes]
    return made if layout == "bshd" else [t.transpose(1, 2) for t in made]


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        ({}, {"causal": False, "window_size": (-1, -1), "max_seqlen_q": 20, "max_seqlen_k": 33}),
        ({"scale": 0.3}, {"softmax_scale": 0.3}),
        ({"is_causal": True}, {"causal": True}),
        ({"window": (5, 2)}, {"window_size": (5, 2)}),
        ({"return_lse": True}, {"return_softmax_lse": True}),
        ({"is_causal": True, "return_lse": True}, {"return_softmax_lse": True, "causal": True}),
    ],
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_what_the_package_is_called_with_and_what_comes_back(
    layout: str, arguments: dict[str, Any], bound: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")

    import hal
    from hal import oracle
    from hal.testing import fakes

    q, k, v = tensors(layout)
    with fakes.installed(RECORD) as fake, on_xpu():
        got = hal.attention(q, k, v, backend="fa", enable_gqa=True, layout=layout, **arguments)
    assert bound.items() <= fake.calls[-1].items()
    assert fake.calls[-1]["q"].shape == (40, 4, 64)
    assert fake.calls[-1]["cu_seqlens_k"].tolist() == [0, 33, 66]
    lse = arguments.get("return_lse", False)
    want, stats = oracle.attention(q, k, v, layout=layout, **{n: x for n, x in arguments.items() if n != "return_lse"})
    torch.testing.assert_close(got[0] if lse else got, want.bfloat16(), atol=2e-2, rtol=2e-2)
    if lse:
        assert got[1].shape == (2, 4, 20)
        assert got[1].dtype is torch.float32
        torch.testing.assert_close(got[1], stats.float(), atol=1e-4, rtol=1e-4)


def test_queries_without_keys_have_no_weight() -> None:
    """The fake writes no LSE for them, as the package does not."""
    torch = pytest.importorskip("torch")

    import hal
    from hal import oracle
    from hal.testing import fakes

    q, k, v = tensors(sq=9, sk=4)
    with fakes.installed(RECORD), on_xpu():
        out, stats = hal.attention(q, k, v, backend="fa", enable_gqa=True, is_causal=True, return_lse=True)
    want, true = oracle.attention(q, k, v, is_causal=True)
    torch.testing.assert_close(stats, true.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out, want.bfloat16(), atol=2e-2, rtol=2e-2)


def test_packed_sequences() -> None:
    torch = pytest.importorskip("torch")

    import hal
    from hal import oracle
    from hal.testing import fakes

    torch.manual_seed(0)
    cu_q, cu_k = torch.tensor([0, 3, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 9, 9], dtype=torch.int32)
    q, k, v = (torch.randn(n, 2, 64).bfloat16() for n in (10, 9, 9))
    with fakes.installed(RECORD) as fake, on_xpu():
        out, stats = hal.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend="fa", return_lse=True)
    assert fake.calls[-1]["cu_seqlens_q"] is cu_q
    want, true = oracle.attention_varlen(q, k, v, cu_q, cu_k)
    torch.testing.assert_close(stats, true.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out, want.bfloat16(), atol=2e-2, rtol=2e-2)


def on_xpu() -> Any:
    """A machine where Intel's kernel is the one that ``fa`` has."""
    from dataclasses import replace

    from hal.backends.fa import BACKEND
    from hal.platforms.xpu.kernels import XPU_FLASH
    from hal.testing import fakes

    return fakes.workbench(replace(BACKEND, kernels=(XPU_FLASH,), known_bad=""), sgl_kernel="0.11.0")


# ---- what only the driver and the package know


def confirm(q: Any, k: Any, v: Any, call: str = "", **returns: Any) -> str | None:
    from hal.facts import Call
    from hal.platforms.xpu.kernels import confirm_flash
    from hal.testing import fakes

    with fakes.installed(RECORD, **returns):
        return confirm_flash(q, k, v, None, Call.parse(["heads=4,kv_heads=2,head_dim=64,q_len=20,kv_len=33", call]))


@pytest.mark.parametrize("call", ["", "lse=true", "lse=true,causal=true", "lse=true,window=1:0", "lse=true,scale=0.5"])
def test_a_good_build_is_confirmed(call: str) -> None:
    assert confirm(*tensors(), call) is None


def test_a_build_is_asked_once_for_each_kind_of_call() -> None:
    from hal.facts import Call
    from hal.platforms.xpu.kernels import confirm_flash
    from hal.testing import fakes

    q, k, v = tensors()
    plain = "heads=4,kv_heads=2,head_dim=64,lse=true"
    with fakes.installed(RECORD) as fake:
        runs = []
        for call in ("q_len=20,kv_len=33", "q_len=40,kv_len=33", "q_len=20,kv_len=33,causal=true"):
            assert confirm_flash(q, k, v, None, Call.parse([plain, call])) is None
            runs.append(len(fake.calls))
    assert runs == [1, 1, 2]


def test_a_build_that_writes_no_lse_is_found_out() -> None:
    """sgl-kernel-xpu before PR#330: (out, torch.empty(...))."""
    torch = pytest.importorskip("torch")

    def unwritten(a: dict[str, Any]) -> Any:
        out = torch.zeros_like(a["q"])
        return (out, torch.full((a["q"].shape[1], a["q"].shape[0]), 7.0)) if a["return_softmax_lse"] else out

    compute = {"flash_attn_varlen_func": unwritten}
    assert confirm(*tensors(), "", compute=compute) is None
    assert "PR#330" in (confirm(*tensors(), "lse=true", compute=compute) or "")


def test_a_build_that_refuses_the_lse_is_told_in_its_own_words() -> None:
    def refuses(a: dict[str, Any]) -> Any:
        raise RuntimeError("softmax_lse is not supported with causal")

    assert "not supported with causal" in (
        confirm(*tensors(), "lse=true", compute={"flash_attn_varlen_func": refuses}) or ""
    )


def test_an_lse_in_base_two_is_found_out() -> None:
    torch = pytest.importorskip("torch")

    def base_two(a: dict[str, Any]) -> Any:
        n = a["q"].shape[0]
        return torch.zeros_like(a["q"]), torch.full((1, n), 3.0).log2()

    assert "wrong LSE" in (confirm(*tensors(), "lse=true", compute={"flash_attn_varlen_func": base_two}) or "")


def test_rows_that_do_not_begin_at_16_bytes_are_refused() -> None:
    torch = pytest.importorskip("torch")

    q, k, v = tensors()
    odd = torch.randn(2 * 20 * 4 * 65).bfloat16().view(2, 20, 4, 65)[..., :64]
    assert "q.contiguous()" in (confirm(odd, k, v) or "")
    shifted = torch.randn(2 * 33 * 2 * 64 + 1).bfloat16()[1:].view(2, 33, 2, 64)
    assert "k.contiguous()" in (confirm(q, shifted, v) or "")
