"""V-MoBA in PyTorch: chunk by chunk, the queries that attend to it are gathered, and what they find is merged by its LSE.

What is held beside q, k and v: k and v in chunks, the lists of queries, one head's float32 output, and one chunk's queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.context import where
from hal.facts import Call
from hal.fittings import Run
from hal.sdpa import as_written
from hal.sparse import selected as glue
from hal.sparse.portable import MIB, attend, wide

from .choice import NAME, Chunks, chunks, kind, order, rows
from .choice import mask as mask_of
from .settings import Settings

Rows = list[list[list[Tensor]]]  # [B][H][blocks]


def bind(call: Call, settings: Settings) -> Run:
    scale, lse = call.softmax_scale, bool(call.lse)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Any) -> Any:
        at = where()
        which = kind(settings, at)
        o = order(settings, which, q.shape[2], q.device, at)
        if which is None or o.blocks == 1:
            glue.watch(NAME, at, None, o)
            out, stats = glue.every_key(q, k, v, None, scale, lse)
            return (out, stats) if lse else out
        k, v, c, topk = o.to_blocks(k), o.to_blocks(v), chunks(o), getattr(settings, f"{which}_topk")
        with torch.no_grad():
            mine = [rows(q[i], k[i], c, settings, topk) for i in range(q.shape[0])]
        glue.watch(NAME, at, lambda: mask_of(mine, c), o)
        with as_written(q):
            if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
                out, stats = _Chunked.apply(q, k, v, mine, c, scale)
            else:
                out, stats = _forward(q, k, v, mine, c, scale)
        return (out, stats) if lse else out

    return run


def _forward(q: Tensor, k: Tensor, v: Tensor, mine: Rows, c: Chunks, scale: float) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, Dv] in the dtype of q, LSE [B, H, S])."""
    b, h, s = q.shape[:3]
    group = h // k.shape[1]
    out = torch.empty(b, h, s, v.shape[-1], dtype=q.dtype, device=q.device)
    stats = torch.full((b, h, s), -torch.inf, dtype=wide(q[:0]).dtype, device=q.device)
    for i in range(b):
        for j in range(h):
            total = wide(q[:0]).new_zeros(s, v.shape[-1])
            for (a, z), at in zip(c.spans, mine[i][j]):
                if not at.numel():
                    continue
                keys, values = k[i, j // group, a:z], v[i, j // group, a:z]
                some, stat = attend(
                    q[i, j].index_select(0, at)[None, None], keys[None, None], values[None, None], None, scale, True
                )
                assert stat is not None
                merge(total, stats[i, j], at, wide(some[0, 0]), stat[0])
            out[i, j] = total
    return out, stats


def merge(total: Tensor, lse: Tensor, at: Tensor, some: Tensor, stat: Tensor) -> None:
    """Add attention to further keys to rows ``at`` of what is there: ``total`` [S, Dv] and ``lse`` [S], changed in place.

    The sum of both, weighted by their LSE.  One of -inf, without keys, weighs nothing.
    """
    before = lse.index_select(0, at)
    weight = torch.sigmoid(stat - before).nan_to_num_(0.0)  # both -inf
    total.index_copy_(0, at, total.index_select(0, at).lerp_(some, weight[:, None]))
    lse.index_copy_(0, at, torch.logaddexp(before, stat))


class _Chunked(torch.autograd.Function):
    """Gradients by recomputation from the LSE, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mine: Rows, c: Chunks, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, mine, c, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = mine, c, scale
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        with as_written(q):  # backward() may be called inside autocast
            return (*_backward(q, k, v, out, lse, d_out, d_lse, *ctx.rest), None, None, None)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, mine: Rows, c: Chunks,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) in the dtypes of q, k and v."""
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (wide(x[:0]).new_zeros(x.shape) for x in (q, k, v))
    delta = (wide(out) * wide(d_out)).sum(-1) - d_lse
    for i in range(q.shape[0]):
        for j in range(q.shape[1]):
            for (a, z), at in zip(c.spans, mine[i][j]):
                keys, values = wide(k[i, j // group, a:z]), wide(v[i, j // group, a:z])
                for some in at.split(max(1, 2 * MIB // (z - a))):
                    x, do = (wide(t[i, j].index_select(0, some)) for t in (q, d_out))
                    x = x * scale
                    p = (x @ keys.t() - lse[i, j].index_select(0, some)[:, None]).exp()
                    dv[i, j // group, a:z] += p.t() @ do
                    ds = p.mul_(do @ values.t() - delta[i, j].index_select(0, some)[:, None])
                    dk[i, j // group, a:z] += ds.t() @ x
                    dq[i, j].index_add_(0, some, ds @ keys * scale)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
