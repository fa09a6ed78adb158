"""From tensors and arguments to a Call, checked: what does not make one attention call is said before anything runs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .errors import CallError, unknown
from .facts import Call

DTYPE_NAMES = {
    getattr(torch, n): n for n in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
}
AXES = {"bshd": (1, 2), "bhsd": (2, 1)}  # layout -> (sequence axis, head axis)


def check_arguments(
    q: Any, k: Any, v: Any, mask: Any, scale: Any, dropout: Any, window: Any, layout: Any, role: Any, backend: Any
) -> None:
    """Raise CallError for what is of another kind than it must be; shapes and values are checked later."""
    for name, t in (("q", q), ("k", k), ("v", v), ("attn_mask", mask)):
        if not isinstance(t, Tensor) and not (t is None and name == "attn_mask"):
            raise CallError(f"{name} is {type(t).__name__}; it must be a torch.Tensor")
        if t is not None and t.layout is not torch.strided:
            raise CallError(f"{name} is {t.layout}; attention takes dense tensors: {name}.to_dense()")
    for name, x in (("scale", scale), ("dropout_p", dropout), ("window", window), ("layout", layout), ("role", role)):
        if x.__hash__ is None:
            raise CallError(f"{name} is {x!r}; write plain values: a number, a text or a tuple")
    if backend is not None and not isinstance(backend, str):
        raise CallError(f"backend is {backend!r}; it must be a backend's name")


def check_lengths(cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> None:
    """Raise CallError for lengths of packed sequences that are no tensors or no numbers."""
    for name, t in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not isinstance(t, Tensor) and not (t is None and name == "cu_seqlens_k"):
            raise CallError(f"{name} is {type(t).__name__}; it must be an int32 tensor of shape [sequences + 1]")
        if t is not None and t.is_meta:
            raise CallError(f"{name} is on the meta device; its values are needed")
    for name, n in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 0):
            raise CallError(f"{name} is {n!r}; it must be a whole number of tokens")


def known(n: Any) -> int | None:
    """A size, or None for the symbol that it is under torch.compile."""
    return n if type(n) is int else None


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    gqa: bool,
    window: Any,
    layout: str,
    lse: bool,
    role: str,
    compiling: bool = False,
) -> Call:
    """The Call of a dense attention.  Raises CallError."""
    if layout not in AXES:
        raise CallError(unknown("layout", layout, AXES))
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4:
            raise CallError(
                f"{name} has shape {tuple(t.shape)}; hal.attention takes four axes, {' '.join(layout.upper())}"
            )
    s, h = AXES[layout]
    _same_batch(q, k, v, layout)
    if not compiling and k.shape[s] != v.shape[s]:
        raise CallError(f"k has {k.shape[s]} tokens and v {v.shape[s]}; they must be equal (layout {layout})")
    common = _common(q, k, v, h, gqa, causal, scale, dropout, window, lse, role, compiling)
    if mask is not None and mask.device != q.device:
        raise CallError(f"attn_mask is on {mask.device} and q on {q.device}; move it there")
    kind, shape = mask_class(mask, q.shape[0], q.shape[h], q.shape[s], k.shape[s], q.dtype)
    return Call(
        **common,
        batch=known(q.shape[0]),
        q_len=known(q.shape[s]),
        kv_len=known(k.shape[s]),
        mask=kind,
        mask_shape=shape,
        mask_grad=mask is not None and mask.requires_grad and torch.is_grad_enabled(),
        layout=layout,
    )


def varlen_call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float | None,
    dropout: float,
    gqa: bool,
    window: Any,
    lse: bool,
    role: str,
) -> Call:
    """The Call of packed sequences [T, H, D].  Raises CallError."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 3:
            raise CallError(
                f"{name} has shape {tuple(t.shape)}; hal.attention_varlen takes packed [tokens, heads, head_dim]"
            )
    if k.shape[0] != v.shape[0]:
        raise CallError(f"k has {k.shape[0]} packed tokens and v {v.shape[0]}; they must be equal")
    for name, cu, t in (("cu_seqlens_q", cu_q, q), ("cu_seqlens_k", cu_k, k)):
        if cu.ndim != 1 or cu.dtype != torch.int32 or cu.numel() < 1:
            raise CallError(
                f"{name} is {cu.dtype} of shape {tuple(cu.shape)}; it must be int32 of shape [sequences + 1]"
            )
        lengths = cu.diff()
        if int(cu[0]) != 0 or int(cu[-1]) != t.shape[0] or bool((lengths < 0).any()):
            raise CallError(f"{name} must rise from 0 to the {t.shape[0]} packed tokens; it is {cu.tolist()[:16]}")
    if cu_q.shape != cu_k.shape:
        raise CallError(f"cu_seqlens_q tells {cu_q.numel() - 1} sequences and cu_seqlens_k {cu_k.numel() - 1}")
    for name, cu, m in (("max_seqlen_q", cu_q, max_q), ("max_seqlen_k", cu_k, max_k)):
        if cu.numel() > 1 and int(cu.diff().max()) > m:
            raise CallError(f"{name} is {m}; the longest sequence has {int(cu.diff().max())} tokens")
    common = _common(q, k, v, 1, gqa, causal, scale, dropout, window, lse, role, False)
    return Call(**common, batch=cu_q.numel() - 1, q_len=max_q, kv_len=max_k, layout="bshd", varlen=True)


def _common(
    q: Tensor, k: Tensor, v: Tensor, h: int, gqa: bool, causal: bool, scale: Any, dropout: float, window: Any,
    lse: bool, role: str, compiling: bool,
) -> dict[str, Any]:  # fmt: skip
    if not (q.dtype == k.dtype == v.dtype):
        raise CallError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; cast them to one dtype")
    if q.dtype not in DTYPE_NAMES:
        raise CallError(f"q is {q.dtype}; attention takes {', '.join(DTYPE_NAMES.values())}")
    if not (q.device == k.device == v.device):
        raise CallError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")
    if q.shape[-1] != k.shape[-1]:
        raise CallError(f"q has head_dim {q.shape[-1]} and k {k.shape[-1]}; they must be equal")
    heads, kv_heads = q.shape[h], k.shape[h]
    if kv_heads != v.shape[h]:
        raise CallError(f"k has {kv_heads} heads and v {v.shape[h]}; they must be equal")
    if heads != kv_heads:
        if not gqa:
            raise CallError(
                f"q has {heads} heads and k {kv_heads}; pass enable_gqa=True if that is meant, or check layout="
            )
        if not kv_heads or heads % kv_heads:
            raise CallError(f"{heads} query heads are no multiple of {kv_heads} key heads")
    if not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
        raise CallError(f"dropout_p is {dropout!r}; allowed: 0.0 to below 1.0")
    if role not in ("self", "cross"):
        raise CallError(unknown("role", role, ("self", "cross")))
    # head_dim and heads are a model's constants: torch.compile specialises on them, and lengths stay symbols.
    d = int(q.shape[-1])
    if not d:
        raise CallError("q has head_dim 0; allowed: 1 or more")
    # Fused kernels mask with -inf and scale afterwards: what is not positive turns the mask around, or makes it NaN.
    for name, flag in (("is_causal", causal), ("enable_gqa", gqa), ("return_lse", lse)):
        if not isinstance(flag, bool):
            raise CallError(f"{name} is {flag!r}; it must be True or False")
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale <= sys.float_info.max
    ):
        raise CallError(f"scale is {scale!r}; allowed: a positive number, or None for head_dim ** -0.5")
    default = scale is None or scale == d**-0.5
    return {
        "dtype": DTYPE_NAMES[q.dtype],
        "head_dim": d,
        "v_head_dim": int(v.shape[-1]),
        "heads": int(heads),
        "kv_heads": int(kv_heads),
        "causal": bool(causal),
        "dropout": float(dropout),
        "window": window_of(window),
        "scale": "default" if default else float(scale),  # type: ignore[arg-type]
        "q_contiguous": rows_contiguous(q),
        "k_contiguous": rows_contiguous(k),
        "v_contiguous": rows_contiguous(v),
        "role": role,
        "lse": bool(lse),
        "grad": torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compile": compiling,
        "device": q.device.index or 0,
    }


def rows_contiguous(t: Tensor) -> bool:
    return t.shape[-1] <= 1 or t.stride(-1) == 1


def window_of(window: Any) -> tuple[int, int]:
    """(left, right) in tokens; None is unlimited, one number means both sides."""
    if window is None:
        return -1, -1
    both = window if isinstance(window, tuple) else (window, window)
    if len(both) != 2 or any(type(n) is not int or not -1 <= n < 2**31 for n in both):
        raise CallError(f"window is {window!r}; allowed: a number of tokens, or (left, right) with -1 for unlimited")
    return both[0], both[1]


def _same_batch(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    if not (q.shape[0] == k.shape[0] == v.shape[0]):
        raise CallError(f"q, k and v have batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]} (layout {layout})")


def mask_class(mask: Tensor | None, b: int, h: int, q: int, k: int, dtype: torch.dtype) -> tuple[str, str]:
    """(kind, shape class) of a mask, by PyTorch's broadcasting to [B, H, Sq, Sk]; a bool [B, Sk] is key padding."""
    if mask is None:
        return "none", "none"
    if mask.dtype is not torch.bool and mask.dtype not in (dtype, torch.float32):
        fix = "mask.bool()" if not mask.is_floating_point() else f"mask.to({dtype})"
        raise CallError(f"attn_mask is {mask.dtype}; allowed: bool (True: attend) or the dtype of q; write {fix}")
    shape = four_axes(mask, b, q, k)
    letters = ""
    for letter, n, full in zip("bhqk", shape, (b, h, q, k)):
        if n != full and n != 1:
            raise CallError(
                f"attn_mask has shape {tuple(mask.shape)}; it must broadcast to [batch, heads, q_len, kv_len] = "
                f"[{b}, {h}, {q}, {k}]" + (", or be a bool [batch, kv_len]" if mask.ndim == 2 else "")
            )
        letters += letter if n != 1 or letter == "k" else "1"
    if mask.dtype is torch.bool and letters[1:3] == "11":
        return "key_padding", letters
    return "bool" if mask.dtype is torch.bool else "additive", letters


def four_axes(mask: Tensor, b: int, q: int, k: int) -> tuple[int, ...]:
    """The mask's shape with four axes."""
    shape = tuple(mask.shape)
    if mask.ndim == 2 and mask.dtype is torch.bool and shape == (b, k) and b > 1:
        if q == b:
            raise CallError(
                f"attn_mask of shape {shape} may be [q_len, kv_len] or [batch, kv_len] here; "
                "write mask[None, None] for the first, mask[:, None, None] for the second"
            )
        return b, 1, 1, k
    if mask.ndim > 4:
        raise CallError(f"attn_mask has {mask.ndim} axes; allowed: up to four, [batch, heads, q_len, kv_len]")
    return (*(1,) * (4 - mask.ndim), *shape)
