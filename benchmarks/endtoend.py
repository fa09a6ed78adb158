"""STA, VSA and V-MoBA as hal runs them, whole: order, select, execute, restore.  Part of ``benchmarks.blocksparse``."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.backends.sliding_tile_attn import portable as sta
from hal.backends.sliding_tile_attn.settings import Settings as StaSettings
from hal.backends.video_sparse_attn import portable as vsa
from hal.backends.video_sparse_attn.settings import Settings as VsaSettings
from hal.backends.vmoba_attn import choice
from hal.backends.vmoba_attn import portable as vmoba
from hal.backends.vmoba_attn.settings import Settings as VmobaSettings
from hal.context import Grid, Position, position
from hal.facts import Call
from hal.sparse import Order

Grid3 = tuple[int, int, int]
Timed = Callable[[Mapping[str, Callable[[], Any]], int], dict[str, float]]


class Case(NamedTuple):
    backend: str
    grid: Grid3
    what: str
    settings: Any
    layer: int = 0


# By length: grids of whole tiles.  STA's tiles of 6 frames fit no power of two.
GRIDS: dict[int, tuple[Grid3, Grid3]] = {8192: ((8, 32, 32), (12, 24, 32)), 16384: ((16, 32, 32), (12, 32, 48))}
WINDOWS = {8192: ((1, 3, 1), (2, 3, 1)), 16384: ((2, 3, 1), (1, 4, 3))}
# V-MoBA's chunks, and how many of them: the three kinds of layers at 0.25, the last two at 0.125 as well.
CHUNKS: dict[int, tuple[int, tuple[int, int], Grid3]] = {8192: (1, (8, 8), (4, 8, 16)), 16384: (1, (8, 8), (4, 16, 16))}
TOPK = {8192: (2, 4, 4), 16384: (4, 4, 4)}


def cases(s: int, folder: Path) -> Iterator[Case]:
    """Densities from 0.1 to 0.25."""
    cubes, tiles = GRIDS[s]
    for window in WINDOWS[s]:
        file = folder / f"{'x'.join(map(str, window))}.json"
        file.write_text(json.dumps({"0_0_0": list(window)}))
        windows = StaSettings.model_validate({"mask_strategy_file_path": str(file), "skip_time_steps": 0})
        yield Case("sliding_tile_attn", tiles, f"window {'x'.join(map(str, window))}", windows)
    for share in (0.9, 0.75):
        yield Case("video_sparse_attn", cubes, f"sparsity {share}", VsaSettings(sparsity=share))
    modes: tuple[tuple[int, Literal["topk", "threshold"]], ...] = ((1, "topk"), (2, "topk"), (1, "threshold"))
    for part, mode in modes:
        topk = [max(2, n // part) for n in TOPK[s]]
        chunks = VmobaSettings(
            temporal_chunk_size=CHUNKS[s][0], temporal_topk=topk[0], spatial_chunk_size=CHUNKS[s][1], spatial_topk=topk[1],
            st_chunk_size=CHUNKS[s][2], st_topk=topk[2], moba_select_mode=mode, first_full_step=0,
        )  # fmt: skip
        for layer, name in enumerate(("temporal", "spatial", "st")):
            if mode == "threshold":
                if name == "st":
                    yield Case("vmoba_attn", cubes, "st, threshold 0.25", chunks, layer)
            elif part == 1 or topk[layer] < TOPK[s][layer]:
                yield Case("vmoba_attn", cubes, f"{name}, top {topk[layer]}", chunks, layer)


def parts(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Any], Callable[[], Any], float]:
    """(the whole run, its selection alone, the density)."""
    run: Callable[..., Any]
    select: Callable[[], Any]
    call, at = Call(head_dim=q.shape[-1]), Position(step=0, steps=1, layer=case.layer, grid=Grid(*case.grid))
    if case.backend == "sliding_tile_attn":
        order = Order.of(case.grid, sta.TILE)
        window = tuple(json.loads(Path(case.settings.mask_strategy_file_path).read_text())["0_0_0"])
        mask = sta.mask(order, sta.clipped(window, order.tiles))
        run, select, density = sta.bind(call, case.settings), lambda: None, mask.density
    elif case.backend == "video_sparse_attn":
        order = Order.of(case.grid, vsa.TILE)
        blocks = order.to_blocks(q), order.to_blocks(k)
        share = case.settings.sparsity
        chosen = lambda: order.mask(vsa.kept(vsa.scores_of(*blocks, order, call.softmax_scale), order, share))
        run, select, density = vsa.bind(call, case.settings), chosen, chosen().density
    else:
        here = choice.kind(case.settings, at)
        order = choice.order(case.settings, here, q.shape[2], q.device, at)
        chunks, keys, topk = choice.chunks(order), order.to_blocks(k)[0], getattr(case.settings, f"{here}_topk")
        rows = lambda: choice.rows(q[0], keys, chunks, case.settings, topk)
        kept = sum(x.numel() * (z - a) for x, (a, z) in zip(rows()[0], chunks.spans))
        run, select, density = vmoba.bind(call, case.settings), rows, kept / q.shape[2] ** 2

    def whole() -> Any:
        with position(**at._asdict()):
            return run(q, k, v, None, None)

    return whole, select, density


def cells(dtype: torch.dtype, s: int, d: int, rounds: int, timed: Timed) -> list[dict[str, Any]]:
    """One head; each backend against dense SDPA of the same tokens, in turns."""
    out = []
    with tempfile.TemporaryDirectory() as folder:
        every = list(cases(s, Path(folder)))
        for grid in dict.fromkeys(c.grid for c in every):
            qkv = [torch.randn(1, 1, math.prod(grid), d, dtype=dtype) for _ in range(3)]
            turns: dict[str, Callable[[], Any]] = {
                "dense": partial(F.scaled_dot_product_attention, qkv[0], qkv[1], qkv[2])
            }
            density = {}
            mine = {f"{c.backend}: {c.what}": c for c in every if c.grid == grid}
            for name, case in mine.items():
                turns[name], turns[f"select {name}"], density[name] = parts(case, *qkv)
                turns[name]()  # what is made once for a grid
            got = timed(turns, rounds)
            for name, case in mine.items():
                row: dict[str, Any] = {"backend": case.backend, "case": case.what, "dtype": str(dtype)[6:]}
                row |= {"grid": "x".join(map(str, grid)), "S": math.prod(grid), "D": d, "density": density[name]}
                row |= {"dense_ms": got["dense"] * 1e3, "ms": got[name] * 1e3, "speedup": got["dense"] / got[name]}
                row |= {"ideal": 1 / density[name], "share": got["dense"] / got[name] * density[name]}
                row["select_share"] = got[f"select {name}"] / got["dense"]
                out.append({n: round(x, 4) if isinstance(x, float) else x for n, x in row.items()})
    return out
