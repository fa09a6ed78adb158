"""Ascend NPUs: PyTorch's SDPA, and Ascend's own kernel for ring attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated import NPU, catalog, decide, host, reasons, took

from hal.errors import FactError

# ---- architectures


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("910b", "ascend910b"),
        ("Ascend910B3", "ascend910b"),
        ("Ascend910B4-1", "ascend910b"),
        ("Ascend910B2C", "ascend910b"),
        ("ascend910b", "ascend910b"),
        ("A2", "ascend910b"),
        ("910C", "ascend910c"),
        ("Ascend910_93", "ascend910c"),
        ("Ascend910_9391", "ascend910c"),
        ("A3", "ascend910c"),
        ("310P", "ascend310p"),
        ("Ascend310P3", "ascend310p"),
        ("Ascend310B1", "ascend310b"),
        ("Ascend910A", "ascend910"),
        ("Ascend910ProB", "ascend910"),
        ("910", "ascend910"),
        (910, "ascend910"),
        ("Ascend950PR_9599", "ascend950"),
        ("A5", "ascend950"),
        ("Huawei Ascend 910B3", "ascend910b"),
    ],
)
def test_every_form_of_an_architecture(text: Any, arch: str) -> None:
    assert NPU.parse_arch(text) == arch


@pytest.mark.parametrize("text", ["", "ascend", "910d", "910b9", "310", "sm90", "A4", None])
def test_a_bad_architecture_is_quoted_with_the_forms(text: Any) -> None:
    with pytest.raises(FactError, match="Ascend910B3") as e:
        NPU.parse_arch(text)
    assert repr(text) in str(e.value)


# ---- detection

CARDS = {"/dev/davinci0": "", "/dev/davinci1": "", "/dev/davinci_manager": ""}
MANAGER = {"/dev/davinci_manager": ""}
CANN = {"/usr/local/Ascend/latest/lib64/libascendcl.so": ""}
HOME = {"ASCEND_HOME_PATH": "/usr/local/Ascend/latest"}
LIBRARY = {"LD_LIBRARY_PATH": "/usr/local/Ascend/latest/lib64"}
PLUGIN = ("torch_npu",)
BUILD = {"__version__": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("files", "torch", "modules", "env", "state", "words", "fix"),
    [
        (CARDS | CANN, BUILD, PLUGIN, HOME, "present", "/dev/davinci0, /dev/davinci1: 2 Ascend NPUs", ""),
        (CARDS | CANN, BUILD, PLUGIN, LIBRARY, "present", "CANN is at", ""),
        (
            CARDS | CANN,
            BUILD,
            PLUGIN,
            HOME | {"ASCEND_RT_VISIBLE_DEVICES": "1"},
            "present",
            "torch_npu is installed",
            "",
        ),
        (CARDS | CANN, BUILD, PLUGIN, HOME | {"ASCEND_RT_VISIBLE_DEVICES": ""}, "hidden", "hides every NPU", "unset"),
        (CARDS | CANN, BUILD, PLUGIN, HOME | {"ASCEND_RT_VISIBLE_DEVICES": "-1"}, "hidden", "hides every NPU", "unset"),
        (CARDS | CANN, BUILD, PLUGIN, {}, "unusable", "CANN is not set up", "set_env.sh"),
        (CARDS | CANN, BUILD, (), HOME, "unusable", "torch_npu is not installed", '"torch-npu==2.13.*"'),
        (CARDS | CANN, None, PLUGIN, HOME, "unusable", "torch is not installed", "pip install torch torch-npu"),
        ({}, BUILD, PLUGIN, {}, "unusable", "makes `import torch` fail", "set TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        (MANAGER, BUILD, PLUGIN, {}, "unusable", "no Ascend NPU is here", "pip uninstall torch-npu"),
        ({}, BUILD, (), {}, "absent", "neither torch_npu nor an NPU", ""),
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
    fix: str,
) -> None:
    found = NPU.detect(host(tmp_path, files, torch, modules, **env))
    assert found.state == state
    assert any(words in f for f in found.found), found.found
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


def test_the_real_devices_come_from_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from types import SimpleNamespace as New

    listed = [
        New(name="Ascend910B3", total_memory=64),
        New(name="Ascend310P3", total_memory=24),
        New(name="AscendX", total_memory=1),
    ]
    fake = New(device_count=lambda: len(listed), get_device_properties=lambda i: listed[i])
    monkeypatch.setattr(NPU, "module", lambda: fake)
    info = {"/usr/local/Ascend/latest/aarch64-linux/ascend_toolkit_install.info": "package_name=x\nversion=9.0.0\n"}
    m = NPU.machine(host(tmp_path, CARDS | CANN | info, BUILD, PLUGIN, **HOME))
    assert [d.arch for d in m.devices] == ["ascend910b", "ascend310p", "other"]
    assert ["bfloat16" in (d.dtypes or ()) for d in m.devices] == [True, False, True]
    assert m.software["cann"] == "9.0.0"


def test_a_torch_npu_that_cannot_be_imported_keeps_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from hal.errors import PlatformError

    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(PlatformError, match=r"set_env\.sh"):
        NPU.module()


# ---- decisions


@pytest.mark.parametrize(
    ("on", "call", "kernel"),
    [
        *((p, "", "torch_sdpa/sdpa.fused") for p in ("910b", "910c")),
        *((p, "ring=2", "fa/ascend_fa") for p in ("910b", "910c")),
        ("910b", "ring=4,causal=true", "fa/ascend_fa"),
        ("910b", "lse=true", "fa/ascend_fa"),
        ("910b", "ulysses=2", "torch_sdpa/sdpa.fused"),
        ("910b", "dtype=fp32", "torch_sdpa/sdpa.fused"),
        ("910b", "dtype=fp32,ring=2,q_len=512", "torch_sdpa/sdpa.math"),
        ("910b", "head_dim=72", "torch_sdpa/sdpa.fused"),
        ("910b", "causal=true", "torch_sdpa/sdpa.fused"),
        ("910b", "causal=true,kv_len=512", "torch_sdpa/sdpa.fused"),
        ("910b", "grad=true", "torch_sdpa/sdpa.fused"),
        ("910b", "mask=bool", "torch_sdpa/sdpa.fused"),
        ("910b", "mask=bool,mask_shape=bhqk", "torch_sdpa/sdpa.fused"),
        ("910b", "mask=additive,q_len=512", "torch_sdpa/sdpa.math"),
        ("910b", "head_dim=640,q_len=512", "torch_sdpa/sdpa.math"),
        ("npu:310p", "dtype=fp16,q_len=512", "torch_sdpa/sdpa.math"),
        ("npu:a5", "", "torch_sdpa/sdpa.fused"),
    ],
)
def test_the_automatic_choice(on: str, call: str, kernel: str) -> None:
    assert took(decide(on, call)) == kernel


def test_nothing_more_needs_to_be_installed_for_fa() -> None:
    d = decide("910b", backend="fa")
    assert took(d) == "fa/ascend_fa"
    assert catalog().machine("910b").packages["torch_npu"].available


def test_without_torch_npu_it_is_refused_with_the_fix() -> None:
    from hal.facts import Call
    from hal.policy import Policy, Request
    from hal.resolver import resolve

    m = catalog().machine("910b").with_packages({"torch-npu": None})
    d = resolve(Call.of(dtype="bf16", head_dim=128), m, catalog(), Policy((Request("fa"),)))
    assert "package.absent" in (d.error or "")
    assert "pip install torch-npu" in (d.error or "")


@pytest.mark.parametrize("shape", ["b11k", "111k", "11qk", "b1qk", "bhqk", "bh1k", "1h1k", "1hqk"])
def test_pytorch_gets_the_mask_shapes_that_it_takes(shape: str) -> None:
    """vllm-omni#845: a [B, Sk] mask broke NPU SDPA."""
    d = decide("910b", f"mask=bool,mask_shape={shape}")
    assert took(d) == "torch_sdpa/sdpa.fused"
    assert d.fittings == (() if shape in ("11qk", "b1qk", "bhqk") else ("mask_shape",))
    assert d.fitted[-1].mask_shape in ("11qk", "b1qk", "bhqk")


def test_key_padding_is_expanded_for_both() -> None:
    for d in (decide("910b", "mask=key_padding"), decide("910b", "mask=key_padding", backend="fa")):
        assert d.fittings == ("mask_shape",)
        assert d.fitted[-1].mask_shape == "b1qk"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("dtype=fp32", "dtype"),
        ("head_dim=72", "head_dim"),
        ("head_dim=528", "head_dim"),
        ("v_head_dim=64", "v_head_dim"),
        ("mask=additive", "mask.additive"),
        ("mask=bool,mask_shape=bhqk", "mask_shape"),
        ("window=128", "window"),
        ("grad=true", "grad"),
        ("dropout=0.1", "dropout"),
        ("deterministic=true", "deterministic"),
        ("heads=512", "heads"),
        ("heads=128,kv_heads=1", "gqa.group.1"),
        ("varlen=true,graph=true", "varlen.graph"),
        ("q_len=1,kv_len=1024,mask=bool", "known_bad.npu-fia-single-query-mask"),
    ],
)
def test_what_fa_refuses_and_why(call: str, reason: str) -> None:
    assert reason in reasons(decide("910b", call, backend="fa"), "ascend_fa")


def test_an_argument_of_fa_is_honoured_or_refused() -> None:
    """Golden case 22: causal on NPU."""
    assert took(decide("910b", "causal=true,kv_len=100,kv_heads=8", backend="fa")) == "fa/ascend_fa"


def test_a_chip_without_the_operator_is_refused() -> None:
    assert "arch" in reasons(decide("npu:310p", "dtype=fp16", backend="fa"), "ascend_fa")


def test_bfloat16_needs_a_910b() -> None:
    assert "dtype.device" in reasons(decide("npu:910", "q_len=512"), "sdpa.math")


@pytest.mark.parametrize(
    ("call", "backend", "warns"),
    [
        ("varlen=true", "fa", "npu-fia-packed-uniform"),
        ("ulysses=2", "", "npu-sdpa-ulysses"),
        ("", "", ""),
        ("", "fa", ""),
    ],
)
def test_reported_trouble_warns(call: str, backend: str, warns: str) -> None:
    d = decide("910b", call, backend=backend)
    assert d.chosen
    assert bool(d.warnings) == bool(warns)
    assert warns in "".join(d.warnings)


# ---- the kernel, through a fake operator with the recorded signature

RECORD = Path(__file__).parent / "signatures" / "torch_npu-2.13.0.json"


def fused_infer(a: dict[str, Any]) -> Any:
    """What the operator's documentation says, computed in float64.  Rows without keys come back as NaN."""
    torch = pytest.importorskip("torch")

    from hal import oracle

    q, k, v, mask = a["query"], a["key"], a["value"], a["atten_mask"]
    assert all(t.is_contiguous() for t in (q, k, v)), "inputs must be contiguous"
    packed = a["input_layout"] == "TND"
    assert packed or a["input_layout"] == "BNSD"
    heads = 1
    assert (a["num_heads"], a["num_key_value_heads"]) == (q.shape[heads], k.shape[heads])
    if packed:
        assert q.shape[2] in (128, 192), "TND takes head_dim 128 and 192"
        ends_q, ends_k = a["actual_seq_lengths"], a["actual_seq_lengths_kv"]
        assert (ends_q[-1], ends_k[-1]) == (q.shape[0], k.shape[0]), "cumulative, without the leading 0"
        cu_q, cu_k = (torch.tensor([0, *ends], dtype=torch.int32) for ends in (ends_q, ends_k))
        out, lse = oracle.attention_varlen(q, k, v, cu_q, cu_k, scale=a["scale"])
        lse = lse.transpose(0, 1)
    else:
        b, _, sq, sk = q.shape[0], 0, q.shape[2], k.shape[2]
        keep = None
        if a["sparse_mode"] == 3:
            assert (
                sq > 1
                and mask.shape == (2048, 2048)
                and bool(mask.triu(1).equal(mask))
                and mask[0, 1]
                and not mask[1, 0]
            )
            keep = torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq)[None, None]
        elif mask is not None:
            assert mask.dtype is torch.bool and mask.is_contiguous()
            assert mask.shape in ((b, 1, sq, sk), (1, 1, sq, sk)), mask.shape
            assert a["inner_precise"] == (2 if sq > 1 else 0)
            keep = ~mask
        out, lse = oracle.attention(q, k, v, attn_mask=keep, scale=a["scale"], layout="bhsd")
    none = lse == -torch.inf
    out, lse = out.masked_fill(none[..., None], torch.nan).to(q.dtype), lse.masked_fill(none, torch.nan).float()
    return out, lse[..., None] if a["softmax_lse_flag"] else torch.zeros(1)


@pytest.fixture
def fia(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The faked operator, and a machine where Ascend's kernel is the one that ``fa`` has."""
    from dataclasses import replace

    from hal.backends.fa import BACKEND
    from hal.platforms.npu import kernels
    from hal.testing import fakes

    fake = fakes.of(RECORD, {"npu_fused_infer_attention_score": fused_infer})
    monkeypatch.setattr(kernels, "operator", lambda: fake.functions["npu_fused_infer_attention_score"])
    with fakes.workbench(replace(BACKEND, kernels=(kernels.ASCEND_FA,), known_bad=""), torch_npu="2.13.0"):
        yield fake


def tensors(sq: int, sk: int, heads: int = 4, kv_heads: int = 2, d: int = 64) -> Any:
    torch = pytest.importorskip("torch")

    torch.manual_seed(0)
    return [torch.randn(2, n, h, d).bfloat16() for n, h in ((sq, heads), (sk, kv_heads), (sk, kv_heads))]


@pytest.mark.parametrize(("sq", "sk"), [(20, 33), (33, 20), (1, 33), (7, 7)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask", ["none", "b1qk", "11qk", "b11k"])
def test_what_the_operator_is_called_with_and_what_comes_back(
    fia: Any, sq: int, sk: int, causal: bool, lse: bool, scale: float | None, mask: str
) -> None:
    torch = pytest.importorskip("torch")

    import hal
    from hal import oracle

    q, k, v = tensors(sq, sk)
    shapes = {"b1qk": (2, 1, sq, sk), "11qk": (1, 1, sq, sk), "b11k": (2, 1, 1, sk)}
    keep = torch.rand(shapes[mask]) < 0.6 if mask != "none" else None
    if keep is not None:
        keep[..., 0, :] = False  # a row without keys
    got = hal.attention(
        q, k, v, attn_mask=keep, is_causal=causal, scale=scale, enable_gqa=True, return_lse=lse, backend="fa"
    )
    want, stats = oracle.attention(q, k, v, attn_mask=keep, is_causal=causal, scale=scale)
    torch.testing.assert_close(got[0] if lse else got, want.bfloat16(), atol=2e-2, rtol=2e-2)
    if lse:
        assert got[1].shape == (2, 4, sq)
        torch.testing.assert_close(got[1], stats.float(), atol=1e-4, rtol=1e-4)
    call = fia.calls[-1]
    assert call["scale"] == (0.125 if scale is None else scale)
    assert call["num_key_value_heads"] == 2
    assert call.get("sparse_mode", 0) == (3 if causal and sq > 1 and mask == "none" else 0)


def test_no_keys_and_no_queries_call_nothing(fia: Any) -> None:
    torch = pytest.importorskip("torch")

    import hal

    q, k, v = tensors(5, 0)
    out, stats = hal.attention(q, k, v, enable_gqa=True, return_lse=True, backend="fa")
    assert not out.any()
    assert bool((stats == -torch.inf).all())
    q, k, v = tensors(0, 5)
    assert hal.attention(q, k, v, enable_gqa=True, backend="fa").shape == (2, 0, 4, 64)
    assert not fia.calls


@pytest.mark.parametrize(
    ("d", "causal", "ends_q", "ends_k", "layouts"),
    [
        (128, False, [4, 9, 20], [6, 11, 30], ["TND"]),
        (192, False, [20], [30], ["TND"]),
        (64, False, [4, 9, 20], [6, 11, 30], ["BNSD"] * 3),  # TND does not take this head_dim
        (128, True, [4, 9, 20], [6, 11, 30], ["BNSD"] * 3),
        (128, False, [4, 4, 20], [6, 11, 30], ["BNSD"] * 2),  # no query in the second sequence
        (128, False, [4, 9, 20], [6, 6, 30], ["BNSD"] * 2),  # no key in the second
        (128, False, [4, 4, 20], [6, 6, 30], ["BNSD"] * 2),
    ],
)
@pytest.mark.parametrize("lse", [False, True])
def test_packed_sequences(
    fia: Any, d: int, causal: bool, ends_q: list[int], ends_k: list[int], layouts: list[str], lse: bool
) -> None:
    torch = pytest.importorskip("torch")

    import hal
    from hal import oracle

    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, d).bfloat16() for n, h in ((20, 4), (30, 2), (30, 2)))
    cu_q, cu_k = (torch.tensor([0, *ends], dtype=torch.int32) for ends in (ends_q, ends_k))
    got = hal.attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_causal=causal, enable_gqa=True, return_lse=lse, backend="fa"
    )
    want, stats = oracle.attention_varlen(q, k, v, cu_q, cu_k, is_causal=causal)
    torch.testing.assert_close(got[0] if lse else got, want.bfloat16(), atol=2e-2, rtol=2e-2)
    if lse:
        assert got[1].shape == (4, 20)
        torch.testing.assert_close(got[1], stats.float(), atol=1e-4, rtol=1e-4)
    assert [c["input_layout"] for c in fia.calls] == layouts
    if layouts == ["TND"]:
        assert fia.calls[-1]["actual_seq_lengths"] == ends_q
