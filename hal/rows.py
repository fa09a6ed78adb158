"""Rows of the support matrix, and steps of the automatic order: what a platform's team writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import DeclarationError
from .facts.flat import FEATURES
from .kernel import Kernel
from .rules import Limits, Rule

TIERS = ("native", "in-tree", "portable", "experimental")


@dataclass(frozen=True, eq=False)
class Row:
    """A line of the support matrix: this kernel runs on these chips.  It may narrow the kernel, never widen it."""

    kernel: str | Kernel  # a backend's, by name; or the vendor's own
    on: Iterable[str] | None = None  # architectures; None: all that the platform has
    limits: Limits = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()  # limits under a condition
    lacks: Iterable[str] = frozenset()  # features that the kernel has elsewhere and not here
    tier: str = "native"
    cite: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.on, str):
            raise DeclarationError(f"row {self.kernel}: on={self.on!r}; architectures are a set")
        object.__setattr__(self, "on", None if self.on is None else frozenset(self.on))
        object.__setattr__(self, "lacks", frozenset(self.lacks))
        if self.tier not in TIERS:
            raise DeclarationError(f"row {self.kernel}: tier {self.tier!r}; allowed: {', '.join(TIERS)}")
        if extra := sorted(set(self.lacks) - FEATURES):
            raise DeclarationError(f"row {self.kernel}: lacks {', '.join(extra)}, which is no feature")


@dataclass(frozen=True, eq=False)
class Prefer:
    """A step of the automatic order: this backend, for calls such as these.  A call that misses ``when`` is not refused."""

    backend: str
    when: Limits = field(default_factory=dict)
    why: str = ""
