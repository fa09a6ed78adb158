"""STA_searching: calls that attend to everything, and write down what each candidate window would have changed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hal.context import Position
from hal.errors import CallError
from hal.sparse import Order
from hal.sparse import selected as glue

from . import tables
from .settings import Settings
from .strategy import Window

NAME = "sliding_tile_attn"


class Generation:
    """The table of one denoising loop, and which of its calls it has."""

    def __init__(self, folder: Path, head: tables.Head):
        self.head, self.path = head, tables.begin(folder, head)
        self.step, self.calls = 0, Counter[tuple[int, int]]()

    def has(self, head: tables.Head, step: int, layer: int) -> bool:
        """Whether such a call is of this loop, where its steps alone tell: none goes back, and none passes a layer more
        than twice in a step.
        """
        return head == self.head and step >= self.step and self.calls[step, layer] < 2


class _Running(threading.local):
    """The latest loops of this thread, by the folder of their tables and the number of the loop."""

    def __init__(self) -> None:
        self.loops: dict[tuple[Path, int | None], Generation] = {}

    def of(self, folder: Path, at: Position, head: tables.Head, step: int, layer: int) -> Generation:
        key = folder, at.loop
        now = self.loops.get(key)
        if now is not None and (now.head == head if at.loop is not None else now.has(head, step, layer)):
            if now.calls[step, layer] > 1:
                raise CallError(
                    f"{NAME}: layer {layer} attends a third time in step {step}, and a search table has two passes; search "
                    "without what adds passes to guidance"
                )
            return now
        for old in [*self.loops][:-7]:
            del self.loops[old]
        self.loops[key] = now = Generation(folder, head)
        return now


_running = _Running()


def record(
    settings: Settings,
    at: Position,
    order: Order,
    full: Tensor,
    windowed: Callable[[Window], Tensor],
    valid: Tensor | None = None,
) -> None:
    """Add a call to the table of its generation.  ``full`` [B, H, tokens, Dv] is the output of full attention,
    ``windowed`` that of one window for all heads; ``valid`` [B, 1, 1, tokens]: the tokens that count.

    A call that is run for a picture, which ends there, is not added.  Raises CallError where the step or layer is unknown,
    or the grid has no window but the full one, and PolicyError where the table cannot be written.
    """
    step, layer = (f(NAME, at, "sta_mode=STA_searching") for f in (glue.step_here, glue.layer_here))
    several = windows(settings, order)
    grid, tiles = order.grid, order.tiles
    head = tables.Head(grid, tiles, at.steps, full.shape[1], several)
    if glue.ends_here():
        return
    rows = None if valid is None else valid[:, 0, 0, :, None]
    with torch.no_grad():
        found = torch.stack([_distances(windowed(w), full, rows) for w in several]).cpu()  # waited for once
    l2, l1 = found.unbind(-1)
    now = _running.of(settings.search_folder.absolute(), at, head, step, layer)
    tables.add(now.path, (step, layer, now.calls[step, layer]), l2.tolist(), l1.tolist())
    now.step = step
    now.calls[step, layer] += 1


def windows(settings: Settings, order: Order) -> tuple[Window, ...]:
    """The candidates for an order's grid.  Raises CallError."""
    tiles = order.tiles
    several = settings.mask_candidates or tables.candidates(tiles)
    for w in several:
        if all(a >= n for a, n in zip(w, tiles)):
            raise CallError(f"{NAME}: the candidate {list(w)} is all of the {tiles} tiles, so every head would have it")
    if not several:
        raise CallError(
            f"{NAME}: the grid {order.grid} has {tiles} tiles of 6 x 8 x 8, so there is no window to search"
        )
    return several


def _distances(out: Tensor, full: Tensor, rows: Tensor | None) -> Tensor:
    """float32 [heads, 2]: mean squared and mean absolute difference; a head at a time, as tokens are many."""
    pairs = []
    for h in range(full.shape[1]):
        d = out[:, h].float() - full[:, h].float()
        d = d if rows is None else d * rows
        pairs.append(torch.stack([d.square().mean(), d.abs().mean()]))
    return torch.stack(pairs)
