"""Receipts: what really ran, and how often; for the process, and for every scope that wants to know."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from .errors import PolicyError
from .policy import Site, covers

if TYPE_CHECKING:
    from .decision import Decision
    from .policy import Request


@dataclass(frozen=True)
class Receipt:
    """What really ran, and how often.  Under torch.compile a run is a trace."""

    component: str
    role: str
    platform: str
    device: int
    backend: str
    kernel: str
    quality: str
    source: str
    fittings: tuple[str, ...]
    warnings: tuple[str, ...]
    runs: int
    notes: tuple[str, ...] = ()  # requests that were passed over here, and why

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def receipt_of(d: Decision) -> Receipt:
    """The receipt of a decision that has not run yet."""
    return Receipt(
        d.policy.site.component, d.call.role or "", d.machine.platform, d.call.device, d.backend or "", d.kernel or "",
        d.chosen.backend.quality if d.chosen else "", d.source, d.fittings, d.warnings, 0, d.notes,
    )  # fmt: skip


class Tally:
    """The count of one kind of run; decisions that would have the same receipt share it, and it outlives them."""

    __slots__ = ("decision", "receipt", "runs")

    def __init__(self, receipt: Receipt, decision: Decision | None) -> None:
        self.receipt, self.runs = receipt, 0
        self.decision = decision  # the first of the kind, where a scope may ask for its call


class Ledger:
    """What was decided within a scope, and how often it ran."""

    def __init__(self) -> None:
        self.tallies: dict[Receipt, Tally] = {}
        self.answered: set[Request] = set()
        self.deferred: set[Site] = set()  # layers that will choose at their first use

    def count(self, d: Decision, receipt: Receipt, runs: int = 1) -> None:
        """``runs`` more of a decision; 0: it was decided."""
        t = self.tallies.get(receipt)
        if t is None:
            t = self.tallies.setdefault(receipt, Tally(receipt, d))
            self.answered |= d.answered
        t.runs += runs

    def unused(self, requests: Iterable[Request], attached: Collection[str] = ()) -> list[Request]:
        """The requests that no layer of their target has followed.

        A component of ``attached``, whose attention is within reach, may be one that did not run; so may a layer that
        defers its choice.
        """
        sites = [Site(r.component, r.role) for r in self.chosen()]
        waiting = set(attached) - {s.component for s in sites}
        out = []
        for r in requests:
            if r.mode == "forbid" or r in self.answered or r.target.component in waiting:
                continue
            if any(covers(r.target, s) for s in list(self.deferred)):
                continue
            if r in traced and not any(r.target.component in ("", s.component) for s in sites):
                continue  # compiled code has decided already
            out.append(r)
        return out

    def check_used(self, requests: Iterable[Request], attached: Collection[str] = ()) -> None:
        """Raises PolicyError for the first that is ``unused``: what the layers of its target chose instead."""
        for request in self.unused(requests, attached):
            mine = [r for r in self.chosen() if request.target.component in ("", r.component)]
            chose = sorted({f"{r.component or 'call'}.{r.role} {_chose(r)} ({r.source})" for r in mine})
            why = f"its layers: {'; '.join(chose)}" if chose else "no attention that hal can reach ran there"
            raise PolicyError(
                f"{request.source}: no attention layer of {str(request.target)!r} used {request}; {why}. "
                "Drop the override, or name a component and a role that have such attention"
            )

    def chosen(self) -> list[Receipt]:
        """What was decided here, whether or not it ran."""
        return list(self.tallies)

    def receipts(self) -> list[Receipt]:
        """What really ran here, most often first."""
        ran = [replace(t.receipt, runs=t.runs) for t in list(self.tallies.values()) if t.runs]
        return sorted(ran, key=lambda r: (-r.runs, r.component, r.role))


def _chose(r: Receipt) -> str:
    return f"chose {r.backend}" if r.backend else "choose at each call"


LEDGER = Ledger()  # of the process: everything
watching: ContextVar[tuple[Ledger, ...]] = ContextVar(
    "hal_watching", default=()
)  # the scopes around, the inner one last


class _Scopes:
    """Whether any scope is open in the process: for bound functions, where reading a ContextVar is seen in the time."""

    def __init__(self) -> None:
        self.open, self.count, self._lock = False, 0, threading.Lock()

    def more(self, n: int) -> None:
        with self._lock:
            self.count += n
            self.open = self.count > 0


scopes = _Scopes()
# What compiled code has followed: a graph decides once, so a later scope learns nothing from running it.
traced: set[Request] = set()


def alive(things: WeakSet[Any]) -> list[Any]:
    """The members of a weak set, while other threads may be adding to it."""
    while True:
        try:
            return list(things)
        except RuntimeError:  # it grew
            continue


def tally(d: Decision) -> Tally:
    """Where the process counts the runs of a decision; it is logged when it is new."""
    from .log import tell

    receipt = receipt_of(d)
    found = LEDGER.tallies.get(receipt)
    if found is None:
        found = LEDGER.tallies.setdefault(receipt, Tally(receipt, None))
        tell(d, receipt)
    if d.call.compile:
        if len(traced) > 4096:
            traced.clear()
        traced.update(d.answered)
    return found


def receipts() -> list[Receipt]:
    """What really ran since the last ``clear_receipts()``, most often first."""
    return LEDGER.receipts()


def clear_receipts() -> None:
    """Count from zero again; decisions stay, and so do the counts of scopes that are open."""
    for t in list(LEDGER.tallies.values()):
        t.runs = 0
