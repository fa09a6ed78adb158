"""The bind functions of STA's packages, each of which is imported when its kernel is bound."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hal.context import Grid, where
from hal.errors import CallError
from hal.facts import Call
from hal.fittings import Run
from hal.sparse import Order
from hal.sparse import selected as glue

from .portable import NAME, TILE, clipped, opened, skipped, windows_at
from .settings import Settings

# The grids that the packages were built for, and the most text tokens with each.
SHAPES = {(30, 48, 80): 256, (36, 48, 48): 0, (18, 48, 80): 0}


def st_attn(call: Call, settings: Settings) -> Run:
    return _bound(import_module("st_attn").sliding_tile_attention, settings)


def fastvideo(call: Call, settings: Settings) -> Run:
    return _bound(import_module("fastvideo_kernel").sliding_tile_attention, settings)


def _bound(function: Callable[..., Any], settings: Settings) -> Run:
    strategy = opened(settings)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Any) -> Tensor:
        at = where()
        order = glue.order_here(NAME, q.shape[2], TILE, q.device, at)
        if why := refusal(order.grid, order.prefix + order.suffix):  # the decision may be older than the grid
            raise CallError(f"{NAME}: {why}")
        windows = [order.tiles] * q.shape[1]
        if not skipped(settings, at):
            windows = [clipped(w, order.tiles) for w in windows_at(strategy, settings, at, q.shape[1])]
        video = Order.of(order.grid, TILE, device=q.device)
        text = order.prefix + order.suffix
        out = function(
            **{name: _ordered(x, order, video) for name, x in (("q", q), ("k", k), ("v", v))},
            window_size=windows,
            text_length=text,
            has_text=text > 0,
            seq_shape="x".join(map(str, order.grid)),
        )
        return _restored(out, order, video)

    return run


def _ordered(x: Tensor, order: Order, video: Order) -> Tensor:
    """Tiles, then text, without empty slots: the grids of the packages have none, and they pad text themselves."""
    a, b = order.prefix, order.prefix + video.tokens
    return torch.cat([video.to_blocks(x[:, :, a:b]), x[:, :, :a], x[:, :, b:]], 2)


def _restored(x: Tensor, order: Order, video: Order) -> Tensor:
    n, a = video.tokens, order.prefix
    return torch.cat([x[:, :, n : n + a], video.from_blocks(x[:, :, :n]), x[:, :, n + a :]], 2)


def refusal(grid: tuple[int, int, int], text: int) -> str | None:
    """Why the packages cannot have this grid, or None."""
    if grid in SHAPES and text <= SHAPES[grid]:
        return None
    known = ", ".join("x".join(map(str, g)) + (f" with up to {n} text tokens" if n else "") for g, n in SHAPES.items())
    return (
        f"the packages of STA are built for {known}, and the grid is {'x'.join(map(str, grid))}"
        f"{f' with {text} text tokens' if text else ''}; sta.portable takes any grid"
    )


def confirm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """Whether the packages have the running grid.  A grid that is unknown or of another length is told of when it runs."""
    grid: Grid | None = where().grid
    tokens = q.shape[1 if call.layout == "bshd" else 2]
    if grid is None or tokens not in (grid.tokens, grid.tokens + grid.text):
        return None
    return refusal((grid.frames, grid.height, grid.width), tokens - grid.tokens)
