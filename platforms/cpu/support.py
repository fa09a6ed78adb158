"""What runs on CPUs: backend -> rows, the better kernel first.  Portable forms are added by the catalog."""

from __future__ import annotations

from hal.rows import Prefer, Row

from .arch import ARM, X86

SUPPORT = {
    "torch_sdpa": (Row("sdpa.cpu"),),
}

ORDER = (Prefer("torch_sdpa", why="the only exact backend there is"),)

FAMILIES = {"x86-64": X86, "Arm": ARM}
