"""What runs on which NVIDIA GPU: backend -> rows, the better kernel first.  This table is the support matrix.

Portable forms (sdpa.math) are added by the catalog; an architecture that stands in no row has those only.
"""

from __future__ import annotations

from hal.facts import HALF
from hal.rows import Prefer, Row
from hal.rules import Between, Not, OneOf, Rule, Same

OLDER = frozenset({"sm50", "sm52", "sm53", "sm60", "sm61", "sm62"})  # Maxwell and Pascal
VOLTA = frozenset({"sm70", "sm72"})
TURING = frozenset({"sm75"})
AMPERE = frozenset({"sm80", "sm86"})
ORIN = frozenset({"sm87"})
ADA = frozenset({"sm89"})
HOPPER = frozenset({"sm90"})
BLACKWELL = frozenset({"sm100", "sm103"})
SM107 = frozenset({"sm107"})
THOR = frozenset({"sm110"})
SM12X = frozenset({"sm120", "sm121"})  # GeForce RTX 50, RTX PRO, DGX Spark
FROM_80 = AMPERE | ORIN | ADA | HOPPER | BLACKWELL | SM107 | THOR | SM12X
SMALL = frozenset({"sm86", "sm89"}) | SM12X  # 99 KiB of shared memory for one block

SDP = "pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
FA2 = "flash-attention README.md"
FA3 = "flash-attention hopper/flash_api.cpp"
FA4 = "flash-attention flash_attn/cute/interface.py"
SGL = "sglang sgl-kernel/python/sgl_kernel/flash_attn.py"

FLASH_BACKWARD = (
    Rule(
        "backward.head_dim",
        {"arch": SMALL, "grad": True, "head_dim": range(193, 225)},
        note="with 99 KiB of shared memory, PyTorch's flash path has no gradient for head_dim 193 to 224",
        citation=SDP,
    ),
    Rule(
        "backward.dropout",
        {"arch": SMALL, "grad": True, "head_dim": Between(225)},
        {"dropout": 0.0},
        note="with 99 KiB of shared memory, PyTorch's flash path has no gradient above head_dim 224 with dropout",
        citation=SDP,
    ),
)
FA4_TILES = (
    Rule(
        "shared_memory",
        {"head_dim": Between(193)},
        {"shared_memory": Between(131072)},
        note="FA4's tiles for head_dim above 192 need 128 KiB of shared memory",
        citation="flash-attention#2750",
    ),
)
FA4_192 = (
    Rule("head_dim.192", {"head_dim": 192}, {"v_head_dim": 128}, note="here with v_head_dim 128 only", citation=FA4),
)
FA4_SIZES = {"head_dim": OneOf(range(8, 129, 8), frozenset({192, 256}))}

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
        Row("fa3.hub", AMPERE | ADA | HOPPER, cite="hub kernels-community/flash-attn3: capabilities 8.0 and 9.0a"),
        Row("fa4", AMPERE | ADA, rules=FA4_TILES, lacks={"grad", "lse_grad"}, cite=FA4),
        Row("fa4", SM12X, rules=FA4_TILES, cite=FA4),
    ),
    "torch_sdpa": (
        Row("sdpa.flash", FROM_80, rules=FLASH_BACKWARD, cite=SDP),
        Row("sdpa.efficient", FROM_80, cite=SDP),
        Row("sdpa.efficient", OLDER | VOLTA | TURING, {"dtype": {"float16", "float32"}}, cite=SDP),
    ),
}

# cuDNN against FA4, as measured on dense calls of diffusion models.
DENSE = {"dtype": HALF, "causal": False, "mask": "none", "gqa": False, "lse": False, "ring": 1, "varlen": False}
ON_100, ON_103 = {"arch": {"sm100"}, **DENSE}, {"arch": {"sm103"}, **DENSE}
MANY, FEW, LONG = Between(128), Between(high=127), Between(16384)
MEASURED = "sglang PR#33655: cuDNN takes 0.5 to 0.8 of FA4's time on dense diffusion shapes (B200, cuDNN 9.19)"
BEHIND = "FA4 is faster for self-attention of 16384 tokens and more with head_dim 128; without it, cuDNN"
FASTEST = "the fastest exact attention there, where its package is installed"

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
