"""The portable kernel of the executor: PyTorch only, on any device, with gradients.

Head by head, runs of query blocks are batched: their kept keys and values are gathered side by side and given to PyTorch's
attention.  A run alone whose blocks are adjacent (a window, or all of them) is computed on the keys as they lie.  What is
gathered at once is bounded by a budget, so memory does not grow with the square of the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sdpa import as_written, wide_dtype
from .blockmask import BlockMask
from .plan import Group, Plan, plan

MIB = 2**20
Result = tuple[Tensor, Tensor | None]


def budget(q: Tensor) -> int:
    """Bytes of gathered keys and values at once; the kept keys of one run may be more.

    On a CPU, what its caches take: with 8 MiB a thread has a tenth less speed, with 64 far less.  Elsewhere large batches count.
    """
    return min(64, 2 * torch.get_num_threads() if q.device.type == "cpu" else 64) * MIB


class Scratch:
    """Tensors that one call uses again and again: fresh ones for every chunk cost more in page faults than in copying."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def empty(self, name: str, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """As ``like.new_empty``; what was last taken under this name is overwritten."""
        n = math.prod(shape)
        if (kept := self.kept.pop(name, None)) is None or kept.numel() < n:
            kept = None  # freed before more is taken
            kept = like.new_empty(n, dtype=dtype)
        self.kept[name] = kept
        return kept[:n].view(shape)


def run(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, bias: Tensor | None, lse: bool) -> Result:
    """See ``Executor``."""
    made = plan(mask)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, bias)):
        out, stats = _Attention.apply(q, k, v, bias, mask, made, scale)
        return out, stats if lse else None
    return _forward(q, k, v, bias, mask, made, scale, lse)


class Chunk(NamedTuple):
    """Some runs of a group: m of them, M queries each, N gathered keys."""

    rows: Tensor | slice  # query blocks
    blocks: Tensor  # int32 [m * kept], flat: the blocks that they keep
    m: int
    span: int  # as Group.span, where m is 1; else -1
    masked: bool


def chunks(group: Group, most: int, biased: bool) -> Iterator[Chunk]:
    """The group in pieces of at most ``most`` kept blocks, or one run."""
    step, n = max(1, most // group.kept), group.length
    for i in range(0, len(group.first), step):
        first = group.first[i : i + step]
        m = len(first)
        rows: Tensor | slice = group.rows[i * n : (i + m) * n]
        if first[-1] - first[0] == (m - 1) * n:  # rising, so adjacent: no gather
            rows = slice(first[0], first[0] + m * n)
        yield Chunk(rows, group.blocks[i : i + m].view(-1), m, group.span[i] if m == 1 else -1, biased or group.partial)


class Keys:
    """Keys, values and key masks of one head, by block."""

    def __init__(self, k: Tensor, v: Tensor, bias: Tensor | None, mask: BlockMask, made: Plan, scratch: Scratch):
        self.block, self.mask, self.scratch = mask.block_k, mask, scratch
        self.k, self.v = padded(k, self.block), padded(v, self.block)
        self.blocks = self.k.shape[0] // self.block
        self.bias = self._bias(bias, made.invalid, k) if bias is not None or made.invalid is not None else None

    def _bias(self, bias: Tensor | None, invalid: Tensor | None, k: Tensor) -> Tensor:
        wide = wide_dtype(k)
        blocks = self.blocks
        table = torch.zeros(blocks, self.block, dtype=wide, device=k.device)
        if bias is not None:
            table = F.pad(bias.to(wide), (0, blocks * self.block - bias.shape[0])).view(blocks, self.block)
        return table if invalid is None else table.masked_fill(invalid, -torch.inf)

    def take(self, c: Chunk) -> tuple[Tensor, Tensor, Tensor | None]:
        """k [m, 1, N, D], v [m, 1, N, Dv], additive mask [m, 1, 1, N] or None."""
        if c.span >= 0:
            a = c.span * self.block
            z = a + c.blocks.numel() * self.block
            bias = self.bias.view(-1)[a:z][None, None, None] if c.masked and self.bias is not None else None
            return self.k[a:z][None, None], self.v[a:z][None, None], bias
        taken = []
        for name in ("k", "v"):
            x = getattr(self, name)
            if not x.is_contiguous():  # once per head; a copy gathers faster than rows with strides
                setattr(self, name, x := x.contiguous())
            n, width = c.blocks.numel(), x.shape[1]
            out = self.scratch.empty(name, x, n, self.block * width)
            torch.index_select(x.view(self.blocks, self.block * width), 0, c.blocks, out=out)
            taken.append(out.view(c.m, 1, n // c.m * self.block, width))
        bias = None
        if c.masked and self.bias is not None:
            bias = self.bias.index_select(0, c.blocks).view(c.m, 1, 1, -1)
        return taken[0], taken[1], bias


def padded(x: Tensor, block: int) -> Tensor:
    """[S, D] with rows of zeros up to whole blocks."""
    rest = -x.shape[0] % block
    return F.pad(x, (0, 0, 0, rest)) if rest else x


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: BlockMask, made: Plan, scale: float, lse: bool
) -> Result:
    b, h, sq, dv = *q.shape[:3], v.shape[-1]
    group = h // k.shape[1]
    wide = wide_dtype(q)
    out = torch.zeros(b, h, sq, dv, dtype=q.dtype, device=q.device)
    stats = torch.full((b, h, sq), -torch.inf, dtype=wide, device=q.device) if lse else None
    most = budget(q) // (mask.block_k * (q.shape[-1] + dv) * q.element_size())
    scratch = Scratch()
    for i in range(b):
        for j in range(h):
            if j % group == 0:
                at = i, j // group
                keys = Keys(k[at], v[at], None if bias is None else bias[at], mask, made, scratch)
            stat = None if stats is None else stats[i, j]
            _head(q[i, j], keys, groups_of(made, i, j), out[i, j], stat, most, scale, mask.block_q, bias is not None)
    return out, stats


def groups_of(made: Plan, i: int, j: int) -> list[Group]:
    head = made.heads[i % len(made.heads)]
    return head[j % len(head)]


def _head(
    q: Tensor, keys: Keys, groups: list[Group], out: Tensor, lse: Tensor | None, most: int, scale: float, block: int,
    biased: bool,
) -> None:  # fmt: skip
    """One head, into ``out`` [Sq, Dv] and ``lse`` [Sq]."""
    sq, rest = q.shape[0], q.shape[0] % block
    x = padded(q, block).unflatten(0, (-1, block))
    o = (padded(out, block) if rest else out).unflatten(0, (-1, block))
    s = None if lse is None else (F.pad(lse, (0, -sq % block)) if rest else lse).unflatten(0, (-1, block))
    scratch = keys.scratch if len(groups) <= 4 else None
    for g in groups:
        for c in chunks(g, most, biased):
            k, v, bias = keys.take(c)
            rows = x[c.rows] if isinstance(c.rows, slice) else x.index_select(0, c.rows)
            got, stat = attend(rows.reshape(c.m, 1, -1, q.shape[1]), k, v, bias, scale, lse is not None, scratch)
            for target, value in ((o, got), (s, stat)):
                if target is None or value is None:
                    continue
                value = value.reshape(c.m * g.length, *target.shape[1:])
                if isinstance(c.rows, slice):
                    target[c.rows].copy_(value)
                else:
                    target.index_copy_(0, c.rows.long(), value)
    if rest:
        out.copy_(o.flatten(0, 1)[:sq])
        if lse is not None and s is not None:
            lse.copy_(s.flatten()[:sq])


_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, lse: bool, scratch: Scratch | None = None
) -> Result:
    """Dense attention of a batch: q [m, 1, M, D], k [m, 1, N, D], v [m, 1, N, Dv], bias [m, 1, 1, N]; LSE [m, M].

    ``scratch``: given where there are few shapes.  oneDNN keeps code for every shape that it has seen.
    """
    cpu = q.device.type == "cpu"
    if (
        cpu
        and scratch is not None
        and not lse
        and q.dtype is torch.bfloat16
        and q.shape[2] < 768
        and _gemm_beats_flash()
    ):
        out, stat = _in_bfloat16(q, k, v, bias, scale, scratch), None
    elif cpu and _FLASH is not None and q.shape[-1] == v.shape[-1]:
        rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]  # it reads other strides as this one
        out, stat = _FLASH(*rows, 0.0, False, attn_mask=bias, scale=scale)
        stat = stat[:, 0]
    else:  # these may hold the scores, so some of the queries at once
        step = max(1, 8 * MIB // (q.shape[0] * k.shape[2]))
        pieces = [_plain(x, k, v, bias, scale, lse) for x in q.split(step, 2)]
        out = torch.cat([p[0] for p in pieces], 2)
        stat = torch.cat([p[1] for p in pieces], -1) if lse else None
    if bias is not None:  # PyTorch gives 0 or NaN to a row of which every key is masked
        none = (bias == -torch.inf).all(-1)[:, 0]
        out = out.masked_fill(none[..., None, None], 0.0)
        stat = None if stat is None else stat.masked_fill(none, -torch.inf)
    return out, stat


@cache
def _gemm_beats_flash() -> bool:
    """Whether this CPU multiplies bfloat16 in oneDNN, but not in MKL, which PyTorch's flash kernel uses: AMD's, of Zen 4 on.

    There, and with fewer than 768 queries (flash takes 256 at once from there on, and 32 of fewer than 192), products of
    whole matrices are a fifth faster, measured on an EPYC.
    """
    can: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(can.get("avx512_bf16") and not can.get("amx_bf16"))


def _in_bfloat16(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, scratch: Scratch) -> Tensor:
    """As flash attention computes it: float32 scores, weights rounded to bfloat16, their products summed in float32."""
    m, n, queries = k.shape[0], k.shape[2], q.shape[2]
    wide_k = scratch.empty("wide k", k, m, n, k.shape[3], dtype=torch.float32).copy_(k[:, 0]).transpose(1, 2)
    out = q.new_empty(m, queries, v.shape[3])
    step = max(64, MIB // 2 // (m * n))  # 2 MiB of scores, but 64 queries
    for a in range(0, queries, step):
        some = q[:, 0, a : a + step].float()
        scores = scratch.empty("scores", some, m, some.shape[1], n)
        weights = scratch.empty("weights", q, *scores.shape)
        if bias is None:
            torch.baddbmm(scores, some, wide_k, beta=0, alpha=scale, out=scores)
        else:
            torch.baddbmm(bias[:, 0], some, wide_k, alpha=scale, out=scores)
        torch.softmax(scores, -1, out=scores)
        torch.bmm(weights.copy_(scores), v[:, 0], out=out[:, a : a + step])
    return out[:, None]


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, lse: bool) -> tuple[Tensor, Any]:
    if not lse:
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale), None
    scores, stat = _scores(q, k, bias, scale)
    return ((scores - stat[..., None]).exp() @ wide(v)).to(q.dtype), stat[:, 0]


def wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x))


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    scores = (wide(q) * scale) @ wide(k).transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    return scores, scores.logsumexp(-1)


class _Attention(torch.autograd.Function):
    """Gradients by recomputation from the LSE, with the same bound on memory."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: BlockMask, made: Plan, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, bias, mask, made, scale, True)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.rest = mask, made, scale
        assert lse is not None
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> Any:
        from .gradient import backward

        q, k, v, bias, out, lse = ctx.saved_tensors
        with as_written(q):  # backward() may be called inside autocast
            return (*backward(q, k, v, bias, out, lse, d_out, d_lse, *ctx.rest), None, None, None)
