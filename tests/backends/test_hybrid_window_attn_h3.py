"""Hybrid window attention: the window against masked dense attention, its packages, and what it refuses."""

from __future__ import annotations

import runpy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from fake_device import DEVICE, agreeing
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

import hal
from hal import oracle, plugins, policy, sparse
from hal.backends.hybrid_window_attn_h3 import BACKEND, FLASH, PORTABLE, TRITON, delta, native, portable, window
from hal.backends.hybrid_window_attn_h3.delta import LinearBranch
from hal.backends.hybrid_window_attn_h3.settings import Settings
from hal.backends.hybrid_window_attn_h3.window import Architecture
from hal.config import Setting
from hal.errors import CallError, NoKernelError
from hal.facts import Call
from hal.sparse import PackedRows
from hal.sparse.selected import watched_masks
from hal.sparse.triton.tiles import ARCHS
from hal.testing import fakes

NAME = "hybrid_window_attn_h3"
DELTA = runpy.run_path(str(Path(__file__).parent / "test_video_delta.py"))
random_branch, definition, architectures, layouts = (
    DELTA[n] for n in ("random_branch", "definition", "architectures", "layouts")
)
settings = hypothesis_settings(max_examples=15, deadline=None)
ROWS = PackedRows((5, 0, 3), (9, 2, 3), pad=4)
SMALL = Architecture(chunk=2, linear_head_dim=4)


def tensors(seed, rows, b=1, h=2, kv_heads=2, d=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    one = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    q, k, v = (one(b, n, rows.tokens, d) for n in (h, kv_heads, kv_heads))
    return q, k, v, one(b, rows.tokens, h).sigmoid()


def mask_of(a, rows):
    """bool [used, used], row by row, from the description."""
    frames, height, width = rows.video
    per = height * width
    of = torch.full((rows.used,), -1)
    of[rows.first : rows.first + frames * per] = torch.arange(frames).repeat_interleave(per)
    keep, ends = torch.ones(rows.used, rows.used, dtype=torch.bool), (of == 0) | (of == frames - 1)
    video = of >= 0
    for i in range(rows.used):
        t = int(of[i])
        if t < 0 or (ends[i] and a.anchor_frames in ("rows", "both")):
            continue
        c, r = a.chunk, a.radius
        lo, hi = ((t // c - r) * c, (t // c + r + 1) * c - 1) if c else (t - r, t + r)
        keep[i] = ~video | ((of >= lo) & (of <= hi)) | (ends & (a.anchor_frames in ("columns", "both")))
    return keep


def masked(q, k, v, gate, a, rows, scale=None):
    q, k, v = (x[:, :, : rows.used].double() for x in (q, k, v))
    out = oracle.attention(q, k, v, attn_mask=mask_of(a, rows), layout="bhsd", scale=scale)[0]
    out = out if gate is None else out * gate.transpose(1, 2)[:, :, : rows.used, None].double()
    return torch.nn.functional.pad(out, (0, 0, 0, rows.pad))


def running(call=None, make=portable.bind, **words):
    return make(call or Call(head_dim=4), Settings(**words))


def out_of(rows, a, q, k, v, gate, x, run=None):
    with sparse.given(rows=rows, hybrid=a, gate=gate if a.enable_softmax_gate else None, linear=x):
        return (run or running())(q, k, v, None, None)


# ---- the run


@given(
    a=architectures, rows=layouts, b=st.integers(1, 2), kv_heads=st.sampled_from([1, 2]), seed=st.integers(0, 99),
    scale=st.sampled_from(["default", 0.3]), most=st.sampled_from([1, 40, 200_000]), by_blocks=st.booleans(),
)  # fmt: skip
@settings
def test_the_window_is_masked_dense_attention_and_the_branch_reads_the_rest(
    a, rows, b, kv_heads, seed, scale, most, by_blocks
):
    *qkv, gate = tensors(seed, rows, b, 2, kv_heads)
    x = random_branch(rows, a, b, seed=seed + 1)
    make = (lambda *words: portable.triton(*words, None)) if by_blocks else portable.bind
    out = out_of(rows, a, *qkv, gate, x, running(Call(head_dim=4, scale=scale), make, vdn_max_gather_rows=most))
    gate = gate if a.enable_softmax_gate else None
    wanted = masked(*qkv, gate, a, rows, None if scale == "default" else scale)
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)
    assert not out[:, :, rows.used :].any()
    if a.full(rows.video[0]):
        assert x.read is None
    else:
        torch.testing.assert_close(x.read, definition(x, a, rows), atol=1e-8, rtol=1e-8)
        assert not x.read[:, : rows.first].any() and not x.read[:, rows.used :].any()


@given(a=architectures, rows=layouts, seed=st.integers(0, 99))
@settings
def test_a_radius_of_all_frames_is_dense_without_a_branch(a, rows, seed):
    a = replace(a, radius=rows.video[0])
    *qkv, gate = tensors(seed, rows)
    x = random_branch(rows, a)
    x.read = torch.ones(1)  # of an earlier call
    out = out_of(rows, a, *qkv, torch.ones_like(gate), x)
    cu = torch.tensor([0, rows.used], dtype=torch.int32)
    wanted = oracle.attention_varlen(*(t[0, :, : rows.used].transpose(0, 1) for t in qkv), cu, cu)[0]
    torch.testing.assert_close(out[0, :, : rows.used].transpose(0, 1), wanted, atol=1e-10, rtol=0)
    assert x.read is None
    out_of(rows, a, *qkv, gate, None)  # none is needed either


@pytest.mark.parametrize("frames", [1, 2])
def test_two_frames_leave_the_branch_nothing_under_both_anchors(frames):
    rows, a = PackedRows((5,), (frames, 2, 3)), Architecture(chunk=0, radius=0, linear_head_dim=4)
    *qkv, gate = tensors(0, rows)
    x = random_branch(rows, a)
    out_of(rows, a, *qkv, gate, x)
    assert (x.read is None) is (frames == 1) and (x.read is None or not x.read.any())


def test_pad_rows_are_no_keys():
    *qkv, gate = tensors(0, ROWS)
    for t in qkv:
        t[:, :, ROWS.used :] = torch.nan
    x = random_branch(ROWS, SMALL)
    for t in (x.q, x.k, x.v, x.beta, x.gate):
        t[:, ROWS.used :] = torch.nan
    for run in (running(), running(make=lambda *words: portable.triton(*words, None))):
        out = out_of(ROWS, SMALL, *qkv, gate, x, run)
        assert not out.isnan().any() and not x.read.isnan().any() and not out[:, :, ROWS.used :].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_is_the_callers_and_a_gate_of_one_changes_no_bit(dtype):
    *qkv, gate = tensors(0, ROWS, 2, dtype=dtype)
    one = out_of(ROWS, SMALL, *qkv, torch.ones_like(gate), random_branch(ROWS, SMALL, 2, dtype=dtype))
    x = random_branch(ROWS, SMALL, 2, dtype=dtype)
    none = out_of(ROWS, replace(SMALL, enable_softmax_gate=False), *qkv, gate, x)
    assert one.dtype is dtype is x.read.dtype and one.equal(none)


def test_gradients_are_the_definitions():
    *qkv, gate = (t.requires_grad_() for t in tensors(3, ROWS, kv_heads=1))
    x = random_branch(ROWS, SMALL)
    given_ones = [*qkv, gate, x.q.requires_grad_(), x.alpha.requires_grad_()]
    out = out_of(ROWS, SMALL, *qkv, gate, x)
    mine = torch.autograd.grad(out.sin().sum() + x.read.cos().sum(), given_ones)
    wanted = masked(*qkv, gate, SMALL, ROWS).sin().sum() + definition(x, SMALL, ROWS).cos().sum()
    for found, right in zip(mine, torch.autograd.grad(wanted, given_ones)):
        torch.testing.assert_close(found, right, atol=1e-8, rtol=1e-8)


def test_a_smoke_run_is_dense_and_drops_what_it_is_given():
    *qkv, gate = tensors(0, ROWS)
    x = random_branch(ROWS, SMALL)
    for a, branch in ((SMALL, x), (None, None)):
        with sparse.given(rows=ROWS, hybrid=a, gate=gate, linear=branch):
            out = running(vdn_h3_dense_smoke=True)(*qkv, None, None)
        wanted = oracle.attention(*(t[:, :, : ROWS.used] for t in qkv), layout="bhsd")[0]
        torch.testing.assert_close(out[:, :, : ROWS.used], wanted, atol=1e-10, rtol=0)
    assert x.read is None


def test_a_step_builds_nothing_anew():
    rows, a = PackedRows((7, 2), (11, 2, 3)), Architecture(chunk=3, linear_head_dim=4)
    *qkv, gate = tensors(0, rows)
    caches = (window.plan, native._lengths, portable.blocks, delta.indices)
    counts = []
    for _ in range(3):
        again = PackedRows((7, 2), (11, 2, 3)), Architecture(chunk=3, linear_head_dim=4)
        for make in (portable.bind, lambda *words: portable.triton(*words, None), by_oracle):
            out_of(*again, *qkv, gate, random_branch(rows, a), running(make=make))
        counts.append([c.cache_info().misses for c in caches])
    assert counts[0] == counts[1] == counts[2] and all(counts[0])


def by_oracle(call, settings):
    """The native plan, by a function for packed sequences that is the oracle."""
    flash = lambda q, k, v, mask, n: oracle.attention_varlen(q, k, v, n.cu_q, n.cu_k, scale=call.softmax_scale)[0]
    return native._bound(lambda call: flash, call, settings)


@given(
    a=architectures, rows=layouts, b=st.integers(1, 2), most=st.sampled_from([1, 40, 200_000]), seed=st.integers(0, 99)
)
@settings
def test_the_plan_of_the_packages_is_masked_dense_attention(a, rows, b, most, seed):
    *qkv, gate = tensors(seed, rows, b)
    out = out_of(rows, a, *qkv, gate, random_branch(rows, a, b), running(make=by_oracle, vdn_max_gather_rows=most))
    wanted = masked(*qkv, gate if a.enable_softmax_gate else None, a, rows)
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)


def test_pictures_are_told_which_blocks_are_kept():
    *qkv, gate = tensors(0, ROWS)
    with watched_masks() as seen:
        out_of(ROWS, SMALL, *qkv, gate, random_branch(ROWS, SMALL))
    (one,) = seen
    assert one.backend == NAME and one.mask.keep.shape == (1, 1, 11, 11) and not one.mask.keep.all()


# ---- settings and what does not fit


@pytest.mark.parametrize(
    "words, text",
    [
        ({"vdn_h3_dense_smoke": 1}, "valid boolean"),
        ({"vdn_max_gather_rows": 0}, "greater than or equal to 1"),
        ({"vdn_max_gather_rows": 1.5}, "valid integer"),
        ({"vdn_max_gather": 5}, "vdn_max_gather"),
    ],
)
def test_settings_that_are_wrong(words, text):
    with pytest.raises(ValidationError, match=text):
        Settings(**words)


def test_settings_by_default_are_upstreams():
    assert Settings().model_dump() == {"vdn_h3_dense_smoke": False, "vdn_max_gather_rows": 200_000}


def changed(**tensors):
    x = random_branch(ROWS, SMALL)
    for name, t in tensors.items():
        setattr(x, name, t)
    return x


Z = torch.zeros
CASES = [
    # rows, architecture, gate, branch, what the error says
    (None, SMALL, Z(1, 66, 2), changed(), r"to know how its 66 packed rows lie"),
    (PackedRows((5,), (9, 2, 3)), SMALL, Z(1, 66, 2), changed(), r"given 66 rows, and the packed rows are 5 \+ 9x2x3: 59"),
    (PackedRows((8,), (8, 2, 3), ((1, 2, 3),), 4), SMALL, Z(1, 66, 2), changed(), "for one video, .* have 2"),
    (ROWS, None, None, None, "given none: MiniMax-H3 and FastH3 have no linear branch"),
    (ROWS, {"chunk": 2}, None, None, "given a dict: MiniMax-H3"),
    (ROWS, Architecture(chunk=2), Z(1, 66, 2), changed(), "linear_head_dim is 128, and head_dim 4"),
    (ROWS, SMALL, None, changed(), r"the softmax gate was given none; it must be \[B, rows, H\], here \(1, 66, 2\)"),
    (ROWS, SMALL, Z(1, 2, 66), changed(), r"has shape \(1, 2, 66\); it must be \[B, rows, H\], here \(1, 66, 2\)"),
    (ROWS, SMALL, Z(1, 66, 2), None, "no linear branch, and the window leaves frames of 9 out"),
    (ROWS, SMALL, Z(1, 66, 2), Z(3), "linear is a Tensor; give a LinearBranch"),
    (ROWS, SMALL, Z(1, 66, 2), changed(q=Z(1, 2, 66, 4)), r"q of the linear branch has shape .* here \(1, 66, 2, 4\)"),
    (ROWS, SMALL, Z(1, 66, 2), changed(beta=Z(1, 66)), r"beta .* \[B, rows, H\], here \(1, 66, 2\)"),
    (ROWS, SMALL, Z(1, 66, 2), changed(alpha=Z(1, 8, 2, 4)), r"alpha .* \[B, frames, H, d\], here \(1, 9, 2, 4\)"),
    (ROWS, SMALL, Z(1, 66, 2), changed(norm=Z(3)), r"norm .* \[d\], here \(4,\)"),
    (ROWS, SMALL, Z(1, 66, 2), changed(convs={}), "convs of the linear branch are none; the architecture has k, v"),
    (ROWS, SMALL, Z(1, 66, 2), changed(convs={"k": (Z(8, 1, 3, 3), Z(8, 1, 5)), "v": ()}), r"here \(8, 1, 5, 5\)"),
    (ROWS, SMALL, Z(1, 66, 2), changed(text=9), "text of the linear branch is 9; .* of 8 before the video"),
    (ROWS, replace(SMALL, enable_softmax_gate=False), Z(1, 66, 2), changed(), "gate was given, and no attention"),
]  # fmt: skip


@pytest.mark.parametrize("rows, a, gate, x, text", CASES)
def test_calls_that_do_not_fit(rows, a, gate, x, text):
    *qkv, _ = tensors(0, ROWS)
    with pytest.raises(CallError, match=text), sparse.given(rows=rows, hybrid=a, gate=gate, linear=x):
        running()(*qkv, None, None)


# ---- through hal

CU = torch.tensor([0, ROWS.used, ROWS.tokens], dtype=torch.int32)


def packed(x):
    """The same branch, packed."""
    names = ("q", "k", "v", "beta", "alpha", "gate")
    return LinearBranch(**{n: getattr(x, n)[0] for n in names}, norm=x.norm, text=x.text, convs=x.convs)


def test_both_forms_of_a_call_are_one():
    *qkv, gate = tensors(1, ROWS, dtype=torch.float32)
    x = random_branch(ROWS, SMALL, dtype=torch.float32)
    p = packed(x)
    with fakes.workbench(BACKEND):
        with sparse.given(rows=ROWS, hybrid=SMALL, gate=gate, linear=x):
            one = hal.attention(*(t.transpose(1, 2) for t in qkv), backend=NAME)
        for cu in (CU, CU[[0, 2]]):
            with sparse.given(rows=ROWS, hybrid=SMALL, gate=gate[0], linear=p):
                other = hal.attention_varlen(*(t[0].transpose(0, 1) for t in qkv), cu_seqlens_q=cu, backend=NAME)
            torch.testing.assert_close(other, one[0], atol=0, rtol=0)
            assert p.read.equal(x.read[0])
        with pytest.raises(
            CallError, match=r"one packed sequence, .* cu_seqlens_q tells \[0, 5, 66\]; allowed: \[0, 62, 66\]"
        ):
            with sparse.given(rows=ROWS, hybrid=SMALL, gate=gate[0], linear=p):
                wrong = torch.tensor([0, 5, 66], dtype=torch.int32)
                hal.attention_varlen(*(t[0].transpose(0, 1) for t in qkv), cu_seqlens_q=wrong, backend=NAME)
    torch.testing.assert_close(one.double(), masked(*qkv, gate, SMALL, ROWS).transpose(1, 2), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"is_causal": True}, {"window": 3}, {"return_lse": True}, {"attn_mask": torch.ones(66, 66) > 0},
        {"attn_mask": torch.ones(1, 66) > 0}, {"role": "cross"},
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(arguments):
    *qkv, gate = tensors(0, ROWS, dtype=torch.float32)
    q, k, v = (t.transpose(1, 2) for t in qkv)
    with fakes.workbench(BACKEND), pytest.raises(NoKernelError, match=NAME):
        with sparse.given(rows=ROWS, hybrid=SMALL, gate=gate, linear=random_branch(ROWS, SMALL)):
            hal.attention(q, k, v, backend=NAME, **arguments)


def test_what_is_handed_over_is_not_dropped_in_silence():
    *qkv, gate = tensors(0, ROWS, dtype=torch.float32)
    q, k, v = (t.transpose(1, 2) for t in qkv)
    with pytest.raises(CallError, match="gate, hybrid, linear were given, and no attention inside computes with them"):
        with sparse.given(rows=ROWS, hybrid=SMALL, gate=gate, linear=random_branch(ROWS, SMALL)):
            hal.attention(q, k, v, backend="torch_sdpa")


# ---- the packages


PACKAGES = ["flash_attn_3-3.0.0", "flash_attn_3-3.0.0b1-v2.8.3", "flash_attn_4-4.0.0b36", "sgl_kernel-0.4.10"]
KERNELS = {
    "flash_attn_interface": "hybrid.fa3",
    "flash_attn.cute": "hybrid.fa4",
    "sgl_kernel.flash_attn": "hybrid.fa3.sgl",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_found_proven_and_called_by_its_keywords(name):
    a = Architecture(chunk=2, linear_head_dim=64)
    *qkv, gate = tensors(2, ROWS, 2, 2, 1, d=64, dtype=torch.bfloat16)
    record, outs = fakes.record(name), []
    with fakes.installed(name) as fake:
        with fakes.workbench(BACKEND, **{record.distribution.replace("-", "_"): record.version}):
            for most in (200_000, 1):
                given_settings = (Setting(NAME, "", Settings(vdn_max_gather_rows=most)),)
                x = random_branch(ROWS, a, 2, d=64, dtype=torch.bfloat16)
                with hal.context.changed(policy=policy.Policy(settings=given_settings)):
                    with sparse.given(rows=ROWS, hybrid=a, gate=gate, linear=x):
                        q, k, v = (t.transpose(1, 2) for t in qkv)
                        assert hal.explain(q, k, v, enable_gqa=True, backend=NAME).kernel == KERNELS[record.module]
                        outs.append(hal.attention(q, k, v, enable_gqa=True, scale=0.2, backend=NAME))
    wanted = masked(*qkv, gate, a, ROWS, 0.2).transpose(1, 2)
    torch.testing.assert_close(outs[0].double(), wanted, atol=2e-2, rtol=2e-2)
    assert outs[0].equal(outs[1])
    assert {c["symbol"] for c in fake.calls} == {"flash_attn_varlen_func"}
    groups = len(window.plan(a, ROWS, 1).groups)
    assert [len(c["cu_seqlens_q"]) - 1 for c in fake.calls] == [1, groups] * 2 + [1] * (1 + groups) * 2
    for c in fake.calls:
        assert c["softmax_scale"] == 0.2 and c["causal"] is False and c["cu_seqlens_k"].dtype is torch.int32


def test_a_package_runs_dense_where_the_window_has_all_frames():
    a = Architecture(radius=9, linear_head_dim=64)
    *qkv, gate = tensors(2, ROWS, d=64, dtype=torch.bfloat16)
    fake = fakes.of("flash_attn_3-3.0.0")
    with fakes.modules({"flash_attn_interface": fake.functions}):
        run = native.fa3(Call(head_dim=64), Settings())
    out = out_of(ROWS, a, *qkv, gate, None, run)
    torch.testing.assert_close(out.double(), masked(*qkv, gate, a, ROWS), atol=2e-2, rtol=2e-2)
    (call,) = fake.calls
    assert call["cu_seqlens_q"].tolist() == call["cu_seqlens_k"].tolist() == [0, ROWS.used]


# ---- where it runs

CATALOG = plugins.catalog()
PLAIN = Call.of(dtype="bfloat16", head_dim=128, heads=4, batch=1, q_len=4096, varlen=True)


def decided(machine, call=PLAIN, **packages):
    with hal.simulate(machine, packages=packages) as m:
        request = policy.Request(NAME, source="a test", kind="force")
        return hal.resolve(call, m, CATALOG, policy.Policy((request,)))


WHERE = [
    # machine, packages, kernel
    ("cuda:sm80", {"flash_attn_3": "3.0.0"}, "hybrid.fa3"),
    ("cuda:sm86", {"flash_attn_3": "3.0.0"}, "hybrid.fa3"),
    ("cuda:sm89", {"sgl_kernel": "0.4.10"}, "hybrid.fa3.sgl"),
    ("cuda:sm90", {"flash_attn_3": "3.0.0", "flash_attn_4": "4.0.0b36"}, "hybrid.fa3"),
    ("cuda:sm90", {"kernels": "0.17.2"}, "hybrid.fa3.hub"),
    ("cuda:sm90", {"flash_attn_4": "4.0.0b36", "triton": None}, "hybrid.portable"),
    ("cuda:sm100", {"flash_attn_4": "4.0.0b36"}, "hybrid.fa4"),
    ("cuda:sm103", {"flash_attn_4": "4.0.0b36"}, "hybrid.fa4"),
    ("cuda:sm120", {"flash_attn_4": "4.0.0b36"}, "hybrid.fa4"),
    ("cuda:sm121", {"flash_attn_4": "4.0.0b36", "triton": None}, "hybrid.portable"),
    ("cuda:sm90", {"triton": "3.7.0"}, "hybrid.triton"),
    ("cuda:sm121", {"triton": "3.7.0"}, "hybrid.triton"),
    ("rocm:gfx942", {"triton": "3.7.0"}, "hybrid.triton"),
    ("mi250", {"triton": "3.7.0"}, "hybrid.portable"),
    *((m, {}, "hybrid.portable") for m in ("m1", "max1550", "910b", "s5000", "cpu:x86-64-v3")),
]


@pytest.mark.parametrize("machine, packages, kernel", WHERE)
def test_where_each_kernel_runs(machine, packages, kernel):
    assert decided(machine, **packages).kernel == kernel


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"head_dim": 96, "v_head_dim": 96}, {"grad": True}])
def test_what_the_packages_do_not_take_the_portable_form_does(change):
    assert decided("h100", PLAIN.but(**change), flash_attn_3="3.0.0", triton=None).kernel == "hybrid.portable"


@pytest.mark.parametrize("machine", ["h100", "b200", "mi300x", "m1", "cpu:x86-64-v3"])
@pytest.mark.parametrize(
    "fact", [{"ring": 2}, {"compile": True}, {"graph": True}, {"causal": True}, {"deterministic": True}]
)
def test_rings_compilation_and_graphs_are_refused_everywhere(machine, fact):
    d = decided(machine, PLAIN.but(**fact), triton="3.7.0", flash_attn_3="3.0.0", flash_attn_4="4.0.0b36")
    assert d.chosen is None and next(iter(fact)) in d.error
    if "ring" in fact:
        assert "split heads instead: Ulysses" in d.error


def test_ulysses_is_allowed():
    assert decided("h100", PLAIN.but(ulysses=4), flash_attn_3="3.0.0").kernel == "hybrid.fa3"


def test_triton_has_the_architectures_that_it_is_compiled_for():
    for platform, target in (("cuda", "cuda"), ("rocm", "hip")):
        rows = [r for r in CATALOG.platforms[platform].support[NAME] if r.kernel == "hybrid.triton"]
        assert {a for r in rows for a in r.on} == {a for a, x in ARCHS.items() if x.target == target}
        assert {r.tier for r in rows} == {"in-tree"}


def test_the_declaration():
    assert BACKEND.quality == "lossy" and BACKEND.roles == {"self"} and BACKEND.fallback == "torch_sdpa"
    for kernel in (*FLASH, TRITON, PORTABLE):
        assert "varlen" in kernel.honours and callable(kernel.binder())
        assert not kernel.honours & {"causal", "rectangular", "compile", "graph", "window", "dropout", "lse"}


# ---- other devices

CALL = """
import torch
from hal import sparse
from hal.backends.hybrid_window_attn_h3 import portable
from hal.backends.hybrid_window_attn_h3.delta import LinearBranch
from hal.backends.hybrid_window_attn_h3.settings import Settings
from hal.backends.hybrid_window_attn_h3.window import Architecture
from hal.facts import Call
from hal.sparse import PackedRows

rows, a = PackedRows((5, 2), (4, 2, 3), pad=5), Architecture(chunk=1, radius=0, linear_head_dim=16)

def outs(kind, dtype, device="cpu"):
    g = torch.Generator().manual_seed(0)
    one = lambda *shape: torch.randn(*shape, generator=g).to(dtype).to(device)
    n = rows.tokens
    q, k, v = (one(1, 2, n, 16) for _ in range(3))
    x = LinearBranch(*(one(1, n, 2, 16) for _ in range(3)), one(1, n, 2).sigmoid(), one(1, 4, 2, 16).sigmoid().float(),
                     one(1, n, 2, 16).sigmoid(), one(16), 5, {c: (one(32, 1, 5, 5), one(32, 1, 5)) for c in "kv"})
    with sparse.given(rows=rows, hybrid=a, gate=one(1, n, 2).sigmoid(), linear=x):
        return getattr(portable, kind)(Call(head_dim=16), Settings())(q, k, v, None, None), x.read
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_triton_kernel_gives_what_the_portable_form_gives(python):
    code = CALL + agreeing("triton", "bind", {"float16": 2e-3})
    ran = python(code, TRITON_INTERPRET="1")
    assert (ran.code, ran.out) == (0, "same\n"), ran.err


def test_a_device_without_float64(python):
    code = DEVICE + CALL + agreeing("bind", "bind", {"float32": 1e-4, "bfloat16": 5e-2}, "fake")
    ran = python(code)
    assert (ran.code, ran.out) == (0, "same\n"), ran.err
