"""Plain CPUs.  Owner: the hal core team.  Rows, automatic order and families: support.py."""

from __future__ import annotations

from hal.platform import Platform

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any


class CPU(Platform):
    name = device_type = "cpu"
    title = "CPU"
    accelerator = False
    software = {"torch": "2.13.0"}

    def module(self) -> Any:
        import torch

        return torch.cpu

    def synchronize(self, index: int | None = None) -> None:
        return None

    def memory(self, index: int = 0) -> tuple[int, int]:
        from hal.host import Host

        from .detection import memory

        info = memory(Host())
        return info.get("MemAvailable", 0), info.get("MemTotal", 0)

    def seed(self, value: int) -> None:
        import torch

        torch.default_generator.manual_seed(value)


PLATFORM = CPU()
