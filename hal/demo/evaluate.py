"""Measure a pipeline folder: are the asked digits found?  `python -m demo.evaluate FOLDER --size 16 128 128`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import digits, judge


class Silent:
    """Attention processor that gives nothing back: the self-attention of a block is as if it were not there."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


def prompts(count: int, size: tuple[int, int, int], seed: int = 2) -> list[str]:
    rng = np.random.default_rng([13, seed])
    return [digits.sample_clip(rng, *size, split="held-out", terse=0.0).caption for _ in range(count)]


def generate(
    pipe: Any, captions: list[str], size: tuple[int, int, int], steps: int, guidance: float, seed: int = 0, batch: int = 8
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--judge", type=Path, required=True)
    parser.add_argument("--size", type=int, nargs=3, default=(16, 128, 128), metavar=("FRAMES", "HEIGHT", "WIDTH"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--without-self-attention", action="store_true")
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--rows", type=int, default=10)
    args = parser.parse_args()
    from diffusers import DiffusionPipeline

    torch.set_num_threads(2)
    pipe = DiffusionPipeline.from_pretrained(args.folder)
    pipe.set_progress_bar_config(disable=True)
    if args.without_self_attention:
        for block in pipe.transformer.transformer_blocks:
            block.attn1.set_processor(Silent())
    size = tuple(args.size)
    captions = prompts(args.count, size)
    began = time.monotonic()
    videos = generate(pipe, captions, size, args.steps, args.guidance, batch=args.batch)
    seconds = time.monotonic() - began
    if args.sheet:
        sheet(videos[: args.rows], args.sheet)
    result = score(videos, captions, judge.load(args.judge))
    print("\n".join(result.pop("detail")))
    print(json.dumps({"size": size, "steps": args.steps, "guidance": args.guidance, "seconds": round(seconds), **result}))


if __name__ == "__main__":
    main()
