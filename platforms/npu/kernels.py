"""Ascend's own kernel under the name ``fa``: npu_fused_infer_attention_score of torch_npu (FIA), for inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hal.backend import Kernel, Needs
from hal.facts import HALF, Call
from hal.rules import Between, Rule, Same

if TYPE_CHECKING:
    from torch import Tensor

    from hal.fittings import Run, Varlen

ASCEND_FA = Kernel(
    "ascend_fa",
    "hal.platforms.npu.kernels:bind_fia",
    layout="bhsd",
    honours={"causal", "scale", "gqa", "rectangular", "varlen", "lse", "compile", "graph"}
    | {"mask.bool", "mask.key_padding"},
    limits={
        "dtype": HALF,
        "head_dim": range(16, 513, 16),
        "v_head_dim": Same("head_dim"),
        "heads": Between(1, 256),
        "kv_heads": Between(1, 256),
        "mask_shape": {"none", "b1qk", "11qk"},
        "contiguous": True,
    },
    rules=(
        *(Rule(f"gqa.group.{n}", {"kv_heads": n}, {"heads": Between(1, 64 * n)},
               note="FIA takes 64 query heads per key head at most") for n in (1, 2, 3)),
        Rule("varlen.graph", {"varlen": True, "graph": True},
             note="FIA takes the lengths of packed sequences as numbers, which a graph cannot change"),
    ),
    needs=(
        Needs(
            "torch-npu",
            "torch_npu",
            "npu_fused_infer_attention_score",
            install="pip install torch-npu (of torch's version), with CANN from https://www.hiascend.com/cann/download",
        ),
    ),
    title="Ascend fused inference attention (FIA)",
)  # fmt: skip

TND_HEAD_DIMS = (128, 192)  # those that its packed layout takes
TND_BATCH = 4096


def operator() -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator that torch_npu registers."""
    import torch
    import torch_npu  # noqa: F401

    op: Callable[..., tuple[Tensor, Tensor]] = torch.ops.npu.npu_fused_infer_attention_score
    return op


def bind_fia(call: Call) -> Run:
    """Masks of FIA are the other way round: True is masked out.  Its mode 3 is causal, aligned at the bottom right."""
    import torch

    from hal.masks import built_mask, rows_without_keys
    from hal.sdpa import looped

    fia, lse, causal = operator(), bool(call.lse), bool(call.causal)
    scale = call.softmax_scale  # FIA's own default is 1

    def common(q: Tensor, k: Tensor) -> dict[str, Any]:
        return {"num_heads": q.shape[1], "num_key_value_heads": k.shape[1], "scale": scale, "softmax_lse_flag": lse}

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        """[B, H, S, D], mask [B or 1, 1, Sq, Sk or 1] with True: attend."""
        sq, sk = q.shape[2], k.shape[2]
        if not q.numel() or not sk:
            out = q.new_zeros(*q.shape[:3], v.shape[3])
            return (out, q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)) if lse else out
        how: dict[str, Any] = {}
        if causal and mask is not None:
            mask = built_mask(q, k, True, (-1, -1), mask)
        if mask is not None:
            mask = mask.expand(*mask.shape[:3], sk)
            # inner_precise 2 is what rows without keys need; a single query has no such mode
            how = {"atten_mask": (~mask).contiguous(), "inner_precise": 2 if sq > 1 else 0}
        elif causal and sq > 1:  # one query, at the bottom right, sees every key
            how = {"atten_mask": torch.ones(2048, 2048, dtype=torch.bool, device=q.device).triu(1), "sparse_mode": 3}
        out, stats = fia(q.contiguous(), k.contiguous(), v.contiguous(), input_layout="BNSD", **common(q, k), **how)
        none = None
        if mask is not None:
            none = rows_without_keys(mask)
        elif causal and sq > sk:
            none = torch.arange(sq, device=q.device) < sq - sk
        stats = stats.squeeze(-1) if lse else stats
        if none is not None:
            out = out.masked_fill(none[..., None], 0.0)
            stats = stats.masked_fill(none, -torch.inf) if lse else stats
        return (out, stats) if lse else out

    def packed(q: Tensor, k: Tensor, v: Tensor, mask: Any, at: Varlen) -> Any:
        """[T, H, D].  The packed layout takes two head sizes, and no sequence that is empty on one side."""
        ends_q, ends_k = at.cu_q[1:].tolist(), at.cu_k[1:].tolist()
        lengths = list(zip(_steps(ends_q), _steps(ends_k)))
        even = all(a and b for a, b in lengths)
        if causal or not even or q.shape[2] not in TND_HEAD_DIMS or not 0 < len(lengths) <= TND_BATCH:
            return looped(dense, q, k, v, at, lse)
        out, stats = fia(
            q.contiguous(), k.contiguous(), v.contiguous(), input_layout="TND",
            actual_seq_lengths=ends_q, actual_seq_lengths_kv=ends_k, **common(q, k),
        )  # fmt: skip
        return (out, stats.squeeze(-1).transpose(0, 1)) if lse else out  # (T, N, 1) -> [H, T]

    return packed if call.varlen else lambda q, k, v, mask, varlen: dense(q, k, v, mask)


def _steps(ends: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends], ends)]
