"""Which chunks a query attends to: where a call stands in the pattern of layers, its chunks, and the choice among them."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hal.context import Position
from hal.sparse import BlockMask, Order, cumulative, pool, top_k
from hal.sparse import selected as glue

from .settings import Settings

NAME = "vmoba_attn"
Kind = Literal["temporal", "spatial", "st"]
Among = Literal["query_head", "block", "overall", "head_global"]


def kind(settings: Settings, at: Position) -> Kind | None:
    """How chunks are cut in a call that stands there; None: it attends to everything.  Raises CallError."""
    if settings.first_full_step and glue.step_here(NAME, at, "first_full_step") < settings.first_full_step:
        return None
    s = settings
    kinds: tuple[tuple[Kind, int], ...] = (
        ("temporal", s.temporal_layer),
        ("spatial", s.spatial_layer),
        ("st", s.st_layer),
    )
    pattern = [name for name, layers in kinds for _ in range(layers)]
    if not s.first_full_layer and len(set(pattern)) == 1:  # all layers are alike
        return pattern[0]
    why = "first_full_layer, temporal_layer, spatial_layer and st_layer"
    layer = glue.layer_here(NAME, at, why) - s.first_full_layer
    return None if layer < 0 else pattern[layer % len(pattern)]


def order(settings: Settings, which: Kind | None, tokens: int, device: torch.device, at: Position) -> Order:
    """The order whose blocks are the chunks.  Raises CallError where the grid is unknown or another."""
    t, h, w = (0, 0, 0) if at.grid is None else (at.grid.frames, at.grid.height, at.grid.width)
    tile = {
        "temporal": (settings.temporal_chunk_size, h, w),
        "spatial": (t, *settings.spatial_chunk_size),
        "st": settings.st_chunk_size,
        None: (1, 1, 1),
    }[which]
    a, b, c = (max(1, min(size, n)) for size, n in zip(tile, (t, h, w)))
    return glue.order_here(NAME, tokens, (a, b, c), device, at)


class Chunks(NamedTuple):
    """What does not depend on the data, for one order."""

    order: Order
    home: Tensor  # int64 [video tokens]: the chunk of each, counted among the video's
    video: slice  # of the tokens
    spans: list[tuple[int, int]]  # [blocks]: the slots of each that hold tokens
    text: Tensor  # int64: tokens of text
    all: Tensor  # int64 [tokens]


@lru_cache(maxsize=64)  # an order is cached itself, so it may be a key
def chunks(order: Order) -> Chunks:
    with torch.inference_mode(False):  # cached, so it may meet autograd later
        n, everything = order.tokens, torch.arange(order.tokens).to(order.slot.device)
        video = slice(order.prefix, n - order.suffix)
        home = order.slot[video] // order.block - order.video.start
        spans = [(i * order.block, i * order.block + size) for i, size in enumerate(order.valid.cpu().tolist())]
        return Chunks(
            order, home, video, spans, torch.cat([everything[: video.start], everything[video.stop :]]), everything
        )


def rows(q: Tensor, k: Tensor, c: Chunks, settings: Settings, topk: int) -> list[list[Tensor]]:
    """[heads][blocks]: the tokens that attend to a block, ascending.  q [H, tokens, D], k [Hk, slots, D] in chunks.

    Text attends to everything, and everything to text.
    """
    means = pool(k, c.order.block, c.order.valid)[:, c.order.video].transpose(1, 2)
    means, q = means.repeat_interleave(q.shape[0] // k.shape[0], 0), q[:, c.video]
    among = settings.moba_threshold_type
    threshold = settings.moba_threshold if settings.moba_select_mode == "threshold" else None
    step = 1 if among in ("query_head", "head_global") else q.shape[0]  # the heads that compete
    out = []
    for h in range(0, q.shape[0], step):
        gate = q[h : h + step].float() @ means[h : h + step]
        keep = chosen(gate, c.home, among, topk, threshold)
        out += [_listed(keep[i], c) for i in range(step)]
    return out


def chosen(gate: Tensor, home: Tensor, among: Among, topk: int, threshold: float | None) -> Tensor:
    """bool [H, S, C]: each query's own chunk, and others by their scores ``gate`` [H, S, C].  ``home``: int64 [S].

    Without a threshold: the topk best, own chunks first.  With one: scores are taken from the lowest (0) to the highest
    (1) of those that compete, and the best others are kept, one or more, until they and the own ones reach that share.
    """
    own = torch.zeros(gate.shape[1:], dtype=torch.bool, device=gate.device)
    own = own.scatter_(1, home[:, None], True).expand_as(gate)
    h, s, n = gate.shape
    shape = {"query_head": (h, s, n), "block": (n, h * s), "overall": (h * s * n,), "head_global": (h, s * n)}[among]
    if among == "block":
        gate, own = gate.permute(2, 0, 1), own.permute(2, 0, 1)
    gate, own = gate.reshape(shape), own.reshape(shape)
    if threshold is None:
        many = {"query_head": 1, "head_global": s, "overall": h * s}[among]
        keep = top_k(gate.masked_fill(own, torch.inf), topk * many)
    else:
        least, most = gate.aminmax(dim=-1, keepdim=True)
        span = most - least
        share = (gate - least).div_(span.masked_fill_(span <= 1e-6, 1))  # in place: fresh tensors take longer than sums
        share.div_(share.sum(-1, keepdim=True).add_(1e-6))
        rest = (threshold - (share * own).sum(-1)).clamp_(min=0)
        keep = cumulative(share.masked_fill_(own, -torch.inf), rest) | own
    return keep.view(n, h, s).permute(1, 2, 0) if among == "block" else keep.view(h, s, n)


def _listed(keep: Tensor, c: Chunks) -> list[Tensor]:
    """From bool [video tokens, chunks] to the tokens of each block; waits for the device once."""
    flat = keep.t().contiguous()
    found = list((flat.nonzero()[:, 1] + c.video.start).split(flat.sum(1).cpu().tolist()))
    if not c.text.numel():
        return found
    video, words = c.order.video, [c.all] * c.order.blocks
    words[video] = [torch.cat([x, c.text]) for x in found]
    return words


def mask(mine: list[list[list[Tensor]]], c: Chunks) -> BlockMask:
    """What ``rows`` chose, [B][heads][blocks], as a mask of single queries in the order of the chunks; for those who look."""
    o = c.order
    full = torch.zeros(o.token.numel(), dtype=torch.bool, device=o.slot.device).index_fill_(0, o.slot, True)
    keep = full.new_zeros(len(mine), len(mine[0]), full.numel(), o.blocks)
    for i, heads in enumerate(mine):
        for h, blocks in enumerate(heads):
            for n, at in enumerate(blocks):
                keep[i, h, o.slot[at], n] = True
    slots = full.numel()
    return BlockMask.from_dense(keep, slots, slots, 1, o.block, q_valid=full.int(), kv_valid=o.valid)
