"""Which blocks to keep: pooled blocks, and three ways from scores to a bool map.  Each works on the last axis at once.

A score of -inf is never kept: it is how a caller forbids a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CallError


def pool(x: Tensor, block: int, valid: Tensor | None = None) -> Tensor:
    """Mean of each block: [.., slots, D] to float32 [.., blocks, D].

    ``valid``: int [blocks], the tokens in each block; its empty slots must hold 0, as ``Order.to_blocks`` leaves them.
    None: every block is full but the last, which has what is left.  A block without tokens has mean 0.
    """
    if not isinstance(block, int) or block < 1:
        raise CallError(f"block is {block!r}; it must be a positive number of tokens")
    n = x.shape[-2]
    blocks = -(-n // block)
    if valid is None:
        size = torch.full((blocks,), block, device=x.device)
        size[-1:] = n - (blocks - 1) * block
    elif valid.shape != (blocks,):
        raise CallError(f"valid has shape {tuple(valid.shape)}; {n} slots in blocks of {block} make [{blocks}]")
    else:
        size = valid.clamp(min=1)
    if blocks * block != n:
        x = F.pad(x, (0, 0, 0, blocks * block - n))
    return x.unflatten(-2, (blocks, block)).sum(-2, dtype=torch.float32) / size[:, None]


def top_k(scores: Tensor, k: int | Tensor) -> Tensor:
    """Keep the k highest of each row, exactly k of them: of equal scores, those with the lower index.

    ``k`` is a number, or an int tensor of the rows' shape; it is clipped to 1 .. n.  What is no number counts as the
    highest, so that it is seen in what comes out.
    """
    _check_count(k)
    n = scores.shape[-1]
    if isinstance(k, int) and scores.is_cpu and n:  # up to five times faster than to sort; right where nothing is equal
        most = max(1, min(n, k))
        keep = ~(scores < scores.topk(most, dim=-1).values[..., -1:])
        if bool((keep.sum(-1) == most).all()):
            return keep & ~scores.isneginf()
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    if isinstance(k, int):
        first = order[..., : max(1, min(n, k))]
        keep = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, first, True)
    else:
        keep = _scattered(order, torch.arange(n, device=scores.device) < k.clamp(1, n)[..., None])
    return keep & ~scores.isneginf()


def cumulative(probabilities: Tensor, p: float | Tensor, *, crossing: bool = True, at_least: int = 1) -> Tensor:
    """Keep the most probable of each row until their sum reaches ``p``; sums are float32.

    ``crossing``: whether the one that takes the sum past ``p`` is kept (as SVG2 does; SpargeAttn does not).  ``at_least``
    of them are kept in any case.  Equal probabilities are taken by lower index.  ``p`` may be a tensor of the rows' shape.
    """
    ordered, order = probabilities.float().sort(dim=-1, descending=True, stable=True)
    total = ordered.cumsum(-1)
    if crossing:
        total -= ordered
    first = (total <= (p[..., None] if isinstance(p, Tensor) else p)) | (
        torch.arange(order.shape[-1], device=order.device) < at_least
    )
    return _scattered(order, first) & ~probabilities.isneginf()


def kth_value(scores: Tensor, k: int | Tensor, slack: float = 0.0) -> Tensor:
    """Keep what is at least the k-th highest score of its row, less ``slack``: ties keep more than k.

    ``k`` as for ``top_k``.
    """
    _check_count(k)
    n = scores.shape[-1]
    if isinstance(k, int):
        least = scores.topk(max(1, min(n, k)), dim=-1).values[..., -1:]
    else:
        at = (k.clamp(1, n) - 1).expand(scores.shape[:-1])[..., None]
        least = scores.sort(dim=-1, descending=True).values.gather(-1, at.long())
    return ~(scores < least - slack) & ~scores.isneginf()


def _check_count(k: int | Tensor) -> None:
    if not isinstance(k, int) and not (isinstance(k, Tensor) and not k.is_floating_point()):
        raise CallError(f"k is {k!r}; it must be a number of blocks, or an int tensor of the rows' shape")


def _scattered(order: Tensor, first: Tensor) -> Tensor:
    first = first.expand(order.shape)
    return torch.zeros_like(first, dtype=torch.bool, memory_format=torch.contiguous_format).scatter(-1, order, first)
