"""hal mask: what it draws is what the backend keeps, and what is wrong is said before anything runs."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import hal
from hal.backends.sliding_tile_attn import strategy, tables
from hal.cli import main
from hal.errors import CallError
from hal.sparse import BlockMask, Order, pictures
from hal.sparse.selected import Seen, Watched, watch, watched_masks

pytest.importorskip("matplotlib")
STA = "sliding_tile_attn"


@pytest.fixture
def mask(tmp_path, monkeypatch):
    """hal mask in an empty folder that has a strategy of 2 steps (the first dense), 1 layer and 3 heads."""
    monkeypatch.chdir(tmp_path)
    full, windows = ((2, 3, 4),) * 3, ((1, 3, 3), (2, 1, 4), (1, 3, 3))
    strategy.write("s.json", strategy.Strategy(((full,), (windows,))))

    def run(*args, backend=STA, config="mask_strategy_file_path=s.json,skip_time_steps=1"):
        done = CliRunner().invoke(main, ["mask", "--backend", backend, "--config", config, *args])
        return done.exit_code, done.stdout, done.stderr

    return run


def test_density_by_head_and_a_picture(mask):
    code, out, err = mask("--grid", "12x24x32", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert [(p["heads"], p["density"]) for p in told["patterns"]] == [([0, 2], 9 / 24), ([1], 8 / 24)]
    assert told["density"] == pytest.approx((9 + 8 + 9) / 72)
    assert (told["step"], told["layer"], told["tile"]) == (1, 0, [6, 8, 8])  # the first step that is not dense
    from PIL import Image

    width, height = Image.open("mask.png").size
    assert width > 500 and height > 500


def test_text_is_said_on_a_terminal(mask):
    code, out, _ = mask("--grid", "12x24x32", "--text", "20", "--out", "m.png", "--query", "11x23x31")
    assert code == 0
    assert "12 x 24 x 32 tokens and 20 of text, tiles of 6 x 8 x 8; step 1, layer 0" in out
    assert "0, 2" in out and "kept" in out


def test_a_dense_step_is_drawn_and_told(mask):
    code, out, _ = mask("--grid", "12x24x32", "--step", "0")
    assert code == 0 and "every key is attended to there; --step and --layer" in out


@pytest.mark.parametrize(
    "args, more, text",
    [
        ((), {}, "--grid FxHxW for a grid alone, or --prompt"),
        (("--grid", "1x1x1", "--prompt", "a"), {}, "--grid and --prompt both say what to draw; keep one"),
        (("--grid", "12x24"), {}, "--grid 12x24: write three numbers from 1"),
        (("--grid", "0x1x1"), {}, "three numbers from 1"),
        (("--grid", "12x24x32", "--query", "12x0x0"), {}, "the token 12x0x0 is not on the grid; allowed: 0x0x0 to 11x23x31"),
        (("--grid", "12x24x32", "--seed", "1"), {}, "--seed goes with --prompt"),
        (("--prompt", "a", "--text", "1"), {}, "--text goes with --grid"),
        (("--grid", "12x24x32", "--out", "m.gif"), {}, "name a .png file"),
        (("--grid", "12x24x32", "--out", "no/m.png"), {}, "does not exist"),
        (("--grid", "12x24x32", "--out", "taken.png"), {}, "there is such a file; --force replaces it"),
        (("--grid", "12x24x32"), {"backend": "torch_sdpa"}, "torch_sdpa attends to everything.*sliding_tile_attn"),
        (("--grid", "12x24x32"), {"backend": "sliding_tile"}, "did you mean 'sliding_tile_attn'"),
        (("--grid", "12x24x32"), {"config": "mask_strategy_file_path=none.json"}, "none.json cannot be read"),
        (("--grid", "12x24x32"), {"config": "window=3"}, "no setting 'window'"),
        (("--grid", "12x24x32", "--step", "2"), {}, "has 2 steps, 0 to 1"),
        (("--grid", "12x24x32", "--layer", "1"), {}, "has 1 layers, 0 to 0"),
        (("--grid", "12x24x32", "--head-count", "4"), {}, "windows for 3 heads, and q has 4"),
        (("--grid", "4x8x8"), {"backend": "video_sparse_attn", "config": "sparsity=0.5"}, "depends on the data.*--prompt"),
    ],
)  # fmt: skip
def test_what_is_wrong(mask, tmp_path, args, more, text):
    (tmp_path / "taken.png").write_bytes(b"mine")
    code, _, err = mask(*args, **more)
    assert code == 2
    import re

    assert re.search(text, " ".join(err.split())), err
    assert (tmp_path / "taken.png").read_bytes() == b"mine"
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".png" and p.name != "taken.png"]


def test_a_mask_of_tuning_reads_the_tables_and_writes_no_strategy(mask, tmp_path):
    (tmp_path / "t").mkdir()
    head = tables.Head((12, 24, 32), (2, 3, 4), 1, 5, ((1, 3, 3), (2, 1, 4)))
    path = tables.begin(tmp_path / "t", head)
    losses = [[0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0, 1.0]]
    tables.add(path, (0, 0, 0), losses, losses)
    before = (tmp_path / "s.json").read_bytes()
    words = "mask_strategy_file_path=s.json,skip_time_steps=0,sta_mode=STA_tuning,mask_search_path=t"
    code, out, err = mask("--grid", "12x24x32", "--json", config=words)
    assert code == 0, err
    told = json.loads(out)["patterns"]
    assert [(p["heads"], p["density"]) for p in told] == [([0, 2, 3, 4], 9 / 24), ([1], 8 / 24)]
    assert (tmp_path / "s.json").read_bytes() == before


def test_a_disk_that_is_full_is_told(mask, tmp_path, monkeypatch):
    def full(found, order, path, *more):
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pictures, "draw", full)
    code, _, err = mask("--grid", "12x24x32")
    assert code == 2 and "cannot write 'mask.png'" in " ".join(err.split()) and "No space left" in err
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".png"]


# ---- the parts


def test_a_watched_call_that_stops_computes_nothing():
    ran = []
    with pytest.raises(Seen), watched_masks(stop=True) as seen:
        watch("b", hal.context.where(), None, None)
        ran.append(1)
    assert len(seen) == 1 and not ran
    with watched_masks(lambda x: x.backend == "a", stop=True) as seen:
        watch("b", hal.context.where(), None, None)
    assert not seen
    watch("b", hal.context.where(), lambda: 1 / 0, None)  # nobody watches, so no mask is made


def test_heads_of_equal_masks_are_one_pattern_and_density_counts_tokens():
    order = Order.of((1, 1, 5), (1, 1, 4))  # blocks of 4 and of 1 token
    keep = torch.eye(2, dtype=torch.bool).expand(1, 3, 2, 2).clone()
    keep[0, 2, 0, 1] = True
    found = pictures.patterns([Watched("b", hal.context.where(), None, order.mask(keep), order)])
    assert [(p.heads, p.density) for p in found] == [((0, 1), 17 / 25), ((2,), 21 / 25)]
    one = pictures.patterns([Watched("b", hal.context.where(), None, order.mask(keep[:, :1]), order)], heads=4)
    assert [p.heads for p in one] == [(0, 1, 2, 3)]
    with pytest.raises(CallError, match="told no blocks"):
        pictures.patterns([Watched("b", hal.context.where(), None, None, None)])


def test_a_query_of_single_tokens_is_outlined_in_its_tile(tmp_path):
    """As in V-MoBA: rows of the map are tokens, columns are chunks."""
    order = Order.of((2, 4, 4), (1, 2, 2), prefix=3)
    red = pictures._red(order, (order.token.numel(), order.blocks), (1, 2, 1))
    token = 3 + 1 * 16 + 2 * 4 + 1
    assert red == (order.slot[token] // order.block, order.slot[token], True)
    assert pictures._red(order, (order.blocks, order.blocks), (1, 2, 1)) == (red.tile, red.tile, False)
    assert pictures._red(order, (7, order.blocks), None) is None
    keep = torch.rand(order.token.numel(), order.blocks) < 0.5
    pictures.draw([pictures.Pattern((0,), keep, 0.5)], order, tmp_path / "m.png", "b", (1, 2, 1), 4)
    assert (tmp_path / "m.png").stat().st_size > 1000
    with pytest.raises(CallError, match="no tiles of a video"):
        pictures.draw([pictures.Pattern((0,), keep[:7], 0.5)], order, tmp_path / "n.png", "b", (1, 2, 1), 4)
    assert not (tmp_path / "n.png").exists()


def test_what_is_always_dense_is_drawn_at_the_first_step(mask):
    code, out, _ = mask("--grid", "4x8x8", "--out", "m.png", backend="video_sparse_attn", config="sparsity=0")
    assert code == 0 and "step 0, layer 0" in out and "--config other settings" in out


def test_blocks_without_a_grid_are_drawn(tmp_path):
    mask = BlockMask.from_dense(torch.ones(1, 9, 2, 3, dtype=torch.bool), 4, 6, 2, 2)
    found = pictures.patterns([Watched("b", hal.context.where(), None, mask, None)])
    pictures.draw(found, None, tmp_path / "m.png", "b", None, 4)
    assert (tmp_path / "m.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_call_of_a_real_generation(mask):
    pytest.importorskip("diffusers")
    args = ("--prompt", "a seven", "--num-frames", "16", "--height", "64", "--width", "64", "--steps", "2", "--json")
    code, out, err = mask(*args, "--layer", "2", backend="video_sparse_attn", config="sparsity=0.5")
    assert code == 0, err
    told = json.loads(out)
    assert (told["grid"], told["step"], told["layer"]) == ([4, 8, 8], 0, 2)
    assert told["density"] == pytest.approx(0.5)
    code, _, err = mask(*args, "--layer", "99", "--force", backend="video_sparse_attn", config="sparsity=0.5")
    assert (
        code == 2
        and "no call of video_sparse_attn at a step that is not dense and layer 99; it has steps 0 to 1" in err
    )
