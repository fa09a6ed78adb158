"""The judge reads digits: what a caption asks for, what a clip shows, and how sure a share is."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hal.demo import judge


@pytest.mark.parametrize(
    "caption, wanted",
    [
        ("a seven drifting left", {7: 1}),
        ("An eight bouncing up, a two", {8: 1, 2: 1}),
        ("a two, a two drifting down", {2: 2}),
        ("a 3 bouncing left", {3: 1}),
        ("a cat", {}),
    ],
)
def test_a_caption_asks_for_digits(caption, wanted):
    assert judge.asked(caption) == Counter(wanted)


@pytest.mark.parametrize(
    "found, wanted, hit, exact",
    [
        ({7: 1}, {7: 1}, True, True),
        ({7: 1, 2: 1}, {7: 1}, True, False),
        ({7: 1}, {7: 2}, False, False),
        ({}, {7: 1}, False, False),
    ],
)
def test_a_hit_has_every_asked_digit(found, wanted, hit, exact):
    assert judge.hit(Counter(found), Counter(wanted)) is hit
    assert judge.hit(Counter(found), Counter(wanted), exact=True) is exact


@pytest.mark.parametrize("hits, total, low, high", [(50, 100, 0.404, 0.596), (0, 20, 0.0, 0.161), (20, 20, 0.839, 1.0)])
def test_the_interval_of_a_share(hits, total, low, high):  # values of Wilson's score interval
    assert judge.interval(hits, total) == pytest.approx((low, high), abs=1e-3)


def test_nothing_is_found_on_an_empty_canvas():
    torch.manual_seed(0)
    blank = judge.Judge().eval()
    with torch.no_grad():
        blank.net[-1].bias[judge.NONE] = 20
    assert blank.find(torch.zeros(1, 2, 64, 64)) == [Counter()]
