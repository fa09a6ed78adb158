"""Intel GPUs (XPU): Arc, Data Center GPU Max.  Owner: the XPU team.  Rows, automatic order and families: support.py."""

from __future__ import annotations

from hal.platform import Platform


class XPU(Platform):
    name = device_type = "xpu"
    title = "Intel GPU"
    software = {"torch": "2.13.0"}
    distributed_backend = "xccl"
    visible_variable = "ZE_AFFINITY_MASK"

    def dtypes_of(self, arch: str) -> frozenset[str]:
        from .support import XE_HPG

        return self.dtypes - {"float64"} if arch in XE_HPG else self.dtypes  # no fp64 units


PLATFORM = XPU()
