"""What models need of attention, where they need anything: a card each, found by the entry points ``hal.models``.

A card is keyed by a class of the pipeline or of the component, by its config, by its weights; unknown models need none.
This package reads names and values; it imports no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..errors import DeclarationError, unknown
from ..policy import AUTOMATIC, Only, Policy, Request, Target
from ..rules import Limits, check, compiled

if TYPE_CHECKING:
    from ..catalog import Catalog

WORDS = ("require", "only", "forbid", "default")


@dataclass(frozen=True)
class Need:
    """What a model's component needs, and why.

    ``require``: its attention is wrong under any other backend, so this one outranks every choice.  ``only``: it takes
    no other, so that an explicit other one is refused.  ``forbid``: never these.  ``default``: this one where nobody asks
    otherwise and it fits.
    ``target`` is a role or layers of the component that matched (``.cross``, ``@0-2``), another component's name, or
    empty: all of the component that matched.
    """

    word: str
    backends: frozenset[str]
    why: str
    target: str = ""
    citation: str = ""

    def __post_init__(self) -> None:
        if self.word not in WORDS:
            raise DeclarationError(unknown("word of a model card", self.word, WORDS))
        if self.word in ("require", "default") and len(self.backends) != 1:
            raise DeclarationError(f"a model card's {self.word} is of one backend, not {sorted(self.backends)}")


@dataclass(frozen=True, eq=False)
class Card:
    """What identifies a model, and what it needs.

    ``classes``: the class of the pipeline or of the component, either.  ``config``: limits on values of the component's
    config (``{"num_layers": {4}}``).  ``weights``: patterns of parameter names, each of which must be there; ``without``:
    none of which may be.  ``gates``: patterns of the parameters that only some checkpoints have.  ``geometry``: keys of
    the config that a backend reads.  ``apart``: modules of the component whose attention is chosen as that of a
    component of that name (a token refiner, which sees no video); the others' layers are numbered without them.
    """

    name: str
    classes: frozenset[str]
    needs: tuple[Need, ...] = ()
    config: Limits = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    geometry: tuple[str, ...] = ()
    title: str = ""


@dataclass(frozen=True)
class Found:
    """A card that a component matches, and what the checkpoint has of it."""

    card: Card
    component: str
    gates: tuple[str, ...]
    geometry: Mapping[str, Any]


def found(
    cards: Iterable[Card], component: str, classes: Iterable[str], config: Mapping[str, Any], weights: Iterable[str]
) -> list[Found]:
    """The cards that a component matches.  Pure: names and values in, so a folder can be read without its weights."""
    names, classes = list(weights), set(classes)
    out = []
    for card in cards:
        missed: list[Any] = []
        check(compiled(card.config), {k: config.get(k) for k in card.config}, missed)
        there = all(_any(p, names) for p in card.weights) and not any(_any(p, names) for p in card.without)
        if card.classes & classes and not missed and there:
            gates = tuple(p for p in card.gates if _any(p, names))
            out.append(Found(card, component, gates, {k: config[k] for k in card.geometry if k in config}))
    return out


def _any(pattern: str, names: list[str]) -> bool:
    return any(fnmatchcase(n, pattern) for n in names)


def of(model: Any, parts: Mapping[str, Any], catalog: Catalog) -> list[Found]:
    """The cards of a loaded pipeline or model; ``parts`` are its components by name."""
    out = []
    for name, part in parts.items() if catalog.models else ():
        classes = {type(getattr(x, "_orig_mod", x)).__name__ for x in (model, part)}  # as torch.compile wraps it
        config = dict(getattr(part, "config", None) or {}) if not hasattr(part, "_supports_sdpa") else {}
        out += found(catalog.models.values(), name, classes, config, (n for n, _ in part.named_parameters()))
    return out


def policy(matches: Iterable[Found], catalog: Catalog) -> Policy:
    """What the cards say, as a policy.  A need for a backend that is not installed cannot be met or broken: forbids
    of it say nothing; a require of it is kept, and refused where it is met."""
    requests: list[Request] = []
    limits: list[Only] = []
    for match in matches:
        for need in match.card.needs:
            head = need.target if need.target and need.target[0] not in ".@" else match.component + need.target
            target = Target.parse(head)
            source = f"the card of {match.card.name}: {need.why}" + (f" ({need.citation})" if need.citation else "")
            if need.word == "only":
                limits.append(Only(target, need.backends, source))
            for backend in sorted(need.backends) if need.word != "only" else ():
                if need.word == "require":
                    requests.append(Request(backend, "require", source, kind="required", target=target))
                elif backend in catalog.backends:
                    mode, kind = ("forbid", "required") if need.word == "forbid" else ("require", "default")
                    requests.append(Request(backend, mode, source, kind=kind, target=target))
    return (
        Policy(tuple(dict.fromkeys(requests)), limits=tuple(dict.fromkeys(limits))) if requests or limits else AUTOMATIC
    )
