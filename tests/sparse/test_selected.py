"""What sparse backends have in common: the order of the running grid, and masks for some of the heads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hal
from hal import oracle
from hal.context import Grid, Position
from hal.sparse import Order, selected

TILE = (2, 2, 2)


@pytest.mark.parametrize(
    "grid, tokens, before, after",
    [
        (Grid(2, 3, 4), 24, 0, 0),
        (Grid(2, 3, 4, 5), 24, 0, 0),  # the model attends to its text elsewhere
        (Grid(2, 3, 4, 5), 29, 0, 5),
        (Grid(2, 3, 4, 5, text_first=True), 29, 5, 0),
        (Grid(2, 3, 4, 5, text_first=True), 24, 0, 0),
    ],
)
def test_text_is_with_the_video_where_the_tokens_say_so(grid, tokens, before, after):
    order = selected.order_here("x", tokens, TILE, torch.device("cpu"), Position(grid=grid))
    assert (order.grid, order.tile, order.prefix, order.suffix) == ((2, 3, 4), TILE, before, after)
    assert order is selected.order_here("x", tokens, TILE, torch.device("cpu"), Position(grid=grid))  # made once


@given(
    heads=st.permutations(range(4)), cut=st.integers(1, 3), kv_heads=st.sampled_from([1, 2, 4]), lse=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_each_head_gets_its_mask(heads, cut, kv_heads, lse, seed):
    g = torch.Generator().manual_seed(seed)
    order = Order.of((3, 4, 5), TILE)
    x = [torch.randn(2, h, order.tokens, 8, generator=g, dtype=torch.float64) for h in (4, kv_heads, kv_heads)]
    masks = [order.mask(torch.rand(1, 1, order.blocks, order.blocks, generator=g) > 0.5) for _ in range(2)]
    parts = ((tuple(heads[:cut]), masks[0]), (tuple(heads[cut:]), masks[1]))
    select = lambda q, k, v, order, at: selected.Selected(parts)
    with hal.grid(3, 4, 5):
        got = selected.run("x", TILE, select, scale=0.3, lse=lse)(*x, None, None)
    dense = torch.stack([masks[heads.index(h) >= cut].to_dense()[0, 0] for h in range(4)])[None]
    keep = dense[:, :, order.slot][..., order.slot].expand(2, -1, -1, -1)
    wanted, stats = oracle.attention(*x, attn_mask=keep, scale=0.3, layout="bhsd")
    torch.testing.assert_close(got[0] if lse else got, wanted, atol=1e-10, rtol=0)
    if lse:
        torch.testing.assert_close(got[1].double(), stats, atol=1e-5, rtol=0)


def test_blocks_of_zero_tokens_cannot_leak():
    """Empty slots of ragged tiles are no keys: large values that would be taken there change nothing."""
    order = Order.of((3, 3, 3), TILE)
    q = torch.randn(1, 1, 27, 8, dtype=torch.float64) * 30  # so that a key of 0 would often be the best
    keep = torch.ones(1, 1, order.blocks, order.blocks, dtype=torch.bool)
    select = lambda q, k, v, order, at: selected.Selected(order.mask(keep))
    with hal.grid(3, 3, 3):
        got = selected.run("x", TILE, select, scale=1.0)(q, -q.abs(), q, None, None)
    torch.testing.assert_close(got, oracle.attention(q, -q.abs(), q, scale=1.0, layout="bhsd")[0], atol=1e-9, rtol=0)
