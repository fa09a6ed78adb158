"""What is known of an optional package on a machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..errors import FactError, unknown

PACKAGE_STATES = (
    "absent",  # looked for and not there
    "found",  # installed, not imported yet: taken as usable until it is proven
    "usable",  # imported, and the very symbol is there
    "broken",  # installed, and the import fails; the message is kept
    "wrong_distribution",  # another project's package of the same import name
    "missing_symbol",  # the right name without what the kernel calls
)


def package_key(name: str) -> str:
    """``flash-attn`` and ``flash_attn`` are one package; ``package:module.symbol`` is a proof and stays as it is."""
    return name if ":" in name else re.sub(r"[-_.]+", "_", name.strip()).lower()


@dataclass(frozen=True)
class Package:
    """A package's state and version (PEP 440 text), with the message of what failed."""

    state: str = "found"
    version: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.state not in PACKAGE_STATES:
            raise FactError(unknown("package state", self.state, PACKAGE_STATES))

    @property
    def available(self) -> bool:
        return self.state in ("found", "usable")

    @staticmethod
    def of(value: Any) -> Package:
        """From JSON: a version text, ``null`` for absent, or an object with state, version and note."""
        if value is None:
            return Package("absent")
        if isinstance(value, Package):
            return value
        if isinstance(value, str):
            return Package("usable", value)
        if isinstance(value, dict) and set(value) <= {"state", "version", "note"}:
            if wrong := [(k, x) for k, x in value.items() if not isinstance(x, str)]:
                raise FactError(f"{wrong[0][0]} {wrong[0][1]!r} is no text")
            return Package(**{"state": "usable", **value})
        raise FactError(f"{value!r} is no package: give a version, null, or an object of state, version, note")

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in (("state", self.state), ("version", self.version), ("note", self.note)) if v}
