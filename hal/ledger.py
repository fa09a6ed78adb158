"""Receipts: what really ran, and how often."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

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


class Tally:
    """The count of one kind of run; decisions that would have the same receipt share it, and it outlives them."""

    __slots__ = ("decision", "receipt", "request", "runs")

    def __init__(self, receipt: Receipt, request: Request | None, decision: Decision | None = None) -> None:
        self.receipt, self.request, self.runs = receipt, request, 0
        self.decision = decision  # the first of the kind


class Ledger:
    """What ran within a scope: a process, an attachment, a component."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[Receipt, Request | None], Tally] = {}
        self.answered: set[Request] = set()
        self.deferred: set[str] = set()  # components with a layer that will choose at its first use
        self.traced: set[Request] = set()  # of the process: what compiled code, which decides once, has followed
        _live.add(self)

    def tally(self, d: Decision, component: str) -> Tally:
        """Where the runs of a decision are counted; it is logged when it is new here."""
        from .log import tell

        if self not in _live:  # closed: compiled code may come back to a place that has ended
            return LEDGER.tally(d, component)
        receipt = Receipt(
            component, d.call.role or "", d.machine.platform, d.call.device, d.backend or "", d.kernel or "",
            d.chosen.backend.quality if d.chosen else "", d.source, d.fittings, d.warnings, 0, d.notes,
        )  # fmt: skip
        self.answered |= d.answered
        if d.call.compile:
            LEDGER.traced |= d.answered
        found = self.tallies.get((receipt, d.request))
        if found is None:
            found = self.tallies.setdefault((receipt, d.request), Tally(receipt, d.request, d))
            tell(d, receipt)
        return found

    def note(self, t: Tally, d: Decision) -> None:
        """Something was decided in a narrower scope within this one; it is counted there."""
        self.answered |= d.answered
        self.tallies.setdefault((t.receipt, t.request), Tally(t.receipt, t.request))

    def receipts(self) -> list[Receipt]:
        """What really ran here, most often first."""
        return _receipts([self])

    def chosen(self) -> list[Receipt]:
        """What was decided here, whether or not it ran."""
        return [r for r, _ in list(self.tallies)]

    def unused(self, requests: Iterable[Request], attached: Collection[str] = ()) -> list[Request]:
        """The requests that no layer of their target has followed.

        A component of ``attached``, whose attention is within reach, may be one that did not run; so may one whose layers
        defer their choice.
        """
        waiting = {*self.deferred, *attached} - {r.component for r in self.chosen()}
        asked = (r for r in requests if r.mode != "forbid" and r not in self.answered)
        return [r for r in asked if r.target.component not in waiting]

    def close(self) -> None:
        """The scope is over: its counts become the process's."""
        if self in _live and self is not LEDGER:
            _live.discard(self)
            for key, t in list(self.tallies.items()):
                LEDGER.tallies.setdefault(key, Tally(t.receipt, t.request)).runs += t.runs


_live: WeakSet[Ledger] = WeakSet()
LEDGER = Ledger()  # of the process: whatever is in no narrower scope


def alive(things: WeakSet[Any]) -> list[Any]:
    """The members of a weak set, while other threads may be adding to it."""
    while True:
        try:
            return list(things)
        except RuntimeError:  # it grew
            continue


def _receipts(ledgers: list[Ledger]) -> list[Receipt]:
    runs: dict[Receipt, int] = {}
    for t in (t for ledger in ledgers for t in list(ledger.tallies.values())):
        runs[t.receipt] = runs.get(t.receipt, 0) + t.runs
    return sorted((replace(r, runs=n) for r, n in runs.items() if n), key=lambda r: (-r.runs, r.component, r.role))


def receipts() -> list[Receipt]:
    """What really ran since the last ``clear_receipts()``, most often first."""
    return _receipts(alive(_live))


def clear_receipts() -> None:
    """Count from zero again; decisions stay."""
    for t in (t for ledger in alive(_live) for t in list(ledger.tallies.values())):
        t.runs = 0
