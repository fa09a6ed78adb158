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
    "flux": Grid(1, 4, 4, 16, text_first=True),
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
        first = {w.loop for c, w, *_ in seen if c == "transformer"}
        seen.clear()
        sample("wan", pipeline, num_inference_steps=1)
    assert {(w.step, w.steps) for c, w, *_ in seen if c == "transformer"} == {(0, 1)}
    second = {w.loop for c, w, *_ in seen if c == "transformer"}
    assert len(first) == len(second) == 1 and first != second  # each has a number of its own


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


SMALL = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
}
COG = {
    "time_embed_dim": 8,
    "text_embed_dim": 8,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 5,
    "max_text_seq_length": 5,
}
SD3 = {
    "sample_size": 8,
    "joint_attention_dim": 8,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 8,
    "pos_embed_max_size": 8,
}


@pytest.mark.parametrize(
    ("cls", "config", "latents", "more"),
    [
        ("CogVideoXTransformer3DModel", COG, (1, 2, 4, 8, 8), {}),
        ("SD3Transformer2DModel", SD3, (1, 4, 8, 8), {"pooled_projections": torch.zeros(1, 8)}),
    ],
)
def test_the_grid_says_on_which_side_diffusers_puts_the_text(cls, config, latents, more, monkeypatch):
    """In the first joint layer the rows of q that a change of the text changes are the grid's text rows."""
    import diffusers

    torch.manual_seed(0)
    model, video = getattr(diffusers, cls)(**SMALL, **config).eval(), torch.randn(latents)
    queries, real = [], run.attention

    def spy(q, *rest, layout, **arguments):
        queries.append((q.transpose(1, 2) if layout == "bhsd" else q, context.where().grid))
        return real(q, *rest, layout=layout, **arguments)

    monkeypatch.setattr(run, "attention", spy)
    with hal.attach(model):
        for text in (torch.zeros(1, 5, 8), torch.ones(1, 5, 8)):
            model(video, encoder_hidden_states=text, timestep=torch.ones(1), **more)
    (one, grid), (two, _) = (x for x in queries if x[0].shape[1] == x[1].tokens + 5)
    changed = (one != two).flatten(2).any(-1)[0].nonzero().flatten().tolist()
    assert changed == list(range(5) if grid.text_first else range(grid.tokens, grid.tokens + 5))


def test_a_grid_that_somebody_has_set_is_left_as_it_is(named_pipeline, seen):
    name, pipeline = named_pipeline
    with hal.attach(pipeline), hal.grid(1, 2, 3, text=4):
        sample(name, pipeline)
    assert {w.grid for c, w, *_ in seen if c == "transformer"} == {Grid(1, 2, 3, 4)}
