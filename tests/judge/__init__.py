"""An independent checker: may this kernel run this call on this device?

A restatement in plain Python, from the documents of the kernels and of PyTorch, of what each can do.  It imports nothing of
hal, so an error in a declaration is not repeated here.  A fact that is None is unknown, and no rule that reads it is broken.
"""

from __future__ import annotations

from collections.abc import Callable

from .facts import Facts, Unknown
from .packages import ADA, AMPERE, HOPPER, PACKAGES
from .pytorch import TORCH_PATHS
from .sparse import SPARSE, SPARSE_DOES

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
for what, kernels in SPARSE_DOES.items():
    DOES[what] |= kernels
RULES = {**TORCH_PATHS, **PACKAGES, **SPARSE}

WANTS: tuple[tuple[str, Callable[[Facts], bool]], ...] = (
    ("mask", lambda f: f.mask != "none"),
    ("additive mask", lambda f: f.mask == "additive"),
    ("mask_grad", lambda f: f.mask_grad),
    ("dropout", lambda f: f.dropout > 0),
    ("window", lambda f: f.window != (-1, -1)),
    ("varlen", lambda f: f.varlen),
    ("lse", lambda f: f.ring > 1 or f.lse),
    ("lse_grad", lambda f: f.grad and (f.ring > 1 or f.lse)),
    ("grad", lambda f: f.grad),
    ("compile", lambda f: f.compile),
    ("deterministic", lambda f: f.deterministic),
    ("grouped heads", lambda f: f.heads != f.kv_heads),
)


def violations(kernel: str, f: Facts, strict: bool = False) -> list[str]:
    """Everything that forbids this kernel to run this call, as it reaches the kernel.  Empty: it may.

    ``strict``: what depends on an unknown fact forbids it too.
    """
    if kernel not in RULES:
        return [f"{kernel} is not known to the judge"]
    rules = [*RULES[kernel]]
    if kernel != "sdpa.math":  # the definition, which does everything
        rules += [(f"no {name}", lambda f, w=w: not w(f)) for name, w in WANTS if kernel not in DOES[name]]
    out = []
    for text, holds in rules:
        try:
            if not holds(f):
                out.append(text)
        except Unknown as fact:
            out += [f"{text}: depends on {fact}"] * strict
    return out


PATHS_OF = {"cpu": ("sdpa.cpu",), "cuda": ("sdpa.flash", "sdpa.efficient"), "rocm": ("sdpa.flash", "sdpa.efficient")}


def better_than_math(f: Facts) -> list[str]:
    """PyTorch's own paths that may surely run this call."""
    return [k for k in PATHS_OF.get(f.platform, ()) if not violations(k, f, strict=True)]


def automatic(f: Facts) -> set[str]:
    """The backends that the seed's order may take: what may come out of it, not what is installed."""
    if f.platform in ("cpu", "mps"):
        return {"torch_sdpa"}
    if f.platform == "npu":
        ring = f["ring"] != 1 or f["lse"] is not False
        return {"fa", "torch_sdpa"} if ring or violations("sdpa.fused", f, strict=True) else {"torch_sdpa"}
    if f.platform != "cuda":
        return {"fa", "torch_sdpa"}
    if f.arch not in (AMPERE | ADA | HOPPER | {"sm100", "sm103"}) - {"sm87"} or f["dtype"] in ("float32", "float64"):
        return {"torch_sdpa"}
    return {"fa", "torch_sdpa"} | ({"torch_cudnn_sdpa"} if f.arch in ("sm100", "sm103") and dense(f) else set())


def dense(f: Facts) -> bool:
    """Not causal, no mask, no LSE, plain heads."""
    return not f["causal"] and f["mask"] == "none" and not f["lse"] and f["heads"] == f["kv_heads"] and not f["varlen"]
