"""What PyTorch's attention paths may run: its own checks, and the defects that people have reported."""

from __future__ import annotations

from .facts import (
    BEFORE,
    CDNA,
    EQUAL,
    FLOAT_TYPES,
    FLOATS,
    HALF,
    HALF_TYPES,
    RDNA,
    ROWS,
    SMALL,
    TENSOR_CORES,
    TOKENS,
    TOP_LEFT,
    Facts,
    Rule,
    at_most,
    on,
    only_if,
)


def flash_gradient(f: Facts) -> bool:
    """Not 193 to 224 in 99 KiB of shared memory, and above that only without dropout."""
    if f.arch not in SMALL or f.head_dim <= 192:
        return True
    return bool(f.head_dim > 224 and f.dropout == 0)


def aotriton(f: Facts) -> bool:
    """PyTorch for ROCm: the chips that AOTriton has, the experimental ones by an environment variable."""
    if f.arch in CDNA | {"gfx1100", "gfx1201"}:
        return True
    if f.arch == "gfx1151" and f.experimental != "1":
        return f.from_("aotriton", "0.12")
    later = f.arch in {"gfx1102", "gfx1103", "gfx1152", "gfx1153"}
    return f.arch in RDNA and f.experimental == "1" and (not later or f.from_("torch", "2.11"))


AOTRITON: tuple[Rule, ...] = (
    ("a chip that AOTriton serves", only_if(lambda f: f.platform == "rocm", aotriton)),
    ("natural LSE from torch 2.9 on", only_if(lambda f: f.platform == "rocm" and f.lse, lambda f: f.from_("torch", "2.9"))),
    ("gfx1100 is inaccurate in torch 2.9 and 2.10",
     only_if(on("rocm", {"gfx1100"}), lambda f: f.from_("torch", "2.11") or not f.from_("torch", "2.9"))),
)  # fmt: skip


def efficient_dtype(f: Facts) -> bool:
    return f.dtype in FLOATS and (f.dtype != "bfloat16" or f.platform == "rocm" or f.arch not in BEFORE)


def efficient_rows(f: Facts) -> bool:
    """16 bytes where tensor cores are used, else any number."""
    if f.dtype in HALF:
        step = 1 if f.arch in BEFORE - {"sm70", "sm72", "sm75"} else 8
    else:
        step = 1 if f.arch in BEFORE else 4
    return f.head_dim % step == 0 and f.v_head_dim % step == 0


def cudnn_sizes(f: Facts) -> bool:
    d, v = f.head_dim, f.v_head_dim
    hopper_on = f.arch in {"sm90", "sm100", "sm103", "sm107"}
    if (d, v) == (192, 128):
        return hopper_on and f.from_("cudnn", "9.11")
    if max(d, v) > 128:
        return (
            d % 8 == v % 8 == 0
            and max(d, v) <= 256
            and hopper_on
            and f.from_("torch", "2.14")
            and f.from_("cudnn", "9.22.1")
        )
    return bool(d % 8 == v % 8 == 0)


CUDNN_DEFECTS: tuple[Rule, ...] = (
    ("pytorch#193893: 8 key heads", only_if(
        lambda f: f.arch == "sm100" and f.kv_heads < 8,
        lambda f: not (f.from_("torch", "2.11") and not f.from_("torch", "2.14") and f.from_("cudnn", "9.19") and not f.from_("cudnn", "9.21")))),
    ("pytorch#196678: NaN gradients", only_if(
        lambda f: f.arch == "sm90" and f.mask != "none" and f.grad and f.kv_len % 128 == 64 and f.from_("torch", "2.11"),
        lambda f: f.from_("cudnn", "9.26"))),
    ("cudnn-frontend#1072: one query has no gradient", lambda f: not (f.grad and f.q_len == 1)),
    ("pytorch#169849: multiples of 128 before 9.15.1", only_if(
        lambda f: not f.from_("cudnn", "9.15.1"), lambda f: f.q_len % 128 == 0 and f.kv_len % 128 == 0)),
)  # fmt: skip

TORCH_PATHS: dict[str, tuple[Rule, ...]] = {
    "sdpa.cpu": (
        ("a CPU", lambda f: f.platform == "cpu"), ("a float dtype", lambda f: f.dtype in FLOATS | {"float64"}), EQUAL, ROWS, TOKENS,
    ),
    "sdpa.flash": (
        ("CUDA from 8.0, or ROCm", lambda f: f.platform == "rocm" or on("cuda", TENSOR_CORES)(f)),
        HALF_TYPES, EQUAL, ROWS, TOKENS, TOP_LEFT, *AOTRITON,
        at_most(256, 8),
        ("no order in the backward", lambda f: not (f.deterministic and f.grad)),
        ("gradient by shared memory", only_if(lambda f: f.platform == "cuda" and f.grad, flash_gradient)),
    ),
    "sdpa.efficient": (
        ("CUDA or ROCm", lambda f: f.platform == "rocm" or on("cuda", TENSOR_CORES | BEFORE)(f)),
        ("dtype of the chip", efficient_dtype), ("16-byte rows", efficient_rows), ROWS, TOKENS, *AOTRITON,
        ("no order in the backward", lambda f: not (f.deterministic and (f.grad or f.mask_grad))),
        ("equal heads before torch 2.14", only_if(lambda f: f.heads != f.kv_heads, lambda f: f.platform == "cuda" and f.from_("torch", "2.14"))),
        ("ROCm: AOTriton's sizes before torch 2.13",
         only_if(lambda f: f.platform == "rocm" and not f.from_("torch", "2.13"), lambda f: f.head_dim == f.v_head_dim <= 256)),
        ("ROCm: up to 512, 256 on gfx11", only_if(
            lambda f: f.platform == "rocm", lambda f: f.head_dim <= (256 if f.arch.startswith("gfx11") else 512))),
        ("pytorch#162588: wrong rows past 2^32 scores with a mask", only_if(
            lambda f: f.platform == "cuda" and f.mask_reaches_it and f.scores > 2**32, lambda f: f.from_("torch", "2.14"))),
        ("pytorch#147585: no gradient past 2^31 scores with a mask", only_if(
            lambda f: f.platform == "cuda" and f.mask_reaches_it and f.grad and f.scores > 2**31, lambda f: f.from_("torch", "2.14"))),
    ),
    "sdpa.cudnn": (
        ("CUDA from 8.0", on("cuda", TENSOR_CORES - {"sm107"})), ("cuDNN 9", lambda f: f.from_("cudnn", "9.0")),
        HALF_TYPES, ROWS, TOKENS, ("its sizes", cudnn_sizes), ("two keys", lambda f: f.kv_len != 1), TOP_LEFT,
        ("a mask or causality", lambda f: not (f.causal and f.mask != "none")), *CUDNN_DEFECTS,
    ),
    "sdpa.fused": (
        ("a vendor's own PyTorch", lambda f: f.platform in ("xpu", "npu", "musa")), ROWS, TOKENS,
        ("XPU: oneDNN has no backward", only_if(lambda f: f.platform == "xpu", lambda f: not f.grad)),
        ("XPU: sizes", only_if(lambda f: f.platform == "xpu", lambda f: max(f.head_dim, f.v_head_dim) <= 576)),
        ("XPU: dtypes", only_if(lambda f: f.platform == "xpu", lambda f: f.dtype in FLOATS)),
        ("pytorch#195319: head_dim 64 with a mask", only_if(
            lambda f: on("xpu", {"acm", "mtl", "arl"})(f) and f.mask_reaches_it and f.head_dim == 64 and f.q_len >= 17 and f.kv_len >= 129,
            lambda f: not f.from_("torch", "2.13") or f.from_("torch", "2.15"))),
        ("NPU: chips", only_if(lambda f: f.platform == "npu", lambda f: f.arch in {"ascend910b", "ascend910c", "ascend950"})),
        ("NPU: masks of full rows", only_if(lambda f: f.platform == "npu", lambda f: f.mask_shape in {"none", "b1qk", "bhqk", "11qk"})),
        ("MUSA: chips", only_if(lambda f: f.platform == "musa", lambda f: f.arch in {"mp22", "mp31"})),
        ("MUSA: half types", only_if(lambda f: f.platform == "musa", lambda f: f.dtype in HALF)),
        ("MUSA: sizes", only_if(lambda f: f.platform == "musa", lambda f: max(f.head_dim, f.v_head_dim) <= 192)),
    ),
    "sdpa.flash_xpu": (
        ("chips of SYCL-TLA", on("xpu", {"pvc", "bmg"})), HALF_TYPES, EQUAL, ROWS, TOKENS, TOP_LEFT,
        ("torch 2.10, with gradients 2.11", lambda f: f.from_("torch", "2.11" if f.grad else "2.10")),
        ("up to 192 before torch 2.14, 256 after", lambda f: f.head_dim <= (256 if f.from_("torch", "2.14") else 192)),
    ),
    "sdpa.mps": (
        ("an Apple GPU", lambda f: f.platform == "mps"), FLOAT_TYPES, ROWS, TOKENS,
        ("pytorch#176767: equal head dims before torch 2.12", lambda f: f.head_dim == f.v_head_dim or f.from_("torch", "2.12")),
        ("PR#169222: few queries before torch 2.10", only_if(
            lambda f: not f.from_("torch", "2.10") and f.q_len <= 8 and not f.causal, lambda f: f.kv_len % 32 == 0 or f.head_dim not in {64, 96, 128})),
    ),
    "sdpa.math": (),
}  # fmt: skip
