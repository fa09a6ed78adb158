"""STA in PyTorch: the windows, as block masks, and their run on any device.  Any grid: tiles at its ends are clipped.
By hal's Triton kernel it is the same with another executor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hal.context import Position, where
from hal.errors import CallError, PolicyError
from hal.facts import Call
from hal.fittings import Run
from hal.log import logger
from hal.sparse import BlockMask, Order
from hal.sparse import selected as glue

from . import strategy as files
from . import tables
from .searching import NAME, record
from .settings import Settings
from .strategy import Strategy, Window

TILE = (6, 8, 8)


def bind(call: Call, settings: Settings, kernel: str | None = None) -> Run:
    if settings.searches:
        return _searching(call, settings, kernel)
    settings.opened()  # what is wrong is said before anything runs

    def dense(at: Position) -> bool:
        return skipped(settings, at)

    def select(q: Tensor, k: Tensor, v: Tensor, order: Order, at: Position) -> glue.Selected:
        return glue.Selected(masks(order, windows_at(settings.opened(), settings, at, q.shape[1])))

    attend = glue.run(NAME, TILE, select, scale=call.softmax_scale, lse=bool(call.lse), dense=dense, kernel=kernel)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Any) -> Any:
        windows_at(settings.opened(), settings, where(), q.shape[1])  # raises for another model's, in dense steps too
        out = attend(q, k, v, mask, varlen)
        save(settings)
        return out

    return run


def triton(call: Call, settings: Settings) -> Run:
    return bind(call, settings, "triton")


def _searching(call: Call, settings: Settings, kernel: str | None) -> Run:
    scale, lse = call.softmax_scale, bool(call.lse)

    def run(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, varlen: Any) -> Any:
        at = where()
        order = glue.order_here(NAME, q.shape[2], TILE, q.device, at)
        bias = None if padding is None else glue.key_bias(padding)
        glue.watch(NAME, at, None, order)
        full, stats = glue.every_key(q, k, v, bias, scale, lse)
        blocks = order.to_blocks(q), order.to_blocks(k), order.to_blocks(v)
        moved = None if bias is None else order.to_blocks(bias, -1)

        def windowed(window: Window) -> Tensor:
            return order.from_blocks(glue.executed(*blocks, mask(order, window), moved, scale, False, kernel)[0])

        record(settings, at, order, full, windowed, padding)
        return (full, stats) if lse else full

    return run


def save(settings: Settings) -> None:
    """In the tuning modes, when a call has run: make the strategy file the tuned strategy, where it is another.
    Raises PolicyError.
    """
    if not settings.tunes or glue.ends_here():
        return
    path, made = settings.mask_strategy_file_path, settings.tuned()
    if _saved.get(path) == (_stamp(path), made):
        return
    if _old(path) != made.strategy:
        files.write(path, made.strategy)
        text = "%s: %s, from %d search tables, has a sparsity of %.3f"
        logger.info(text, NAME, path, made.tables, 1 - made.kept)
    _saved[path] = _stamp(path), made


# By strategy file: its stamp when it was a tuned strategy last, and that one.  So calls compare no strategies.
_saved: dict[str, tuple[files.Stamp | None, tables.Tuned]] = {}


def _stamp(path: str) -> files.Stamp | None:
    try:
        return files.stamp(path)
    except OSError:
        return None


def _old(path: str) -> Strategy | None:
    try:
        return files.read(path)
    except PolicyError:
        return None


def skipped(settings: Settings, at: Position) -> bool:
    """Whether a call there attends to everything, by ``skip_time_steps``."""
    first = settings.skip_time_steps
    if at.steps is not None and first >= at.steps:
        _told_of(first, at.steps)
    return first > 0 and glue.step_here(NAME, at, "skip_time_steps") < first


@lru_cache
def _told_of(first: int, steps: int) -> None:
    logger.warning(
        "%s: skip_time_steps=%d takes all of the %d steps, so every one is dense; lower it", NAME, first, steps
    )


def windows_at(strategy: Strategy, settings: Settings, at: Position, heads: int) -> tuple[Window, ...]:
    """The window of each head there.  Raises CallError where the strategy is of other steps, layers or heads, and where it
    is tuned by tables of another grid.
    """
    if settings.tunes and at.grid is not None:
        here, made = (at.grid.frames, at.grid.height, at.grid.width), settings.tuned().grid
        if here != made:
            mine, theirs = ("x".join(map(str, x)) for x in (here, made))
            raise CallError(
                f"{NAME}: the search tables in {settings.search_folder} are of a grid of {theirs} tokens, and this call has "
                f"{mine}; tune on the grid that was searched, or search on this one with another mask_search_path"
            )
    step, layer = (f(NAME, at, "mask_strategy_file_path") for f in (glue.step_here, glue.layer_here))
    path = settings.mask_strategy_file_path
    for what, index, n in (("step", step, strategy.steps), ("layer", layer, strategy.layers)):
        if index >= n:
            raise CallError(
                f"{NAME}: {path} has {n} {what}s, 0 to {n - 1}, and this call is of {what} {index}; "
                "use the strategy that was tuned for this model and number of steps"
            )
    if at.layers is not None and at.layers < strategy.layers:  # it may have fewer, where the last ones attend by others
        raise CallError(
            f"{NAME}: {path} is for {strategy.layers} layers, and this model has {at.layers}; use the strategy of this model"
        )
    if at.steps is not None and at.steps != strategy.steps:
        raise CallError(
            f"{NAME}: {path} is for {strategy.steps} steps, and this loop has {at.steps}; use the strategy that was tuned for "
            "this number of steps"
        )
    if heads != strategy.heads:
        raise CallError(
            f"{NAME}: {path} has windows for {strategy.heads} heads, and q has {heads}; use the strategy of this model"
        )
    return strategy.windows[step][layer]


def clipped(window: Window, tiles: tuple[int, int, int]) -> Window:
    """The same window with no side longer than its axis."""
    t, h, w = (min(a, n) for a, n in zip(window, tiles))
    return t, h, w


# ---- masks


def masks(order: Order, windows: tuple[Window, ...]) -> tuple[tuple[tuple[int, ...], BlockMask], ...]:
    """(heads, their mask) of each distinct window."""
    heads: dict[Window, list[int]] = {}
    for h, window in enumerate(windows):  # sides that cover an axis are one, so their heads share a mask
        heads.setdefault(clipped(window, order.tiles), []).append(h)
    return tuple((tuple(mine), mask(order, window)) for window, mine in heads.items())


def mask(order: Order, window: Window) -> BlockMask:
    """The block mask of one window over an order's tiles and its text, for any head.  Cached with what executors plan."""
    return _mask(order, window)


@lru_cache(maxsize=256)  # an order is cached itself, by grid, text, tile and device, so it may be a key
def _mask(order: Order, window: Window) -> BlockMask:
    with torch.inference_mode(False):  # cached, so it may meet autograd later
        t, h, w = (axis(n, a) for n, a in zip(order.tiles, window))
        among = t[:, None, None, :, None, None] & h[:, None, None, :, None] & w[:, None, None, :]
        n = t.shape[0] * h.shape[0] * w.shape[0]
        keep = torch.ones(order.blocks, order.blocks, dtype=torch.bool)
        keep[order.video, order.video] = among.reshape(n, n)
        return order.mask(keep.to(order.valid.device)[None, None])


def axis(n: int, window: int) -> Tensor:
    """bool [n, n]: which of an axis' n tiles each tile attends to.

    The window's middle stays half a window away from both ends, so an odd one has as many tiles at the ends as inside;
    an even one is as the next odd one.  One that is as long as the axis is all of it.
    """
    at, half = torch.arange(n), window // 2
    if n <= window:
        return torch.ones(n, n, dtype=torch.bool)
    middle = at.clamp(half, n - 1 - half)
    return (middle[:, None] - at).abs() <= half
