"""One prompt and seed under several backends: what is measured against the first, and what is drawn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from hal.cli import main
from hal.errors import HalError, PolicyError
from hal.integrations import comparison
from hal.integrations.comparison import Variant, compare, distances, drawn, variants
from hal.testing import tiny

SIZES = {**tiny.CALLS["wan"], "num_inference_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("wan")
    tiny.wan().save_pretrained(path)
    return path


def test_the_first_is_the_measure_and_another_backend_is_told_apart(folder, zeros, tmp_path):
    asked = [Variant("torch_sdpa", {"attention_backend": "torch_sdpa"}), Variant("zeros", {"attention_backend": zeros})]
    out = tmp_path / "compare.png"
    first, other = compare(folder, "a cat", asked, out=out, **SIZES)
    assert (first.relative_l1, first.psnr, first.kept) == (0, float("inf"), 1.0)
    assert first.cosine == pytest.approx(1) and first.ssim == pytest.approx(1)
    assert other.relative_l1 > 0 and other.psnr < 100 and other.ssim < 1
    assert first.backend == "torch_sdpa / sdpa.cpu" and other.backend == "zeros / zeros"
    with Image.open(out) as picture:
        frames = SIZES["num_frames"]
        assert picture.size == (
            min(frames, comparison.COLUMNS) * 18 + 2,
            3 * (16 + 14 + 2),
        )  # two rows and a difference


def test_the_same_backend_twice_over_gives_the_same_picture(folder, tmp_path):
    asked = [Variant("a", {"attention_backend": "torch_sdpa"}), Variant("b", {})]
    _, again = compare(folder, "a cat", asked, out=tmp_path / "c.png", **SIZES)
    assert again.relative_l1 == 0


def test_the_kept_share_is_measured(tmp_path):
    from hal.demo import shipped

    sizes = {"num_frames": 16, "height": 64, "width": 64, "num_inference_steps": 1}
    asked = variants(["torch_sdpa"], ["video_sparse_attn:VSA_sparsity=0.5"])
    exact, half = compare(shipped.model_folder(), "a seven", asked, out=tmp_path / "c.png", **sizes)
    assert (exact.kept, half.kept) == (1.0, 0.5) and half.relative_l1 > 0


def test_distances_are_what_they_are_called():
    exact = np.full((2, 8, 8, 3), 0.5)
    assert distances(exact, exact) == (0, pytest.approx(1), float("inf"), pytest.approx(1))
    off = exact + 0.1
    l1, cosine, psnr, ssim = distances(exact, off)
    assert l1 == pytest.approx(0.2) and cosine == pytest.approx(1) and psnr == pytest.approx(20) and ssim < 1


def test_the_difference_is_drawn_below_its_row():
    exact = np.zeros((3, 8, 8, 3))
    picture = np.asarray(drawn(["a", "b"], [exact, exact + 0.1]))
    rows = [picture[i * 24 + 14 : i * 24 + 22, 2:10] for i in range(3)]
    assert [int(r.mean()) for r in rows] == [0, round(0.1 * 255), round(0.4 * 255)]


WRONG = [
    (["torch_sdpa"], [], "needs two backends or more"),
    ([], [], "needs two backends or more"),
    (["torch_sdpa", "torch_sdp"], [], "did you mean 'torch_sdpa'"),
    (["torch_sdpa", "torch_sdpa"], [], "is compared twice"),
    (["torch_sdpa"], ["fa"], "is no BACKEND:SETTINGS"),
    (
        ["torch_sdpa", "sliding_tile_attn"],
        [],
        "needs mask_strategy_file_path.*; give it by --variant sliding_tile_attn:",
    ),
]


@pytest.mark.parametrize("backends, settings, said", WRONG)
def test_what_cannot_be_compared_is_told(backends, settings, said):
    with pytest.raises(PolicyError, match=said):
        variants(backends, settings)


def test_the_measure_is_exact(zeros, monkeypatch):
    from hal import plugins

    monkeypatch.setitem(vars(plugins.catalog().backends[zeros]), "quality", "lossy")
    with pytest.raises(PolicyError, match="name an exact one"):
        variants([zeros, "torch_sdpa"])


def test_a_backend_that_cannot_run_is_no_comparison(folder, tmp_path):
    with pytest.raises(HalError, match="cannot serve"):
        compare(folder, "a cat", variants(["torch_sdpa", "fa"]), out=tmp_path / "c.png", **SIZES)
    assert not (tmp_path / "c.png").exists()


def test_the_command_draws_tells_and_does_not_overwrite(folder, zeros, tmp_path):
    out = tmp_path / "compare.png"
    line = [
        "compare",
        "--backends",
        f"torch_sdpa,{zeros}",
        "--model-path",
        str(folder),
        "--prompt",
        "a cat",
        "--out",
        str(out),
    ]
    sizes = ["--height", "16", "--width", "16", "--num-frames", "5", "--steps", "1", "--json"]
    ran = CliRunner().invoke(main, [*line, *sizes])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert [v["name"] for v in told["variants"]] == ["torch_sdpa", "zeros"] and told["variants"][0]["psnr"] is None
    again = CliRunner().invoke(main, [*line, *sizes])
    assert again.exit_code == 2 and "--force" in again.output


def test_settings_stand_with_a_backend_and_the_kept_share_is_that_of_the_masks_that_ran(folder, tmp_path):
    """Tokens: 3 frames of 1 row and 1 column, so a chunk of one frame of three is a third; the first step is dense."""
    sizes = {"temporal_chunk_size": 1, "temporal_topk": 1, "spatial_chunk_size": [1, 1], "spatial_topk": 1}
    layers = {"st_chunk_size": [1, 1, 1], "st_topk": 1, "spatial_layer": 0, "st_layer": 0}
    given = {"moba_config": {**sizes, **layers, "moba_select_mode": "topk", "first_full_step": 1}}
    asked = variants(["torch_sdpa"], [f"vmoba_attn:{json.dumps(given)}"])
    first, other = compare(folder, "a cat", asked, out=tmp_path / "compare.png", **SIZES)
    assert other.backend == "vmoba_attn / vmoba.portable" and other.quality == "lossy"
    assert (first.kept, other.kept) == (1.0, pytest.approx((1 + 1 / 3) / 2))
