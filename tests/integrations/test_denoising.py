"""While an attached pipeline denoises, hal knows step, steps, timestep, layer and token grid; models and pipelines do nothing."""

from __future__ import annotations

import pytest
import torch
from attached import STEPS, sample

import hal
from hal import context, run
from hal.context import Grid
from hal.errors import PolicyError
from hal.testing import tiny

GRIDS = {  # of the sizes that tiny.CALLS has
    "wan": Grid(3, 1, 1, 16),
    "flux": Grid(1, 4, 4, 16),
    "sd3": Grid(1, 32, 32, 93),
    "pixart": Grid(1, 4, 4, 16),
    "ltx": Grid(3, 8, 8, 16),
}


@pytest.fixture
def seen(monkeypatch):
    """(component, position, role, query tokens) of every call that an attached model makes."""
    out, real = [], run.attention

    def spy(q, k, v, **arguments):
        tokens = q.shape[1 if arguments["layout"] == "bshd" else 2]
        out.append((context.current.get().site.component, context.where(), arguments["role"], tokens))
        return real(q, k, v, **arguments)

    monkeypatch.setattr(run, "attention", spy)
    return out


def test_each_call_knows_its_step_and_grid_and_everything_is_put_back(named_pipeline, seen):
    name, pipeline = named_pipeline
    before = type(pipeline.scheduler), type(pipeline.transformer)
    with hal.attach(pipeline):
        sample(name, pipeline)
    assert (type(pipeline.scheduler), type(pipeline.transformer)) == before
    mine = [(where, role, tokens) for component, where, role, tokens in seen if component == "transformer"]
    assert [w.step for w, *_ in mine] == sorted(w.step for w, *_ in mine)
    assert {w.step for w, *_ in mine} == set(range(STEPS)) and {w.steps for w, *_ in mine} == {STEPS}
    assert {w.timestep for w, *_ in mine} == {float(t) for t in pipeline.scheduler.timesteps}
    assert {w.grid for w, *_ in mine} == {GRIDS[name]}
    for where, role, tokens in mine:
        if role == "self":  # joint attention has the text with it
            assert tokens in (where.grid.tokens, where.grid.tokens + where.grid.text)
    assert all(w.step is None and w.grid is None for c, w, *_ in seen if c != "transformer")
    assert context.where() == context.NOWHERE


def test_a_second_request_counts_from_zero_again(seen):
    pipeline = tiny.wan()
    with hal.attach(pipeline):
        sample("wan", pipeline, num_inference_steps=3)
        seen.clear()
        sample("wan", pipeline, num_inference_steps=1)
    assert {(w.step, w.steps) for c, w, *_ in seen if c == "transformer"} == {(0, 1)}


def test_a_pipeline_that_starts_in_the_middle_counts_its_own_steps(seen):
    from diffusers import StableDiffusion3Img2ImgPipeline

    pipeline = StableDiffusion3Img2ImgPipeline(
        **{
            k: x
            for k, x in tiny.sd3().components.items()
            if k in StableDiffusion3Img2ImgPipeline._get_signature_keys(StableDiffusion3Img2ImgPipeline)[0]
        }
    )
    pipeline.set_progress_bar_config(disable=True)
    with hal.attach(pipeline):
        pipeline(
            prompt="a cat", image=torch.rand(1, 3, 32, 32), strength=0.5, num_inference_steps=4, output_type="pt",
            guidance_scale=1.0, max_sequence_length=16,
        )  # fmt: skip
    assert [w.step for c, w, *_ in seen if c == "transformer"] == [0, 1]
    assert {w.steps for c, w, *_ in seen if c == "transformer"} == {2}


def test_by_hand():
    with hal.step(3, 8, timestep=0.5), hal.grid(2, 4, 6, text=7):
        assert context.where()[:3] == (3, 8, 0.5) and context.where().grid == Grid(2, 4, 6, 7)
        assert context.where().grid.tokens == 48


@pytest.mark.parametrize("wrong", [(8, 8), (-1, 8), (0, 0), (True, 8), ("1", 8), (0, None)])
def test_a_step_outside_its_loop_is_refused(wrong):
    with pytest.raises(PolicyError, match="allowed are"), hal.step(*wrong):
        pass


@pytest.mark.parametrize("wrong", [(0, 4, 4), (1, 4.0, 4), (1, 4, True), (1, 4, 4, -1)])
def test_a_grid_without_tokens_is_refused(wrong):
    with pytest.raises(PolicyError, match="allowed: an integer"), hal.grid(*wrong):
        pass
