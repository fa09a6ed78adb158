"""hal's own Triton kernel for blocks, as a backend declares it: the package, and what it was compiled and checked for.

It stands here and not beside its code (hal/sparse/triton), because declarations are read without torch.
"""

from __future__ import annotations

from .facts import HALF
from .kernel import Needs
from .rules import Same

TRITON = Needs("triton", "triton", "jit", install="pip install triton", names=("pytorch-triton", "pytorch-triton-rocm"))
LIMITS = {"dtype": HALF, "head_dim": frozenset({64, 128}), "v_head_dim": Same("head_dim")}
