"""The bind functions of FlashAttention's packages, and what all functions of its kind share.

q is [B, Sq, H, D], k and v [B, Sk, Hk, D]; packed sequences are [T, H, D].  A vendor's package is imported when its kernel
is bound, and called by keyword, as the order of arguments differs between packages and versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hal.errors import NoKernelError
from hal.facts import Call
from hal.fittings import Run, Varlen

Function = Callable[..., Any]
HUB = "kernels-community/flash-attn3", "v1"  # repository and revision, as diffusers and transformers have them


def fa2(call: Call) -> Run:
    dense, packed = functions("flash_attn")

    def longer(max_seqlen_q: int, **arguments: Any) -> Any:
        # At 1, grouped heads are folded into the queries as if no sequence were empty.
        return packed(max_seqlen_q=max(max_seqlen_q, 2), **arguments)

    deterministic, lse = bool(call.deterministic), bool(call.lse)
    return flash(call, dense, longer, dropout_p=call.dropout, deterministic=deterministic, return_attn_probs=lse)


def fa2_vllm(call: Call) -> Run:
    packed = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func

    def longer(max_seqlen_q: int, **arguments: Any) -> Any:
        return packed(max_seqlen_q=max(max_seqlen_q, 2), **arguments)  # as in fa2

    return flash(call, None, longer, return_softmax_lse=bool(call.lse), fa_version=2)


def fa3(call: Call) -> Run:
    return _fa3(call, *functions("flash_attn_interface"))


def fa3_hub(call: Call) -> Run:
    module = hub_module()
    return _fa3(call, module.flash_attn_func, module.flash_attn_varlen_func)


def _fa3(call: Call, dense: Function, packed: Function) -> Run:
    flags: dict[str, Any] = {"deterministic": bool(call.deterministic)}
    if call.lse and "return_attn_probs" in inspect.signature(dense).parameters:
        flags["return_attn_probs"] = True
    return flash(call, dense, packed, **flags)


def fa3_sgl(call: Call) -> Run:
    packed = import_module("sgl_kernel.flash_attn").flash_attn_varlen_func
    return flash(call, None, packed, return_softmax_lse=bool(call.lse))


def fa4(call: Call) -> Run:
    left, right = call.window or (-1, -1)
    window = None if left < 0 else left, None if right < 0 else right  # only None is unlimited
    dense, packed = functions("flash_attn.cute")
    deterministic, lse = bool(call.deterministic), bool(call.lse)
    return flash(call, dense, packed, window_size=window, deterministic=deterministic, return_lse=lse)


# ---- what the packages alone know


def confirm_fa3(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """Whether this build can be asked for the LSE.  Builds of before August 2025 cannot: some always return it, some never."""
    if not call.lse or "return_attn_probs" in inspect.signature(functions("flash_attn_interface")[0]).parameters:
        return None
    return "this build of flash_attn_3 takes no return_attn_probs; build hopper/ of github.com/Dao-AILab/flash-attention anew"


def confirm_hub(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """Whether the kernel lies in the local cache, in a build for this PyTorch.  Nothing is downloaded here."""
    try:
        hub_module()
    except Exception as e:  # the package raises whatever the hub, the file system or the import raises
        said = "; ".join(line.strip() for line in str(e).splitlines() if line.strip()).rstrip(".") or type(e).__name__
        repository, revision = HUB
        fetch = f"from kernels import install_kernel; install_kernel('{repository}', revision='{revision}')"
        return f'{repository} cannot be loaded from the local cache: {said}; to fetch it: python -c "{fetch}"'
    return None


def hub_module() -> Any:
    kernels = import_module("kernels")
    repository, revision = HUB
    return kernels.get_local_kernel(kernels.install_kernel(repository, revision=revision, local_files_only=True))


# ---- what functions of this kind share


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
    flags = {"softmax_scale": scale_of(call), "causal": causal, "window_size": window, **flags}

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


def scale_of(call: Call) -> Any:
    """The number, always: a package's own default is no part of the call."""
    return call.scale if call.scale != "default" else call.head_dim**-0.5 if call.head_dim else None


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def both(result: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE of what came back; packages add more values behind them."""
    if not isinstance(result, (tuple, list)) or len(result) < 2 or result[1] is None:
        raise NoKernelError("the package was asked for the LSE and returned none: another version than hal knows")
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
