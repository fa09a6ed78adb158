"""Apple GPUs through Metal Performance Shaders (MPS).  Owner: the MPS team.  Rows, automatic order and families: support.py."""

from __future__ import annotations

from hal.platform import Platform


class MPS(Platform):
    name = device_type = "mps"
    title = "Apple GPU"
    software = {"torch": "2.13.0"}
    dtypes = frozenset({"float16", "bfloat16", "float32"})  # Metal has no float64

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
