"""What the portable executor reads from a block mask, once: query blocks that can be computed together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blockmask import BlockMask


class Group(NamedTuple):
    """Runs of query blocks of one head, all of the same shape.

    A run is ``length`` adjacent query blocks that keep the same ``kept`` blocks of keys.  What makes a GEMM fast is many
    queries per key, so adjacent blocks are one run; what makes a batch is equal shapes, so equal runs are one group.
    """

    length: int
    kept: int
    first: list[int]  # [runs]: the first query block of each
    rows: Tensor  # int32 [runs * length]: their query blocks
    blocks: Tensor  # int32 [runs, kept]: the blocks they keep, ascending
    span: list[int]  # [runs]: the first kept block where they are all adjacent, else -1
    partial: bool  # some kept block has fewer keys than slots


class Plan(NamedTuple):
    heads: list[list[list[Group]]]  # [B or 1][H or 1]
    invalid: Tensor | None  # bool [nk, block_k]: slots without a key; None: there are none


def plan(mask: BlockMask) -> Plan:
    """The plan of a mask, made at first use: what it reads of the mask's values waits for the device once."""
    if "portable" not in mask.plans:
        with torch.inference_mode(False), torch.no_grad():  # cached, so it may meet autograd later
            keep, device = mask.keep.detach().cpu(), mask.keep.device
            partial = invalid = None
            if mask.kv_valid is not None or mask.kv_len % mask.block_k:
                sizes = mask.kv_sizes.cpu()
                keep, partial = keep & (sizes > 0), sizes < mask.block_k
                slot = torch.arange(mask.block_k, device=keep.device)
                invalid = (slot >= sizes[:, None]).to(device) if bool(partial.any()) else None
            b, h = keep.shape[:2]
            heads = [[_groups(keep[i, j], partial, device) for j in range(h)] for i in range(b)]
        mask.plans["portable"] = Plan(heads, invalid)
    made: Plan = mask.plans["portable"]
    return made


def _groups(keep: Tensor, partial: Tensor | None, device: torch.device) -> list[Group]:
    n = keep.shape[0]
    host = keep.device  # a default device may be another one
    new = torch.ones(n, dtype=torch.bool, device=host)
    new[1:] = (keep[1:] != keep[:-1]).any(-1)
    first = new.nonzero().squeeze(1)
    length = torch.diff(first, append=torch.tensor([n], device=host))
    keep = keep[first]
    count = keep.sum(-1)
    some = torch.zeros_like(count) if partial is None else (keep & partial).any(-1)
    kind = (count * 2 + some) * (n + 1) + length  # equal for runs of one group
    order = kind.argsort(stable=True)
    order = order[count[order] > 0]
    index = keep[order].nonzero()[:, 1].to(torch.int32)
    groups, at, past = [], 0, 0
    for runs in kind[order].unique_consecutive(return_counts=True)[1].tolist():
        these = order[at : at + runs]
        at += runs
        many, kept = int(length[these[0]]), int(count[these[0]])
        mine = index[past : past + runs * kept].view(runs, kept)
        past += runs * kept
        span = torch.where(mine[:, -1] - mine[:, 0] == kept - 1, mine[:, 0], -1).tolist()
        rows = (first[these, None] + torch.arange(many, device=host)).to(torch.int32).view(-1).to(device)
        groups.append(Group(many, kept, first[these].tolist(), rows, mine.to(device), span, bool(some[these[0]])))
    return groups
