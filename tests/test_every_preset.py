"""Any call on any preset with any packages: automatic choice finds a kernel, and the judge finds nothing against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import judge
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from hal import plugins, schemas
from hal.decision import Decision
from hal.facts import Call, Machine
from hal.policy import Policy, Request
from hal.resolver import resolve

CATALOG = plugins.catalog()
PRESETS = sorted(CATALOG.presets)
EXPLANATION = Draft202012Validator(schemas.explanation())
VARIABLE = "env.TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"

HEAD_DIMS = (8, 16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 224, 256, 320, 512)
VERSIONS = {
    "amd_aiter": ("0.1.10",),
    "fastvideo_kernel": ("0.3.5",),
    "flash_attn": ("2.5.8", "2.6.3", "2.7.2", "2.8.3+cu130torch2.9"),
    "flash_attn_3": ("3.0.0b1", "3.0.0"),
    "flash_attn_4": ("4.0.0b4", "4.0.0b9", "4.0.0b14", "4.0.0b22", "4.0.0b36"),
    "kernel": ("0.1.0",),
    "kernels": ("0.14.1", "0.16.0"),
    "sgl_kernel": ("0.3.21",),
    "st_attn": ("0.0.8",),
    "triton": ("3.7.1",),
    "vllm_flash_attn": ("0.28.0",),
    "vsa": ("0.0.5",),
}
BAD_STATES = ("broken", "missing_symbol", "wrong_distribution")
TORCH = ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.0", "2.12.0a0+nv26")
CUDNN = ("9.10.2.21", "9.12.0.46", "9.15.1.9", "9.19.0.56", "9.20.0.48", "9.24.0.43", "9.26.0.51")


def test_every_package_of_the_catalog_is_drawn() -> None:
    assert set(CATALOG.packages) == {*VERSIONS, "torch_npu"}


@st.composite
def machines(draw: Any) -> Machine:
    """A preset with some packages, some of them broken, and perhaps other software."""
    m = CATALOG.machine(draw(st.sampled_from(PRESETS)))
    found = {}
    for package, versions in VERSIONS.items():
        version = draw(st.sampled_from((None, None, *versions, *versions)))
        if version and draw(st.integers(0, 9)) == 0:
            found[package] = {"state": draw(st.sampled_from(BAD_STATES)), "version": version, "note": "said so"}
        elif version:
            found[package] = version
    software: dict[str, str | None] = {}
    if draw(st.booleans()):
        software["torch"] = draw(st.sampled_from(TORCH))
        if m.platform == "cuda":
            software["cudnn"] = draw(st.sampled_from(CUDNN))
        if m.platform == "rocm":
            software[VARIABLE] = draw(st.sampled_from(("unset", "0", "1")))
            software["aotriton"] = draw(st.sampled_from((None, "0.11.2", "0.12.1")))
    return m.with_packages(found).with_software(**software)


LENGTHS = (0, 1, 2, 7, 16, 64, 127, 128, 192, 257, 1000, 1024, 4096, 16384, 46342, 65537)
# What makes a call other than plain: any of these, often few of them.
UNUSUAL: dict[str, tuple[Any, ...]] = {
    "v_head_dim": (64, 128, 512),
    "kv_heads": (1, 2, 8),
    "batch": (0, 4),
    "kv_len": LENGTHS,
    "mask": ("key_padding", "bool", "additive"),
    "mask_grad": (True,),
    "dropout": (0.1,),
    "window": ((64, 0), (-1, 0), (3, 5)),
    "scale": (0.3,),
    "layout": ("bhsd",),
    "role": ("cross",),
    "ring": (2,),
    "ulysses": (4,),
    "unknown": (
        "dtype",
        "head_dim",
        "heads",
        "batch",
        "q_len",
        "kv_len",
        "causal",
        "mask",
        "varlen",
        "lse",
        "grad",
        "v_contiguous",
    ),
    **dict.fromkeys(("causal", "varlen", "lse", "grad", "deterministic", "compile", "graph"), (True,)),
    **dict.fromkeys(("q_contiguous", "k_contiguous", "v_contiguous"), (False,)),
}
SHAPES = {
    "key_padding": ("b11k", "111k"),
    "bool": ("b1qk", "bhqk", "11qk", "1hqk", "bh1k"),
    "additive": ("b1qk", "bhqk", "11qk", "b11k"),
}


@st.composite
def calls(draw: Any, dtypes: Any) -> Call:
    """Every fact of a call at random; now and then one that is not known."""
    heads, q_len = draw(st.sampled_from((1, 2, 8, 24, 40))), draw(st.sampled_from(LENGTHS))
    given: dict[str, Any] = {
        "dtype": draw(st.sampled_from(sorted(dtypes))),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
    }
    given |= {"heads": heads, "batch": draw(st.sampled_from((1, 2))), "q_len": q_len}
    names = st.sampled_from(sorted(UNUSUAL))
    for name in sorted(draw(st.one_of(st.sets(names, max_size=2), st.sets(names, max_size=4), st.sets(names)))):
        given[name] = draw(st.sampled_from(UNUSUAL[name]))
    if heads % given.get("kv_heads", 1):
        del given["kv_heads"]
    if "varlen" in given:
        given.pop("mask", None)  # packed calls take no mask
    if "mask" in given:
        given["mask_shape"] = draw(st.sampled_from(SHAPES[given["mask"]]))
    if given.get("mask") != "additive":
        given.pop("mask_grad", None)
    if hidden := given.pop("unknown", None):
        given[hidden] = None
        given.pop("mask_shape", None) if hidden == "mask" else None
    return Call.of(given)


@st.composite
def cases(draw: Any) -> tuple[Machine, Call]:
    machine = draw(machines())
    return machine, draw(calls(machine.device().dtypes))


def facts(machine: Machine, call: Call, fittings: tuple[str, ...] = ()) -> judge.Facts:
    """What the judge sees: plain facts, and the call as it is after the fittings that are listed, done anew here."""
    plain: dict[str, Any] = {"platform": machine.platform, "arch": machine.device().arch, **machine.software}
    plain |= {"experimental": machine.software.get(VARIABLE), "keys_dropped": False}
    plain |= {k: getattr(call, k) for k in call.to_json()}
    for name in fittings:
        if name == "contiguous":
            plain |= dict.fromkeys(("q_contiguous", "k_contiguous", "v_contiguous"), True)
        elif name == "expand_kv":
            plain["kv_heads"] = plain["heads"]
        elif name == "key_padding_to_varlen":
            assert plain["mask"] == "key_padding" and plain["causal"] is False and plain["window"] == (-1, -1)
            assert not plain["compile"] and not plain["graph"], "how many keys are kept is read from the device"
            plain |= {"mask": "none", "mask_shape": "none", "varlen": True, "keys_dropped": True}
        elif name == "mask_shape":
            wide = plain["mask_shape"][0] + "1qk"
            plain |= {"mask": "bool" if plain["mask"] == "key_padding" else plain["mask"], "mask_shape": wide}
        else:
            raise AssertionError(f"automatic choice made the fitting {name}")
    packages = {n: p.version for n, p in machine.packages.items() if p.state in ("found", "usable")}
    return judge.Facts(plain, packages)


def valid(d: Decision) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(d.explain("json"))
    assert not [e.message for e in EXPLANATION.iter_errors(said)]
    return said


@settings(max_examples=600)
@given(cases())
def test_automatic_choice_always_finds_a_kernel_that_may_run(case: tuple[Machine, Call]) -> None:
    machine, call = case
    d = resolve(call, machine, CATALOG)
    if d.chosen is None:  # PyTorch's own paths read the lengths of packed sequences, which no captured graph can
        assert call.varlen is not False and call.graph is not False, d.error
        assert "varlen.graph" in (d.error or "")
        return
    assert d.chosen.backend.quality == "exact"
    assert "pad_head_dim" not in d.fittings
    seen = facts(machine, call, d.fittings)
    assert judge.violations(d.kernel or "", seen) == [], str(d)
    assert d.backend in judge.automatic(seen)
    if d.kernel == "sdpa.math":
        assert d.warnings, "the last resort without a warning"
        mended = ("contiguous", "expand_kv") if call.heads and call.kv_heads else ("contiguous",)
        assert not judge.better_than_math(facts(machine, call, mended)), "and not the last"
    assert d.error is None


@settings(max_examples=200)
@given(cases(), st.data())
def test_a_request_is_served_by_what_was_asked_or_refused_with_reasons(case: tuple[Machine, Call], data: Any) -> None:
    machine, call = case
    backend = data.draw(st.sampled_from(sorted(CATALOG.backends)))
    b = CATALOG.backends[backend]
    kernel = data.draw(st.sampled_from(["", *(k.name for k in (*b.kernels, b.portable) if k)]))
    d = resolve(call, machine, CATALOG, Policy((Request(backend, source="the test", kernel=kernel),)))
    said = valid(d)
    if call.role == "cross" and "sparse" in b.traits:  # in cross-attention a dense one takes its place
        assert d.source == "automatic" and (d.chosen is None or d.chosen.backend.quality == "exact")
        return
    assert d.source == "the test"
    if d.chosen:
        assert d.backend == backend and d.kernel in (kernel or d.kernel,) and d.error is None
        assert judge.violations(d.kernel or "", facts(machine, call, d.fittings)) == [], str(d)
        return
    mine = [
        c for c in d.candidates if c.backend.name == backend and (c.kernel is None or kernel in ("", c.kernel.name))
    ]
    assert all(c.reasons for c in mine)
    assert mine or "no row for this kernel" in said["error"]
    assert said["error"] and backend in said["error"]
    assert all(r.id in said["error"] for c in mine for r in c.reasons)


CHANGES: list[dict[str, Any]] = [
    {}, {"lse": True, "grad": True}, {"mask": "key_padding", "lse": True}, {"head_dim": 96}, {"q_len": 0},
    *({name: value} for name, values in UNUSUAL.items() if name not in ("unknown", "mask_grad") for value in values),
    *({name: None} for name in UNUSUAL["unknown"]), *({"dtype": x} for x in ("float16", "float32", "float64")),
]  # fmt: skip


@pytest.mark.parametrize("kernel", judge.SPARSE)
def test_a_sparse_kernel_runs_only_what_it_may(kernel: str) -> None:
    """Chance seldom draws what a package's kernel takes, so here every change of such a call, alone."""
    backend = next(b.name for b in CATALOG.backends.values() if kernel in CATALOG.kernels_of(b.name))
    policy, ran = Policy((Request(backend, source="the test", kernel=kernel),)), 0
    for preset, which in (("h100", -1), ("b300", -1), ("b300", 1), ("mi300x", -1)):
        machine = CATALOG.machine(preset).with_packages({p: v[min(which, len(v) - 1)] for p, v in VERSIONS.items()})
        for change in CHANGES:
            call = Call.of({"dtype": "bf16", "head_dim": 128, "heads": 8, "batch": 1, "q_len": 4096, **change})
            d = resolve(call, machine, CATALOG, policy)
            if d.chosen:
                assert judge.violations(d.kernel or "", facts(machine, call, d.fittings)) == [], str(d)
                ran += 1
    assert ran


@pytest.mark.parametrize("preset", PRESETS)
def test_automatic_choice_has_a_kernel_for_every_preset_dtype_and_head_dim(preset: str) -> None:
    machine = CATALOG.machine(preset)
    for device in machine.devices:
        for dtype in sorted(device.dtypes or ()):
            for head_dim in (40, 64, 72, 80, 96, 128, 160, 256, 512):
                call = Call.of(dtype=dtype, head_dim=head_dim, heads=24, batch=1, q_len=4096, device=device.index)
                d = resolve(call, machine, CATALOG)
                assert d.chosen, d.error
                assert judge.violations(d.kernel or "", facts(machine, call, d.fittings)) == []
                assert d.kernel != "sdpa.math" or d.warnings


# ---- the judge himself: what he must refuse, so that his silence says something

CUDA = {"platform": "cuda", "torch": "2.13.0", "cudnn": "9.20.0.48"}
PLAIN = {
    **Call.of(dtype="bf16", head_dim=128, heads=8, batch=1, q_len=4096).to_json(),
    "window": (-1, -1),
    "keys_dropped": False,
}
PACKAGES = {
    "flash_attn": "2.8.3",
    "flash_attn_3": "3.0.0",
    "flash_attn_4": "4.0.0b36",
    "amd_aiter": "0.1.10",
    "kernels": "0.16.0",
    "fastvideo_kernel": "0.3.5",
    "kernel": "0.1.0",
    "st_attn": "0.0.8",
    "triton": "3.7.1",
    "vsa": "0.0.5",
}
REFUSED = [
    ("fa2", {"arch": "sm120"}), ("fa2", {"arch": "sm75"}), ("fa2", {"head_dim": 72, "v_head_dim": 72}), ("fa2", {"mask": "bool"}),
    ("fa2", {"dtype": "float32"}), ("fa2", {"window": (64, 0), "kv_len": 100}), ("fa2", {"ring": 2, "grad": True}),
    ("fa3", {"arch": "sm100"}), ("fa3", {"dropout": 0.1}), ("fa3", {"arch": "sm80", "head_dim": 192, "v_head_dim": 128}),
    ("fa4", {"arch": "sm89", "grad": True}), ("fa4", {"arch": "sm120", "head_dim": 256, "v_head_dim": 256}), ("fa4", {"compile": True}),
    ("fa4", {"arch": "sm100", "head_dim": 160, "v_head_dim": 160}), ("fa2.vllm", {}), ("fa3.sgl", {}),
    ("aiter", {}), ("aiter", {"platform": "rocm", "arch": "gfx1201"}), ("aiter", {"platform": "rocm", "arch": "gfx942", "mask": "bool"}),
    ("aiter.triton", {"platform": "rocm", "arch": "gfx1201", "head_dim": 256, "v_head_dim": 256}),
    ("sdpa.flash", {"arch": "sm75"}), ("sdpa.flash", {"mask": "key_padding"}), ("sdpa.flash", {"causal": True, "kv_len": 9}),
    ("sdpa.flash", {"k_contiguous": False}), ("sdpa.flash", {"platform": "rocm", "arch": "gfx1200", "experimental": "unset"}),
    ("sdpa.flash", {"arch": "sm89", "grad": True, "head_dim": 200, "v_head_dim": 200}), ("sdpa.flash", {"kv_len": 0}),
    ("sdpa.efficient", {"kv_heads": 2}), ("sdpa.efficient", {"arch": "sm75"}), ("sdpa.efficient", {"lse": True, "grad": True}),
    ("sdpa.efficient", {"q_len": 65537, "kv_len": 65537, "window": (9, 9)}), ("sdpa.efficient", {"deterministic": True, "grad": True}),
    ("sdpa.cudnn", {"q_len": 192, "kv_len": 192, "mask": "bool", "grad": True}), ("sdpa.cudnn", {"arch": "sm100", "kv_heads": 4}),
    ("sdpa.cudnn", {"cudnn": "9.10.2", "q_len": 100}), ("sdpa.cudnn", {"head_dim": 192, "v_head_dim": 192}), ("sdpa.cudnn", {"varlen": True}),
    ("sdpa.cpu", {}), ("sdpa.cpu", {"platform": "cpu", "dropout": 0.1}), ("sdpa.cpu", {"platform": "cpu", "v_head_dim": 64}),
    ("sdpa.fused", {"platform": "xpu", "arch": "pvc", "grad": True}), ("sdpa.fused", {"platform": "npu", "arch": "ascend310p"}),
    ("sdpa.flash_xpu", {"platform": "xpu", "arch": "acm"}), ("sdpa.mps", {"platform": "mps", "arch": "m1", "dtype": "float64"}),
    ("ascend_fa", {"platform": "npu", "arch": "ascend910b", "grad": True}), ("xpu_flash", {"platform": "xpu", "arch": "bmg"}),
    ("musa_flash", {"platform": "musa", "arch": "mp22"}), ("musa_fa2", {"platform": "musa", "arch": "mp31", "head_dim": 100}),
    ("sta", {"arch": "sm100"}), ("sta", {"scale": 0.3}), ("sta", {"lse": True}), ("sta", {"ulysses": 4}), ("sta", {"head_dim": 96, "v_head_dim": 96}),
    ("sta.fastvideo", {"dtype": "float16"}), ("sta.fastvideo", {"mask": "key_padding"}), ("sta.triton", {"mask": "bool"}),
    ("sta.triton", {"grad": True}), ("sta.triton", {"platform": "rocm", "arch": "gfx90a"}), ("sta.portable", {"role": "cross"}),
    ("sta.portable", {"ring": 2}), ("sta.portable", {"mask": "additive"}), ("sta.portable", {"window": (64, 0)}),
    ("vsa", {"arch": "sm75"}), ("vsa", {"kv_heads": 2}), ("vsa.fastvideo", {"batch": 0}), ("vsa.fastvideo", {"grad": True}),
    ("vsa.triton", {"arch": "sm110"}), ("vsa.triton", {"dtype": "float32"}), ("vsa.triton", {"head_dim": 96, "v_head_dim": 96}),
    ("vsa.portable", {"causal": True}), ("vsa.portable", {"varlen": True}), ("vsa.portable", {"lse": True}),
    ("vsa_h3.triton", {"varlen": True, "keys_dropped": True}), ("vsa_h3.triton", {"mask": "key_padding"}), ("vsa_h3.portable", {"compile": True}),
    ("hybrid.fa3", {"dtype": "float16"}), ("hybrid.fa3", {"arch": "sm100"}), ("hybrid.fa3", {"grad": True}), ("hybrid.fa3.hub", {"kv_heads": 2}),
    ("hybrid.fa3.sgl", {}), ("hybrid.fa4", {}), ("hybrid.fa4", {"arch": "sm121"}), ("hybrid.triton", {"arch": "sm87"}),
    ("hybrid.portable", {"graph": True}), ("hybrid.portable", {"v_head_dim": 64}), ("hybrid.portable", {"dropout": 0.1}),
    ("vmoba", {"arch": "sm100"}), ("vmoba", {"varlen": True}), ("vmoba", {"head_dim": 100, "v_head_dim": 100}), ("vmoba.fastvideo", {"scale": 0.3}),
    ("vmoba.fastvideo", {"platform": "rocm", "arch": "gfx942"}), ("vmoba.portable", {"kv_len": 100}), ("vmoba.portable", {"deterministic": True}),
    ("a kernel that nobody has described", {}),
]  # fmt: skip


@pytest.mark.parametrize("kernel, change", REFUSED)
def test_the_judge_refuses(kernel: str, change: dict[str, Any]) -> None:
    assert judge.violations(kernel, judge.Facts({**CUDA, "arch": "sm90", **PLAIN, **change}, PACKAGES))


PASSED = [
    *((k, {}) for k in ("fa2", "fa3", "fa3.hub", "fa4", "sdpa.flash", "sdpa.efficient", "sdpa.cudnn", "sdpa.math")),
    *((k, {}) for k in judge.SPARSE if k not in ("hybrid.fa3.sgl", "hybrid.fa4")), ("hybrid.fa4", {"arch": "sm103"}),
    *((k, {"varlen": True}) for k in ("hybrid.fa3", "hybrid.triton", "vsa_h3.triton", "vsa_h3.portable")),
    *((f"{k}.triton", {"platform": "rocm", "arch": "gfx942", "kv_heads": 2, "scale": 0.3}) for k in ("sta", "vsa", "vsa_h3", "hybrid")),
    *((f"{k}.portable", {"platform": "npu", "arch": "ascend910b", "grad": True}) for k in ("sta", "vsa", "vsa_h3", "hybrid", "vmoba")),
    *((k, {"mask": "key_padding", "lse": True}) for k in ("sta.triton", "sta.portable")), ("vsa", {"arch": "sm120", "ulysses": 4}),
]  # fmt: skip


@pytest.mark.parametrize("kernel, change", PASSED)
def test_the_judge_lets_a_plain_call_pass(kernel: str, change: dict[str, Any]) -> None:
    seen = judge.Facts({**CUDA, "arch": "sm90", **PLAIN, **change}, PACKAGES)
    assert not judge.violations(kernel, seen, strict=kernel in judge.SPARSE)


@pytest.mark.parametrize(
    "kernel, arch, package, version",
    [("hybrid.fa4", "sm103", "flash_attn_4", "4.0.0b9"), ("vmoba", "sm90", "flash_attn", "2.5.8"), ("sta.triton", "sm90", "triton", None)],
)  # fmt: skip
def test_the_judge_refuses_a_build(kernel: str, arch: str, package: str, version: str | None) -> None:
    seen = {**CUDA, "arch": arch, **PLAIN}
    assert not judge.violations(kernel, judge.Facts(seen, PACKAGES))
    assert judge.violations(kernel, judge.Facts(seen, {**PACKAGES, package: version}))


def test_the_judge_knows_every_kernel_and_nothing_of_hal() -> None:
    assert set(CATALOG.kernels) == set(judge.RULES)
    text = Path(judge.__file__).read_text("utf-8")
    for file in Path(judge.__file__).parent.glob("*.py"):
        assert "import hal" not in (text := file.read_text("utf-8")) and "from hal" not in text
