"""What the tests of integrations share: a run of a tiny pipeline, counts of calls, a backend of zeros."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hal
from hal import plugins
from hal.backend import Backend, Kernel
from hal.catalog import Catalog
from hal.facts.flat import FEATURES
from hal.testing import tiny

STEPS = 2


def sample(name: str, pipeline: Any, **more: Any) -> torch.Tensor:
    """Two steps of a tiny pipeline, always from the same noise."""
    arguments = {"num_inference_steps": STEPS, "output_type": "pt", **tiny.CALLS[name], **more}
    return pipeline(prompt="a photo of a cat", generator=torch.Generator().manual_seed(0), **arguments)[0]


def runs() -> Counter[tuple[str, str]]:
    """How often hal ran, by component and role."""
    count: Counter[tuple[str, str]] = Counter()
    for receipt in hal.receipts():
        count[receipt.component, receipt.role] += receipt.runs
    return count


def _bind_zeros(call: Any) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, mask: Any, varlen: Any) -> Any:
        return (v.new_zeros(*q.shape[:-1], v.shape[-1]) + 0 * q.sum()).to(q.dtype)

    return run


ZEROS = Backend("zeros", portable=Kernel("zeros", _bind_zeros, layout="any", honours=FEATURES))


def install_zeros(monkeypatch: Any) -> str:
    """Its name, in a catalog where it is, as an outsider would add it."""
    catalog = plugins.catalog(frozenset())
    wider = Catalog(catalog.platforms, {**catalog.backends, "zeros": ZEROS}, catalog.problems)
    monkeypatch.setattr(plugins, "catalog", lambda ignore=frozenset(): wider)
    return "zeros"


class Plain(nn.Module):
    """Attention as people write it themselves, by PyTorch's SDPA, in odd shapes."""

    def forward(self, q, k=None, v=None, **arguments):
        k, v = (q, q) if k is None else (k, v)
        return F.scaled_dot_product_attention(q, k, v, **arguments)
