"""Receipts: what really ran, and how often."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decision import Decision


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Tally:
    """The count of one kind of run; decisions that would have the same receipt share it, and it outlives them."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        self.runs = 0


_tallies: dict[tuple[Any, ...], Tally] = {}


def tally(d: Decision, component: str) -> Tally:
    """Where the runs of a decision are counted."""
    quality = d.chosen.backend.quality if d.chosen else ""
    device, role = d.call.device, d.call.role or ""
    key = component, role, d.machine.platform, device, d.backend, d.kernel, quality, d.source, d.fittings, d.warnings
    return _tallies.setdefault(key, Tally())


def receipts() -> list[Receipt]:
    """What really ran since the last ``clear_receipts()``, most often first."""
    ran = (Receipt(*(*key, t.runs)) for key, t in list(_tallies.items()) if t.runs)
    return sorted(ran, key=lambda r: -r.runs)


def clear_receipts() -> None:
    """Count from zero again; decisions stay."""
    for t in list(_tallies.values()):
        t.runs = 0
