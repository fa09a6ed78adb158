"""The executor: softmax attention over the kept blocks, by the kernel that fits; and the table of these kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..errors import CallError, NoKernelError, unknown
from ..sdpa import as_written, wide_dtype
from ..tensors import DTYPE_NAMES, call_of, check_arguments
from .blockmask import BlockMask

Result = tuple[Tensor, Tensor | None]
FEATURES = {
    "lse": "return_lse",
    "grad": "a gradient",
    "bias": "a bias per key",
    "gqa": "fewer key heads than query heads",
    "ragged": "blocks with fewer tokens than slots",
    "v_head_dim": "a head_dim of v that differs from q's",
}


@dataclass(frozen=True)
class Executor:
    """A kernel of the executor, and what it can do.

    ``run``: "module:function", loaded at first use, called as ``f(q, k, v, mask, scale, bias, lse) -> (out, LSE or None)``
    with q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] of any strides, ``mask`` on q's device, bias float
    [B, Hk, Sk] or None.  Rows without keys are 0 and -inf; LSE is [B, H, Sq], float32, natural.
    ``refuse``: what a block size or head_dim has against it: ``f(q, v, mask) -> text or None``.
    """

    name: str
    run: str
    features: frozenset[str]
    devices: frozenset[str] | None = None  # None: any
    dtypes: frozenset[str] | None = None
    automatic: frozenset[str] = frozenset()  # the devices on which it is chosen unasked, before the portable form
    refuse: Callable[[Tensor, Tensor, BlockMask], str | None] | None = None

    def refusal(self, q: Tensor, v: Tensor, mask: BlockMask, asked: set[str]) -> str | None:
        """Why it cannot do this, or None."""
        if self.devices is not None and q.device.type not in self.devices:
            return f"it runs on {', '.join(sorted(self.devices))}, and q is on {q.device.type}"
        if self.dtypes is not None and DTYPE_NAMES[q.dtype] not in self.dtypes:
            return f"it takes {', '.join(sorted(self.dtypes))}, and q is {DTYPE_NAMES[q.dtype]}"
        if missing := asked - self.features:
            return f"it has no {', '.join(FEATURES[m] for m in sorted(missing))}"
        return self.refuse(q, v, mask) if self.refuse else None


EXECUTORS: dict[str, Executor] = {}


def register(executor: Executor) -> None:
    """Add a kernel to the table, or replace the one of its name."""
    EXECUTORS[executor.name] = executor


FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
register(Executor("portable", "hal.sparse.portable:run", frozenset(FEATURES), dtypes=FLOATS))
register(
    Executor(
        "flex",
        "hal.sparse.flex:run",
        frozenset({"gqa", "ragged", "v_head_dim"}),
        devices=frozenset({"cpu", "cuda", "xpu"}),
        dtypes=frozenset({"float16", "bfloat16", "float32"}),
    )
)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask,
    *,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the kept blocks of ``block_mask``: out in the layout and dtype of q; with ``return_lse``, (out, LSE).

    q is [B, H, Sq, D], k [B, Hk, Sk, D] and v [B, Hk, Sk, Dv] (``layout="bshd"``: [B, S, H, D]), in the order of the mask's
    blocks; H is a multiple of Hk.  LSE is [B, H, Sq], float32 (float64 for float64), natural logarithm.
    A query without keys gives 0 and -inf.  ``scale``: None is D ** -0.5.  ``kernel``: a name of ``EXECUTORS``; None lets hal choose.
    Raises CallError for tensors and masks that do not fit, NoKernelError where the named kernel cannot do what is asked.
    """
    check_arguments(q, k, v, None, scale, 0.0, None, layout, "self", None)  # raises CallError
    call_of(q, k, v, None, False, scale, 0.0, True, None, layout, return_lse, "self")  # so does this
    if not isinstance(block_mask, BlockMask):
        raise CallError(f"block_mask is {type(block_mask).__name__}; make a hal.sparse.BlockMask with from_dense")
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = execute(q, k, v, block_mask, scale=scale, lse=return_lse, kernel=kernel)
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def execute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    lse: bool = False,
    kernel: str | None = None,
) -> Result:
    """The inner executor: (out [B, H, Sq, Dv], LSE [B, H, Sq] or None).  Tensors as in "bhsd", of agreeing shapes.

    ``bias``: float, added to the scaled scores of each key; [Sk], [B, 1, Sk] or [B, Hk, Sk], or what broadcasts to that.
    """
    _check(q, k, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if bias is not None:
        try:
            bias = bias.expand(k.shape[:3])
        except RuntimeError:
            raise CallError(f"bias has shape {tuple(bias.shape)}; it must broadcast to {tuple(k.shape[:3])}") from None
    if q.is_meta or not q.shape[0] * q.shape[1]:
        stats = q.new_empty(q.shape[:3], dtype=wide_dtype(q)) if lse else None
        return q.new_empty(*q.shape[:3], v.shape[-1]), stats
    asked = _asked(q, k, v, mask, bias, lse)
    chosen = _chosen(q, v, mask, asked, kernel)
    module, function = chosen.run.split(":")
    with as_written(q):
        result: Result = getattr(import_module(module), function)(q, k, v, mask.to(q.device), scale, bias, lse)
    return result


def _check(q: Tensor, k: Tensor, mask: BlockMask) -> None:
    if (q.shape[2], k.shape[2]) != (mask.q_len, mask.kv_len):
        raise CallError(
            f"q has {q.shape[2]} tokens and k {k.shape[2]}; the block mask was made for {mask.q_len} and {mask.kv_len}"
        )
    for name, n, full in (("batch", mask.keep.shape[0], q.shape[0]), ("heads", mask.keep.shape[1], q.shape[1])):
        if n not in (1, full):
            raise CallError(f"the block mask has {name} {n} and q {full}; allowed: {full}, or 1 for all")
    if mask.keep.is_meta and not q.is_meta:
        raise CallError("the block mask is on the meta device; its values are needed")


def _asked(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, bias: Tensor | None, lse: bool) -> set[str]:
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, bias))
    ragged = mask.kv_valid is not None
    facts: dict[str, Any] = {"lse": lse, "grad": grad, "bias": bias is not None, "ragged": ragged}
    facts |= {"gqa": q.shape[1] != k.shape[1], "v_head_dim": q.shape[-1] != v.shape[-1]}
    return {name for name, yes in facts.items() if yes}


def _chosen(q: Tensor, v: Tensor, mask: BlockMask, asked: set[str], kernel: str | None) -> Executor:
    if kernel is None:
        fitting = (e for e in EXECUTORS.values() if q.device.type in e.automatic)
        kernel = next((e.name for e in fitting if e.refusal(q, v, mask, asked) is None), "portable")
    if not isinstance(kernel, str) or kernel not in EXECUTORS:
        raise CallError(unknown("kernel", kernel, EXECUTORS))
    if refusal := EXECUTORS[kernel].refusal(q, v, mask, asked):
        raise NoKernelError(f"kernel {kernel!r} of the block-sparse executor cannot serve this: {refusal}")
    return EXECUTORS[kernel]
