"""How people write Moore Threads architectures: mp22, "22", "2.2" (as torch.musa.get_device_capability), MTT S4000."""

from __future__ import annotations

import re
from typing import Any

OTHER = "other"  # a Moore Threads GPU that is not listed here
ARCHS = frozenset({"mp21", "mp22", "mp31", OTHER})
FORMS = "mp21, mp22 or mp31, also as 22, 3.1 or (2, 2), or as MTT S80 (mp21), S4000 (mp22), S5000 (mp31)"

_PRODUCTS = {"s50": "mp21", "s70": "mp21", "s80": "mp21", "s3000": "mp21", "s4000": "mp22", "s5000": "mp31"}
_NAMES = {"chunxiao": "mp21", "quyuan": "mp22", "pinghu": "mp31"}


def parse(text: Any) -> str | None:
    if isinstance(text, (tuple, list)):
        text = ".".join(map(str, text))
    t = re.sub(r"\s+|[()]", "", str(text).strip().lower()).replace(",", ".")
    t = t.removeprefix("moorethreads").removeprefix("mtt")
    if t == OTHER:
        return t
    if m := re.fullmatch(r"(?:mp_?)?(\d)\.?(\d)", t):
        t = f"mp{m[1]}{m[2]}"
    t = _PRODUCTS.get(t) or _NAMES.get(t) or t
    return t if t in ARCHS else None
