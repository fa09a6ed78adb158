"""Packed rows: segments, their tiles, and what a model says of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal import sparse
from hal.errors import CallError
from hal.sparse import Order, PackedRows
from hal.sparse.given import take

TILE = (4, 4, 4)
sides = st.integers(1, 6)
videos = st.tuples(sides, sides, st.integers(1, 11))
segments = st.lists(st.one_of(st.integers(0, 150), videos), max_size=3).map(tuple)


def test_a_segment_is_cut_on_its_own():
    rows = PackedRows(prefix=(70, 0, 100), video=(5, 6, 10), pad=22)
    order = rows.order(TILE)
    assert order.valid[:4].tolist() == [64, 6, 64, 36]
    assert order.valid[4:].equal(Order.of((5, 6, 10), TILE).valid)
    assert (rows.first, rows.used, rows.tokens, rows.videos) == (170, 470, 492, 1)
    assert (order.regions, order.video) == (((4, 16),), slice(4, 16))
    assert order.dense.tolist() == [True] * 4 + [False] * 12
    assert str(rows) == "70 + 100 + 5x6x10 and 22 pad rows"


@given(prefix=segments, video=videos, refs=segments, pad=st.integers(0, 9))
@settings(max_examples=30)
def test_every_used_row_has_one_slot_and_no_tile_lies_across_segments(prefix, video, refs, pad):
    rows = PackedRows(prefix, video, refs, pad)
    order = rows.order(TILE)
    x = torch.arange(1, rows.used + 1)
    blocks = order.to_blocks(x, -1)
    assert order.from_blocks(blocks, -1).equal(x) and int((blocks > 0).sum()) == rows.used == order.tokens
    sizes = [s if isinstance(s, int) else math.prod(s) for s in rows.segments]
    segment = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    of = order.slot // 64
    assert len({(b, s) for b, s in zip(of.tolist(), segment.tolist())}) == order.blocks
    assert torch.bincount(of, minlength=order.blocks).equal(order.valid.long())
    for a, b in order.regions:
        assert not order.dense[a:b].any()
    assert int((~order.dense).sum()) == sum(b - a for a, b in order.regions) and len(order.regions) == rows.videos
    first = order.from_blocks(torch.arange(order.blocks).repeat_interleave(64), -1)[rows.first]
    assert order.regions[order.target][0] == first == order.video.start


def test_an_order_is_made_once():
    made = [PackedRows((70,), (2, 3, 4)).order(TILE) for _ in range(2)]
    assert made[0] is made[1]
    assert PackedRows([70], [2, 3, 4]) == PackedRows((70,), (2, 3, 4))  # lists will do


@pytest.mark.parametrize(
    "words, text",
    [
        ({"prefix": (70, -1)}, r"prefix is \(70, -1\); it must be segments"),
        ({"prefix": 70}, "prefix is 70; it must be segments"),
        ({"prefix": (True,)}, "prefix"),
        ({"refs": ((2, 3),)}, "refs"),
        ({"video": (0, 6, 10)}, r"video is \(0, 6, 10\); it must be three positive numbers"),
        ({"video": 300}, "video is 300"),
        ({"pad": -1}, "pad is -1; it must be a number of rows"),
    ],
)
def test_rows_that_are_wrong(words, text):
    with pytest.raises(CallError, match=text):
        PackedRows(**{"prefix": (), "video": (5, 6, 10), **words})


def test_where_rows_lie_holds_in_inner_blocks_and_need_not_be_used():
    rows = PackedRows((), (2, 3, 4))
    with sparse.given(rows=rows):
        with sparse.given(gate=1):
            assert (take("rows"), take("gate")) == (rows, 1)
        with sparse.given(rows=PackedRows((5,), (2, 3, 4))):
            assert take("rows").prefix == (5,)
        with pytest.raises(CallError, match="gate was given"):
            with sparse.given(gate=1):
                pass
    assert take("rows") is None
