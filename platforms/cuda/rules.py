"""What the rows and the order of NVIDIA GPUs say more than once: sources, limits under a condition, what was measured."""

from __future__ import annotations

from hal.facts import HALF
from hal.rules import Between, OneOf, Rule

from .arch import SMALL

SDP = "pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
FA2 = "flash-attention README.md"
FA3 = "flash-attention hopper/flash_api.cpp"
FA4 = "flash-attention flash_attn/cute/interface.py"
HUB = "hub kernels-community/flash-attn3: capabilities 8.0 and 9.0a"
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

# cuDNN against FA4, as measured on dense calls of diffusion models.
DENSE = {"dtype": HALF, "causal": False, "mask": "none", "gqa": False, "lse": False, "ring": 1, "varlen": False}
ON_100, ON_103 = {"arch": {"sm100"}, **DENSE}, {"arch": {"sm103"}, **DENSE}
MANY, FEW, LONG = Between(128), Between(high=127), Between(16384)
MEASURED = "sglang PR#33655: cuDNN takes 0.5 to 0.8 of FA4's time on dense diffusion shapes (B200, cuDNN 9.19)"
BEHIND = "FA4 is faster for self-attention of 16384 tokens and more with head_dim 128; without it, cuDNN"
FASTEST = "the fastest exact attention there, where its package is installed"
