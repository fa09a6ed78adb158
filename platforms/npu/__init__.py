"""Huawei Ascend NPUs.  Owner: the NPU team.  Rows, automatic order and families: support.py."""

from __future__ import annotations

from hal.errors import PlatformError
from hal.platform import Platform

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any


class NPU(Platform):
    name = device_type = "npu"
    title = "Ascend NPU"
    software = {"torch": "2.13.0", "cann": "9.0.0"}
    dtypes = frozenset(
        {"float16", "bfloat16", "float32"}
    )  # its matrix products take no float64 (Ascend aclnnBatchMatMul)
    included = {"torch_npu": "2.13.0"}
    distributed_backend = "hccl"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"

    def dtypes_of(self, arch: str) -> frozenset[str]:
        from .support import A1, INFERENCE

        return self.dtypes - {"bfloat16"} if arch in A1 | INFERENCE else self.dtypes

    def module(self) -> Any:
        try:
            import torch_npu  # noqa: F401
        except Exception as e:  # without CANN its import raises anything
            raise PlatformError(
                f"torch_npu cannot be imported: {e}; source CANN's set_env.sh, or reinstall torch-npu"
            ) from e
        return super().module()


PLATFORM = NPU()
