"""Block-sparse attention: token order, block selection, the block mask, and the executor that runs it.

from hal.sparse import BlockMask, Order, block_sparse_attention, pool, top_k

order = Order.of(grid=(21, 30, 52), tile=(4, 4, 4), device=q.device)
q, k, v = (order.to_blocks(x) for x in (q, k, v))                    # [B, H, slots, D]
scores = pool(q, order.block, order.valid) @ pool(k, order.block, order.valid).transpose(-1, -2)
mask = order.mask(top_k(scores, 32))
out = order.from_blocks(block_sparse_attention(q, k, v, mask))
"""

from __future__ import annotations

from .blockmask import BlockMask
from .executor import EXECUTORS, Executor, block_sparse_attention, execute, register
from .given import given
from .order import Order
from .packed import PackedRows
from .selection import cumulative, kth_value, pool, top_k
from .triton import EXECUTOR

register(EXECUTOR)

__all__ = [
    "EXECUTORS",
    "BlockMask",
    "Executor",
    "Order",
    "PackedRows",
    "block_sparse_attention",
    "cumulative",
    "execute",
    "given",
    "kth_value",
    "pool",
    "register",
    "top_k",
]
