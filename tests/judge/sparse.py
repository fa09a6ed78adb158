"""What the kernels of sparse backends may run: the packages' as the documents and their own checks say, hal's Triton kernel
where it was compiled and checked, and the portable forms, which run wherever PyTorch does.

All of them are for self-attention over all tokens of a video: the same rows as queries and keys, nothing causal, no ring.
They read the denoising step, the layer and the grid at each call, so no graph may hold them.
"""

from __future__ import annotations

from .facts import EQUAL, FLOATS, HALF_TYPES, TENSOR_CORES, TOKENS, Facts, Rule, at_most, on, sizes
from .packages import ADA, AMPERE, FA3, HOPPER, fa4_build

SPARSE_DOES: dict[str, set[str]] = {
    "mask": {"sta.triton", "sta.portable"},
    "varlen": {"vsa_h3.triton", "vsa_h3.portable"}
    | {"hybrid.fa3", "hybrid.fa3.hub", "hybrid.fa3.sgl", "hybrid.fa4", "hybrid.triton", "hybrid.portable"},
    "lse": {"sta.triton", "sta.portable", "vmoba.portable"},
    "lse_grad": {"sta.portable", "vmoba.portable"},
    "grad": {"sta.portable", "vsa.portable", "vsa_h3.portable", "hybrid.portable", "vmoba.portable"},
    "grouped heads": {"sta.triton", "vsa.triton", "vsa_h3.triton", "hybrid.triton"}
    | {"sta.portable", "vsa.portable", "vsa_h3.portable", "hybrid.portable", "vmoba.portable"},
}


def checked(f: Facts) -> bool:
    """Chips that hal's block-sparse Triton kernel was compiled and checked for."""
    nvidia = {"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"}
    return on("cuda", nvidia)(f) or on("rocm", {"gfx942", "gfx950", "gfx1201"})(f)


BFLOAT16: Rule = ("bfloat16", lambda f: f.dtype == "bfloat16")
NO_SCALE: Rule = ("its own scale", lambda f: f.scale == "default")

ALL: tuple[Rule, ...] = (
    ("self-attention", lambda f: f.role == "self"), ("as many queries as keys", lambda f: f.square),
    ("nothing causal", lambda f: not f.causal), ("no ring", lambda f: f.ring == 1), ("no graph", lambda f: not f.graph),
)  # fmt: skip
STA: tuple[Rule, ...] = (*ALL, ("a strategy is for all heads", lambda f: f.ulysses == 1))
PADDING: Rule = ("no mask but key padding", lambda f: f.mask in {"none", "key_padding"})
PACKED: tuple[Rule, ...] = (*ALL, ("keys of the same rows", lambda f: not f.keys_dropped))

BY_64: tuple[Rule, ...] = (BFLOAT16, EQUAL, sizes(64, 128), TOKENS)
STA_H100: tuple[Rule, ...] = (*STA, *BY_64, NO_SCALE, ("Hopper", on("cuda", HOPPER)))
VSA: tuple[Rule, ...] = (*ALL, *BY_64, NO_SCALE, ("CUDA from 8.0", on("cuda", TENSOR_CORES)))
VMOBA: tuple[Rule, ...] = (
    *ALL, HALF_TYPES, EQUAL, at_most(256, 8), TOKENS, NO_SCALE,
    ("FlashAttention 2's chips", on("cuda", AMPERE | ADA | HOPPER)),
    ("flash_attn 2.6 to 2", lambda f: f.has("flash_attn", "2.6", "3")),
)  # fmt: skip
HYBRID: tuple[Rule, ...] = (*PACKED, *BY_64)

TRITON: tuple[Rule, ...] = (
    ("a chip it was checked for", checked), ("Triton", lambda f: f.has("triton")), HALF_TYPES, EQUAL, sizes(64, 128),
)  # fmt: skip
PORTABLE: tuple[Rule, ...] = (("a float dtype", lambda f: f.dtype in FLOATS | {"float64"}),)

SPARSE: dict[str, tuple[Rule, ...]] = {
    "sta": (*STA_H100, ("st_attn", lambda f: f.has("st_attn"))),
    "sta.fastvideo": (*STA_H100, ("fastvideo-kernel", lambda f: f.has("fastvideo_kernel"))),
    "sta.triton": (*STA, *TRITON, PADDING),
    "sta.portable": (*STA, *PORTABLE, PADDING),
    "vsa": (*VSA, ("vsa", lambda f: f.has("vsa"))),
    "vsa.fastvideo": (*VSA, ("fastvideo-kernel", lambda f: f.has("fastvideo_kernel"))),
    "vsa.triton": (*ALL, *TRITON),
    "vsa.portable": (*ALL, *PORTABLE),
    "vsa_h3.triton": (*PACKED, *TRITON),
    "vsa_h3.portable": (*PACKED, *PORTABLE),
    "hybrid.fa3": (*HYBRID, *FA3, ("flash_attn_3", lambda f: f.has("flash_attn_3", "3.0.0b1"))),
    "hybrid.fa3.hub": (*HYBRID, *FA3, ("kernels", lambda f: f.has("kernels", "0.16"))),
    "hybrid.fa3.sgl": (*HYBRID, *FA3, ("sgl_kernel", lambda f: f.has("sgl_kernel"))),
    "hybrid.fa4": (*HYBRID, ("SM100, 103 or 120", on("cuda", {"sm100", "sm103", "sm120"})), ("its build", fa4_build)),
    "hybrid.triton": (*PACKED, *TRITON),
    "hybrid.portable": (*PACKED, *PORTABLE, EQUAL),
    "vmoba": (*VMOBA, ("kernel", lambda f: f.has("kernel"))),
    "vmoba.fastvideo": (*VMOBA, ("fastvideo-kernel", lambda f: f.has("fastvideo_kernel"))),
    "vmoba.portable": (*ALL, *PORTABLE),
}  # fmt: skip
