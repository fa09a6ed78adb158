"""Gradients of the portable kernel: scores are computed again from the LSE, a piece at a time, in float32.

With P = exp(S - LSE): dV = P' dO, dS = P * (dO V' - (rowsum(O * dO) - dLSE)), dQ = scale dS K, dK = scale dS' Q, and the
bias of a key has the sum of its column of dS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blockmask import BlockMask
from .plan import Group, Plan
from .portable import MIB, Keys, Scratch, budget, chunks, groups_of, padded, wide


def backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor,
    mask: BlockMask, made: Plan, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dbias) in the dtypes of q, k, v and bias; at most once: these have no gradient of their own."""
    delta = (wide(out) * wide(d_out)).sum(-1) - d_lse
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row without keys: exp(-inf - 0) is the 0 that it should be
    group, most = q.shape[1] // k.shape[1], budget(q) // (4 * wide(q[:0]).element_size() * mask.block_k * q.shape[-1])
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    dbias = None if bias is None else torch.empty_like(bias)
    for i in range(q.shape[0]):
        for j in range(k.shape[1]):
            keys = Keys(k[i, j], v[i, j], None if bias is None else bias[i, j], mask, made, Scratch())
            sums = [
                wide(x).new_zeros(keys.blocks, mask.block_k * x.shape[1]) for x in (k[i, j], v[i, j], v[i, j, :, :1])
            ]
            for h in range(j * group, (j + 1) * group):
                rows = [q[i, h], d_out[i, h], lse[i, h, :, None], delta[i, h, :, None]]
                dq[i, h] = _head(rows, keys, groups_of(made, i, h), sums, most, scale, mask.block_q, bias is not None)
            n = k.shape[2]
            dk[i, j], dv[i, j] = (s.view(-1, x.shape[3])[:n] for s, x in zip(sums, (k, v)))
            if dbias is not None:
                dbias[i, j] = sums[2].view(-1)[:n]
    return dq, dk, dv, dbias


def _head(
    rows: list[Tensor], keys: Keys, groups: list[Group], sums: list[Tensor], most: int, scale: float, block: int,
    biased: bool,
) -> Tensor:  # fmt: skip
    """dq [Sq, D] of one head; adds to ``sums``: dk, dv and dbias, by block."""
    blocks = [padded(x, block).unflatten(0, (-1, block)) for x in rows]
    dq = wide(blocks[0]).new_zeros(blocks[0].shape)
    for g in groups:
        for c in chunks(g, most, biased):
            k, v, bias = keys.take(c)
            k, v = wide(k[:, 0]), wide(v[:, 0])
            bias = None if bias is None else bias[:, 0]
            x, do, lse, delta = (wide(b[c.rows]).reshape(c.m, -1, b.shape[2]) for b in blocks)
            dk, dv, db, piece = (
                torch.zeros_like(k),
                torch.zeros_like(v),
                k.new_zeros(c.m, k.shape[1]),
                torch.empty_like(x),
            )
            step = max(1, 2 * MIB // (c.m * k.shape[1]))
            for a in range(0, x.shape[1], step):
                at = slice(a, a + step)
                xs = x[:, at] * scale
                scores = xs @ k.transpose(1, 2)
                p = ((scores if bias is None else scores + bias) - lse[:, at]).exp()
                dv += p.transpose(1, 2) @ do[:, at]
                ds = p.mul_(do[:, at] @ v.transpose(1, 2) - delta[:, at])
                piece[:, at] = ds @ k * scale
                dk += ds.transpose(1, 2) @ xs
                if biased:
                    db += ds.sum(1)
            dq[c.rows] = piece.reshape(-1, *dq.shape[1:])
            for total, d in zip(sums, (dk, dv, db)):
                total.index_add_(0, c.blocks, d.reshape(-1, total.shape[1]))
    return dq.flatten(0, 1)[: rows[0].shape[0]]
