"""A device that PyTorch does not know, and that has no float64, as code for a process of its own."""

from __future__ import annotations

DEVICE = """
import types
import torch
import torch.utils._pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten, calls = torch.ops.aten, set()
module = types.ModuleType("torch.fake")
module.is_available, module.device_count = (lambda: True), (lambda: 1)
module.current_device, module.is_initialized = (lambda: 0), (lambda: True)
module._is_in_bad_fork, module._lazy_init = (lambda: False), (lambda: None)
module.manual_seed_all = lambda seed: None
module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
_setup_privateuseone_for_python_backend(rename="fake", backend_module=module)
HERE = torch.device("fake", 0)


class OnDevice(torch.Tensor):
    @staticmethod
    def __new__(cls, real):
        assert real.dtype is not torch.float64, "this device has no float64"
        return torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype, device=HERE
        )

    def __init__(self, real):
        self.inner = real

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def dispatch(func, args, kwargs):
    calls.add(func)
    real = lambda t: t.inner if isinstance(t, OnDevice) else t
    inside, options = pytree.tree_map(real, args), dict(pytree.tree_map(real, kwargs))
    here = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, OnDevice)]
    to = options.get("device")
    if to is not None:
        options["device"] = torch.device("cpu")
    elif func is not aten.copy_.default:  # as a real device: tensors of two devices do not meet
        for t in pytree.tree_leaves((args, kwargs)):
            assert not here or not isinstance(t, torch.Tensor) or isinstance(t, OnDevice) or t.ndim == 0, func
    result = func(*inside, **options)
    for argument, x in zip(func._schema.arguments, args):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return x
    if "out" in kwargs:
        return kwargs["out"]
    if not (here if to is None else torch.device(to).type == "fake"):
        return result
    return pytree.tree_map(lambda t: OnDevice(t) if isinstance(t, torch.Tensor) else t, result)


library = torch.library.Library("aten", "IMPL")
for op in (aten.empty.memory_format, aten.empty_strided.default):
    make = lambda *args, op=op, **options: dispatch(op, args, {**options, "device": HERE})
    library.impl(op.name().removeprefix("aten::"), make, "PrivateUse1")


def copy_from(source, target, non_blocking=False):
    (target.inner if isinstance(target, OnDevice) else target).copy_(getattr(source, "inner", source))
    return target


library.impl("_copy_from", copy_from, "PrivateUse1")
"""


def agreeing(one: str, two: str, tolerances: dict[str, float], device: str = "") -> str:
    """Code that compares what ``outs(kind, dtype, device)`` of two kinds yields, and prints "same".

    ``device``: where the first of them is to have run; else on the CPU.
    """
    where = f", {device!r}" if device else ""
    return "\n".join(
        [
            f"for dtype, loose in {tolerances!r}.items():",
            "    dtype = getattr(torch, dtype)",
            f"    for first, second in zip(outs({one!r}, dtype{where}), outs({two!r}, dtype)):",
            f"        assert first.device.type == {device or 'cpu'!r}",
            "        torch.testing.assert_close(first.cpu(), second, atol=loose, rtol=loose)",
            "print('same')",
        ]
    )
