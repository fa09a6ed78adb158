"""The block-sparse kernel in Triton, as one of the executor's.

``tiles`` says as data what it runs on, ``kernel`` is its code, ``launch`` launches it, ``compilation`` checks what it compiles
to.  Triton is imported when the kernel is asked for, not before.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from ..blockmask import BlockMask
from ..executor import Executor


def _refuse(q: Tensor, v: Tensor, mask: BlockMask) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    from .launch import refusal

    return refusal(q, v)


EXECUTOR = Executor(
    "triton",
    "hal.sparse.triton.launch:run",
    frozenset({"lse", "bias", "gqa", "ragged"}),
    refuse=_refuse,
)
