"""PyTorch's SDPA on MPS, a few query rows at a time.

On MPS PyTorch makes all scores at once: an error at diffusion lengths (pytorch#149261), and silently wrong above 2^32
of them (pytorch PR#179592).  A softmax row needs no other row: chunks of queries give the same numbers in less memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.backend import Kernel
from hal.facts import FLOATS, Call
from hal.rules import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from hal.fittings import Run

ROWS = 128  # queries at a time
SCORES = 1 << 30  # at a time: 4 GiB in float32, the largest buffer that Metal takes

SDPA_MPS = Kernel(
    "sdpa.mps",
    "hal.platforms.mps.kernels:bind_sdpa",
    layout="bhsd",
    honours={"causal", "window", "scale", "gqa", "rectangular", "varlen", "grad", "compile"}
    | {"mask.key_padding", "mask.bool", "mask.additive"},
    limits={"dtype": FLOATS, "contiguous": True},
    rules=(Rule("empty", require={"empty": False}, note="calls without tokens go to the math path"),),
    title="PyTorch SDPA in chunks of 128 queries",
)


def bind_sdpa(call: Call) -> Run:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from hal.masks import built_mask, rows_without_keys
    from hal.sdpa import looped

    scale, causal, window = call.softmax_scale, bool(call.causal), call.window or (-1, -1)
    builds = causal or window != (-1, -1)

    def chunk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: int, of: int) -> Tensor:
        if mask is not None and mask.shape[2] != 1:
            mask = mask[:, :, first : first + q.shape[2]]
        if builds:
            mask = built_mask(q, k, causal, window, mask, first, of)
        out = sdpa(q, k, v, mask, scale=scale)
        # MPS puts a large negative number for -inf: a row without keys would get the mean of all values.
        return out if mask is None else out.masked_fill(rows_without_keys(mask)[..., None], 0.0)

    def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[1] != k.shape[1]:  # once, not once a chunk
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        of = q.shape[2]
        rows = max(1, min(ROWS, SCORES // (q.shape[0] * q.shape[1] * k.shape[2])))
        if of <= rows:
            return chunk(q, k, v, mask, 0, of)
        outs, first = [], 0
        for part in q.tensor_split(-(-of // rows), 2):  # of equal size: PyTorch has another path for 8 rows and fewer
            outs.append(chunk(part, k, v, mask, first, of))
            first += part.shape[2]
        return torch.cat(outs, 2)

    if call.varlen:
        return lambda q, k, v, mask, varlen: looped(one, q, k, v, varlen, False)
    return lambda q, k, v, mask, varlen: one(q, k, v, mask)
