"""What runs on Apple GPUs: PyTorch, always.  Portable forms are added by the catalog."""

from __future__ import annotations

from hal.platform import Row

from .kernels import SDPA_MPS

SUPPORT = {
    "torch_sdpa": (Row(SDPA_MPS, cite="pytorch aten/src/ATen/native/mps/operations/Attention.mm"),),
}
