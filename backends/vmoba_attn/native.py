"""The bind functions of V-MoBA's packages, each of which is imported when its kernel is bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.context import where
from hal.errors import CallError
from hal.facts import Call
from hal.fittings import Run
from hal.sparse import Order
from hal.sparse import selected as glue

from .choice import NAME, kind, order
from .settings import Settings


def kernel(call: Call, settings: Settings) -> Run:
    return _bound(import_module("kernel.attn.vmoba_attn.vmoba").moba_attn_varlen, settings)


def fastvideo(call: Call, settings: Settings) -> Run:
    return _bound(import_module("fastvideo_kernel").moba_attn_varlen, settings)


def _bound(function: Callable[..., Any], settings: Settings) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Any) -> Tensor:
        at = where()
        which = kind(settings, at)
        o = order(settings, which, q.shape[2], q.device, at)
        if which is None:
            return glue.every_key(q, k, v, None, q.shape[-1] ** -0.5, False)[0]
        if o.prefix or o.suffix:  # the decision may be older than the grid
            raise CallError(f"{NAME}: {_text(o.prefix + o.suffix)}")
        if o.empty.numel():
            raise CallError(
                f"{NAME}: the packages of V-MoBA need a grid of whole chunks, and {_by(o.grid)} is none of {_by(o.tile)}; "
                f"set {which}_chunk_size to what divides the grid, or name the kernel vmoba.portable"
            )
        topk = getattr(settings, f"{which}_topk")
        parts = [o.to_blocks(x) for x in (q, k, v)]
        if settings.moba_select_mode == "topk" and topk == 1:  # the packages would attend to everything
            return o.from_blocks(_own_chunk(parts, o))
        outs = [
            function(
                **{name: x[i].transpose(0, 1).contiguous() for name, x in zip("qkv", parts)},
                cu_seqlens=_bounds(o.tokens, q.device),
                max_seqlen=o.tokens,
                moba_chunk_size=o.block,
                moba_topk=topk,
                select_mode=settings.moba_select_mode,
                simsum_threshold=settings.moba_threshold,
                threshold_type=settings.moba_threshold_type,
            )
            for i in range(q.shape[0])  # together, videos would compete in overall and head_global
        ]
        return o.from_blocks(torch.stack(outs).transpose(1, 2))

    return run


def _own_chunk(parts: list[Tensor], o: Order) -> Tensor:
    q, k, v = (x.unflatten(2, (o.blocks, o.block)).flatten(1, 2) for x in parts)
    return F.scaled_dot_product_attention(q, k, v).unflatten(1, (-1, o.blocks)).flatten(2, 3)


@lru_cache(maxsize=64)
def _bounds(tokens: int, device: torch.device) -> Tensor:
    """One sequence.  One tensor for each length: the packages keep what they make of it by the tensor itself."""
    return torch.tensor([0, tokens], dtype=torch.int32, device=device)


def confirm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """The packages order video tokens only."""
    text = glue.text_here(q, call.layout)
    return _text(text) if text else None


def _text(tokens: int) -> str:
    return f"the packages of V-MoBA take video tokens alone, and {tokens} text tokens are with them; vmoba.portable takes both"


def _by(grid: tuple[int, int, int]) -> str:
    return " x ".join(map(str, grid))
