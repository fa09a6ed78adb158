"""What surrounds a call: policy, simulated machine, component; and the position in the denoising loop.

One interned token in a ContextVar: right across threads and asyncio tasks, one read on the hot path.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from .facts import Machine
from .policy import AUTOMATIC, Policy


@dataclass(frozen=True, eq=False)
class Context:
    """Compared and hashed by identity, so equal contexts are made once."""

    policy: Policy = AUTOMATIC
    machine: Machine | None = None  # a simulated one; None: this machine
    component: str = ""


class Position(NamedTuple):
    """Where in the denoising loop and in the model a call stands; None: not known."""

    step: int | None = None
    steps: int | None = None
    timestep: float | None = None
    layer: int | None = None


NOTHING = Context()
NOWHERE = Position()
current: ContextVar[Context] = ContextVar("hal", default=NOTHING)
_position: ContextVar[Position] = ContextVar("hal_position", default=NOWHERE)
# Equal contexts are one object for as long as anything uses it, so that a cached decision is found again.
_interned: WeakValueDictionary[tuple[Any, ...], Context] = WeakValueDictionary()
_interned[NOTHING.policy, NOTHING.machine, NOTHING.component] = NOTHING


class _Local(threading.local):
    """A number for the policy and machine in force in this thread: compiled code guards on it, and cannot read a ContextVar."""

    generation = 0


local = _Local()
_numbers: dict[tuple[Any, ...], int] = {}
_count = itertools.count(1)


def _announce(old: Context, new: Context) -> None:
    key = new.policy, new.machine
    if (old.policy, old.machine) != key:
        if len(_numbers) > 1024:  # numbers are never used twice, so forgetting one only costs a trace
            _numbers.clear()
        local.generation = 0 if key == (NOTHING.policy, None) else _numbers.setdefault(key, next(_count))


@contextmanager
def changed(**changes: Any) -> Iterator[Context]:
    """The current context with some of it changed; nests, and is undone when left."""
    c = replace(current.get(), **changes)
    c = _interned.setdefault((c.policy, c.machine, c.component), c)
    before = current.get()
    token = current.set(c)
    _announce(before, c)
    try:
        yield c
    finally:
        current.reset(token)
        _announce(c, before)


@contextmanager
def component(name: str) -> Iterator[None]:
    """Calls inside belong to this component (a name of ``model_index.json``)."""
    with changed(component=name):
        yield


@contextmanager
def position(**changes: Any) -> Iterator[None]:
    """Calls inside stand at this step, number of steps, timestep or layer."""
    token = _position.set(_position.get()._replace(**changes))
    try:
        yield
    finally:
        _position.reset(token)


def where() -> Position:
    return _position.get()


@contextmanager
def simulate(
    on: str | Machine, packages: Mapping[str, Any] | None = None, without: Iterable[str] | str = (), **software: str
) -> Iterator[Machine]:
    """Put a simulated machine in place of this one: a preset, ``platform:arch``, a facts file or a Machine.

    ``packages`` are versions (or Package values) by distribution or import name; ``without`` names packages to take away;
    ``software`` sets torch, cudnn, triton, ….  Decisions and explanations inside are the simulated machine's.
    Raises FactError or PlatformError for an unknown name.
    """
    from . import detect, plugins

    catalog = plugins.catalog(detect.ignored())
    machine = catalog.machine(on) if isinstance(on, str) else on
    gone = [without] if isinstance(without, str) else without
    machine = catalog.changed(machine, {**(packages or {}), **dict.fromkeys(gone)}, software)
    with changed(machine=machine):
        yield machine
