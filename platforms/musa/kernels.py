"""Moore Threads' own kernels under the name ``fa``: MATE (with FlashAttention 3's interface), and a flash_attn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.backend import Kernel, Needs
from hal.facts import HALF, Call
from hal.rules import Between, OneOf, Pairs, Same

if TYPE_CHECKING:
    from hal.fittings import Run

MUSA_FLASH = Kernel(
    "musa_flash",
    "hal.platforms.musa.kernels:bind_flash",
    honours={"causal", "window", "scale", "gqa", "rectangular", "varlen", "lse", "deterministic"},
    limits={
        "dtype": HALF,
        "head_dim": Between(1, 512),
        "v_head_dim": OneOf(Same("head_dim"), Pairs("head_dim", {(192, 128)})),
        "contiguous": True,
    },
    needs=(
        Needs(
            "flash_attn_3",
            "flash_attn_interface",
            "flash_attn_func",
            install="build MATE and its wrappers/flash-attention: https://github.com/MooreThreads/mate (not on PyPI)",
            names=("mate-flash-attention",),
            parameters=("num_splits", "return_softmax_lse"),
        ),
    ),
    title="MATE's flash attention",
)
# Vendor images carry a build of flash_attn with the interface of FlashAttention 2.  PyPI's is for CUDA.
MUSA_FA2 = Kernel(
    "musa_fa2",
    "hal.backends.fa.kernels:fa2",
    honours={"causal", "scale", "gqa", "rectangular", "varlen", "lse"},
    limits={"dtype": HALF, "head_dim": range(8, 257, 8), "v_head_dim": Same("head_dim"), "contiguous": True},
    needs=(
        Needs(
            "flash-attn",
            "flash_attn",
            "flash_attn_func",
            ">=2.1,<3",
            "use an image of Moore Threads that has its own build of flash_attn (the one on PyPI is for CUDA)",
            parameters=("window_size", "deterministic"),
        ),
    ),
    title="Moore Threads' build of flash_attn",
)


def bind_flash(call: Call) -> Run:
    from hal.flash import flash, functions

    if call.window == (-1, 0):  # the same as causal, which MATE's faster path knows by that name only
        call = call.but(window=(-1, -1), causal=True)
    dense, packed = functions("flash_attn_interface")
    return flash(call, dense, packed, deterministic=bool(call.deterministic), return_softmax_lse=bool(call.lse))
