"""VSA-H3: by its definition, its rules, its settings, and what it refuses."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch
from fake_device import DEVICE, agreeing
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

import hal
from hal import oracle, plugins, policy, sparse
from hal.backends.video_sparse_attn_h3 import BACKEND, PORTABLE, TRITON, portable
from hal.backends.video_sparse_attn_h3.settings import Settings
from hal.config import Setting
from hal.context import position
from hal.errors import CallError, NoKernelError
from hal.facts import Call
from hal.sparse import PackedRows, packed
from hal.sparse import selected as glue
from hal.sparse.triton.tiles import ARCHS
from hal.testing import fakes

NAME = "video_sparse_attn_h3"
settings = hypothesis_settings(max_examples=10, deadline=None)
sides = st.integers(1, 5)
videos = st.tuples(sides, sides, st.integers(1, 9))
layouts = st.builds(
    PackedRows,
    prefix=st.lists(st.one_of(st.integers(0, 90), st.integers(0, 90), videos), max_size=2).map(tuple),
    video=videos,
    refs=st.lists(videos, max_size=1).map(tuple),
    pad=st.sampled_from([0, 7]),
)
alone = layouts.filter(lambda rows: rows.videos == 1)
LAYOUT = PackedRows((70, 0, 100), (5, 6, 10), pad=22)


def tensors(seed, rows, b=1, h=2, kv_heads=2, d=8):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, n, rows.tokens, d, generator=g, dtype=torch.float64) for n in (h, kv_heads, kv_heads))


def tiles_of(rows):
    """The tile of each used row, counted through, and of each tile its segment (None: of no video)."""
    of, kinds = [], []
    for i, s in enumerate(rows.segments):
        if isinstance(s, int):
            at, n = torch.arange(s) // 64, -(-s // 64)
        else:
            xyz = torch.cartesian_prod(*(torch.arange(m) // 4 for m in s)).view(-1, 3)
            a, b, c = (-(-m // 4) for m in s)
            at, n = (xyz[:, 0] * b + xyz[:, 1]) * c + xyz[:, 2], a * b * c
        of.append(at + len(kinds))
        kinds += [None if isinstance(s, int) else i] * n
    return torch.cat(of), kinds


def kept_number(n, keep):
    return max(1, min(n, math.ceil(keep * n - 1e-9)))


def definition(q, k, v, rows, share, *, mode="exempt", rate=None, scale=None, gate=None):
    """VSA-H3 in float64, row by row, from its description."""
    of, kinds = tiles_of(rows)
    q, k, v = (x[:, :, : rows.used].double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    one_hot = torch.nn.functional.one_hot(of, len(kinds)).double()
    means = lambda x: torch.einsum("tn,bhtd->bhnd", one_hot, x) / one_hot.sum(0)[:, None]
    scores = means(q) @ means(k).transpose(-1, -2) * scale
    target = [i for i, s in enumerate(rows.segments) if not isinstance(s, int)][
        sum(not isinstance(s, int) for s in rows.prefix)
    ]
    keep = torch.ones_like(scores, dtype=torch.bool)
    rest = lambda among: (
        scores.masked_fill(~among, -torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    )
    if mode == "compete":
        n = sum(x is not None for x in kinds)
        keep = rest(torch.ones(len(kinds), dtype=torch.bool)) < kept_number(n, 1 - share) + len(kinds) - n
    for segment in sorted({x for x in kinds if x is not None}) if mode == "exempt" and share else ():
        among = torch.tensor([x == segment for x in kinds])
        part = 1 - share if rate is None or segment == target else rate
        keep = keep & (~among | (rest(among) < kept_number(int(among.sum()), part)))
    keep = keep | torch.tensor([x is None for x in kinds])[:, None]
    out = oracle.attention(q, k, v, attn_mask=keep[..., of, :][..., of], layout="bhsd", scale=scale)[0]
    if gate is not None:
        out = out + (scores.softmax(-1) @ means(v))[..., of, :] * gate.transpose(1, 2)[:, :, : rows.used]
    return torch.nn.functional.pad(out, (0, 0, 0, rows.pad))


def running(call=None, **words):
    return portable.bind(call or Call(head_dim=8), Settings(**words))


def out_of(rows, q, k, v, gate=None, **words):
    with sparse.given(rows=rows, gate=gate):
        return running(**words)(q, k, v, None, None)


# ---- the run


@given(
    rows=layouts, b=st.integers(1, 2), kv_heads=st.sampled_from([1, 2]), share=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    mode=st.sampled_from(["exempt", "compete"]), rate=st.sampled_from([None, 0.5, 1.0]),
    scale=st.sampled_from(["default", 0.3]), gated=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@hypothesis_settings(max_examples=20, deadline=None)
def test_equals_its_definition(rows, b, kv_heads, share, mode, rate, scale, gated, seed):
    mode = mode if rows.videos == 1 else "exempt"
    rate = rate if mode == "exempt" else None
    q, k, v = tensors(seed, rows, b, 2, kv_heads)
    gate = torch.randn(b, rows.tokens, 2, 8, dtype=torch.float64) if gated else None
    run = running(Call(head_dim=8, scale=scale), sparsity=share, vsa_mode=mode, vsa_ref_keep_rate=rate)
    with sparse.given(rows=rows, gate=gate):
        out = run(q, k, v, None, None)
    wanted = definition(
        q, k, v, rows, share, mode=mode, rate=rate, scale=None if scale == "default" else scale, gate=gate
    )
    torch.testing.assert_close(out, wanted, atol=2e-5 if gated else 1e-10, rtol=0)  # means are float32


@given(rows=layouts, mode=st.sampled_from(["exempt", "compete"]), seed=st.integers(0, 99))
@settings
def test_without_sparsity_and_gate_it_is_packed_dense(rows, mode, seed):
    mode = mode if rows.videos == 1 else "exempt"
    q, k, v = tensors(seed, rows, kv_heads=1)
    zero = torch.zeros(1, rows.tokens, 2, 8, dtype=torch.float64)
    cu = torch.tensor([0, rows.used], dtype=torch.int32)
    wanted = oracle.attention_varlen(*(x[0, :, : rows.used].transpose(0, 1) for x in (q, k, v)), cu, cu)[0]
    for gate in (None, zero):
        out = out_of(rows, q, k, v, gate, sparsity=0.0, vsa_mode=mode)
        torch.testing.assert_close(out[0, :, : rows.used].transpose(0, 1), wanted, atol=1e-10, rtol=0)


@given(rows=layouts, share=st.sampled_from([0.5, 0.9]), seed=st.integers(0, 99))
@settings
def test_rows_of_no_video_are_dense_and_pad_rows_are_nothing(rows, share, seed):
    q, k, v = tensors(seed, rows)
    for x in (q, k, v):
        x[:, :, rows.used :] = torch.nan
    out = out_of(rows, q, k, v, sparsity=share)
    wanted = oracle.attention(*(x[:, :, : rows.used] for x in (q, k, v)), layout="bhsd")[0]
    of, kinds = tiles_of(rows)
    dense = torch.tensor([x is None for x in kinds])[of]
    torch.testing.assert_close(out[:, :, : rows.used][:, :, dense], wanted[:, :, dense], atol=1e-10, rtol=0)
    assert not out.isnan().any() and not out[:, :, rows.used :].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gate_of_zero_changes_no_bit(dtype):
    q, k, v = (x.to(dtype) for x in tensors(0, LAYOUT, 2))
    gate = torch.zeros(2, LAYOUT.tokens, 2, 8, dtype=dtype)
    for share in (0.0, 0.5):
        plain, gated = (out_of(LAYOUT, q, k, v, g, sparsity=share) for g in (None, gate))
        assert gated.dtype is dtype and gated.equal(plain)


@given(rows=layouts, share=st.sampled_from([0.3, 0.5, 0.9, 0.99]), seed=st.integers(0, 99))
@settings
def test_exempt_keeps_every_tile_of_no_video_and_the_best_of_each_video(rows, share, seed):
    order = rows.order((4, 4, 4))
    scores = torch.randn(1, 2, order.blocks, order.blocks, generator=torch.Generator().manual_seed(seed))
    keep = portable.kept(scores, order, share, Settings(vsa_ref_keep_rate=0.5))
    assert keep[..., order.dense].all() and keep[:, :, order.dense].all()
    for i, (a, b) in enumerate(order.regions):
        number = kept_number(b - a, 1 - share if i == order.target else 0.5)
        assert (keep[:, :, ~order.dense, a:b].sum(-1) == number).all()


@given(rows=alone, share=st.sampled_from([0.3, 0.5, 0.9]), seed=st.integers(0, 99))
@settings
def test_compete_keeps_as_many_tiles_in_all(rows, share, seed):
    order = rows.order((4, 4, 4))
    scores = torch.randn(1, 2, order.blocks, order.blocks, generator=torch.Generator().manual_seed(seed))
    keep = portable.kept(scores, order, share, Settings(vsa_mode="compete"))
    n, text = int((~order.dense).sum()), int(order.dense.sum())
    assert (keep[:, :, ~order.dense].sum(-1) == kept_number(n, 1 - share) + text).all()
    assert keep[:, :, order.dense].all()


@given(sizes=st.permutations([70, 33, 100]), share=st.sampled_from([0.5, 0.9]), seed=st.integers(0, 99))
@settings
def test_the_order_of_the_segments_before_the_video_does_not_matter(sizes, share, seed):
    rows, other = PackedRows((70, 33, 100), (5, 4, 6)), PackedRows(tuple(sizes), (5, 4, 6))
    at = dict(zip((70, 33, 100, 0), torch.arange(rows.tokens).split([70, 33, 100, 120])))
    moved = torch.cat([at[n] for n in (*sizes, 0)])
    q, k, v = tensors(seed, rows)
    gate = torch.randn(1, rows.tokens, 2, 8, dtype=torch.float64)
    out = out_of(rows, q, k, v, gate, sparsity=share)
    again = out_of(other, *(x[:, :, moved] for x in (q, k, v)), gate[:, moved], sparsity=share)
    torch.testing.assert_close(again, out[:, :, moved], atol=2e-5, rtol=0)


def test_gradients_are_the_definitions():
    rows = PackedRows((20, 70), (5, 4, 3), pad=3)
    q, k, v = (x.requires_grad_() for x in tensors(3, rows, kv_heads=1))
    gate = torch.randn(1, rows.tokens, 2, 8, dtype=torch.float64, requires_grad=True)
    mine = torch.autograd.grad(out_of(rows, q, k, v, gate, sparsity=0.5).sin().sum(), (q, k, v, gate))
    wanted = definition(q, k, v, rows, 0.5, gate=gate).sin().sum()
    for a, b in zip(mine, torch.autograd.grad(wanted, (q, k, v, gate))):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_on_structured_data_the_best_cubes_are_nearly_all_of_it():
    """Each cube is one of 16 clusters; text has its own.  Random cubes of that number are the yardstick."""
    rows, g = PackedRows((64,), (8, 16, 16)), torch.Generator().manual_seed(0)
    of, kinds = tiles_of(rows)
    cluster = torch.tensor([16 if x is None else (i - 1) // 2 for i, x in enumerate(kinds)])[of]
    noise = lambda a: torch.randn(rows.tokens, 64, generator=g) * a
    centre, value = torch.randn(17, 64, generator=g) * 1.2, torch.randn(17, 64, generator=g)
    q, k, v = ((x[cluster] + noise(a))[None, None] for x, a in ((centre, 0.4), (centre, 0.4), (value, 0.3)))
    dense = oracle.attention(q, k, v, layout="bhsd")[0]
    with sparse.given(rows=rows):
        out = running(Call(head_dim=64), sparsity=0.875)(q, k, v, None, None).double()
    order = rows.order((4, 4, 4))
    keep = portable.kept(torch.rand(1, 1, order.blocks, order.blocks, generator=g), order, 0.875, Settings())
    chance = order.from_blocks(sparse.block_sparse_attention(*map(order.to_blocks, (q, k, v)), order.mask(keep)))
    assert torch.cosine_similarity(out.flatten(), dense.flatten(), 0) > 0.999
    assert (out - dense).norm() * 10 <= (chance - dense).norm()


# ---- steps and layers


@pytest.mark.parametrize("step, layer, share", [(0, 9, 0.0), (1, 9, 0.0), (2, 9, 0.6), (9, 9, 0.6), (9, 1, 0.0)])
def test_dense_steps_and_layers_have_no_sparsity_and_the_gate_all_the_same(step, layer, share):
    q, k, v = tensors(0, LAYOUT)
    gate = torch.randn(1, LAYOUT.tokens, 2, 8, dtype=torch.float64)
    words = {"sparsity": 0.6, "vsa_dense_first_n_steps": 2, "vsa_dense_layers": "0-1"}
    with position(step=step, steps=10, layer=layer):
        out = out_of(LAYOUT, q, k, v, gate, **words)
    torch.testing.assert_close(out, definition(q, k, v, LAYOUT, share, gate=gate), atol=2e-5, rtol=0)


def test_a_step_builds_nothing_anew():
    rows = PackedRows((71, 3), (5, 4, 7))
    q, k, v = tensors(0, rows)
    before = packed._order.cache_info().misses
    for step in range(3):
        with position(step=step, steps=3):
            out_of(PackedRows((71, 3), (5, 4, 7)), q, k, v)
    assert packed._order.cache_info().misses == before + 1


@pytest.mark.parametrize(
    "words, text",
    [
        ({"sparsity": 1.0}, "less than 1"),
        ({"VSA_sparsity": -0.1}, "greater than or equal to 0"),
        ({"vsa_mode": "free"}, "exempt"),
        ({"vsa_tile_size": 128}, "64"),
        ({"vsa_dense_first_n_steps": -1}, "greater than or equal to 0"),
        ({"vsa_dense_layers": "0,x"}, "no layer"),
        ({"vsa_ref_keep_rate": 0.0}, "greater than 0"),
        ({"vsa_ref_keep_rate": 1.1}, "less than or equal to 1"),
        ({"vsa_ref_keep_rate": 0.5, "vsa_mode": "compete"}, "vsa_ref_keep_rate is for vsa_mode=exempt"),
        ({"vsa_sparse": 0.1}, "vsa_sparse"),
    ],
)
def test_settings_that_are_wrong(words, text):
    with pytest.raises(ValidationError, match=text):
        Settings(**words)


def test_settings_by_default_are_those_that_fasth3_was_trained_with():
    assert Settings().model_dump() == {
        "sparsity": 0.9, "vsa_mode": "exempt", "vsa_dense_first_n_steps": 0, "vsa_dense_layers": (), "vsa_tile_size": 64,
        "vsa_ref_keep_rate": None,
    }  # fmt: skip
    assert Settings(VSA_sparsity=0.5).sparsity == 0.5


# ---- what does not fit


OTHERS = PackedRows((70,), (5, 6, 10), ((2, 6, 10),))


@pytest.mark.parametrize(
    "rows, words, text",
    [
        (None, {}, r"to know how its 492 packed rows lie, and nothing says so; write with hal\.sparse\.given\(rows="),
        (PackedRows((70,), (5, 6, 10)), {}, r"was given 492 rows, and the packed rows are 70 \+ 5x6x10: 370 in all"),
        (PackedRows((72,), (5, 6, 10), ((2, 6, 10),)), {"vsa_mode": "compete"}, "compete is for one video, .* have 2"),
        (LAYOUT, {"vsa_dense_first_n_steps": 1}, "the denoising step for vsa_dense_first_n_steps"),
        (LAYOUT, {"vsa_dense_layers": 1}, "the index of the layer for vsa_dense_layers"),
    ],
)
def test_calls_that_do_not_fit(rows, words, text):
    q, k, v = tensors(0, LAYOUT)
    with position(), pytest.raises(CallError, match=text):
        out_of(rows, q, k, v, **words)


@pytest.mark.parametrize("packed_form", [False, True])
def test_a_gate_must_fit(packed_form):
    q, _, v = tensors(0, LAYOUT)
    gate = torch.zeros(1, 2, 492, 8)
    wanted = r"\[rows, H, Dv\], here \(492, 2, 8\)" if packed_form else r"\[B, rows, H, Dv\], here \(1, 492, 2, 8\)"
    with pytest.raises(CallError, match=r"\(1, 2, 492, 8\); it must be " + wanted):
        with sparse.given(gate=gate):
            glue.taken_gate((*q.shape[:3], v.shape[-1]), "rows", packed_form)


# ---- through hal


def packed_call(rows, q, k, v, cu, cu_k=None, **arguments):
    x = (t[0].transpose(0, 1).float() for t in (q, k, v))
    cu_q, cu_k = (c and torch.tensor(c, dtype=torch.int32) for c in (cu, cu_k))
    return hal.attention_varlen(*x, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=NAME, **arguments)


def test_both_forms_of_a_call_are_one():
    q, k, v = tensors(1, LAYOUT)
    gate = torch.randn(LAYOUT.tokens, 2, 8)
    given = (Setting(NAME, "", Settings(sparsity=0.8)),)
    wanted = definition(q, k, v, LAYOUT, 0.8, gate=gate[None].double())
    with fakes.workbench(BACKEND), hal.context.changed(policy=policy.Policy(settings=given)):
        with sparse.given(rows=LAYOUT, gate=gate):
            out = packed_call(LAYOUT, q, k, v, [0, 470, 492])
        torch.testing.assert_close(out.double(), wanted[0].transpose(0, 1), atol=2e-5, rtol=0)
        with sparse.given(rows=LAYOUT, gate=gate[None]):
            out = hal.attention(*(t.float() for t in (q, k, v)), layout="bhsd", backend=NAME)
        torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("text, first", [(0, False), (9, False), (9, True)])
def test_where_no_rows_are_given_the_grid_says_how_they_lie(text, first):
    rows = PackedRows((text,) if first else (), (5, 6, 7), () if first else (text,))
    q, k, v = tensors(2, rows)
    with hal.grid(5, 6, 7, text=text, text_first=first):
        out = running(sparsity=0.6)(q, k, v, None, None)
    torch.testing.assert_close(out, definition(q, k, v, rows, 0.6), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "cu_q, cu_k, wrong",
    [
        ([0, 460, 492], None, "q"),
        ([0, 22, 492], None, "q"),
        ([0, 470, 492], [0, 22, 492], "k"),  # as long, and the other way round
    ],
)
def test_the_rows_must_be_those_of_cu_seqlens(cu_q, cu_k, wrong):
    with fakes.workbench(BACKEND), sparse.given(rows=LAYOUT):
        with pytest.raises(CallError, match=rf"cu_seqlens_{wrong} tells .*; allowed: \[0, 470, 492\]"):
            packed_call(LAYOUT, *tensors(0, LAYOUT), cu_q, cu_k)


def test_rows_must_be_packed_rows():
    with fakes.workbench(BACKEND), pytest.raises(CallError, match=r"rows is \(70, 100\); it must be hal.sparse.Packed"):
        with sparse.given(rows=(70, 100)):
            packed_call(LAYOUT, *tensors(0, LAYOUT), [0, 470, 492])


@pytest.mark.parametrize(
    "arguments", [{"is_causal": True}, {"window": 3}, {"return_lse": True}, {"dropout_p": 0.1}, {"role": "cross"}]
)
def test_what_it_cannot_do_is_refused_before_the_rows_are_looked_at(arguments):
    with fakes.workbench(BACKEND), pytest.raises(NoKernelError, match=NAME):
        packed_call(LAYOUT, *tensors(0, LAYOUT), [0, 470, 492], **arguments)


CATALOG = plugins.catalog()
PLAIN = Call.of(dtype="bfloat16", head_dim=128, heads=4, batch=1, q_len=4096, varlen=True)


def decided(machine, call=PLAIN, **packages):
    with hal.simulate(machine, packages=packages, without="triton" if not packages else ()) as m:
        return hal.resolve(call, m, CATALOG, policy.Policy((policy.Request(NAME),)))


@pytest.mark.parametrize("fact", [{"ring": 2}, {"compile": True}, {"graph": True}, {"mask": "bool"}, {"causal": True}])
@pytest.mark.parametrize("machine", ["h100", "cpu:x86-64-v3", "mi300x"])
def test_ring_compile_graphs_masks_are_refused_everywhere(machine, fact):
    d = decided(machine, PLAIN.but(**fact), triton="3.7.0")
    assert d.chosen is None and next(iter(fact)).partition("_")[0] in d.error
    if "ring" in fact:
        assert "split heads instead: Ulysses" in d.error


def test_several_sequences_are_refused_before_anything_runs():
    assert decided("h100", PLAIN.but(batch=2), triton="3.7.0").kernel == "vsa_h3.triton"
    assert "call it once for each sequence" in decided("h100", PLAIN.but(batch=3), triton="3.7.0").error
    assert decided("h100", PLAIN.but(batch=3, varlen=False), triton="3.7.0").kernel == "vsa_h3.triton"


def test_ulysses_is_allowed():
    assert decided("h100", PLAIN.but(ulysses=4), triton="3.7.0").kernel == "vsa_h3.triton"


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_triton_has_the_architectures_that_it_is_compiled_for_and_the_portable_form_has_the_rest(platform):
    p = CATALOG.platforms[platform]
    mine = {a for row in p.support[NAME] for a in row.on}
    assert mine == {a for a, x in ARCHS.items() if x.target == ("cuda" if platform == "cuda" else "hip")}
    assert {row.tier for row in p.support[NAME]} == {"in-tree"}
    for arch in sorted(mine)[:2]:
        assert decided(f"{platform}:{arch}", triton="3.7.0").kernel == "vsa_h3.triton"
        assert decided(f"{platform}:{arch}").kernel == "vsa_h3.portable"
        assert decided(f"{platform}:{arch}", PLAIN.but(grad=True), triton="3.7.0").kernel == "vsa_h3.portable"


@pytest.mark.parametrize("machine", ["v100", "m1", "max1550", "910b", "s5000", "cpu:x86-64-v3", "mi250"])
def test_the_portable_form_runs_everywhere(machine):
    dtype = "float16" if machine == "v100" else "bfloat16"
    assert decided(machine, PLAIN.but(dtype=dtype), triton="3.7.0").kernel == "vsa_h3.portable"


def test_the_declaration():
    assert BACKEND.quality == "lossy" and BACKEND.roles == {"self"} and BACKEND.fallback == "torch_sdpa"
    for kernel in (TRITON, PORTABLE):
        assert "varlen" in kernel.honours
        assert not kernel.honours & {"causal", "rectangular", "compile", "graph", "window", "dropout", "lse"}
        assert callable(kernel.binder())


# ---- other devices

CALL = """
import torch
from hal import sparse
from hal.backends.video_sparse_attn import portable as vsa
from hal.backends.video_sparse_attn.settings import Settings as VSA
from hal.backends.video_sparse_attn_h3 import portable as h3
from hal.backends.video_sparse_attn_h3.settings import Settings
from hal.facts import Call
from hal.sparse import PackedRows
import hal

torch.manual_seed(0)
rows = PackedRows((20, 9), (5, 3, 4), pad=5)

def outs(kind, dtype, device="cpu"):
    g = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(1, 2, rows.tokens, 16, generator=g).to(dtype).to(device) for _ in range(4))
    call, name = Call(head_dim=16), "triton" if kind == "triton" else "bind"
    with sparse.given(rows=rows, gate=gate.transpose(1, 2)):
        yield getattr(h3, name)(call, Settings(sparsity=0.7))(q, k, v, None, None)
    video = [x[:, :, :60] for x in (q, k, v)]
    with hal.grid(5, 3, 4), sparse.given(gate=gate[:, :, :60].transpose(1, 2)):
        yield getattr(vsa, name)(call, VSA(sparsity=0.7))(*video, None, None)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_triton_kernel_gives_what_the_portable_form_gives(python):
    code = CALL + agreeing("triton", "portable", {"float32": 1e-5, "float16": 2e-3})
    ran = python(code, TRITON_INTERPRET="1")
    assert (ran.code, ran.out) == (0, "same\n"), ran.err


def test_a_device_without_float64(python):
    code = DEVICE + CALL + agreeing("portable", "portable", {"float32": 1e-5, "bfloat16": 5e-2}, "fake")
    ran = python(code)
    assert (ran.code, ran.out) == (0, "same\n"), ran.err


def test_what_it_attends_to_can_be_watched():
    """As ``hal mask`` does: the mask of a sparse call, None of a dense one, and the order that says where tiles lie."""
    q, k, v = tensors(0, LAYOUT)
    with glue.watched_masks() as seen:
        out_of(LAYOUT, q, k, v, sparsity=0.5)
        out_of(LAYOUT, q, k, v, sparsity=0.0)
    (sparse_call, dense_call), order = seen, LAYOUT.order((4, 4, 4))
    assert sparse_call.backend == NAME and sparse_call.order is order and dense_call.mask is None
    assert sparse_call.mask.density < 1 and sparse_call.mask.keep[..., :4].all()
