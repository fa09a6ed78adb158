"""FlexAttention as a kernel of the executor: compiled once per set of shapes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import NoKernelError
from .blockmask import BlockMask


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: past its limit of compilations PyTorch then raises, else it would go on with the unfused form, which
    # holds all scores.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def run(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, bias: Tensor | None, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """See ``Executor``.  A row without keys is 0 here as well: FlexAttention promises it."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    if "flex" not in mask.plans:
        mask.plans["flex"] = mask.to_flex()
    gqa = q.shape[1] != k.shape[1]
    try:
        return _compiled()(q, k, v, block_mask=mask.plans["flex"], scale=scale, enable_gqa=gqa), None
    except FailOnRecompileLimitHit as error:
        limit = torch._dynamo.config.recompile_limit
        raise NoKernelError(
            f"kernel 'flex' is compiled for each set of shapes and masks, and PyTorch allows {limit} in a process; "
            "raise torch._dynamo.config.recompile_limit, or leave kernel=None"
        ) from error
