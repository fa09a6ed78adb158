"""Dense steps of a sparse backend: key padding and items without a key."""

from __future__ import annotations

import pytest
import torch

from hal import oracle
from hal.sparse import selected


@pytest.mark.parametrize("lse", [False, True])
def test_padded_keys_are_left_out_and_an_item_without_a_key_gives_zero(lse):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, 7, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    keep = torch.rand(3, 1, 1, 7) < 0.5
    keep[0], keep[1, ..., 0] = False, True
    out, stats = selected.every_key(q, k, v, selected.key_bias(keep), 0.3, lse)
    wanted, wanted_lse = oracle.attention(q, k, v, attn_mask=keep, scale=0.3, layout="bhsd")
    torch.testing.assert_close(out, wanted, atol=1e-9, rtol=0)
    if lse:
        torch.testing.assert_close(stats.double(), wanted_lse.double(), atol=1e-6, rtol=0)
    for one, two in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v))):
        torch.testing.assert_close(one, two.nan_to_num(), atol=1e-9, rtol=0)
