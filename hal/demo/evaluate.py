"""Measure a pipeline folder, are the asked digits found?  ``python -m hal.demo.evaluate FOLDER --size 16 128 128``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from . import digits, judge

HERE = Path(__file__).parent
Size = tuple[int, int, int]  # frames, height, width


class Silent:
    """Attention processor that gives nothing back: the self-attention of a block is as if it were not there."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


def prompts(count: int, size: Size, pair: float = 0.5, seed: int = 2) -> list[str]:
    rng = np.random.default_rng([13, seed])
    return [digits.sample_clip(rng, *size, split="held-out", pair=pair, terse=0.0).caption for _ in range(count)]


def generate(
    pipe: Any, captions: list[str], size: Size, steps: int, guidance: float, seed: int = 0, batch: int = 8
) -> torch.Tensor:
    """Videos (n, frames, height, width) in [0, 1], one seed per caption."""
    frames, height, width = size
    done = []
    for first in range(0, len(captions), batch):
        part = captions[first : first + batch]
        video = pipe(
            part, num_frames=frames, height=height, width=width, num_inference_steps=steps, guidance_scale=guidance,
            generator=[torch.Generator().manual_seed(seed + first + i) for i in range(len(part))], output_type="pt",
        ).frames  # fmt: skip
        done.append(video.float().mean(2))
    return torch.cat(done)


def score(videos: torch.Tensor, captions: list[str], critic: judge.Judge) -> dict[str, Any]:
    found = critic.find(videos)
    wanted = [judge.asked(c) for c in captions]
    n = len(captions)

    def share(hits: list[bool]) -> dict[str, Any]:
        low, high = judge.interval(sum(hits), n)
        return {"hits": sum(hits), "of": n, "low": round(low, 3), "high": round(high, 3)}

    turned = wanted[1:] + wanted[:1]
    return {
        "found": share([judge.hit(f, w) for f, w in zip(found, wanted, strict=True)]),
        "exact": share([judge.hit(f, w, True) for f, w in zip(found, wanted, strict=True)]),
        "found, prompts shuffled": share([judge.hit(f, w) for f, w in zip(found, turned, strict=True)]),
        "detail": [f"{c} -> {dict(f)}" for c, f in zip(captions, found, strict=True)],
    }


def sheet(videos: torch.Tensor, path: Path, columns: int = 8) -> None:
    """A contact sheet: one row per video."""
    from PIL import Image

    pick = np.linspace(0, videos.shape[1] - 1, min(columns, videos.shape[1])).round().astype(int)
    rows = [torch.cat([torch.nn.functional.pad(v[i], (1, 1, 1, 1), value=0.3) for i in pick], 1) for v in videos]
    Image.fromarray((torch.cat(rows).clamp(0, 1).numpy() * 255).astype("uint8")).save(path)


def evaluate(
    folder: Path,
    critic: judge.Judge,
    size: Size = (16, 128, 128),
    count: int = 100,
    steps: int = 10,
    guidance: float = 7.0,
    batch: int = 8,
    pair: float = 0.5,
    without_self_attention: bool = False,
) -> tuple[dict[str, Any], torch.Tensor]:
    """What a pipeline folder reaches on held-out prompts, and its videos."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    if without_self_attention:
        for block in pipe.transformer.transformer_blocks:
            block.attn1.set_processor(Silent())
    captions = prompts(count, size, pair)
    began, cpu = time.monotonic(), time.process_time()
    videos = generate(pipe, captions, size, steps, guidance, batch=batch)
    spent = {"seconds": round(time.monotonic() - began), "cpu_seconds": round(time.process_time() - cpu)}
    asked = {
        "size": size,
        "steps": steps,
        "guidance": guidance,
        "pair": pair,
        "self-attention": not without_self_attention,
    }
    return {**asked, **spent, **score(videos, captions, critic)}, videos


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path), default=HERE / "model")
@click.option("--judge", "critic", type=click.Path(exists=True, path_type=Path), default=HERE / "judge.safetensors")
@click.option("--size", type=int, nargs=3, default=(16, 128, 128), show_default=True, help="Frames, height, width.")
@click.option("--count", type=int, default=100, show_default=True, help="Held-out prompts.")
@click.option("--steps", type=int, default=10, show_default=True, help="Denoising steps.")
@click.option("--guidance", type=float, default=7.0, show_default=True)
@click.option("--pair", type=float, default=0.5, show_default=True, help="Share of prompts with two digits.")
@click.option("--batch", type=int, default=8, show_default=True)
@click.option("--without-self-attention", is_flag=True, help="Make the self-attention of every block give zero.")
@click.option("--sheet", "picture", type=click.Path(path_type=Path), help="A PNG of the first videos.")
@click.option("--rows", type=int, default=10, show_default=True, help="Videos in the PNG.")
def main(folder: Path, critic: Path, size: Size, picture: Path | None, rows: int, **given: Any) -> None:
    """Measure a pipeline FOLDER: are the asked digits found?"""
    result, videos = evaluate(folder, judge.load(critic), size, **given)
    if picture:
        sheet(videos[:rows], picture)
    click.echo("\n".join(result.pop("detail")))
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
