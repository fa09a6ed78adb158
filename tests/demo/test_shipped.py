"""The model that hal ships: loaded by plain diffusers it computes what it computes under hal, and the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hal
from hal.demo import shipped
from hal.errors import AttachError
from hal.integrations.generation import generate

diffusers = pytest.importorskip("diffusers")

SMALL = {"num_frames": 16, "height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 2.0}


@pytest.fixture(scope="module")
def pipeline():
    pipe = diffusers.DiffusionPipeline.from_pretrained(shipped.model_folder(), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe):
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt=shipped.PROMPT, generator=generator, output_type="latent", **SMALL).frames


def test_latents_without_hal_and_with_torch_sdpa_are_the_same(pipeline):
    plain = latents(pipeline)
    with hal.attach(pipeline, attention_backend="torch_sdpa") as attached:
        ours = latents(pipeline)
    assert (plain - ours).abs().max() < 1e-4
    assert {(r.component, r.role, r.backend) for r in attached.receipts()} == {
        ("transformer", "self", "torch_sdpa"), ("transformer", "cross", "torch_sdpa"), ("text_encoder", "self", "torch_sdpa"),
    }  # fmt: skip


def test_the_grid_and_the_head_size_are_what_sparse_kernels_ask_for(pipeline):
    assert pipeline.transformer.config.attention_head_dim == 128
    with hal.attach(pipeline):
        seen = set()

        def told(pipe, step, timestep, state):
            return state

        hooked = pipeline.transformer.register_forward_pre_hook(lambda *_: seen.add(hal.context.where().grid))
        try:
            pipeline(prompt=shipped.PROMPT, output_type="latent", callback_on_step_end=told, **SMALL)
        finally:
            hooked.remove()
    (grid,) = seen
    assert (grid.frames, grid.height, grid.width) == (4, 8, 8)


def test_the_folder_is_small():
    files = [f for f in [*shipped.MODEL.rglob("*"), shipped.JUDGE] if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 12 * 2**20


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    made = [generate(None, shipped.PROMPT, out=tmp_path / f"{n}.gif", steps=1) for n in "ab"]
    assert made[0].out.read_bytes() == made[1].out.read_bytes()
    other = generate(None, shipped.PROMPT, out=tmp_path / "c.gif", steps=1, seed=1)
    assert other.out.read_bytes() != made[0].out.read_bytes()


def test_the_judge_reads_what_is_drawn():
    digits = pytest.importorskip("hal.demo.digits")
    pytest.importorskip("sklearn")
    import numpy as np

    rng = np.random.default_rng(5)
    clips = [digits.sample_clip(rng, 16, 64, 64, split="held-out", pair=0.0, terse=0.0) for _ in range(12)]
    videos = [digits.render([c], 64, 64)[0].numpy()[..., None].repeat(3, -1) for c in clips]
    found = [shipped.digits_found(v, c.caption) for v, c in zip(videos, clips)]
    assert sum(f == n for f, n in found) >= 11


def test_a_missing_model_is_told(monkeypatch):
    monkeypatch.setattr(shipped, "MODEL", Path("/nowhere"))
    with pytest.raises(AttachError, match="install hal again, or give --model-path"):
        shipped.model_folder()
