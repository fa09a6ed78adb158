"""The bind functions of AITER's parts; the rest they share with FlashAttention, whose functions they imitate."""

from __future__ import annotations

from hal.facts import Call
from hal.fittings import Run
from hal.flash import flash, functions


def ck(call: Call) -> Run:
    dense, packed = functions("aiter")
    return flash(call, dense, packed, deterministic=bool(call.deterministic), return_lse=_wanted(call))


def triton(call: Call) -> Run:
    dense, packed = functions("aiter.ops.triton.attention.mha")
    deterministic, lse = bool(call.deterministic), _wanted(call)
    return flash(call, dense, packed, tokens_first=True, deterministic=deterministic, return_lse=lse)


def _wanted(call: Call) -> bool:
    """AITER's backward asserts that the LSE was asked for."""
    return bool(call.lse) or call.grad is not False
