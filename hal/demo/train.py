"""Train the demo model: ``python -m hal.demo.train --run DIR [--hours H]``.

Flow matching (the model predicts noise - data) over moving digits.  Every step draws its clips, noise and timesteps
from (seed, step) alone, so a run that is stopped and started again makes the same steps.  The checkpoint holds the
weights, their running average, the optimiser and the time spent; it is written every few minutes and on SIGTERM.
The text encoder keeps its first random weights: its words are far apart as they are, and what the transformer needs of
them its own caption projection learns.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from ..files import replacing
from . import recipe
from .batches import Batch, Load, make_batch
from .codec import Codec

SEED = 0
DROP_PROMPT = 0.1  # share of empty captions, for guidance
LEARNING_RATE = 2e-3
WARM_UP = 30  # steps
RECORD = "training.json"  # in a pipeline folder: where its training stood


@dataclass(frozen=True)
class Phase:
    name: str
    steps: int
    loads: tuple[Load, ...]
    lr: tuple[float, float] = (1.0, 1.0)  # multiplier of the learning rate, from the first step to the last


ONE = Load(20, (1, 5, 5))
PLACES = (replace(ONE, share=0.15), Load(8, (1, 8, 8), 0.45), Load(3, (4, 8, 8), 0.4))
MOVING = (replace(ONE, share=0.1), Load(8, (1, 8, 8), 0.15, pair=0.3), Load(3, (4, 8, 8), 0.75, pair=0.3))
MIXED = (
    Load(8, (1, 8, 8), 0.1, pair=0.35),
    Load(3, (4, 8, 8), 0.45, pair=0.35),
    Load(2, (1, 16, 16), 0.1, pair=0.5),
    Load(1, (4, 16, 16), 0.35, pair=0.5),
)
DEFAULT = (
    Load(3, (4, 8, 8), 0.25, pair=0.35),
    Load(2, (1, 16, 16), 0.13, pair=0.5),
    Load(1, (4, 16, 16), 0.57, pair=0.5),
    Load(1, (8, 8, 8), 0.05, islands=2),
)
LARGE = (Load(1, (4, 16, 16), 0.4, 0.5), Load(1, (8, 8, 8), 0.55, islands=3), Load(1, (8, 32, 32), 0.05, 0.5))
# Far positions and many tokens, each at a price that a core can pay: one frame of the large canvas, or more frames of the small.
WIDE = (
    Load(3, (4, 8, 8), 0.12, pair=0.35),
    Load(1, (4, 16, 16), 0.58, pair=0.6),
    Load(1, (1, 32, 32), 0.1, pair=0.5),
    Load(1, (2, 32, 32), 0.08, pair=0.5),
    Load(1, (8, 16, 16), 0.1, pair=0.5),
    Load(1, (8, 32, 32), 0.02, pair=0.5),
)
LAST = (
    Load(3, (4, 8, 8), 0.1, pair=0.35),
    Load(1, (4, 16, 16), 0.85, pair=0.55),
    Load(1, (8, 16, 16), 0.04, pair=0.5),
    Load(1, (8, 32, 32), 0.006, pair=0.5),
)
PLAN = (
    Phase("one digit", 1500, (ONE,), (1.0, 0.9)),
    Phase("places", 7100, PLACES, (0.9, 0.7)),
    Phase("moving", 5000, MOVING, (0.7, 0.5)),
    Phase("mixed", 1600, MIXED, (0.5, 0.44)),
    Phase("default size", 3500, DEFAULT, (0.44, 0.05)),
    Phase("large", 100, LARGE, (0.05, 0.02)),
    Phase("default size again", 750, DEFAULT, (0.25, 0.02)),
    Phase("wide", 9000, WIDE, (0.4, 0.3)),
    Phase("wide, end", 5000, WIDE, (0.3, 0.02)),
    Phase("default size, last", 3051, LAST, (0.3, 0.2)),
    Phase("ten layers", 4400, LAST, (0.5, 0.01)),  # six until here
    Phase("fourteen layers", 7000, LAST, (0.5, 0.3)),
    Phase("fourteen layers, end", 6000, LAST, (0.3, 0.01)),  # 2,708 of them were made
)


def phase_of(step: int, plan: tuple[Phase, ...] = PLAN) -> tuple[Phase, float] | None:
    """The phase of a step and how much of it is behind, 0 to 1; None after the last phase."""
    for phase in plan:
        if step < phase.steps:
            return phase, step / phase.steps
        step -= phase.steps
    return None


def noise_shift(tokens: int) -> float:
    """How far the noise levels lean to the high end: there digits form, and, on larger grids, find their place."""
    return 2.2 if tokens <= 25 else 4.0 * max(1.0, tokens / 256) ** 0.25


def grown(state: dict[str, torch.Tensor], layers: int = recipe.LAYERS) -> dict[str, torch.Tensor]:
    """The weights of a transformer with more layers that computes the same: a new layer is the copy of the one before it
    whose outputs are zero."""
    name = "transformer_blocks."
    old = 1 + max(int(key.split(".")[1]) for key in state if key.startswith(name))
    source = [i * old // layers for i in range(layers)]
    out = {key: value for key, value in state.items() if not key.startswith(name)}
    for i, j in enumerate(source):
        for key, value in state.items():
            if key.startswith(f"{name}{j}."):
                rest = key.removeprefix(f"{name}{j}.")
                new = j in source[:i] and rest.startswith(("attn1.to_out", "attn2.to_out", "ff.net.2"))
                out[f"{name}{i}.{rest}"] = torch.zeros_like(value) if new else value
    return out


class Trainer:
    def __init__(self, codec: Codec) -> None:
        torch.manual_seed(SEED)
        self.codec = codec
        self.tokenizer = recipe.build_tokenizer()
        self.text_encoder = recipe.build_text_encoder().requires_grad_(False)
        self.transformer = recipe.build_transformer().train()
        self.model = torch.nn.ModuleDict({"text_encoder": self.text_encoder, "transformer": self.transformer})
        self.optimizer = torch.optim.AdamW(
            self.transformer.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.ema = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.step, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        self.began = 0  # the step at which the optimiser was new
        self._embedded: dict[str, torch.Tensor] = {}

    def embed(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings (n, words, width) and mask (n, words), the ones that LTXPipeline computes, less the padding."""
        for caption in sorted(set(captions) - self._embedded.keys()):
            text = self.tokenizer([caption], padding="max_length", max_length=recipe.TEXT_LENGTH, return_tensors="pt")
            with torch.no_grad():
                words = self.text_encoder(text.input_ids)[0][0, : int(text.attention_mask.sum())]
            self._embedded[caption] = words
        embedded = [self._embedded[c] for c in captions]
        lengths = torch.tensor([len(e) for e in embedded])
        padded = torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True)
        return padded, (torch.arange(padded.size(1)) < lengths[:, None]).long()

    def loss(self, batch: Batch, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mean loss, the loss of every clip and the noise level of every clip."""
        n, tokens, _ = batch.latents.shape
        dropped = (torch.rand(n, generator=rng) < DROP_PROMPT).tolist()
        embeds, mask = self.embed(["" if drop else c for c, drop in zip(batch.captions, dropped, strict=True)])
        shift = noise_shift(tokens)
        sigma = torch.sigmoid(torch.randn(n, generator=rng))
        flat = torch.rand(n, generator=rng)
        sigma = torch.where(torch.rand(n, generator=rng) < 0.1, flat, sigma)
        sigma = shift * sigma / (1 + (shift - 1) * sigma)
        noise = torch.randn(batch.latents.shape, generator=rng)
        predicted = self.transformer(
            hidden_states=torch.lerp(batch.latents, noise, sigma[:, None, None]),
            encoder_hidden_states=embeds,
            timestep=sigma * 1000,
            encoder_attention_mask=mask,
            video_coords=batch.coords,
            return_dict=False,
        )[0]
        each = (predicted - (noise - batch.latents)).square().mean((1, 2))
        return each.mean(), each.detach(), sigma

    def train_step(self, phase: Phase, progress: float) -> dict[str, Any]:
        rng = np.random.default_rng([SEED, self.step])
        shares = np.array([load.share for load in phase.loads])
        batch = make_batch(phase.loads[rng.choice(len(shares), p=shares / shares.sum())], self.codec, rng)
        loss, _, _ = self.loss(batch, torch.Generator().manual_seed(SEED * 1_000_003 + self.step))
        self.transformer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.transformer.parameters(), 1.0)
        factor = (phase.lr[0] + (phase.lr[1] - phase.lr[0]) * progress) * min(
            1.0, (self.step - self.began + 1) / WARM_UP
        )
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * factor
        self.optimizer.step()
        self.step += 1
        decay = min(0.995, (1 + self.step - self.began) / (10 + self.step - self.began))
        state = self.model.state_dict()
        torch._foreach_lerp_(list(self.ema.values()), [state[k] for k in self.ema], 1 - decay)
        return {"loss": round(float(loss.detach()), 5), "norm": round(float(norm), 4), "tokens": batch.latents.shape[1]}

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "ema": self.ema,
            "optimizer": self.optimizer.state_dict(),
            "codec": self.codec.state(),
            "began": self.began,
            "step": self.step,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
        }
        with replacing(path) as part:
            torch.save(state, part)

    @classmethod
    def of_pipeline(cls, folder: Path) -> Trainer:
        """Goes on from what `hal.demo.export` wrote: the averaged weights, where training stood, a new optimiser."""
        from diffusers import LTXPipeline

        pipe = LTXPipeline.from_pretrained(folder, torch_dtype=torch.float32)
        trainer = cls(Codec.of_vae(pipe.vae))
        trainer.text_encoder.load_state_dict(pipe.text_encoder.state_dict())
        trainer.transformer.load_state_dict(grown(pipe.transformer.state_dict()))
        trainer.ema = {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}
        for name, value in json.loads((folder / RECORD).read_text("utf-8")).items():
            setattr(trainer, name, value)
        trainer.began = trainer.step
        return trainer

    @classmethod
    def load(cls, path: Path) -> Trainer:
        state = torch.load(path, weights_only=True)
        trainer = cls(Codec.of(state["codec"]))
        trainer.model.load_state_dict(state["model"])
        trainer.ema = state["ema"]
        trainer.optimizer.load_state_dict(state["optimizer"])
        for name in ("began", "step", "seconds", "cpu_seconds"):
            setattr(trainer, name, state[name])
        return trainer


def train(
    run: Path, hours: float, save_every: float, plan: tuple[Phase, ...] = PLAN, weights: Path | None = None
) -> Trainer:
    """Go on with the run in the folder `run`, or begin it, until the plan, the hours or a SIGTERM ends it."""
    run.mkdir(parents=True, exist_ok=True)
    checkpoint = run / "checkpoint.pt"
    if checkpoint.exists():
        trainer = Trainer.load(checkpoint)
    else:
        trainer = Trainer.of_pipeline(weights) if weights else Trainer(Codec.fit())
    stop: list[int] = []
    before = {name: signal.signal(name, lambda *_: stop.append(1)) for name in (signal.SIGTERM, signal.SIGINT)}
    click.echo(f"from step {trainer.step}, {trainer.seconds / 3600:.2f} h spent")
    saved = told = time.monotonic()
    try:
        with (run / "log.jsonl").open("a", buffering=1) as log:
            while (now := phase_of(trainer.step, plan)) and not stop and trainer.seconds < hours * 3600:
                began, cpu = time.monotonic(), time.process_time()
                entry = trainer.train_step(*now)
                took, cpu = time.monotonic() - began, time.process_time() - cpu
                trainer.seconds += took
                trainer.cpu_seconds += cpu
                spent = {"step": trainer.step, "s": round(took, 3), "cpu": round(cpu, 3)}
                log.write(json.dumps({**spent, "phase": now[0].name, **entry}) + "\n")
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    click.echo(
                        f"step {trainer.step}  {now[0].name} {now[1]:.0%}  loss {entry['loss']:.3f}  {took:.2f} s a step"
                    )
                if time.monotonic() - saved > save_every:
                    trainer.save(checkpoint)
                    saved = time.monotonic()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    trainer.save(checkpoint)
    click.echo(
        f"at step {trainer.step}, {trainer.seconds / 3600:.2f} h and {trainer.cpu_seconds:.0f} CPU seconds spent"
    )
    return trainer


@click.command()
@click.option("--run", type=click.Path(path_type=Path), required=True, help="The folder of the run; it is resumed.")
@click.option(
    "--hours", type=float, default=8.0, show_default=True, help="Stop after this many hours, all starts counted."
)
@click.option(
    "--weights", type=click.Path(exists=True, path_type=Path), help="Begin with this pipeline folder, not with nothing."
)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--save-every", type=float, default=240, show_default=True, help="Seconds between checkpoints.")
def main(run: Path, hours: float, weights: Path | None, threads: int, save_every: float) -> None:
    """Train the demo model, or go on training it."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    train(run, hours, save_every, weights=weights)


if __name__ == "__main__":
    main()
