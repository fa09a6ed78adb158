"""The bind functions of VSA's packages, each of which is imported when its kernel is bound."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hal.context import where
from hal.errors import CallError
from hal.facts import Call
from hal.fittings import Run
from hal.sparse import selected as glue
from hal.sparse.given import is_given

from .portable import NAME, TILE, coarse, count, sparsity
from .settings import Settings


def vsa(call: Call, settings: Settings) -> Run:
    return _bound(import_module("vsa").video_sparse_attn, settings)


def fastvideo(call: Call, settings: Settings) -> Run:
    return _bound(import_module("fastvideo_kernel").video_sparse_attn, settings)


def _bound(function: Callable[..., Any], settings: Settings) -> Run:
    both = "q_variable_block_sizes" in inspect.signature(function).parameters

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Any) -> Tensor:
        at = where()
        order = glue.order_here(NAME, q.shape[2], TILE, q.device, at)
        if order.prefix or order.suffix:  # the decision may be older than the grid
            raise CallError(_text(order.prefix + order.suffix))
        share, branch = sparsity(settings, at), coarse(settings)
        sizes = {"variable_block_sizes": order.valid, **({"q_variable_block_sizes": order.valid} if both else {})}
        weight = None  # the package takes None for a weight of 1
        if is_given("gate"):
            given = glue.taken_gate(v.shape)
            assert given is not None
            weight = order.to_blocks(given.to(q.dtype))
        elif not branch:
            weight = torch.zeros(1, dtype=q.dtype, device=q.device).expand(
                *q.shape[:2], order.token.numel(), v.shape[-1]
            )
        blocks = (order.to_blocks(x) for x in (q, k, v))
        out = function(
            **dict(zip("qkv", blocks)), **sizes, topk=count(order.blocks, share),
            block_size=TILE,  # a number n is read as n x n x n
            compress_attn_weight=weight,
        )  # fmt: skip
        return order.from_blocks(out)

    return run


def confirm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """The packages order video tokens only."""
    text = glue.text_here(q, call.layout)
    return _text(text) if text else None


def _text(tokens: int) -> str:
    return (
        f"the packages of VSA take video tokens alone, and {tokens} text tokens are with them; vsa.portable takes both"
    )
