"""What runs on CPUs: backend -> rows, the better kernel first.  Portable forms are added by the catalog."""

from __future__ import annotations

from hal.platform import Row

SUPPORT = {
    "torch_sdpa": (Row("sdpa.cpu"),),
}
