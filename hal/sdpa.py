"""What kernels with PyTorch's interface share: tensors are [B, H, S, D], masks have four axes, causality is square.

It imports torch, so declarations do not import it: bind functions do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .facts import Call
from .fittings import Run, Varlen
from .masks import built_mask, rows_without_keys

Dense = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Any]  # (q, k, v, mask, causal) -> out or (out, LSE)


def assembled(call: Call, dense: Dense, *, empty_rows: bool = False) -> Run:
    """A run from a dense function that knows only masks and square causality: lengths, windows, packing, empty rows.

    ``empty_rows``: it gives 0 for a row without keys, and no NaN in a gradient.  Otherwise it is shown no such row.
    """
    causal, window, lse = bool(call.causal), call.window or (-1, -1), bool(call.lse)

    def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        if mask is not None and mask.shape[3] != k.shape[2]:  # operators do not broadcast the keys' axis
            mask = mask.expand(*mask.shape[:3], k.shape[2]).contiguous()
        built, none = mask, None
        square = causal and window == (-1, -1) and mask is None and bool(q.shape[2] == k.shape[2])  # may be a symbol
        if not square and (causal or window != (-1, -1)):
            built = built_mask(q, k, causal, window, mask)
        if built is not None and (lse or not empty_rows) and (mask is not None or bool(q.shape[2] > k.shape[2])):
            none = rows_without_keys(built)
            if not empty_rows:
                fill = none[..., None]
                built = built | fill if built.dtype is torch.bool else built.masked_fill(fill, 0.0)
        result = dense(q, k, v, built, square)
        out = result[0] if lse else result
        if none is not None and not empty_rows:
            out = out.masked_fill(none[..., None], 0.0)
        if not lse:
            return out
        stats = result[1].contiguous()
        return out, stats if none is None else stats.masked_fill(none, -torch.inf)

    if not call.varlen:
        return lambda q, k, v, mask, varlen: one(q, k, v, mask)
    return lambda q, k, v, mask, varlen: looped(one, q, k, v, varlen, lse)


def looped(one: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, lse: bool) -> Any:
    """Packed sequences one at a time.  Reading their lengths waits for the device, so no graph can hold it."""
    outs, stats = [], []
    wide = wide_dtype(q)
    cu_q, cu_k = varlen.cu_q.tolist(), varlen.cu_k.tolist()
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        if a == b:
            continue
        if c == d:
            out = q.new_zeros(b - a, q.shape[1], v.shape[2])
            stat: Any = torch.full((q.shape[1], b - a), -torch.inf, dtype=wide, device=q.device)
        else:
            got = one(*(t[s:e].transpose(0, 1)[None] for t, s, e in ((q, a, b), (k, c, d), (v, c, d))), None)
            out, stat = (got[0], got[1][0]) if lse else (got, None)
            out = out[0].transpose(0, 1)
        outs.append(out)
        stats.append(stat)
    out = torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], v.shape[2])
    if not lse:
        return out
    return out, torch.cat(stats, -1) if stats else q.new_zeros(q.shape[1], 0, dtype=wide)


def needs_mask(call: Call) -> bool:
    """Whether what is asked must be built into a mask: windows, and causal calls that PyTorch would align otherwise."""
    square = call.q_len is not None and call.q_len == call.kv_len
    return call.window != (-1, -1) or bool(call.causal and (not square or call.mask != "none"))


def additive(mask: Tensor | None, q: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """A bool mask as 0 and -inf in the dtype of q; an additive one in a dtype that PyTorch's operators take."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    return mask.to(dtype) if dtype is not None else as_dtype(mask, q)


def as_dtype(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """PyTorch takes bool masks, those of q's dtype, and float32 ones below float32."""
    return mask.to(q.dtype) if mask is not None and mask.is_floating_point() and q.dtype is torch.float64 else mask


def wide_dtype(x: Tensor) -> torch.dtype:
    """In which sums and LSE are kept: float32, and float64 for float64."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def as_written(q: Tensor) -> AbstractContextManager[Any]:
    """Autocast off: it would compute the products of float32 tensors in half precision."""
    device = q.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def can_use(path: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """PyTorch's own answer (torch.backends.cuda.can_use_*_attention) for the fitted call: None, or the refusal."""
    from torch.backends import cuda

    can = getattr(cuda, f"can_use_{path}_attention", None)
    if can is None or call.varlen or q.ndim != 4:
        return None
    heads = 1 if call.layout == "bhsd" else 2
    q, k, v = (t if heads == 1 else t.transpose(1, 2) for t in (q, k, v))
    if q.shape[1] != k.shape[1] and call.heads == call.kv_heads:  # after expand_kv
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if call.head_dim != q.shape[-1]:
        return None  # padded: PyTorch has not seen such tensors yet
    causal = bool(call.causal) and not needs_mask(call)
    params = cuda.SDPAParams(q, k, v, additive(mask, q, q.dtype), call.dropout or 0.0, causal, q.shape[1] != k.shape[1])
    return None if can(params, False) else f"torch.backends.cuda.can_use_{path}_attention says no"
