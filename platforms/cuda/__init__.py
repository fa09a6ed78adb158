"""NVIDIA GPUs.  Owner: the CUDA platform team.  What runs where: support.py."""

from __future__ import annotations

from typing import Any

from hal.facts import Machine
from hal.host import Detection, Host
from hal.platform import Platform

from . import arch
from . import support as matrix


class CUDA(Platform):
    name = device_type = "cuda"
    title = "NVIDIA CUDA"
    support = matrix.SUPPORT
    order = matrix.ORDER
    families = {
        "Maxwell and Pascal": matrix.OLDER,
        "Volta": matrix.VOLTA,
        "Turing": matrix.TURING,
        "Ampere": matrix.AMPERE | matrix.ORIN,
        "Ada": matrix.ADA,
        "Hopper": matrix.HOPPER,
        "Blackwell": matrix.BLACKWELL | matrix.SM107 | matrix.THOR | matrix.SM12X,
    }
    arch_forms = arch.FORMS
    # PyPI's torch 2.13.0 for Linux pins CUDA 13.0.3, nvidia-cudnn-cu13 9.20.0.48 and triton 3.7.1.
    software = {"torch": "2.13.0", "runtime": "13.0", "driver": "580.65.06", "cudnn": "9.20.0.48", "triton": "3.7.1"}
    distributed_backend = "nccl"
    visible_variable = "CUDA_VISIBLE_DEVICES"

    def parse_arch(self, text: Any) -> str:
        parsed = arch.parse(text)
        if parsed is None:
            raise self.no_arch(text)
        return parsed

    def shared_memory(self, arch: str) -> int | None:
        """Bytes that one block may ask for (CUDA C++ programming guide, technical specifications)."""
        kib = {"sm70": 96, "sm72": 96, "sm75": 64, "sm80": 163, "sm86": 99, "sm87": 163, "sm89": 99, "sm90": 227}
        kib |= {"sm100": 227, "sm103": 227, "sm110": 227, "sm120": 99, "sm121": 99, **dict.fromkeys(matrix.OLDER, 48)}
        return kib[arch] * 1024 if arch in kib else None

    def detect(self, host: Host) -> Detection:
        from . import detection

        return detection.detect(self, host)

    def machine(self, host: Host) -> Machine:
        from . import detection

        return detection.machine(self, host)


PLATFORM = CUDA()
