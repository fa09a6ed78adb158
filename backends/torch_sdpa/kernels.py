"""The bind functions of PyTorch's paths: tensors are [B, H, S, D], masks have four axes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.facts import Call
from hal.fittings import Run, transposed
from hal.masks import built_mask
from hal.sdpa import additive, as_dtype, as_written, assembled, can_use, needs_mask, wide_dtype

# What is called with empty_rows=True gives 0 for a row without keys since pytorch PR#133882 (torch 2.5).


def cpu(call: Call) -> Run:
    """F.scaled_dot_product_attention, which takes its flash path for what this kernel accepts; the operator for LSE."""
    bshd, masked = call.layout == "bshd", needs_mask(call) or call.dtype == "float64"
    if (
        not (call.lse or call.causal or call.varlen or masked)
        and call.scale == "default"
        and call.heads == call.kv_heads
    ):
        sdpa = F.scaled_dot_product_attention  # the plain call: every Python function less is a tenth of the overhead
        if bshd:
            return lambda q, k, v, mask, varlen: sdpa(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask
            ).transpose(1, 2)
        return lambda q, k, v, mask, varlen: sdpa(q, k, v, mask)
    if not call.lse:
        run = fused(call, empty_rows=True)
    else:
        op, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, call.softmax_scale

        def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Any:
            return op(q, k, v, 0.0, causal, attn_mask=additive(mask, q), scale=scale)

        run = assembled(call, dense, empty_rows=True)
    return transposed(run, bool(call.lse)) if bshd and not call.varlen else run


def fused(call: Call, empty_rows: bool = False) -> Run:
    """F.scaled_dot_product_attention on a device whose vendor has registered a kernel with PyTorch."""
    sdpa, scale, gqa = F.scaled_dot_product_attention, call.softmax_scale, bool(call.heads != call.kv_heads)

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Any:
        return sdpa(q, k, v, as_dtype(mask, q), is_causal=causal, scale=scale, enable_gqa=gqa)

    return assembled(call, dense, empty_rows=empty_rows)


def flash(call: Call) -> Run:
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    p, scale, lse = call.dropout, call.softmax_scale, call.lse

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Any:
        out = op(q, k, packed_on_hip(v), p, causal, False, scale=scale)
        return (out[0], out[1]) if lse else out[0]

    return assembled(call, dense)


def efficient(call: Call) -> Run:
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    p, scale, lse = call.dropout, call.softmax_scale, call.lse
    wanted = bool(lse or call.grad)  # backward needs the statistics as well

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Any:
        bias = aligned(additive(mask, q, q.dtype), q, k)
        out = op(q, k, packed_on_hip(v), bias, wanted, p, causal, scale=scale)
        return (out[0], out[1][..., : q.shape[2]]) if lse else out[0]

    return assembled(call, dense, empty_rows=not torch.version.hip)  # AOTriton says nothing of such rows


def math(call: Call) -> Run:
    scale, p, lse = call.softmax_scale, call.dropout or 0.0, bool(call.lse)

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Any:
        both = by_definition(q, k, v, mask, causal, scale, p)
        return both if lse else both[0]

    return assembled(call, dense)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """(out, LSE) as PyTorch's math path computes it: in float32 at least, all scores at once.  Every gradient.

    The mask leaves each row a key; without any key at all it is 0 and -inf.
    """
    if not q.dtype == k.dtype == v.dtype:  # every other path refuses them too; here they would be widened in silence
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}")
    wide = wide_dtype(q)
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if causal:
        mask = built_mask(q, k, True, (-1, -1), None)
    with as_written(q):
        scores = (q.to(wide) * scale) @ k.to(wide).transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
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
    return can_use("flash", q, k, v, mask, call)


def confirm_efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    return can_use("efficient", q, k, v, mask, call)


# ---- what the operators want


def packed_on_hip(v: Tensor) -> Tensor:
    """AOTriton gives wrong numbers for a v that is a transposed view, as every [B, S, H, D] tensor is here (ROCm/pytorch#3230)."""
    return v.contiguous() if torch.version.hip else v


def aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias as the efficient operator wants it: expanded, its rows 16 elements apart (xformers#813, diffusers#9637)."""
    if bias is None:
        return None
    n = k.shape[2]
    if bias.stride(3) != 1 or any(step % 16 for step in (*bias.stride()[:3], bias.storage_offset())):
        bias = F.pad(bias, (0, -n % 16))[..., :n]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], n)
