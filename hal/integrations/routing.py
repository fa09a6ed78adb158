"""The way from a foreign attention to ``hal.attention``.

Each site's module gets, while attached, a subclass of its own class (same name) whose ``__call__`` notes on a
thread-local stack which site is running.  FSDP2 and torch's parametrisations work the same way.  Unlike module hooks
it has ``try/finally``, does not make regional ``torch.compile`` specialise per layer, and is seen by models that were
compiled earlier.  What the site then calls ends here through one of three doors:

* ``backend``: an entry in diffusers' registry.  The name is a value of its ``AttentionBackendName`` type that the enum
  itself does not list, so no other model can meet it; the entry goes with the last attachment.
* ``interface``: entries in transformers' attention and mask interfaces, likewise.
* ``call``: a ``TorchFunctionMode`` that is active only inside the site's module, in the running thread.  It covers
  every processor that calls PyTorch's SDPA, known or not, where processors of our own would be forty copies of
  diffusers' that follow its releases.  It patches nothing, and traces under ``torch.compile(fullgraph=True)``.  Its
  price is a few microseconds for each torch function inside the module; the other two doors do not pay it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import context
from ..errors import AttachError
from ..policy import AUTOMATIC, Site
from ..run import attention_at
from .disguise import subclass

NAME = "hal"
Layout = Literal["bshd", "bhsd"]


@dataclass(frozen=True, eq=False)
class Route:
    """What the calls of one site say to hal."""

    place: context.Place
    other: tuple[str, int] | None = None
    intercept: bool = False

    def other_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Length of the other sequence that the site's module was given, if any."""
        if self.other is None:
            return None
        name, place = self.other
        other = args[place] if len(args) > place else kwargs.get(name)
        own = args[0] if args else kwargs.get("hidden_states")
        return None if other is own else _tokens(other)


def _tokens(sequence: Any) -> int | None:
    """Length of ``(batch, tokens, channels)``; of several sequences (an image prompt beside the text) all together."""
    if isinstance(sequence, Tensor):
        return sequence.shape[-2] if sequence.dim() > 1 else None
    if isinstance(sequence, (tuple, list)):
        return sum(_tokens(part) or 0 for part in sequence) or None
    return None


class _Here(threading.local):
    """The sites that run in this thread, innermost last; ``None`` on top while hal itself runs."""

    def __init__(self) -> None:
        self.stack: list[tuple[Route, int | None] | None] = []


_here = _Here()
_NO_ROUTE = Route(context.Place(AUTOMATIC, Site("model")))


def routed(cls: type[nn.Module]) -> Any:
    """A subclass of ``cls`` that says, while it runs, by which ``_hal_route`` its attention goes."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = super(made, self).__call__
        route = getattr(self, "_hal_route", None)
        if route is None:
            return call(*args, **kwargs)
        _here.stack.append((route, route.other_tokens(args, kwargs)))
        try:
            if not route.intercept:
                return call(*args, **kwargs)
            with _intercept:
                return call(*args, **kwargs)
        finally:
            _here.stack.pop()

    made = subclass(cls, {"__call__": __call__})
    return made


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    layout: Layout,
) -> Tensor:
    """``hal.attention`` under the running site, with the causal alignment of PyTorch's SDPA (top-left)."""
    running = _here.stack[-1] if _here.stack else None
    route, other = running or (_NO_ROUTE, None)
    axis = 1 if layout == "bshd" else 2
    q_len, kv_len = q.shape[axis], k.shape[axis]
    # Keys that are no longer than the other sequence hold nothing of the own one; joint attention's are longer.
    role: Literal["self", "cross"] = "cross" if other is not None and kv_len <= other else "self"
    if is_causal and q_len != kv_len:
        # hal aligns causal masks bottom-right.
        if kv_len > q_len and attn_mask is None:
            k, v = k.narrow(axis, 0, q_len), v.narrow(axis, 0, q_len)  # top-left, no query sees a later key
        else:
            seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril()
            attn_mask, is_causal = _both(attn_mask, seen), False
    arguments: dict[str, Any] = {
        "attn_mask": attn_mask,
        "is_causal": is_causal,
        "scale": scale,
        "dropout_p": dropout_p,
        "enable_gqa": enable_gqa,
        "layout": layout,
        "role": role,
    }
    _here.stack.append(None)
    try:
        return attention_at(route.place, q, k, v, arguments)
    finally:
        _here.stack.pop()


def _both(mask: Tensor | None, seen: Tensor) -> Tensor:
    """``mask`` narrowed to what the boolean ``seen`` allows."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


# --- call ------------------------------------------------------------------------------------------------------------


class _Intercept(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            # After a graph break the mode may stand on torch's stack twice; hal's own calls must pass.
            if _here.stack and _here.stack[-1] is not None:
                return _scaled_dot_product_attention(*args, **kwargs)
        elif torch.compiler.is_compiling():
            name = getattr(func, "__name__", "")
            if getattr(Tensor, name, None) is func:  # Dynamo knows Tensor's Python methods by their names only
                return getattr(args[0], name)(*args[1:], **kwargs)
        return func(*args, **kwargs)


_intercept = _Intercept()


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's signature and shapes: ``(*batch, heads, tokens, head_dim)`` with any number of batch dimensions."""
    if query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        return _run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "bhsd")
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if query.dim() == 2:
        lift: Callable[[Tensor], Tensor] = lambda x: x[None, None]
    else:
        lift = lambda x: x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
    if attn_mask is not None and attn_mask.dim() > 2:
        attn_mask = lift(attn_mask)
    out = _run(lift(query), lift(key), lift(value), attn_mask, dropout_p, is_causal, scale, enable_gqa, "bhsd")
    return out[0, 0] if query.dim() == 2 else out.reshape(*batch, *out.shape[-3:])


# --- backend: diffusers ----------------------------------------------------------------------------------------------


def _diffusers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: object = None,
) -> Tensor:
    """What ``dispatch_attention_fn`` calls.  Tensors are ``(batch, tokens, heads, head_dim)``."""
    if not _here.stack:  # a processor object that a model without hal shares
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, parallel_config=_parallel_config
        )
    if _parallel_config is not None:
        raise AttachError(
            "this model runs under diffusers' context parallelism, which an attached hal does not serve; "
            "disable it (model.disable_parallelism()) or detach hal"
        )
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # diffusers' native backend reads such a mask as key padding
    return _run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "bshd")


def _enter_diffusers() -> Any:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    _AttentionBackendRegistry.register(member)(_diffusers)
    return member


def _leave_diffusers(member: Any) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        del table[member]


# --- interface: transformers -----------------------------------------------------------------------------------------


def _transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.  Tensors are ``(batch, heads, tokens, head_dim)``, keys not repeated."""
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise AttachError(f"{type(module).__name__} asks for {name}, which hal does not compute; detach this model")
    if kwargs.get("output_attentions"):
        warnings.warn("hal returns no attention weights (output_attentions); detach to get them", stacklevel=2)
    q_len, kv_len = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # One query is a decoding step: it sees all keys.  A mask already holds the causal pattern.
    is_causal = q_len > 1 and attention_mask is None and bool(is_causal)
    if position_bias is not None:
        lowest = torch.finfo(query.dtype).min  # as transformers does: a row without any key stays an even mix
        if is_causal:
            attention_mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril()
            is_causal = False
        if attention_mask is None:
            attention_mask = position_bias
        elif attention_mask.dtype == torch.bool:
            attention_mask = torch.where(attention_mask, position_bias, lowest)
        else:
            attention_mask = position_bias + attention_mask
    gqa = query.shape[1] != key.shape[1]
    out = _run(query, key, value, attention_mask, dropout, is_causal, scaling, gqa, "bhsd")
    return out.transpose(1, 2).contiguous(), None


def _enter_transformers() -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _transformers)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _leave_transformers(name: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping[name]


# --- entries that live as long as one attachment uses them -----------------------------------------------------------

_DOORS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "backend": (_enter_diffusers, _leave_diffusers),
    "interface": (_enter_transformers, _leave_transformers),
}
_open: dict[str, list[Any]] = {}  # door -> [name, number of attachments]
_lock = threading.Lock()


def acquire(door: str) -> Any:
    """Register hal behind ``door`` (``backend`` or ``interface``) if it is not yet; returns the name it goes by."""
    with _lock:
        if door not in _open:
            _open[door] = [_DOORS[door][0](), 0]
        _open[door][1] += 1
        return _open[door][0]


def release(door: str) -> None:
    """Give one use back; the last one takes the registration away."""
    with _lock:
        _open[door][1] -= 1
        if not _open[door][1]:
            _DOORS[door][1](_open.pop(door)[0])
