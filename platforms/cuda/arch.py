"""NVIDIA's architectures by generation, and how people write them: ``sm90``.  Suffixes (90a, 120f) name builds, not chips."""

from __future__ import annotations

import re
from typing import Any

OLDER = frozenset({"sm50", "sm52", "sm53", "sm60", "sm61", "sm62"})  # Maxwell and Pascal
VOLTA = frozenset({"sm70", "sm72"})
TURING = frozenset({"sm75"})
AMPERE = frozenset({"sm80", "sm86"})
ORIN = frozenset({"sm87"})
ADA = frozenset({"sm89"})
HOPPER = frozenset({"sm90"})
BLACKWELL = frozenset({"sm100", "sm103"})
SM107 = frozenset({"sm107"})
THOR = frozenset({"sm110"})
SM12X = frozenset({"sm120", "sm121"})  # GeForce RTX 50, RTX PRO, DGX Spark
FROM_80 = AMPERE | ORIN | ADA | HOPPER | BLACKWELL | SM107 | THOR | SM12X
SMALL = frozenset({"sm86", "sm89"}) | SM12X  # 99 KiB of shared memory for one block

FORMS = "sm90, sm_90a, compute_90, 9.0, 90, 120, (12, 0)"
_FORM = re.compile(r"(?:(?:sm|compute|cc)[\s_-]?)?(\d{1,2})(?:\s*[.,]\s*)?(\d)[af]?")
_RENAMED = {"sm101": "sm110"}  # Thor, from CUDA 13 on


def parse(text: Any) -> str | None:
    """The one spelling, or None.  A pair is (major, minor), as torch.cuda.get_device_capability gives it."""
    if isinstance(text, bool):
        return None
    if isinstance(text, (tuple, list)):
        text = ", ".join(map(str, text))
    m = _FORM.fullmatch(str(text).strip().strip("()[]").strip().lower())
    if not m or not 5 <= int(m[1]) <= 20:  # 12 alone would be 1.2: it is no capability that PyTorch knows
        return None
    arch = f"sm{int(m[1])}{m[2]}"
    return _RENAMED.get(arch, arch)
