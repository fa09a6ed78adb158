"""The proof: small clips of the shipped model show the digits that their prompts ask for, as the shipped classifier reads them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("sklearn")

from diffusers import DiffusionPipeline

import hal
from hal.demo import digits, evaluate, judge, shipped

SIZE, STEPS, GUIDANCE = (16, 64, 64), 10, shipped.DEFAULTS["guidance_scale"]  # 256 tokens
LEAST = 6  # of ten prompts, one for each digit
MOST_SHUFFLED = 2  # chance finds one
PROMPTS = [
    digits.Digit(n, None, ("drifting", "bouncing")[n % 2], list(digits.DIRECTIONS)[n % 4], None).caption()
    for n in range(10)
]


@pytest.fixture(scope="module")
def result():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pipe = DiffusionPipeline.from_pretrained(shipped.model_folder())
    pipe.set_progress_bar_config(disable=True)
    with hal.attach(pipe, attention_backend="torch_sdpa"):
        videos = evaluate.generate(pipe, PROMPTS, SIZE, STEPS, GUIDANCE, batch=5)
    torch.set_num_threads(before)
    return evaluate.score(videos, PROMPTS, judge.load(shipped.JUDGE))


def test_the_digits_that_are_asked_for_are_found(result):
    assert result["found"]["hits"] >= LEAST, result["detail"]


def test_against_shuffled_prompts_they_are_not(result):
    assert result["found, prompts shuffled"]["hits"] <= MOST_SHUFFLED, result["detail"]
