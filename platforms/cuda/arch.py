"""How people write NVIDIA's compute capabilities: ``sm90``.  Suffixes (90a, 120f) name builds, not chips."""

from __future__ import annotations

import re
from typing import Any

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
