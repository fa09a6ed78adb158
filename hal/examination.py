"""Examination: every row of the support matrix against one call on one machine under one policy.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .backend import Backend, Kernel
from .catalog import Catalog, Line
from .facts import Call, Machine, facts_of, features_of
from .facts.flat import derive
from .fittings import BY_REASON, Fitting, fix
from .policy import AUTOMATIC, Policy, covers
from .rules import Reason, Verdict


@dataclass(frozen=True, eq=False)
class Candidate:
    """A row of the support matrix against one call.  Without reasons it is accepted, by the fittings it lists."""

    backend: Backend
    line: Line | None  # None: the platform has no row for the backend
    reasons: tuple[Reason, ...] = ()
    fittings: tuple[tuple[Fitting, dict[str, Any]], ...] = ()

    @property
    def kernel(self) -> Kernel | None:
        return self.line.kernel if self.line else None

    @property
    def verdict(self) -> Verdict:
        return True if not self.reasons else False if any(r.verdict is False for r in self.reasons) else None

    def __str__(self) -> str:
        return f"{self.backend.name}/{self.kernel.name}" if self.kernel else self.backend.name

    def to_json(self, chosen: bool) -> dict[str, Any]:
        return {
            "backend": self.backend.name,
            "kernel": self.kernel.name if self.kernel else None,
            "tier": self.line.row.tier if self.line else None,
            "accepted": chosen or self.verdict is True,
            "verdict": {True: "yes", False: "no", None: "depends"}[self.verdict],
            "fittings": [f.name for f, _ in self.fittings],
            "reasons": [r.to_json() | {"fix": fix(r) or None} for r in self.reasons],
        }


class _Fitted(NamedTuple):
    fittings: tuple[tuple[Fitting, dict[str, Any]], ...]
    facts: dict[str, Any]


@dataclass(eq=False)
class Examination:
    """A call, a machine, what is declared, and a policy; rows are examined when they are asked for."""

    call: Call
    machine: Machine
    catalog: Catalog
    policy: Policy = AUTOMATIC
    automatic: bool = False  # nobody's request decides, so what a layer supports counts

    @cached_property
    def facts(self) -> dict[str, Any]:
        return facts_of(self.call, self.machine, self.catalog.packages)

    @cached_property
    def features(self) -> list[tuple[str, Verdict]]:
        return features_of(self.facts)

    def lines(self, backend: str) -> tuple[Line, ...]:
        """The rows of a backend on this platform."""
        return self.catalog.lines(self.machine.platform, backend, self.facts["arch"])

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """All rows of this platform with all reasons, the platform's order first.  Computed on demand."""
        names = self.catalog.backends_in_order(self.machine.platform)
        return tuple(c for name in names for c in self.examined(name))

    def examined(self, backend: str) -> Iterator[Candidate]:
        """Every row of a backend examined, the better kernel first."""
        lines = self.lines(backend)
        for line in lines:
            yield self.examine(line)
        if not lines:
            reason = Reason("platform", "platform", self.machine.platform, "a platform with a kernel for it")
            yield Candidate(self.catalog.backends[backend], None, (reason,))

    def examine(self, line: Line) -> Candidate:
        """A row against the facts; what fails is mended by fittings where every failure can be, else told as it is."""
        policy, packages = self.policy, self.machine.packages
        reasons = line.reasons(self.facts, self.features, packages, policy.waive)
        reasons += self._ruled_out(line)
        if any(r.verdict is False or r.id == "contiguous" for r in reasons):
            fitted = self._fit(line, reasons)
            if fitted:
                left = line.reasons(fitted.facts, features_of(fitted.facts), packages, policy.waive)
                if all(r.verdict is not False or r.soft for r in left):
                    return Candidate(line.backend, line, tuple(left), fitted.fittings)
        return Candidate(line.backend, line, tuple(reasons))

    def _ruled_out(self, line: Line) -> Iterator[Reason]:
        """What policy, the model and the layer say against a row, whatever it can do."""
        name, site = line.backend.name, self.policy.site
        forbidden = self.policy.forbids(name, line.kernel.name)
        if forbidden:
            yield Reason("policy.forbid", "policy", f"forbidden by {forbidden.source}", "what the policy allows")
        for limit in self.policy.limits:
            if name not in limit.backends and covers(limit.target, site) and name != site.required:
                allowed = ", ".join(sorted(limit.backends))
                yield Reason("policy.only", "policy", name, allowed, note=f"only {allowed} here: {limit.why}")
        if self.policy.native_only and not self.automatic and line.row.tier == "portable":
            yield Reason("policy.native_only", "tier", "portable", "native, in-tree or experimental", False,
                         "leave out native_only (--native-only) to run the portable form")  # fmt: skip
        if self.automatic and site.supported and name not in site.supported:
            change = f"name {name} explicitly to use it all the same"
            yield Reason("layer.supported", "layer", name, ", ".join(sorted(site.supported)), False, change)

    def _fit(self, line: Line, reasons: list[Reason]) -> _Fitted | None:
        """Fittings that together mend every failure; None where one failure has none."""
        used: dict[str, tuple[Fitting, dict[str, Any]]] = {}
        facts = self.facts
        for r in reasons:
            # What may not be contiguous is made so, which copies nothing that is; any other open condition stays open.
            if r.soft or (r.verdict is None and r.id != "contiguous"):
                continue
            f = BY_REASON.get(r.id)
            if f is None or f.name not in line.kernel.fittings:
                return None
            if not f.automatic and f.name not in self.policy.fit:
                return None
            if f.name in used:
                continue
            change = f.fit(facts, r)
            if not change:
                return None
            used[f.name] = f, change
            facts = derive({**facts, **change})
        return _Fitted(tuple(used.values()), facts) if used else None
