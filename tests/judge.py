"""An independent checker: may this kernel run this call on this device?

A restatement in plain Python, from the documents of the kernels and of PyTorch, of what each can do.  It imports nothing of
hal, so an error in a declaration is not repeated here.  A fact that is None is unknown, and no rule that reads it is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import Version

HALF = {"float16", "bfloat16"}
FLOATS = {*HALF, "float32"}
FLASH_SIZES = {32, 64, 96, 128, 160, 192, 224, 256}

TENSOR_CORES = {
    "sm80",
    "sm86",
    "sm87",
    "sm89",
    "sm90",
    "sm100",
    "sm103",
    "sm107",
    "sm110",
    "sm120",
    "sm121",
}  # 8.0 to 12.1
BEFORE = {"sm50", "sm52", "sm53", "sm60", "sm61", "sm62", "sm70", "sm72", "sm75"}
SMALL = {"sm86", "sm89", "sm120", "sm121"}  # 99 KiB of shared memory for a block
CDNA = {"gfx90a", "gfx942", "gfx950"}
RDNA = {f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153, 1200, 1201)}


class Unknown(Exception):
    """A rule read a fact that is not known."""


class Facts:
    """Facts by attribute."""

    def __init__(self, facts: Mapping[str, Any], packages: Mapping[str, str | None]):
        self._facts, self._packages = facts, packages

    def __getattr__(self, name: str) -> Any:
        value = self._facts.get(name)
        if value is None:
            raise Unknown(name)
        return value

    # ---- versions: a pre-release of 2.12 counts as 2.12, one of a package that has had nothing else by its own place

    def from_(self, software: str, least: str) -> bool:
        return Version(Version(getattr(self, software)).base_version) >= Version(least)

    def has(self, package: str, least: str = "", below: str = "") -> bool:
        """The package is there and works, in this range of versions."""
        found = self._packages.get(package)
        if found is None:
            return False
        if Version(least or "0").is_prerelease:
            return Version(found) >= Version(least)
        version = Version(Version(found).base_version)
        return version >= Version(least or "0") and (not below or version < Version(below))

    # ---- what follows

    @property
    def square(self) -> bool:
        return bool(self.q_len == self.kv_len)

    @property
    def scores(self) -> int:
        return int(self.q_len * self.kv_len)

    @property
    def mask_reaches_it(self) -> bool:
        """One was given, or PyTorch is given one for a window or for causality from the bottom right."""
        return self.mask != "none" or self.window != (-1, -1) or (self.causal and (self.varlen or not self.square))


Rule = tuple[str, Callable[[Facts], bool]]


def only_if(condition: Callable[[Facts], bool], then: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
    return lambda f: not condition(f) or then(f)


def sizes(*allowed: int) -> Rule:
    return "head_dim", lambda f: f.head_dim in allowed


def at_most(n: int, step: int) -> Rule:
    return f"head_dim up to {n} by {step}", lambda f: 0 < f.head_dim <= n and f.head_dim % step == 0


HALF_TYPES: Rule = ("float16 or bfloat16", lambda f: f.dtype in HALF)
FLOAT_TYPES: Rule = ("float16, bfloat16 or float32", lambda f: f.dtype in FLOATS)
EQUAL: Rule = ("equal head dims", lambda f: f.head_dim == f.v_head_dim)
ROWS: Rule = ("contiguous rows", lambda f: f.q_contiguous and f.k_contiguous and f.v_contiguous)
TOKENS: Rule = ("tokens on both sides", lambda f: 0 not in [f._facts[k] for k in ("batch", "heads", "q_len", "kv_len")])
TOP_LEFT: Rule = ("causal only where square", only_if(lambda f: f.causal, lambda f: f.square and not f.varlen))
SAME_OR_192: Rule = (
    "equal head dims, or 192 with 128",
    lambda f: f.head_dim == f.v_head_dim or (f.head_dim, f.v_head_dim) == (192, 128),
)


def on(platform: str, archs: set[str]) -> Callable[[Facts], bool]:
    return lambda f: f.platform == platform and f.arch in archs


# ---- PyTorch's paths


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

# ---- packages' kernels

AMPERE, ADA, HOPPER = {"sm80", "sm86", "sm87"}, {"sm89"}, {"sm90"}


def fa4_sizes(f: Facts) -> bool:
    d, v = f.head_dim, f.v_head_dim
    if d % 8 or v % 8:
        return False
    if f.arch in {"sm100", "sm103", "sm107", "sm110"}:
        return (d == v <= 128) or (d, v) in {(192, 128), (256, 256)}
    if f.arch == "sm90":
        return (d == v <= 256) or (d, v) == (192, 128)
    return bool((d == v <= 192) or (d, v) == (192, 128))  # tiles of 99 KiB, and no more than that is known of SM80


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

# ---- what a kernel can be asked for at all

FA = {"fa2", "fa2.vllm", "fa3", "fa3.hub", "fa3.sgl", "fa4"}
ATEN = {"sdpa.cpu", "sdpa.flash", "sdpa.efficient", "sdpa.cudnn", "sdpa.fused", "sdpa.mps", "sdpa.flash_xpu"}
DOES: dict[str, set[str]] = {
    "mask": {"sdpa.cpu", "sdpa.efficient", "sdpa.cudnn", "sdpa.fused", "sdpa.mps", "ascend_fa"},
    "additive mask": {"sdpa.cpu", "sdpa.efficient", "sdpa.cudnn", "sdpa.fused", "sdpa.mps"},
    "mask_grad": {"sdpa.efficient"},
    "dropout": {"fa2", "sdpa.flash", "sdpa.efficient", "sdpa.cudnn"},
    "window": {*FA, "aiter", "musa_flash", "xpu_flash", "sdpa.cpu", "sdpa.efficient", "sdpa.fused", "sdpa.mps"},
    "varlen": {*FA, "aiter", "aiter.triton", "musa_flash", "musa_fa2", "xpu_flash", "ascend_fa"} | (ATEN - {"sdpa.cudnn"}),
    "lse": {*FA, "aiter", "aiter.triton", "musa_flash", "musa_fa2", "xpu_flash", "ascend_fa", "sdpa.cpu", "sdpa.flash", "sdpa.efficient", "sdpa.cudnn"},
    "lse_grad": {"fa4"},
    "grad": {"fa2", "fa3", "fa3.hub", "fa4", "aiter", "aiter.triton"} | ATEN,
    "compile": {"fa2", "fa3", "fa3.hub", "ascend_fa"} | ATEN,
    "deterministic": {*FA, "aiter", "aiter.triton", "musa_flash", "sdpa.cpu", "sdpa.flash", "sdpa.efficient"},
    "grouped heads": {*FA, "aiter", "aiter.triton", "musa_flash", "musa_fa2", "xpu_flash", "ascend_fa", "sdpa.cpu", "sdpa.flash"}
    | {"sdpa.cudnn", "sdpa.fused", "sdpa.mps", "sdpa.flash_xpu", "sdpa.efficient"},
}  # fmt: skip


def asked(f: Facts) -> list[str]:
    wants: list[tuple[str, Callable[[], bool]]] = [
        ("mask", lambda: f.mask != "none"),
        ("additive mask", lambda: f.mask == "additive"),
        ("mask_grad", lambda: f.mask_grad),
        ("dropout", lambda: f.dropout > 0),
        ("window", lambda: f.window != (-1, -1)),
        ("varlen", lambda: f.varlen),
        ("lse", lambda: f.ring > 1 or f.lse),
        ("lse_grad", lambda: f.grad and (f.ring > 1 or f.lse)),
        ("grad", lambda: f.grad),
        ("compile", lambda: f.compile),
        ("deterministic", lambda: f.deterministic),
        ("grouped heads", lambda: f.heads != f.kv_heads),
    ]
    out = []
    for name, wanted in wants:
        try:
            out += [name] * bool(wanted())
        except Unknown:
            continue
    return out


def violations(kernel: str, f: Facts) -> list[str]:
    """Everything that forbids this kernel to run this call, as it reaches the kernel.  Empty: it may."""
    if kernel not in TORCH_PATHS and kernel not in PACKAGES:
        return [f"{kernel} is not known to the judge"]
    out = [f"{kernel} has no {name}" for name in asked(f) if kernel != "sdpa.math" and kernel not in DOES[name]]
    for text, holds in TORCH_PATHS.get(kernel) or PACKAGES.get(kernel) or ():
        try:
            if not holds(f):
                out.append(text)
        except Unknown:
            continue
    return out


PATHS_OF = {"cpu": ("sdpa.cpu",), "cuda": ("sdpa.flash", "sdpa.efficient"), "rocm": ("sdpa.flash", "sdpa.efficient")}


def better_than_math(f: Facts) -> list[str]:
    """PyTorch's own paths that may run this call, where every fact is known and their conditions are documented."""
    return [k for k in PATHS_OF.get(f.platform, ()) if not violations(k, f)] if known(f) else []


def known(f: Facts) -> bool:
    return all(
        x is not None for k, x in f._facts.items() if k not in ("step", "layer", "aotriton", "experimental", "cudnn")
    )


# ---- which backends automatic choice may take


def automatic(f: Facts) -> set[str]:
    """The order of the seed: what may come out of it, not what is installed."""
    if f.platform in ("cpu", "mps"):
        return {"torch_sdpa"}
    if f.platform == "npu" and known(f) and f.ring == 1 and not f.lse and not violations("sdpa.fused", f):
        return {"torch_sdpa"}
    if f.platform != "cuda":
        return {"fa", "torch_sdpa"}
    if f.arch not in {"sm80", "sm86", "sm89", "sm90", "sm100", "sm103"} or f._facts["dtype"] in ("float32", "float64"):
        return {"torch_sdpa"}
    return {"fa", "torch_sdpa"} | ({"torch_cudnn_sdpa"} if f.arch in ("sm100", "sm103") and dense(f) else set())


def dense(f: Facts) -> bool:
    """Not causal, no mask, no LSE, plain heads."""
    x = f._facts
    return not x["causal"] and x["mask"] == "none" and not x["lse"] and x["heads"] == x["kv_heads"] and not x["varlen"]
