"""The decision.  Pure: facts in, a Decision out.  No torch, no I/O, no vendor's name and no backend's name."""

from __future__ import annotations

from .catalog import Catalog
from .decision import Candidate, Decision
from .facts import Call, Machine
from .policy import AUTOMATIC, Policy, Request
from .rules import Reason, check


def resolve(call: Call, machine: Machine, catalog: Catalog, policy: Policy = AUTOMATIC) -> Decision:
    """Which kernel runs ``call`` on ``machine``, and why.

    A decision without a chosen kernel is an answer too: ``decision.error`` says what was asked, found and allowed;
    ``decision.bind()`` raises it.  The trace (``decision.candidates``) is made when it is asked for.
    """
    machine = catalog.read(machine)
    for r in policy.requests:
        catalog.check_request(r.backend, r.kernel)
    catalog.check_names(policy.waive, policy.fit)
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
    names = [request.backend] if request.backend else decision.catalog.backends
    lines = (line for name in names for line in decision.lines(name) if request.kernel in ("", line.kernel.name))
    for c in map(decision.examine, lines):
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
            c = decision.examine(line)
            if c.verdict is True:
                return c
            if last is None and all(r.soft for r in c.reasons):
                last = c
    return last
