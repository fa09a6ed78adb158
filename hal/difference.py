"""Difference: what two machines, releases or plans decide otherwise, and why.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .catalog import Catalog
from .decision import Candidate, Decision
from .errors import unknown
from .facts import Call, Machine
from .fittings import fix
from .plan import Plan
from .policy import AUTOMATIC, Policy, Request
from .resolver import resolve
from .rules import Reason, check, plain

# Calls that pipelines of diffusion transformers make: together they meet what kernels differ in.
_SELF = {"dtype": "bfloat16", "head_dim": 128, "heads": 24, "batch": 1, "q_len": 4096}
CALLS: dict[str, dict[str, Any]] = {
    "self-attention of an image": _SELF,
    "self-attention of a video": {**_SELF, "heads": 40, "q_len": 32760},
    "cross-attention with a text mask": {**_SELF, "batch": 2, "role": "cross", "kv_len": 512, "mask": "key_padding"},
    "text encoder": {**_SELF, "heads": 32, "kv_heads": 8, "q_len": 512, "causal": True},
    "VAE": {**_SELF, "heads": 1, "head_dim": 512, "q_len": 16384},
    "float32": {**_SELF, "dtype": "float32"},
    "ring of 2": {**_SELF, "ring": 2, "lse": True},
    "packed sequences": {**_SELF, "batch": 4, "q_len": 2048, "varlen": True},
}


class Question(NamedTuple):
    """A call at a place; ``nth`` tells apart equal ones."""

    name: str
    call: Call
    component: str | None = None
    role: str | None = None
    layer: int | str | None = None
    nth: int = 0


@dataclass(frozen=True, eq=False)
class Choice:
    """What one side decided.  ``decision`` is what this hal decides there: of a machine it is the choice itself."""

    backend: str | None  # None: refused
    kernel: str | None
    fittings: tuple[str, ...]
    source: str
    decision: Decision
    error: str | None = None

    @property
    def outcome(self) -> tuple[str | None, str | None, tuple[str, ...]]:
        return self.backend, self.kernel, self.fittings

    def __str__(self) -> str:
        if self.backend is None:
            return "refused"
        return f"{self.backend} by {self.kernel}" + (f" with {', '.join(self.fittings)}" if self.fittings else "")

    def to_json(self) -> dict[str, Any]:
        keys = ("backend", "kernel", "fittings", "source", "error")
        return {k: plain(getattr(self, k)) for k in keys}


@dataclass(frozen=True, eq=False)
class Side:
    """A machine or a plan with its choices."""

    name: str
    machine: Machine
    choices: Mapping[Question, Choice]
    hal: str

    def to_json(self) -> dict[str, Any]:
        m = self.machine
        return {
            "name": self.name,
            "hal": self.hal,
            "platform": m.platform,
            "arch": m.devices[0].arch,
            "origin": m.origin,
        }


class Fact(NamedTuple):
    """A fact that differs; None: unknown."""

    fact: str
    a: Any
    b: Any


class Cause(NamedTuple):
    """One reason why a side does not take the other's choice."""

    id: str
    message: str
    fix: str = ""
    citation: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "message": self.message, "fix": self.fix or None, "citation": self.citation or None}


class Why(NamedTuple):
    """Why ``on`` (a or b) does not take what the other side runs, which is ``kernel`` (backend/kernel)."""

    kernel: str
    on: str
    causes: tuple[Cause, ...]

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "on": self.on, "reasons": [c.to_json() for c in self.causes]}


class Differing(NamedTuple):
    """A call that the sides decide otherwise; None: that plan does not have it."""

    question: Question
    a: Choice | None
    b: Choice | None
    why: tuple[Why, ...]

    def to_json(self) -> dict[str, Any]:
        q = self.question
        place = {"name": q.name, "component": q.component, "role": q.role, "layer": q.layer, "call": q.call.to_json()}
        a, b = (c.to_json() if c else None for c in (self.a, self.b))
        return {**place, "a": a, "b": b, "why": [w.to_json() for w in self.why]}


@dataclass(frozen=True, eq=False)
class Difference:
    """What differs.  ``calls`` decides whether anything does: facts alone may differ without a consequence."""

    a: Side
    b: Side
    facts: tuple[Fact, ...]
    calls: tuple[Differing, ...]
    compared: int

    def to_json(self) -> dict[str, Any]:
        return {
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "compared": self.compared,
            "facts": [f._asdict() for f in self.facts],
            "calls": [c.to_json() for c in self.calls],
        }


def compare(a: Side, b: Side) -> Difference:
    """What two sides decide otherwise (backend, kernel, fittings, or a refusal), and the facts in which they differ."""
    questions = tuple(dict.fromkeys((*a.choices, *b.choices)))
    calls = []
    for q in questions:
        x, y = a.choices.get(q), b.choices.get(q)
        if x is None or y is None:
            calls.append(Differing(q, x, y, ()))
        elif x.outcome != y.outcome:
            calls.append(Differing(q, x, y, (*_why("b", x, y), *_why("a", y, x))))
    return Difference(a, b, differing_facts(a, b), tuple(calls), len(questions))


# ---- the sides


def questions(calls: Mapping[str, Call]) -> dict[Question, Request | None]:
    """Named calls that nobody requests a backend for."""
    return {Question(name, call): None for name, call in calls.items()}


def typical() -> dict[Question, Request | None]:
    """The calls of CALLS."""
    return questions({name: Call.of(given) for name, given in CALLS.items()})


def asked(plan: Plan) -> dict[Question, Request | None]:
    """A plan's calls, each with the request that decided it: what somebody asked for must run, or nothing."""
    seen: Counter[Question] = Counter()
    out: dict[Question, Request | None] = {}
    for e in plan.entries:
        q = Question(str(e), e.call, e.component, e.role, e.layer)
        requested = e.source != "automatic" and e.backend
        out[q._replace(nth=seen[q])] = Request(e.backend or "", source=e.source) if requested else None
        seen[q] += 1
    return out


def decided(name: str, machine: Machine, catalog: Catalog, asked: Mapping[Question, Request | None]) -> Side:
    """What a machine decides for the calls."""
    from . import __version__

    machine = catalog.read(machine)
    return Side(name, machine, {q: _choice(q.call, machine, catalog, r) for q, r in asked.items()}, __version__)


def planned(name: str, plan: Plan, catalog: Catalog) -> Side:
    """What a plan says, with what this hal would decide on the plan's machine."""
    machine = catalog.read(plan.machine)
    choices = {}
    for e, (q, request) in zip(plan.entries, asked(plan).items()):
        now = _choice(q.call, machine, catalog, request)
        error = None if e.backend else (now.error or "refused when the plan was made")
        choices[q] = Choice(e.backend, e.kernel, e.fittings, e.source, now.decision, error)
    return Side(name, machine, choices, plan.hal)


def _choice(call: Call, machine: Machine, catalog: Catalog, request: Request | None) -> Choice:
    if request and request.backend not in catalog.backends:
        text = unknown("attention backend", request.backend, catalog.backends)
        return Choice(None, None, (), request.source, resolve(call, machine, catalog), text)
    d = resolve(call, machine, catalog, Policy((request,)) if request else AUTOMATIC)
    return Choice(d.backend, d.kernel, d.fittings, d.source, d, d.error.partition("\n")[0] if d.error else None)


# ---- why


def _why(on: str, theirs: Choice, own: Choice) -> tuple[Why, ...]:
    """Why side ``on``, whose choice is ``own``, does not take the other's."""
    if theirs.backend is None:
        return ()
    causes = [Cause("refused", own.error)] if own.error else []
    causes += _causes(theirs, own)
    d = own.decision
    if own.outcome != (d.backend, d.kernel, d.fittings) and not own.error:
        now = f"{d.backend} by {d.kernel}" if d.chosen else "a refusal"
        causes.append(Cause("plan.other", f"the plan has {own}; this hal decides {now} on the plan's machine"))
    return (Why(f"{theirs.backend}/{theirs.kernel}", on, tuple(dict.fromkeys(causes))),)


def _causes(theirs: Choice, own: Choice) -> list[Cause]:
    d = own.decision
    if theirs.backend not in d.catalog.backends:
        return [Cause("backend", f"{theirs.backend} is not installed in this hal")]
    rows = _rows(d, theirs)
    if not rows:
        return [Cause("platform", f"{d.machine.platform} has no row for {theirs.kernel}")]
    if theirs.kernel == own.kernel:  # what the fittings mend
        return _unfitted(d, rows) or [Cause("fits", "it fits as it is")]
    if any(c.verdict is True for c in rows):
        return [_passed_over(theirs, own, rows[0].backend.quality)]
    told = [_cause(r) for c in rows for r in c.reasons]
    mended = _unfitted(theirs.decision, _rows(theirs.decision, theirs))  # by a fitting over there, as it would be here
    return [c for c in told if c not in mended] or told


def _rows(d: Decision, of: Choice) -> list[Candidate]:
    """The rows of a choice's kernel; where the platform has none for its backend, what says so."""
    return [c for c in d.examined(of.backend or "") if c.kernel is None or c.kernel.name == of.kernel]


def _unfitted(d: Decision, rows: list[Candidate]) -> list[Cause]:
    """Every reason against the rows before fittings."""
    lines = [c.line for c in rows if c.line]
    reasons = (r for x in lines for r in x.reasons(d.facts, d.features, d.machine.packages, d.policy.waive))
    return [_cause(r) for r in reasons]


def _cause(r: Reason) -> Cause:
    return Cause(r.id, r.message, fix(r), r.citation)


def _passed_over(theirs: Choice, own: Choice, quality: str) -> Cause:
    """It would run on this side, which takes another."""
    d, platform = own.decision, own.decision.machine.platform
    if own.source != "automatic":
        return Cause("policy", f"it fits, and {own.source} asks for {own.backend or 'another backend'}")
    if quality != "exact":
        return Cause("quality", f"it fits, and is {quality}: never chosen by itself")
    if theirs.backend == own.backend:
        return Cause("order", f"it fits, and {own.kernel} comes before it")
    for prefer, when in d.catalog.order(platform):
        missed: list[Reason] = []
        check(when, d.facts, missed)
        if prefer.backend == theirs.backend and missed:
            limits = "; ".join(r.message for r in missed)
            return Cause("order", f"it fits, and is not first on {platform} for such a call: {limits}")
        if prefer.backend == own.backend and not missed:
            why = f": {prefer.why}" if prefer.why else ""
            return Cause("order", f"it fits, and {own.backend} comes first on {platform}{why}")
    return Cause("order", "it fits, and was not chosen")


# ---- facts


def differing_facts(a: Side, b: Side) -> tuple[Fact, ...]:
    """The facts of the machines that are not the same, devices first."""
    x, y = _facts(a), _facts(b)

    def pair(name: str) -> Fact:
        unsaid = "absent" if name.startswith("pkg.") else None
        return Fact(name, x.get(name, unsaid), y.get(name, unsaid))

    return tuple(f for f in map(pair, dict.fromkeys((*x, *y))) if f.a != f.b)


def _facts(side: Side) -> dict[str, Any]:
    m = side.machine
    out: dict[str, Any] = {"hal": side.hal, "platform": m.platform}
    for d in m.devices:
        of = f"device {d.index} " if d.index else ""
        for k in ("arch", "name", "memory", "shared_memory", "dtypes"):
            value = getattr(d, k)
            out[f"{of}{'device' if k == 'name' and not of else k}"] = plain(value) if k == "dtypes" else value
    out.update(m.software)
    for name, p in sorted(m.packages.items()):
        if ":" not in name:  # a proof of a package, and none of its own
            out[f"pkg.{name}"] = (p.version or "found") if p.available else p.state
    return out
