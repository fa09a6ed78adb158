"""What the packages' kernels may run, as their documentation and sources say."""

from __future__ import annotations

from packaging.version import Version

from .facts import (
    CDNA,
    EQUAL,
    FLASH_SIZES,
    HALF_TYPES,
    RDNA,
    ROWS,
    SAME_OR_192,
    SMALL,
    TENSOR_CORES,
    Facts,
    Rule,
    at_most,
    on,
    only_if,
    sizes,
)

AMPERE, ADA, HOPPER = {"sm80", "sm86", "sm87"}, {"sm89"}, {"sm90"}


def fa4_sizes(f: Facts) -> bool:
    d, v = f.head_dim, f.v_head_dim
    if d % 8 or v % 8:
        return False
    if f.arch in {"sm100", "sm103", "sm107", "sm110"}:
        return (d == v <= 128) or (d, v) in {(192, 128), (256, 256)}
    return bool((d == v <= (192 if f.arch in SMALL else 256)) or (d, v) == (192, 128))


def fa4_build(f: Facts) -> bool:
    least = "4.0.0b5"
    if f.arch in {"sm103", "sm110"}:
        least = "4.0.0b15"
    if f.arch in {"sm100", "sm103", "sm110"} and f.head_dim == 256:
        least = max(least, "4.0.0b11", key=Version)
    if f.arch in {"sm100", "sm103", "sm110"} and f.head_dim < 32:
        least = max(least, "4.0.0b16", key=Version)
    return f.has("flash_attn_4", least)


def fa2_window(f: Facts) -> bool:
    """It reads an unlimited right side as kv_len tokens: another window where there are more queries than keys."""
    return f.window == (-1, -1) or f.causal or f.square


FA3: tuple[Rule, ...] = (
    ("Ampere, Ada or Hopper", on("cuda", {"sm80", "sm86", "sm89", "sm90"})), HALF_TYPES, sizes(*FLASH_SIZES), SAME_OR_192,
    ("unequal head dims on Hopper", only_if(lambda f: f.head_dim != f.v_head_dim, lambda f: f.arch == "sm90")),
)  # fmt: skip

PACKAGES: dict[str, tuple[Rule, ...]] = {
    "fa2": (
        ("Ampere, Ada, Hopper or AMD", lambda f: (f.platform == "rocm" and f.arch in CDNA | RDNA) or on("cuda", AMPERE | ADA | HOPPER)(f)),
        ("flash_attn 2.6 to 2", lambda f: f.has("flash_attn", "2.6", "3")),
        HALF_TYPES, EQUAL, sizes(*FLASH_SIZES), ("its windows", fa2_window),
        ("no dropout in the backward above 192 in 99 KiB", lambda f: not (f.arch in SMALL and f.head_dim > 192 and f.grad and f.dropout)),
        ("registered from 2.7 on", only_if(lambda f: f.compile, lambda f: f.has("flash_attn", "2.7", "3"))),
    ),
    "fa2.vllm": (
        ("Ampere, Ada or Hopper", on("cuda", AMPERE | ADA | HOPPER)), ("vllm", lambda f: f.has("vllm_flash_attn")),
        HALF_TYPES, EQUAL, sizes(*FLASH_SIZES - {224}), ("its windows", fa2_window),
    ),
    "fa3": (
        *FA3, ("flash_attn_3", lambda f: f.has("flash_attn_3", "3.0.0b1")),
        ("no deterministic backward above 192", lambda f: not (f.deterministic and f.grad and f.head_dim > 192)),
        ("registered from 3.0.0 on, not in its betas", only_if(lambda f: f.compile, lambda f: f.has("flash_attn_3", "3.0.0rc0"))),
    ),
    "fa3.hub": (
        *FA3, ("kernels", lambda f: f.has("kernels", "0.16")),
        ("no deterministic backward above 192", lambda f: not (f.deterministic and f.grad and f.head_dim > 192)),
    ),
    "fa3.sgl": (*FA3, ("sgl_kernel", lambda f: f.has("sgl_kernel"))),
    "fa4": (
        ("8.0, 8.6, 8.9, 9.0, 10, 11, 12", on("cuda", TENSOR_CORES - {"sm87"})), HALF_TYPES,
        ("its sizes", fa4_sizes), ("its build", fa4_build),
        ("no backward on SM8x", lambda f: not (f.grad and f.arch in AMPERE | ADA)),
        ("no deterministic backward on SM12x", lambda f: not (f.grad and f.deterministic and f.arch in {"sm120", "sm121"})),
    ),
    "aiter": (
        ("CDNA 2 to 4", on("rocm", CDNA)), ("amd-aiter", lambda f: f.has("amd_aiter")), HALF_TYPES, SAME_OR_192, at_most(256, 8),
    ),
    "aiter.triton": (
        ("CDNA 3 and 4, and three of RDNA", on("rocm", {"gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201"})),
        ("amd-aiter", lambda f: f.has("amd_aiter")), HALF_TYPES, SAME_OR_192, at_most(256, 8),
        ("64 KiB of LDS", lambda f: f.arch in CDNA or f.head_dim <= 128),
    ),
    "musa_flash": (
        ("MP31", on("musa", {"mp31"})), ("MATE", lambda f: f.has("flash_attn_3")), HALF_TYPES, SAME_OR_192, at_most(512, 1), ROWS,
    ),
    "musa_fa2": (
        ("MP22 or MP31", on("musa", {"mp22", "mp31"})), ("flash_attn 2", lambda f: f.has("flash_attn", "2.1", "3")),
        HALF_TYPES, EQUAL, at_most(256, 8), ROWS,
    ),
    "ascend_fa": (
        ("A2 or A3", on("npu", {"ascend910b", "ascend910c"})), ("torch_npu", lambda f: f.has("torch_npu")),
        HALF_TYPES, EQUAL, at_most(512, 16), ROWS,
        ("up to 256 heads, 64 a key head", lambda f: f.heads <= 256 and f.heads <= 64 * f.kv_heads),
        ("masks of full rows", lambda f: f.mask_shape in {"none", "b1qk", "11qk"}),
        ("vllm-ascend#15503: one query with a mask", lambda f: not (f.q_len <= 1 and f.mask != "none" and f.kv_len > 512)),
    ),
    "xpu_flash": (
        ("PVC or BMG", on("xpu", {"pvc", "bmg"})), ("sgl-kernel", lambda f: f.has("sgl_kernel")),
        HALF_TYPES, EQUAL, sizes(64, 96, 128, 192, 256), ROWS,
    ),
}  # fmt: skip
