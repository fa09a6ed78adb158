"""The window by FlashAttention's packages: one call for the dense rows, and one for each pass of gathered keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from hal.backends.fa import kernels as fa
from hal.facts import Call
from hal.fittings import Run, Varlen
from hal.sparse import PackedRows

from . import window
from .portable import around, in_order, pieces, rows_of
from .settings import Settings
from .window import Architecture, Plan, Range


def fa3(call: Call, settings: Settings) -> Run:
    return _bound(fa.fa3, call, settings)


def fa3_hub(call: Call, settings: Settings) -> Run:
    return _bound(fa.fa3_hub, call, settings)


def fa3_sgl(call: Call, settings: Settings) -> Run:
    return _bound(fa.fa3_sgl, call, settings)


def fa4(call: Call, settings: Settings) -> Run:
    return _bound(fa.fa4, call, settings)


def _bound(package: Callable[[Call], Run], call: Call, settings: Settings) -> Run:
    flash, most = package(call.but(varlen=True)), settings.vdn_max_gather_rows

    def each(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, rows, D] by a function of [rows, H, D]."""
        packed = ([x[i].transpose(0, 1) for x in (q, k, v)] for i in range(q.shape[0]))
        return torch.stack([attend(*one) for one in packed]).transpose(1, 2)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = _lengths(((q.shape[2], k.shape[2]),), q.device)
        return each(lambda q, k, v: flash(q, k, v, None, lengths), q, k, v)

    def in_window(q: Tensor, k: Tensor, v: Tensor, a: Architecture, rows: PackedRows) -> Tensor:
        p = window.plan(a, rows, most)
        return each(lambda q, k, v: _by_passes(flash, p, q, k, v), q, k, v)

    return around(settings, in_window, dense)


def _by_passes(flash: Run, p: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs: list[tuple[Range, Tensor]] = []

    def attend(queries: Sequence[Range], keys: Sequence[Range], sizes: tuple[tuple[int, int], ...]) -> None:
        parts = rows_of(q, queries, 0), rows_of(k, keys, 0), rows_of(v, keys, 0)
        outs.extend(pieces(queries, flash(*parts, None, _lengths(sizes, q.device)), 0))

    if p.dense:
        attend(p.dense, [(0, p.used)], ((window.count(p.dense), p.used),))
    for groups in p.passes:
        keys = [r for g in groups for r in g.keys]
        attend(
            window.merged([g.queries for g in groups]),
            keys,
            tuple((g.queries[1] - g.queries[0], g.gathered) for g in groups),
        )
    return in_order(outs, 0)


@lru_cache(maxsize=256)
def _lengths(sizes: tuple[tuple[int, int], ...], device: torch.device) -> Varlen:
    """Of sequences with so many queries and keys."""
    queries, keys = zip(*sizes)
    cu_q, cu_k = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in (queries, keys))
    return Varlen(cu_q, cu_k, max(queries), max(keys))
