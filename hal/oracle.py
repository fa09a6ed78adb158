"""The oracle: attention in float64, by the definition, for every argument that hal knows.  Slow; for tests and the doctor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .sdpa import as_written
from .tensors import four_axes, window_of


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    layout: str = "bshd",
) -> tuple[Tensor, Tensor]:
    """(out, LSE) in float64: out in the caller's layout, LSE [B, H, Sq].  Rows without keys are 0 and -inf.

    Shapes and meanings as ``hal.attention``; grouped heads need no flag.
    """
    with as_written(q):
        return _attention(q, k, v, attn_mask, is_causal, scale, window, layout)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, window: Any, layout: str
) -> tuple[Tensor, Tensor]:
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    sq, sk = q.shape[2], k.shape[2]
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    # The diagonal is aligned at the bottom right: query i stands at key i + Sk - Sq.
    distance = torch.arange(sk, device=q.device) - (torch.arange(sq, device=q.device)[:, None] + sk - sq)
    left, right = window_of(window)
    keep = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if causal:
        keep &= distance <= 0
    if left >= 0:
        keep &= distance >= -left
    if right >= 0:
        keep &= distance <= right
    scores = scores.masked_fill(~keep, -torch.inf)
    if mask is not None:
        mask = mask.reshape(four_axes(mask, q.shape[0], sq, sk))
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.double()
    none = (scores == -torch.inf).all(-1)  # rows without keys; set aside, so that the gradient is a number too
    scores = scores.masked_fill(none[..., None], 0.0)
    lse = scores.logsumexp(-1) if sk else scores.new_zeros(scores.shape[:-1])
    out = (scores - lse[..., None]).exp().masked_fill(none[..., None], 0.0) @ v
    lse = lse.masked_fill(none, -torch.inf)
    return (out.transpose(1, 2) if layout == "bshd" else out), lse


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Dv], LSE [H, Tq]) of packed sequences, one at a time."""
    outs, stats = [], []
    for i in range(cu_q.numel() - 1):
        a, b, c, d = int(cu_q[i]), int(cu_q[i + 1]), int(cu_k[i]), int(cu_k[i + 1])
        out, lse = attention(q[None, a:b], k[None, c:d], v[None, c:d], **arguments)
        outs.append(out[0])
        stats.append(lse[0])
    return torch.cat(outs), torch.cat(stats, -1)
