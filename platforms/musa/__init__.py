"""Moore Threads GPUs (MUSA).  Owner: the MUSA team."""

from __future__ import annotations

from typing import Any

from hal.errors import PlatformError
from hal.facts import Machine
from hal.host import Detection, Host
from hal.platform import Platform, Prefer

from . import arch, detection
from .support import CHUNXIAO, PINGHU, QUYUAN, SUPPORT


class MUSA(Platform):
    name = device_type = "musa"
    title = "Moore Threads GPU"
    order = (
        Prefer("fa", why="MATE's flash attention, or the vendor's build of flash_attn"),
        Prefer("torch_sdpa", why="torch_musa registers muDNN's flash attention with PyTorch"),
    )
    support = SUPPORT
    families = {"Chunxiao": CHUNXIAO, "Quyuan": QUYUAN, "Pinghu": PINGHU}
    arch_forms = arch.FORMS
    software = {"torch": "2.7.1", "runtime": "4.3.6"}
    included = {"torch_musa": "2.7.1"}
    distributed_backend = "mccl"
    visible_variable = detection.VISIBLE

    def parse_arch(self, text: Any) -> str:
        found = arch.parse(text)
        if found is None:
            raise self.no_arch(text)
        return found

    def detect(self, host: Host) -> Detection:
        return detection.detect(host)

    def machine(self, host: Host) -> Machine:
        return detection.machine(self, host)

    def module(self) -> Any:
        try:
            import torch_musa  # noqa: F401
        except Exception as e:  # without the runtime its import raises anything
            raise PlatformError(f"torch_musa cannot be imported: {e}; {detection.INSTALL}") from e
        return super().module()


PLATFORM = MUSA()
