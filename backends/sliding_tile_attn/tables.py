"""Search tables, and tuning: from what each window would have changed to the strategy that changes least.

A table is a file of one generation, in JSON lines, written call by call, so that what ended early is not lost.  Its first
line is its head; each other one has a call's step, layer and pass (0, or 1 for the second pass of guidance) with, by
candidate and head, the mean squared (L2_loss) and mean absolute (L1_loss) difference from full attention.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import count, product
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

from hal.errors import PolicyError

from .strategy import Stamp, Strategy, Window, stamp

Losses = list[list[float]]  # [candidates][heads]
SUFFIX = ".jsonl"

# FastVideo's candidates for 18 x 48 x 80 tokens (fastvideo/pipelines/stages/denoising.py), where the full window is FULL.
UPSTREAM = ((3, 1, 10), (1, 5, 7), (3, 3, 3), (1, 6, 5), (1, 3, 10), (3, 6, 1))
FULL = (3, 6, 10)


def candidates(tiles: Window) -> tuple[Window, ...]:
    """Windows to try on a grid of so many tiles: FastVideo's, each side scaled to an odd number or the whole axis.

    One that is part of another cannot be nearer to full attention, and is left out; so is the full window.
    """
    scaled = dict.fromkeys(
        (_scaled(t, FULL[0], tiles[0]), _scaled(h, FULL[1], tiles[1]), _scaled(w, FULL[2], tiles[2]))
        for t, h, w in UPSTREAM
    )
    several = [w for w in scaled if w != tiles]
    return tuple(w for w in several if not any(w != x and all(a <= b for a, b in zip(w, x)) for x in several))


def _scaled(side: int, full: int, tiles: int) -> int:
    """``side`` of ``full`` tiles as of ``tiles``: the nearest odd number, the lower of two; the axis if it is as long."""
    odd = 1 - 2 * ((2 * full - side * tiles) // (2 * full))
    return min(odd, tiles) if side < full else tiles


def volume(window: Window, tiles: Window) -> int:
    """Tiles that one attends to: an even side that is shorter than its axis is as the next odd one."""
    return prod(n if w >= n else w + (w % 2 == 0) for w, n in zip(window, tiles))


# ---- the files of tables


class Head(NamedTuple):
    """What a table was made of, the same for all its calls."""

    grid: tuple[int, int, int]
    tiles: Window
    steps: int | None  # of the loop; None: it was not told
    heads: int
    candidates: tuple[Window, ...]


class Table(NamedTuple):
    path: Path
    head: Head
    losses: dict[tuple[int, int, int], Losses]  # (step, layer, pass) -> L2

    @property
    def steps(self) -> int:
        return self.head.steps or max(step for step, _, _ in self.losses) + 1

    @property
    def layers(self) -> int:
        return max(layer for _, layer, _ in self.losses) + 1


def begin(folder: Path, head: Head) -> Path:
    """A new table in the folder, which is made; its name is the next free number.  Raises PolicyError."""
    path = folder
    try:
        folder.mkdir(exist_ok=True)
        for n in count(1):
            path = folder / f"{n:04d}{SUFFIX}"
            try:
                with path.open("x", encoding="utf-8") as f:
                    f.write(json.dumps(head._asdict()) + "\n")
                break
            except FileExistsError:
                continue
    except OSError as e:
        raise PolicyError(f"cannot write the search table {path}: {e}") from e
    return path


def add(path: Path, at: tuple[int, int, int], l2: Losses, l1: Losses) -> None:
    """Write a call down.  Raises PolicyError."""
    line = {**dict(zip(("step", "layer", "pass"), at)), "L2_loss": l2, "L1_loss": l1}
    try:
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
    except OSError as e:
        raise PolicyError(f"cannot write the search table {path}: {e}; delete it, and search again") from e


def check_folder(folder: Path, must_exist: bool) -> None:
    """Raises PolicyError where the folder of tables cannot be made, or with ``must_exist`` has none."""
    there = folder if folder.exists() else folder.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise PolicyError(f"search tables are kept in the folder {folder}, which cannot be made; set mask_search_path")
    if must_exist:
        files(folder)


def files(folder: Path) -> list[Path]:
    """The tables in the folder, in order.  Raises PolicyError where there are none."""
    if not (found := sorted(folder.glob(f"*{SUFFIX}"))):
        raise PolicyError(
            f"there are no search tables in the folder {folder}; make some by a generation with sta_mode=STA_searching for "
            "each of several prompts, or set mask_search_path"
        )
    return found


def read(path: Path) -> Table:
    """A table that is whole.  Raises PolicyError, which names the file and the line."""
    losses: dict[tuple[int, int, int], Losses] = {}
    head, n = None, 0
    try:
        for line in path.read_text("utf-8").splitlines():
            n += 1
            data = json.loads(line)
            if head is None:
                head = _head(data)
                continue
            at, l2 = _call(data, head)
            if at in losses:
                raise ValueError("it says again what another line says")
            losses[at] = l2
    except (OSError, ValueError, RecursionError) as e:  # no JSON, no UTF-8, or too deep
        raise PolicyError(f"search table {path}, line {n}: {e}; delete it, and search again") from None
    if head is None or not losses:
        raise PolicyError(f"search table {path} holds no calls; delete it, and search again")
    table = Table(path, head, losses)
    passes = {0, *(p for _, _, p in losses)}
    for step, layer, p in product(range(table.steps), range(table.layers), sorted(passes)):
        if (step, layer, p) not in losses:
            raise PolicyError(
                f"search table {path} has no step {step}, layer {layer}, pass {p} of {table.steps} steps, {table.layers} "
                "layers: its generation did not end; delete it, and search again"
            )
    return table


def _head(data: Any) -> Head:
    try:
        three = [tuple(data["grid"]), tuple(data["tiles"]), *map(tuple, data["candidates"])]
        head = Head(three[0], three[1], data["steps"], data["heads"], tuple(three[2:]))
        numbers = [*(n for t in three for n in t), head.heads, *([] if head.steps is None else [head.steps])]
    except (KeyError, TypeError) as e:
        raise ValueError(f"the head lacks {e}") from None
    if any(len(t) != 3 for t in three) or not head.candidates or any(type(n) is not int or n < 1 for n in numbers):
        raise ValueError("the head has no grid, tiles, heads and candidates, all numbers from 1")
    return head


def _call(data: Any, head: Head) -> tuple[tuple[int, int, int], Losses]:
    try:
        at, l2 = (data["step"], data["layer"], data["pass"]), data["L2_loss"]
        fits = len(l2) == len(head.candidates) and all(len(row) == head.heads for row in l2)
        fits = fits and all(type(x) is float and isfinite(x) and x >= 0 for row in l2 for x in row)
    except (KeyError, TypeError) as e:
        raise ValueError(f"it lacks {e}") from None
    if not fits or any(type(n) is not int or n < 0 for n in at) or at[2] > 1:
        raise ValueError(f"it has no L2_loss of {len(head.candidates)} candidates x {head.heads} heads")
    return at, l2


# ---- tuning


class Tuned(NamedTuple):
    strategy: Strategy
    tables: int  # that it was made of
    grid: tuple[int, int, int]  # of theirs
    kept: float  # share of tiles


def tuned_by(folder: Path, skip: int, both_passes: bool) -> Tuned:
    """``tuned`` by all tables of a folder; made once for as long as they stay as they are.  Raises PolicyError."""
    try:
        stamps = tuple((path, stamp(path)) for path in files(folder))
    except OSError as e:
        raise PolicyError(f"search table {e.filename} cannot be read: {e.strerror}") from None
    return _tuned(stamps, skip, both_passes)


@lru_cache(maxsize=4)
def _tuned(stamps: tuple[tuple[Path, Stamp], ...], skip: int, both_passes: bool) -> Tuned:
    found = [read(path) for path, _ in stamps]
    made = tuned(found, skip, both_passes)
    return Tuned(made, len(found), found[0].head.grid, kept(made, found[0].head.tiles))


def tuned(tables: Sequence[Table], skip: int, both_passes: bool) -> Strategy:
    """The full window before step ``skip``; then the candidate of the least mean L2, over the tables and, with
    ``both_passes``, over both passes of guidance.  Of equal ones, the smallest, then the first.

    Raises PolicyError for tables of different generations, and for one pass where there should be two.
    """
    first = tables[0]
    for t in tables[1:]:
        for what, a, b in (("head", first.head, t.head), ("number of layers", first.layers, t.layers)):
            if a != b:
                raise PolicyError(
                    f"search tables {first.path} and {t.path} differ in their {what}: {_differing(a, b)}; "
                    "keep those of one model, grid and number of steps"
                )
    for t in tables:
        if both_passes and not any(p for _, _, p in t.losses):
            raise PolicyError(
                f"STA_tuning_cfg averages over both passes of guidance, and {t.path} has one: there was no guidance, or the "
                "pipeline put both into one batch, over which a table averages anyway; use sta_mode=STA_tuning"
            )
    head = first.head
    volumes = [volume(w, head.tiles) for w in head.candidates]

    def best(step: int, layer: int, h: int) -> Window:
        calls = [t.losses[step, layer, p] for t in tables for p in range(1 + both_passes)]
        mean = [sum(call[c][h] for call in calls) for c in range(len(volumes))]
        return head.candidates[min(range(len(volumes)), key=lambda c: (mean[c], volumes[c]))]

    full = (head.tiles,) * head.heads
    layers = range(first.layers)
    return Strategy(
        tuple(
            tuple(full if step < skip else tuple(best(step, layer, h) for h in range(head.heads)) for layer in layers)
            for step in range(first.steps)
        )
    )


def _differing(a: Any, b: Any) -> str:
    if not isinstance(a, Head):
        return f"{a} and {b}"
    return ", ".join(f"{name} {x} and {y}" for name, x, y in zip(a._fields, a, b) if x != y)


def kept(strategy: Strategy, tiles: Window) -> float:
    """The share of tiles that are attended to, over all steps, layers and heads."""
    windows: Iterable[Window] = [w for layers in strategy.windows for heads in layers for w in heads]
    volumes = [volume(w, tiles) for w in windows]
    return sum(volumes) / (len(volumes) * prod(tiles))
