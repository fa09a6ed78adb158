"""Hybrid window attention around any kernel that computes a window, and the window in PyTorch and by the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.context import where
from hal.errors import CallError
from hal.facts import Call
from hal.fittings import Run, Varlen
from hal.sparse import BlockMask, Order, PackedRows
from hal.sparse import selected as glue
from hal.sparse.given import take
from hal.sparse.packed import rows_here

from . import delta, window
from .settings import Settings
from .window import Architecture, Range

NAME = "hybrid_window_attn_h3"
BLOCK = 64  # rows of a block of the executor
# Window(q, k, v, architecture, rows): exact attention [B, H, used, D] of the used rows [B, H, used, D].
Window = Callable[[Tensor, Tensor, Tensor, Architecture, PackedRows], Tensor]
Dense = Callable[[Tensor, Tensor, Tensor], Tensor]


def bind(call: Call, settings: Settings) -> Run:
    scale, most = call.softmax_scale, settings.vdn_max_gather_rows

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return glue.every_key(q, k, v, None, scale, False)[0]

    def in_window(q: Tensor, k: Tensor, v: Tensor, a: Architecture, rows: PackedRows) -> Tensor:
        p = window.plan(a, rows, most)
        outs = [(g.queries, dense(rows_of(q, [g.queries]), rows_of(k, g.keys), rows_of(v, g.keys))) for g in p.groups]
        if p.dense:
            outs += pieces(p.dense, dense(rows_of(q, p.dense), k, v))
        return in_order(outs)

    return around(settings, in_window, dense)


def triton(call: Call, settings: Settings, kernel: str | None = "triton") -> Run:
    """By the executor: ``kernel`` is one of its own, None its choice."""
    scale = call.softmax_scale

    def in_window(q: Tensor, k: Tensor, v: Tensor, a: Architecture, rows: PackedRows) -> Tensor:
        order, mask = blocks(a, rows, q.device)
        q, k, v = (order.to_blocks(x) for x in (q, k, v))
        return order.from_blocks(glue.executed(q, k, v, mask, None, scale, False, kernel)[0])

    return around(settings, in_window, lambda q, k, v: glue.every_key(q, k, v, None, scale, False)[0])


def around(settings: Settings, in_window: Window, dense: Dense) -> Run:
    """The run of a kernel: where the rows lie, what the model hands over, the window, its gate, the linear branch."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Varlen | None) -> Tensor:
        if varlen is not None:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        at = where()
        rows = rows_here(NAME, q.shape[2], at, varlen)
        parts = handed(q, rows, varlen is not None, settings)
        a, device = parts.architecture, q.device
        q, k, v = (x[:, :, : rows.used] for x in (q, k, v))
        if a is None:
            out = dense(q, k, v)
        else:
            glue.watch(NAME, at, lambda: blocks(a, rows, device)[1], None)
            out = in_window(q, k, v, a, rows)
        if parts.gate is not None:
            out = out * parts.gate[:, :, : rows.used].to(out.dtype)
        out = F.pad(out, (0, 0, 0, rows.pad))
        if parts.linear is not None and a is not None:
            read = delta.branch(parts.linear, a, rows.video, rows.first)
            read = F.pad(read, (0, 0, 0, 0, rows.first, rows.tokens - rows.first - read.shape[1]))
            parts.theirs.read = read if varlen is None else read[0]
        return out if varlen is None else out[0].transpose(0, 1)

    return run


# ---- what the model hands over


@dataclass(frozen=True, eq=False)
class Handed:
    architecture: Architecture | None  # None: attend to all
    gate: Tensor | None  # [B, H, rows, 1]
    linear: delta.LinearBranch | None  # with a batch axis
    theirs: Any = None  # the branch as it was given, which takes back what is read


def handed(q: Tensor, rows: PackedRows, packed: bool, settings: Settings) -> Handed:
    """What is given around this call, which needs all of it.  Raises CallError for what is missing or does not fit."""
    a, linear = take("hybrid"), take("linear")
    if isinstance(linear, delta.LinearBranch):
        linear.read = None  # of an earlier call
    if settings.vdn_h3_dense_smoke:
        take("gate")
        return Handed(None, None, None)
    if not isinstance(a, Architecture):
        told = "was given none" if a is None else f"was given a {type(a).__name__}"
        raise CallError(
            f"{NAME} needs the architecture that the model was trained with, and {told}: MiniMax-H3 and FastH3 have no linear "
            "branch, and take another backend; a VDN-H3 writes hal.sparse.given(hybrid=Architecture.of(config), gate=..., "
            "linear=LinearBranch(...)) around its attention"
        )
    if rows.videos != 1:
        raise CallError(f"{NAME} is for one video, and the packed rows {rows} have {rows.videos}")
    if a.linear_head_dim != q.shape[-1]:
        raise CallError(
            f"{NAME}: linear_head_dim is {a.linear_head_dim}, and head_dim {q.shape[-1]}; the branch shares the projections of "
            "the window, so they must be equal"
        )
    gate = take("gate") if a.enable_softmax_gate else None
    if a.enable_softmax_gate:
        gate = gate_of(gate, q, packed)
    if a.full(rows.video[0]):
        return Handed(None, gate, None)
    if linear is None:
        raise CallError(
            f"{NAME} was given no linear branch, and the window leaves frames of {rows.video[0]} out; "
            "write hal.sparse.given(linear=LinearBranch(...)) around the call"
        )
    return Handed(a, gate, delta.checked(linear, a, q, rows.video, rows.first, packed), linear)


def gate_of(gate: Tensor | None, q: Tensor, packed: bool) -> Tensor:
    b, h, s = q.shape[:3]
    wanted = (s, h) if packed else (b, s, h)
    if gate is None or tuple(gate.shape) != wanted:
        told = "was given none" if gate is None else f"has shape {tuple(gate.shape)}"
        axes = "[rows, H]" if packed else "[B, rows, H]"
        raise CallError(f"{NAME}: the softmax gate {told}; it must be {axes}, here {wanted}")
    return (gate[None] if packed else gate).transpose(1, 2)[..., None]


# ---- rows


def rows_of(x: Tensor, ranges: Sequence[Range], dim: int = 2) -> Tensor:
    """The rows of these ranges, side by side."""
    parts = [x.narrow(dim, a, b - a) for a, b in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def pieces(ranges: Sequence[Range], out: Tensor, dim: int = 2) -> Iterable[tuple[Range, Tensor]]:
    """What rows side by side are of which range."""
    return zip(ranges, out.split([b - a for a, b in ranges], dim))


def in_order(outs: Iterable[tuple[Range, Tensor]], dim: int = 2) -> Tensor:
    """Pieces put together as their ranges lie."""
    return torch.cat([x for _, x in sorted(outs, key=lambda one: one[0])], dim)


@lru_cache(maxsize=64)
def blocks(a: Architecture, rows: PackedRows, device: torch.device) -> tuple[Order, BlockMask]:
    """The used rows in blocks of which none lies across frames, and which block attends to which."""
    frames, height, width = rows.video
    per = height * width
    before, last = ([s for s in some if s and isinstance(s, int)] for some in (rows.prefix, rows.refs))
    one = PackedRows((*before, *[per] * (frames - 1)), (1, 1, per), tuple(last))
    order = one.order((1, 1, BLOCK), device)
    sizes = [*before, *[per] * frames, *last]
    n = [-(-s // BLOCK) for s in sizes]
    of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(n))
    keep = torch.ones(len(sizes), len(sizes), dtype=torch.bool)
    first = len(before)
    for t, kept in enumerate(a.kept(frames)):
        keep[first + t, first : first + frames] = False
        keep[first + t, [first + u for u in kept]] = True
    with torch.inference_mode(False):  # cached, so it may meet autograd later
        return order, order.mask(keep[of][:, of][None, None].to(device))
