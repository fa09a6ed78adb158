"""Who asked for which backend, where, and how strictly.  Pure values; ``ruled`` is the whole order of selection.

1. A backend that a layer requires for correctness outranks everything.
2. ``call`` and ``force``: ``backend=`` of a call, and ``hal.force``.  ``request``: one request's override (``hal.request``).
3. ``override``: for a component; one for its role or its layers comes before one for all of it.
4. ``global``: the command line, then the environment, then a settings file.
5. ``default``: of the layer or the component.
6. Automatic choice, which is nobody's request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .errors import PolicyError, unknown
from .facts.packages import package_key

MODES = (
    "require",  # this or an error
    "prefer",  # this; where the machine cannot have it, what it declares as its fallback
    "forbid",  # never this
)
KINDS = ("required", "call", "force", "request", "override", "global", "default")  # the stronger first
ROLES = ("self", "cross")
# Where the denoising is done a global choice is strict; encoders, VAEs and connectors take it where it fits.
DENOISER = re.compile(r"((transformer|unet)(_\d+|_ref)?)?")


@dataclass(frozen=True)
class Target:
    """Where a request applies: a component, a role, layers; what is empty means all."""

    component: str = ""
    role: str = ""
    layers: tuple[int, ...] = ()

    @staticmethod
    def parse(text: str) -> Target:
        """``transformer``, ``transformer.cross``, ``transformer@0-2+5``, ``transformer.self@0``, or empty: everywhere."""
        head, at, tail = text.strip().partition("@")
        component, dot, role = head.partition(".")
        role = role.strip().lower()
        if dot and role not in ROLES:
            raise PolicyError(unknown(f"role in {text!r}", role, ROLES) + "; write, say, transformer.cross")
        if component and not re.fullmatch(r"[A-Za-z_]\w*", component):
            raise PolicyError(f"{text!r}: {component!r} is no component's name; write, say, text_encoder")
        layers: list[int] = []
        for part in tail.split("+") if at else ():
            m = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
            if not m or (m[2] and int(m[2]) < int(m[1])):
                raise PolicyError(f"{text!r}: {part!r} is no layer or range of layers; write, say, transformer@0-2+5")
            layers += range(int(m[1]), int(m[2] or m[1]) + 1)
        return Target(component, role, tuple(dict.fromkeys(layers)))

    @property
    def misspelt(self) -> str:
        """What the component was probably meant to be, where nobody knows which components there are."""
        from difflib import get_close_matches

        stem = re.sub(r"_\d+$", "", self.component)
        near = get_close_matches(stem, USUAL, n=1, cutoff=0.88)
        return near[0] if near and stem not in USUAL else ""

    def within(self, other: Target) -> bool:
        """Whether every place that this means is a place that the other means."""
        return (
            other.component in ("", self.component)
            and other.role in ("", self.role)
            and (not other.layers or (bool(self.layers) and set(self.layers) <= set(other.layers)))
        )

    def __str__(self) -> str:
        where = self.component + (f".{self.role}" if self.role else "")
        return where + (f"@{'+'.join(map(str, self.layers))}" if self.layers else "") or "everywhere"


EVERYWHERE = Target()
# Components as diffusers' pipelines name them, beside a number at the end.
USUAL = (
    "transformer",
    "unet",
    "vae",
    "text_encoder",
    "image_encoder",
    "connectors",
    "controlnet",
    "prior",
    "vision_encoder",
)


class Site(NamedTuple):
    """A layer's attention as policy sees it, and what the layer or its model says of itself."""

    component: str = ""
    role: str = "self"
    layer: int | None = None
    required: str = ""  # a backend that the layer needs to be correct
    default: str = ""  # a backend that the layer would rather have
    supported: frozenset[str] = frozenset()  # guides automatic choice only
    why: str = ""  # what makes ``required`` so

    def to_json(self) -> dict[str, Any]:
        """What is said of the site."""
        out = {k: sorted(x) if isinstance(x, frozenset) else x for k, x in self._asdict().items()}
        return {k: x for k, x in out.items() if x not in ("", None, [])}

    def __str__(self) -> str:
        where = f"{self.component or 'call'}.{self.role}"
        return where if self.layer is None else f"{where}@{self.layer}"


@dataclass(frozen=True)
class Request:
    """A backend, and perhaps one kernel of it, that somebody requires, prefers or forbids at a target.

    ``source`` says who, with the place; ``asked`` is the name as it was written, where it says more than the backend:
    fa3 is a generation of fa.
    """

    backend: str = ""
    mode: str = "require"
    source: str = "policy"
    kernel: str = ""
    asked: str = ""
    kind: str = "force"
    target: Target = EVERYWHERE
    owners: frozenset[int] = frozenset()  # the places that it is for (hal.context.Place.owner); empty: no matter which

    def __post_init__(self) -> None:
        for what, given, known in (("request mode", self.mode, MODES), ("request kind", self.kind, KINDS)):
            if given not in known:
                raise PolicyError(unknown(what, given, known))

    def means(self, backend: str, kernel: str | None) -> bool:
        """Whether a row is meant; ``kernel`` None: the platform has no row for the backend at all."""
        if kernel is None:
            return self.backend == backend
        return self.backend in ("", backend) and self.kernel in ("", kernel)

    def __str__(self) -> str:
        return " / ".join(x for x in (self.backend, self.kernel) if x)


ANYWHERE = Site()


class Only(NamedTuple):
    """A component that takes no other backend than these, explicit or not; ``why`` says so to the user."""

    target: Target
    backends: frozenset[str]
    why: str


@dataclass(frozen=True)
class Policy:
    """The requests, in the order in which they count among equals, and what the user allows.

    ``waive``: rules overruled by name; ``fit``: fittings asked for by name; ``settings``: configurations of backends;
    ``limits``: what the model allows.  ``site`` is where the policy is looked at from.
    """

    requests: tuple[Request, ...] = ()
    waive: frozenset[str] = frozenset()
    fit: frozenset[str] = frozenset()
    settings: tuple[Any, ...] = ()  # hal.config.Setting
    limits: tuple[Only, ...] = ()
    native_only: bool | None = None  # a backend that is asked for does not run in its portable form; None: not said
    by_layer: bool = False  # each layer decides for itself, as a plan has it, though none was asked for alone
    site: Site = ANYWHERE

    def __post_init__(self) -> None:
        forbidden = [r for r in self.requests if r.mode == "forbid"]
        for r in self.requests if forbidden else ():
            for f in forbidden:
                whole = f.backend in ("", r.backend) and f.kernel in ("", r.kernel)  # else some of what r means is left
                if r.mode == "require" and whole and r.target.within(f.target):
                    raise PolicyError(f"{r} is required by {r.source} and forbidden by {f.source}; drop one of them")

    @property
    def layered(self) -> bool:
        """Whether some request is for some layers only."""
        return self.by_layer or any(r.target.layers for r in self.requests)

    def with_request(self, *requests: Request) -> Policy:
        """This policy with requests that come before those of the same kind."""
        return replace(self, requests=(*requests, *self.requests))

    def over(self, other: Policy) -> Policy:
        """Both together, this one's requests before the other's of the same kind."""
        if other == AUTOMATIC:
            return self
        both = dict.fromkeys((*self.requests, *other.requests))
        settings, limits = (*self.settings, *other.settings), (*self.limits, *other.limits)
        waive, fit, by_layer = self.waive | other.waive, self.fit | other.fit, self.by_layer or other.by_layer
        native = other.native_only if self.native_only is None else self.native_only
        return Policy(tuple(both), waive, fit, settings, limits, native, by_layer, self.site)

    def of(self, owner: int) -> Policy:
        """This policy as a place sees it: what is bound to it, and nothing that is bound to others."""
        if not any(r.owners for r in self.requests):
            return self
        mine = (r for r in self.requests if not r.owners or owner in r.owners)
        return replace(self, requests=tuple(replace(r, owners=frozenset()) for r in mine))

    @property
    def lasting(self) -> Policy:
        """What stays with a layer that is built under this policy: not what is in force for a moment only."""
        mine = tuple(r for r in self.requests if r.kind not in ("call", "force", "request"))
        return self if mine == self.requests else replace(self, requests=mine)

    def at(self, site: Site) -> Policy:
        return self if site == self.site else replace(self, site=site)

    def forbids(self, backend: str, kernel: str) -> Request | None:
        for r in self.requests:
            if r.mode == "forbid" and r.means(backend, kernel) and covers(r.target, self.site):
                return r
        return None

    def config(self, backend: str) -> Any:
        """The configuration given for a backend at this site; one for the component comes before one for all."""
        mine = [s for s in self.settings if s.backend == backend and s.component in ("", self.site.component)]
        return max(mine, key=lambda s: bool(s.component)).config if mine else None


AUTOMATIC = Policy()


def target_of(text: str, source: str, components: Iterable[str] | None = None) -> Target:
    """The target in a text that ``source`` said.  ``components`` are the names that exist, where they are known.

    Raises PolicyError, where they are not known also for a component that is nearly one of the usual ones.
    """
    if not isinstance(text, str):
        raise PolicyError(f"{source}: a target is a text such as transformer.cross, not {text!r}")
    try:
        target = Target.parse(text)
    except PolicyError as e:
        raise PolicyError(f"{source}: {e}") from None
    if components is None and target.misspelt:
        raise PolicyError(f"{source}: unknown component {target.component!r}; did you mean {target.misspelt!r}?")
    if components is not None and target.component not in (known := sorted(components)):
        raise PolicyError(f"{source}: {unknown('component', target.component, known)}")
    return target


def covers(target: Any, site: Any) -> bool:
    return (
        target.component in ("", site.component)
        and target.role in ("", site.role)
        and (not target.layers or site.layer in target.layers)
    )


# ---- the order


class Step(NamedTuple):
    """What became of a request at a site; ``backend`` is what stands for it then.

    taken; passed (it does not fit, and is lenient here); replaced (sparse, in cross-attention); refused; outranked.
    """

    request: Any
    outcome: str
    backend: str = ""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        r = self.request
        who = {"kind": r.kind, "mode": r.mode, "target": str(r.target), "source": r.source}
        return {
            "request": str(r),
            **who,
            "outcome": self.outcome,
            "backend": self.backend or None,
            "why": self.why or None,
        }

    def __str__(self) -> str:
        r = self.request
        what = f"{r.kind} {r.target}: {r.mode} {r} ({r.source})"
        became = f"{self.outcome} as {self.backend}" if self.backend not in ("", r.backend) else self.outcome
        return f"{what}: {became}" + (f", {self.why}" if self.why else "")


class Fit(NamedTuple):
    """Whether a backend serves the call.  ``closed``: what it lacks is something that the call asks for."""

    found: Any = None
    closed: bool = False
    why: str = ""


class Ruling(NamedTuple):
    found: Any  # what ``serve`` found; None: refused, or automatic where no step was refused
    request: Any
    steps: tuple[Step, ...]

    @property
    def automatic(self) -> bool:
        return self.request is None


def ruled(requests: Iterable[Any], site: Any, backends: Mapping[str, Any], serve: Callable[[str, str], Fit]) -> Ruling:
    """The whole order of selection: which request decides at ``site``, and what it finds there.

    ``backends`` are what is declared of each by name (``traits``, ``roles``, ``fallback``); ``serve(backend, kernel)``
    tells whether one serves the call on the machine.  The result is automatic where no request decides.
    """
    steps: list[Step] = []
    for request, strict in in_order(requests, site):
        if request.kind != "required" and _sparse_across(request.backend, site, backends):
            why = f"{request.backend} is sparse and for self-attention; cross-attention takes a dense backend"
            steps.append(Step(request, "replaced", "", why))
            continue
        if request.kind == "global" and _sparse(request.backend, backends) and not DENOISER.fullmatch(site.component):
            steps.append(Step(request, "passed", "", f"{request.backend} is sparse and for the denoiser"))
            continue
        fit = serve(request.backend, request.kernel)
        found, taken = fit.found, request.backend
        if found is None and request.mode == "prefer" and not fit.closed:
            found, taken = _declared(request.backend, site, backends, serve)
        if found is not None:
            why = fit.why if taken != request.backend else ""
            steps.append(Step(request, "taken", taken, why))
            return Ruling(found, request, (*steps, *_outranked(requests, site, steps)))
        steps.append(Step(request, "refused" if strict else "passed", "", fit.why))
        if strict:
            return Ruling(None, request, (*steps, *_outranked(requests, site, steps)))
    return Ruling(None, None, tuple(steps))


def in_order(requests: Iterable[Any], site: Any) -> list[tuple[Any, bool]]:
    """The requests that apply at a site, the strongest first, each with whether it is strict there."""
    mine = [r for r in requests if r.mode != "forbid" and covers(r.target, site) and not getattr(r, "owners", ())]
    mine.sort(key=rank)  # stable: among equals the first counts
    out = [(r, _strict(r, site)) for r in mine]
    if site.default:
        out.append((Request(site.default, source="the layer's default", kind="default"), False))
    if site.required:
        why = f"the layer, for correctness{': ' + site.why if site.why else ''}"
        for r in mine:
            if r.kind == "required" and r.backend != site.required:
                raise PolicyError(
                    f"{site.required} is required by {why}, and {r.backend} by {r.source}; one of them is wrong"
                )
        out.insert(0, (Request(site.required, source=why, kind="required"), True))
    return out


def rank(r: Any) -> tuple[Any, ...]:
    """How strong a request is; the smaller the stronger."""
    return KINDS.index(r.kind), _width(r)


def _width(r: Any) -> tuple[bool, ...]:
    """What is for less comes first; of forces the innermost, whatever it is for."""
    return () if r.kind in ("call", "force") else (not r.target.layers, not r.target.role, not r.target.component)


def _strict(r: Any, site: Any) -> bool:
    if r.kind in ("global", "request"):
        return site.role == "self" and DENOISER.fullmatch(site.component) is not None
    return bool(r.kind != "default")


def _sparse_across(name: str, site: Any, backends: Mapping[str, Any]) -> bool:
    return site.role == "cross" and _sparse(name, backends) and "cross" not in backends[name].roles


def _sparse(name: str, backends: Mapping[str, Any]) -> bool:
    return name in backends and "sparse" in backends[name].traits


def fallbacks(name: str, backends: Mapping[str, Any]) -> list[str]:
    """The declared fallback of a backend, that one's, and so on: each once, and only what is installed."""
    seen = [name]
    while name in backends and (name := backends[name].fallback or "") in backends and name not in seen:
        seen.append(name)
    return seen[1:]


def _declared(name: str, site: Any, backends: Mapping[str, Any], serve: Callable[[str, str], Any]) -> tuple[Any, str]:
    """What the first backend that serves along the declared fallbacks of ``name`` finds, and its name."""
    for following in fallbacks(name, backends):
        if _sparse_across(following, site, backends):
            continue
        fit = serve(following, "")
        if fit.found is not None:
            return fit.found, following
        if fit.closed:
            break
    return None, ""


def _outranked(requests: Iterable[Any], site: Any, steps: list[Step]) -> list[Step]:
    told = [s.request for s in steps]
    return [
        Step(r, "outranked", "", f"by {told[-1].source}")
        for r, _ in in_order(requests, site)
        if not any(r is t or r == t for t in told)
    ]


# ---- reading


def pieces(given: str | Iterable[str]) -> list[str]:
    """The pieces of a text with commas, or of several texts, in their order."""
    many = [given] if isinstance(given, str) else given
    return [n.strip() for t in many for n in t.split(",") if n.strip()]


def names(given: str | Iterable[str] | None) -> frozenset[str]:
    """Names given as one text with commas, or as several."""
    return frozenset(pieces(given or ()))


def release(text: str) -> tuple[str, str]:
    """``NAME==VERSION`` as (package key, version)."""
    name, eq, version = text.partition("==")
    if not eq or not name.strip() or not version.strip():
        raise PolicyError(f"{text!r} is no NAME==VERSION; write, say, flash-attn==2.8.3")
    return package_key(name), version.strip()
