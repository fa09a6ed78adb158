"""PyTorch's scaled_dot_product_attention.  Each path that PyTorch has is a kernel, so predicting the path is resolving.

Conditions: PyTorch's own checks (aten/src/ATen/native/transformers/sdp_utils_cpp.h and cuda/sdp_utils.cpp).  sdpa.flash and
sdpa.efficient call their path's operator, and sdpa.math is written out, so each runs that path and no other.  sdpa.cpu and
sdpa.fused call F.scaled_dot_product_attention: on CPUs what is accepted goes to the flash path, and elsewhere the vendor's
code chooses.
"""

from __future__ import annotations

from pathlib import Path

from hal.backend import Backend, Kernel
from hal.facts import FLOATS, HALF
from hal.rules import Between, Mod, Rule, Same

MASKS = frozenset({"mask.key_padding", "mask.bool", "mask.additive"})
PLAIN = frozenset({"causal", "gqa", "scale", "rectangular", "grad", "compile", "graph", "varlen", "deterministic"})
BUILT = frozenset({"window"})  # honoured by building a mask
NOT_EMPTY = Rule("empty", require={"empty": False}, note="PyTorch sends calls without tokens to its math path")
LOOPED = Rule("varlen.graph", {"varlen": True, "graph": True},
              note="packed sequences run one at a time, and a graph cannot change their lengths")  # fmt: skip
# Forward, flash and efficient repeat themselves.  Backward, efficient never does, and flash not on every GPU.
ORDER = tuple(
    Rule(f"deterministic.{who}", {"deterministic": True, who: True}, note="its backward adds in no fixed order",
         fix="allow non-deterministic algorithms", citation="pytorch attention_backward.cu")
    for who in ("grad", "mask_grad")
)  # fmt: skip

CPU = Kernel(
    "sdpa.cpu",
    "hal.backends.torch_sdpa.kernels:cpu",
    layout="any",
    honours=PLAIN | MASKS | BUILT | {"lse"},  # the operator's LSE has no gradient
    limits={"dtype": FLOATS | {"float64"}, "v_head_dim": Same("head_dim"), "contiguous": True},
    rules=(NOT_EMPTY, LOOPED),
    confirm="hal.backends.torch_sdpa.kernels:confirm_cpu",
    title="PyTorch's flash attention for CPUs",
)
FLASH = Kernel(
    "sdpa.flash",
    "hal.backends.torch_sdpa.kernels:flash",
    layout="bhsd",
    honours=PLAIN | {"dropout", "lse"},
    limits={"dtype": HALF, "head_dim": range(8, 257, 8), "v_head_dim": Same("head_dim"), "contiguous": True},
    rules=(
        NOT_EMPTY,
        LOOPED,
        Rule("causal.square", {"causal": True}, {"q_len": Same("kv_len")},
             note="PyTorch's flash path takes causal calls of equal lengths only"),
        Rule("causal.varlen", {"causal": True, "varlen": True}, note="packed sequences may differ in length"),
        ORDER[0],
    ),
    confirm="hal.backends.torch_sdpa.kernels:confirm_flash",
    title="PyTorch's FlashAttention path",
)  # fmt: skip
EFFICIENT = Kernel(
    "sdpa.efficient",
    "hal.backends.torch_sdpa.kernels:efficient",
    layout="bhsd",
    honours=PLAIN - {"gqa"} | MASKS | BUILT | {"dropout", "lse", "mask_grad"},
    limits={"dtype": FLOATS, "head_dim": Mod(4), "v_head_dim": Mod(4), "contiguous": True},
    rules=(
        NOT_EMPTY,
        LOOPED,
        Rule("head_dim.half", {"dtype": HALF}, {"head_dim": Mod(8), "v_head_dim": Mod(8)},
             note="16-byte rows: half types take multiples of 8"),
        *ORDER,
    ),
    confirm="hal.backends.torch_sdpa.kernels:confirm_efficient",
    title="PyTorch's memory-efficient path",
)  # fmt: skip
FUSED = Kernel(
    "sdpa.fused",
    "hal.backends.torch_sdpa.kernels:fused",
    layout="bhsd",
    honours=PLAIN - {"deterministic"} | MASKS | BUILT,
    limits={"dtype": FLOATS, "contiguous": True},
    rules=(NOT_EMPTY, LOOPED),
    title="what the vendor has registered with PyTorch",
)
# 4 GiB of scores: more is an out-of-memory error on most cards, and the reason people see it is a silent change of path.
MATH = Kernel(
    "sdpa.math",
    "hal.backends.torch_sdpa.kernels:math",
    layout="bhsd",
    honours=PLAIN | MASKS | BUILT | {"dropout", "lse", "lse_grad", "mask_grad"},
    rules=(
        LOOPED,
        Rule("memory.math", require={"math_bytes": Between(high=4 << 30)}, effect="budget", waiver="memory.math",
             note="PyTorch's math path holds all scores, over 4 GiB here", fix="waive memory.math to allow it",
             citation="transformers PR#46960, ComfyUI PR#15135"),
    ),
    title="PyTorch's math path: the definition, in full",
)  # fmt: skip

BACKEND = Backend(
    "torch_sdpa",
    kernels=(CPU, FLASH, EFFICIENT, FUSED),
    portable=MATH,
    per_request=True,
    aliases=("sdpa", "native", "torch"),
    tolerance={"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2},
    known_bad=str(Path(__file__).parent / "known_bad.toml"),
    title="PyTorch scaled_dot_product_attention",
)
