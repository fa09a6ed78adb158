"""How people write Apple chips: m1 to m5, with or without their size."""

from __future__ import annotations

import re
from typing import Any

OTHER = "other"  # an Apple chip that is not listed here
ARCHS = frozenset({"m1", "m2", "m3", "m4", "m5", OTHER})
FORMS = "m1, m2, m3, m4 or m5, also as Apple M3 Max"


def parse(text: Any) -> str | None:
    """The generation, or None.  Pro, Max and Ultra have more cores and the same instructions."""
    t = " ".join(str(text).strip().lower().replace("-", " ").replace("_", " ").split())
    if t == OTHER:
        return t
    m = re.fullmatch(r"(?:apple )?(m\d)(?: (?:pro|max|ultra))?", t)
    return m[1] if m and m[1] in ARCHS else None
