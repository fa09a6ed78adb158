"""Moore Threads GPUs (MUSA).  Owner: the MUSA team.  Rows, automatic order and families: support.py."""

from __future__ import annotations

from hal.errors import PlatformError
from hal.platform import Platform

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any


class MUSA(Platform):
    name = device_type = "musa"
    title = "Moore Threads GPU"
    software = {"torch": "2.7.1", "runtime": "4.3.6"}
    dtypes = frozenset({"float16", "bfloat16", "float32"})  # no source says that muDNN's matrix products take float64
    included = {"torch_musa": "2.7.1"}
    distributed_backend = "mccl"
    visible_variable = "MUSA_VISIBLE_DEVICES"

    def module(self) -> Any:
        try:
            import torch_musa  # noqa: F401
        except Exception as e:  # without the runtime its import raises anything
            from .detection import INSTALL

            raise PlatformError(f"torch_musa cannot be imported: {e}; {INSTALL}") from e
        return super().module()


PLATFORM = MUSA()
