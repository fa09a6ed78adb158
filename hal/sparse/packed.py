"""One packed sequence of text, pictures, sound and videos: where each lies, and its order in tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..context import Position
from ..errors import CallError
from ..fittings import Varlen
from .given import take
from .order import Grid, Order


@dataclass(frozen=True)
class PackedRows:
    """How the rows of one packed sequence lie: ``[prefix | video | refs | pad]``.

    ``video``: the grid (frames, rows, columns) of the video that is made.  ``prefix`` and ``refs``: the segments before
    and after it, each a number of rows (text, pictures, sound), or the grid of a reference video; 0 rows are no segment.
    ``pad``: rows at the end that nothing attends to.  Raises CallError for what is no number of rows and no grid.

    It says where tokens lie, so nothing is lost where attention does not ask for it (``hal.sparse.given``).
    """

    prefix: tuple[int | Grid, ...]
    video: Grid
    refs: tuple[int | Grid, ...] = ()
    pad: int = 0

    describes = True

    def __post_init__(self) -> None:
        for name, given in (("prefix", self.prefix), ("refs", self.refs)):
            if isinstance(given, (str, int)) or not all(_rows(s) or _grid(s) for s in given):
                raise CallError(
                    f"{name} is {given!r}; it must be segments: numbers of rows, or grids (frames, rows, columns) of "
                    "reference videos; write, say, (70, 0, 100)"
                )
            object.__setattr__(self, name, tuple(s if isinstance(s, int) else tuple(s) for s in given))
        if not _grid(self.video):
            raise CallError(f"video is {self.video!r}; it must be three positive numbers (frames, rows, columns)")
        object.__setattr__(self, "video", tuple(self.video))
        if not _rows(self.pad):
            raise CallError(f"pad is {self.pad!r}; it must be a number of rows, 0 or more")

    @property
    def segments(self) -> tuple[int | Grid, ...]:
        """All that has rows, in their order, without the pad rows."""
        return tuple(s for s in (*self.prefix, self.video, *self.refs) if s)

    @property
    def used(self) -> int:
        return sum(map(_size, self.segments))

    @property
    def tokens(self) -> int:
        return self.used + self.pad

    @property
    def first(self) -> int:
        """The first row of the video."""
        return sum(map(_size, self.prefix))

    @property
    def videos(self) -> int:
        """How many there are, reference videos too."""
        return sum(not isinstance(s, int) for s in self.segments)

    def order(self, tile: Grid, device: torch.device | str | None = None) -> PackedOrder:
        """The order of its used rows in tiles of a video and chunks of as many rows; none lies across segments.  Cached."""
        return _order(self, tile, torch.device(device or "cpu"))

    def __str__(self) -> str:
        pad = f" and {self.pad} pad rows" if self.pad else ""
        return f"{' + '.join('x'.join(map(str, s)) if isinstance(s, tuple) else str(s) for s in self.segments)}{pad}"


@dataclass(frozen=True, eq=False)
class PackedOrder(Order):
    """The order of packed rows.  ``grid`` is the video's; blocks lie as the segments do."""

    rows: PackedRows
    dense: Tensor  # bool [blocks]: rows of no video
    regions: tuple[tuple[int, int], ...]  # of each video: its first block, and the one after its last
    target: int  # which of the regions is the video that is made

    @property
    def video(self) -> slice:
        return slice(*self.regions[self.target])


def rows_here(backend: str, tokens: int, at: Position, varlen: Varlen | None) -> PackedRows:
    """How the call's rows lie: as given, else as the running grid says.  Raises CallError where they are others."""
    rows: PackedRows | None = take("rows")
    g = at.grid
    if rows is None and g is not None:
        text = (g.text,) if g.text and tokens != g.tokens else ()
        before, after = (text, ()) if g.text_first else ((), text)
        rows = PackedRows(before, (g.frames, g.height, g.width), after)
    if rows is None:
        raise CallError(
            f"{backend} needs to know how its {tokens} packed rows lie, and nothing says so; write with "
            "hal.sparse.given(rows=hal.sparse.PackedRows(prefix=(TEXT, PICTURES, SOUND), video=(frames, rows, columns), "
            "pad=PAD)) around the call, or hal.attach a MiniMaxH3Transformer3DModel"
        )
    if not isinstance(rows, PackedRows):
        raise CallError(
            f"rows is {rows!r}; it must be hal.sparse.PackedRows(prefix=(TEXT, PICTURES, SOUND), "
            "video=(frames, rows, columns), pad=PAD)"
        )
    if tokens != rows.tokens:
        raise CallError(
            f"{backend} was given {tokens} rows, and the packed rows are {rows}: {rows.tokens} in all; "
            "give the rows of this call"
        )
    if varlen is not None:
        _check(backend, rows, varlen)
    return rows


def _check(backend: str, rows: PackedRows, varlen: Varlen) -> None:
    """Raises CallError where cu_seqlens does not tell one sequence, and perhaps the pad rows after it.

    Its values are read on a CPU only: elsewhere that waits for the device, and how many sequences there are and the longest
    of them tell as much in every likely case.
    """
    ends = [0, rows.used, rows.tokens] if rows.pad else [0, rows.used]
    for name, cu, most in (("q", varlen.cu_q, varlen.max_q), ("k", varlen.cu_k, varlen.max_k)):
        if cu.is_cpu:
            told, right = f"{cu.tolist()[:16]}", cu.tolist() in (ends, [0, rows.tokens])
        else:
            n = cu.numel() - 1
            told = f"{n} sequence{'s' * (n != 1)} of up to {most} rows (max_seqlen)"
            right = (n == len(ends) - 1 and most >= max(rows.used, rows.pad)) or (n == 1 and most >= rows.tokens)
        if not right:
            raise CallError(
                f"{backend} takes one packed sequence, and the packed rows are {rows}; cu_seqlens_{name} tells {told}; "
                f"allowed: {ends}{f' or [0, {rows.tokens}], whose pad rows are no keys' if rows.pad else ''}"
            )


# ---- parts


def _rows(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _grid(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 3 and all(_rows(n) and n > 0 for n in x)


def _size(segment: int | Grid) -> int:
    return segment if isinstance(segment, int) else prod(segment)


@lru_cache(maxsize=64)
def _order(rows: PackedRows, tile: Grid, device: torch.device) -> PackedOrder:
    block = prod(tile)
    with torch.inference_mode(False):  # cached, so it may meet autograd later
        parts = [Order.chunks(s, block) if isinstance(s, int) else Order.of(s, tile) for s in rows.segments]
        slots = [0, *accumulate(p.token.numel() for p in parts)]
        tokens = [0, *accumulate(p.tokens for p in parts)]
        blocks = [0, *accumulate(p.blocks for p in parts)]
        dense = torch.ones(blocks[-1], dtype=torch.bool)
        regions = [(a, b) for s, a, b in zip(rows.segments, blocks, blocks[1:]) if not isinstance(s, int)]
        for a, b in regions:
            dense[a:b] = False
        joined = (
            torch.cat([p.slot + n for p, n in zip(parts, slots)]),
            torch.cat([p.token + n for p, n in zip(parts, tokens)]),
            torch.cat([p.empty + n for p, n in zip(parts, slots)]),
            torch.cat([p.valid for p in parts]),
        )
        at = sum(not isinstance(s, int) for s in rows.prefix)
        slot, token, empty, valid, dense = (x.to(device) for x in (*joined, dense))
        return PackedOrder(rows.video, tile, 0, 0, slot, token, empty, valid, rows, dense, tuple(regions), at)
