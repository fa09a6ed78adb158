"""AMD's architectures, and how people write them: ``gfx942``.  Feature switches (``:sramecc+:xnack-``) name builds, not chips.

Which chips PyTorch's AOTriton has, and which as experiments only, is said by ``isArchExperimentallySupported`` in its
releases 0.10 to 0.13.
"""

from __future__ import annotations

import re
from typing import Any

CDNA2 = frozenset({"gfx90a"})
CDNA3 = frozenset({"gfx942"})
CDNA4 = frozenset({"gfx950"})
CDNA = CDNA2 | CDNA3 | CDNA4
RDNA3 = frozenset({"gfx1100", "gfx1101", "gfx1102", "gfx1103"})
RDNA35 = frozenset({"gfx1150", "gfx1151", "gfx1152", "gfx1153"})
RDNA4 = frozenset({"gfx1200", "gfx1201"})
RDNA = RDNA3 | RDNA35 | RDNA4
OFFICIAL = CDNA | {"gfx1100", "gfx1201"}  # by AOTriton
STRIX_HALO = frozenset({"gfx1151"})  # out of AOTriton's experiments from 0.12 on
EXPERIMENTAL = RDNA - OFFICIAL
LATER = frozenset({"gfx1102", "gfx1103", "gfx1152", "gfx1153"})  # AOTriton has code for them from 0.11.2 on

FORMS = "gfx942, gfx90a, gfx1201, gfx90a:sramecc+:xnack-"
_FORM = re.compile(r"(gfx\d{1,2}[0-9a-f]{2})(?::(?:sramecc|xnack)[+-])*")


def parse(text: Any) -> str | None:
    """The one spelling, or None."""
    m = _FORM.fullmatch(str(text).strip().lower())
    return m[1] if m else None


def from_kernel(version: int) -> str:
    """The kernel driver's ``gfx_target_version``, major * 10000 + minor * 100 + step: 90402 is gfx942."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
