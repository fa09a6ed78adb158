"""Intel GPUs (XPU): Arc, Data Center GPU Max.  Owner: the XPU team."""

from __future__ import annotations

from typing import Any

from hal.facts import Machine
from hal.host import Detection, Host
from hal.platform import Platform, Prefer

from . import arch, detection
from .support import SUPPORT, XE2, XE3, XE_HPC, XE_HPG, XE_LPG


class XPU(Platform):
    name = device_type = "xpu"
    title = "Intel GPU"
    order = (
        Prefer("fa", why="sgl-kernel-xpu's flash attention, where it takes the call"),
        Prefer("torch_sdpa", why="oneDNN's fused attention, and PyTorch's own"),
    )
    support = SUPPORT
    families = {"Xe-HPC": XE_HPC, "Xe-HPG": XE_HPG, "Xe-LPG": XE_LPG, "Xe2": XE2, "Xe3": XE3}
    arch_forms = arch.FORMS
    software = {"torch": "2.13.0"}
    distributed_backend = "xccl"
    visible_variable = "ZE_AFFINITY_MASK"

    def parse_arch(self, text: Any) -> str:
        found = arch.parse(text)
        if found is None:
            raise self.no_arch(text)
        return found

    def dtypes_of(self, arch: str) -> frozenset[str]:
        return self.dtypes - {"float64"} if arch in XE_HPG else self.dtypes  # no fp64 units

    def detect(self, host: Host) -> Detection:
        return detection.detect(host)

    def machine(self, host: Host) -> Machine:
        return detection.machine(self, host)


PLATFORM = XPU()
