"""Huawei Ascend NPUs.  Owner: the NPU team."""

from __future__ import annotations

from typing import Any

from hal.errors import PlatformError
from hal.facts import Machine
from hal.host import Detection, Host
from hal.platform import Platform, Prefer
from hal.rules import Between

from . import arch, detection
from .support import A1, A2, A3, A5, INFERENCE, SUPPORT


class NPU(Platform):
    name = device_type = "npu"
    title = "Ascend NPU"
    order = (
        Prefer("fa", {"ring": Between(2)}, why="ring attention merges by LSE, which only Ascend's own kernel returns"),
        Prefer("fa", {"lse": True}, why="the same, for a call that asks for its LSE"),
        Prefer("torch_sdpa", why="torch_npu registers its fused attention with PyTorch"),
        Prefer("fa", why="rather than the math path over its budget"),
    )
    support = SUPPORT
    families = {"A1": A1, "A2": A2, "A3": A3, "A5": A5, "inference": INFERENCE}
    arch_forms = arch.FORMS
    software = {"torch": "2.13.0", "cann": "9.0.0"}
    included = {"torch_npu": "2.13.0"}
    distributed_backend = "hccl"
    visible_variable = detection.VISIBLE

    def parse_arch(self, text: Any) -> str:
        found = arch.parse(text)
        if found is None:
            raise self.no_arch(text)
        return found

    def dtypes_of(self, arch: str) -> frozenset[str]:
        return self.dtypes - {"bfloat16"} if arch in A1 | INFERENCE else self.dtypes

    def detect(self, host: Host) -> Detection:
        return detection.detect(host)

    def machine(self, host: Host) -> Machine:
        return detection.machine(self, host)

    def module(self) -> Any:
        try:
            import torch_npu  # noqa: F401
        except Exception as e:  # without CANN its import raises anything
            raise PlatformError(
                f"torch_npu cannot be imported: {e}; source CANN's set_env.sh, or reinstall torch-npu"
            ) from e
        return super().module()


PLATFORM = NPU()
