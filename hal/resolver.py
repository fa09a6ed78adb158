"""The decision.  Pure: facts in, a Decision out.  No torch, no I/O, no vendor's name and no backend's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .catalog import Catalog, Line
from .decision import Candidate, Decision
from .facts import Call, Machine
from .facts.flat import derive, features_of
from .fittings import BY_REASON, Fitting
from .policy import AUTOMATIC, Policy, Request
from .rules import Reason, check


def resolve(call: Call, machine: Machine, catalog: Catalog, policy: Policy = AUTOMATIC) -> Decision:
    """Which kernel runs ``call`` on ``machine``, and why.

    A decision without a chosen kernel is an answer too: ``decision.error`` says what was asked, found and allowed;
    ``decision.bind()`` raises it.  The trace (``decision.candidates``) is made when it is asked for.
    """
    catalog.platform(machine.platform)
    decision = Decision(call, machine, catalog, policy)
    for request in policy.requests:
        if request.mode == "forbid":
            continue
        decision.chosen = _requested(decision, request)
        decision.source = request.source
        decision.request = request
        if decision.chosen or request.mode == "require":
            return decision
    decision.chosen, decision.source, decision.request = _automatic(decision), "automatic", None
    return decision


def _requested(decision: Decision, request: Request) -> Candidate | None:
    """The first row that fits; else the first that depends on something unknown, with what it depends on kept open."""
    open_ended: Candidate | None = None
    for c in candidates(decision, request.backend, request.kernel):
        if c.verdict is True:
            return c
        if c.verdict is None and open_ended is None:
            open_ended = c
    return open_ended


def _automatic(decision: Decision) -> Candidate | None:
    """The platform's order, filtered by capability.  Only exact backends; a soft reason passes when nothing else fits."""
    last: Candidate | None = None
    for prefer, when in decision.catalog.order(decision.machine.platform):
        backend = decision.catalog.backends[prefer.backend]
        missed: list[Reason] = []
        check(when, decision.facts, missed)
        if missed or backend.quality != "exact":
            continue
        for line in decision.lines(prefer.backend):
            if line.lacks_package(decision.machine.packages):
                continue  # most rows, most of the time; the trace tells it with every other reason
            c = examine(line, decision)
            if c.verdict is True:
                return c
            if last is None and all(r.soft for r in c.reasons):
                last = c
    return last


def candidates(decision: Decision, backend: str = "", kernel: str = "") -> Iterator[Candidate]:
    """Every row of a backend (or of all) examined, the better kernel first."""
    catalog, platform = decision.catalog, decision.machine.platform
    for name in [backend] if backend else catalog.backends_in_order(platform):
        lines = decision.lines(name)
        for line in lines:
            if not kernel or line.kernel.name == kernel:
                yield examine(line, decision)
        if not lines and not kernel:
            reason = Reason("platform", "platform", platform, "a platform with a kernel for it")
            yield Candidate(catalog.backends[name], None, (reason,))


class _Fitted(NamedTuple):
    fittings: tuple[tuple[Fitting, dict[str, Any]], ...]
    facts: dict[str, Any]


def examine(line: Line, decision: Decision) -> Candidate:
    """A row against the facts; what fails is mended by fittings where every failure can be, else told as it is."""
    policy, packages = decision.policy, decision.machine.packages
    reasons = line.reasons(decision.facts, decision.features, packages, policy.waive)
    forbidden = policy.forbids(line.backend.name, line.kernel.name)
    if forbidden:
        reasons.append(Reason("policy.forbid", "policy", f"forbidden by {forbidden.source}", "what the policy allows"))
    if any(r.verdict is False for r in reasons):
        fitted = _fit(line, decision, reasons)
        if fitted:
            left = line.reasons(fitted.facts, features_of(fitted.facts), packages, policy.waive)
            if all(r.verdict is not False or r.soft for r in left):
                return Candidate(line.backend, line, tuple(left), fitted.fittings)
    return Candidate(line.backend, line, tuple(reasons))


def _fit(line: Line, decision: Decision, reasons: list[Reason]) -> _Fitted | None:
    """Fittings that together mend every failure; None where one failure has none."""
    used: dict[str, tuple[Fitting, dict[str, Any]]] = {}
    facts = decision.facts
    for r in reasons:
        if r.verdict is not False or r.soft:
            continue
        f = BY_REASON.get(r.id)
        if f is None or f.name not in line.kernel.fittings:
            return None
        if not f.automatic and f.name not in decision.policy.fit:
            return None
        if f.name in used:
            continue
        change = f.fit(facts, r)
        if not change:
            return None
        used[f.name] = f, change
        facts = derive({**facts, **change})
    return _Fitted(tuple(used.values()), facts) if used else None
