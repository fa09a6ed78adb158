"""V-MoBA: by its definition token by token, its layers and steps, its settings, and its packages."""

from __future__ import annotations

import json
import math

import pytest
import torch
from fake_device import DEVICE
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import hal
from hal import oracle, plugins, policy
from hal.backends.vmoba_attn import BACKEND, VMOBA, VMOBA_FASTVIDEO, choice, native, portable
from hal.backends.vmoba_attn.settings import Settings
from hal.config import Setting
from hal.context import Grid, Position, position
from hal.errors import CallError, NoKernelError, PolicyError
from hal.facts import Call
from hal.sparse import selected
from hal.testing import fakes

settings = hypothesis_settings(max_examples=15, deadline=None)
sides = st.integers(1, 5)
grids = st.tuples(sides, sides, st.integers(1, 7))
AMONG = ("query_head", "block", "overall", "head_global")
BASE = {
    "temporal_chunk_size": 2, "temporal_topk": 2, "spatial_chunk_size": (2, 3), "spatial_topk": 2,
    "st_chunk_size": (2, 3, 2), "st_topk": 3, "first_full_step": 0,
}  # fmt: skip


def made(**words):
    return Settings(**{**BASE, **words})


def tensors(seed, b, h, kv_heads, s, d=8):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, n, s, d, generator=g, dtype=torch.float64) for n in (h, kv_heads, kv_heads))


def running(s, call=None):
    return portable.bind(call or Call(head_dim=8), s)


def homes(grid, tile):
    """The chunk of each token, in raster order; and how many there are."""
    sizes = [-(-n // t) for n, t in zip(grid, tile)]
    at = [[i // t for i in range(n)] for n, t in zip(grid, tile)]
    return torch.tensor([(a * sizes[1] + b) * sizes[2] + c for a in at[0] for b in at[1] for c in at[2]]), math.prod(
        sizes
    )


def tiles(s, grid):
    return (s.temporal_chunk_size, *grid[1:]), (grid[0], *s.spatial_chunk_size), s.st_chunk_size


def chosen(gate, own, among, topk, threshold):
    """What is kept of [H, S, C], one competition at a time, entry by entry."""
    h, s, n = gate.shape
    index = torch.arange(h * s * n).view(h, s, n)
    groups = {
        "query_head": index.reshape(-1, n), "block": index.permute(2, 0, 1).reshape(n, -1),
        "overall": index.reshape(1, -1), "head_global": index.reshape(h, -1),
    }[among]  # fmt: skip
    many = {"query_head": 1, "block": 0, "overall": h * s, "head_global": s}[among] * topk
    keep = own.clone().flatten()
    for group in groups.tolist():
        scores, mine = gate.flatten()[group].tolist(), own.flatten()[group].tolist()
        others = sorted((i for i in range(len(group)) if not mine[i]), key=lambda i: (-scores[i], i))
        if threshold is None:
            others = others[: max(0, many - sum(mine))]
        else:
            low, high = min(scores), max(scores)
            share = [(x - low) / (high - low if high - low > 1e-6 else 1) for x in scores]
            total = sum(share) + 1e-6
            reached, taken = sum(x for x, m in zip(share, mine) if m) / total, []
            rest, found = max(threshold - reached, 0), 0.0
            for i in others:
                taken.append(i)
                found += share[i] / total
                if found >= rest:
                    break
            others = taken
        for i in others:
            keep[group[i]] = True
    return keep.view(h, s, n)


def definition(q, k, v, grid, tile, among, topk, threshold, *, scale=None, text=0, first=False):
    """V-MoBA in float64: the mean of each chunk, its product with each query, what is kept, masked softmax."""
    of, n = homes(grid, tile)
    video = slice(text if first else 0, None if first else of.numel())
    one_hot = torch.nn.functional.one_hot(of, n).double()
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, video]
    means = torch.einsum("tn,bhtd->bhnd", one_hot, keys) / one_hot.sum(0)[:, None]
    mask = torch.ones(q.shape[0], q.shape[1], q.shape[2], q.shape[2], dtype=torch.bool)
    own = one_hot.bool().expand(q.shape[1], -1, -1)
    for i in range(q.shape[0]):
        keep = chosen(q[i][:, video] @ means[i].transpose(-1, -2), own, among, topk, threshold)
        mask[i, :, video, video] = keep[:, :, of]
    return oracle.attention(q, k, v, attn_mask=mask, layout="bhsd", scale=scale)


# ---- the run


@given(
    grid=grids, layer=st.integers(0, 5), text=st.sampled_from([0, 0, 5]), first=st.booleans(), b=st.integers(1, 2),
    kv_heads=st.sampled_from([1, 2]), among=st.sampled_from(AMONG), threshold=st.sampled_from([None, 0.0, 0.25, 0.7]),
    topk=st.integers(1, 4), scale=st.sampled_from(["default", 0.3]), seed=st.integers(0, 99),
)  # fmt: skip
@settings
def test_equals_its_definition(grid, layer, text, first, b, kv_heads, among, threshold, topk, scale, seed):
    if threshold is None and among == "block":
        among = "overall"
    q, k, v = tensors(seed, b, 2, kv_heads, math.prod(grid) + text)
    topks = {f"{name}_topk": topk for name in ("temporal", "spatial", "st")}
    mode = {"moba_select_mode": "topk"} if threshold is None else {"moba_threshold": threshold}
    s = made(**topks, **mode, moba_threshold_type=among)
    with position(layer=layer), hal.grid(*grid, text=text, text_first=first):
        out, lse = running(s, Call(head_dim=8, scale=scale, lse=True))(q, k, v, None, None)
    tile = tuple(min(a, n) for a, n in zip(tiles(s, grid)[layer % 3], grid))
    wanted, stats = definition(
        q, k, v, grid, tile, among, topk, threshold, scale=None if scale == "default" else scale, text=text, first=first
    )
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)
    torch.testing.assert_close(lse.double(), stats, atol=1e-5, rtol=0)


@given(
    grid=grids,
    layer=st.integers(0, 2),
    among=st.sampled_from(["query_head", "overall", "head_global"]),
    seed=st.integers(0, 99),
)
@settings
def test_as_many_chunks_as_there_are_is_dense(grid, layer, among, seed):
    q, k, v = tensors(seed, 1, 2, 1, math.prod(grid))
    topks = {f"{name}_topk": 10**3 for name in ("temporal", "spatial", "st")}
    with position(layer=layer), hal.grid(*grid):
        out = running(made(**topks, moba_select_mode="topk", moba_threshold_type=among))(q, k, v, None, None)
    torch.testing.assert_close(out, oracle.attention(q, k, v, layout="bhsd")[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("among", AMONG)
def test_a_threshold_of_1_is_nearly_dense_and_above_it_dense(among):
    gate = torch.randn(2, 96, 12, generator=torch.Generator().manual_seed(0))
    home = torch.arange(96) // 8
    nearly = choice.chosen(gate, home, among, 0, 1.0).float().mean()
    assert nearly > 0.85  # the lowest score has a share of 0
    assert choice.chosen(gate, home, among, 0, 1.1).all()


@given(layer=st.integers(0, 2), words=st.sampled_from([{}, {"moba_select_mode": "topk"}]), seed=st.integers(0, 99))
@settings
def test_a_single_chunk_is_dense(layer, words, seed):
    q, k, v = tensors(seed, 1, 2, 2, 2 * 3 * 4)
    s = made(temporal_chunk_size=5, spatial_chunk_size=(3, 9), st_chunk_size=(2, 3, 4), **words)
    with position(layer=layer), hal.grid(2, 3, 4):
        out = running(s)(q, k, v, None, None)
    torch.testing.assert_close(out, oracle.attention(q, k, v, layout="bhsd")[0], atol=1e-10, rtol=0)


@given(grid=grids, layer=st.integers(0, 2), seed=st.integers(0, 99))
@settings
def test_where_nothing_more_is_chosen_a_query_attends_to_its_own_chunk(grid, layer, seed):
    """Upstream attends to everything then."""
    q, k, v = tensors(seed, 1, 2, 2, math.prod(grid))
    s = made(temporal_topk=1, spatial_topk=1, st_topk=1, moba_select_mode="topk")
    with position(layer=layer), hal.grid(*grid):
        out = running(s)(q, k, v, None, None)
    of, _ = homes(grid, tiles(s, grid)[layer])
    wanted = oracle.attention(q, k, v, attn_mask=(of[:, None] == of)[None, None], layout="bhsd")[0]
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)


@given(grid=grids, which=st.sampled_from(["temporal", "spatial", "st"]))
@settings
def test_chunks_are_a_bijection_and_know_their_tokens(grid, which):
    s = made()
    o = choice.order(s, which, math.prod(grid), torch.device("cpu"), Position(grid=Grid(*grid)))
    x = torch.arange(float(math.prod(grid)))[:, None]
    assert o.from_blocks(o.to_blocks(x)).equal(x)
    c = choice.chunks(o)
    of, n = homes(
        grid, tuple(min(a, n) for a, n in zip(tiles(s, grid)[("temporal", "spatial", "st").index(which)], grid))
    )
    assert c.home.equal(of) and len(c.spans) == n
    for i, (a, z) in enumerate(c.spans):
        assert o.token[a:z].equal((of == i).nonzero()[:, 0])


@given(seed=st.integers(0, 99), pieces=st.integers(2, 5))
@settings
def test_merging_by_lse_is_masked_softmax_in_any_order_and_no_key_weighs_nothing(seed, pieces):
    q, k, v = (x[0, 0] for x in tensors(seed, 1, 1, 1, 20))
    g = torch.Generator().manual_seed(seed)
    part = torch.randint(0, pieces + 1, (20, 20), generator=g)  # the last: attended to by no one
    part[0] = pieces  # a query without keys
    outs = []
    for turn in (range(pieces), reversed(range(pieces))):
        total, lse = torch.zeros(20, 8, dtype=torch.float64), torch.full((20,), -torch.inf, dtype=torch.float64)
        for i in turn:
            some, stat = oracle.attention(
                q[None, None], k[None, None], v[None, None], attn_mask=(part == i)[None, None], layout="bhsd"
            )
            portable.merge(total, lse, torch.arange(20), some[0, 0], stat[0, 0])
        outs.append(total)
    want, stats = oracle.attention(
        *(x[None, None] for x in (q, k, v)), attn_mask=(part < pieces)[None, None], layout="bhsd"
    )
    for out in outs:
        torch.testing.assert_close(out, want[0, 0], atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, stats[0, 0], atol=1e-12, rtol=0)


@given(seed=st.integers(0, 99), among=st.sampled_from(["query_head", "head_global", "block", "overall"]))
@settings
def test_batches_do_not_touch_each_other_nor_heads_that_do_not_compete(seed, among):
    q, k, v = tensors(seed, 2, 2, 2, 4 * 5 * 6)
    run = running(made(moba_threshold_type=among))
    with position(layer=2), hal.grid(4, 5, 6):
        whole = run(q, k, v, None, None)
        for i in range(2):
            torch.testing.assert_close(
                run(*(x[i : i + 1] for x in (q, k, v)), None, None), whole[i : i + 1], atol=1e-10, rtol=0
            )
            if among in ("query_head", "head_global"):
                one = run(*(x[i : i + 1, 1:] for x in (q, k, v)), None, None)
                torch.testing.assert_close(one, whole[i : i + 1, 1:], atol=1e-10, rtol=0)


def test_a_backward_pass_inside_autocast_is_the_same():
    leaves = [x.float().requires_grad_() for x in tensors(3, 2, 2, 1, 60)]
    with position(layer=2), hal.grid(3, 4, 5):
        out = running(made(), Call(head_dim=8))(*leaves, None, None)
    plain = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        within = torch.autograd.grad(out.sum(), leaves)
    for one, other in zip(plain, within):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lse", [False, True])
def test_gradients_are_the_definitions(lse):
    grid = (3, 4, 5)
    q, k, v = (x.requires_grad_() for x in tensors(3, 2, 2, 1, 60))
    call = Call(head_dim=8, lse=lse)
    with position(layer=2), hal.grid(*grid):
        got = running(made(), call)(q, k, v, None, None)
    out, stats = definition(q, k, v, grid, (2, 3, 2), "query_head", 3, 0.25)
    mine = got[0].sin().sum() + got[1].cos().sum() if lse else got.sin().sum()
    wanted = out.sin().sum() + (stats.cos().sum() if lse else 0)
    for a, b in zip(torch.autograd.grad(mine, (q, k, v)), torch.autograd.grad(wanted, (q, k, v))):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_and_strides(dtype):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).to(dtype) for x in tensors(0, 1, 2, 2, 4 * 6 * 6, d=16))
    before = [x.clone() for x in (q, k, v)]
    with position(layer=1), hal.grid(4, 6, 6):
        out = running(made(spatial_topk=4, moba_select_mode="topk"), Call(head_dim=16))(q, k, v, None, None)
        exact = running(made(spatial_topk=4, moba_select_mode="topk"), Call(head_dim=16))(
            *(x.double() for x in (q, k, v)), None, None
        )
    assert out.dtype is dtype and all(a.equal(b) for a, b in zip(before, (q, k, v)))
    torch.testing.assert_close(
        out.double(), exact, atol={torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 2e-2), rtol=0
    )


@given(grid=grids, layer=st.integers(0, 2), among=st.sampled_from(AMONG), seed=st.integers(0, 99))
@settings
def test_equal_values_stay_what_they_are_and_zeros_make_no_nan(grid, layer, among, seed):
    q, k, v = tensors(seed, 1, 2, 2, math.prod(grid))
    v = v[:, :, :1].expand_as(v)
    with position(layer=layer), hal.grid(*grid):
        run = running(made(moba_threshold_type=among))
        torch.testing.assert_close(run(q, k, v, None, None), v, atol=1e-10, rtol=0)
        torch.testing.assert_close(run(q * 0, k * 0, v, None, None), v, atol=1e-10, rtol=0)


def test_on_structured_data_the_best_chunks_are_nearly_all_of_it():
    """Each chunk is one of 16 clusters.  As many chunks by chance, the own one among them or not, are the yardstick."""
    grid, tile, g = (8, 16, 16), (2, 8, 8), torch.Generator().manual_seed(0)
    of, n = homes(grid, tile)  # 16 chunks of 128 tokens
    noise = lambda a: torch.randn(2048, 64, generator=g) * a
    centre, value = torch.randn(16, 64, generator=g) * 1.2, torch.randn(16, 64, generator=g)
    q, k, v = ((x[of] + noise(a))[None, None] for x, a in ((centre, 0.4), (centre, 0.4), (value, 0.3)))
    dense = oracle.attention(q, k, v, layout="bhsd")[0]
    s = made(st_chunk_size=tile, st_topk=2, moba_select_mode="topk", temporal_layer=0, spatial_layer=0)
    with hal.grid(*grid):  # all layers are alike: no index is needed
        out = running(s, Call(head_dim=64))(q, k, v, None, None).double()
    chance = torch.rand(2048, n, generator=g).argsort(-1).argsort(-1) < 2
    random = oracle.attention(q, k, v, attn_mask=chance[:, of][None, None], layout="bhsd")[0]
    assert torch.cosine_similarity(out.flatten(), dense.flatten(), 0) > 0.999
    assert (out - dense).norm() * 10 <= (random - dense).norm()


# ---- the choice


@given(
    h=st.integers(1, 3), s=st.integers(1, 12), n=st.integers(1, 6), among=st.sampled_from(AMONG), topk=st.integers(1, 7),
    threshold=st.sampled_from([None, 0.0, 0.1, 0.25, 0.5, 0.9, 1.0, 1.5]), seed=st.integers(0, 999),
)  # fmt: skip
@hypothesis_settings(max_examples=60, deadline=None)
def test_the_choice_is_that_of_its_rules(h, s, n, among, topk, threshold, seed):
    if threshold is None and among == "block":
        return
    g = torch.Generator().manual_seed(seed)
    gate, home = torch.randn(h, s, n, generator=g, dtype=torch.float64), torch.randint(0, n, (s,), generator=g)
    own = torch.nn.functional.one_hot(home, n).bool().expand(h, -1, -1)
    assert choice.chosen(gate, home, among, topk, threshold).equal(chosen(gate, own, among, topk, threshold))


@given(among=st.sampled_from(AMONG), low=st.floats(0, 1), high=st.floats(0, 1), seed=st.integers(0, 99))
@settings
def test_a_higher_threshold_keeps_what_a_lower_one_keeps(among, low, high, seed):
    gate = torch.randn(2, 20, 5, generator=torch.Generator().manual_seed(seed))
    less, more = (choice.chosen(gate, torch.arange(20) // 4, among, 0, t) for t in sorted((low, high)))
    assert not (less & ~more).any() and less[:, torch.arange(20), torch.arange(20) // 4].all()


@pytest.mark.parametrize(
    "words, at, kind",
    [
        ({}, {"layer": 0}, "temporal"), ({}, {"layer": 1}, "spatial"), ({}, {"layer": 2}, "st"), ({}, {"layer": 3}, "temporal"),
        ({"temporal_layer": 2, "spatial_layer": 0}, {"layer": 1}, "temporal"),
        ({"temporal_layer": 2, "spatial_layer": 0}, {"layer": 2}, "st"),
        ({"temporal_layer": 2, "spatial_layer": 0}, {"layer": 3}, "temporal"),
        ({"first_full_layer": 2}, {"layer": 1}, None), ({"first_full_layer": 2}, {"layer": 2}, "temporal"),
        ({"first_full_layer": 2}, {"layer": 6}, "spatial"),
        ({"first_full_step": 12}, {"layer": 1, "step": 11, "steps": 50}, None),
        ({"first_full_step": 12}, {"layer": 1, "step": 12, "steps": 50}, "spatial"),
        ({"first_full_step": 12, "first_full_layer": 1}, {"layer": 0, "step": 20, "steps": 50}, None),
        ({"temporal_layer": 0, "st_layer": 0}, {}, "spatial"),
    ],
)  # fmt: skip
def test_layers_and_steps(words, at, kind):
    assert choice.kind(made(**words), Position(**at)) == kind


def test_full_steps_and_layers_attend_to_everything():
    q, k, v = tensors(0, 1, 2, 2, 60)
    dense = oracle.attention(q, k, v, layout="bhsd")[0]
    for words in ({"first_full_step": 5}, {"first_full_layer": 3}):
        s = made(**words, moba_select_mode="topk", st_topk=1)
        for at, same in ({"step": 4, "layer": 2}, True), ({"step": 5, "layer": 5}, False):
            with position(**at, steps=9), hal.grid(3, 4, 5):
                out = running(s)(q, k, v, None, None)
            assert torch.allclose(out, dense, atol=1e-10) is same


@given(grid=grids, text=st.sampled_from([0, 5]), layer=st.integers(0, 2), seed=st.integers(0, 99))
@settings
def test_who_watches_sees_the_mask_that_runs(grid, text, layer, seed):
    q, k, v = tensors(seed, 2, 2, 1, math.prod(grid) + text)
    with position(layer=layer), hal.grid(*grid, text=text), selected.watched_masks() as seen:
        out = running(made())(q, k, v, None, None)
    (one,) = seen
    keep = torch.ones(1, 1, q.shape[2], q.shape[2], dtype=torch.bool)
    if one.mask is not None:
        keep = one.mask.to_dense()[:, :, one.order.slot][..., one.order.slot]
        assert one.mask.density == pytest.approx(keep.float().mean().item())
    torch.testing.assert_close(out, oracle.attention(q, k, v, attn_mask=keep, layout="bhsd")[0], atol=1e-10, rtol=0)


def test_a_step_builds_nothing_anew(monkeypatch):
    from hal.sparse import order as orders

    built = []
    monkeypatch.setattr(orders, "_made", lambda *a, made=orders._made: built.append("order") or made(*a))
    choice.chunks.cache_clear()
    q, k, v = tensors(0, 1, 1, 1, 4 * 7 * 5)
    run = running(made())
    for step in range(3):
        for layer in range(6):
            with position(step=step, steps=3, layer=layer), hal.grid(4, 7, 5):
                run(q, k, v, None, None)
    assert len(built) <= 3 and choice.chunks.cache_info().misses == 3


# ---- settings and calls that are wrong


@pytest.mark.parametrize(
    "words, text",
    [
        ({"temporal_topk": 0}, "greater than or equal to 1"),
        ({"spatial_chunk_size": (2, 0)}, "greater than or equal to 1"),
        ({"spatial_chunk_size": (2, 3, 4)}, "spatial_chunk_size"),
        ({"st_chunk_size": (2, 3)}, "st_chunk_size"),
        ({"moba_threshold": 1.5}, "less than or equal to 1"),
        ({"moba_threshold": -0.1}, "greater than or equal to 0"),
        ({"moba_threshold_type": "head"}, "query_head"),
        ({"moba_select_mode": "top_k"}, "threshold"),
        ({"moba_select_mode": "topk", "moba_threshold_type": "block"}, "query_head, overall or head_global"),
        ({"temporal_layer": 0, "spatial_layer": 0, "st_layer": 0}, "one of them must be 1 or more"),
        ({"first_full_step": -1}, "greater than or equal to 0"),
        ({"spatial_top": 2}, "spatial_top"),
    ],
)
def test_settings_that_are_wrong(words, text):
    with pytest.raises(ValueError, match=text):
        made(**words)


def test_settings_stand_in_moba_config_or_alone_and_what_is_missing_is_named():
    catalog = plugins.catalog()
    words = {k: x for k, x in BASE.items() if k != "first_full_step"}
    for stated in (words, {"moba_config": words}):
        (one,) = hal.config.settings(hal.config.read(json.dumps(stated)), catalog, "vmoba_attn")
        assert one.config == made(first_full_step=12)
    del words["st_topk"]
    with pytest.raises(PolicyError, match=r"vmoba_attn needs st_topk \(integer >= 1, required\), which is not given"):
        hal.config.settings(hal.config.read(json.dumps(words)), catalog, "vmoba_attn")


@pytest.mark.parametrize(
    "grid, at, words, text",
    [
        (None, {"layer": 0}, {}, r"vmoba_attn .* 24 tokens .* no grid is set; write with hal\.grid\(.*hal\.attach"),
        ((2, 3, 5), {"layer": 0}, {}, r"24 tokens, and the grid is 2 x 3 x 5 = 30; set the grid"),
        ((2, 3, 4), {"layer": 0}, {"first_full_step": 1}, r"the denoising step for first_full_step"),
        ((2, 3, 4), {}, {}, r"the index of the layer for first_full_layer, temporal_layer"),
    ],
)
def test_calls_that_do_not_fit(grid, at, words, text):
    q, k, v = tensors(0, 1, 1, 1, 24)
    with position(**at), position() if grid is None else hal.grid(*grid):
        with pytest.raises(CallError, match=text):
            running(made(**words))(q, k, v, None, None)


# ---- through hal.attention


def test_hal_attention_runs_the_portable_form_with_its_settings():
    q, k, v = (x.float().transpose(1, 2) for x in tensors(0, 1, 2, 1, 4 * 5 * 6))
    given = (Setting("vmoba_attn", "", made()),)
    with fakes.workbench(BACKEND), hal.context.changed(policy=policy.Policy(settings=given)), position(layer=2):
        for grid in ((4, 5, 6), (6, 5, 4)):
            with hal.grid(*grid):
                out = hal.attention(q, k, v, enable_gqa=True, backend="vmoba_attn")
            args = (x.double().transpose(1, 2) for x in (q, k, v))
            wanted = definition(*args, grid, (2, 3, 2), "query_head", 3, 0.25)[0].transpose(1, 2)
            torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)
        with pytest.raises(CallError, match="no grid is set"):
            hal.attention(q, k, v, enable_gqa=True, backend="vmoba_attn")


@pytest.mark.parametrize(
    "arguments", [{"is_causal": True}, {"window": 3}, {"role": "cross"}, {"attn_mask": torch.ones(120, 120) > 0}]
)
def test_what_it_cannot_do_is_refused_before_the_grid_is_looked_at(arguments):
    q, k, v = (x.float().transpose(1, 2) for x in tensors(0, 1, 2, 2, 120))
    given = (Setting("vmoba_attn", "", made()),)
    with fakes.workbench(BACKEND), hal.context.changed(policy=policy.Policy(settings=given)):
        with pytest.raises(NoKernelError, match="vmoba_attn"):
            hal.attention(q, k, v, backend="vmoba_attn", **arguments)


# ---- the packages


def computing(a):
    """What the packages compute, from the definition's parts; without a further chunk, attention to everything."""
    assert a["max_seqlen"] == a["q"].shape[0] and a["cu_seqlens"].tolist() == [0, a["max_seqlen"]]
    q, k, v = (a[n].transpose(0, 1)[None].double() for n in "qkv")
    of = torch.arange(q.shape[2]) // a["moba_chunk_size"]
    n = int(of[-1]) + 1
    own = torch.nn.functional.one_hot(of, n).bool().expand(q.shape[1], -1, -1)
    gate = q[0] @ k[0].unflatten(1, (n, -1)).mean(2).transpose(-1, -2)
    threshold = a["simsum_threshold"] if a["select_mode"] == "threshold" else None
    keep = chosen(gate, own, a["threshold_type"], min(a["moba_topk"], n), threshold)
    if not (keep & ~own).any():
        keep = torch.ones_like(keep)
    out = oracle.attention(q, k, v, attn_mask=keep[:, :, of][None], layout="bhsd")[0]
    return out[0].transpose(0, 1).to(a["q"].dtype)


PACKAGES = {
    VMOBA: ("vmoba-0.0.0", native.kernel),
    VMOBA_FASTVIDEO: ("fastvideo_kernel_vmoba-0.3.5", native.fastvideo),
}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda k: k.name)
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "words", [{}, {"moba_threshold_type": "overall", "moba_threshold": 0.4}, {"moba_select_mode": "topk"},
              {"moba_select_mode": "topk", "temporal_topk": 1, "spatial_topk": 1, "st_topk": 1}, {"first_full_layer": 3}]
)  # fmt: skip
def test_a_package_gives_what_the_portable_form_gives(package, layer, words):
    record, bind = PACKAGES[package]
    q, k, v = tensors(1, 2, 2, 2, 4 * 6 * 6)
    s, call = made(**words), Call(head_dim=8)
    with fakes.installed(record, {"moba_attn_varlen": computing}) as fake:
        run = bind(call, s)
        with position(layer=layer), hal.grid(4, 6, 6):
            outs = [f(q, k, v, None, None) for f in (run, portable.bind(call, s))]
            outs += [run(q, k, v, None, None)]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-10, rtol=0)
    assert outs[0].equal(outs[2])
    own_chunk_only, full = s.st_topk == 1, layer < s.first_full_layer
    assert len(fake.calls) == (0 if own_chunk_only or full else 4)  # a video at a time, and run twice
    if fake.calls:
        assert fake.calls[0]["cu_seqlens"] is fake.calls[-1]["cu_seqlens"]  # the packages' caches go by the tensor
        which = ("temporal", "spatial", "st")[layer % 3]
        assert fake.calls[0]["moba_topk"] == getattr(s, f"{which}_topk")
        assert {c["moba_chunk_size"] for c in fake.calls} == {(72, 24, 12)[layer % 3]}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda k: k.name)
def test_packages_refuse_text_and_ragged_grids(package):
    record, bind = PACKAGES[package]
    q = torch.empty(1, 27, 1, 64, device="meta")
    with fakes.installed(record, {"moba_attn_varlen": computing}):
        run = bind(Call(head_dim=64), made())
    with position(layer=1):
        with hal.grid(2, 3, 4, text=3):
            assert "3 text tokens are with them; vmoba.portable takes both" in native.confirm(q, q, q, None, Call())
            with pytest.raises(CallError, match="3 text tokens"):
                run(*(torch.zeros(1, 1, 27, 64) for _ in range(3)), None, None)
            assert native.confirm(q[:, :24], q, q, None, Call()) is None
        with hal.grid(1, 3, 9):
            with pytest.raises(
                CallError, match="whole chunks, and 1 x 3 x 9 is none of 1 x 2 x 3; set spatial_chunk_size"
            ):
                run(*(torch.zeros(1, 1, 27, 64) for _ in range(3)), None, None)


def test_the_right_package_is_known_by_its_symbol_and_parameters(tmp_path, monkeypatch):
    """PyPI's kernel is another project: nothing of it is taken for V-MoBA."""
    from hal import probe

    needs = VMOBA.needs[0]
    assert probe.look(needs).state == "absent"
    fakes.distribution(tmp_path, "kernel", "0.131.0", {"kernel/__init__.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = probe.look(needs)
    assert (seen.state, seen.version) == ("missing_symbol", "0.131.0") and "kernel.attn.vmoba_attn.vmoba" in seen.note
    with fakes.installed(PACKAGES[VMOBA][0], {"moba_attn_varlen": computing}):
        assert probe.prove(needs).available
    with fakes.modules({needs.module: {"moba_attn_varlen": lambda q, k, v: None}}):
        assert probe.prove(needs).state == "wrong_distribution"


ON_A_DEVICE = """
import hal
from hal.backends.vmoba_attn import portable
from hal.backends.vmoba_attn.settings import Settings
from hal.context import position
from hal.facts import Call

torch.manual_seed(0)
for mode, among in (("topk", "query_head"), ("threshold", "overall"), ("threshold", "block")):
    settings = Settings(
        temporal_chunk_size=2, temporal_topk=1, spatial_chunk_size=(2, 3), spatial_topk=2, st_chunk_size=(2, 3, 2), st_topk=2,
        moba_select_mode=mode, moba_threshold_type=among, first_full_step=0,
    )
    for dtype, loose in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        real = [torch.randn(1, n, 3 * 5 * 7 + 4, 8, dtype=dtype) for n in (2, 1, 1)]
        run = portable.bind(Call(head_dim=8), settings)
        with hal.grid(3, 5, 7, text=4), position(layer=2):
            there, here = run(*(x.to("fake") for x in real), None, None), run(*real, None, None)
        assert there.device.type == "fake" and there.dtype is dtype
        torch.testing.assert_close(there.cpu(), here, atol=loose, rtol=loose)
print("same")
"""


def test_a_device_without_float64(python):
    ran = python(DEVICE + ON_A_DEVICE)
    assert (ran.code, ran.out) == (0, "same\n"), ran.err
