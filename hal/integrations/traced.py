"""hal's attention for one component under ``torch.compile``.  Imported only while tracing, as it imports Dynamo.

Dynamo cannot trace a ContextVar, so the component is set inside the function that it does not look into.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._dynamo import nonstrict_trace

from ..compiled import traceable
from ..context import component


def _component_attention(q: Tensor, k: Tensor, v: Tensor, name: str, arguments: dict[str, Any]) -> Any:
    with component(name):
        return traceable(q, k, v, **arguments)


component_attention = nonstrict_trace(_component_attention)
