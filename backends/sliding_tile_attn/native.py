"""The bind functions of STA's packages, each of which is imported when its kernel is bound."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hal.context import where
from hal.errors import CallError
from hal.facts import Call
from hal.fittings import Run
from hal.sparse import Order
from hal.sparse import selected as glue

from .portable import NAME, TILE, clipped, masks, save, skipped, windows_at
from .searching import record
from .settings import Settings
from .strategy import Window

# The grids that the packages were built for, and how many text tokens they take with each.
SHAPES = {(30, 48, 80): range(1, 257), (36, 48, 48): range(1), (18, 48, 80): range(1)}
NAMES = ("q", "k", "v", "seq_shape")
ST_ATTN = ("q_all", "k_all", "v_all", "dit_seq_shape")  # the same in st_attn


def st_attn(call: Call, settings: Settings) -> Run:
    return _bound(import_module("st_attn").sliding_tile_attention, ST_ATTN, settings)


def fastvideo(call: Call, settings: Settings) -> Run:
    return _bound(import_module("fastvideo_kernel").sliding_tile_attention, NAMES, settings)


def _bound(function: Callable[..., Tensor], names: tuple[str, ...], settings: Settings) -> Run:
    if not settings.searches:
        settings.opened()  # what is wrong is said before anything runs

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Any) -> Tensor:
        at = where()
        order = glue.order_here(NAME, q.shape[2], TILE, q.device, at)
        if why := refusal(order.grid, order.prefix + order.suffix):  # the decision may be older than the grid
            raise CallError(f"{NAME}: {why}")
        video = Order.of(order.grid, TILE, device=q.device)
        ordered = [_ordered(x, order, video) for x in (q, k, v)]

        def attend(windows: tuple[Window, ...]) -> Tensor:
            return _restored(_called(function, names, ordered, windows, order), order, video)

        full = (order.tiles,) * q.shape[1]
        windows = full if settings.searches else windows_at(settings.opened(), settings, at, q.shape[1])
        if settings.searches or skipped(settings, at):
            glue.watch(NAME, at, None, order)
            out = attend(full)
        else:
            glue.watch(NAME, at, lambda: masks(order, windows), order)
            out = attend(tuple(clipped(w, order.tiles) for w in windows))
        if settings.searches:
            record(settings, at, order, out, lambda window: attend((window,) * q.shape[1]))
        save(settings)
        return out

    return run


def _called(
    function: Callable[..., Tensor], names: tuple[str, ...], ordered: list[Tensor], windows: Any, order: Order
) -> Tensor:
    """One video of the batch at a time: some versions read a head of several as if it lay in one piece."""
    text = order.prefix + order.suffix
    shape = "x".join(map(str, order.grid))
    outs = [
        function(**dict(zip(names, (*qkv, shape))), window_size=list(windows), text_length=text, has_text=text > 0)
        for qkv in zip(*(x.split(1) for x in ordered))
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _ordered(x: Tensor, order: Order, video: Order) -> Tensor:
    """Tiles, then text, without empty slots: the grids of the packages have none, and they pad text themselves."""
    a, b = order.prefix, order.prefix + video.tokens
    return torch.cat([video.to_blocks(x[:, :, a:b]), x[:, :, :a], x[:, :, b:]], 2)


def _restored(x: Tensor, order: Order, video: Order) -> Tensor:
    n, a = video.tokens, order.prefix
    return torch.cat([x[:, :, n : n + a], video.from_blocks(x[:, :, :n]), x[:, :, n + a :]], 2)


def refusal(grid: tuple[int, int, int], text: int) -> str | None:
    """Why the packages cannot have this grid, or None."""
    if grid in SHAPES and text in SHAPES[grid]:
        return None
    known = ", ".join(
        "x".join(map(str, g)) + (f" with {n.start} to {n.stop - 1} text tokens" if n.stop > 1 else "")
        for g, n in SHAPES.items()
    )
    return (
        f"the packages of STA are built for {known}, and the grid is {'x'.join(map(str, grid))}"
        f" with {text} text tokens; sta.portable takes any grid"
    )


def confirm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """Whether the packages have the running grid.  A grid that is unknown or of another length is told of when it runs."""
    grid, text = where().grid, glue.text_here(q, call.layout)
    return None if grid is None or text is None else refusal((grid.frames, grid.height, grid.width), text)
