"""Apple GPUs through Metal Performance Shaders (MPS).  Owner: the MPS team."""

from __future__ import annotations

from typing import Any

from hal.facts import Machine
from hal.host import Detection, Host
from hal.platform import Platform, Prefer

from . import arch, detection
from .support import SUPPORT


class MPS(Platform):
    name = device_type = "mps"
    title = "Apple GPU"
    order = (Prefer("torch_sdpa", why="always; in chunks of queries, so that memory stays bounded"),)
    support = SUPPORT
    families = {"Apple silicon": frozenset(arch.ARCHS - {arch.OTHER})}
    arch_forms = arch.FORMS
    software = {"torch": "2.13.0"}
    dtypes = frozenset({"float16", "bfloat16", "float32"})  # Metal has no float64

    def parse_arch(self, text: Any) -> str:
        found = arch.parse(text)
        if found is None:
            raise self.no_arch(text)
        return found

    def detect(self, host: Host) -> Detection:
        return detection.detect(host)

    def machine(self, host: Host) -> Machine:
        return detection.machine(self, host)

    def synchronize(self, index: int | None = None) -> None:
        self.module().synchronize()

    def memory(self, index: int = 0) -> tuple[int, int]:
        """Unified memory: what Metal recommends as the most, and what of it is not in use here."""
        mps = self.module()
        total = int(mps.recommended_max_memory())
        return total - int(mps.driver_allocated_memory()), total

    def seed(self, value: int) -> None:
        self.module().manual_seed(value)


PLATFORM = MPS()
