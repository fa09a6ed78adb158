"""How people write Ascend chips: SoC names (Ascend910B3, Ascend910_9391), short names (910b, 310P), series (A2, A3).

SoC names: torch_npu, csrc/core/npu/NpuVariables.cpp.  The numbers after the series are bins: the kernels are the same.
"""

from __future__ import annotations

import re
from typing import Any

OTHER = "other"  # an Ascend chip that is not listed here
ARCHS = frozenset({"ascend910", "ascend910b", "ascend910c", "ascend310p", "ascend310b", "ascend950", OTHER})
FORMS = "910, 910b, 910c, 950, 310p or 310b, also as Ascend910B3 or Ascend910_9391, or A2, A3, A5"

_FORMS = (
    ("ascend910c", r"910_?93(?:\d\d)?|910c\d?|a3"),
    ("ascend910b", r"910b(?:[1-4](?:c|[-_]1)?)?|a2"),
    ("ascend910", r"910(?:a|proa|prob|premiuma)?"),
    ("ascend950", r"950(?:pr|dt)?(?:_[0-9a-z]+)?|910_95\w*|a5"),
    ("ascend310p", r"310p\d?"),
    ("ascend310b", r"310b\d?"),
)


def parse(text: Any) -> str | None:
    """The series, or None.  Ascend910B alone is read as people mean it: the 910B1 to 910B4."""
    t = re.sub(r"\s+", "", str(text).strip().lower()).removeprefix("huawei")
    if t == OTHER:
        return t
    t = t.removeprefix("ascend").lstrip("-_")
    return next((arch for arch, form in _FORMS if re.fullmatch(form, t)), None)
