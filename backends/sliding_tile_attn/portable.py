"""STA in PyTorch: the windows, as block masks, and their run on any device.  Any grid: tiles at its ends are clipped."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hal.context import Position
from hal.errors import CallError, PolicyError
from hal.facts import Call
from hal.fittings import Run
from hal.sparse import BlockMask, Order
from hal.sparse import selected as glue

from .settings import Settings
from .strategy import Strategy, Window, read

NAME = "sliding_tile_attn"
TILE = (6, 8, 8)


def bind(call: Call, settings: Settings) -> Run:
    strategy = opened(settings)

    def dense(at: Position) -> bool:
        return skipped(settings, at)

    def select(q: Tensor, k: Tensor, v: Tensor, order: Order, at: Position) -> glue.Selected:
        windows = windows_at(strategy, settings, at, q.shape[1])
        heads: dict[Window, list[int]] = {}
        for h, window in enumerate(windows):  # sides that cover an axis are one, so their heads share a mask
            heads.setdefault(clipped(window, order.tiles), []).append(h)
        return glue.Selected(tuple((tuple(mine), mask(order, window)) for window, mine in heads.items()))

    return glue.run(NAME, TILE, select, scale=call.softmax_scale, lse=bool(call.lse), dense=dense)


def opened(settings: Settings) -> Strategy:
    """The strategy of the settings.  Raises PolicyError for a mode that makes one instead."""
    if settings.sta_mode != "STA_inference":
        raise PolicyError(
            f"{NAME}: sta_mode={settings.sta_mode} is not built; hal has STA_inference, with a strategy file that "
            "FastVideo's search wrote"
        )
    return read(settings.mask_strategy_file_path)


def skipped(settings: Settings, at: Position) -> bool:
    """Whether a call there attends to everything, by ``skip_time_steps``."""
    first = settings.skip_time_steps
    return first > 0 and glue.step_here(NAME, at, "skip_time_steps") < first


def windows_at(strategy: Strategy, settings: Settings, at: Position, heads: int) -> tuple[Window, ...]:
    """The window of each head there.  Raises CallError for a step, layer or number of heads that the strategy has not."""
    step, layer = (f(NAME, at, "mask_strategy_file_path") for f in (glue.step_here, glue.layer_here))
    path = settings.mask_strategy_file_path
    for what, index, n in (("step", step, strategy.steps), ("layer", layer, strategy.layers)):
        if index >= n:
            raise CallError(
                f"{NAME}: {path} has {n} {what}s, 0 to {n - 1}, and this call is of {what} {index}; "
                "use the strategy that was tuned for this model and number of steps"
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
