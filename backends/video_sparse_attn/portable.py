"""VSA in PyTorch: the selector, and its run on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal.context import Position
from hal.facts import Call
from hal.fittings import Run
from hal.sparse import Order, pool, top_k
from hal.sparse import selected as glue
from hal.sparse.given import is_given

from .settings import Settings

NAME = "video_sparse_attn"
TILE = (4, 4, 4)


def triton(call: Call, settings: Settings) -> Run:
    return bind(call, settings, "triton")


def bind(call: Call, settings: Settings, kernel: str | None = None) -> Run:
    """``kernel``: one of the executor's, where it must be that one."""
    scale = call.softmax_scale

    def dense(at: Position) -> bool:
        return sparsity(settings, at) == 0 and not coarse(settings)

    def select(q: Tensor, k: Tensor, v: Tensor, order: Order, at: Position) -> glue.Selected:
        scores = scores_of(q, k, order, scale)
        added = None
        if coarse(settings):
            means = pool(v, order.block, order.valid).repeat_interleave(q.shape[1] // v.shape[1], 1)
            added = scores.softmax(-1) @ means
        share = sparsity(settings, at)
        return glue.Selected(order.mask(kept(scores, order, share)) if share else None, added)

    return glue.run(NAME, TILE, select, scale=scale, dense=dense, kernel=kernel)


def sparsity(settings: Settings, at: Position) -> float:
    """The sparsity of a call that stands there.  Raises CallError where a setting needs a step or layer that is unknown."""
    if settings.dense_layers and glue.layer_here(NAME, at, "dense_layers") in settings.dense_layers:
        return 0.0
    share = settings.sparsity
    if settings.schedule:
        step = glue.step_here(NAME, at, "schedule")
        for first, value in settings.schedule:
            share = value if first <= step else share
    return share


def coarse(settings: Settings) -> bool:
    """Whether the coarse branch is added here."""
    return settings.compress_without_gate or is_given("gate")


def count(tiles: int, share: float) -> int:
    """Tiles kept of so many.  A rounding error of the product keeps no further tile: 0.7 of 10 leaves 3."""
    return max(1, min(tiles, math.ceil((1 - share) * tiles - 1e-9)))


def scores_of(q: Tensor, k: Tensor, order: Order, scale: float) -> Tensor:
    """float32 [B, H, blocks, blocks]: products of the blocks' means."""
    means = pool(k, order.block, order.valid).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return pool(q, order.block, order.valid) @ means.transpose(-1, -2) * scale


def kept(scores: Tensor, order: Order, share: float) -> Tensor:
    """bool, as the scores: the best tiles of each tile, and all text; text attends to everything."""
    video = order.video
    keep = torch.ones_like(scores, dtype=torch.bool)
    among = scores[:, :, video, video].detach()
    keep[:, :, video, video] = top_k(among, count(among.shape[-1], share))
    return keep
