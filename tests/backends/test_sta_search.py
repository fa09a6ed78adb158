"""STA's searching and tuning: candidates, tables, and strategies made of them; the last test is one on a real generation."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import hal
from hal import config, oracle, source
from hal.backends.sliding_tile_attn import BACKEND, native, portable, strategy, tables
from hal.backends.sliding_tile_attn.settings import Settings
from hal.context import position
from hal.errors import CallError, PolicyError
from hal.facts import Call
from hal.sparse import Order
from hal.sparse.selected import Seen, watched_masks
from hal.testing import fakes

settings = hypothesis_settings(max_examples=20, deadline=None)
tiles = st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 20))
TILE, GRID = (2, 2, 3), (4, 4, 7)  # 2 x 2 x 3 tiles, the last of them clipped


def tensors(seed, b, h, s, d=8):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, h, s, d, generator=g, dtype=torch.float64) for _ in range(3))


def searches(tmp_path, **more):
    path = str(tmp_path / "strategy.json")
    return Settings(mask_strategy_file_path=path, sta_mode="STA_searching", skip_time_steps=1, **more)


def as_mode(s, mode, **more):
    return Settings(**{**s.model_dump(), "sta_mode": mode, **more})


def generation(run, steps, layers, passes=1, batch=1, heads=2, seed=0, grid=GRID):
    """Calls in the order in which a denoising loop makes them; their outputs."""
    outs = {}
    for step in range(steps):
        for p in range(passes):
            for layer in range(layers):
                q, k, v = tensors(seed + 100 * step + 10 * p + layer, batch, heads, math.prod(grid))
                with position(step=step, steps=steps, layer=layer), hal.grid(*grid):
                    outs[step, layer, p] = run(q, k, v, None, None), (q, k, v)
    return outs


@pytest.fixture(autouse=True)
def small(monkeypatch, request):
    if "real" not in request.node.name:
        monkeypatch.setattr(portable, "TILE", TILE)
        monkeypatch.setattr(native, "TILE", TILE)


# ---- candidates


def test_the_candidates_of_fastvideos_own_grid_are_fastvideos():
    assert tables.candidates(tables.FULL) == tables.UPSTREAM


@given(tiles=tiles)
@settings
def test_candidates_fit_the_grid_and_none_is_part_of_another(tiles):
    found = tables.candidates(tiles)
    assert bool(found) == (max(tiles) > 1)
    order = Order.of(tiles, (1, 1, 1))
    masks = [portable.mask(order, w).keep for w in found]
    for i, (window, mask) in enumerate(zip(found, masks)):
        assert all(1 <= a <= n and (a == n or a % 2) for a, n in zip(window, tiles)) and window != tiles
        assert set(mask.sum(-1).flatten().tolist()) == {tables.volume(window, tiles)}
        assert all((mask & ~other).any() for j, other in enumerate(masks) if j != i)


@given(tiles=tiles, window=tiles)
@settings
def test_the_volume_is_what_a_tile_in_the_middle_attends_to(tiles, window):
    mask = portable.mask(Order.of(tiles, (1, 1, 1)), window).keep
    assert int(mask.sum(-1).max()) == tables.volume(window, tiles)


# ---- searching


@pytest.mark.parametrize("text, padded", [(0, False), (3, False), (3, True)])
def test_a_search_is_dense_and_writes_the_differences_of_each_window(tmp_path, text, padded):
    s = searches(tmp_path)
    q, k, v = tensors(0, 2, 2, 112 + text)
    valid = (torch.arange(112 + text) < torch.tensor([[112 + text], [60]]))[:, None, None] if padded else None
    run = portable.bind(Call(head_dim=8, lse=True), s)
    with position(step=0, steps=1, layer=0), hal.grid(*GRID, text=text):
        out, lse = run(q, k, v, valid, None)
    full, stats = oracle.attention(q, k, v, attn_mask=valid, layout="bhsd")
    torch.testing.assert_close(out, full, atol=1e-10, rtol=0)
    torch.testing.assert_close(lse.double(), stats, atol=1e-5, rtol=0)
    (path,) = s.search_folder.iterdir()
    head, line = map(json.loads, path.read_text().splitlines())
    assert head["candidates"] == [list(w) for w in tables.candidates((2, 2, 3))]
    for window, l2, l1 in zip(head["candidates"], line["L2_loss"], line["L1_loss"]):
        order = Order.of(GRID, TILE, suffix=text)
        keep = portable.mask(order, tuple(window)).to_dense()[0, 0][order.slot][:, order.slot]
        keep = keep.expand(2, 2, -1, -1) if valid is None else keep & valid
        d = (oracle.attention(q, k, v, attn_mask=keep, layout="bhsd")[0] - full).float()
        d = d if valid is None else d * valid[:, 0, 0, :, None][:, None]
        assert l2 == pytest.approx(d.square().mean((0, 2, 3)).tolist(), rel=1e-4)
        assert l1 == pytest.approx(d.abs().mean((0, 2, 3)).tolist(), rel=1e-4)


def test_a_package_searches_as_the_portable_form_does(tmp_path, monkeypatch):
    grid, found = (4, 4, 6), []
    monkeypatch.setitem(native.SHAPES, grid, range(1))

    def compute(a):
        order = Order.of(grid, TILE)
        masks = [portable.mask(order, w).to_dense()[0, 0] for w in a["window_size"]]
        return oracle.attention(a["q"], a["k"], a["v"], attn_mask=torch.stack(masks)[None], layout="bhsd")[0]

    fake = fakes.of("fastvideo_kernel_sta-0.2.6", {"sliding_tile_attention": compute})
    for n in range(2):
        s = searches(tmp_path, mask_search_path=str(tmp_path / str(n)))
        by = fake.functions["sliding_tile_attention"]
        run = native._bound(by, native.NAMES, s) if n else portable.bind(Call(head_dim=8), s)
        with position(step=0, steps=1, layer=0), hal.grid(*grid):
            run(*tensors(3, 2, 2, 96), None, None)
        (path,) = s.search_folder.iterdir()
        found.append(tables.read(path).losses[0, 0, 0])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-5, atol=0)


def test_a_table_for_each_generation_and_both_passes_of_guidance_in_it(tmp_path):
    s = searches(tmp_path)
    run = portable.bind(Call(head_dim=8), s)
    generation(run, steps=2, layers=2, passes=2)
    generation(run, steps=2, layers=2, seed=1)
    generation(run, steps=3, layers=2, seed=1)
    found = [tables.read(p) for p in sorted(s.search_folder.iterdir())]
    assert [(t.steps, t.layers, len(t.losses)) for t in found] == [(2, 2, 8), (2, 2, 4), (3, 2, 6)]


def test_a_loop_that_has_a_number_has_a_table(tmp_path):
    s = searches(tmp_path)
    run = portable.bind(Call(head_dim=8), s)
    for loop in (1, 2):  # one step, so that no step goes back
        with position(loop=loop):
            generation(run, steps=1, layers=2)
    with position(loop=3):  # stopped early
        generation(run, steps=1, layers=1)
    with position(loop=4):
        generation(run, steps=1, layers=2, passes=2)
    one, two, early, four = sorted(s.search_folder.iterdir())
    assert [sorted(tables.read(p).losses) for p in (one, two)] == [[(0, 0, 0), (0, 1, 0)]] * 2
    assert len(early.read_text().splitlines()) == 2
    assert sorted(tables.read(four).losses) == [(0, layer, p) for layer in range(2) for p in range(2)]


def test_loops_that_take_turns_have_a_table_each(tmp_path):
    s = searches(tmp_path)
    run = portable.bind(Call(head_dim=8), s)
    for step in range(2):
        for loop in (1, 2):
            with position(step=step, steps=2, layer=0, loop=loop), hal.grid(*GRID):
                run(*tensors(0, 1, 2, 112), None, None)
    assert [sorted(tables.read(p).losses) for p in sorted(s.search_folder.iterdir())] == [[(0, 0, 0), (1, 0, 0)]] * 2


def test_a_third_pass_in_a_loop_is_refused(tmp_path):
    run = portable.bind(Call(head_dim=8), searches(tmp_path))
    with position(loop=1), pytest.raises(CallError, match="layer 0 attends a third time in step 0"):
        generation(run, steps=1, layers=1, passes=3)


def test_each_generation_of_an_attached_pipeline_is_a_table_real(tmp_path):
    pytest.importorskip("diffusers")
    from hal.testing import tiny

    pipeline, s = tiny.wan(), searches(tmp_path)
    words = {"attention_backend": BACKEND.name, "attention_backend_config": s.model_dump(exclude={"mask_search_path"})}
    sizes = {"num_frames": 9, "height": 16, "width": 144, "num_inference_steps": 1}
    with hal.attach(pipeline, **words):
        for prompt in ("a cat", "a dog"):
            pipeline(prompt=prompt, output_type="latent", guidance_scale=1.0, max_sequence_length=16, **sizes)
    found = [tables.read(p) for p in sorted(s.search_folder.iterdir())]
    assert [(t.head.grid, sorted(t.losses)) for t in found] == [((3, 1, 9), [(0, 0, 0), (0, 1, 0)])] * 2
    assert found[0].losses != found[1].losses


def test_tables_that_cannot_be_written(tmp_path):
    head = tables.Head(GRID, (2, 2, 3), 1, 2, ((1, 1, 1),))
    with pytest.raises(PolicyError, match=r"cannot write the search table .*no/s\.search: .*No such file"):
        tables.begin(tmp_path / "no" / "s.search", head)
    (tmp_path / "0001.jsonl").mkdir()
    with pytest.raises(PolicyError, match=r"cannot write the search table .*0001\.jsonl: .*; delete it"):
        tables.add(tmp_path / "0001.jsonl", (0, 0, 0), [[1.0]], [[1.0]])


# ---- tuning


def table(losses, steps=2, heads=2, tiles=(2, 2, 3), name="t.jsonl", candidates=((1, 2, 3), (2, 1, 3), (1, 1, 3))):
    return tables.Table(name, tables.Head(GRID, tiles, steps, heads, candidates), losses)


def test_tuning_takes_the_least_mean_and_the_full_window_before():
    a = {(t, 0, 0): [[1.0, 4.0], [2.0, 1.0], [3.0, 9.0]] for t in range(2)}
    b = {(t, 0, 0): [[9.0, 4.0], [2.0, 1.0], [3.0, 9.0]] for t in range(2)}
    of = lambda several, skip=1, cfg=False: tables.tuned([table(x) for x in several], skip, cfg).windows
    assert of([a]) == (((((2, 2, 3),) * 2),), (((1, 2, 3), (2, 1, 3)),))
    assert of([a, b])[1] == (((2, 1, 3), (2, 1, 3)),)  # the mean over prompts
    both = {**a, **{(t, 0, 1): x for (t, _, _), x in b.items()}}
    assert of([both])[1] == of([a])[1]  # the conditional pass alone
    assert of([both], cfg=True)[1] == of([a, b])[1]
    ties = {(t, 0, 0): [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]] for t in range(2)}
    assert of([ties], skip=0)[0] == (((1, 1, 3), (1, 1, 3)),)  # the smallest


def test_the_sparsity_of_a_strategy():
    full, half = (2, 2, 3), (1, 2, 3)
    assert tables.kept(strategy.Strategy((((full,),), ((half,),))), full) == 0.75


def test_searched_tuned_written_reloaded_and_used(tmp_path, caplog):
    s = searches(tmp_path)
    generation(portable.bind(Call(head_dim=8), s), steps=2, layers=2)
    run = portable.bind(Call(head_dim=8), as_mode(s, "STA_tuning"))
    with caplog.at_level("INFO", "hal"):
        made = generation(run, steps=2, layers=2)
    assert caplog.text.count("from 1 search tables, has a sparsity of 0.") == 1
    found = strategy.read(s.mask_strategy_file_path)
    assert (found.steps, found.layers, found.heads) == (2, 2, 2)
    again = generation(portable.bind(Call(head_dim=8), as_mode(s, "STA_inference")), steps=2, layers=2)
    for at, (out, (q, k, v)) in made.items():
        torch.testing.assert_close(out, again[at][0], atol=0, rtol=0)
        order = Order.of(GRID, TILE)
        masks = [
            portable.mask(order, w).to_dense()[0, 0][order.slot][:, order.slot] for w in found.windows[at[0]][at[1]]
        ]
        wanted = oracle.attention(q, k, v, attn_mask=torch.stack(masks)[None], layout="bhsd")[0]
        torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("package", [False, True])
def test_the_strategy_file_is_written_when_a_call_has_run(tmp_path, monkeypatch, package):
    s, grid = searches(tmp_path), (4, 4, 6)
    generation(portable.bind(Call(head_dim=8), s), steps=2, layers=1, grid=grid)
    path = tmp_path / "strategy.json"
    path.write_text("mine")
    tuning = as_mode(s, "STA_tuning")
    assert tuning.heads == 2 and s.heads is None
    if package:
        monkeypatch.setitem(native.SHAPES, grid, range(1))
        run = native._bound(lambda q, k, v, **more: q, native.NAMES, tuning)
    else:
        run = portable.bind(Call(head_dim=8), tuning)
    # As hal mask does: of a grid; of a generation, after a dense step.
    for when in (lambda x: True, lambda x: x.mask is not None):
        with watched_masks(when, stop=True), pytest.raises(Seen):
            generation(run, steps=2, layers=1, grid=grid)
    with pytest.raises(CallError, match="windows for 2 heads"), position(step=1, steps=2, layer=0), hal.grid(*grid):
        run(*tensors(0, 1, 3, 96), None, None)
    assert path.read_text() == "mine"
    generation(run, steps=2, layers=1, grid=grid)
    assert strategy.read(str(path)) == tuning.opened()


def test_tables_tune_for_their_own_grid(tmp_path):
    s = searches(tmp_path)
    generation(portable.bind(Call(head_dim=8), s), steps=2, layers=1)
    run = portable.bind(Call(head_dim=8), as_mode(s, "STA_tuning"))
    mine, theirs = ("x".join(map(str, g)) for g in ((8, 12, 16), GRID))
    with pytest.raises(CallError, match=f"of a grid of {theirs} tokens, and this call has {mine}"):
        generation(run, steps=2, layers=1, grid=(8, 12, 16))
    assert not Path(s.mask_strategy_file_path).exists()


def test_a_new_table_tunes_again(tmp_path):
    s = searches(tmp_path, mask_candidates=((1, 1, 1), (2, 2, 1), (1, 1, 3)))
    run = portable.bind(Call(head_dim=8), s)
    generation(run, steps=2, layers=1)
    run = portable.bind(Call(head_dim=8), as_mode(s, "STA_tuning"))
    generation(run, steps=2, layers=1)
    before = strategy.read(s.mask_strategy_file_path)
    (path,) = s.search_folder.iterdir()
    head, *lines = map(json.loads, path.read_text().splitlines())
    worst = [{**x, "L2_loss": [[100.0 - loss for loss in row] for row in x["L2_loss"]]} for x in lines]
    (path.parent / "0002.jsonl").write_text("\n".join(map(json.dumps, [head, *worst])))
    (path.parent / "0003.jsonl").write_text("\n".join(map(json.dumps, [head, *worst])))
    generation(run, steps=2, layers=1)
    after = strategy.read(s.mask_strategy_file_path)
    assert before.windows[1] != after.windows[1]
    strategy.write(s.mask_strategy_file_path, before)  # by someone else
    generation(run, steps=2, layers=1)
    assert strategy.read(s.mask_strategy_file_path) == after


def test_a_search_that_is_run_for_a_picture_leaves_no_table(tmp_path):
    s = searches(tmp_path)
    run = portable.bind(Call(head_dim=8), s)
    with watched_masks(lambda x: x.position.layer == 1, stop=True), pytest.raises(Seen):
        generation(run, steps=1, layers=2)
    assert not s.search_folder.exists()


# ---- what is wrong


def checked(**words):
    catalog = hal.Catalog({}, {BACKEND.name: BACKEND})
    return config.settings(source.read({k: str(x) for k, x in words.items()}), catalog, BACKEND.name)


def test_folders_and_files_are_looked_at_when_settings_are_checked(tmp_path):
    path, nowhere = tmp_path / "s.json", tmp_path / "a" / "s.json"
    for mode in ("STA_tuning", "STA_tuning_cfg"):
        with pytest.raises(PolicyError, match=r"no search tables in the folder .*s\.search; .*STA_searching"):
            checked(mask_strategy_file_path=path, sta_mode=mode)
    for words in ({"mask_strategy_file_path": nowhere}, {"mask_strategy_file_path": path, "mask_search_path": nowhere}):
        with pytest.raises(PolicyError, match="mask_search_path"):
            checked(**words, sta_mode="STA_searching")
    with pytest.raises(PolicyError, match="name a file"):
        checked(mask_strategy_file_path=tmp_path, mask_search_path=tmp_path, sta_mode="STA_searching")
    with pytest.raises(PolicyError, match=r"sta_mode=.*allowed: .*STA_inference or STA_searching"):
        checked(mask_strategy_file_path=path, sta_mode="STA_training")


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda lines: lines[:1], "holds no calls"),
        (lambda lines: lines[:-1], "has no step 1, layer 1, pass 0 of 2 steps, 2 layers"),
        (lambda lines: [*lines[:-1], lines[-1][:20]], "line 5"),
        (lambda lines: [*lines, lines[-1]], "line 6: it says again"),
        (lambda lines: lines[1:], "line 1: the head lacks"),
        (lambda lines: [lines[0], lines[1].replace("[[", "[[-"), *lines[2:]], "line 2: it has no L2_loss"),
        (lambda lines: [lines[0], "[]", *lines[2:]], "line 2: it lacks"),
        (lambda lines: ["{}", *lines[1:]], "line 1: the head lacks"),
    ],
)  # fmt: skip
def test_tables_that_are_wrong(tmp_path, change, text):
    s = searches(tmp_path)
    generation(portable.bind(Call(head_dim=8), s), steps=2, layers=2)
    (path,) = s.search_folder.iterdir()
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with pytest.raises(PolicyError, match=text) as said:
        portable.bind(Call(head_dim=8), as_mode(s, "STA_tuning"))
    assert str(path) in str(said.value)


def test_tables_that_do_not_belong_together():
    losses = {(t, 0, 0): [[1.0, 1.0]] * 3 for t in range(2)}
    more = {(t, layer, 0): [[1.0, 1.0]] * 3 for t in range(2) for layer in range(2)}
    with pytest.raises(PolicyError, match=r"t\.jsonl and u\.jsonl differ in their number of layers: 1 and 2"):
        tables.tuned([table(losses), table(more, name="u.jsonl")], 0, False)
    with pytest.raises(PolicyError, match="differ in their head: heads 2 and 3"):
        tables.tuned([table(losses), table(losses, heads=3)], 0, False)
    with pytest.raises(PolicyError, match=r"STA_tuning_cfg averages over both passes .* t\.jsonl has one"):
        tables.tuned([table(losses)], 0, True)


@pytest.mark.parametrize(
    "grid, here, more, text",
    [
        ((2, 2, 3), {}, {}, "no window to search"),
        (GRID, {}, {"mask_candidates": ((9, 9, 9),)}, "is all of the"),
        (GRID, {"step": None}, {}, "the denoising step for sta_mode=STA_searching"),
        (GRID, {"layer": None}, {}, "the index of the layer for sta_mode=STA_searching"),
    ],
)
def test_searches_that_cannot_be(tmp_path, grid, here, more, text):
    s = searches(tmp_path, **more)
    run = portable.bind(Call(head_dim=8), s)
    with position(**{"step": 0, "steps": 1, "layer": 0, **here}), hal.grid(*grid):
        with pytest.raises(CallError, match=text):
            run(*tensors(0, 1, 2, grid[0] * grid[1] * grid[2]), None, None)
    assert not s.search_folder.exists()


def test_a_skip_of_all_steps_is_told(tmp_path, caplog):
    path = str(tmp_path / "s.json")
    strategy.write(path, strategy.Strategy(((((1, 1, 1),),),) * 3))
    with position(step=0, steps=3, layer=0):
        portable.skipped(Settings(mask_strategy_file_path=path), position_here())
    assert "skip_time_steps=15 takes all of the 3 steps" in caplog.text


def position_here():
    return hal.context.where()


# ---- a real generation


@pytest.mark.slow
def test_a_strategy_of_a_real_generation_is_better_than_random_windows(tmp_path):
    """The model that hal ships, on a grid of 2 x 2 x 2 tiles: candidates of one volume, so that only their place matters."""
    from hal.demo import shipped
    from hal.integrations.loading import load

    pipeline = load(shipped.model_folder())
    pipeline.set_progress_bar_config(disable=True)
    heads = pipeline.transformer.config.num_attention_heads
    layers, steps = pipeline.transformer.config.num_layers, 3
    candidates = ((1, 2, 2), (2, 1, 2), (2, 2, 1))

    def frames(**words):
        with hal.attach(pipeline, **words) as attachment, watched_masks() as seen:
            made = pipeline(
                prompt=shipped.PROMPT, generator=torch.Generator().manual_seed(0), output_type="latent",
                num_frames=48, height=128, width=128, num_inference_steps=steps, guidance_scale=3.0,
            ).frames  # fmt: skip
        return made.float(), seen, attachment.receipts()

    def sta(path, mode="STA_inference"):
        more = {"mask_candidates": [list(w) for w in candidates]} if mode == "STA_searching" else {}
        words = {"mask_strategy_file_path": str(path), "sta_mode": mode, "skip_time_steps": 1, **more}
        return {"attention_backend": BACKEND.name, "attention_backend_config": words}

    dense, _, _ = frames()
    tuned = tmp_path / "tuned.json"
    searched, _, _ = frames(**sta(tuned, "STA_searching"))
    torch.testing.assert_close(searched, dense, atol=1e-3, rtol=1e-3)
    made, _, _ = frames(**sta(tuned, "STA_tuning"))
    out, seen, receipts = frames(**sta(tuned))
    assert made.equal(out)

    found = strategy.read(str(tuned))
    assert (found.steps, found.layers, found.heads) == (steps, layers, heads)
    sparse = [x.mask.density for x in seen if x.mask is not None]
    assert sparse and max(sparse) < 0.75
    assert {x.position.step for x in seen if x.mask is None} == {0}
    assert {r.kernel for r in receipts if r.component == "transformer" and r.role == "self"} == {"sta.portable"}

    error = (out - dense).norm()
    for seed in range(2):
        draw = random.Random(seed)
        table = [
            [[(2, 2, 2) if t < 1 else draw.choice(candidates) for _ in range(heads)] for _ in range(layers)]
            for t in range(steps)
        ]
        path = tmp_path / f"random-{seed}.json"
        strategy.write(str(path), strategy.Strategy(tuple(tuple(map(tuple, x)) for x in table)))
        assert error < (frames(**sta(path))[0] - dense).norm()
