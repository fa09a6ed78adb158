"""Launches the Triton kernel: picks the tile, fills in what the kernel need not be told, allocates what it writes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
from torch import Tensor

from ...errors import CallError
from ..blockmask import BlockMask
from .kernel import forward
from .tiles import ARCHS, DTYPES, INTERPRETED, MAX_HEAD_DIM, tile_of, tiles_for

INTERPRETER = not isinstance(forward, triton.JITFunction)  # TRITON_INTERPRET was set when the kernel was imported


def run(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, bias: Tensor | None, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """As ``hal.sparse.Executor`` says."""
    if "triton" not in mask.plans:
        full = mask.kv_valid is None and mask.kv_len % mask.block_k == 0
        mask.plans["triton"] = None if full else mask.kv_sizes.to(torch.int32)
    index, counts = mask.lists
    valid = mask.plans["triton"]
    sizes = {"block_q": mask.block_q, "block_k": mask.block_k}
    out, stats = block_sparse(q, k, v, index, counts, valid=valid, scale=scale, bias=bias, **sizes)
    return out, stats if lse else None


def refusal(q: Tensor, v: Tensor) -> str | None:
    """What the kernel does not take of these tensors, or None."""
    dtypes = (*DTYPES, "float32") if INTERPRETER else DTYPES
    if (dtype := str(q.dtype).removeprefix("torch.")) not in dtypes:
        return f"it takes {', '.join(dtypes)}, and q is {dtype}"
    if not q.shape[-1] == v.shape[-1] <= MAX_HEAD_DIM:
        return f"it takes one head_dim up to {MAX_HEAD_DIM}; q has {q.shape[-1]} and v {v.shape[-1]}"
    if INTERPRETER:
        return None
    if q.device.type != "cuda":
        return f"it runs on cuda, and q is on {q.device.type}"
    if (arch := _arch(q.device)) not in ARCHS:
        return f"it was not compiled and checked for {arch}; allowed: {', '.join(ARCHS)}"
    return None


def block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    counts: Tensor,
    *,
    block_q: int,
    block_k: int,
    valid: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, Sq, D] in q's dtype, LSE [B, H, Sq] in float32, natural): softmax over the keys of the listed blocks.

    q [B, H, Sq, D], k and v [B, Hk, Sk, D] in block order, of any strides; query head h reads key head h // (H / Hk).
    index [B, H, nq, max] and counts [B, H, nq], int32, B and H 1 for all: the key blocks of each query block, each once;
    entries from the count on are not read.  valid [nk] or [B, nk], int32: how many of a block's first slots are keys, at
    most those that k has; what the others hold is never used.  None says that all are, which is faster.  bias [B, Sk] or
    [B, Hk, Sk] is added to the scaled scores; -inf hides a key.  Rows without keys are 0 and -inf.  There is no gradient.

    Raises CallError for a dtype, head_dim or device that the kernel does not take.
    """
    if text := refusal(q, v):
        raise CallError(f"the Triton kernel cannot serve this: {text}")
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    tile = INTERPRETED if INTERPRETER else tile_of(tiles_for(_arch(q.device), head_dim), block_q, block_k)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    index, counts = index.expand(batch, heads, -1, -1), counts.expand(batch, heads, -1)
    if bias is not None:
        bias = (bias[:, None] if bias.ndim == 2 else bias).expand(batch, kv_heads, kv_len)
        bias = bias if bias.stride(-1) == 1 else bias.contiguous()
    # The interpreter cuts float32 to bfloat16 where a GPU rounds.
    upcast = INTERPRETER and q.dtype is torch.bfloat16
    out = torch.empty(q.shape, dtype=torch.float32 if upcast else q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not out.numel():
        return out.to(q.dtype), lse
    if valid is None and (bias is not None or kv_len % block_k or block_k % tile.k):
        starts = torch.arange(0, kv_len, block_k, dtype=torch.int32, device=q.device)
        valid = (kv_len - starts).clamp_(max=block_k)
    grid = (-(-q_len // block_q) * -(-block_q // tile.q), heads, batch)
    here = nullcontext() if q.device.type == "cpu" else torch.get_device_module(q.device).device(q.device)
    with here:
        forward[grid](
            q, k, v, out, lse, index, counts, valid, bias,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            *index.stride()[:3], *counts.stride(),
            0 if valid is None or valid.ndim == 1 else valid.stride(0), *((0, 0) if bias is None else bias.stride()[:2]),
            q_len, heads // kv_heads, (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
            HEAD_DIM=head_dim, D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_Q=block_q, BLOCK_K=block_k, TILE_Q=tile.q, TILE_K=tile.k,
            RAGGED=valid is not None, BIAS=bias is not None, UPCAST=upcast,
            **tile.options,
        )  # fmt: skip
    return out.to(q.dtype), lse


@lru_cache(maxsize=64)
def _arch(device: torch.device) -> str:
    with torch.get_device_module(device).device(device):
        arch = triton.runtime.driver.active.get_current_target().arch
    return arch if isinstance(arch, str) else f"sm{arch}"
