"""Pictures of block masks: which blocks each head keeps, and what one tile of the video attends to in time and space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CallError
from .order import Order
from .selected import Watched

KEPT, LEFT, QUERY, TEXT = "#2b6cb0", "#e8edf3", "#e53e3e", "#d69e2e"
LINES = 40  # more tiles than that along an axis are not ruled
FRAMES = 6  # tile frames drawn at most, those around the query's


@dataclass(frozen=True)
class Pattern:
    """What some heads attend to in one call: those of equal masks together."""

    heads: tuple[int, ...]
    keep: Tensor  # bool [nq, nk]
    density: float  # the share of (query, key) pairs that is kept


def patterns(seen: Sequence[Watched], heads: int | None = None) -> list[Pattern]:
    """The patterns of one call, by the number of their first head; of a batch, its last row.

    ``heads``: how many the call has, where its masks do not tell.
    """
    found: dict[bytes, tuple[list[int], Tensor, float]] = {}
    for x in seen:
        keep, q, k = _parts(x)
        n = keep.shape[0]
        mine = x.heads or tuple(range(max(n, heads or 1)))
        for i, h in enumerate(mine):
            one = keep[i if n > 1 else 0]
            key = one.numpy().tobytes()
            if key not in found:
                share = q[:, None].double() * k
                found[key] = [], one, float((share * one).sum() / share.sum().clamp(min=1))
            found[key][0].append(h)
    made = [Pattern(tuple(sorted(h)), keep, density) for h, keep, density in found.values()]
    return sorted(made, key=lambda p: p.heads)


def _parts(x: Watched) -> tuple[Tensor, Tensor, Tensor]:
    """(keep [H or 1, nq, nk], tokens of each block of queries, of keys), on the host."""
    if x.mask is not None:
        return x.mask.keep[-1].cpu(), x.mask.q_sizes.cpu(), x.mask.kv_sizes.cpu()
    if x.order is None:
        raise CallError(f"{x.backend} attends to everything there, and told no blocks")
    n = x.order.blocks
    return torch.ones(1, n, n, dtype=torch.bool), x.order.valid.cpu(), x.order.valid.cpu()


def tile_at(order: Order, query: tuple[int, int, int] | None) -> int:
    """The block of the tile with the token ``query`` (frame, row, column); None: the one in the middle.

    Raises CallError for a token that the grid does not have.
    """
    at = tuple(n // 2 for n in order.grid) if query is None else query
    if any(not 0 <= a < n for a, n in zip(at, order.grid)):
        last = "x".join(str(n - 1) for n in order.grid)
        raise CallError(f"the token {'x'.join(map(str, at))} is not on the grid; allowed: 0x0x0 to {last}")
    t, h, w = (a // s for a, s in zip(at, order.tile))
    _, rows, columns = order.tiles
    return order.video.start + (t * rows + h) * columns + w


class Red(NamedTuple):
    """What is outlined: a tile of the video, the row of the map for it or for one token in it."""

    tile: int
    row: int
    token: bool


def _red(order: Order, shape: Sequence[int], query: tuple[int, int, int] | None) -> Red | None:
    """None: the rows of the map are neither tiles nor tokens of the video, or there is one tile only."""
    nq, nk = shape
    if nk != order.blocks or nq not in (order.blocks, order.token.numel()) or prod(order.tiles) == 1:
        return None
    tile = tile_at(order, query)
    if nq == order.blocks:
        return Red(tile, tile, False)
    (_, height, width), (t, h, w) = order.grid, query or tuple(n // 2 for n in order.grid)
    return Red(tile, int(order.slot[order.prefix + (t * height + h) * width + w]), True)


def draw(
    found: Sequence[Pattern], order: Order | None, path: Path, title: str, query: tuple[int, int, int] | None, most: int
) -> None:
    """Write a PNG: a row for each pattern, at most ``most``.  Needs matplotlib."""
    from matplotlib.figure import Figure

    shown = found[:most]
    red = None if order is None else _red(order, shown[0].keep.shape, query)
    frames = [] if red is None or order is None else _frames(order, red.tile)
    if query is not None and red is None:
        raise CallError("a query names a tile to outline, and the blocks there are no tiles of a video; leave it out")
    figure = Figure(figsize=(max(7.0, 4.2 + 2.6 * len(frames)), 1.9 + 3.6 * len(shown)), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", linespacing=1.4)
    grid = figure.add_gridspec(len(shown), 1 + len(frames), width_ratios=[1.5, *[1] * len(frames)])
    for row, p in enumerate(shown):
        _blocks(figure.add_subplot(grid[row, 0]), p, order, red)
        for column, t in enumerate(frames, 1):
            assert order is not None and red is not None
            _frame(figure.add_subplot(grid[row, column]), p, order, red, t, column == 1)
    more = len(found) - len(shown)
    notes = [f"{more} more pattern{'s' * (more > 1)} not drawn; --heads draws more"] if more > 0 else []
    if frames and order is not None and len(frames) < order.tiles[0]:
        notes.append(f"{len(frames)} of {order.tiles[0]} tile frames drawn")
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=9, x=0.01, ha="left")
    _legend(figure, red, order)
    figure.savefig(path, format="png")


def _legend(figure: Any, red: Red | None, order: Order | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = [Patch(color=KEPT, label="attended to"), Patch(color=LEFT, label="left out")]
    if red is not None:
        what = (
            "the tile of a query, and the query's row of the map"
            if red.token
            else "a tile of queries, and its row of the map"
        )
        entries.append(Patch(color=QUERY, label=what))
    if order is not None and (order.prefix or order.suffix):
        entries.append(Line2D([], [], color=TEXT, label="beyond it: text"))
    figure.legend(handles=entries, loc="outside lower left", ncols=len(entries), fontsize=9, frameon=False)


def _name(heads: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for h in heads:
        if runs and h == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], h]
        else:
            runs.append([h, h])
    said = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"head{'s' * (len(heads) > 1)} {said if len(said) < 24 else said[:20] + ' …'}"


def _colours() -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([LEFT, KEPT])


def _blocks(axes: Any, p: Pattern, order: Order | None, red: Red | None) -> None:
    """The block map."""
    nq, nk = p.keep.shape
    axes.imshow(p.keep.numpy(), cmap=_colours(), vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    axes.set_title(f"{_name(p.heads)}: {p.density:.1%} kept", fontsize=10, fontweight="bold")
    axes.set_xlabel(f"blocks of keys ({nk})", fontsize=9)
    axes.set_ylabel(f"{'queries' if red is not None and red.token else 'blocks of queries'} ({nq})", fontsize=9)
    axes.tick_params(labelsize=8)
    _whole(axes)
    if order is not None and order.blocks == nq == nk:
        for edge, there in ((order.video.start, order.prefix), (order.video.stop, order.suffix)):
            if there:
                for line in (axes.axhline, axes.axvline):
                    line(edge - 0.5, color=TEXT, linewidth=1.5)
    if red is not None:
        axes.add_patch(_box(-0.5, red.row - 0.5, nk, 1, fill=False))


def _whole(axes: Any) -> None:
    """Numbers of tokens and blocks are whole."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)


def _box(x: float, y: float, width: float, height: float, fill: bool) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, fill=fill, color=QUERY, linewidth=1.6, clip_on=False, zorder=3)


def _frames(order: Order, query: int) -> list[int]:
    """The tile frames that are drawn: all, or those around the query's."""
    n, rows, columns = order.tiles
    at = (query - order.video.start) // (rows * columns)
    first = min(max(at - FRAMES // 2, 0), max(n - FRAMES, 0))
    return list(range(first, min(first + FRAMES, n)))


def _frame(axes: Any, p: Pattern, order: Order, red: Red, t: int, leftmost: bool) -> None:
    """The tiles of one tile frame as rows and columns of tokens."""
    (frames, height, width), (a, b, c), (n, rows, columns) = order.grid, order.tile, order.tiles
    attended = p.keep[red.row, order.video].view(n, rows, columns)[t]
    at = attended.repeat_interleave(b, 0)[:height].repeat_interleave(c, 1)[:, :width]
    axes.imshow(at.numpy(), cmap=_colours(), vmin=0, vmax=1, interpolation="nearest")
    for line, last, side in ((axes.axhline, height, b), (axes.axvline, width, c)):
        for edge in range(side, last, side) if last / side <= LINES else ():
            line(edge - 0.5, color="white", linewidth=0.8)
    last = min((t + 1) * a, frames) - 1
    name = f"frame {last}" if last == t * a else f"frames {t * a}-{last}"
    start = "from a query in the red tile" if red.token else "from the red tile"
    axes.set_title(f"{start} to {name}" if leftmost else name, fontsize=9)
    axes.set_xlabel("columns of tokens", fontsize=8)
    axes.set_ylabel("rows of tokens" if leftmost else "", fontsize=8)
    axes.tick_params(labelsize=7)
    _whole(axes)
    mine, inside = divmod(red.tile - order.video.start, rows * columns)
    y, x = divmod(inside, columns)
    if mine == t:
        axes.add_patch(
            _box(x * c - 0.5, y * b - 0.5, min(c, width - x * c), min(b, height - y * b), fill=bool(attended[y, x]))
        )
