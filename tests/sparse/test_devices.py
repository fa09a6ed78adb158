"""A device that PyTorch does not know, and that has no float64: what an accelerator's plugin looks like to hal.sparse."""

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

RUN = """
from hal import oracle
from hal.sparse import BlockMask, Order, block_sparse_attention, pool, top_k

torch.manual_seed(0)
order = Order.of((3, 5, 7), (2, 2, 3), suffix=5, device="fake")
block = order.slot.cpu() // order.block
for dtype, loose in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
    real = [torch.randn(2, n, order.tokens, 8, dtype=dtype) for n in (4, 2, 2)]
    q, k, v = (x.to("fake") for x in real)
    assert q.device.type == "fake"
    blocks = [order.to_blocks(x) for x in (q, k, v)]
    pooled = [pool(x, order.block, order.valid) for x in blocks[:2]]
    mask = order.mask(top_k(pooled[0] @ pooled[1].repeat_interleave(2, 1).transpose(-1, -2), 4))
    out, lse = block_sparse_attention(*blocks, mask, return_lse=True)
    plain = block_sparse_attention(*blocks, mask)
    assert out.device.type == lse.device.type == "fake"

    seen = mask.keep.cpu()[:, :, block][..., block]
    want, want_lse = oracle.attention(*real, attn_mask=seen, layout="bhsd")
    for o in (out, plain):
        torch.testing.assert_close(order.from_blocks(o).cpu().double(), want, atol=loose, rtol=loose)
    torch.testing.assert_close(order.from_blocks(lse, -1).cpu().double(), want_lse, atol=1e-4, rtol=1e-4)

    sizes = mask.q_len, mask.kv_len, mask.block_q, mask.block_k
    on_cpu = BlockMask.from_dense(mask.keep.cpu(), *sizes, kv_valid=mask.kv_valid.cpu())
    assert torch.equal(block_sparse_attention(*blocks, on_cpu).cpu(), plain.cpu())
print("same")
"""


def test_a_device_without_float64(python):
    ran = python(DEVICE + RUN)
    assert (ran.code, ran.out) == (0, "same\n"), ran.err
