"""The cuDNN operator: tensors are [B, H, S, D], masks have four axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.facts import Call
from hal.fittings import Run
from hal.sdpa import additive, assembled, can_use


def cudnn(call: Call) -> Run:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    p, scale, lse = call.dropout, call.softmax_scale, call.lse
    wanted = bool(lse or call.grad)  # backward needs the statistics as well

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Any:
        # The mask in q's dtype: a float32 one is read as half and gives NaN (pytorch PR#191612).
        out = op(q, k, v, additive(mask, q, q.dtype), wanted, p, causal, False, scale=scale)
        if not lse:
            return out[0]
        stats = out[1]
        return out[0], stats.squeeze(-1) if stats.ndim == 4 else stats

    return assembled(call, dense)


def confirm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    return can_use("cudnn", q, k, v, mask, call)
