"""VSA-H3 in PyTorch: the selector, and its run on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.backends.video_sparse_attn.portable import count, scores_of
from hal.context import Position, where
from hal.errors import CallError
from hal.facts import Call
from hal.fittings import Run, Varlen
from hal.sparse import PackedRows, pool, top_k
from hal.sparse import selected as glue
from hal.sparse.packed import PackedOrder, rows_here

from .settings import Settings

NAME = "video_sparse_attn_h3"
TILE = (4, 4, 4)


def triton(call: Call, settings: Settings) -> Run:
    return bind(call, settings, "triton")


def bind(call: Call, settings: Settings, kernel: str | None = None) -> Run:
    """``kernel``: one of the executor's, where it must be that one.

    Its run takes [B, H, rows, D], every item of the batch laid out alike, or packed [rows, H, D].
    """
    scale = call.softmax_scale

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Varlen | None) -> Tensor:
        if varlen is not None:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        at = where()
        rows = rows_here(NAME, q.shape[2], at, varlen)
        if settings.vsa_mode == "compete" and rows.videos > 1:
            raise CallError(
                f"{NAME}: vsa_mode=compete is for one video, and the packed rows {rows} have {rows.videos}; "
                "choose vsa_mode=exempt"
            )
        gate = glue.taken_gate((*q.shape[:3], v.shape[-1]), "rows", packed=varlen is not None)
        sparsity = sparsity_here(settings, at)
        q, k, v = (x[:, :, : rows.used] for x in (q, k, v))
        out = attend(q, k, v, gate, rows, at, sparsity, settings, scale, kernel)
        out = F.pad(out, (0, 0, 0, rows.pad)) if rows.pad else out
        return out if varlen is None else out[0].transpose(0, 1)

    return run


def attend(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, rows: PackedRows, at: Position, sparsity: float,
    settings: Settings, scale: float, kernel: str | None,
) -> Tensor:  # fmt: skip
    """[B, H, used, Dv]: the kept tiles of each tile, and the gated means of all."""
    order = rows.order(TILE, q.device)
    if sparsity == 0:  # a dense step or layer has the branch of means all the same
        glue.watch(NAME, at, None, order)
        out = glue.every_key(q, k, v, None, scale, False)[0]
        if gate is None:
            return out
    blocks = order.to_blocks(q), order.to_blocks(k), order.to_blocks(v)
    scores = scores_of(*blocks[:2], order, scale)
    if sparsity:
        mask = order.mask(kept(scores.detach(), order, sparsity, settings))
        glue.watch(NAME, at, mask, order)
        out = order.from_blocks(glue.executed(*blocks, mask, None, scale, False, kernel)[0])
    if gate is None:
        return out
    means = pool(blocks[2], order.block, order.valid).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return glue.with_coarse(out, scores.softmax(-1) @ means, order, gate[:, :, : rows.used])


def kept(scores: Tensor, order: PackedOrder, sparsity: float, settings: Settings) -> Tensor:
    """bool, as the scores [B, H, blocks, blocks]: the tiles that each tile attends to; those of no video, to all."""
    if settings.vsa_mode == "compete":
        (one,) = order.regions  # more are refused
        n = one[1] - one[0]
        keep = top_k(scores, count(n, sparsity) + order.blocks - n)
    else:
        keep = scores.new_ones(scores.shape, dtype=torch.bool)
        rate = settings.vsa_ref_keep_rate
        for i, (a, b) in enumerate(order.regions):
            share = sparsity if rate is None or i == order.target else 1 - rate
            keep[..., a:b] = top_k(scores[..., a:b], count(b - a, share))
    return keep | order.dense[:, None]


# ---- where the call stands


def sparsity_here(settings: Settings, at: Position) -> float:
    """The sparsity of a call that stands there.  Raises CallError where a setting needs a step or layer that is unknown."""
    if settings.vsa_dense_layers and glue.layer_here(NAME, at, "vsa_dense_layers") in settings.vsa_dense_layers:
        return 0.0
    first = settings.vsa_dense_first_n_steps
    return 0.0 if first and glue.step_here(NAME, at, "vsa_dense_first_n_steps") < first else settings.sparsity
