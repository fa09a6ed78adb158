"""The block mask: which blocks of keys each block of queries attends to, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import CallError


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Kept blocks of a [q_len, kv_len] attention.  Make one with ``from_dense`` or ``from_lists``; never change its tensors.

    Block i of the queries is tokens i * block_q and on; the last block of either side may be shorter.  Where a block has
    fewer tokens than slots (ragged tiles), ``q_valid`` and ``kv_valid`` tell how many of its first slots count: other keys
    are never attended to, and the output of other queries means nothing.  What is in empty slots must be finite, as the
    zeros of ``Order.to_blocks`` are.
    """

    keep: Tensor  # bool [B, H, nq, nk]; B and H may be 1 for all
    q_len: int
    kv_len: int
    block_q: int
    block_k: int
    q_valid: Tensor | None = None  # int [nq]
    kv_valid: Tensor | None = None  # int [nk]
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)  # what executors prepared from this mask, once

    @classmethod
    def from_dense(
        cls,
        keep: Tensor,
        q_len: int,
        kv_len: int,
        block_q: int,
        block_k: int,
        *,
        q_valid: Tensor | None = None,
        kv_valid: Tensor | None = None,
    ) -> BlockMask:
        """From a bool map [B, H, nq, nk].  Raises CallError where shapes and lengths do not agree."""
        nq, nk = _blocks(q_len, kv_len, block_q, block_k)
        if not isinstance(keep, Tensor) or keep.dtype is not torch.bool or keep.ndim != 4:
            raise CallError(f"keep is {_kind(keep)}; it must be a torch.Tensor, bool [B, H, nq, nk]")
        if keep.shape[2:] != (nq, nk):
            raise CallError(
                f"keep has {keep.shape[2]} x {keep.shape[3]} blocks; {q_len} queries in blocks of {block_q} and "
                f"{kv_len} keys in blocks of {block_k} make {nq} x {nk}"
            )
        for name, t, n, block in (("q_valid", q_valid, nq, block_q), ("kv_valid", kv_valid, nk, block_k)):
            if t is None:
                continue
            if not _integer(t) or t.shape != (n,):
                raise CallError(f"{name} is {_kind(t)}; it must be a torch.Tensor, integer [{n}]")
            if t.is_cpu and bool(((t < 0) | (t > block)).any()):  # elsewhere that would wait for the device
                raise CallError(f"{name} goes from {int(t.min())} to {int(t.max())}; allowed: 0 to {block}, the block")
        return cls(keep, q_len, kv_len, block_q, block_k, q_valid, kv_valid)

    @classmethod
    def from_lists(
        cls, index: Tensor, count: Tensor | None, q_len: int, kv_len: int, block_q: int, block_k: int, **valid: Any
    ) -> BlockMask:
        """From int lists [B, H, nq, K] of kept blocks, of which the first ``count`` [B, H, nq] matter (None: all K).

        Raises CallError where they do not agree, or name a block that is none.
        """
        _, nk = _blocks(q_len, kv_len, block_q, block_k)
        if not _integer(index) or index.ndim != 4:
            raise CallError(f"index is {_kind(index)}; it must be a torch.Tensor, integer [B, H, nq, K]")
        if count is not None and (not _integer(count) or count.shape != index.shape[:3]):
            raise CallError(f"count is {_kind(count)}; it must be a torch.Tensor, integer {list(index.shape[:3])}")
        matters = torch.ones_like(index, dtype=torch.bool)
        if count is not None:
            matters = torch.arange(index.shape[-1], device=index.device) < count[..., None]
        index = torch.where(matters, index.long(), nk)  # what does not matter goes to a column of its own
        if not index.is_meta and index.numel() and not bool(((index >= 0) & (~matters | (index < nk))).all()):
            raise CallError(f"index has values outside 0 .. {nk - 1}, the blocks of {kv_len} keys")
        if count is not None and not count.is_meta and bool(((count < 0) | (count > (most := index.shape[-1]))).any()):
            raise CallError(
                f"count goes from {int(count.min())} to {int(count.max())}; index lists {most} for each row"
            )
        keep = torch.zeros(*index.shape[:3], nk + 1, dtype=torch.bool, device=index.device)
        keep = keep.scatter(-1, index, True)[..., :nk]
        return cls.from_dense(keep, q_len, kv_len, block_q, block_k, **valid)

    @property
    def lists(self) -> tuple[Tensor, Tensor]:
        """(index int32 [B, H, nq, K], count int32 [B, H, nq]): kept blocks, ascending; what is past a count is a block not kept.

        K is the largest count, so this waits for the device.
        """
        if "lists" not in self.plans:
            count = self.keep.sum(-1, dtype=torch.int32)
            most = int(count.max()) if count.numel() else 0
            index = (~self.keep).to(torch.int8).sort(dim=-1, stable=True).indices[..., :most]
            self.plans["lists"] = (index.to(torch.int32).contiguous(), count)
        return self.plans["lists"]

    @property
    def q_sizes(self) -> Tensor:
        """int64 [nq]: the queries that count in each block."""
        return _sizes(self.q_len, self.block_q, self.q_valid, self.keep.device)

    @property
    def kv_sizes(self) -> Tensor:
        """int64 [nk]: the keys that count in each block."""
        return _sizes(self.kv_len, self.block_k, self.kv_valid, self.keep.device)

    @property
    def density(self) -> float:
        """The share of (query, key) pairs that is kept, over all heads."""
        q, k = (sizes.cpu().double() for sizes in (self.q_sizes, self.kv_sizes))
        b, h = self.keep.shape[:2]
        kept = sum(
            float(q @ (mine.cpu().double() @ k)) for mine in self.keep.flatten(0, 1)
        )  # whole numbers, below 2^53
        return kept / max(float(q.sum() * k.sum()) * b * h, 1.0)

    def to(self, device: torch.device | str) -> BlockMask:
        """This mask on a device; moved once."""
        device = torch.device(device)
        if self.keep.device == device:
            return self
        if device not in self.plans:
            q_valid, kv_valid = (None if t is None else t.to(device) for t in (self.q_valid, self.kv_valid))
            self.plans[device] = replace(self, keep=self.keep.to(device), q_valid=q_valid, kv_valid=kv_valid, plans={})
        moved: BlockMask = self.plans[device]
        return moved

    def to_dense(self) -> Tensor:
        """bool [B, H, q_len, kv_len], token by token: S squared, so for tests and pictures.  Empty slots are False."""
        full = self.keep.repeat_interleave(self.block_q, 2)[:, :, : self.q_len]
        full = full.repeat_interleave(self.block_k, 3)[..., : self.kv_len]
        rows = slots(self.q_sizes, self.block_q)[: self.q_len]
        columns = slots(self.kv_sizes, self.block_k)[: self.kv_len]
        return full & rows[:, None] & columns

    def to_flex(self) -> Any:
        """The same as ``torch.nn.attention.flex_attention.BlockMask``.

        Its mask_mod tells every pair, as FlexAttention that is not compiled reads nothing else; compiled, it is asked in
        blocks that are not full only.
        """
        from torch.nn.attention.flex_attention import BlockMask as FlexMask

        keep, sizes = self.keep, self.kv_sizes.to(torch.int32)
        block_q, block_k, (batch, heads) = self.block_q, self.block_k, self.keep.shape[:2]

        def kept(b: Any, h: Any, q: Any, kv: Any) -> Any:
            of = keep[b % batch, h % heads, q // block_q, kv // block_k]
            return of & (kv % block_k < sizes[kv // block_k])

        partial = sizes < block_k  # four lists, none twice: inductor's C++ cannot alias
        (some, few), (whole, many) = (self._all(keep & p) for p in (partial, ~partial))
        block, lengths = (block_q, block_k), (self.q_len, self.kv_len)
        return FlexMask.from_kv_blocks(few, some, many, whole, block, mask_mod=kept, seq_lengths=lengths)

    @staticmethod
    def _all(keep: Tensor) -> tuple[Tensor, Tensor]:
        """FlexAttention's lists: all nk columns, those kept first."""
        index = (~keep).to(torch.int8).sort(dim=-1, stable=True).indices
        return index.to(torch.int32), keep.sum(-1, dtype=torch.int32)


def _blocks(q_len: Any, kv_len: Any, block_q: Any, block_k: Any) -> tuple[int, int]:
    """How many there are of queries and of keys.  Raises CallError for what is no number of tokens."""
    for name, n in (("q_len", q_len), ("kv_len", kv_len), ("block_q", block_q), ("block_k", block_k)):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise CallError(f"{name} is {n!r}; it must be a positive number of tokens")
    return -(-q_len // block_q), -(-kv_len // block_k)


def _integer(x: Any) -> bool:
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)


def _kind(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def slots(sizes: Tensor, block: int) -> Tensor:
    """bool [blocks * block]: the slots that count."""
    return (torch.arange(block, device=sizes.device) < sizes[:, None]).view(-1)


def _sizes(n: int, block: int, valid: Tensor | None, device: torch.device) -> Tensor:
    blocks = -(-n // block)
    sizes = (n - torch.arange(blocks, device=device) * block).clamp(max=block)
    return sizes if valid is None else torch.minimum(sizes, valid.to(device).long().clamp(min=0))
