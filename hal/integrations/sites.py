"""Where a model computes attention, and by which door hal can take it over.

A site is the module around one attention.  Sites are found by reading the code of a module's ``forward`` and of its
diffusers processor, so a processor that hal has never heard of is treated like a known one.  There are three doors:

* ``backend``: the processor hands its tensors to ``dispatch_attention_fn`` under its own ``_attention_backend``.
* ``interface``: the module looks its function up in transformers' ``ALL_ATTENTION_FUNCTIONS``.
* ``call``: the code calls ``torch.nn.functional.scaled_dot_product_attention`` itself, or lets diffusers' native
  backend do it.

hal's own layers are taken over as what they are (``layer``).  Attention that uses none of them (its own softmax, FlexAttention, ``torch.nn.MultiheadAttention``) cannot be reached.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..layers import LocalAttention

SDPA, DISPATCH, INTERFACE = "scaled_dot_product_attention", "dispatch_attention_fn", "ALL_ATTENTION_FUNCTIONS"
# Names under which modules take the sequence that cross-attention reads its keys from.
OTHER_SEQUENCE = ("encoder_hidden_states", "key_value_states")

Code = tuple["Counter[str]", frozenset[str]]  # how often each name is read, and the string constants


@dataclass(frozen=True)
class Site:
    """One attention that hal reaches.  ``layer`` counts the blocks of its component that hold attention."""

    name: str
    cls: str
    layer: int
    doors: frozenset[str]


@dataclass(frozen=True)
class Unreached:
    """One attention that hal does not reach, or not wholly, and why."""

    name: str
    cls: str
    why: str


def find(model: nn.Module) -> tuple[dict[Site, nn.Module], list[Unreached]]:
    """The attention of ``model``, in module order: each reached site with its module, and what is not reached."""
    sites: dict[Site, nn.Module] = {}
    unreached: list[Unreached] = []
    layers: dict[str, int] = {}
    owners: list[tuple[str, nn.Module]] = []  # transformers models on the way down, outermost first
    skip: set[int] = set()
    read = functools.cache(uses)  # for this model only: people patch methods
    for name, module in model.named_modules():
        if id(module) in skip:
            continue
        if hasattr(module, "_supports_sdpa"):
            owners.append((name, module))
        processor = getattr(module, "processor", None)
        processor = processor if callable(processor) else None
        skip.add(id(processor))
        doors, why = _judge(module, processor, read)
        if "interface" in doors and (refused := _interface_refused(name, owners)):
            doors, why = doors - {"interface"}, refused
        cls = type(module if processor is None else processor).__name__
        if doors:
            sites[Site(name, cls, layers.setdefault(_block(name), len(layers)), doors)] = module
        if why:
            unreached.append(Unreached(name, cls, why))
    return sites, unreached


def other_sequence(cls: type[nn.Module]) -> tuple[str, int] | None:
    """Name and place of the argument of ``cls.forward`` that carries another sequence, if it has one."""
    for place, name in enumerate(list(inspect.signature(cls.forward).parameters)[1:]):
        if name in OTHER_SEQUENCE:
            return name, place
    return None


def _block(name: str) -> str:
    """The block that a site belongs to: its parent, or itself where the parent is but a list of attentions."""
    parent, _, own = name.rpartition(".")
    return name if own.isdigit() else parent


def _judge(module: nn.Module, processor: Any, read: Callable[[type, Any], Code]) -> tuple[frozenset[str], str]:
    """The doors into one module, and why (a part of) its attention stays out of reach."""
    if isinstance(module, LocalAttention):
        return frozenset({"layer"}), ""
    if isinstance(module, nn.MultiheadAttention):
        return frozenset(), "torch.nn.MultiheadAttention has no place where another attention can be put"
    cls: Any = type(module)
    names, texts = read(cls, vars(module).get("forward") or type(module).forward)
    if processor is not None:
        cls = type(processor)
        more = read(cls, processor if isinstance(processor, types.FunctionType) else cls.__call__)
        names, texts = names + more[0], texts | more[1]
    doors = set()
    why = ""
    if INTERFACE in names:
        doors.add("interface")
        if "sdpa" in texts:  # the class treats the name "sdpa" apart, so another name takes another path
            return frozenset(), "it treats transformers' attention implementations by name"
    if DISPATCH in names:
        if default := getattr(type(processor), "_attention_backend", None):
            return frozenset(), f"its processor works with diffusers' {default!r} backend only"
        if hasattr(processor, "_attention_backend"):
            doors.add("backend")
        if names[DISPATCH] > names["_attention_backend"]:  # some calls do not go by the processor's own setting
            flex = "flex" in texts or "FLEX" in names
            why = _other_backend(flex)
            if doors or not flex:
                doors.add("call")
    if SDPA in names:
        doors.add("call")
    if "flex_attention" in names:
        why = "it calls FlexAttention"
    if not doors and "multi_head_attention_forward" in names:
        why = "it calls torch's multi_head_attention_forward"
    own = processor is not None or (re.search("atte?n", type(module).__name__, re.I) and "softmax" in names)
    if own and not doors and not why:
        why = "it computes attention with its own code"
    return frozenset(doors), why


def _other_backend(flex: bool) -> str:
    """Why calls to diffusers' dispatcher without a backend of their own may not end in PyTorch's SDPA."""
    if flex:
        return "some of its calls ask for FlexAttention by name"
    active = sys.modules["diffusers.models.attention_dispatch"]._AttentionBackendRegistry._active_backend.value
    return "" if active == "native" else f"it goes by diffusers' active backend, which is {active!r}; set 'native'"


def _interface_refused(name: str, owners: list[tuple[str, nn.Module]]) -> str:
    """Why transformers itself would not change the implementation of the model that owns site ``name``."""
    inside = [model for prefix, model in owners if not prefix or name == prefix or name.startswith(prefix + ".")]
    if not inside:
        return "it belongs to no transformers model"
    owner = inside[-1]
    if not owner._supports_sdpa:
        return f"{type(owner).__name__} does not support SDPA"
    if not owner._can_set_attn_implementation():  # type: ignore[operator]
        return f"{type(owner).__name__} does not let its attention implementation be set"
    return ""


def uses(cls: type, entry: Any) -> Code:
    """The names and texts in the code of ``entry``, a method of ``cls``.

    Follows the class's own methods and functions that its code names; stops at PyTorch and at diffusers' dispatcher.
    """
    names: Counter[str] = Counter()
    texts: set[str] = set()
    seen: set[types.CodeType] = set()
    todo: list[Any] = [entry]
    while todo:
        function = todo.pop()
        function = inspect.unwrap(function) if callable(function) else function
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            continue
        if function.__name__ == DISPATCH or function.__module__.partition(".")[0] == "torch":
            continue
        seen.add(function.__code__)
        codes = [function.__code__]
        for code in codes:  # grows by nested functions
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            texts.update(const for const in code.co_consts if isinstance(const, str))
            for name in code.co_names:
                todo += [inspect.getattr_static(cls, name, None), function.__globals__.get(name)]
            names.update(i.argval for i in dis.get_instructions(code) if i.opcode in dis.hasname and "LOAD" in i.opname)
        todo += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return names, frozenset(texts)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
