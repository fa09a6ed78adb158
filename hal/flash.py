"""What kernels with FlashAttention's interface share: a function for equal lengths, and one for packed sequences.

q is [B, Sq, H, D], k and v [B, Sk, Hk, D]; packed sequences are [T, H, D].  A vendor's functions are called by keyword, as
the order of arguments differs between packages and versions.  It imports torch, so declarations do not import it: bind
functions do.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .facts import Call
from .fittings import Run, Varlen

Function = Callable[..., Any]


def functions(module: str) -> tuple[Function, Function]:
    """The function for equal lengths and the one for packed sequences."""
    m = import_module(module)
    return m.flash_attn_func, m.flash_attn_varlen_func


def flash(call: Call, dense: Function | None, packed: Function, *, tokens_first: bool = False, **flags: Any) -> Run:
    """A run of a package's two functions (``dense`` None: it has only the packed one).

    ``flags`` are the package's own keywords; softmax_scale, causal and window_size are common to all.
    ``tokens_first``: its packed LSE is [T, H] rather than [H, T].
    """
    if 0 in (call.batch, call.heads, call.q_len, call.kv_len):
        return nothing(call)
    lse, causal, window = bool(call.lse), bool(call.causal), call.window or (-1, -1)
    right = 0 if causal else window[1]
    flags = {"softmax_scale": call.softmax_scale, "causal": causal, "window_size": window, **flags}

    def of_packed(q: Tensor, k: Tensor, v: Tensor, n: Varlen) -> Any:
        result = packed(
            q=q, k=k, v=v, cu_seqlens_q=n.cu_q, cu_seqlens_k=n.cu_k, max_seqlen_q=n.max_q, max_seqlen_k=n.max_k, **flags
        )
        if not lse:
            return first(result)
        out, stats = both(result)
        return out, stats.transpose(0, 1) if tokens_first else stats

    def of_varlen(q: Tensor, k: Tensor, v: Tensor, mask: Any, n: Varlen) -> Any:
        if not lse:
            return of_packed(q, k, v, n)
        out, stats = of_packed(q, k, v, n)
        return out, stats.masked_fill(packed_rows_without_keys(q, n, right), -torch.inf)

    def of_dense(q: Tensor, k: Tensor, v: Tensor, mask: Any, varlen: Any) -> Any:
        if dense is not None:
            result = dense(q=q, k=k, v=v, **flags)
            if not lse:
                return first(result)
            out, stats = both(result)
        else:
            b, sq = q.shape[:2]
            result = of_packed(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), even(q, k))
            if not lse:
                return result.unflatten(0, (b, sq))
            out, stats = result[0].unflatten(0, (b, sq)), result[1].unflatten(1, (b, sq)).transpose(0, 1)
        none = q.shape[1] - k.shape[1] - right  # the first queries, where the window ends before the first key
        if right >= 0 and none > 0:
            stats = stats.masked_fill(torch.arange(q.shape[1], device=q.device) < none, -torch.inf)
        return out, stats

    return of_varlen if call.varlen else of_dense


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def both(result: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE of what came back; packages add more values behind them.

    Only the call tells whether a package keeps its word, so this is no HalError: something has run.
    """
    if not isinstance(result, (tuple, list)) or len(result) < 2 or result[1] is None:
        raise RuntimeError("the package was asked for the LSE and returned none: another version than hal knows")
    return result[0], result[1]


def even(q: Tensor, k: Tensor) -> Varlen:
    """The packing of sequences of one length."""
    (b, sq), sk = q.shape[:2], k.shape[1]
    cu_q, cu_k = (torch.arange(0, (b + 1) * n, n, dtype=torch.int32, device=q.device) for n in (sq, sk))
    return Varlen(cu_q, cu_k, sq, sk)


def packed_rows_without_keys(q: Tensor, n: Varlen, right: int) -> Tensor:
    """[T], True where a packed query has no key: packages put +inf, 0 or -inf into its LSE."""
    q_lens, k_lens = n.cu_q.diff(), n.cu_k.diff()
    none = (q_lens - k_lens - right).clamp(min=0) if right >= 0 else torch.zeros_like(q_lens)
    none = torch.where(k_lens == 0, q_lens, none)
    sequence = torch.repeat_interleave(q_lens, output_size=q.shape[0])
    return torch.arange(q.shape[0], device=q.device) - n.cu_q[sequence] < none[sequence]


def nothing(call: Call) -> Run:
    """Without queries or keys nothing is launched: zeros, which autograd can follow to q, and LSE -inf."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any, varlen: Any) -> Any:
        out = q[..., :0].sum(-1, keepdim=True).expand(*q.shape[:-1], v.shape[-1]).contiguous()
        if not call.lse:
            return out
        return out, torch.full(q.shape[:-1], -torch.inf, device=q.device).transpose(-1, -2)

    return run
