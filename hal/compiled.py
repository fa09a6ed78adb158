"""hal.attention under torch.compile.  Imported only while tracing: torch._dynamo costs as much to import as torch.

Decided while tracing; nothing is cached here.  Sizes that are symbols are unknown facts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._dynamo import nonstrict_trace

from . import run


def _traceable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    window: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    role: str = "self",
    backend: str | None = None,
) -> Any:
    # Numbers may arrive as symbols; a decision is made on their values, which torch.compile then guards.
    scale, dropout_p = None if scale is None else float(scale), float(dropout_p)
    if window is not None:
        window = int(window) if not isinstance(window, (tuple, list)) else tuple(int(n) for n in window)
    decision = run._decide(
        q, k, v, attn_mask, is_causal, scale, dropout_p, enable_gqa, window, layout, return_lse, role, backend, compiling=True
    )
    bound = run.guarded_run(decision, q, k, attn_mask)
    run._remember(("traced", object()), decision, bound).runs += 1
    return bound(q, k, v, attn_mask, None)


traced = nonstrict_trace(_traceable)
