"""Masks built from what a call asks for in words."""

from __future__ import annotations

import torch
from torch import Tensor


def built_mask(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: tuple[int, int],
    mask: Tensor | None,
    first: int = 0,
    of: int | None = None,
) -> Tensor:
    """Causality and window over [Sq, Sk], with the caller's mask if there is one: bool, or additive where that was.

    q is [B, H, Sq, D], k [B, Hk, Sk, D].  The diagonal is aligned at the bottom right: query i stands at key i + Sk - Sq.
    ``first`` and ``of``: q is only some of the queries, ``of`` in all, from the one numbered ``first``.
    """
    rows, sk = q.shape[2], k.shape[2]
    start = first + sk - (rows if of is None else of)
    distance = torch.arange(sk, device=q.device) - torch.arange(start, start + rows, device=q.device)[:, None]
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    keep = torch.ones(rows, sk, dtype=torch.bool, device=q.device)
    if left >= 0:
        keep = keep & (distance >= -left)
    if right >= 0:
        keep = keep & (distance <= right)
    keep = keep[None, None]
    if mask is None:
        return keep
    return mask & keep if mask.dtype is torch.bool else mask.masked_fill(~keep, -torch.inf)


def rows_without_keys(mask: Tensor) -> Tensor:
    """[.., Sq], True where a query may attend to nothing."""
    return ~mask.any(-1) if mask.dtype is torch.bool else (mask == -torch.inf).all(-1)
