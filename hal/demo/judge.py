"""The judge: a small convolutional classifier that finds the digits of a clip.

It reads every frame at the resolution of the scikit-learn digits and gives each pixel the chance of being the centre
of a zero, one, ... nine, or of none.  A peak is a digit; the chances of the peaks are summed per class and averaged
over the frames, so a digit that is there all the time counts 1.  It is trained on moving digits and on things that are
no digits: digits with their parts shuffled, cut off, laid over each other, or blurred away.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from . import digits

NONE = 10


class Judge(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for wide in (width, width, width * 2, width * 2, width * 2):
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
            channels = wide
        self.net = nn.Sequential(*layers, nn.Conv2d(channels, NONE + 1, 1))

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        """(n, frames, height, width) in [0, 1] -> logits (n, frames, 11, height / 4, width / 4)."""
        small = F.avg_pool2d(video.flatten(0, 1)[:, None], digits.ZOOM)
        return self.net(small * 2).unflatten(0, video.shape[:2])

    @torch.no_grad()
    def find(self, video: torch.Tensor, most: int = 6) -> list[Counter[int]]:
        """How many of each digit a clip shows, for every clip of (n, frames, height, width)."""
        return [Counter({c: round(v) for c, v in enumerate(s.tolist()) if v >= 0.5}) for s in self.scores(video, most)]

    @torch.no_grad()
    def scores(self, video: torch.Tensor, most: int = 6) -> torch.Tensor:
        """Mean number of each digit per frame, (n, 10)."""
        found = []
        for clip in video:
            chance = self(clip[None])[0].softmax(1)  # (frames, 11, h, w)
            present = 1 - chance[:, NONE]
            total = torch.zeros(10)
            rows = torch.arange(present.size(-2))[:, None]
            columns = torch.arange(present.size(-1))[None]
            for frame in range(len(present)):
                field = present[frame].clone()
                for _ in range(most):
                    peak = int(field.argmax())
                    y, x = divmod(peak, field.size(1))
                    if field[y, x] < 0.3:
                        break
                    total += chance[frame, :10, y, x]
                    field[((rows - y).abs() <= 4) & ((columns - x).abs() <= 3)] = 0
            found.append(total / len(present))
        return torch.stack(found)


def asked(caption: str) -> Counter[int]:
    words = caption.lower().replace(",", " ").split()
    names = {name: i for i, name in enumerate(digits.NAMES)} | {str(i): i for i in range(10)}
    return Counter(names[w] for w in words if w in names)


def hit(found: Counter[int], wanted: Counter[int], exact: bool = False) -> bool:
    """Every asked digit is there as often as asked; `exact`: and no other."""
    return found == wanted if exact else all(found[d] >= n for d, n in wanted.items())


def interval(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a share."""
    share, extra = hits / total, z * z / total
    middle = (share + extra / 2) / (1 + extra)
    half = z / (1 + extra) * (share * (1 - share) / total + extra / (4 * total)) ** 0.5
    return middle - half, middle + half


def _spoil(clip: digits.Clip, rng: np.random.Generator) -> digits.Clip:
    """A clip of things that are no digits."""
    spoiled = []
    for d in clip.digits:
        image = d.image.copy()
        kind = rng.integers(4)
        if kind == 0:  # parts shuffled
            blocks = image.reshape(4, 2, 4, 2).transpose(0, 2, 1, 3).reshape(16, 2, 2)
            image = rng.permutation(blocks).reshape(4, 4, 2, 2).transpose(0, 2, 1, 3).reshape(8, 8)
        elif kind == 1:  # half of it
            half = np.zeros_like(image)
            cut = [slice(0, 4), slice(4, 8)][rng.integers(2)]
            half[(cut, slice(None)) if rng.random() < 0.5 else (slice(None), cut)] = 1
            image = image * half
        elif kind == 2:  # the mean of several digits
            pictures, labels = digits.images("train")
            image = pictures[rng.integers(len(labels), size=6)].mean(0) * rng.uniform(0.8, 1.6)
        else:  # halves of two different digits
            pictures, labels = digits.images("train")
            other = pictures[rng.choice(np.flatnonzero(labels != d.label))]
            image = np.concatenate([image[:4], other[4:]]) if rng.random() < 0.5 else rng.uniform(0, 0.6, (8, 8))
        spoiled.append(digits.Digit(NONE, image.astype(np.float32), d.motion, d.direction, d.path))
    return digits.Clip(tuple(spoiled), "")


def _targets(clips: list[digits.Clip], frames: list[int], height: int, width: int) -> torch.Tensor:
    target = torch.full((len(clips), len(frames), height // 4, width // 4), NONE)
    for i, clip in enumerate(clips):
        for d in clip.digits:
            for j, f in enumerate(frames):
                y, x = d.path[f] / digits.ZOOM + 3.5  # the centre, in the pixels that the judge sees
                for yy in {int(np.floor(y)), int(np.ceil(y))}:
                    for xx in {int(np.floor(x)), int(np.ceil(x))}:
                        if yy < height // 4 and xx < width // 4:
                            target[i, j, yy, xx] = d.label
    return target


def fit(steps: int = 120, seed: int = 0) -> Judge:
    torch.manual_seed(seed)
    rng = np.random.default_rng([7, seed])
    judge = Judge().train()
    optimizer = torch.optim.AdamW(judge.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        height, width = ((64, 64), (64, 96), (96, 64))[step % 3]
        clips = [digits.sample_clip(rng, 2, height, width, pair=0.7) for _ in range(48)]
        clips = [_spoil(c, rng) if rng.random() < 0.25 else c for c in clips]
        video = digits.render(clips, height, width)
        video = video * torch.empty(len(video), 1, 1, 1).uniform_(0.8, 1.1)
        video = video + torch.randn_like(video) * torch.empty(len(video), 1, 1, 1).uniform_(0, 0.08)
        logits = judge(video)
        target = _targets(clips, [0, 1], height, width)
        weight = torch.ones(NONE + 1)
        weight[NONE] = 0.1
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1), weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    return judge.eval()


def load(path: Path) -> Judge:
    from safetensors.torch import load_file

    judge = Judge()
    judge.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in load_file(path).items()})
    return judge.eval()


def check(
    judge: Judge, clips: int = 400, size: tuple[int, int, int] = (16, 128, 128), seed: int = 1
) -> dict[str, float]:
    """Accuracy on clips of held-out digits: share whose set of digits is found exactly, and share with all found."""
    rng = np.random.default_rng([11, seed])
    sample = [digits.sample_clip(rng, *size, split="held-out", pair=0.5) for _ in range(clips)]
    found = [judge.find(digits.render([c], *size[1:]))[0] for c in sample]
    wanted = [Counter(d.label for d in c.digits) for c in sample]
    pairs = list(zip(found, wanted, strict=True))
    return {"exact": sum(hit(f, w, True) for f, w in pairs) / clips, "found": sum(hit(f, w) for f, w in pairs) / clips}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A .safetensors file.")
@click.option("--steps", type=int, default=120, show_default=True)
def main(out: Path, steps: int) -> None:
    """Fit the judge and measure it on held-out clips."""
    from safetensors.torch import save_file

    state = fit(steps).state_dict()
    save_file({k: v.half() if v.is_floating_point() else v for k, v in state.items()}, out)
    click.echo(json.dumps(check(load(out))))


if __name__ == "__main__":
    main()
