"""What runs on Apple GPUs: PyTorch, always.  Portable forms are added by the catalog."""

from __future__ import annotations

from hal.rows import Prefer, Row

from .arch import ARCHS, OTHER
from .kernels import SDPA_MPS

SUPPORT = {
    "torch_sdpa": (Row(SDPA_MPS, cite="pytorch aten/src/ATen/native/mps/operations/Attention.mm"),),
}

ORDER = (Prefer("torch_sdpa", why="always; in chunks of queries, so that memory stays bounded"),)

FAMILIES = {"Apple silicon": frozenset(ARCHS - {OTHER})}
