"""NVIDIA GPUs.  Owner: the CUDA platform team.  Rows, automatic order and families: support.py."""

from __future__ import annotations

from hal.platform import Platform


class CUDA(Platform):
    name = device_type = "cuda"
    title = "NVIDIA CUDA"
    # PyPI's torch 2.13.0 for Linux pins CUDA 13.0.3, nvidia-cudnn-cu13 9.20.0.48 and triton 3.7.1.
    software = {"torch": "2.13.0", "runtime": "13.0", "driver": "580.65.06", "cudnn": "9.20.0.48", "triton": "3.7.1"}
    included = {"triton": "3.7.1"}
    distributed_backend = "nccl"
    visible_variable = "CUDA_VISIBLE_DEVICES"

    def shared_memory(self, arch: str) -> int | None:
        """Bytes that one block may ask for (CUDA C++ programming guide, technical specifications)."""
        from .arch import OLDER

        kib = {"sm70": 96, "sm72": 96, "sm75": 64, "sm80": 163, "sm86": 99, "sm87": 163, "sm89": 99, "sm90": 227}
        kib |= {"sm100": 227, "sm103": 227, "sm110": 227, "sm120": 99, "sm121": 99, **dict.fromkeys(OLDER, 48)}
        return kib[arch] * 1024 if arch in kib else None


PLATFORM = CUDA()
