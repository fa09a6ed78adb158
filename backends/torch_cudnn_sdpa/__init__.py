"""PyTorch's cuDNN attention, called by its own operator: no process-wide switch is touched.

Conditions: check_cudnn_* in PyTorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

from __future__ import annotations

from pathlib import Path

from hal.backend import Backend, Kernel
from hal.facts import HALF
from hal.rules import OneOf, Pairs, Rule, Same, Versions

CUDNN = Kernel(
    "sdpa.cudnn",
    "hal.backends.torch_cudnn_sdpa.kernels:cudnn",
    layout="bhsd",
    honours={"causal", "scale", "rectangular", "grad", "compile", "lse", "gqa"}
    | {"mask.key_padding", "mask.bool", "mask.additive"},
    limits={
        "dtype": HALF,
        "head_dim": OneOf(range(8, 129, 8), 192),
        "v_head_dim": OneOf(range(8, 129, 8), Pairs("head_dim", {(192, 128)})),
        "contiguous": True,
        "cudnn": Versions(">=9.0"),
    },
    rules=(
        Rule("head_dim.192", {"head_dim": 192}, {"v_head_dim": 128, "cudnn": Versions(">=9.11")},
             note="cuDNN takes head_dim 192 with v_head_dim 128, from 9.11 on"),
        Rule("kv_len.one", {"kv_len": 1}, note="PyTorch's cuDNN path refuses a single key"),
        Rule("empty", require={"empty": False}, note="PyTorch sends calls without tokens to its math path"),
        Rule("causal.masked", {"causal": True, "masked": True}, note="PyTorch takes a mask or is_causal, not both"),
        Rule("causal.square", {"causal": True}, {"q_len": Same("kv_len")},
             note="cuDNN aligns causal calls of unequal lengths at the top left"),
    ),
    confirm="hal.backends.torch_cudnn_sdpa.kernels:confirm",
    title="PyTorch's cuDNN path",
)  # fmt: skip

BACKEND = Backend(
    "torch_cudnn_sdpa",
    kernels=(CUDNN,),
    aliases=("cudnn", "cudnn_sdpa"),
    fallback="torch_sdpa",
    tolerance={"float16": 4e-3, "bfloat16": 3e-2},
    known_bad=str(Path(__file__).parent / "known_bad.toml"),
    title="PyTorch scaled_dot_product_attention by cuDNN",
)
