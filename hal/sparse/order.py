"""Token order: from the raster order of a video's grid to blocks of neighbours, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import CallError
from .blockmask import BlockMask

Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Order:
    """A bijection between tokens and slots of equal blocks.  Make one with ``Order.of``; it is cached.

    Tokens are ``prefix`` text tokens, the video in raster order (frame, row, column), then ``suffix`` text tokens.
    Blocks are those of the prefix, one per tile in raster order of tiles, then those of the suffix.  A ragged block has its
    tokens in its first slots, and the rest is empty.
    """

    grid: Grid
    tile: Grid
    prefix: int
    suffix: int
    slot: Tensor  # int64 [tokens]: the slot of each token
    token: Tensor  # int64 [slots]: the token in each slot; in an empty slot, any
    empty: Tensor  # int64: the empty slots
    valid: Tensor  # int32 [blocks]: the tokens in each block

    @staticmethod
    def of(
        grid: Grid, tile: Grid, *, prefix: int = 0, suffix: int = 0, device: torch.device | str | None = None
    ) -> Order:
        """The order of tiles (frames, rows, columns) over a grid.  Any grid: tiles at its ends are clipped.

        Raises CallError for a grid or a tile that is not three positive numbers, or a negative number of text tokens.
        """
        for name, three in (("grid", grid), ("tile", tile)):
            if (
                not isinstance(three, (tuple, list))
                or len(three) != 3
                or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in three)
            ):
                raise CallError(f"{name} is {three!r}; it must be three positive numbers (frames, height, width)")
        for name, n in (("prefix", prefix), ("suffix", suffix)):
            if not isinstance(n, int) or isinstance(n, bool) or n < 0:
                raise CallError(f"{name} is {n!r}; it must be a number of tokens, 0 or more")
        return _order(tuple(grid), tuple(tile), prefix, suffix, torch.device(device or "cpu"))

    @staticmethod
    def chunks(tokens: int, size: int, *, device: torch.device | str | None = None) -> Order:
        """Blocks of ``size`` tokens in a row; the last may be shorter."""
        return Order.of((1, 1, tokens), (1, 1, size), device=device)

    @property
    def block(self) -> int:
        """Slots in a block."""
        return prod(self.tile)

    @property
    def blocks(self) -> int:
        return self.valid.numel()

    @property
    def tokens(self) -> int:
        return self.slot.numel()

    @property
    def tiles(self) -> Grid:
        """Tiles along frames, height and width."""
        a, b, c = (-(-n // t) for n, t in zip(self.grid, self.tile))
        return a, b, c

    @property
    def video(self) -> slice:
        """The blocks that are tiles."""
        first = -(-self.prefix // self.block)
        return slice(first, first + prod(self.tiles))

    def to_blocks(self, x: Tensor, dim: int = -2) -> Tensor:
        """[.., tokens, D] to [.., slots, D] along ``dim``; empty slots are 0.  Raises CallError for another length."""
        self._check(x, dim, self.tokens, "tokens")
        y = x.index_select(dim, self.token)
        return y.index_fill(dim, self.empty, 0) if self.empty.numel() else y

    def from_blocks(self, y: Tensor, dim: int = -2) -> Tensor:
        """[.., slots, D] to [.., tokens, D] along ``dim``: the inverse of ``to_blocks``."""
        self._check(y, dim, self.token.numel(), "slots")
        return y.index_select(dim, self.slot)

    def mask(self, keep: Tensor) -> BlockMask:
        """The block mask of bool [B, H, blocks, blocks] over this order's blocks, with its valid tokens."""
        slots, valid = self.token.numel(), self.valid if self.empty.numel() else None
        return BlockMask.from_dense(keep, slots, slots, self.block, self.block, q_valid=valid, kv_valid=valid)

    def _check(self, x: Tensor, dim: int, n: int, what: str) -> None:
        if x.shape[dim] != n:
            text = f" + {self.prefix} + {self.suffix} text tokens" if self.prefix or self.suffix else ""
            raise CallError(
                f"axis {dim} has {x.shape[dim]} {what}; grid {self.grid} with tile {self.tile}{text} makes {n}"
            )


@lru_cache(maxsize=64)
def _order(grid: Any, tile: Any, prefix: int, suffix: int, device: torch.device) -> Order:
    with torch.inference_mode(False):  # cached, so it may meet autograd later
        return _made(grid, tile, prefix, suffix, device)


def _made(grid: Any, tile: Any, prefix: int, suffix: int, device: torch.device) -> Order:
    block = prod(tile)
    index, inside = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool)
    for axis, (n, t) in enumerate(zip(grid, tile)):  # axes: tiles of frames, rows, columns; then the same within a tile
        at = torch.arange(-(-n // t) * t).view(-1, t)
        shape = [1] * 6
        shape[axis], shape[axis + 3] = at.shape
        index = index * n + at.view(shape)
        inside = inside & (at < n).view(shape)
    index, inside = index.reshape(-1, block), inside.reshape(-1, block)
    first = (~inside).to(torch.int8).sort(dim=1, stable=True).indices  # a clipped tile's tokens come first
    pieces = [_text(0, prefix, block), index.gather(1, first) + prefix, _text(prefix + prod(grid), suffix, block)]
    kept = [_text(0, prefix, block, valid=True), inside.gather(1, first), _text(0, suffix, block, valid=True)]
    token, full = torch.cat(pieces), torch.cat(kept)
    slots = full.view(-1).nonzero().squeeze(1)
    slot = torch.empty(slots.numel(), dtype=torch.int64)
    slot[token.view(-1)[slots]] = slots
    token = token.masked_fill(~full, 0).view(-1)
    empty = (~full).view(-1).nonzero().squeeze(1)
    valid = full.sum(1, dtype=torch.int32)
    return Order(grid, tile, prefix, suffix, *(x.to(device) for x in (slot, token, empty, valid)))


def _text(first: int, tokens: int, block: int, valid: bool = False) -> Tensor:
    """[blocks, block]: consecutive tokens from ``first``, or which of these slots have one."""
    at = torch.arange(-(-tokens // block) * block).view(-1, block)
    return at < tokens if valid else at + first
