"""The moving digits: a seed names a clip, the splits share no image, and a caption says what the clip shows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.demo import digits, judge

pytest.importorskip("sklearn")

seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.sampled_from([4, 16, 32]), st.sampled_from([64, 96, 128]), st.sampled_from([64, 96, 128]))
splits = st.sampled_from(["train", "held-out"])


@settings(max_examples=20, deadline=None)
@given(seed=seeds, size=sizes, split=splits)
def test_a_seed_names_a_clip(seed, size, split):
    a, b = (digits.sample_clip(np.random.default_rng(seed), *size, split=split) for _ in range(2))
    assert a.caption == b.caption
    assert torch.equal(digits.render([a], *size[1:]), digits.render([b], *size[1:]))


def test_other_seeds_give_other_clips():
    captions = {digits.sample_clip(np.random.default_rng(seed), 16, 128, 128).caption for seed in range(30)}
    assert len(captions) > 20


def test_the_splits_share_no_image_and_leave_none_out():
    train, held_out = ({image.tobytes() for image in digits.images(split)[0]} for split in ("train", "held-out"))
    assert not train & held_out
    counts = [len(digits.images(split)[1]) for split in ("train", "held-out")]
    assert sum(counts) == 1797
    assert counts[1] == round(1797 * digits.HELD_OUT)
    assert set(digits.images("held-out")[1]) == set(range(10))


@settings(max_examples=60, deadline=None)
@given(seed=seeds, size=sizes, split=splits)
def test_a_clip_shows_images_of_its_split_inside_the_canvas(seed, size, split):
    clip = digits.sample_clip(np.random.default_rng(seed), *size, split=split)
    known = {image.tobytes() for image in digits.images(split)[0]}
    for digit in clip.digits:
        assert digit.image.tobytes() in known
        assert digit.path.shape == (size[0], 2)
        assert (digit.path >= 0).all()
        assert (digit.path <= np.array(size[1:]) - digits.SPRITE).all()


@settings(max_examples=60, deadline=None)
@given(seed=seeds, size=sizes)
def test_the_caption_says_which_digits_and_how_they_move(seed, size):
    clip = digits.sample_clip(np.random.default_rng(seed), *size, terse=0.0)
    assert judge.asked(clip.caption) == Counter(d.label for d in clip.digits)
    for digit, words in zip(clip.digits, clip.caption.split(", "), strict=True):
        _, name, motion, direction = words.split()
        assert name == digits.NAMES[digit.label]
        moved = np.diff(digit.path, axis=0)
        speeds = {digits.SPEED} if motion == "bouncing" else {digits.SPEED, digits.SPEED // 2}
        assert np.abs(moved[0]).sum() in speeds
        heading = np.array(digits.DIRECTIONS[direction]) * np.abs(moved[0]).sum()
        assert (moved[0] == heading).all()  # it sets out as told
        turned = (np.abs(moved - heading) > 0).any()
        if motion == "drifting" and min(size[1:]) - digits.SPRITE >= digits.SPEED * size[0]:
            assert not turned
        if motion == "bouncing" and size[0] >= 16:
            assert turned


@settings(max_examples=30, deadline=None)
@given(seed=seeds, size=sizes)
def test_two_digits_never_cover_each_other_where_there_is_room(seed, size):
    if min(size[1:]) < 96:
        return
    clip = digits.sample_clip(np.random.default_rng(seed), *size, pair=1.0)
    one, other = clip.digits
    apart = np.abs(one.path - other.path).max(1)  # pixels, along the axis on which they are farther apart
    assert apart.min() >= 24  # a digit is drawn on 32, whose rims are dark


def test_a_picture_is_light_on_dark_in_zero_to_one():
    video = digits.render([digits.sample_clip(np.random.default_rng(3), 4, 64, 64, pair=0.0)], 64, 64)
    assert video.shape == (1, 4, 64, 64)
    assert video.min() == 0
    assert 0.8 < video.max() <= 1
    assert (video == 0).float().mean() > 0.5
