"""What surrounds a call: policy, simulated machine, site, plan; and the position in the denoising loop.

One interned token in a ContextVar: right across threads and asyncio tasks, one read on the hot path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary, ref

from .errors import PolicyError
from .facts import Machine
from .ledger import Ledger, scopes, watching
from .policy import ANYWHERE, AUTOMATIC, Policy, Request, Site, target_of

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True, eq=False)
class Context:
    """Compared and hashed by identity, so equal contexts are made once."""

    policy: Policy = AUTOMATIC
    machine: Machine | None = None  # a simulated one; None: this machine
    site: Site = ANYWHERE
    plan: Plan | None = None  # nothing else may run


class Grid(NamedTuple):
    """How the video tokens of a call are laid out, row-major, and how many text tokens are with them."""

    frames: int
    height: int
    width: int
    text: int = 0
    text_first: bool = False  # text tokens come before the video's

    @property
    def tokens(self) -> int:
        """Video tokens."""
        return self.frames * self.height * self.width


class Position(NamedTuple):
    """Where in the denoising loop and in the model a call stands; None: not known."""

    step: int | None = None
    steps: int | None = None
    timestep: float | None = None
    layer: int | None = None
    grid: Grid | None = None
    loop: int | None = None  # of the denoising loop; no two have the same
    layers: int | None = None  # of the denoiser


NOTHING = Context()
NOWHERE = Position()
current: ContextVar[Context] = ContextVar("hal", default=NOTHING)
_position: ContextVar[Position] = ContextVar("hal_position", default=NOWHERE)
# Equal contexts are one object for as long as anything uses it, so that a cached decision is found again.
_interned: WeakValueDictionary[tuple[Any, ...], Context] = WeakValueDictionary()
_interned[NOTHING.policy, NOTHING.machine, NOTHING.site, NOTHING.plan] = NOTHING


_generation: ContextVar[str] = ContextVar("hal_generation")
_by_layer: ContextVar[bool] = ContextVar("hal_by_layer")


class _Local:
    """``generation``: a text for what surrounds compiled code (policy, machine, site, plan), which guards on it.
    ``by_layer``: True where each layer decides for itself.

    Dynamo can read no ContextVar, but it takes a property made in C as it is and guards on its value.  So the getter is
    ``ContextVar.get`` itself, whose default, where nothing was said, is the object that it is called with.
    """

    generation = property(_generation.get)
    by_layer = property(_by_layer.get)


local = _Local()
_numbers: dict[tuple[Any, ...], str] = {}
_count = itertools.count(1)


def _announced(c: Context) -> str:
    return _numbered((c.policy, c.machine, c.site, c.plan), _numbers)


def _numbered(what: tuple[Any, ...], known: dict[tuple[Any, ...], str]) -> str:
    if len(known) > 4096:  # a number is never used twice, so forgetting one only costs a trace
        known.clear()
    return known.setdefault(what, f"hal-{next(_count)}")


@contextmanager
def changed(**changes: Any) -> Iterator[Context]:
    """The current context with some of it changed; nests, and is undone when left."""
    before = current.get()
    c = interned(before, **changes)
    token, number, layered = current.set(c), _generation.set(_announced(c)), _by_layer.set(c.policy.layered)
    try:
        yield c
    finally:
        current.reset(token)
        _generation.reset(number)
        _by_layer.reset(layered)


def interned(base: Context, **changes: Any) -> Context:
    """``base`` with some of it changed; equal contexts are one."""
    c = replace(base, **changes)
    return _interned.setdefault((c.policy, c.machine, c.site, c.plan), c)


def number() -> int:
    """One that nobody else has."""
    return next(_count)


class Place:
    """Where an attention layer stands, and what is said of it there: a policy over the running one, and its site.

    Compiled code knows a place by a text that equal places share, as it can guard on nothing richer: ``key``, and where
    each layer decides for itself ``layer_key``.  So equal layers share their code where nobody tells them apart.
    ``owner`` is the number of the attachment or layer, to which a request may be bound.
    """

    __slots__ = ("__weakref__", "key", "layer_key", "ledger", "made", "owner", "policy", "site")

    def __init__(self, policy: Policy, site: Site, ledger: Ledger | None = None, owner: int = 0):
        self.policy, self.site, self.ledger = policy, site, ledger
        self.owner = owner or number()
        self.made: dict[Context, Context] = {}
        self.layer_key = _numbered((policy, site), _keys)
        self.key = self.layer_key if policy.layered else _numbered((policy, site._replace(layer=None)), _keys)
        if len(_places) > 4096:
            for key in [k for k, refs in _places.items() if all(r() is None for r in refs)]:
                _places.pop(key, None)
        for key in {self.key, self.layer_key}:
            _places[key] = [r for r in _places.get(key, ()) if r() is not None] + [ref(self)]

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of a layer stands where the layer does, and is counted elsewhere
        return Place, (self.policy, self.site)

    def within(self, outer: Context) -> Context:
        """The running context as this place sees it."""
        made = self.made.get(outer)
        if made is None:
            policy = self.policy.over(outer.policy.of(self.owner))
            site = self.site if self.site.component else self.site._replace(component=outer.site.component)
            if not policy.layered:
                site = site._replace(layer=None)  # else every layer would decide for itself what is the same for all
            if len(self.made) > 8:
                self.made = {}
            made = self.made[outer] = interned(outer, policy=policy, site=site)
        return made

    def entered(self) -> Entered:
        """``with place.entered():`` attention inside is of this place."""
        return Entered(self)


class Entered:
    """A context manager for the hot path, where a generator would cost as much as the rest."""

    __slots__ = ("place", "tokens")

    def __init__(self, place: Place):
        self.place = place

    def __enter__(self) -> None:
        place, layer = self.place, self.place.site.layer
        self.tokens = (
            current.set(place.within(current.get())),
            None if place.ledger is None else watching.set((*watching.get(), place.ledger)),
            None if layer is None else _position.set(_position.get()._replace(layer=layer)),
        )

    def __exit__(self, *error: object) -> None:
        context, watchers, layer = self.tokens
        if layer is not None:
            _position.reset(layer)
        if watchers is not None:
            watching.reset(watchers)
        current.reset(context)


_keys: dict[tuple[Policy, Site], str] = {}
_places: dict[str, list[ref[Place]]] = {}


def place(key: str) -> Place:
    """A living place of that key, the latest: equal places decide alike, and those before may belong to what has ended."""
    return next(p for p in (r() for r in reversed(_places[key])) if p is not None)


@contextmanager
def watched(ledger: Ledger) -> Iterator[Ledger]:
    """Tell ``ledger`` of what is decided and runs inside."""
    token = watching.set((*watching.get(), ledger))
    scopes.more(1)
    try:
        yield ledger
    finally:
        scopes.more(-1)
        watching.reset(token)


@contextmanager
def force(backend: str, *, on: str = "", kernel: str = "") -> Iterator[None]:
    """Attention inside runs by ``backend`` or raises; ``on`` narrows it to a component, role or layers.

    It outranks every override, the global choice and all defaults; only a backend that a layer requires for correctness
    and the ``backend=`` of a call come first.  Raises PolicyError for an unknown name, and when it ends for a target of
    which no attention ran although other attention did.
    """
    from . import detect, plugins

    catalog = plugins.catalog(detect.ignored())
    name = catalog.backend_name(backend)
    source = f"hal.force({backend!r}{f', on={on!r}' if on else ''}{f', kernel={kernel!r}' if kernel else ''})"
    if kernel and catalog.kernel_name(kernel) not in (known := catalog.kernels_of(name)):
        raise PolicyError(f"{source}: {kernel} is no kernel of {name}; its kernels: {', '.join(known)}")
    request = Request(name, "require", source, kernel, backend, "force", target_of(on, source))
    with changed(policy=current.get().policy.with_request(request)), watched(Ledger()) as ledger:
        yield
    if on and ledger.tallies:
        ledger.check_used([request])


@contextmanager
def component(name: str, backend: str | None = None, *, mode: str = "require") -> Iterator[None]:
    """Calls and layers made inside belong to this component (a name of ``model_index.json``).

    ``backend`` overrides the choice for its attention: strictly, and as an error when it ends without one attention
    call or layer that used it (a layer that defers its choice to its first use counts).  An exception inside stays
    what it is.  Raises PolicyError for an unknown backend.
    """
    here = current.get()
    target = target_of(name, f"hal.component({name!r})")
    if not target.component:
        raise PolicyError(f"hal.component({name!r}) names no component; write, say, hal.component('text_encoder')")
    site = here.site._replace(component=target.component)
    if backend is None:
        with changed(site=site):
            yield
        return
    from . import detect, plugins

    source = f"hal.component({name!r}, backend={backend!r})"
    own = plugins.catalog(detect.ignored()).backend_name(backend)
    if mode == "forbid":
        raise PolicyError(f"{source}, mode='forbid' names nothing to use; write hal.scope(forbid='{name}={backend}')")
    request = Request(own, mode, source, "", backend, "override", target)
    with changed(policy=here.policy.with_request(request), site=site), watched(Ledger()) as ledger:
        yield
    ledger.check_used([request])


@contextmanager
def position(**changes: Any) -> Iterator[None]:
    """Calls inside stand at this step, number of steps, timestep or layer."""
    token = _position.set(_position.get()._replace(**changes))
    try:
        yield
    finally:
        _position.reset(token)


@contextmanager
def step(index: int, steps: int, *, timestep: float | None = None) -> Iterator[None]:
    """Attention inside belongs to denoising step ``index`` (from 0) of ``steps``.  Raises PolicyError for another index.

    An attached pipeline says this by itself; a loop of one's own says it here.
    """
    for name, n in (("index", index), ("steps", steps)):
        if isinstance(n, bool) or not isinstance(n, int):
            raise PolicyError(f"step {name} is {n!r}; allowed are integers")
    if not 0 <= index < steps:
        raise PolicyError(f"step {index} of {steps}: allowed are 0 to {steps - 1}")
    with position(step=index, steps=steps, timestep=timestep):
        yield


@contextmanager
def grid(frames: int, height: int, width: int, text: int = 0, *, text_first: bool = False) -> Iterator[None]:
    """Attention inside is over this token grid: frames, height and width in tokens, row-major, and ``text`` tokens,
    which come after the video's or, with ``text_first``, before them.

    An attached pipeline of a known family says this by itself.  Raises PolicyError for a size below 1.
    """
    for name, n in (("frames", frames), ("height", height), ("width", width)):
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise PolicyError(f"grid {name} is {n!r}; allowed: an integer of at least 1")
    if isinstance(text, bool) or not isinstance(text, int) or text < 0:
        raise PolicyError(f"grid text is {text!r}; allowed: an integer of at least 0")
    if not isinstance(text_first, bool):
        raise PolicyError(f"grid text_first is {text_first!r}; allowed: True or False")
    with position(grid=Grid(frames, height, width, text, text_first)):
        yield


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
