"""The decision.  Pure: facts in, a Decision out.  No torch, no I/O, no vendor's name and no backend's name."""

from __future__ import annotations

from .catalog import Catalog
from .decision import Candidate, Decision
from .facts import Call, Machine
from .facts.flat import FEATURES, MACHINE_FACTS
from .policy import AUTOMATIC, Fit, Policy, ruled
from .rules import VERSION_FACTS, Reason, check


def resolve(call: Call, machine: Machine, catalog: Catalog, policy: Policy = AUTOMATIC) -> Decision:
    """Which kernel runs ``call`` on ``machine``, and why.

    A decision without a chosen kernel is an answer too: ``decision.error`` says what was asked, found and allowed;
    ``decision.bind()`` raises it.  The trace (``decision.candidates``) is made when it is asked for.
    """
    machine = catalog.read(machine)
    for r in policy.requests:
        catalog.check_request(r.backend, r.kernel)
    catalog.check_names(policy.waive, policy.fit)
    site = policy.site._replace(role=call.role or "self")
    if site.layer is None:
        site = site._replace(layer=call.layer)
    decision = Decision(call, machine, catalog, policy.at(site))
    ruling = ruled(policy.requests, site, catalog.backends, lambda b, k: _serve(decision, b, k))
    decision.steps, decision.request = ruling.steps, ruling.request
    decision.source = ruling.request.source if ruling.request else "automatic"
    decision.chosen = _automatic(decision) if ruling.automatic else ruling.found
    return decision


def _serve(decision: Decision, backend: str, kernel: str) -> Fit:
    """The first row that fits; else the first that depends on something unknown, with what it depends on kept open."""
    open_ended: Candidate | None = None
    seen: list[Candidate] = []
    names = [backend] if backend else decision.catalog.backends
    lines = (line for name in names for line in decision.lines(name) if kernel in ("", line.kernel.name))
    for c in map(decision.examine, lines):
        if c.verdict is True:
            return Fit(c)
        if c.verdict is None and open_ended is None:
            open_ended = c
        seen.append(c)
    if open_ended:
        return Fit(open_ended)
    best = min(seen, key=lambda c: len(c.reasons), default=None)
    why = "; ".join(r.message for r in best.reasons) if best else f"{decision.machine.platform} has no kernel for it"
    return Fit(None, any(map(_lacks, seen)), f"{best}: {why}" if best else why)


def _lacks(c: Candidate) -> bool:
    """Whether the machine could run it, and it lacks what the call asks for or what policy allows."""
    lacking = any(r.id in FEATURES or r.id == "role" or r.id.startswith("policy.") for r in c.reasons)
    return lacking and not any(map(_machines, c.reasons))


def _machines(r: Reason) -> bool:
    """Whether a reason lies in the machine: the device, a package, a version."""
    return r.verdict is False and (
        r.fact in (*MACHINE_FACTS, *VERSION_FACTS, "tier") or r.fact.startswith(("pkg.", "env."))
    )


def _automatic(decision: Decision) -> Candidate | None:
    """The platform's order, filtered by capability.  Only exact backends; a soft reason passes when nothing else fits."""
    decision.automatic = True
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
