"""Training and its pipeline: a stopped run goes on as if it had not stopped, and plain diffusers loads what it writes."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from hal.demo import digits
from hal.demo.batches import Load, coordinates, make_batch
from hal.demo.codec import CHANNELS, Codec
from hal.demo.export import export, pipeline_of
from hal.demo.recipe import TEXT_WIDTH, build_transformer
from hal.demo.train import Phase, Trainer, grown, phase_of, train

for package in ("sklearn", "diffusers", "transformers", "tokenizers"):
    pytest.importorskip(package)

PLAN = (
    Phase("a", 2, (Load(2, (1, 5, 5)),)),
    Phase("b", 2, (Load(1, (1, 8, 8)), Load(1, (2, 4, 4), islands=2)), (1.0, 0.5)),
)


@pytest.fixture(scope="module")
def codec():
    return Codec.fit(clips=24)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    yield
    torch.set_num_threads(before)


def steps(trainer, count):
    return [trainer.train_step(*phase_of(trainer.step, PLAN))["loss"] for _ in range(count)]


def test_a_resumed_run_equals_one_that_was_not_stopped(codec, tmp_path):
    whole = Trainer(codec)
    losses = steps(whole, 4)
    first = Trainer(codec)
    assert steps(first, 2) == losses[:2]
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer.load(tmp_path / "checkpoint.pt")
    assert steps(second, 2) == losses[2:]
    for ours, theirs in ((whole.model.state_dict(), second.model.state_dict()), (whole.ema, second.ema)):
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_training_ends_with_the_plan_and_with_the_hours(codec, tmp_path, monkeypatch):
    monkeypatch.setattr(Codec, "fit", classmethod(lambda cls: codec))
    assert train(tmp_path / "none", hours=0.0, save_every=1e9, plan=PLAN).step == 0
    done = train(tmp_path / "all", hours=1.0, save_every=1e9, plan=PLAN)
    assert done.step == 4
    assert len((tmp_path / "all" / "log.jsonl").read_text().splitlines()) == 4
    again = train(tmp_path / "all", hours=1.0, save_every=1e9, plan=PLAN)
    assert (again.step, again.seconds) == (4, done.seconds)


@pytest.mark.parametrize("step, name, progress", [(0, "a", 0.0), (1, "a", 0.5), (2, "b", 0.0), (3, "b", 0.5)])
def test_the_plan_says_the_phase_of_a_step(step, name, progress):
    phase, behind = phase_of(step, PLAN)
    assert (phase.name, behind) == (name, progress)
    assert phase_of(4, PLAN) is None


def test_the_vae_is_the_codec(codec):
    import numpy as np

    clips = [digits.sample_clip(np.random.default_rng(i), 16, 64, 64, split="held-out") for i in range(4)]
    video = digits.render(clips, 64, 64)
    vae = codec.build_vae()
    with torch.no_grad():
        colour = (video[:, None] * 2 - 1).expand(-1, 3, -1, -1, -1)
        latents = vae.encode(colour).latent_dist.mode()
        shown = vae.decode(latents).sample.mean(1) / 2 + 0.5
    ours = codec.encode(video).permute(0, 4, 1, 2, 3)
    torch.testing.assert_close(latents / vae.latents_std.view(1, -1, 1, 1, 1), ours, atol=2e-3, rtol=0)
    assert ((shown - video).square().sum() / video.square().sum()) < 0.06


def test_an_island_is_a_far_part_of_a_large_canvas(codec):
    import numpy as np

    batch = make_batch(Load(2, (2, 4, 4), islands=3), codec, np.random.default_rng(0))
    assert batch.latents.shape == (2, 3 * 32, CHANNELS)
    everywhere = set(map(tuple, coordinates((2, 32, 32)).T.tolist()))
    for coords in batch.coords:
        places = list(map(tuple, coords.T.tolist()))
        assert len(set(places)) == len(places)
        assert set(places) <= everywhere


def test_plain_diffusers_loads_a_trained_pipeline(codec, tmp_path):
    from diffusers import DiffusionPipeline, LTXVideoTransformer3DModel

    trainer = Trainer(codec)
    steps(trainer, 1)
    trainer.save(tmp_path / "checkpoint.pt")
    pipeline_of(torch.load(tmp_path / "checkpoint.pt", weights_only=True)).save_pretrained(tmp_path / "model")
    size = sum(f.stat().st_size for f in (tmp_path / "model").rglob("*") if f.is_file())
    assert size <= 12 * 2**20
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe.transformer) is LTXVideoTransformer3DModel
    assert pipe.transformer.config.attention_head_dim == 128
    given = {
        "num_frames": 16,
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
        "guidance_scale": 2.0,
        "output_type": "latent",
    }
    latents = [pipe("a seven", generator=torch.Generator().manual_seed(s), **given).frames for s in (0, 0, 1)]
    assert latents[0].shape == (1, 4 * 8 * 8, CHANNELS)
    assert torch.equal(latents[0], latents[1])
    assert not torch.equal(latents[0], latents[2])


def test_training_goes_on_from_a_pipeline_folder(codec, tmp_path):
    trainer = Trainer(codec)
    steps(trainer, 2)
    (tmp_path / "run").mkdir()
    trainer.save(tmp_path / "run" / "checkpoint.pt")
    export(tmp_path / "run", tmp_path / "model")
    again = Trainer.of_pipeline(tmp_path / "model")
    assert (again.step, again.seconds) == (trainer.step, trainer.seconds)
    for key, value in again.model.state_dict().items():
        torch.testing.assert_close(value, trainer.ema[key], rtol=1e-3, atol=1e-4)  # what float16 keeps
    for ours, theirs in zip(again.codec.state().values(), codec.state().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-4)
    steps(again, 1)
    assert again.step == 3


def test_a_grown_transformer_computes_the_same(codec):
    small, large = build_transformer(2), build_transformer(5)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.normal_(std=0.05)
    large.load_state_dict(grown(small.state_dict(), 5))
    batch = make_batch(Load(1, (1, 8, 8)), codec, np.random.default_rng(0))
    given = {
        "hidden_states": batch.latents, "encoder_hidden_states": torch.randn(1, 4, TEXT_WIDTH), "timestep": torch.tensor([500.0]),
        "encoder_attention_mask": torch.ones(1, 4), "video_coords": batch.coords, "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(large(**given)[0], small(**given)[0])


def test_the_text_of_training_is_the_text_of_the_pipeline(codec, tmp_path):
    trainer = Trainer(codec)
    pipe = pipeline_of({"ema": trainer.ema, "codec": codec.state()})
    captions = ["a seven drifting left", "an eight bouncing up, a two"]
    ours, mask = trainer.embed(captions)
    theirs, their_mask, *_ = pipe.encode_prompt(captions, do_classifier_free_guidance=False)
    assert (their_mask.sum(1) == mask.sum(1)).all()
    for row, (mine, kept) in enumerate(zip(ours, mask, strict=True)):
        words = int(kept.sum())
        torch.testing.assert_close(mine[:words], theirs[row, :words], atol=1e-5, rtol=0)


def test_the_shipped_model_is_small_and_loads():
    from pathlib import Path

    from diffusers import DiffusionPipeline

    import hal.demo

    folder = Path(hal.demo.__file__).parent / "model"
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) <= 12 * 2**20
    pipe = DiffusionPipeline.from_pretrained(folder)
    assert pipe.transformer.config.attention_head_dim == 128
    assert all(torch.isfinite(p).all() for p in pipe.transformer.parameters())
