"""What sparse backends have in common: know the grid, take tokens into blocks, ask a selector, execute, restore.

A backend gives ``run`` a tile and a selector.  What does not depend on the data (orders, masks of windows) is cached by grid,
tile, device and settings, so a step builds nothing anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..context import Position, where
from ..errors import CallError
from ..sdpa import as_written
from .blockmask import BlockMask
from .executor import execute
from .given import take
from .order import Grid, Order

Result = tuple[Tensor, Tensor | None]
Run = Callable[..., Any]


@dataclass(frozen=True)
class Selected:
    """What a selector has chosen for one call.

    ``masks``: one for all heads; or (query heads, mask) pairs in which every head stands once, so that few masks serve
    many heads, layers and steps; None: every key.  ``coarse``: [B, H, blocks, Dv], added to each token of a block of
    queries, times the gate where one is given (``hal.sparse.given``).
    """

    masks: BlockMask | tuple[tuple[tuple[int, ...], BlockMask], ...] | None
    coarse: Tensor | None = None


# q, k, v [B, H, slots, D] in block order (empty slots 0), their order, and where the call stands.
Selector = Callable[[Tensor, Tensor, Tensor, Order, Position], Selected]


def run(
    backend: str,
    tile: Grid,
    select: Selector,
    *,
    scale: float,
    lse: bool = False,
    dense: Callable[[Position], bool] | None = None,
    kernel: str | None = None,
) -> Run:
    """A kernel's ``run(q, k, v, mask, varlen)`` in layout "bhsd", q and k of equal length.

    ``dense``: whether a call that stands there attends to every key; asked before tokens are moved.
    ``kernel``: one of the executor's, where it must be that one.  ``mask`` is None or
    key padding, bool [B, 1, 1, S].  Raises CallError before anything runs where the grid is unknown or another.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Any) -> Any:
        at = where()
        order = order_here(backend, q.shape[2], tile, q.device, at)
        bias = None if mask is None else key_bias(mask)
        if dense is not None and dense(at):
            watch(backend, at, None, order)
            out, stats = every_key(q, k, v, bias, scale, lse)
            return (out, stats) if lse else out
        blocks = order.to_blocks(q), order.to_blocks(k), order.to_blocks(v)
        chosen = select(*blocks, order, at)
        watch(backend, at, chosen.masks, order)
        if chosen.masks is None:
            out, stats = every_key(q, k, v, bias, scale, lse)
        else:
            moved = None if bias is None else order.to_blocks(bias, -1)
            out, stats = executed(*blocks, chosen.masks, moved, scale, lse, kernel)
            out = order.from_blocks(out)
            stats = None if stats is None else order.from_blocks(stats, -1)
        if chosen.coarse is not None:
            out = with_coarse(out, chosen.coarse, order, taken_gate(out.shape))
        return (out, stats) if lse else out

    return attend


# ---- what was chosen, for pictures and tests


class Watched(NamedTuple):
    backend: str
    position: Position
    heads: tuple[int, ...] | None  # whose mask it is; None: of all, and the mask has one for each or one for all
    mask: BlockMask | None  # None: every key
    order: Order | None  # of the mask's blocks; None: not of a grid


class Seen(Exception):
    """Ends a call that was watched, before anything is computed: whoever wanted its masks has them."""


_Watchers = tuple[tuple[list[Watched], Callable[[Watched], bool], bool], ...]
_watchers: ContextVar[_Watchers] = ContextVar("hal_masks", default=())


@contextmanager
def watched_masks(when: Callable[[Watched], bool] = lambda x: True, *, stop: bool = False) -> Iterator[list[Watched]]:
    """A list to which calls inside add what they attend to, where ``when`` says so; it keeps their masks alive.

    ``stop``: the first of them raises ``Seen`` in place of running.
    """
    found: list[Watched] = []
    token = _watchers.set((*_watchers.get(), (found, when, stop)))
    try:
        yield found
    finally:
        _watchers.reset(token)


def watch(backend: str, at: Position, masks: Any, order: Order | None) -> None:
    """Tell those who watch what a call attends to: ``Selected.masks``, or a function that makes it for them.

    ``run`` does; a backend without it calls this, before anything is computed.
    """
    if not (watchers := _watchers.get()):
        return
    masks = masks() if callable(masks) else masks
    several = masks if isinstance(masks, tuple) else ((None, masks),)
    these = [Watched(backend, at, heads, mask, order) for heads, mask in several]
    for found, when, stop in watchers:
        wanted = [x for x in these if when(x)]
        found += wanted
        if wanted and stop:
            raise Seen


def ends_here() -> bool:
    """Whether a watcher may end the calls here: they are run for a picture alone, and leave no files behind."""
    return any(stop for _, _, stop in _watchers.get())


# ---- the grid


def text_here(q: Tensor, layout: str | None) -> int | None:
    """Text tokens among those of q, by the running grid; None: it is unknown, or of another length.  For ``confirm``."""
    grid, tokens = where().grid, q.shape[1 if layout == "bshd" else 2]
    return None if grid is None or tokens not in (grid.tokens, grid.tokens + grid.text) else tokens - grid.tokens


def order_here(backend: str, tokens: int, tile: Grid, device: torch.device, at: Position) -> Order:
    """The order of the running grid for calls of so many tokens: video alone, or video and text.  Cached.

    Raises CallError where no grid is set, or one that has another number of tokens.
    """
    g = at.grid
    if g is None:
        raise CallError(
            f"{backend} needs to know how its {tokens} tokens lie in frames, rows and columns, and no grid is set; "
            "write with hal.grid(frames, height, width, text=TEXT_TOKENS) around the call, or hal.attach a pipeline whose "
            "family hal knows"
        )
    if tokens == g.tokens:  # text that the model attends to elsewhere, if any
        before, after = 0, 0
    elif tokens == g.tokens + g.text:
        before, after = (g.text, 0) if g.text_first else (0, g.text)
    else:
        text = f" and {g.text} text tokens, {g.tokens + g.text} in all" if g.text else ""
        raise CallError(
            f"{backend} was given {tokens} tokens, and the grid is {g.frames} x {g.height} x {g.width} = {g.tokens}"
            f"{text}; set the grid of this call with hal.grid(frames, height, width, text=TEXT_TOKENS)"
        )
    return Order.of((g.frames, g.height, g.width), tile, prefix=before, suffix=after, device=device)


def step_here(backend: str, at: Position, why: str) -> int:
    """The denoising step.  Raises CallError where it is not known; ``why`` is the setting that needs it."""
    if at.step is None:
        raise CallError(
            f"{backend} needs the denoising step for {why}, and none is set; write with hal.step(index, steps) around the "
            "call, or hal.attach the pipeline"
        )
    return at.step


def layer_here(backend: str, at: Position, why: str) -> int:
    """The index of the layer.  Raises CallError where it is not known."""
    if at.layer is None:
        raise CallError(
            f"{backend} needs the index of the layer for {why}, and none is set; hal.attach the model, or write "
            "with hal.context.position(layer=INDEX) around the call"
        )
    return at.layer


# ---- the parts of a run


def key_bias(mask: Tensor) -> Tensor:
    """From key padding, bool [B, 1, 1, S] (True: attend), to a bias [B, 1, S] for the executor."""
    zero = torch.zeros((), dtype=torch.float32, device=mask.device)
    return torch.where(mask[:, :, 0], zero, -torch.inf)


def every_key(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, lse: bool) -> Result:
    """Attention to all keys, in the order in which tokens come."""
    if not lse:
        gqa, none, mask = q.shape[1] != k.shape[1], None, None
        if bias is not None:  # PyTorch gives no number where an item has no key
            none = bias.isneginf().all(-1)[..., None, None]
            mask = bias[:, :, None].masked_fill(none, 0).to(q.dtype)
        with as_written(q):
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=gqa)
        return out if none is None else out.masked_fill(none, 0), None
    return execute(q, k, v, _whole(q.shape[2], k.shape[2], q.device), scale=scale, bias=bias, lse=lse)


@lru_cache(maxsize=64)
def _whole(q_len: int, kv_len: int, device: torch.device) -> BlockMask:
    """Everything is kept.  Made once, with what executors prepare from it."""
    with torch.inference_mode(False):  # cached, so it may meet autograd later
        one = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return BlockMask.from_dense(one, q_len, kv_len, q_len, kv_len)


def executed(
    q: Tensor, k: Tensor, v: Tensor, masks: Any, bias: Tensor | None, scale: float, lse: bool, kernel: str | None = None
) -> Result:
    """The executor on blocks, once for each mask of ``Selected.masks``."""
    if isinstance(masks, BlockMask):
        return execute(q, k, v, masks, scale=scale, bias=bias, lse=lse, kernel=kernel)
    if len(masks) == 1:
        return execute(q, k, v, masks[0][1], scale=scale, bias=bias, lse=lse, kernel=kernel)
    group = q.shape[1] // k.shape[1]
    outs, stats, heads = [], [], []
    for mine, mask in masks:
        index = indices(mine, q.device)
        some_q, some_k, some_v = (
            x.index_select(1, i) for x, i in ((q, index), (k, index // group), (v, index // group))
        )
        out, stat = execute(some_q, some_k, some_v, mask, scale=scale, bias=bias, lse=lse, kernel=kernel)
        outs.append(out)
        stats.append(stat)
        heads += mine
    back = indices(tuple(sorted(range(len(heads)), key=heads.__getitem__)), q.device)
    out = torch.cat(outs, 1).index_select(1, back)
    return out, torch.cat(stats, 1).index_select(1, back) if lse else None  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def indices(at: tuple[int, ...], device: torch.device) -> Tensor:
    """int64, on the device; made once."""
    with torch.inference_mode(False):  # cached, so it may meet autograd later
        return torch.tensor(at).to(device)


def with_coarse(out: Tensor, coarse: Tensor, order: Any, gate: Tensor | None) -> Tensor:
    """``out`` [B, H, tokens, Dv] plus what its blocks of queries have in common, gated; summed in float32.

    Head by head: all at once would be held in float32 several times.
    """
    block, sums = order.slot // order.block, []
    for h in range(out.shape[1]):
        added = coarse[:, h].index_select(1, block)
        sums.append((out[:, h] + (added if gate is None else added * gate[:, h])).to(out.dtype))
    return torch.stack(sums, 1)


def taken_gate(shape: Sequence[int], axis: str = "S", packed: bool = False) -> Tensor | None:
    """The given gate as [B, H, S, Dv] for an output of that shape; None: none is given.

    It is given as the caller's output lies: [B, S, H, Dv], of one ``packed`` sequence without the batch.  Raises CallError
    for another shape, in which ``axis`` names the tokens.
    """
    gate: Tensor | None = take("gate")
    if gate is None:
        return None
    b, h, s, d = shape
    axes, wanted = (f"[{axis}, H, Dv]", (s, h, d)) if packed else (f"[B, {axis}, H, Dv]", (b, s, h, d))
    if gate.shape != wanted:
        raise CallError(f"the gate has shape {tuple(gate.shape)}; it must be {axes}, here {wanted}")
    return (gate[None] if packed else gate).transpose(1, 2)
