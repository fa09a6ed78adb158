"""The bind functions of PyTorch's paths: tensors are [B, H, S, D], masks have four axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.facts import Call
from hal.fittings import Run, Varlen, transposed
from hal.masks import built_mask, rows_without_keys

Dense = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Any]  # (q, k, v, mask, causal) -> out or (out, LSE)


def cpu(call: Call) -> Run:
    """F.scaled_dot_product_attention, which takes its flash path for what this kernel accepts; the operator for LSE."""
    bshd, masked = call.layout == "bshd", needs_mask(call) or call.dtype == "float64"
    if not (call.lse or call.causal or call.varlen or masked) and call.scale == "default" and call.heads == call.kv_heads:
        sdpa = F.scaled_dot_product_attention  # the plain call: every Python function less is a tenth of the overhead
        if bshd:
            return lambda q, k, v, mask, varlen: sdpa(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask
            ).transpose(1, 2)
        return lambda q, k, v, mask, varlen: sdpa(q, k, v, mask)
    if not call.lse:
        run = fused(call)
    else:
        op, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, scale_of(call)
        run = assembled(call, lambda q, k, v, mask, causal: op(q, k, v, 0.0, causal, attn_mask=additive(mask, q), scale=scale))
    return transposed(run, bool(call.lse)) if bshd and not call.varlen else run


def fused(call: Call) -> Run:
    """F.scaled_dot_product_attention on a device whose vendor has registered a kernel with PyTorch."""
    sdpa, scale, gqa = F.scaled_dot_product_attention, scale_of(call), bool(call.heads != call.kv_heads)
    return assembled(
        call,
        lambda q, k, v, mask, causal: sdpa(q, k, v, as_dtype(mask, q), is_causal=causal, scale=scale, enable_gqa=gqa),
    )


def flash(call: Call) -> Run:
    op, p, scale, lse = torch.ops.aten._scaled_dot_product_flash_attention.default, call.dropout, scale_of(call), call.lse

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Any:
        out = op(q, k, packed_on_hip(v), p, causal, False, scale=scale)
        return (out[0], out[1]) if lse else out[0]

    return assembled(call, dense)


def efficient(call: Call) -> Run:
    op, p, scale, lse = torch.ops.aten._scaled_dot_product_efficient_attention.default, call.dropout, scale_of(call), call.lse
    wanted = bool(lse or call.grad)  # backward needs the statistics as well

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Any:
        bias = aligned(additive(mask, q, q.dtype), q, k)
        out = op(q, k, packed_on_hip(v), bias, wanted, p, causal, scale=scale)
        return (out[0], out[1][..., : q.shape[2]]) if lse else out[0]

    return assembled(call, dense)


def math(call: Call) -> Run:
    scale, p, lse = scale_of(call), call.dropout or 0.0, bool(call.lse)

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Any:
        both = by_definition(q, k, v, mask, causal, scale, p)
        return both if lse else both[0]

    return assembled(call, dense)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """(out, LSE) as PyTorch's math path computes it: in float32 at least, all scores at once.  Every gradient."""
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q.to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.to(wide).transpose(-1, -2)
    if causal:
        mask = built_mask(q, k, True, (-1, -1), None)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    if not k.shape[2]:
        lse = scores.new_full(scores.shape[:-1], -torch.inf)
    elif mask is None:
        lse = scores.logsumexp(-1)
    else:  # a row without keys is 0 and -inf, also in its gradient
        none = (scores == -torch.inf).all(-1)
        lse = scores.masked_fill(none[..., None], 0.0).logsumexp(-1)
        lse, shift = lse.masked_fill(none, -torch.inf), lse
    weights = (scores - (lse if mask is None or not k.shape[2] else shift)[..., None]).exp()
    if dropout:
        weights = F.dropout(weights, dropout)
    return (weights @ v.to(wide)).to(q.dtype), lse


# ---- what PyTorch alone knows


def confirm_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """Whether PyTorch will take its flash path: flags that a user has set forbid it."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return "torch.backends.cuda.enable_flash_sdp(False) is in force, which rules the flash path out on CPUs too"
    return None


def confirm_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    return _can_use("flash", q, k, v, mask, call)


def confirm_efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    return _can_use("efficient", q, k, v, mask, call)


def confirm_cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    return _can_use("cudnn", q, k, v, mask, call)


def _can_use(path: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """PyTorch's own answer (torch.backends.cuda.can_use_*_attention) for the fitted call."""
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


# ---- shared


def scale_of(call: Call) -> float | None:
    return None if call.scale == "default" else call.scale  # type: ignore[return-value]


def packed_on_hip(v: Tensor) -> Tensor:
    """AOTriton gives wrong numbers for a v that is a transposed view, as every [B, S, H, D] tensor is here (ROCm/pytorch#3230)."""
    return v.contiguous() if torch.version.hip else v


def needs_mask(call: Call) -> bool:
    """Whether what is asked must be built into a mask: windows, and causal calls that PyTorch would align otherwise."""
    square = call.q_len is not None and call.q_len == call.kv_len
    return call.window != (-1, -1) or bool(call.causal and (not square or call.mask != "none"))


def assembled(call: Call, dense: Dense) -> Run:
    """A run from a dense function that knows only masks and square causality: lengths, windows, packing, empty rows."""
    causal, window, lse = bool(call.causal), call.window or (-1, -1), bool(call.lse)

    def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        built = mask
        square = causal and window == (-1, -1) and mask is None and bool(q.shape[2] == k.shape[2])  # may be a symbol
        if not square and (causal or window != (-1, -1)):
            built = built_mask(q, k, causal, window, mask)
        if not lse:
            return dense(q, k, v, built, square)
        out, stats = dense(q, k, v, built, square)
        stats = stats.contiguous()
        if built is not None:  # PyTorch's CPU path gives LSE 0 to a row without keys
            stats = stats.masked_fill(rows_without_keys(built), -torch.inf)
        return out, stats

    if not call.varlen:
        return lambda q, k, v, mask, varlen: one(q, k, v, mask)
    return lambda q, k, v, mask, varlen: looped(one, q, k, v, varlen, lse)


def looped(one: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, lse: bool) -> Any:
    """Packed sequences one at a time.  Reading their lengths waits for the device."""
    outs, stats = [], []
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
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


def aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias as the efficient operator wants it: expanded, its rows 16 elements apart (xformers#813, diffusers#9637)."""
    if bias is None:
        return None
    n = k.shape[2]
    bias = F.pad(bias.expand(*bias.shape[:3], n), (0, -n % 16))[..., :n]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], n)
