"""What a person could change: the fix of one reason, and the one change that would bring a better kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .facts import CALL_FACTS
from .fittings import BY_REASON, FITTINGS, next_allowed
from .rules import Reason, check, show

if TYPE_CHECKING:
    from .decision import Candidate, Decision

_PAD = FITTINGS["pad_head_dim"]


def fix(r: Reason) -> str:
    """What would mend the reason: its declared fix, or what the fact itself allows; empty where nobody can change it."""
    if r.fix or r.verdict is None:
        return r.fix
    if r.id == "dtype":
        return f"cast q, k and v to {show(r.allowed)}"
    if r.id in _PAD.mends and isinstance(r.observed, int) and (n := next_allowed(r.allowed, r.observed)):
        return f"pad {r.fact} {r.observed} to {n} (--fit {_PAD.name})"
    if r.id == "package.version":
        return f"install {r.fact.removeprefix('pkg.')} {show(r.allowed)}"
    if r.waiver:
        return f"waive {r.waiver} (--waive {r.waiver})"
    if r.fact in ("torch", "cudnn", "driver", "triton", "runtime"):
        return f"upgrade {r.fact} to {show(r.allowed)}"
    return f"set {r.fact.removeprefix('env.')}={show(r.allowed)}" if r.fact.startswith("env.") else ""


def advice(d: Decision) -> tuple[str, ...]:
    """The one change, which hal may not make by itself, that would bring what was asked for or something better."""
    order = _preferred(d)
    out: list[str] = []
    passed = False
    for c in d.candidates:
        passed = passed or bool(d.chosen and c.line is d.chosen.line)  # what comes later in the order is no better
        better = not passed and (d.asks_for(c) if d.request else c.backend.name in order)
        if (better or (not d.request and _wished(d, c))) and (change := _one_change(c)):
            out.append(f"{change} would allow {c}")
    if d.request and not d.chosen and d.request.backend:
        fallback = d.catalog.backends[d.request.backend].fallback
        if fallback:
            out.append(f"{d.request.backend} declares {fallback} as its fallback; ask for {fallback} to use it")
    return tuple(dict.fromkeys(out))


def _wished(d: Decision, c: Candidate) -> bool:
    """Whether somebody would rather have had this one."""
    return c.kernel is not None and any(r.mode == "prefer" and r.means(c.backend.name, c.kernel.name) for r in d.policy.requests)


def _preferred(d: Decision) -> set[str]:
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
    if r.id in _PAD.mends and BY_REASON[r.id].name not in c.kernel.fittings:
        return ""
    if r.waiver:
        return f"waiving {r.waiver} (--waive {r.waiver})"
    if r.id.startswith("package.") and r.id != "package.broken":
        package = r.fact.removeprefix("pkg.")
        return f"{'installing' if r.id == 'package.absent' else 'replacing'} {package} ({fix(r) or show(r.allowed)})"
    change = fix(r)
    return f"to {change}" if change else ""
