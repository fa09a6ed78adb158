"""What runs on which NVIDIA GPU: backend -> rows, the better kernel first.  This table is the support matrix.

Portable forms (sdpa.math) are added by the catalog; an architecture that stands in no row has those only.  The
automatic order stands below the rows; what both share, in rules.py.
"""

from __future__ import annotations

from hal.rows import Prefer, Row
from hal.rules import Between, Not, Same

from .arch import ADA, AMPERE, BLACKWELL, FROM_80, HOPPER, OLDER, ORIN, SM12X, SM107, THOR, TURING, VOLTA
from .rules import (
    BEHIND,
    FA2,
    FA3,
    FA4,
    FA4_192,
    FA4_SIZES,
    FA4_TILES,
    FASTEST,
    FEW,
    FLASH_BACKWARD,
    HUB,
    LONG,
    MANY,
    MEASURED,
    ON_100,
    ON_103,
    SDP,
    SGL,
)

IN_TREE = AMPERE | ADA | HOPPER | BLACKWELL | SM12X  # what hal's Triton kernel is compiled and checked for
STA = "FastVideo fastvideo-kernel st_attn_h100.cu: SM90 alone"
VSA = "FastVideo csrc/attn/vsa: ThunderKittens on SM90, Triton elsewhere"

SUPPORT = {
    "torch_cudnn_sdpa": (
        Row("sdpa.cudnn", HOPPER | BLACKWELL, cite=SDP),
        Row("sdpa.cudnn", AMPERE | ORIN | ADA | THOR | SM12X, {"head_dim": range(8, 129, 8)}, cite=SDP),
    ),
    "fa": (
        Row("fa3", HOPPER, cite=FA3),
        Row("fa3.sgl", HOPPER, cite=SGL),
        Row("fa4", BLACKWELL | SM107 | THOR, FA4_SIZES, FA4_192, cite=FA4),
        Row("fa4", HOPPER, cite=FA4),
        Row("fa2", AMPERE | ADA | HOPPER, cite=FA2),
        Row("fa2.vllm", AMPERE | ADA | HOPPER, cite=FA2),
        Row("fa2", ORIN, tier="experimental", cite="flash-attention#844: wheels for Jetson only"),
        Row("fa3", AMPERE | ADA, {"v_head_dim": Same("head_dim")}, cite=FA3),
        Row("fa3.sgl", AMPERE | ADA, {"v_head_dim": Same("head_dim")}, cite=SGL),
        Row("fa3.hub", HOPPER, cite=HUB),
        Row("fa3.hub", AMPERE | ADA, {"v_head_dim": Same("head_dim")}, cite=HUB),
        Row("fa4", AMPERE | ADA, rules=FA4_TILES, lacks={"grad", "lse_grad"}, cite=FA4),
        Row("fa4", SM12X, rules=FA4_TILES, cite=FA4),
    ),
    "torch_sdpa": (
        Row("sdpa.flash", FROM_80, rules=FLASH_BACKWARD, cite=SDP),
        Row("sdpa.efficient", FROM_80, cite=SDP),
        Row("sdpa.efficient", OLDER | VOLTA | TURING, {"dtype": {"float16", "float32"}}, cite=SDP),
    ),
    "sliding_tile_attn": (
        Row("sta", HOPPER, cite=STA),
        Row("sta.fastvideo", HOPPER, cite=STA),
        Row("sta.triton", IN_TREE, tier="in-tree"),
    ),
    "video_sparse_attn": (
        Row("vsa", FROM_80, cite=VSA),
        Row("vsa.fastvideo", FROM_80, cite=VSA),
        Row("vsa.triton", IN_TREE, tier="in-tree"),
    ),
    "video_sparse_attn_h3": (
        Row("vsa_h3.triton", HOPPER | BLACKWELL, tier="in-tree", cite="the document: SM90, SM100, SM103"),
        Row("vsa_h3.triton", IN_TREE - HOPPER - BLACKWELL, tier="in-tree"),
    ),
    "hybrid_window_attn_h3": (
        Row("hybrid.fa3", HOPPER, cite=FA3),
        Row("hybrid.fa3.sgl", HOPPER, cite=SGL),
        Row("hybrid.fa4", BLACKWELL | {"sm120"}, cite=FA4),
        Row("hybrid.fa3", AMPERE | ADA, cite=FA3),
        Row("hybrid.fa3.sgl", AMPERE | ADA, cite=SGL),
        Row("hybrid.fa3.hub", HOPPER | AMPERE | ADA, cite=HUB),
        Row("hybrid.triton", IN_TREE, tier="in-tree"),
    ),
    "vmoba_attn": (
        Row("vmoba", AMPERE | ADA | HOPPER, cite=FA2),
        Row("vmoba.fastvideo", AMPERE | ADA | HOPPER, cite=FA2),
    ),
}

ORDER = (
    Prefer("torch_cudnn_sdpa", {**ON_100, "q_len": MANY, "kv_len": MANY}, MEASURED),
    Prefer("torch_cudnn_sdpa", {**ON_100, "q_len": FEW, "kv_len": FEW}, MEASURED),
    Prefer("torch_cudnn_sdpa", {**ON_103, "q_len": MANY, "kv_len": MANY, "head_dim": Not(128)}, MEASURED),
    Prefer("torch_cudnn_sdpa", {**ON_103, "q_len": Between(128, 16383), "kv_len": MANY}, MEASURED),
    Prefer("torch_cudnn_sdpa", {**ON_103, "q_len": LONG, "kv_len": MANY, "rectangular": True}, MEASURED),
    Prefer("torch_cudnn_sdpa", {**ON_103, "q_len": FEW, "kv_len": FEW}, MEASURED),
    Prefer("fa", {"arch": AMPERE | ADA | HOPPER | BLACKWELL}, FASTEST),
    Prefer("torch_cudnn_sdpa", {**ON_103, "q_len": LONG, "kv_len": LONG}, BEHIND),
    Prefer("torch_sdpa", why="runs everywhere; first on SM12x, below SM80 and for float32"),
)

FAMILIES = {
    "Maxwell and Pascal": OLDER,
    "Volta": VOLTA,
    "Turing": TURING,
    "Ampere": AMPERE | ORIN,
    "Ada": ADA,
    "Hopper": HOPPER,
    "Blackwell": BLACKWELL | SM107 | THOR | SM12X,
}
