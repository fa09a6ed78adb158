"""hal.attention under torch.compile.  Imported only while tracing: torch._dynamo costs as much to import as torch.

Decided while tracing; nothing is cached here.  Sizes that are symbols are unknown facts.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from . import run
from .context import NOWHERE, place, position
from .errors import CallError, HalError
from .ledger import tally

try:
    from torch._dynamo import nonstrict_trace
except ImportError:
    raise CallError("this PyTorch cannot trace hal.attention; bind it outside torch.compile (hal.bind)") from None


def traceable(
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
    if torch.is_autocast_enabled(q.device.type):
        q, k, v, attn_mask = run.autocast(q, k, v, attn_mask)
    try:
        decision = run.decided(
            q, k, v, attn_mask, is_causal, scale, dropout_p, enable_gqa, window, layout, return_lse, role, backend
        )
        bound = run.runnable(decision, q, k, attn_mask)
    except HalError as e:  # Dynamo tells of the failure, and not of the reason
        logging.getLogger("hal").error("refused while torch.compile traces: %s", e)
        raise
    run.counted(decision, tally(decision))
    with torch.autocast(q.device.type, enabled=False):
        return bound(q, k, v, attn_mask, None)


def _placed(q: Tensor, k: Tensor, v: Tensor, key: str, arguments: dict[str, Any]) -> Any:
    """As a layer at a place.  Dynamo cannot trace a ContextVar, so the place is entered where it does not look."""
    with place(key).entered(), position(**NOWHERE._asdict()):  # a graph serves every step
        return traceable(q, k, v, **arguments)


traced = nonstrict_trace(traceable)
placed = nonstrict_trace(_placed)
