"""Launches the Triton kernel: picks the tile, fills in what the kernel need not be told, allocates what it writes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor

import triton

from ...errors import CallError
from .kernel import forward
from .tiles import ARCHS, DTYPES, INTERPRETED, MAX_HEAD_DIM, Tile, tile_of, tiles_for

INTERPRETER = not isinstance(forward, triton.JITFunction)  # TRITON_INTERPRET was set when the kernel was imported


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
    index [B, H, nq, max] and counts [B, H, nq], int32: the key blocks of each query block, each once; entries from the
    count on are not read.  valid [nk] or [B, nk], int32: how many of a block's first slots are keys, at most those that
    k has; what the others hold is never used.  None says that all are, which is faster.  bias [B, Sk] is added to the
    scaled scores; -inf hides a key.  Rows without keys are 0 and -inf.

    Raises CallError for a dtype, head_dim or device that the kernel does not take.
    """
    tile = _tile(q, k, v, block_q, block_k)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    batch, heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
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
            0 if valid is None or valid.ndim == 1 else valid.stride(0), 0 if bias is None else bias.stride(0),
            q_len, heads // k.shape[1], (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
            HEAD_DIM=head_dim, D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_Q=block_q, BLOCK_K=block_k, TILE_Q=tile.q, TILE_K=tile.k,
            RAGGED=valid is not None, BIAS=bias is not None, UPCAST=upcast,
            **tile.options,
        )  # fmt: skip
    return out.to(q.dtype), lse


def _tile(q: Tensor, k: Tensor, v: Tensor, block_q: int, block_k: int) -> Tile:
    dtype = str(q.dtype).removeprefix("torch.")
    allowed = (*DTYPES, "float32") if INTERPRETER else DTYPES
    if dtype not in allowed or not q.dtype == k.dtype == v.dtype:
        found = ", ".join(str(t.dtype).removeprefix("torch.") for t in (q, k, v))
        raise CallError(f"the Triton kernel takes one dtype of {', '.join(allowed)}; q, k, v are {found}")
    if not 0 < q.shape[-1] == k.shape[-1] == v.shape[-1] <= MAX_HEAD_DIM:
        found = ", ".join(str(t.shape[-1]) for t in (q, k, v))
        raise CallError(f"the Triton kernel takes one head_dim of 1 to {MAX_HEAD_DIM}; q, k, v have {found}")
    if INTERPRETER:
        return INTERPRETED
    if q.device.type == "cpu":
        raise CallError(
            "the Triton kernel runs on a GPU, and these tensors are on the CPU; use kernel='portable' "
            "(for tests: set TRITON_INTERPRET=1 before Triton is imported)"
        )
    arch = _arch(q.device)
    if arch not in ARCHS:
        raise CallError(f"the Triton kernel is not checked for {arch}; it runs on {', '.join(ARCHS)}")
    return tile_of(tiles_for(arch, q.shape[-1]), block_q, block_k)


@lru_cache(maxsize=64)
def _arch(device: torch.device) -> str:
    with torch.get_device_module(device).device(device):
        arch = triton.runtime.driver.active.get_current_target().arch
    return arch if isinstance(arch, str) else f"sm{arch}"
