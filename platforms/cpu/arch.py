"""How people write CPU architectures: micro-architecture levels, not models."""

from __future__ import annotations

import re
from typing import Any

FORMS = "x86-64, x86-64-v1 to x86-64-v4, armv8, armv8.0 to armv8.9, armv9, armv9.0 to armv9.7"
X86 = frozenset(f"x86-64-v{n}" for n in range(1, 5))
ARM = frozenset({*(f"armv8.{n}" for n in range(10)), *(f"armv9.{n}" for n in range(8))})


def parse(text: Any) -> str | None:
    """The one spelling, or None: x86_64 and amd64 are x86-64-v1, aarch64 and armv8 are armv8.0."""
    t = re.sub(r"[\s_]+", "-", str(text).strip().lower())
    t = {"x86": "x86-64", "amd64": "x86-64", "x64": "x86-64", "aarch64": "armv8", "arm64": "armv8", "arm": "armv8"}.get(
        t, t
    )
    t = re.sub(r"-a$", "", t)
    if t == "x86-64":
        t = "x86-64-v1"
    if t in ("armv8", "armv9"):
        t += ".0"
    return t if t in X86 | ARM else None
