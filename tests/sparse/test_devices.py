"""A device that PyTorch does not know, and that has no float64: what an accelerator's plugin looks like to hal.sparse."""

from __future__ import annotations

from fake_device import DEVICE

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
