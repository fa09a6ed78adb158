"""Token order: a bijection for any grid, with clipped tiles and text tokens."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import CallError
from hal.sparse import Order, pool

SIZE = st.integers(1, 7)  # primes and ones among them
GRIDS = st.tuples(SIZE, SIZE, SIZE)
TILES = st.tuples(*(st.integers(1, 4) for _ in range(3)))
TEXT = st.integers(0, 9)


def by_definition(grid, tile, prefix, suffix) -> list[list[int]]:
    """The tokens of each block, one at a time."""
    frames, height, width = grid
    block = tile[0] * tile[1] * tile[2]
    text = lambda first, n: [list(range(first + i, first + min(i + block, n))) for i in range(0, n, block)]
    tiles = []
    for corner in product(*(range(0, n, t) for n, t in zip(grid, tile))):
        inside = product(*(range(c, min(c + t, n)) for c, t, n in zip(corner, tile, grid)))
        tiles.append([prefix + (f * height + y) * width + x for f, y, x in inside])
    return text(0, prefix) + tiles + text(prefix + frames * height * width, suffix)


@settings(max_examples=60)
@given(GRIDS, TILES, TEXT, TEXT)
def test_blocks_hold_the_tokens_of_their_tile_in_raster_order(grid, tile, prefix, suffix):
    order = Order.of(grid, tile, prefix=prefix, suffix=suffix)
    expected = by_definition(grid, tile, prefix, suffix)
    assert order.valid.tolist() == [len(b) for b in expected]
    slots = order.token.view(order.blocks, order.block)
    assert [slots[i, : len(b)].tolist() for i, b in enumerate(expected)] == expected
    tiles = order.video.stop - order.video.start
    assert tiles == order.tiles[0] * order.tiles[1] * order.tiles[2]


@settings(max_examples=60)
@given(GRIDS, TILES, TEXT, TEXT)
def test_there_and_back_is_the_identity(grid, tile, prefix, suffix):
    order = Order.of(grid, tile, prefix=prefix, suffix=suffix)
    x = torch.randn(2, 3, order.tokens, 4)
    blocks = order.to_blocks(x)
    assert torch.equal(order.from_blocks(blocks), x)
    assert blocks.shape[2] == order.blocks * order.block
    assert blocks.index_select(2, order.empty).abs().sum() == 0
    assert sorted(order.slot.tolist() + order.empty.tolist()) == list(range(blocks.shape[2]))
    assert torch.equal(order.from_blocks(order.to_blocks(x.transpose(1, 2), 1), 1), x.transpose(1, 2))


def test_empty_slots_are_zero_even_beside_infinities():
    order = Order.of((1, 1, 3), (1, 1, 2))
    x = torch.full((3, 1), torch.inf)
    assert order.to_blocks(x).flatten().tolist() == [torch.inf] * 3 + [0.0]


def test_the_order_has_a_gradient():
    order = Order.of((3, 2, 5), (2, 2, 2), prefix=1)
    x = torch.randn(order.tokens, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(order.to_blocks, x)
    y = torch.randn(order.token.numel(), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(order.from_blocks, y)


def test_made_once_for_a_grid_even_in_inference_mode():
    with torch.inference_mode():
        made = Order.of((2, 3, 11), (1, 2, 4))
    assert Order.of((2, 3, 11), (1, 2, 4)) is made
    x = torch.randn(made.tokens, 2, requires_grad=True)
    made.from_blocks(made.to_blocks(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_chunks_are_tokens_in_a_row():
    order = Order.chunks(10, 4)
    assert order.valid.tolist() == [4, 4, 2]
    assert order.slot.tolist() == list(range(10))


@settings(max_examples=30)
@given(GRIDS, TILES, st.sampled_from([torch.float32, torch.bfloat16]))
def test_pooling_divides_by_the_true_size_in_float32(grid, tile, dtype):
    order = Order.of(grid, tile)
    x = torch.randn(2, order.tokens, 3, dtype=dtype)
    pooled = pool(order.to_blocks(x), order.block, order.valid)
    means = [x[:, b].double().mean(1) for b in by_definition(grid, tile, 0, 0)]
    assert pooled.dtype is torch.float32
    torch.testing.assert_close(pooled.double(), torch.stack(means, 1), atol=1e-6, rtol=1e-5)


def test_pooling_without_sizes_has_a_short_last_block():
    assert pool(torch.arange(5.0)[:, None], 2).flatten().tolist() == [0.5, 2.5, 4.0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Order.of((0, 1, 1), (1, 1, 1)),
        lambda: Order.of((2, 2), (1, 1, 1)),
        lambda: Order.of((2, 2, 2), (1, 1, 1.0)),
        lambda: Order.of((2, 2, 2), (1, 1, 1), prefix=-1),
        lambda: Order.of((2, 2, 2), (1, 1, 1)).to_blocks(torch.zeros(9, 1)),
        lambda: Order.of((2, 2, 2), (3, 1, 1)).from_blocks(torch.zeros(8, 1)),
        lambda: pool(torch.zeros(8, 1), 2, torch.ones(3, dtype=torch.int32)),
    ],
)
def test_bad_input_is_an_error_for_the_reader(wrong):
    with pytest.raises(CallError):
        wrong()
