"""The block mask as a value: its two forms, its density, and what FlexAttention is given."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import CallError
from hal.sparse import BlockMask

SIZES = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**20))


def drawn(sizes, ragged: bool = False) -> BlockMask:
    q_len, kv_len, block_q, block_k, seed = sizes
    g = torch.Generator().manual_seed(seed)
    nq, nk = math.ceil(q_len / block_q), math.ceil(kv_len / block_k)
    keep = torch.rand(2, 3, nq, nk, generator=g) < 0.5
    valid = {}
    if ragged:
        valid = {
            "q_valid": torch.randint(0, block_q + 1, (nq,), generator=g),
            "kv_valid": torch.randint(0, block_k + 1, (nk,), generator=g),
        }
    return BlockMask.from_dense(keep, q_len, kv_len, block_q, block_k, **valid)


@settings(max_examples=50)
@given(SIZES, st.booleans())
def test_token_by_token_it_is_the_block_of_each_pair(sizes, ragged):
    mask = drawn(sizes, ragged)
    dense = mask.to_dense()
    inside = lambda i, block, valid: valid is None or i % block < int(valid[i // block])
    for q in range(mask.q_len):
        for k in range(mask.kv_len):
            counts = inside(q, mask.block_q, mask.q_valid) and inside(k, mask.block_k, mask.kv_valid)
            want = mask.keep[:, :, q // mask.block_q, k // mask.block_k] & counts
            assert torch.equal(dense[:, :, q, k], want)


@settings(max_examples=50)
@given(SIZES, st.booleans())
def test_density_is_the_share_of_pairs(sizes, ragged):
    mask = drawn(sizes, ragged)
    pairs = int(mask.q_sizes.sum() * mask.kv_sizes.sum()) * 6
    assert mask.density == pytest.approx(int(mask.to_dense().sum()) / pairs if pairs else 0.0)


@settings(max_examples=50)
@given(SIZES)
def test_lists_and_map_are_two_forms_of_one_mask(sizes):
    mask = drawn(sizes)
    index, count = mask.lists
    assert index.dtype is count.dtype is torch.int32
    for i, row in enumerate(mask.keep.flatten(0, 2)):
        n = int(count.flatten()[i])
        assert index.flatten(0, 2)[i, :n].tolist() == row.nonzero().flatten().tolist()
    back = BlockMask.from_lists(index, count, *sizes[:4])
    assert torch.equal(back.keep, mask.keep)


def test_lists_in_any_order_and_without_counts():
    index = torch.tensor([[[[2, 0], [1, 1]]]])
    assert BlockMask.from_lists(index, None, 2, 3, 1, 1).keep.tolist() == [
        [[[True, False, True], [False, True, False]]]
    ]


@settings(max_examples=30)
@given(SIZES, st.booleans())
def test_flex_is_given_the_same_blocks(sizes, ragged):
    mask = drawn(sizes, ragged)
    flex = mask.to_flex()
    assert torch.equal(flex.to_dense().bool(), mask.keep)
    assert (mask.block_q, mask.block_k) == flex.BLOCK_SIZE
    q, k = torch.arange(mask.q_len)[:, None], torch.arange(mask.kv_len)
    want = BlockMask.from_dense(
        mask.keep, mask.q_len, mask.kv_len, mask.block_q, mask.block_k, kv_valid=mask.kv_valid
    ).to_dense()
    assert torch.equal(flex.mask_mod(1, 2, q, k), want[1, 2])
    part = mask.kv_sizes < mask.block_k  # only where FlexAttention asks mask_mod may keys be missing
    assert torch.equal(flex.full_kv_num_blocks, (mask.keep & ~part).sum(-1).int())


KEEP, INDEX = torch.ones(1, 1, 2, 2, dtype=torch.bool), torch.zeros(1, 1, 2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"keep": KEEP.float()}, r"keep is torch.float32 of shape \(1, 1, 2, 2\); it must be a torch.Tensor, bool"),
        ({"keep": KEEP[0, 0]}, r"keep is torch.bool of shape \(2, 2\)"),
        ({"keep": [[True]]}, "keep is list; it must be a torch.Tensor, bool"),
        ({"keep": None}, "keep is NoneType"),
        ({"keep": KEEP[..., :1]}, "keep has 2 x 1 blocks; .* make 2 x 2"),
        ({"block_q": 0}, "block_q is 0; it must be a positive number of tokens"),
        ({"kv_len": "4"}, "kv_len is '4'"),
        ({"q_len": 4.0}, "q_len is 4.0"),
        ({"kv_valid": torch.tensor([1, 2, 3])}, r"kv_valid is torch.int64 of shape \(3,\); .* integer \[2\]"),
        ({"q_valid": torch.tensor([1.0, 2.0])}, "q_valid is torch.float32"),
        ({"q_valid": [2, 2]}, "q_valid is list"),
        ({"q_valid": torch.tensor([2, 3])}, "q_valid goes from 2 to 3; allowed: 0 to 2"),
        ({"kv_valid": torch.tensor([-1, 2])}, "kv_valid goes from -1 to 2"),
    ],
)
def test_a_map_that_does_not_agree(changes, text):
    good = {"keep": KEEP, "q_len": 4, "kv_len": 4, "block_q": 2, "block_k": 2}
    BlockMask.from_dense(**good)
    with pytest.raises(CallError, match=text):
        BlockMask.from_dense(**{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"index": INDEX + 2}, "outside 0 .. 1, the blocks of 4 keys"),
        ({"index": INDEX - 1}, "outside 0 .. 1"),
        ({"index": INDEX.float()}, "index is torch.float32"),
        ({"index": INDEX.bool()}, "index is torch.bool"),
        ({"index": [[0]]}, "index is list; it must be a torch.Tensor, integer"),
        ({"count": [1, 1]}, "count is list"),
        ({"count": torch.ones(1, 1, 2)}, "count is torch.float32"),
        ({"count": torch.ones(1, 2, dtype=torch.int32)}, r"count is .* \(1, 2\); it must be .* integer \[1, 1, 2\]"),
        ({"count": torch.full((1, 1, 2), 3)}, "count goes from 3 to 3; index lists 1 for each row"),
        ({"block_k": 0}, "block_k is 0"),
        ({"kv_len": None}, "kv_len is None"),
    ],
)
def test_lists_that_do_not_agree(changes, text):
    good = {"index": INDEX, "count": None, "q_len": 4, "kv_len": 4, "block_q": 2, "block_k": 2}
    BlockMask.from_lists(**good)
    with pytest.raises(CallError, match=text):
        BlockMask.from_lists(**{**good, **changes})
