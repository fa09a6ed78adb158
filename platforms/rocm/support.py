"""What runs on which AMD GPU: backend -> rows, the better kernel first.  This table is the support matrix.

Portable forms (sdpa.math) are added by the catalog; an architecture that stands in no row has those only.
PyTorch's flash and efficient paths are AOTriton's kernels.  The automatic order stands below the rows.
"""

from __future__ import annotations

from hal.rows import Prefer, Row

from .arch import CDNA, CDNA2, CDNA3, CDNA4, EXPERIMENTAL, OFFICIAL, RDNA, RDNA3, RDNA4, RDNA35, STRIX_HALO
from .rules import AITER, AOTRITON, BY_REQUEST, EFFICIENT, FA2_CK, FA2_TRITON, FROM_012, TO_512

IN_TREE = CDNA3 | CDNA4 | {"gfx1201"}  # what hal's Triton kernel is compiled and checked for

SUPPORT = {
    "fa": (
        Row("fa2", CDNA, cite=FA2_CK),
        Row("fa2", RDNA, lacks={"window", "dropout", "deterministic"}, tier="experimental", cite=FA2_TRITON),
    ),
    "aiter": (
        Row("aiter", CDNA3 | CDNA4, cite=AITER),
        Row("aiter", CDNA2, tier="experimental", cite="aiter aiter/jit/core.py; the README does not list it"),
        Row("aiter.triton", CDNA3 | CDNA4, cite=AITER),
        Row("aiter.triton", {"gfx1100", "gfx1151", "gfx1201"}, tier="experimental", cite=AITER),
    ),
    "torch_sdpa": (
        Row("sdpa.flash", OFFICIAL, cite=AOTRITON),
        Row("sdpa.flash", STRIX_HALO, FROM_012, cite=AOTRITON),
        Row("sdpa.flash", EXPERIMENTAL, rules=BY_REQUEST, tier="experimental", cite=AOTRITON),
        Row("sdpa.efficient", OFFICIAL, TO_512, EFFICIENT, cite=AOTRITON),
        Row("sdpa.efficient", STRIX_HALO, {**TO_512, **FROM_012}, EFFICIENT, cite=AOTRITON),
        Row("sdpa.efficient", EXPERIMENTAL, TO_512, (*BY_REQUEST, *EFFICIENT), tier="experimental", cite=AOTRITON),
    ),
    "sliding_tile_attn": (Row("sta.triton", IN_TREE, tier="in-tree"),),
    "video_sparse_attn": (Row("vsa.triton", IN_TREE, tier="in-tree"),),
    "hybrid_window_attn_h3": (Row("hybrid.triton", IN_TREE, tier="in-tree"),),
    "video_sparse_attn_h3": (Row("vsa_h3.triton", IN_TREE, tier="in-tree"),),
}

ORDER = (
    Prefer("fa", why="where flash_attn is installed; AITER is taken on request"),
    Prefer("torch_sdpa", why="runs everywhere"),
)

FAMILIES = {
    "CDNA 2": CDNA2,
    "CDNA 3": CDNA3,
    "CDNA 4": CDNA4,
    "RDNA 3": RDNA3,
    "RDNA 3.5": RDNA35,
    "RDNA 4": RDNA4,
}
