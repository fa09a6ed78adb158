"""How people write AMD's architectures: ``gfx942``.  Feature switches (``:sramecc+:xnack-``) name builds, not chips."""

from __future__ import annotations

import re
from typing import Any

FORMS = "gfx942, gfx90a, gfx1201, gfx90a:sramecc+:xnack-"
_FORM = re.compile(r"(gfx\d{1,2}[0-9a-f]{2})(?::(?:sramecc|xnack)[+-])*")


def parse(text: Any) -> str | None:
    """The one spelling, or None."""
    m = _FORM.fullmatch(str(text).strip().lower())
    return m[1] if m else None


def from_kernel(version: int) -> str:
    """The kernel driver's ``gfx_target_version``, major * 10000 + minor * 100 + step: 90402 is gfx942."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
