"""Advice: the one change, by a person, that would bring a better kernel."""

from __future__ import annotations

from .examination import Candidate, Examination
from .facts import CALL_FACTS
from .facts.flat import FEATURES
from .fittings import BY_REASON, FITTINGS, fix
from .policy import Request
from .rules import Reason, check, show

_PAD = FITTINGS["pad_head_dim"]


def advice(d: Examination, chosen: Candidate | None, request: Request | None) -> tuple[str, ...]:
    """The one change, which hal may not make by itself, that would bring what was asked for or something better."""
    order = _preferred(d)
    out: list[str] = []
    passed = False
    for c in d.candidates:
        passed = passed or bool(chosen and c.line is chosen.line)  # what comes later in the order is no better
        better = not passed and (
            request.means(c.backend.name, c.kernel.name if c.kernel else None) if request else c.backend.name in order
        )
        if (better or (not request and _wished(d, c))) and (change := _one_change(c)):
            out.append(f"{change} would allow {c}")
    if request and not chosen and request.backend:
        fallback = d.catalog.backends[request.backend].fallback
        if fallback and fallback in d.catalog.backends and any(c.verdict is not False for c in d.examined(fallback)):
            out.append(f"{request.backend} declares {fallback} as its fallback; ask for {fallback} to use it")
    return tuple(dict.fromkeys(out))


def _wished(d: Examination, c: Candidate) -> bool:
    """Whether somebody would rather have had this one."""
    return c.kernel is not None and any(
        r.mode == "prefer" and r.means(c.backend.name, c.kernel.name) for r in d.policy.requests
    )


def _preferred(d: Examination) -> set[str]:
    """Backends that the platform's order prefers on this device, for a call that might be another one."""
    out = set()
    for prefer, tests in d.catalog.order(d.machine.platform):
        missed: list[Reason] = []
        check(tuple(t for t in tests if t.fact not in CALL_FACTS), d.facts, missed)
        if not missed:
            out.add(prefer.backend)
    return out


def _one_change(c: Candidate) -> str:
    """The change that mends all of a candidate's failures, where they are all of one fact and the rest holds."""
    failed = [r for r in c.reasons if r.verdict is False]
    if not failed or len(failed) != len(c.reasons) or len({r.fact for r in failed}) > 1 or c.kernel is None:
        return ""
    r = failed[0]
    if r.id in FEATURES:
        return ""  # to ask for something else is no advice
    if r.id in _PAD.mends and BY_REASON[r.id].name not in c.kernel.fittings:
        return ""
    if r.waiver:
        return f"waiving {r.waiver} (--waive {r.waiver})"
    if r.id.startswith("package.") and r.id != "package.broken":
        package = r.fact.removeprefix("pkg.")
        return f"{'installing' if r.id == 'package.absent' else 'replacing'} {package} ({fix(r) or show(r.allowed)})"
    change = fix(r)
    return f"to {change}" if change else ""
