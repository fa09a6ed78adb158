"""AMD GPUs with ROCm.  Owner: the ROCm platform team.  What runs where: support.py."""

from __future__ import annotations

from typing import Any

from hal.facts import Machine
from hal.host import Detection, Host
from hal.platform import Platform

from . import arch
from . import support as matrix


class ROCm(Platform):
    name = "rocm"
    title = "AMD ROCm"
    device_type = "cuda"  # PyTorch calls them so
    support = matrix.SUPPORT
    order = matrix.ORDER
    families = {
        "CDNA 2": matrix.CDNA2,
        "CDNA 3": matrix.CDNA3,
        "CDNA 4": matrix.CDNA4,
        "RDNA 3": matrix.RDNA3,
        "RDNA 3.5": matrix.RDNA35,
        "RDNA 4": matrix.RDNA4,
    }
    arch_forms = arch.FORMS
    # The AOTriton inside differs between AMD's and PyTorch's wheels, so a simulated machine does not say which it has.
    software = {"torch": "2.13.0", "runtime": "7.2", "triton": "3.7.1", f"env.{matrix.VARIABLE}": "unset"}
    distributed_backend = "nccl"  # RCCL, by PyTorch's name
    visible_variable = "HIP_VISIBLE_DEVICES"

    def parse_arch(self, text: Any) -> str:
        parsed = arch.parse(text)
        if parsed is None:
            raise self.no_arch(text)
        return parsed

    def shared_memory(self, arch: str) -> int | None:
        """Bytes of LDS that one work-group may use (LLVM AMDGPU usage; triton PR#8517 for gfx1250)."""
        return {"gfx950": 160, "gfx1250": 320}.get(arch, 64) * 1024

    def detect(self, host: Host) -> Detection:
        from . import detection

        return detection.detect(self, host)

    def machine(self, host: Host) -> Machine:
        from . import detection

        return detection.machine(self, host)


PLATFORM = ROCm()
