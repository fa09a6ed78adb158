"""AMD GPUs: how architectures are written, what is detected, and what runs where."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvidia_amd import candidate, catalog, decide, fake_torch, reasons, took
from simulated import host

from hal.errors import FactError, PlatformError
from hal.facts import Call, Device, Machine
from hal.platforms.rocm import PLATFORM as ROCM
from hal.platforms.rocm import VARIABLE
from hal.platforms.rocm.arch import from_kernel
from hal.platforms.rocm.detection import aotriton
from hal.resolver import resolve

# ---- architectures

WRITTEN = {
    "gfx942": ["gfx942", "GFX942", " gfx942 ", "gfx942:sramecc+:xnack-"],
    "gfx90a": ["gfx90a", "gfx90a:sramecc+:xnack-", "GFX90A:xnack+"],
    "gfx1100": ["gfx1100"],
    "gfx1151": ["gfx1151"],
    "gfx1201": ["gfx1201"],
}
WRONG = ["", "gfx", "gfx94", "gfx9-4-2", "942", "mi300x", "gfx942:fast+", "gfx942:xnack", "gfx12011", "sm90", None, 942]


@pytest.mark.parametrize("arch, text", [(a, t) for a, texts in WRITTEN.items() for t in texts])
def test_every_form_of_an_architecture_is_read(arch: str, text: str) -> None:
    assert ROCM.parse_arch(text) == arch


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_architecture_is_refused_with_the_forms(text: Any) -> None:
    with pytest.raises(FactError) as e:
        ROCM.parse_arch(text)
    assert repr(text) in str(e.value) and "gfx90a:sramecc+:xnack-" in str(e.value)


@given(st.text(max_size=12))
def test_any_text_is_an_architecture_or_an_error(text: str) -> None:
    try:
        assert ROCM.parse_arch(ROCM.parse_arch(text)) == ROCM.parse_arch(text)
    except FactError as e:
        assert repr(text) in str(e)


@pytest.mark.parametrize(
    "version, arch", [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110501, "gfx1151"), (120001, "gfx1201")]
)
def test_the_kernel_drivers_numbers_are_architectures(version: int, arch: str) -> None:
    assert from_kernel(version) == arch == ROCM.parse_arch(arch)


def test_rows_and_rules_name_architectures_in_the_one_spelling() -> None:
    named = {a for rows in ROCM.support.values() for r in rows for a in r.on or ()}
    named |= {a for k in catalog().known_bad if k.platform == "rocm" for a in k.rule.when.get("arch", ())}
    assert named == {ROCM.parse_arch(a) for a in named}
    assert all(ROCM.family(a) for a in named)


@pytest.mark.parametrize("arch, kib", [("gfx942", 64), ("gfx950", 160), ("gfx1100", 64), ("gfx1201", 64)])
def test_shared_memory_of_a_work_group(arch: str, kib: int) -> None:
    assert ROCM.describe(arch).device().shared_memory == kib * 1024


# ---- detection


def node(version: int) -> str:
    return f"cpu_cores_count 0\nsimd_count 304\ngfx_target_version {version}\n"


NODES = "/sys/class/kfd/kfd/topology/nodes/{}/properties"
CPU_ONLY = {"/dev/kfd": "", NODES.format(0): "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n"}
HERE = CPU_ONLY | {NODES.format(1): node(90402), NODES.format(2): node(90402)}
BUILD = {"__version__": "2.13.0+rocm7.2", "hip": "7.2.53211"}

DETECTED = [
    # files, torch build, environment, state, words that are said
    (HERE, BUILD, {}, "present", ["built for ROCm 7.2.53211", "/dev/kfd exists (gfx942, gfx942)"]),
    (HERE, BUILD, {"HIP_VISIBLE_DEVICES": "1"}, "present", ["HIP_VISIBLE_DEVICES shows 1"]),
    (HERE, BUILD, {"ROCR_VISIBLE_DEVICES": "GPU-a1b2"}, "present", ["ROCR_VISIBLE_DEVICES shows GPU-a1b2"]),
    (HERE, BUILD, {"HIP_VISIBLE_DEVICES": ""}, "hidden", ["HIP_VISIBLE_DEVICES='' hides every device"]),
    (HERE, BUILD, {"HIP_VISIBLE_DEVICES": "-1"}, "hidden", ["HIP_VISIBLE_DEVICES='-1' hides every device"]),
    (HERE, BUILD, {"CUDA_VISIBLE_DEVICES": ""}, "hidden", ["CUDA_VISIBLE_DEVICES='' hides every device"]),
    (HERE, BUILD, {"ROCR_VISIBLE_DEVICES": "-1"}, "hidden", ["ROCR_VISIBLE_DEVICES='-1' hides every device"]),
    (
        HERE,
        {"__version__": "2.13.0+cpu"},
        {},
        "unusable",
        ["built for no NVIDIA, AMD", "this PyTorch cannot use AMD GPUs"],
    ),
    (HERE, {"cuda": "13.0"}, {}, "unusable", ["built for CUDA 13.0", "this PyTorch cannot use AMD GPUs"]),
    (HERE, None, {}, "unusable", ["torch is not installed", "/dev/kfd exists"]),
    (CPU_ONLY, BUILD, {}, "absent", ["built for ROCm", "no AMD GPU"]),
    ({"/dev/kfd": ""}, BUILD, {}, "present", ["/dev/kfd exists"]),  # a container without the topology
    ({}, BUILD, {}, "absent", ["built for ROCm 7.2.53211", "no AMD GPU"]),
    ({}, None, {}, "absent", ["torch is not installed"]),
    ({"/dev/dxg": "", "/opt/rocm/lib/librocdxg.so": ""}, BUILD, {}, "present", ["WSL"]),
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
    d = ROCM.detect(host(tmp_path, files, build, **env))
    assert (d.platform, d.state) == ("rocm", state)
    for w in words:
        assert w in "; ".join(d.found)
    assert bool(d.fix) == (state in ("hidden", "unusable"))


def test_a_user_outside_the_render_group_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    d = ROCM.detect(host(tmp_path, HERE, BUILD))
    assert d.state == "unusable" and "may not open /dev/kfd" in d.found[-1] and "render" in d.fix


# ---- the devices that are here

MI300X = {"gcnArchName": "gfx942:sramecc+:xnack-", "name": "AMD Instinct MI300X", "total_memory": 192 << 30}


def test_devices_and_software_are_those_that_torch_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = fake_torch([MI300X], "2.13.0+rocm7.2", hip="7.2.53211-e1a6bc5663")
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    h = host(tmp_path, {"/site/torch/lib/libaotriton_v2.so.0.12.1": ""}, **{VARIABLE: "1"})
    m = ROCM.machine(h)
    assert [(d.arch, d.name, d.memory, d.shared_memory) for d in m.devices] == [
        ("gfx942", "AMD Instinct MI300X", 192 << 30, 64 << 10)
    ]
    assert m.software["runtime"] == "7.2.53211"  # as a version that can be compared
    assert m.software["aotriton"] == "0.12.1" == aotriton(h)
    assert m.software[f"env.{VARIABLE}"] == "1"
    assert ROCM.machine(host(tmp_path / "other")).software[f"env.{VARIABLE}"] == "unset"


def test_a_machine_without_devices_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch([], "2.13.0", hip="7.2"))  # type: ignore[arg-type]
    with pytest.raises(PlatformError, match=r"AMD ROCm: no device is here.*HIP_VISIBLE_DEVICES='' hides every device"):
        ROCM.machine(host(tmp_path, HERE, BUILD, HIP_VISIBLE_DEVICES=""))
    monkeypatch.setitem(sys.modules, "torch", fake_torch([], "2.13.0+cu130", cuda="13.0"))  # type: ignore[arg-type]
    with pytest.raises(PlatformError, match=r"pip install torch .*whl/rocm"):
        ROCM.machine(host(tmp_path / "cuda", HERE, {"cuda": "13.0"}))


# ---- presets

PRESETS = {
    "mi250": "gfx90a",
    "mi300x": "gfx942",
    "mi355x": "gfx950",
    "rx7900": "gfx1100",
    "rx9070": "gfx1201",
    "strix-halo": "gfx1151",
}


def test_presets_are_the_machines_that_people_know() -> None:
    assert {n: ROCM.preset(n).device().arch for n in ROCM.presets} == PRESETS
    assert len(ROCM.preset("mi250").devices) == 2  # PyTorch sees the two dies of a card as two devices


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_current_torch_and_no_optional_package(name: str) -> None:
    m = ROCM.preset(name)
    assert m.software["torch"] == "2.13.0" and set(m.packages) == {"triton"}
    assert m.device().memory and m.device().shared_memory and m.device().name


# ---- what runs

FA2, AITER = "flash-attn==2.8.3", "amd-aiter==0.1.12"
FLASH, EFFICIENT, MATH = (f"torch_sdpa/sdpa.{k}" for k in ("flash", "efficient", "math"))

AUTOMATIC = [
    # machine, call, packages, what runs
    ("mi300x", "", "", FLASH),
    ("mi300x", "", FA2, "fa/fa2"),
    ("mi300x", "", AITER, FLASH),  # AITER on request only
    ("mi300x", "", f"{FA2} {AITER}", "fa/fa2"),
    ("mi300x", "dtype=fp32", FA2, EFFICIENT),
    ("mi300x", "dtype=fp64", FA2, MATH),
    ("mi300x", "mask=bool", FA2, EFFICIENT),
    ("mi300x", "mask=bool,kv_heads=8", "", EFFICIENT),
    ("mi300x", "head_dim=72", FA2, FLASH),
    ("mi300x", "head_dim=512", FA2, EFFICIENT),
    ("mi250", "", FA2, "fa/fa2"),
    ("mi355x", "", "", FLASH),
    ("rx7900", "", "", FLASH),
    ("rx7900", "", FA2, "fa/fa2"),
    ("rx7900", "head_dim=512,q_len=1024", "", MATH),
    ("rx9070", "", "", FLASH),
    ("strix-halo", "", "", MATH),
    ("strix-halo", "", FA2, "fa/fa2"),
    ("rocm:gfx1200", "", "", MATH),
    ("rocm:gfx1103", "", "", MATH),
    ("rocm:gfx1030", "", FA2, MATH),
    ("rocm:gfx908", "", FA2, MATH),
]


@pytest.mark.parametrize("on, call, packages, expected", AUTOMATIC)
def test_automatic_choice(on: str, call: str, packages: str, expected: str) -> None:
    assert took(decide(on, call, packages)) == expected


REQUESTED = [
    # machine, call, packages, backend, what runs
    ("mi300x", "", AITER, "aiter", "aiter/aiter"),
    ("mi355x", "dtype=fp16", AITER, "aiter", "aiter/aiter"),
    ("mi250", "", AITER, "aiter", "aiter/aiter"),
    ("rx7900", "", AITER, "aiter", "aiter/aiter.triton"),
    ("rx9070", "", AITER, "aiter", "aiter/aiter.triton"),
    ("rx9070", "head_dim=256", AITER, "aiter", "nothing"),
    ("rocm:gfx1030", "", AITER, "aiter", "nothing"),
    ("mi300x", "", "", "aiter", "nothing"),
    ("mi300x", "", FA2, "torch_sdpa", FLASH),
    ("mi300x", "", "", "torch_cudnn_sdpa", "nothing"),
]


@pytest.mark.parametrize("on, call, packages, backend, expected", REQUESTED)
def test_requests_are_served_as_asked_or_refused(
    on: str, call: str, packages: str, backend: str, expected: str
) -> None:
    d = decide(on, call, packages, backend)
    assert took(d) == expected
    assert (d.error is None) == (expected != "nothing")


# ---- why not: the handed cases, by their number


def test_A17_a_dtype_is_a_reason_and_a_request_stays_strict() -> None:
    d = decide("mi300x", "dtype=fp32", AITER, backend="aiter")
    assert took(d) == "nothing" and reasons(d, "aiter") == {"dtype"}
    assert "torch_sdpa" in (d.error or "")  # the declared fallback, as advice


def test_A23_and_C12_the_parts_of_aiter_have_their_own_architectures() -> None:
    d = decide("rx7900", packages=AITER, backend="aiter")
    assert reasons(d, "aiter") == {"arch"} and reasons(d, "aiter.triton") == set()
    assert took(d) == "aiter/aiter.triton"
    assert any("aiter.no_configuration" in w for w in d.warnings)
    assert took(decide("rx7900", packages=AITER)) == FLASH


def test_A40_an_opt_in_outranks_the_order_and_says_who_asked() -> None:
    d = decide("mi300x", packages=f"{FA2} {AITER}", backend="aiter", mode="prefer")
    assert took(d) == "aiter/aiter" and d.source == "the test"
    other = decide("mi300x", "dtype=fp32", f"{FA2} {AITER}", backend="aiter", mode="prefer")
    assert took(other) == EFFICIENT and other.source == "the test"  # by the fallback that aiter declares
    assert other.warnings[0].startswith("policy.fallback: aiter cannot serve; its declared fallback torch_sdpa does")


@pytest.mark.parametrize("on", ["rocm:gfx1200", "strix-halo"])
def test_A29_and_A30_an_experiment_of_aotriton_is_taken_when_it_is_switched_on(on: str) -> None:
    off = decide(on)
    assert took(off) == MATH
    assert "aotriton.experimental" in reasons(off, "sdpa.flash") & reasons(off, "sdpa.efficient")
    assert f"set {VARIABLE}=1" in off.explain() and any(f"{VARIABLE}=1" in a for a in off.advice)
    on_now = decide(on, **{f"env.{VARIABLE}": "1"})
    assert took(on_now) == FLASH
    assert on_now.chosen and on_now.chosen.line and on_now.chosen.line.row.tier == "experimental"
    assert took(decide(on, **{f"env.{VARIABLE}": "0"})) == MATH


def test_A29_the_math_path_is_refused_on_request_where_it_does_not_fit() -> None:
    video = "heads=24,q_len=32760"
    assert took(decide("rocm:gfx1200", video, backend="torch_sdpa")) == "nothing"
    automatic = decide("rocm:gfx1200", video)
    assert took(automatic) == MATH and any("memory.math" in w for w in automatic.warnings)


def test_strix_halo_needs_no_switch_from_aotriton_0_12_on() -> None:
    d = decide("strix-halo", aotriton="0.12.1")
    assert took(d) == FLASH and d.chosen and d.chosen.line and d.chosen.line.row.tier == "native"
    assert took(decide("strix-halo", aotriton="0.11.2")) == MATH


@pytest.mark.parametrize("arch", ["gfx1103", "gfx1152"])
def test_C14_chips_that_came_later_need_a_torch_that_has_them(arch: str) -> None:
    on = {f"env.{VARIABLE}": "1"}
    assert took(decide(f"rocm:{arch}", **on)) == FLASH
    old = decide(f"rocm:{arch}", torch="2.10", **on)
    assert took(old) == MATH and "aotriton.images" in reasons(old, "sdpa.flash")


def test_11_and_C13_shared_memory_is_a_budget() -> None:
    d = decide("rx9070", "head_dim=256", AITER, backend="aiter")
    assert reasons(d, "aiter.triton") == {"known_bad.aiter.shared_memory"}
    (r,) = candidate(d, "aiter.triton").reasons
    assert (r.fact, r.observed) == ("shared_memory", 65536) and "65792" in r.message
    assert took(decide("rx9070", "head_dim=256", AITER)) == FLASH


def test_B10_values_whose_rows_are_not_contiguous_are_copied() -> None:
    d = decide("mi300x", "v_contiguous=false")
    assert took(d) == FLASH and d.fittings == ("contiguous",)


KNOWN_BAD = [
    ("mi300x", "lse=true", "2.8", "known_bad.aotriton.base2_lse", MATH),
    ("mi300x", "lse=true", "2.9", "", FLASH),
    ("rx7900", "", "2.10", "known_bad.aotriton.gfx1100_accuracy", MATH),
    ("rx7900", "", "2.11", "", FLASH),
    ("rx9070", "", "2.10", "", FLASH),
]


@pytest.mark.parametrize("on, call, torch, rule, expected", KNOWN_BAD)
def test_defects_are_told_by_version(on: str, call: str, torch: str, rule: str, expected: str) -> None:
    d = decide(on, call, torch=torch)
    assert took(d) == expected
    assert (rule in reasons(d, "sdpa.flash")) if rule else not reasons(d, "sdpa.flash")


def test_efficient_takes_unequal_and_large_heads_from_aotriton_0_12_on() -> None:
    for call in ("head_dim=128,v_head_dim=64", "head_dim=512"):
        assert took(decide("mi300x", call)) == EFFICIENT
        old = decide("mi300x", call, torch="2.12")
        assert took(old) == MATH and "aotriton.sizes" in reasons(old, "sdpa.efficient")


def test_devices_of_one_machine_decide_each_by_itself() -> None:
    m = Machine("rocm", (Device("gfx1201", 0), Device("gfx1030", 1)), ROCM.software)
    call = Call.of(dtype="fp16", head_dim=128, heads=8, batch=1, q_len=64)
    assert [took(resolve(call.but(device=i), m, catalog())) for i in (0, 1)] == [FLASH, MATH]


# ---- on the hardware


@pytest.mark.rocm
@pytest.mark.skipif(os.environ.get("HAL_HARDWARE") != "1", reason="HAL_HARDWARE=1 runs it on an AMD GPU")
@pytest.mark.parametrize("call", [{}, {"is_causal": True}, {"return_lse": True}, {"scale": 0.05}])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_accepted_kernel_is_right_on_this_gpu(dtype: str, call: dict[str, Any]) -> None:
    from nvidia_amd import run_every_accepted_kernel

    run_every_accepted_kernel("rocm", dtype, call)
