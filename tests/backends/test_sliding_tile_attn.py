"""STA: windows by their definition, strategies, and the run of a backend that needs the grid."""

from __future__ import annotations

import errno
import itertools
import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fake_device import DEVICE
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import hal
from hal import config, oracle, policy, probe, source
from hal.backends.sliding_tile_attn import BACKEND, PORTABLE, STA, STA_FASTVIDEO, native, portable, strategy
from hal.backends.sliding_tile_attn.settings import Settings
from hal.config import Setting
from hal.context import Position, position
from hal.errors import CallError, PolicyError
from hal.facts import Call
from hal.sparse import Order
from hal.testing import fakes

settings = hypothesis_settings(max_examples=15, deadline=None)
TILE = (2, 2, 3)  # small grids have several tiles
sides = st.integers(1, 7)
grids = st.tuples(sides, sides, sides)
windows = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


def tensors(seed, b, h, kv_heads, s, d=8, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, n, s, d, generator=g, dtype=torch.float64).to(dtype) for n in (h, kv_heads, kv_heads))


def attends(q, k, window, tiles):
    """The definition, for one pair of tiles."""
    for a, b, w, n in zip(q, k, window, tiles):
        middle = min(max(a, w // 2), n - 1 - w // 2)
        if n > w and abs(middle - b) > w // 2:
            return False
    return True


def dense_mask(grid, window, text, first, tile=TILE):
    """bool [tokens, tokens], token by token, from the definition alone."""
    tiles = [-(-n // t) for n, t in zip(grid, tile)]
    of = {p: i for i, p in enumerate(itertools.product(*map(range, tiles)))}
    at = torch.tensor([of[tuple(x // t for x, t in zip(p, tile))] for p in itertools.product(*map(range, grid))])
    video = torch.tensor([[attends(q, k, window, tiles) for k in of] for q in of])[at][:, at]
    keep = torch.ones(len(at) + text, len(at) + text, dtype=torch.bool)
    a = text if first else 0
    keep[a : a + len(at), a : a + len(at)] = video
    return keep


@contextmanager
def tuned(tmp_path, monkeypatch, table, skip=0, tile=TILE):
    """A strategy file of ``table`` [steps][layers][heads], and the settings that name it."""
    path = tmp_path / "strategy.json"
    strategy.write(str(path), strategy.Strategy(tuple(tuple(tuple(heads) for heads in layers) for layers in table)))
    with monkeypatch.context() as m:
        m.setattr(portable, "TILE", tile)
        m.setattr(native, "TILE", tile)
        yield Settings(mask_strategy_file_path=str(path), skip_time_steps=skip)


@pytest.fixture
def bound(tmp_path, monkeypatch):
    def make(table, skip=0, lse=False, scale="default", head_dim=8, tile=TILE):
        with tuned(tmp_path, monkeypatch, table, skip, tile) as s:
            return portable.bind(Call(head_dim=head_dim, lse=lse, scale=scale), s)

    return make


# ---- windows


@given(n=st.integers(1, 12), w=st.integers(1, 12))
@settings
def test_an_axis_is_as_defined_and_an_odd_window_has_as_many_tiles_everywhere(n, w):
    keep = portable.axis(n, w)
    assert keep.tolist() == [[attends((i,), (j,), (w,), (n,)) for j in range(n)] for i in range(n)]
    assert keep.diagonal().all()
    if w % 2:
        assert set(keep.sum(1).tolist()) == {min(w, n)}
    elif n > w:
        assert keep.equal(portable.axis(n, w + 1))


@given(n=st.integers(1, 12), w=st.integers(1, 10))
@settings
def test_windows_are_nested(n, w):
    assert not (portable.axis(n, w) & ~portable.axis(n, w + 1)).any()


@given(grid=grids, window=windows)
@settings
def test_a_window_clipped_to_the_grid_is_the_same_window(grid, window):
    order = Order.of(grid, TILE)
    assert portable.mask(order, window).keep.equal(portable.mask(order, portable.clipped(window, order.tiles)).keep)


def test_masks_are_made_once():
    order = Order.of((4, 5, 6), TILE)
    assert portable.mask(order, (1, 1, 3)) is portable.mask(Order.of((4, 5, 6), TILE), (1, 1, 3))


# ---- the run


@given(
    grid=grids, text=st.integers(0, 5), first=st.booleans(), b=st.integers(1, 2), kv_heads=st.sampled_from([1, 3]),
    heads=st.lists(windows, min_size=3, max_size=3), scale=st.sampled_from(["default", 0.3]), padded=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings
def test_equals_the_masked_softmax_of_the_same_pattern(
    bound_once, grid, text, first, b, kv_heads, heads, scale, padded, seed
):
    q, k, v = tensors(seed, b, 3, kv_heads, grid[0] * grid[1] * grid[2] + text)
    keep = torch.stack([dense_mask(grid, w, text, first) for w in heads])[None].expand(b, -1, -1, -1)
    padding = None
    if padded:
        padding = torch.rand(b, 1, 1, q.shape[2], generator=torch.Generator().manual_seed(seed)) > 0.3
        keep = keep & padding
    run = bound_once([[heads]], lse=True, scale=scale)
    with position(step=0, steps=1, layer=0), hal.grid(*grid, text=text, text_first=first):
        out, lse = run(q, k, v, padding, None)
    wanted, stats = oracle.attention(
        q, k, v, attn_mask=keep, layout="bhsd", scale=None if scale == "default" else scale
    )
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)
    torch.testing.assert_close(lse.double(), stats, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def bound_once(tmp_path_factory):
    """As ``bound``, for tests with many examples."""
    folder = tmp_path_factory.mktemp("strategies")
    patch = pytest.MonkeyPatch()

    def make(table, skip=0, lse=False, scale="default"):
        with tuned(folder, patch, table, skip) as s:
            return portable.bind(Call(head_dim=8, lse=lse, scale=scale), s)

    yield make
    patch.undo()


@given(grid=grids, text=st.integers(0, 4), seed=st.integers(0, 99), step=st.integers(0, 1))
@settings
def test_full_windows_and_steps_before_skip_time_steps_are_dense(bound_once, grid, text, seed, step):
    q, k, v = tensors(seed, 1, 2, 2, grid[0] * grid[1] * grid[2] + text)
    narrow, full = [(1, 1, 1)] * 2, [(9, 9, 9)] * 2
    run = bound_once([[narrow], [full]], skip=1)
    with position(step=step, steps=2, layer=0), hal.grid(*grid, text=text):
        out = run(q, k, v, None, None)
    torch.testing.assert_close(out, oracle.attention(q, k, v, layout="bhsd")[0], atol=1e-10, rtol=0)


def test_step_layer_and_head_choose_the_window(bound):
    grid, q, k, v = (4, 4, 6), *tensors(0, 1, 2, 2, 96)
    table = [[[(t + 1, layer + 1, h + 1) for h in range(2)] for layer in range(2)] for t in range(2)]
    run = bound(table)
    for t, layer in itertools.product(range(2), range(2)):
        keep = torch.stack([dense_mask(grid, w, 0, False) for w in table[t][layer]])[None]
        with position(step=t, steps=2, layer=layer), hal.grid(*grid):
            out = run(q, k, v, None, None)
        torch.testing.assert_close(out, oracle.attention(q, k, v, attn_mask=keep, layout="bhsd")[0], atol=1e-10, rtol=0)


def test_gradients_are_the_oracles(bound):
    grid, heads = (3, 5, 4), [(1, 3, 1), (1, 1, 1)]
    q, k, v = (x.requires_grad_() for x in tensors(1, 1, 2, 1, 60 + 2))
    run = bound([[heads]])
    keep = torch.stack([dense_mask(grid, w, 2, False) for w in heads])[None]
    with position(step=0, steps=1, layer=0), hal.grid(*grid, text=2):
        mine = torch.autograd.grad(run(q, k, v, None, None).sin().sum(), (q, k, v))
    wanted = oracle.attention(q, k, v, attn_mask=keep, layout="bhsd")[0]
    for a, b in zip(mine, torch.autograd.grad(wanted.sin().sum(), (q, k, v))):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_through_hal_attention_with_padding_and_the_running_step(tmp_path):
    grid, tile, heads = (7, 9, 10), (6, 8, 8), [(1, 1, 1), (2, 1, 1)]
    q, k, v = (x.float().transpose(1, 2) for x in tensors(4, 2, 2, 1, 630 + 5))
    valid = torch.arange(635) < torch.tensor([[635], [632]])  # the second text is shorter
    path = tmp_path / "s.json"
    strategy.write(str(path), strategy.Strategy(((tuple(heads),),) * 2))
    given = (Setting(BACKEND.name, "", Settings(mask_strategy_file_path=str(path), skip_time_steps=1)),)
    window = torch.stack([dense_mask(grid, w, 5, False, tile) for w in heads])[None]
    with fakes.workbench(BACKEND), hal.context.changed(policy=policy.Policy(settings=given)), hal.grid(*grid, text=5):
        for step in range(2):
            with hal.step(step, 2), position(layer=0):
                out = hal.attention(q, k, v, attn_mask=valid, enable_gqa=True, backend=BACKEND.name)
            keep = valid[:, None, None] & (window if step else True)
            wanted = oracle.attention(q, k, v, attn_mask=keep.expand(2, 2 if step else 1, -1, -1))[0]
            torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)


def test_a_rewritten_strategy_holds_from_the_next_call_on(tmp_path):
    path, grid = tmp_path / "s.json", (6, 8, 16)
    q, k, v = (x.float().transpose(1, 2) for x in tensors(5, 1, 1, 1, 768))
    for window in ((1, 1, 1), (1, 1, 8)):
        path.write_text(json.dumps({"0_0_0": window}))  # of the same size
        words = {"mask_strategy_file_path": str(path), "skip_time_steps": 0}
        with hal.scope(attention_backend=BACKEND.name, attention_backend_config=words), hal.grid(*grid):
            with hal.step(0, 1), position(layer=0):
                out = hal.attention(q, k, v)
        keep = dense_mask(grid, window, 0, False, (6, 8, 8))
        wanted = oracle.attention(q, k, v, attn_mask=keep.expand(1, 1, -1, -1))[0]
        torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)


def test_a_package_follows_a_rewritten_strategy(tmp_path, monkeypatch):
    grid = (4, 4, 6)
    monkeypatch.setitem(native.SHAPES, grid, range(1))
    fake = fakes.of(RECORDS[1], compute(grid, TILE))
    with tuned(tmp_path, monkeypatch, [[[(1, 1, 1)]]]) as s:
        run = native._bound(fake.functions["sliding_tile_attention"], native.NAMES, s)
        for window in ((1, 1, 1), (1, 2, 2)):
            strategy.write(s.mask_strategy_file_path, strategy.Strategy((((window,),),)))
            with position(step=0, steps=1, layer=0), hal.grid(*grid):
                run(*tensors(7, 1, 1, 1, 96), None, None)
    assert [c["window_size"] for c in fake.calls] == [[(1, 1, 1)], [(1, 2, 2)]]


# ---- what is wrong is said before anything runs


@pytest.mark.parametrize(
    "here, grid, heads, text",
    [
        ({"step": 0, "layer": 0}, None, 2, r"24 tokens .* no grid is set; write with hal\.grid\(.*hal\.attach"),
        ({"step": 0, "layer": 0}, (2, 2, 5), 2, r"24 tokens, and the grid is 2 x 2 x 5 = 20; set the grid"),
        ({"step": 0, "layer": 0}, (2, 2, 5, 3), 2, r"= 20 and 3 text tokens, 23 in all"),
        ({"layer": 0}, (2, 3, 4), 2, r"the denoising step for .*hal\.step"),
        ({"step": 0}, (2, 3, 4), 2, r"the index of the layer .*hal\.attach"),
        ({"step": 1, "layer": 0}, (2, 3, 4), 2, r"has 1 steps, 0 to 0, and this call is of step 1"),
        ({"step": 0, "layer": 7}, (2, 3, 4), 2, r"has 1 layers, 0 to 0, and this call is of layer 7"),
        ({"step": 0, "layer": 0}, (2, 3, 4), 3, r"windows for 2 heads, and q has 3"),
        ({"step": 0, "steps": 4, "layer": 0}, (2, 3, 4), 2, r"is for 1 steps, and this loop has 4"),
    ],
)
def test_calls_that_do_not_fit(bound, here, grid, heads, text):
    run = bound([[[(1, 1, 1)] * 2]])
    q, k, v = tensors(0, 1, heads, heads, 24)
    with position(**here):
        with pytest.raises(CallError, match=text):
            if grid is None:
                run(q, k, v, None, None)
            else:
                with hal.grid(*grid):
                    run(q, k, v, None, None)


OTHERS = [  # steps, layers and heads of a strategy, where the model has 4, 2 and 2; what is said of it
    ((3, 2, 2), r"is for 3 steps, and this loop has 4"),
    ((5, 2, 2), r"is for 5 steps, and this loop has 4"),
    ((4, 1, 2), r"has 1 layers, 0 to 0, and this call is of layer 1"),
    ((4, 3, 2), r"is for 3 layers, and this model has 2"),
    ((4, 2, 3), r"windows for 3 heads, and q has 2"),
]


def narrow(steps, layers, heads):
    return [[[(1, 1, 1)] * heads] * layers] * steps


@pytest.mark.parametrize("package", [False, True])
@pytest.mark.parametrize("shape, text", OTHERS)
def test_the_strategy_of_another_model_is_told_of_in_dense_steps(tmp_path, monkeypatch, package, shape, text):
    grid, ran = (4, 4, 6), []
    monkeypatch.setitem(native.SHAPES, grid, range(1))
    with tuned(tmp_path, monkeypatch, narrow(*shape), skip=3) as s:
        of = lambda q, k, v, **more: ran.append(1) or q
        run = native._bound(of, native.NAMES, s) if package else portable.bind(Call(head_dim=8), s)
        with position(step=0, steps=4, layer=1, layers=2), hal.grid(*grid), pytest.raises(CallError, match=text):
            run(*tensors(0, 1, 2, 2, 96), None, None)
    assert not ran


@pytest.mark.parametrize("shape, text", OTHERS)
def test_the_strategy_of_another_model_ends_a_generation_in_its_first_step(tmp_path, shape, text):
    pytest.importorskip("diffusers")
    from hal.testing import tiny

    pipeline, path, steps = tiny.wan(), tmp_path / "s.json", []
    path.write_text(json.dumps({"_".join(map(str, at)): [1, 1, 1] for at in itertools.product(*map(range, shape))}))
    words = {"mask_strategy_file_path": str(path), "skip_time_steps": 3}
    with hal.attach(pipeline, attention_backend=BACKEND.name, attention_backend_config=words):
        with pytest.raises(CallError, match=text):
            pipeline(
                prompt="a cat", output_type="latent", max_sequence_length=16, num_frames=9, height=16, width=16,
                num_inference_steps=4, callback_on_step_end=lambda p, step, t, x: steps.append(step) or x,
            )  # fmt: skip
    assert steps == []


@pytest.mark.parametrize(
    "content, text",
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "no entries"),
        ("{}", "no entries"),
        ('{"0_0": [1, 1, 1]}', '"0_0"'),
        ('{"0_0_0": [1, 1]}', "numbers of tiles from 1"),
        ('{"0_0_0": [1, 0, 1]}', "numbers of tiles from 1"),
        ('{"0_0_0": [1, true, 1]}', "numbers of tiles from 1"),
        ('{"0_0_0": [1, 1, 1], "0_0_0": [1, 1, 3]}', "twice"),
        ('{"0_0_0": [1, 1, 1], "0_0_00": [1, 1, 3]}', "again"),
        ('{"0_0_0": [1, 1, 1], "1_1_0": [1, 1, 1]}', 'the first missing is "0_1_0"'),
    ],
)
def test_strategy_files_that_are_wrong(tmp_path, content, text):
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    words = {"mask_strategy_file_path": str(path)}
    with pytest.raises(PolicyError, match=text) as said:  # when settings are checked: before a model is loaded
        config.settings(source.read(words), hal.Catalog({}, {BACKEND.name: BACKEND}), BACKEND.name)
    assert str(path) in str(said.value)


@given(
    table=st.integers(1, 3).flatmap(
        lambda n: st.lists(
            st.lists(st.lists(windows, min_size=n, max_size=n), min_size=n, max_size=n), min_size=1, max_size=3
        )
    )
)
@settings
def test_a_strategy_survives_its_file(tmp_path_factory, table):
    wanted = strategy.Strategy(tuple(tuple(tuple(h) for h in layers) for layers in table))
    path = tmp_path_factory.mktemp("s") / "s.json"
    strategy.write(str(path), wanted)
    assert strategy.read(str(path)) == wanted
    path.write_text(json.dumps({"0_0_0": [1, 2, 3]}))
    assert strategy.read(str(path)).windows == ((((1, 2, 3),),),)  # a changed file is read again


def test_a_strategy_that_cannot_be_written_leaves_the_one_that_is_there(tmp_path, monkeypatch):
    path, some = tmp_path / "s.json", strategy.Strategy(((((1, 1, 1),),),))
    with pytest.raises(PolicyError, match=r"cannot write the strategy file .*no/s\.json: .*No such file"):
        strategy.write(str(tmp_path / "no" / "s.json"), some)
    path.write_text("mine")
    real = Path.write_text

    def full(self, text, *more):
        real(self, text[:3], *more)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(PolicyError, match=r"cannot write the strategy file .*s\.json: .*No space left"):
        strategy.write(str(path), some)
    assert path.read_text() == "mine" and [*tmp_path.iterdir()] == [path]


def test_a_folder_without_permission_is_said_when_settings_are_checked(tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    monkeypatch.setattr(os, "access", lambda folder, mode: Path(folder).name == "tables")
    with pytest.raises(PolicyError, match=r"mask_strategy_file_path=.*s\.json: no permission to write in"):
        words = {"mask_strategy_file_path": str(tmp_path / "s.json"), "mask_search_path": str(tmp_path / "tables")}
        searching = source.read({**words, "sta_mode": "STA_searching"})
        config.settings(searching, hal.Catalog({}, {BACKEND.name: BACKEND}), BACKEND.name)


# ---- the packages


RECORDS = ("st_attn-0.0.7", "fastvideo_kernel_sta-0.2.6")


def compute(grid, tile):
    """What the packages compute: tiles, then text; windows by head; text attends to all, and all to it."""

    def sliding_tile_attention(a):
        q, k, v = list(a.values())[:3]
        order, text = Order.of(grid, tile), a["text_length"]
        assert a["has_text"] == (text > 0) and list(a.values())[-1] == "x".join(map(str, grid))
        assert q.shape[0] == 1 and q.shape[1] == len(a["window_size"])
        slots = torch.cat([order.token, torch.arange(order.tokens, order.tokens + text)])
        keep = torch.stack([dense_mask(grid, w, text, False, tile)[slots][:, slots] for w in a["window_size"]])[None]
        return oracle.attention(q, k, v, attn_mask=keep, layout="bhsd")[0].to(q.dtype)

    return {"sliding_tile_attention": sliding_tile_attention}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("text, first, step", [(0, False, 0), (0, False, 1), (3, False, 1), (2, True, 1), (2, True, 0)])
def test_a_package_gets_tiles_then_text_and_gives_what_the_portable_form_gives(
    tmp_path, monkeypatch, name, text, first, step
):
    """Video and text are told apart by their place: a text that came back as video would be another output."""
    grid, heads = (4, 4, 6), [(1, 1, 1), (1, 2, 2)]
    q, k, v = tensors(7, 2, 2, 2, 96 + text)
    fake = fakes.of(name, compute(grid, TILE))
    monkeypatch.setitem(native.SHAPES, grid, range(4))
    with tuned(tmp_path, monkeypatch, [[[(1, 1, 1)] * 2], [heads]], skip=1) as s:
        names = native.ST_ATTN if fake.record.module == "st_attn" else native.NAMES
        runs = native._bound(fake.functions["sliding_tile_attention"], names, s), portable.bind(Call(head_dim=8), s)
        with position(step=step, steps=2, layer=0), hal.grid(*grid, text=text, text_first=first):
            torch.testing.assert_close(*(run(q, k, v, None, None) for run in runs), atol=1e-10, rtol=0)
    assert len(fake.calls) == 2  # one for each video of the batch
    assert fake.calls[0]["window_size"] == (heads if step else [(2, 2, 2)] * 2)


@pytest.mark.parametrize("name, kernel", [*zip(RECORDS, ("sta", "sta.fastvideo"))])
def test_a_package_is_found_proven_and_called_by_its_keywords(tmp_path, monkeypatch, name, kernel):
    grid = (6, 8, 16)
    q, k, v = (x.bfloat16().transpose(1, 2) for x in tensors(2, 1, 2, 2, 768, 64))
    path = tmp_path / "s.json"
    strategy.write(str(path), strategy.Strategy((((((1, 1, 1), (1, 1, 2)),)),)))
    given = (Setting(BACKEND.name, "", Settings(mask_strategy_file_path=str(path), skip_time_steps=0)),)
    monkeypatch.setitem(native.SHAPES, grid, range(1))
    r = fakes.record(name)
    with fakes.installed(name, compute(grid, (6, 8, 8))) as fake:
        with fakes.workbench(BACKEND, **{r.distribution.replace("-", "_"): r.version}), hal.grid(*grid):
            with hal.context.changed(policy=policy.Policy(settings=given)), position(step=0, steps=1, layer=0):
                assert hal.explain(q, k, v, backend=BACKEND.name).kernel == kernel
                out = hal.attention(q, k, v, backend=BACKEND.name)
    keep = torch.stack([dense_mask(grid, w, 0, False, (6, 8, 8)) for w in ((1, 1, 1), (1, 1, 2))])[None]
    torch.testing.assert_close(
        out.double(), oracle.attention(q, k, v, attn_mask=keep)[0].double(), atol=2e-2, rtol=2e-2
    )
    assert set(fake.calls[-1]) == {"symbol", *r.symbols["sliding_tile_attention"].parameters}


@pytest.mark.parametrize("kernel", [STA, STA_FASTVIDEO])
def test_another_package_of_that_name_is_no_proof(kernel):
    (needs,) = kernel.needs
    with fakes.modules({needs.module: {"sliding_tile_attention": lambda q, k, v, window: q}}):
        assert probe.prove(needs).state == "wrong_distribution"
    with fakes.modules({needs.module: {"tiles": 1}}):
        assert probe.prove(needs).state == "missing_symbol"


@pytest.mark.parametrize(
    "grid, tokens, refused",
    [
        (None, 24, None),
        ((30, 48, 80), 115200, "with 0 text tokens"),
        ((30, 48, 80, 1), 115201, None),
        ((30, 48, 80, 256), 115456, None),
        ((30, 48, 80, 257), 115457, "257 text tokens"),
        ((36, 48, 48, 77), 82944, None),
        ((36, 48, 48, 77), 83021, "77 text tokens"),
        ((2, 3, 4), 24, "the grid is 2x3x4 with 0 text tokens; sta.portable takes any grid"),
    ],
)
def test_grids_that_the_packages_were_not_built_for(grid, tokens, refused):
    q = torch.empty(1, tokens, 1, 1, device="meta")
    with position() if grid is None else hal.grid(*grid):
        said = native.confirm(q, q, q, None, Call(layout="bshd"))
    assert said is None if refused is None else refused in said


def test_the_declaration():
    assert BACKEND.quality == "lossy"  # never chosen automatically
    assert BACKEND.roles == {"self"}  # never for cross-attention
    lacks = {"causal", "rectangular", "varlen", "compile", "graph", "window", "mask.bool", "dropout"}
    for kernel in (*BACKEND.kernels, PORTABLE):
        assert not kernel.honours & lacks
        assert callable(kernel.binder())
    assert Position().grid is None


# ---- builds and devices


def test_later_steps_layers_and_heads_build_nothing(bound, monkeypatch):
    """One mask and one plan for each distinct window, however many calls; none in a later generation."""
    from hal.sparse import plan

    windows, q = [(1, 1, 1), (1, 1, 3), (2, 1, 1)], tensors(0, 1, 3, 3, 140)
    run = bound([[windows, windows[::-1]]] * 2)
    built = []
    made = plan._groups
    monkeypatch.setattr(plan, "_groups", lambda *a: built.append(1) or made(*a))
    portable._mask.cache_clear()
    for _ in range(2):
        for step, layer in itertools.product(range(2), range(2)):
            with position(step=step, steps=2, layer=layer), hal.grid(4, 5, 7):
                run(*q, None, None)
        assert (portable._mask.cache_info().misses, len(built)) == (3, 3)


ON_A_DEVICE = """
import sys
import hal
from hal import oracle
from hal.backends.sliding_tile_attn import portable, strategy
from hal.backends.sliding_tile_attn.settings import Settings
from hal.context import position
from hal.facts import Call
from hal.sparse import Order

torch.manual_seed(0)
portable.TILE = (2, 2, 3)
path, heads = sys.argv[-1] + "/s.json", ((1, 1, 3), (2, 1, 1))
strategy.write(path, strategy.Strategy(((heads,),)))
grid, text = (3, 4, 7), 3
real = [torch.randn(1, 2, 87, 8) for _ in range(3)]
order = Order.of(grid, portable.TILE, suffix=text)
masks = [portable.mask(order, w).to_dense()[0, 0][order.slot][:, order.slot] for w in heads]
wanted = oracle.attention(*real, attn_mask=torch.stack(masks)[None], layout="bhsd")[0]
full = oracle.attention(*real, layout="bhsd")[0]
q, k, v = (x.to("fake") for x in real)
for mode, want in (("STA_inference", wanted), ("STA_searching", full), ("STA_tuning", None)):
    run = portable.bind(Call(head_dim=8), Settings(mask_strategy_file_path=path, sta_mode=mode, skip_time_steps=0))
    with position(step=0, steps=1, layer=0), hal.grid(*grid, text=text):
        out = run(q, k, v, None, None)
    assert out.device.type == "fake"
    if want is not None:
        torch.testing.assert_close(out.cpu().double(), want, atol=1e-5, rtol=1e-5)
print("same")
"""


def test_a_device_that_pytorch_does_not_know_and_without_float64(python, tmp_path):
    ran = python(f"import sys\nsys.argv.append({str(tmp_path)!r})\n" + DEVICE + ON_A_DEVICE)
    assert (ran.code, ran.out) == (0, "same\n"), ran.err


INTERPRETED = """
import sys
import torch
import hal
from hal import oracle
from hal.backends.sliding_tile_attn import portable, strategy
from hal.backends.sliding_tile_attn.settings import Settings
from hal.context import position
from hal.facts import Call
from hal.sparse import Order

torch.manual_seed(0)
path, heads = sys.argv[-1] + "/s.json", ((1, 1, 1),)
strategy.write(path, strategy.Strategy(((heads,),)))
grid = (5, 8, 12)  # two tiles, neither of them full
q, k, v = (torch.randn(1, 1, 480, 64).half() for _ in range(3))
order = Order.of(grid, portable.TILE)
masks = [portable.mask(order, w).to_dense()[0, 0][order.slot][:, order.slot] for w in heads]
wanted, stats = oracle.attention(q, k, v, attn_mask=torch.stack(masks)[None], layout="bhsd", scale=0.2)
call = Call(dtype="float16", head_dim=64, lse=True, scale=0.2)
run = portable.triton(call, Settings(mask_strategy_file_path=path, skip_time_steps=0))
with position(step=0, steps=1, layer=0), hal.grid(*grid):
    out, lse = run(q, k, v, None, None)
torch.testing.assert_close(out.double(), wanted.double(), atol=2e-3, rtol=2e-3)
torch.testing.assert_close(lse.double(), stats, atol=1e-3, rtol=1e-3)
print("same")
"""


@pytest.mark.slow
def test_hals_triton_kernel_takes_blocks_of_384(python, tmp_path):
    pytest.importorskip("triton")
    ran = python(f"import sys\nsys.argv.append({str(tmp_path)!r})\n" + INTERPRETED, TRITON_INTERPRET="1")
    assert (ran.code, ran.out) == (0, "same\n"), ran.err
