"""Kernel: what one piece of code can do, wherever it runs; and the package that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

from .errors import DeclarationError
from .facts.flat import FEATURES
from .facts.packages import Package, package_key
from .fittings import FITTINGS
from .rules import Limits, Reason, Rule, Test, Versions, check, compiled

LAYOUTS = ("bshd", "bhsd", "any")


@dataclass(frozen=True)
class Needs:
    """A package, and the very symbol that proves it is the right one.

    ``package`` is the distribution's name and the fact ``pkg.<package>``; ``module`` is what is imported;
    ``names`` are other names by which people know it; ``parameters`` must be in the symbol's signature.
    """

    package: str
    module: str
    symbol: str = ""
    versions: str = ""
    install: str = ""
    names: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "package", package_key(self.package))

    @cached_property
    def _tests(self) -> tuple[Test, ...]:
        return compiled({f"pkg.{self.package}": Versions(self.versions)})

    @property
    def proof(self) -> str:
        """The key of what importing it has shown: two kernels may need different modules of one package."""
        return f"{self.package}:{self.module}.{self.symbol}".rstrip(".")

    def state(self, packages: Mapping[str, Package]) -> Package | None:
        return packages.get(self.proof) or packages.get(self.package)

    def check(self, facts: Mapping[str, Any], packages: Mapping[str, Package], out: list[Reason]) -> None:
        p = self.state(packages)
        if p is None or not p.available:
            state = p.state if p else "absent"
            note = f"{self.package} is {state.replace('_', ' ')}" + (f": {p.note}" if p and p.note else "")
            wanted = f"{self.module}.{self.symbol}" if self.symbol else self.module
            # A package that worked once mostly breaks by an upgrade of torch: its binary is for the old one.
            fix = ": ".join(
                filter(None, (f"reinstall {self.package} for the installed torch" * (state == "broken"), self.install))
            )
            out.append(Reason(f"package.{state}", f"pkg.{self.package}", state, wanted, False, fix, note=note))
        elif self.versions:
            found: list[Reason] = []
            check(self._tests, facts, found)
            out += [r._replace(id="package.version", fix=self.install) for r in found]

    def answers_to(self, name: str) -> bool:
        key = package_key(name)
        return key == self.package or key == package_key(self.module) or key in map(package_key, self.names)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One implementation.  True wherever it runs: no architecture and no platform stand here.

    ``bind`` is called once per decision with the fitted Call and returns ``run(q, k, v, mask, varlen)``; a text
    ``"module:function"`` is imported then.  ``run`` takes tensors in ``layout`` ("any": in the caller's; packed [T, H, D] for varlen), a mask or
    None, a Varlen or None, and returns the output or, where the call asks for it, (output, LSE [B, H, Sq] or [H, T]).
    ``confirm(q, k, v, mask, call)`` asks PyTorch or a driver what only they know: None, or the text of the refusal.
    """

    name: str
    bind: Callable[..., Callable[..., Any]] | str
    layout: str = "bshd"
    honours: AbstractSet[str] = frozenset()
    limits: Limits = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    needs: tuple[Needs, ...] = ()
    fittings: AbstractSet[str] = frozenset(FITTINGS)
    confirm: Callable[..., str | None] | str | None = None
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "honours", frozenset(self.honours))
        for what, given, known in (
            ("honours", self.honours, FEATURES),
            ("fittings", self.fittings, frozenset(FITTINGS)),
        ):
            if extra := sorted(set(given) - known):
                raise DeclarationError(
                    f"kernel {self.name}: {what} {', '.join(extra)}; known: {', '.join(sorted(known))}"
                )
        if self.layout not in LAYOUTS:
            raise DeclarationError(f"kernel {self.name}: layout {self.layout!r}; allowed: {', '.join(LAYOUTS)}")
        if "arch" in self.limits or "platform" in self.limits:
            raise DeclarationError(f"kernel {self.name}: where it runs is said by a platform's rows, not by the kernel")

    def binder(self) -> Callable[..., Callable[..., Any]]:
        return imported(self.bind)

    def confirmer(self) -> Callable[..., str | None] | None:
        return None if self.confirm is None else imported(self.confirm)


def imported(what: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(what, str):
        return what
    module, _, name = what.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
