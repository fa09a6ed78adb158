"""Selection: each primitive against its definition, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hal
from hal.errors import CallError
from hal.sparse import cumulative, kth_value, pool, top_k

# Few values, so that there are ties; -inf is a block that is forbidden.
SCORE = st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 0.5, 2.0])
ROWS = st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(SCORE, min_size=n, max_size=n), min_size=1, max_size=4))


def kept(keep: torch.Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in keep]


@settings(max_examples=80)
@given(ROWS, st.integers(-1, 11))
def test_top_k_takes_the_lower_index_of_equal_scores(rows, k):
    n = len(rows[0])
    first = [sorted(range(n), key=lambda i: (-row[i], i))[: max(1, min(n, k))] for row in rows]
    expected = [sorted(i for i in f if row[i] > -torch.inf) for f, row in zip(first, rows)]
    scores = torch.tensor(rows)
    assert kept(top_k(scores, k)) == expected
    assert kept(top_k(scores, torch.full((len(rows),), k))) == expected


@settings(max_examples=80)
@given(ROWS, st.integers(-1, 11), st.sampled_from([0.0, 1e-5, 0.6]))
def test_kth_value_keeps_all_ties(rows, k, slack):
    n = len(rows[0])
    least = [sorted(row, reverse=True)[max(1, min(n, k)) - 1] - slack for row in rows]
    expected = [[i for i, x in enumerate(row) if x >= t and x > -torch.inf] for t, row in zip(least, rows)]
    scores = torch.tensor(rows)
    assert kept(kth_value(scores, k, slack)) == expected
    assert kept(kth_value(scores, torch.full((len(rows),), k), slack)) == expected


@settings(max_examples=80)
@given(
    st.integers(1, 8).flatmap(lambda n: st.lists(st.lists(st.integers(0, 8), min_size=n, max_size=n), min_size=1)),
    st.integers(0, 20),
    st.booleans(),
    st.integers(0, 3),
)
def test_cumulative_sums_to_the_threshold(rows, p, crossing, at_least):
    expected = []
    for row in rows:  # whole numbers, so that sums are exact
        total, mine = 0, []
        for place, i in enumerate(sorted(range(len(row)), key=lambda i: (-row[i], i))):
            if (total if crossing else total + row[i]) <= p or place < at_least:
                mine.append(i)
            total += row[i]
        expected.append(sorted(mine))
    rows = torch.tensor(rows).float()
    assert kept(cumulative(rows, p, crossing=crossing, at_least=at_least)) == expected
    limits = torch.full((len(rows),), p)
    assert kept(cumulative(rows, limits, crossing=crossing, at_least=at_least)) == expected


def test_each_row_has_a_limit_of_its_own():
    scores = torch.tensor([[0.6, 0.3, 0.1]] * 3)
    assert kept(cumulative(scores, torch.tensor([0.05, 0.7, 0.95]))) == [[0], [0, 1], [0, 1, 2]]
    assert kept(top_k(scores, torch.tensor([1, 2, 3]))) == [[0], [0, 1], [0, 1, 2]]


def test_counts_that_are_none():
    for call in (lambda: top_k(torch.ones(2, 3), 1.5), lambda: kth_value(torch.ones(2, 3), torch.ones(2)), lambda: pool(torch.ones(4, 2), 0)):  # fmt: skip
        with pytest.raises(CallError):
            call()


def test_each_row_may_have_its_own_k():
    scores = torch.tensor([3.0, 1.0, 2.0]).expand(2, 2, 3)
    k = torch.tensor([[1, 2], [3, 9]])
    assert top_k(scores, k).sum(-1).tolist() == [[1, 2], [3, 3]]
    assert kth_value(scores, k).sum(-1).tolist() == [[1, 2], [3, 3]]


@settings(max_examples=20)
@given(st.integers(0, 2**20))
def test_more_is_kept_as_the_knob_rises(seed):
    scores = torch.randn(2, 5, 17, generator=torch.Generator().manual_seed(seed))
    for few, many in ((top_k(scores, 3), top_k(scores, 4)), (kth_value(scores, 3), kth_value(scores, 4)),
                      (cumulative(scores.softmax(-1), 0.3), cumulative(scores.softmax(-1), 0.6))):  # fmt: skip
        assert not (few & ~many).any()
        assert few.sum() < many.sum()


def test_what_is_no_number_is_kept_so_that_it_is_seen():
    scores = torch.tensor([[1.0, math.nan, 3.0, -math.inf]])
    assert top_k(scores, 2).tolist() == [[False, True, True, False]]
    assert kth_value(scores, 2)[0, 1] and cumulative(scores, 0.5)[0, 1]
    q, k, v = (torch.randn(1, 150, 1, 16) for _ in range(3))
    for wrong, rows in ((q, 1), (k, 150)):  # as dense attention has it
        given = [x.clone() if x is wrong else x for x in (q, k, v)]
        next(a for a, b in zip(given, (q, k, v)) if a is not b)[0, 0] = math.nan
        with hal.scope(attention_backend_config={"video_sparse_attn": {"sparsity": 0.5}}), hal.grid(5, 6, 5):
            out = hal.attention(*given, backend="video_sparse_attn")
        assert out.isnan().any(-1).sum() == rows and not (out == 0).any()
