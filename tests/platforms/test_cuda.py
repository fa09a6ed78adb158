"""NVIDIA GPUs: how architectures are written, what is detected, and what runs where."""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvidia_amd import candidate, catalog, decide, fake_torch, reasons, took
from simulated import host

from hal.errors import FactError, PlatformError
from hal.facts import Call, Device, Machine
from hal.host import visible_devices
from hal.platforms.cuda import PLATFORM as CUDA
from hal.platforms.cuda.detection import driver
from hal.resolver import resolve
from hal.rules import Rule

# ---- architectures

WRITTEN = {
    "sm75": ["sm75", "SM_75", "7.5", "75", "compute_75", "(7, 5)", (7, 5), [7, 5], 7.5, 75],
    "sm90": [
        "sm90",
        "sm_90",
        "sm_90a",
        "sm90a",
        "9.0",
        "90",
        "90a",
        "compute_90",
        "compute_90a",
        "cc 9.0",
        (9, 0),
        9.0,
    ],
    "sm100": ["sm100", "sm_100f", "10.0", "100", (10, 0)],
    "sm103": ["sm_103a", "10.3", "103"],
    "sm107": ["sm107", "10.7"],
    "sm110": ["sm110", "11.0", "sm_101a"],  # Thor's name before CUDA 13 was sm_101
    "sm120": ["sm120", "120", "12.0", "(12, 0)", "12,0", (12, 0), "sm_120f"],
    "sm121": ["sm_121", "12.1", (12, 1)],
}
WRONG = [
    "",
    "sm",
    "9",
    "12",
    "h100",
    "sm_9x",
    "9.0.1",
    "gfx942",
    "-9.0",
    "sm900",
    "1.2",
    None,
    True,
    (9,),
    "sm90b",
    "0.9",
]


@pytest.mark.parametrize("arch, text", [(a, t) for a, texts in WRITTEN.items() for t in texts])
def test_every_form_of_an_architecture_is_read(arch: str, text: Any) -> None:
    assert CUDA.parse_arch(text) == arch


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_architecture_is_refused_with_the_forms(text: Any) -> None:
    with pytest.raises(FactError) as e:
        CUDA.parse_arch(text)
    assert repr(text) in str(e.value) and "sm_90a" in str(e.value) and "(12, 0)" in str(e.value)


@given(st.integers(5, 20), st.integers(0, 9), st.sampled_from(["", "a", "f"]))
def test_all_spellings_of_a_capability_agree(major: int, minor: int, suffix: str) -> None:
    forms = [f"sm{major}{minor}{suffix}", f"sm_{major}{minor}{suffix}", f"{major}.{minor}", f"({major}, {minor})"]
    assert len({CUDA.parse_arch(f) for f in [*forms, (major, minor)]}) == 1


@given(st.text(max_size=12))
def test_any_text_is_an_architecture_or_an_error(text: str) -> None:
    try:
        assert CUDA.parse_arch(CUDA.parse_arch(text)) == CUDA.parse_arch(text)
    except FactError as e:
        assert repr(text) in str(e)


def test_rows_and_rules_name_architectures_in_the_one_spelling() -> None:
    named = {a for rows in CUDA.support.values() for r in rows for a in r.on or ()}
    named |= {a for p in CUDA.order for a in p.when.get("arch", ())}
    rules = [r for rows in CUDA.support.values() for row in rows for r in row.rules]
    rules += [k.rule for k in catalog().known_bad if k.platform == "cuda"]
    named |= {a for r in rules if isinstance(r, Rule) for a in r.when.get("arch", ())}
    assert named == {CUDA.parse_arch(a) for a in named}
    assert all(CUDA.family(a) for a in named)


# ---- visible devices

VISIBLE = [
    (None, None),
    ("", ()),
    ("-1", ()),
    ("0", (0,)),
    ("0,1", (0, 1)),
    (" 1 , 0 ", (1, 0)),
    ("2,-1,0", (2,)),
    ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",)),
    ("GPU-8932f937,GPU-7a1b", ("GPU-8932f937", "GPU-7a1b")),
    ("MIG-GPU-5c89852c/1/0", ("MIG-GPU-5c89852c/1/0",)),
    ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",)),
]


@pytest.mark.parametrize("text, expected", VISIBLE)
def test_every_form_of_a_visible_device_variable_is_read(text: str | None, expected: Any) -> None:
    assert visible_devices(text) == expected


# ---- detection

DRIVER = "/proc/driver/nvidia/version"
NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Apr 24 16:58:25 UTC 2025\nGCC version:  gcc 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\n"
HERE = {"/dev/nvidiactl": "", "/dev/nvidia0": "", DRIVER: NVRM.format("580.95.05")}
BUILD = {"__version__": "2.13.0+cu130", "cuda": "13.0"}
OLD = HERE | {DRIVER: NVRM.format("535.104.05")}

DETECTED = [
    # files, torch build, environment, state, words that are said
    (HERE, BUILD, {}, "present", ["built for CUDA 13.0", "/dev/nvidiactl exists", "driver 580.95.05"]),
    (HERE, BUILD, {"CUDA_VISIBLE_DEVICES": "1,MIG-x"}, "present", ["CUDA_VISIBLE_DEVICES shows 1, MIG-x"]),
    (HERE, BUILD, {"CUDA_VISIBLE_DEVICES": ""}, "hidden", ["CUDA_VISIBLE_DEVICES='' hides every device"]),
    (HERE, BUILD, {"CUDA_VISIBLE_DEVICES": "-1"}, "hidden", ["CUDA_VISIBLE_DEVICES='-1' hides every device"]),
    (OLD, BUILD, {}, "unusable", ["driver 535.104.05 is too old for CUDA 13.0", "580 or newer"]),
    (OLD, {"cuda": "12.6"}, {}, "present", ["driver 535.104.05"]),
    (OLD | {"/usr/local/cuda-13.0/compat/libcuda.so.1": ""}, BUILD, {}, "present", ["compatibility libraries"]),
    (
        HERE,
        {"__version__": "2.13.0+cpu"},
        {},
        "unusable",
        ["built for no NVIDIA", "this PyTorch cannot use NVIDIA GPUs"],
    ),
    (HERE, {"hip": "7.2"}, {}, "unusable", ["built for ROCm 7.2", "this PyTorch cannot use NVIDIA GPUs"]),
    (HERE, None, {}, "unusable", ["torch is not installed", "/dev/nvidia0 exists"]),
    ({}, BUILD, {}, "absent", ["built for CUDA 13.0", "no NVIDIA device"]),
    ({}, BUILD, {"CUDA_VISIBLE_DEVICES": ""}, "absent", ["no NVIDIA device"]),
    ({}, {"__version__": "2.13.0+cpu"}, {}, "absent", ["no NVIDIA device"]),
    ({}, None, {}, "absent", ["torch is not installed", "no NVIDIA device"]),
    ({"/dev/nvhost-gpu": ""}, {"cuda": "12.6"}, {}, "present", ["/dev/nvhost-gpu exists"]),
    ({"/dev/dxg": "", "/usr/lib/wsl/lib/libcuda.so.1": ""}, BUILD, {}, "present", ["WSL"]),
    ({"/dev/dxg": ""}, BUILD, {}, "absent", ["no NVIDIA device"]),
]


@pytest.mark.parametrize("files, build, env, state, words", DETECTED)
def test_detection_tells_each_state_in_its_own_words(
    tmp_path: Path,
    files: dict[str, str],
    build: dict[str, str] | None,
    env: dict[str, str],
    state: str,
    words: list[str],
) -> None:
    d = CUDA.detect(host(tmp_path, files, build, **env))
    assert (d.platform, d.state) == ("cuda", state)
    for w in words:
        assert w in "; ".join(d.found)
    assert bool(d.fix) == (state in ("hidden", "unusable"))


def test_a_windows_driver_is_found_by_its_library(tmp_path: Path) -> None:
    h = host(tmp_path, {"/Windows/System32/nvcuda.dll": ""}, BUILD)
    assert CUDA.detect(h).state == "absent"
    h.system = "win32"
    assert CUDA.detect(h).state == "present"


@pytest.mark.parametrize("text", [NVRM, OPEN])
def test_both_kernel_modules_tell_the_driver_version(tmp_path: Path, text: str) -> None:
    assert driver(host(tmp_path, {DRIVER: text.format("570.86.10")})) == "570.86.10"


# ---- the devices that are here

H100 = {
    "major": 9,
    "minor": 0,
    "name": "NVIDIA H100",
    "total_memory": 80 << 30,
    "shared_memory_per_block_optin": 232448,
}
RTX = {"major": 12, "minor": 0, "name": "RTX 5090", "total_memory": 32 << 30}


def test_devices_and_software_are_those_that_torch_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch([H100, RTX], "2.13.0+cu130", cuda="13.0"))  # type: ignore[arg-type]
    m = CUDA.machine(host(tmp_path, HERE, BUILD))
    assert [(d.index, d.arch, d.name, d.memory, d.shared_memory) for d in m.devices] == [
        (0, "sm90", "NVIDIA H100", 80 << 30, 232448),
        (1, "sm120", "RTX 5090", 32 << 30, 99 << 10),
    ]
    assert m.software["torch"] == "2.13.0+cu130" and m.software["runtime"] == "13.0"
    assert m.software["driver"] == "580.95.05" and m.software["cudnn"] == "9.20.0"
    assert Machine.from_json(m.to_json()).device(1).name == "RTX 5090"


def test_a_machine_without_devices_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch([], "2.13.0+cu130", cuda="13.0"))  # type: ignore[arg-type]
    with pytest.raises(PlatformError, match="CUDA_VISIBLE_DEVICES='' hides every device; unset CUDA_VISIBLE_DEVICES"):
        CUDA.machine(host(tmp_path, HERE, BUILD, CUDA_VISIBLE_DEVICES=""))


def test_a_cpu_build_of_torch_is_an_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch([], "2.13.0+cpu"))  # type: ignore[arg-type]
    with pytest.raises(PlatformError, match=r"built for no NVIDIA.*pip install torch .*whl/cu"):
        CUDA.machine(host(tmp_path, HERE, {"__version__": "2.13.0+cpu"}))


# ---- presets

PRESETS = {
    "t4": "sm75", "v100": "sm70", "a100": "sm80", "l40s": "sm89", "orin": "sm87", "rtx3090": "sm86", "rtx4090": "sm89",
    "rtx5090": "sm120", "rtxpro6000": "sm120", "h100": "sm90", "h200": "sm90", "h20": "sm90", "b200": "sm100",
    "b300": "sm103", "gb10": "sm121",
}  # fmt: skip


def test_presets_are_the_machines_that_people_know() -> None:
    assert {n: CUDA.preset(n).device().arch for n in CUDA.presets} == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_current_torch_and_no_optional_package(name: str) -> None:
    m = CUDA.preset(name)
    assert m.software["torch"].startswith("2.13.0") and set(m.packages) == {"triton"}  # type: ignore[union-attr]
    assert m.device().memory and m.device().shared_memory and m.device().name
    assert m.origin == f"preset {name}"


# ---- what runs

FA2, FA3, FA4 = "flash-attn==2.8.3", "flash_attn_3==3.0.0", "flash-attn-4==4.0.0b36"
CUDNN, FLASH, EFFICIENT, MATH = (
    "torch_cudnn_sdpa/sdpa.cudnn",
    *(f"torch_sdpa/sdpa.{k}" for k in ("flash", "efficient", "math")),
)

AUTOMATIC = [
    # machine, call, packages, what runs
    ("a100", "", "", FLASH),
    ("a100", "", FA2, "fa/fa2"),
    ("a100", "", FA3, "fa/fa3"),
    ("a100", "", f"{FA2} {FA3}", "fa/fa2"),  # FA3 has no more than its SM80 main loop here
    ("a100", "", FA4, "fa/fa4"),
    ("a100", "grad=true", FA4, FLASH),
    ("a100", "dtype=fp32", FA2, EFFICIENT),
    ("a100", "dtype=fp64", FA2, MATH),
    ("a100", "mask=bool", FA2, EFFICIENT),
    ("a100", "head_dim=72", FA2, FLASH),
    ("a100", "head_dim=512", FA2, EFFICIENT),
    ("rtx3090", "", FA2, "fa/fa2"),
    ("rtx3090", "head_dim=256", FA4, FLASH),
    ("rtx4090", "", FA2, "fa/fa2"),
    ("l40s", "dtype=fp16", FA2, "fa/fa2"),
    ("rtx4090", "head_dim=224,grad=true", "", EFFICIENT),
    ("rtx4090", "head_dim=256,grad=true", "", FLASH),
    ("rtx4090", "head_dim=256,grad=true,dropout=0.1", "", EFFICIENT),
    ("orin", "", "", FLASH),
    ("orin", "", FA2, FLASH),
    ("h100", "", "", FLASH),
    ("h100", "", FA2, "fa/fa2"),
    ("h100", "", FA3, "fa/fa3"),
    ("h100", "", f"{FA2} {FA3} {FA4}", "fa/fa3"),
    ("h100", "", "sglang-kernel==0.4.10", "fa/fa3.sgl"),
    ("h100", "dropout=0.1", f"{FA2} {FA3}", "fa/fa2"),
    ("h100", "dtype=fp32", FA3, EFFICIENT),
    ("h200", "", FA3, "fa/fa3"),
    ("h20", "", FA3, "fa/fa3"),
    ("b200", "", "", CUDNN),
    ("b200", "", FA4, CUDNN),
    ("b200", "", FA2, CUDNN),
    ("b200", "dtype=fp32", FA4, EFFICIENT),
    ("b200", "causal=true", FA4, "fa/fa4"),
    ("b200", "causal=true", FA2, FLASH),  # FA2 has no row on Blackwell
    ("b200", "lse=true", FA4, "fa/fa4"),
    ("b200", "ring=2", FA4, "fa/fa4"),  # partial results are merged by their LSE
    ("b200", "mask=bool", FA4, EFFICIENT),
    ("b200", "kv_heads=8", FA4, "fa/fa4"),
    ("b200", "head_dim=256", FA4, "fa/fa4"),
    ("b200", "head_dim=160", FA4, FLASH),
    ("b200", "head_dim=192,v_head_dim=128,causal=true", FA4, "fa/fa4"),
    ("b300", "", FA4, CUDNN),
    ("b300", "q_len=32768", FA4, "fa/fa4"),
    ("b300", "q_len=32768", "", CUDNN),  # behind FA4, and before PyTorch's flash path
    ("b300", "q_len=32768,head_dim=64", FA4, CUDNN),
    ("b300", "q_len=32768,kv_len=512", FA4, CUDNN),
    ("rtx5090", "", "", FLASH),
    ("rtx5090", "", f"{FA2} {FA3} {FA4}", FLASH),
    ("rtxpro6000", "", FA4, FLASH),
    ("gb10", "", FA4, FLASH),
    ("t4", "dtype=fp16", FA2, EFFICIENT),
    ("t4", "dtype=bf16", FA2, MATH),
    ("t4", "dtype=fp32", "", EFFICIENT),
    ("v100", "dtype=fp16", FA2, EFFICIENT),
    ("cuda:11.0", "", "", FLASH),
    ("cuda:10.7", "", "", FLASH),
    ("cuda:6.1", "dtype=fp16", "", EFFICIENT),
    ("cuda:13.0", "", f"{FA2} {FA3} {FA4}", MATH),  # nobody has said that anything runs there
]


@pytest.mark.parametrize("on, call, packages, expected", AUTOMATIC)
def test_automatic_choice(on: str, call: str, packages: str, expected: str) -> None:
    assert took(decide(on, call, packages)) == expected


REQUESTED = [
    # machine, call, packages, backend, kernel, what runs
    ("rtx5090", "", FA4, "fa", "", "fa/fa4"),
    ("gb10", "head_dim=64", FA4, "fa", "", "fa/fa4"),
    ("rtx5090", "head_dim=256", FA4, "fa", "", "nothing"),
    ("rtx5090", "", FA2, "fa", "", "nothing"),
    ("rtx5090", "", "", "torch_cudnn_sdpa", "", CUDNN),
    ("orin", "", FA2, "fa", "", "fa/fa2"),
    ("t4", "dtype=fp16", FA2, "fa", "", "nothing"),
    ("t4", "dtype=fp16", "", "torch_cudnn_sdpa", "", "nothing"),
    ("h100", "", "", "torch_cudnn_sdpa", "", CUDNN),
    ("h100", "head_dim=192,v_head_dim=128", "", "torch_cudnn_sdpa", "", CUDNN),
    ("a100", "head_dim=192,v_head_dim=128", "", "torch_cudnn_sdpa", "", "nothing"),
    ("h100", "", f"{FA2} {FA3}", "fa", "fa2", "fa/fa2"),
    ("h100", "", FA4, "fa", "", "fa/fa4"),
    ("h100", "", "", "aiter", "", "nothing"),
    ("a100", "", FA2, "torch_sdpa", "", FLASH),
    ("a100", "head_dim=192,v_head_dim=128", FA3, "fa", "", "nothing"),
]


@pytest.mark.parametrize("on, call, packages, backend, kernel, expected", REQUESTED)
def test_requests_are_served_as_asked_or_refused(
    on: str, call: str, packages: str, backend: str, kernel: str, expected: str
) -> None:
    d = decide(on, call, packages, backend, kernel)
    assert took(d) == expected
    assert (d.error is None) == (expected != "nothing")


# ---- why not: the handed golden cases, by their number


def test_3_and_C1_an_old_fa2_on_sm120_fails_by_arch_and_by_version() -> None:
    d = decide("rtx5090", packages="flash-attn==2.7.2")
    assert took(d) == FLASH
    assert reasons(d, "fa2") == {"arch", "known_bad.fa2.blackwell"}
    assert {r.observed for r in candidate(d, "fa2").reasons if r.id == "arch"} == {"sm120"}


@pytest.mark.parametrize("on", ["rtx5090", "gb10", "cuda:12.1"])
def test_C1_C4_an_arch_set_is_closed_whatever_the_version(on: str) -> None:
    assert reasons(decide(on, packages=FA2), "fa2") == {"arch"}
    assert reasons(decide(on, packages=FA3), "fa3") == {"arch"}


def test_5_and_C9_hardware_and_package_are_separate_reasons() -> None:
    assert reasons(decide("t4", "dtype=fp16", FA2), "fa2") == {"arch"}
    assert reasons(decide("t4", "dtype=fp16"), "fa2") == {"arch", "package.absent"}


FEW_HEADS = [
    # torch, cuDNN, heads, whether the rule is broken
    ("2.12", "9.19", 4, True),
    ("2.12", "9.19", 8, False),
    ("2.13.0", "9.20.0.48", 4, True),
    ("2.12.0a0+nv26", "9.19.0", 7, True),
    ("2.14.0", "9.24.0.43", 4, False),
    ("2.10", "9.10.2", 4, False),
]


@pytest.mark.parametrize("torch, cudnn, heads, bad", FEW_HEADS)
def test_7_8_and_B4_few_key_heads_on_b200(torch: str, cudnn: str, heads: int, bad: bool) -> None:
    d = decide("b200", f"heads={heads}", backend="torch_cudnn_sdpa", torch=torch, cudnn=cudnn)
    assert ("known_bad.cudnn.few_kv_heads" in reasons(d, "sdpa.cudnn")) == bad
    assert took(d) == ("nothing" if bad else CUDNN)
    if bad:
        waived = decide(
            "b200", f"heads={heads}", backend="torch_cudnn_sdpa", waive="cudnn.few_kv_heads", torch=torch, cudnn=cudnn
        )
        assert took(waived) == CUDNN
        assert took(decide("b200", f"heads={heads}", torch=torch, cudnn=cudnn)) == FLASH


MASK_64 = [
    # call, torch, cuDNN, whether the rule is broken
    ("q_len=192,mask=bool,grad=true", "2.11", "9.19", True),
    ("q_len=192,mask=additive,grad=true", "2.13", "9.20", True),
    ("q_len=64,mask=key_padding,grad=true", "2.13", "9.20", True),
    ("q_len=256,mask=bool,grad=true", "2.13", "9.20", False),
    ("q_len=192,mask=bool", "2.13", "9.20", False),
    ("q_len=192,causal=true,grad=true", "2.13", "9.20", False),
    ("q_len=192,mask=bool,grad=true", "2.13", "9.26", False),
    ("q_len=128,kv_len=192,mask=bool,grad=true", "2.13", "9.20", True),
    ("q_len=192,kv_len=256,mask=bool,grad=true", "2.13", "9.20", False),
]


@pytest.mark.parametrize("call, torch, cudnn, bad", MASK_64)
def test_9_and_B5_cudnn_gradients_with_a_mask(call: str, torch: str, cudnn: str, bad: bool) -> None:
    d = decide("h100", call, backend="torch_cudnn_sdpa", torch=torch, cudnn=cudnn)
    assert (took(d) == "nothing") == bad
    assert ("known_bad.cudnn.backward_mask_64" in reasons(d, "sdpa.cudnn")) == bad


CUDNN_RULES = [
    # call, cuDNN, the ids that are told
    ("q_len=1,kv_len=128,grad=true", "9.26", {"known_bad.cudnn.backward_one_query"}),  # B6, B8
    ("q_len=1,kv_len=128", "9.26", set()),
    ("kv_len=0", "9.22", {"empty"}),  # B6
    ("q_len=4096,kv_len=1", "9.22", {"kv_len.one"}),
    ("q_len=100,kv_len=4096", "9.10.2", {"known_bad.cudnn.ragged_queries"}),
    ("q_len=4096,kv_len=77", "9.10.2", {"known_bad.cudnn.ragged_keys"}),
    ("q_len=4096,kv_len=77", "9.20", set()),
    ("", "8.9.7", {"cudnn"}),  # A31
    ("head_dim=192,v_head_dim=128", "9.10.2", {"head_dim.192"}),  # A31
]


@pytest.mark.parametrize("call, cudnn, ids", CUDNN_RULES)
def test_cudnn_is_refused_by_version_and_shape(call: str, cudnn: str, ids: set[str]) -> None:
    d = decide("h100", call, backend="torch_cudnn_sdpa", cudnn=cudnn)
    assert reasons(d, "sdpa.cudnn") == ids
    assert (d.chosen is None) == bool(ids)


@pytest.mark.parametrize("q, k, grad, torch, bad", [
    (65536, 65536, False, "2.13", False),
    (65537, 65537, False, "2.13", True),
    (46340, 46340, True, "2.13", False),
    (46345, 46345, True, "2.13", True),
    (65537, 65537, True, "2.14", False),
])  # fmt: skip
def test_B12_a_long_mask_on_the_efficient_path(q: int, k: int, grad: bool, torch: str, bad: bool) -> None:
    d = decide("a100", f"q_len={q},kv_len={k},mask=bool,mask_shape=11qk,heads=1,grad={grad}", torch=torch)
    assert any(r.startswith("known_bad.efficient") for r in reasons(d, "sdpa.efficient")) == bad
    assert (took(d) == EFFICIENT) != bad


def test_32_and_A28_turing_with_grouped_heads_and_a_mask() -> None:
    """The path is predicted, the heads are expanded for it, and the math path's memory is known beforehand."""
    d = decide("t4", "dtype=fp16,head_dim=64,heads=32,kv_heads=8,mask=bool,q_len=8192")
    assert took(d) == EFFICIENT and d.fittings == ("expand_kv",)
    assert reasons(d, "sdpa.math") == {"memory.math"}
    refused = decide("t4", "dtype=bf16,head_dim=64,heads=32,q_len=8192", backend="torch_sdpa")
    assert took(refused) == "nothing" and "memory.math" in (refused.error or "")
    automatic = decide("t4", "dtype=bf16,head_dim=64,heads=32,q_len=8192")
    assert took(automatic) == MATH and any("memory.math" in w for w in automatic.warnings)


def test_C2_an_unknown_head_dim_is_told_as_what_it_depends_on() -> None:
    d = decide("b200", "head_dim=?,v_head_dim=?", FA4)
    assert d.error is None
    assert candidate(d, "fa4").verdict is None and "depends on head_dim" in str(d)


def test_devices_of_one_machine_decide_each_by_itself() -> None:
    m = Machine("cuda", (Device("sm70", 0), Device("sm86", 1)), CUDA.software).with_packages({"flash_attn": "2.8.3"})
    call = Call.of(dtype="fp16", head_dim=128, heads=8, batch=1, q_len=64)
    assert [took(resolve(call.but(device=i), m, catalog())) for i in (0, 1)] == [EFFICIENT, "fa/fa2"]


def test_facts_without_software_still_find_a_kernel() -> None:
    """Nothing on this platform depends on versions unless a rule is about them."""
    m = CUDA.read(Machine("cuda", (Device("8.6"),)))
    assert took(resolve(Call.of(dtype="fp16", head_dim=128, heads=8, batch=1, q_len=64), m, catalog())) == FLASH


def test_a_torch_without_code_for_an_old_gpu_is_warned_of() -> None:
    assert any("cuda13.dropped_gpu" in w for w in decide("cuda:7.0", "dtype=fp16").warnings)
    assert not decide("v100", "dtype=fp16").warnings  # the preset has PyTorch for CUDA 12.6


FA4_RULES = [
    ("b200", "head_dim=16,causal=true", "flash-attn-4==4.0.0b15", "known_bad.fa4.small_head_dim"),
    ("b200", "head_dim=256,v_head_dim=256", "flash-attn-4==4.0.0b10", "known_bad.fa4.head_dim_256"),
    ("b300", "", "flash-attn-4==4.0.0b14", "known_bad.fa4.sm103"),
    ("b200", "head_dim=192", FA4, "head_dim.192"),
    ("b200", "head_dim=136", FA4, "head_dim"),
    ("rtx4090", "head_dim=256", FA4, "shared_memory"),
    ("rtx4090", "grad=true", FA4, "grad"),
]


@pytest.mark.parametrize("on, call, packages, reason", FA4_RULES)
def test_fa4_is_limited_by_chip_and_version(on: str, call: str, packages: str, reason: str) -> None:
    d = decide(on, call, packages, backend="fa")
    assert took(d) == "nothing" and reason in reasons(d, "fa4")


# ---- cuDNN before FA4, against the rule written out once more

LENGTHS = [2, 77, 127, 128, 4096, 16383, 16384, 40000]


@pytest.mark.parametrize("on", ["b200", "b300", "h100", "rtx5090", "a100"])
def test_cudnn_is_first_exactly_where_it_was_measured_to_win(on: str) -> None:
    for q, k, dim in product(LENGTHS, LENGTHS, [32, 64, 128]):
        wins = on in ("b200", "b300") and (min(q, k) >= 128 or max(q, k) < 128)
        if on == "b300" and dim == 128 and q == k and q >= 16384:
            wins = False
        d = decide(on, f"q_len={q},kv_len={k},head_dim={dim}", f"{FA2} {FA3} {FA4}")
        assert (took(d) == CUDNN) == wins, (q, k, dim)


@pytest.mark.parametrize(
    "call", ["dtype=fp32", "causal=true", "kv_heads=8", "lse=true", "ring=2", "mask=bool", "varlen=true"]
)
@pytest.mark.parametrize("on", ["b200", "b300"])
def test_cudnn_is_first_for_dense_calls_only(on: str, call: str) -> None:
    assert decide(on, call, FA4).backend != "torch_cudnn_sdpa"


# ---- on the hardware


@pytest.mark.cuda
@pytest.mark.skipif(os.environ.get("HAL_HARDWARE") != "1", reason="HAL_HARDWARE=1 runs it on an NVIDIA GPU")
@pytest.mark.parametrize("call", [{}, {"is_causal": True}, {"return_lse": True}, {"scale": 0.05}])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_accepted_kernel_is_right_on_this_gpu(dtype: str, call: dict[str, Any]) -> None:
    from nvidia_amd import run_every_accepted_kernel

    run_every_accepted_kernel("cuda", dtype, call)
