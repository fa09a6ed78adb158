"""Batches of moving digits as the transformer takes them: latents, positions, captions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from . import digits
from .codec import CHANNELS, FRAMES, PIXELS, Codec
from .recipe import FRAME_RATE

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Load:
    """One kind of batch: `clips` videos of a token grid (frames, height, width); `share` is how often it is drawn, `pair`
    the chance of a second digit.

    `islands` > 1 puts that many such grids, far apart, into one much larger empty canvas of `space` tokens: it teaches
    far positions at the price of near ones.
    """

    clips: int
    grid: Grid
    share: float = 1.0
    pair: float = 0.0
    islands: int = 1
    space: tuple[int, int] = (32, 32)


@dataclass
class Batch:
    latents: torch.Tensor  # (n, tokens, channels)
    coords: torch.Tensor  # (n, 3, tokens): seconds, pixels, pixels, as LTXVideoTransformer3DModel takes them
    captions: list[str]


def coordinates(grid: Grid, corner: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """Positions (3, tokens) of the tokens of a grid, the ones that LTXPipeline computes."""
    t, y, x = (torch.arange(n, dtype=torch.float32) for n in grid)
    axes = t * FRAMES / FRAME_RATE, (y + corner[0]) * PIXELS, (x + corner[1]) * PIXELS
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")])


def make_batch(load: Load, codec: Codec, rng: np.random.Generator, split: str = "train") -> Batch:
    f, h, w = load.grid
    size = (f * FRAMES, h * PIXELS, w * PIXELS)
    if load.islands == 1:
        clips = [digits.sample_clip(rng, *size, split=split, pair=load.pair) for _ in range(load.clips)]
        latents = codec.encode(digits.render(clips, *size[1:])).flatten(1, 3)
        return Batch(latents, coordinates(load.grid).expand(load.clips, -1, -1), [c.caption for c in clips])
    latents = torch.zeros(load.clips, load.islands, f, h, w, CHANNELS)
    coords, captions = [], []
    for i in range(load.clips):
        home = rng.integers(load.islands, size=1 + int(rng.random() < 0.5))  # the island of every digit
        parts = []
        for island in rng.permutation(np.unique(home)):
            parts.append(digits.sample_clip(rng, *size, split=split, pair=float((home == island).sum() - 1)))
            latents[i, island] = codec.encode(digits.render(parts[-1:], *size[1:]))[0]
        captions.append(", ".join(clip.caption for clip in parts))
        cells = [(y, x) for y in range(load.space[0] // h) for x in range(load.space[1] // w)]
        corners = [cells[j] for j in rng.choice(len(cells), load.islands, replace=False)]
        coords.append(torch.cat([coordinates(load.grid, (y * h, x * w)) for y, x in corners], 1))
    return Batch(latents.flatten(1, 4), torch.stack(coords), captions)
