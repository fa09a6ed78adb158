"""VDN-H3's window of frames and its linear branch, by their definitions: frame by frame, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hal.backends.hybrid_window_attn_h3 import delta, window
from hal.backends.hybrid_window_attn_h3.delta import LinearBranch
from hal.backends.hybrid_window_attn_h3.window import Architecture
from hal.errors import CallError
from hal.sparse import PackedRows

settings = hypothesis_settings(max_examples=25, deadline=None)
architectures = st.builds(
    Architecture,
    chunk=st.integers(0, 5),
    radius=st.integers(0, 2),
    anchor_frames=st.sampled_from(["none", "columns", "rows", "both"]),
    enable_softmax_gate=st.booleans(),
    delta_rule=st.sampled_from(["vdn_solve", "sana_scaled", "vdn_scaled"]),
    bridge=st.sampled_from(["alpha", "none"]),
    enable_text_state=st.booleans(),
    short_conv=st.lists(st.sampled_from("qkv"), unique=True).map(tuple),
    linear_head_dim=st.just(4),
)
layouts = st.builds(
    PackedRows,
    prefix=st.tuples(st.integers(0, 6), st.integers(0, 3)),
    video=st.tuples(st.integers(1, 13), st.integers(1, 3), st.integers(1, 3)),
    refs=st.sampled_from([(), (2,)]),
    pad=st.sampled_from([0, 5]),
)


def random_branch(rows, a, b=1, h=2, d=4, seed=0, dtype=torch.float64, text=None):
    g = torch.Generator().manual_seed(seed)
    one = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    n = rows.tokens
    return LinearBranch(
        *(one(b, n, h, d) for _ in "qkv"),
        beta=one(b, n, h).sigmoid(),
        alpha=one(b, rows.video[0], h, d).sigmoid().float() if dtype is not torch.float64 else one(b, rows.video[0], h, d).sigmoid(),
        gate=one(b, n, h, d).sigmoid(),
        norm=1 + one(d) * 0.1,
        text=rows.prefix[0] if text is None and rows.prefix else text or 0,
        convs={c: (one(h * d, 1, 5, 5) * 0.3, one(h * d, 1, 5) * 0.5) for c in a.short_conv},
    )  # fmt: skip


def frame_maps(x, a, frames, size, first, rule=None):
    """(features of q, T, J) of each frame, one by one, with an explicit inverse; and the state of the prompt, or None."""
    per, (h, d) = size[0] * size[1], x.q.shape[2:]
    start = first + frames[0] * per
    raw = {n: getattr(x, n).double()[:, start : start + len(frames) * per] for n in "qkv"}
    f = {}
    for n, t in raw.items():
        if n in a.short_conv:
            spatial, temporal = (w.double() for w in x.convs[n])
            planes = t.unflatten(1, (len(frames), *size)).flatten(-2).permute(0, 1, 4, 2, 3)
            planes = torch.stack(
                [
                    torch.nn.functional.conv2d(planes[:, i], spatial, padding=2, groups=h * d)
                    for i in range(len(frames))
                ],
                1,
            )
            lines = planes.permute(0, 3, 4, 2, 1).flatten(0, 2)  # [B * rows * columns, C, F]
            lines = torch.nn.functional.conv1d(lines, temporal, padding=2, groups=h * d)
            lines = lines.unflatten(0, (t.shape[0], *size)).permute(0, 4, 1, 2, 3)
            t = lines.reshape(t.shape[0], len(frames) * per, h, d)
        f[n] = feature(t, n)
    maps = []
    for i, t in enumerate(frames):
        rows = slice(i * per, (i + 1) * per)
        beta = x.beta.double()[:, start + i * per : start + (i + 1) * per]
        maps.append(frame_map(a.delta_rule, x.alpha.double()[:, t], f["k"][:, rows], f["v"][:, rows], beta))
    text = None
    if a.enable_text_state and x.text:
        k, v = (feature(getattr(x, n).double()[:, : x.text], n) for n in "kv")
        ones = torch.ones(x.q.shape[0], h, d, dtype=torch.float64)
        text = 0.5 * frame_map(a.delta_rule, ones, k, v, x.beta.double()[:, : x.text])[1]
    return f["q"].unflatten(1, (len(frames), per)), maps, text


def feature(t, name):
    t = t * t.sigmoid()
    return t if name == "v" else t / t.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-6)


def frame_map(rule, alpha, k, v, beta):
    """(T, J) [B, H, d, d] of one frame with tokens k, v [B, P, H, d]."""
    p, eye = k.shape[1], torch.eye(k.shape[-1], dtype=torch.float64)
    a = torch.einsum("bph,bphi,bphj->bhij", beta, k, k)
    b = torch.einsum("bph,bphi,bphj->bhij", beta, v, k)
    keep = torch.diag_embed(alpha)
    if rule == "sana_scaled":
        return keep @ (eye - a / p), b / p**0.5
    a, b = (a / p, b / p**0.5) if rule == "vdn_scaled" else (a, b)
    return keep @ torch.linalg.inv(eye + a), b @ torch.linalg.inv(eye + a)


def scan(maps, start):
    out = []
    for keep, add in maps:
        start = start @ keep + add
        out.append(start)
    return out


def definition(x, a, rows):
    """[B, rows, H, d]: the read of every row, 0 where none is."""
    frames, *size = rows.video
    inner = list(range(1, frames - 1)) if a.anchor_frames == "both" else list(range(frames))
    out = torch.zeros(x.q.shape, dtype=torch.float64)
    if not inner:
        return out
    q, maps, text = frame_maps(x, a, inner, size, rows.first)
    start = torch.zeros_like(maps[0][1]) if text is None else text
    prefix, suffix = scan(maps, start), scan(maps[::-1], start)[::-1]
    bounds, per, n = a.bounds(frames), size[0] * size[1], len(inner)
    for i, t in enumerate(inner):
        lo, hi = (edge - inner[0] for edge in bounds[t])
        before = prefix[lo - 1] if lo > 0 else start
        after = suffix[hi + 1] if hi < n - 1 else start
        if a.bridge == "alpha":
            for u in range(max(lo, 0), i + 1):
                before = before * x.alpha.double()[:, inner[u], :, None]
            for u in range(i, min(hi, n - 1) + 1):
                after = after * x.alpha.double()[:, inner[u], :, None]
        read = torch.einsum("bphk,bhvk->bphv", q[:, i], before + after)
        read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + 1e-6) * x.norm.double()
        at = slice(rows.first + t * per, rows.first + (t + 1) * per)
        out[:, at] = read * x.gate.double()[:, at]
    return out


# ---- the window


def test_bounds_of_chunks_and_of_frames():
    a = Architecture()
    assert a.bounds(12)[7] == (0, 14) and a.bounds(12)[0] == (-5, 9) and a.bounds(12)[11] == (5, 19)
    assert a.bounds(102)[99:] == [(90, 104), (95, 109), (95, 109)]  # the last chunk is short
    assert replace(a, chunk=0, radius=2).bounds(4)[3] == (1, 5)


@given(a=architectures, frames=st.integers(1, 40))
@settings
def test_the_window_and_the_linear_branch_part_all_frames(a, frames):
    inner, bounds = a.linear(frames)
    ends = {0, frames - 1}
    for t, kept in enumerate(a.kept(frames)):
        reads = set()
        if t in inner:
            lo, hi = bounds[inner.index(t)]
            reads = {u for i, u in enumerate(inner) if not lo <= i <= hi}
        assert set(kept) | reads == set(range(frames))
        both = set(kept) & reads
        if a.anchor_frames in (
            "rows",
            "columns",
        ):  # the branch knows nothing of one kind of anchors alone, as upstream's
            assert both <= ends or t in ends
        else:
            assert not both


@given(a=architectures, frames=st.integers(1, 12))
@settings
def test_a_radius_of_all_frames_is_full(a, frames):
    a = replace(a, radius=frames)
    assert a.full(frames) and all(len(kept) == frames for kept in a.kept(frames))


@given(a=architectures, rows=layouts, most=st.integers(1, 200))
@settings
def test_the_plan_has_every_used_row_once_and_all_keys_of_each(a, rows, most):
    p = window.plan(a, rows, most)
    (frames, height, width), seen = rows.video, [0] * rows.tokens
    per = height * width
    of = (
        [-1] * rows.first
        + [t for t in range(frames) for _ in range(per)]
        + [-1] * (rows.used - rows.first - frames * per)
    )
    for ranges, keys in [(p.dense, ((0, rows.used),)), *(([g.queries], g.keys) for g in p.groups)]:
        listed = [i for r in keys for i in range(*r)]
        assert listed == sorted(set(listed))
        for i in (i for r in ranges for i in range(*r)):
            seen[i] += 1
            kept = set(range(frames)) if of[i] < 0 else set(a.kept(frames)[of[i]])
            assert listed == [j for j in range(rows.used) if of[j] < 0 or of[j] in kept or of[i] < 0]
    assert seen == [1] * rows.used + [0] * rows.pad
    assert window.count(p.dense) + window.count([g.queries for g in p.groups]) == p.used
    assert all(len(one) == 1 or sum(g.gathered for g in one) <= most for one in p.passes)


def test_passes_fill_up():
    rows = PackedRows((70, 100), (12, 6, 8))
    sizes = lambda most: [len(one) for one in window.plan(Architecture(), rows, most).passes]
    assert (sizes(200_000), sizes(1_200), sizes(1)) == ([2], [1, 1], [1, 1])
    assert window.plan(Architecture(), rows, 1) is window.plan(Architecture(), PackedRows((70, 100), (12, 6, 8)), 1)


# ---- the branch


@given(a=architectures, rows=layouts, b=st.integers(1, 2), seed=st.integers(0, 99))
@hypothesis_settings(max_examples=20, deadline=None)
def test_the_branch_is_its_definition(a, rows, b, seed):
    x = random_branch(rows, a, b, seed=seed)
    out = delta.branch(x, a, rows.video, rows.first)
    frames, height, width = rows.video
    video = slice(rows.first, rows.first + frames * height * width)
    torch.testing.assert_close(out, definition(x, a, rows)[:, video], atol=1e-8, rtol=1e-8)


@given(ends=st.sets(st.integers(0, 14), max_size=8).map(sorted), b=st.integers(1, 2), seed=st.integers(0, 99))
@settings
def test_states_by_composed_runs_are_those_of_a_scan(ends, b, seed):
    g = torch.Generator().manual_seed(seed)
    keep, add = (torch.randn(b, 15, 2, 3, 3, generator=g, dtype=torch.float64) * 0.5 for _ in range(2))
    start = torch.randn(b, 2, 3, 3, generator=g, dtype=torch.float64)
    wanted = scan(list(zip(keep.unbind(1), add.unbind(1))), start)
    found = delta.states(keep, add, start, ends)
    assert found.shape[1] == len(ends)
    for i, e in enumerate(ends):
        torch.testing.assert_close(found[:, i], wanted[e], atol=1e-12, rtol=1e-12)


@given(a=architectures, frames=st.integers(1, 20), seed=st.integers(0, 99))
@settings
def test_with_plain_decay_a_frame_reads_the_decayed_sum_of_exactly_what_its_window_leaves_out(a, frames, seed):
    g = torch.Generator().manual_seed(seed)
    inner, bounds = a.linear(frames)
    n = len(inner)
    alpha = torch.rand(1, n, 1, 3, generator=g, dtype=torch.float64) * 0.5 + 0.5
    add = torch.randn(1, n, 1, 3, 3, generator=g, dtype=torch.float64)
    found = delta.outside(torch.diag_embed(alpha), add, alpha, bounds, "alpha", None) if n else add
    for t, (lo, hi) in enumerate(bounds):
        wanted = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
        for u in [u for u in range(n) if not lo <= u <= hi]:
            between = alpha[:, u + 1 : t + 1] if u < t else alpha[:, t:u]
            wanted = wanted + add[:, u] * between.prod(1)[..., None, :]
        torch.testing.assert_close(found[:, t], wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("rule", ["vdn_solve", "vdn_scaled", "sana_scaled"])
def test_without_beta_nothing_is_written_and_a_state_only_decays(rule):
    rows, a = PackedRows((), (3, 2, 2)), Architecture(delta_rule=rule, linear_head_dim=4)
    x = random_branch(rows, a)
    k, v = (getattr(x, n).unflatten(1, (3, 4)) for n in "kv")
    parts = delta.statistics(k, v, torch.zeros(1, 3, 4, 2, dtype=torch.float64))
    keep, add = delta.factors(rule, x.alpha, *parts, 4)
    assert not add.any()
    torch.testing.assert_close(keep, torch.diag_embed(x.alpha), atol=1e-12, rtol=0)


@given(seed=st.integers(0, 999), rule=st.sampled_from(["vdn_solve", "vdn_scaled"]))
@settings
def test_a_state_never_grows_and_the_order_of_a_frames_tokens_does_not_matter(seed, rule):
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, 2, 9, 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    k, beta = delta.features(k, norm=True), torch.rand(1, 2, 9, 2, generator=g, dtype=torch.float64)
    alpha = torch.rand(1, 2, 2, 4, generator=g, dtype=torch.float64)
    parts = delta.statistics(k, v, beta)
    moved = torch.randperm(9, generator=g)
    for one, other in zip(parts, delta.statistics(k[:, :, moved], v[:, :, moved], beta[:, :, moved])):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    keep, _ = delta.factors(rule, alpha, *parts, 9)
    assert torch.linalg.eigvals(keep).abs().max() <= 1 and torch.linalg.matrix_norm(keep, 2).max() <= 1 + 1e-12


def test_the_decay_of_a_frame():
    x, a_log = torch.randn(3, 2, 4), torch.randn(2)
    wanted = (-(a_log.double().exp()[:, None]) * (1 + x.double().exp()).log()).exp()
    torch.testing.assert_close(delta.decay(x, a_log).double(), wanted, atol=1e-6, rtol=1e-5)
    assert delta.decay(x.bfloat16(), a_log.bfloat16()).dtype is torch.float32


def test_sums_are_float32_where_the_projections_are_bfloat16():
    rows, a = PackedRows((6,), (9, 4, 4)), Architecture(chunk=2, linear_head_dim=4)
    x = random_branch(rows, a, dtype=torch.bfloat16)
    out = delta.branch(x, a, rows.video, rows.first)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), definition(x, a, rows)[:, 6:], atol=6e-2, rtol=6e-2)
    k = torch.nn.functional.normalize(1 + 0.05 * torch.randn(1, 1, 500, 1, 32), dim=-1).bfloat16()  # nearly equal
    v, beta = torch.ones_like(k), torch.full((1, 1, 500, 1), 0.7).bfloat16()
    wanted = delta.statistics(k.double(), v.double(), beta.double())[0]
    errors = [(delta.statistics(k, v, beta, wide)[0] - wanted).abs().max() for wide in (True, False)]
    assert errors[0] < 1e-4 < errors[1]


def test_gradients_are_the_definitions():
    rows, a = (
        PackedRows((3, 2), (9, 2, 2), (2,), pad=3),
        Architecture(chunk=2, short_conv=("q", "k", "v"), linear_head_dim=4),
    )
    x = random_branch(rows, a, b=2)
    inputs = [x.q, x.k, x.v, x.beta, x.alpha, x.gate, x.norm, *(w for pair in x.convs.values() for w in pair)]
    for t in inputs:
        t.requires_grad_()
    mine = delta.branch(x, a, rows.video, rows.first).sin().sum()
    wanted = definition(x, a, rows)[:, 5:41].sin().sum()
    for found, right in zip(torch.autograd.grad(mine, inputs), torch.autograd.grad(wanted, inputs)):
        torch.testing.assert_close(found, right, atol=1e-8, rtol=1e-8)


# ---- the architecture


RELEASED = {
    "anchor_frames": "both", "enable_softmax_gate": True,
    "linear_attention": {"a_fp32": True, "bridge": "alpha", "delta_rule": "vdn_solve", "enable_text_state": True,
                         "linear_head_dim": 128, "short_conv": {"targets": ["k", "v"]}},
    "softmax_attention": {"chunk": 5, "radius": 1},
}  # fmt: skip


def test_the_architecture_of_a_checkpoint():
    assert (
        Architecture.of({"num_layers": 50, "hybrid_attention": RELEASED}) == Architecture() == Architecture.of(RELEASED)
    )
    flat = {"chunk": 3, "radius": 2, "linear_head_dim": 64, "short_conv": ["q"]}
    assert Architecture.of({"hybrid_attention": flat}) == Architecture(
        3, 2, "none", enable_text_state=False, short_conv=("q",), linear_head_dim=64
    )


@pytest.mark.parametrize(
    "words, text",
    [
        ({"chunk": -1}, "chunk is -1; it must be an integer of at least 0"),
        ({"chunk": True}, "chunk is True; it must be an integer"),
        ({"radius": 1.5}, "radius is 1.5; it must be an integer of at least 0"),
        ({"linear_head_dim": 0}, "linear_head_dim is 0; it must be an integer of at least 1"),
        ({"anchor_frames": "ends"}, "anchor_frames is 'ends'; it must be one of none, columns, rows, both"),
        ({"delta_rule": "solve"}, "delta_rule is 'solve'; it must be one of vdn_solve, sana_scaled, vdn_scaled"),
        ({"bridge": "beta"}, "bridge is 'beta'; it must be one of alpha, none"),
        ({"a_fp32": 1}, "a_fp32 is 1; it must be true or false"),
        ({"enable_softmax_gate": None}, "enable_softmax_gate is None; it must be true or false"),
        ({"enable_text_state": "yes"}, "enable_text_state is 'yes'; it must be true or false"),
        ({"short_conv": ("k", "k")}, r"short_conv is \('k', 'k'\); it must be some of q, k, v, each once"),
        ({"short_conv": "kv"}, "short_conv is 'kv'; it must be some of q, k, v"),
        ({"short_conv": ("x",)}, "it must be some of q, k, v"),
    ],
)
def test_architectures_that_cannot_be(words, text):
    with pytest.raises(CallError, match=text):
        Architecture(**words)


@pytest.mark.parametrize(
    "config, text",
    [
        ({"num_layers": 50}, "no hybrid_attention, so it is no VDN-H3: MiniMax-H3 and FastH3 have no linear branch"),
        ({"hybrid_attention": None}, "no hybrid_attention"),
        ({"hybrid_attention": {"radius": 1, "chunks": 5}}, "did you mean 'chunk'"),
        ({"hybrid_attention": {"radius": 1}}, "no linear_head_dim; it must be an integer"),
        ({"hybrid_attention": {"softmax_attention": 3}}, "'softmax_attention'"),
    ],
)
def test_configs_that_have_none(config, text):
    with pytest.raises(CallError, match=text):
        Architecture.of(config)
