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


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BlockMask.from_dense(torch.ones(1, 1, 2, 2), 4, 4, 2, 2), "must be bool"),
        (lambda: BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool), 4, 4, 2, 2), "must be bool"),
        (lambda: BlockMask.from_dense(torch.ones(1, 1, 2, 3, dtype=torch.bool), 4, 4, 2, 2), "make 2 x 2"),
        (lambda: BlockMask.from_dense(torch.ones(1, 1, 2, 2, dtype=torch.bool), 4, 4, 0, 2), "block_q is 0"),
        (
            lambda: BlockMask.from_dense(
                torch.ones(1, 1, 2, 2, dtype=torch.bool), 4, 4, 2, 2, kv_valid=torch.tensor([1, 2, 3])
            ),
            "kv_valid",
        ),
        (lambda: BlockMask.from_lists(torch.tensor([[[[2]]]]), None, 2, 4, 2, 2), "outside 0 .. 1"),
        (lambda: BlockMask.from_lists(torch.tensor([[[[-1]]]]), None, 2, 4, 2, 2), "outside 0 .. 1"),
        (lambda: BlockMask.from_lists(torch.tensor([[0.5]]), None, 2, 4, 2, 2), "must be integer"),
    ],
)
def test_what_does_not_agree_is_an_error(make, text):
    with pytest.raises(CallError, match=text):
        make()
