"""AMD GPUs with ROCm.  Owner: the ROCm platform team.  Rows, automatic order and families: support.py."""

from __future__ import annotations

from hal.platform import Platform

VARIABLE = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"


class ROCm(Platform):
    name = "rocm"
    title = "AMD ROCm"
    device_type = "cuda"  # PyTorch calls them so
    # The AOTriton inside differs between AMD's and PyTorch's wheels, so a simulated machine does not say which it has.
    software = {"torch": "2.13.0", "runtime": "7.2", "triton": "3.7.1", f"env.{VARIABLE}": "unset"}
    included = {"triton": "3.7.1"}
    distributed_backend = "nccl"  # RCCL, by PyTorch's name
    visible_variable = "HIP_VISIBLE_DEVICES"

    def shared_memory(self, arch: str) -> int | None:
        """Bytes of LDS that one work-group may use (LLVM AMDGPU usage; triton PR#8517 for gfx1250)."""
        return {"gfx950": 160, "gfx1250": 320}.get(arch, 64) * 1024


PLATFORM = ROCm()
