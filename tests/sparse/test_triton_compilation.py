"""The tile table, and what the kernel compiles to.  A few cases here; ``tox -e aot`` has all that the table claims."""

from __future__ import annotations

import functools
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.sparse.triton.tiles import ARCHS, DTYPES, Tile, tile_of, tiles_for

PAGE = Path(__file__).parents[2] / "docs" / "triton-kernels.md"
compiles = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton's compiler"
)


def test_the_archs_are_those_that_the_issue_names() -> None:
    assert set(ARCHS) == {
        *("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"), *("gfx942", "gfx950", "gfx1201"),
    }  # fmt: skip
    assert all(set(arch.tiles) == {64, 128} for arch in ARCHS.values())


TILES = (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))


@pytest.mark.parametrize(
    "block_q, block_k, q",
    [
        (128, 128, 128),  # both fit: the first
        (64, 64, 64),  # half of the larger one would be dropped
        (192, 64, 64),  # three of 64, not two of 128
        (384, 384, 128),  # the 6 x 8 x 8 tile of STA
        (16, 16, 64),  # smaller than any
        (100, 128, 128),  # 128 either way
    ],
)
def test_the_tile_that_drops_least_is_taken(block_q: int, block_k: int, q: int) -> None:
    assert tile_of(TILES, block_q, block_k).q == q


@given(st.sampled_from(sorted(ARCHS)), st.integers(1, 128), st.integers(1, 600), st.integers(1, 600))
def test_every_head_dim_and_block_has_a_tile_of_the_table(arch: str, head_dim: int, block_q: int, block_k: int) -> None:
    tiles = tiles_for(arch, head_dim)
    assert tiles is ARCHS[arch].tiles[64 if head_dim <= 64 else 128]
    assert tile_of(tiles, block_q, block_k) in tiles


@functools.cache
def _compiled(case: Any) -> Any:
    from hal.sparse.triton.compilation import compiled

    return compiled(case)


@compiles
@pytest.mark.parametrize("arch", ["sm89", "sm90", "sm100", "gfx942", "gfx1201"])  # one for each kind of instruction
def test_it_compiles_to_the_arch_s_matrix_instructions_and_spills_nothing(arch: str) -> None:
    from hal.sparse.triton.compilation import Case

    result = _compiled(Case(arch, 64, "bfloat16", ARCHS[arch].tiles[64][0], "ragged"))
    assert result.problems == []
    assert 0 < result.registers <= (512 if arch == "gfx942" else 256) and result.shared > 0


@compiles
@pytest.mark.parametrize(
    "arch, tile, problem",
    [
        ("sm120", Tile(128, 128, 4, 3), "spilled"),
        ("gfx1201", Tile(128, 64, 4, 1), "spilled"),
        ("sm89", Tile(64, 128, 4, 5), "bytes of shared memory; sm89 has 101376"),
        ("gfx942", Tile(64, 64, 4, 1), "multiplications by mfma instructions; one step has 1048576"),  # done twice
        ("sm90", Tile(64, 64, 2, 1), "0 multiplications by wgmma instructions"),  # four warps share one
    ],
)
def test_a_tile_that_breaks_a_rule_is_found(arch: str, tile: Tile, problem: str) -> None:
    from hal.sparse.triton.compilation import Case

    assert any(problem in p for p in _compiled(Case(arch, 128, "bfloat16", tile, "ragged")).problems)


def test_the_page_has_a_row_for_every_arch_head_dim_dtype_and_tile() -> None:
    rows = [
        re.split(r"\s*\|\s*", line)[1:7] for line in PAGE.read_text().splitlines() if re.match(r"\| (sm|gfx)", line)
    ]
    assert rows == [
        [arch, str(head_dim), dtype, f"{t.q} x {t.k}", str(t.warps), str(t.stages)]
        for arch, a in ARCHS.items()
        for head_dim, tiles in a.tiles.items()
        for dtype in DTYPES
        for t in tiles
    ]


@compiles
@pytest.mark.aot
def test_every_case_of_the_table_meets_the_rules_and_the_page_has_its_figures(request: pytest.FixtureRequest) -> None:
    if "aot" not in request.config.getoption("markexpr"):
        pytest.skip("takes ten minutes: tox -e aot")
    from benchmarks.triton_aot import page
    from hal.sparse.triton.compilation import cases

    results = [_compiled(case) for case in cases()]
    assert {str(r.case): r.problems for r in results if r.problems} == {}
    assert page(results) == PAGE.read_text()
