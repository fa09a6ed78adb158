"""Moving handwritten digits: the data of the demo model.

scikit-learn ships 1,797 handwritten digits of 8x8 pixels.  Each is drawn at 32x32 pixels on a dark canvas and moves:
it drifts (straight) or bounces (turns round at the edge of the canvas), by 2 pixels a frame; some drift by 1.  One clip holds one or two digits
and a caption such as "a seven drifting left, a two bouncing up".  Everything is drawn from a `numpy` generator, so a
seed names a clip.  One fifth of the digit images is held out: no clip of the training split shows them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MOTIONS = ("drifting", "bouncing")
SPEED = 2  # pixels per frame: one token of the model in the four frames of a token
SLOW = 0.15  # share of the drifting digits that move by half of that
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # (dy, dx)
ZOOM = 4  # drawn pixels per pixel of a scikit-learn digit
SPRITE = 8 * ZOOM
LATTICE = 8  # pixels; the side of a token of the model
HELD_OUT = 0.2


@dataclass(frozen=True)
class Digit:
    """One digit of a clip: which image, how it moves and where (top-left corner per frame, in pixels, (frames, 2))."""

    label: int
    image: np.ndarray
    motion: str
    direction: str
    path: np.ndarray

    def caption(self, with_motion: bool = True) -> str:
        named = f"{'an' if self.label == 8 else 'a'} {NAMES[self.label]}"
        return f"{named} {self.motion} {self.direction}" if with_motion else named


@dataclass(frozen=True)
class Clip:
    digits: tuple[Digit, ...]
    caption: str


@functools.cache
def images(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Digit images (n, 8, 8) in [0, 1] and labels (n,) of the split "train" or "held-out"."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    cut = round(len(order) * HELD_OUT)
    take = {"held-out": order[:cut], "train": order[cut:]}[split]
    return (data.images[take] / 16.0).astype(np.float32), data.target[take]


def _path(rng: np.random.Generator, motion: str, direction: str, frames: int, size: tuple[int, int]) -> np.ndarray:
    """Top-left corners (frames, 2) of a digit that moves inside a canvas of `size` (height, width).

    Digits begin on a lattice of `LATTICE` pixels and turn round on it, so that a token of the model sees a digit in few
    ways.  That is what makes the model learnable on two CPU cores.
    """
    slow = motion == "drifting" and rng.random() < SLOW
    speed = SPEED // 2 if slow else SPEED
    length = speed * (frames - 1)
    slack = np.array(size) - SPRITE
    start = (rng.integers(0, slack // LATTICE + 1) * LATTICE).astype(float)
    heading = np.array(DIRECTIONS[direction], float)
    axis = int(np.argmax(np.abs(heading)))
    room = int(slack[axis])
    if room <= 0:
        return np.tile(start, (frames, 1))
    grid = LATTICE // 2 if slow else LATTICE
    if motion == "bouncing":  # begin near enough to the edge to reach it within the clip
        low, high = grid, max(grid, min(room, int(0.75 * length)))
    else:  # begin far enough from the edge not to reach it, where the canvas is large enough
        low, high = min(-(-length // grid) * grid, room), room
    ahead = rng.integers(low // grid, high // grid + 1) * grid
    start[axis] = ahead if heading[axis] < 0 else room - ahead
    path = start + heading * speed * np.arange(frames)[:, None]
    folded = np.mod(path[:, axis], 2 * room)
    path[:, axis] = np.minimum(folded, 2 * room - folded)
    return path


def _apart(a: np.ndarray, b: np.ndarray) -> bool:
    gap = np.abs(a - b)
    return bool(np.all((gap[:, 0] >= 29) | (gap[:, 1] >= 25)))


def sample_clip(
    rng: np.random.Generator,
    frames: int,
    height: int,
    width: int,
    split: str = "train",
    pair: float = 0.5,
    terse: float = 0.1,
) -> Clip:
    """One clip.  `pair` is the chance of a second digit, `terse` of a caption that leaves the motion out."""
    pictures, labels = images(split)

    def one(axis: int | None = None, near: int | None = None) -> Digit:
        index = rng.integers(len(labels))
        motion, direction = rng.choice(MOTIONS), rng.choice(list(DIRECTIONS))
        if axis is not None:
            direction = rng.choice([name for name, heading in DIRECTIONS.items() if heading[axis]])
        path = _path(rng, motion, direction, frames, (height, width))
        if axis is not None and near is not None:  # a lane along one side of the canvas
            slack = (height, width)[1 - axis] - SPRITE
            path[:, 1 - axis] = abs(near * slack - LATTICE * rng.integers(0, max(0, slack - 28) // 2 // LATTICE + 1))
        return Digit(
            label=int(labels[index]),
            image=pictures[index],
            motion=str(motion),
            direction=str(direction),
            path=path,
        )

    digits = [one()]
    if rng.random() < pair:
        for _ in range(4):  # two digits never cover each other
            other = one()
            if _apart(digits[0].path, other.path):
                digits.append(other)
                break
        else:
            axis, near = int(rng.integers(2)), int(rng.integers(2))
            digits = [one(axis, near), one(axis, 1 - near)]
    full = rng.random() >= terse
    return Clip(tuple(digits), ", ".join(d.caption(full) for d in digits))


def sprites(digits: list[Digit]) -> torch.Tensor:
    """Each digit at each of its sub-pixel positions: (digits, frames, 36, 36) in [0, 1]."""
    frames = len(digits[0].path)
    window = SPRITE + 4
    path = torch.tensor(np.stack([d.path for d in digits]), dtype=torch.float32)  # (n, f, 2)
    fraction = path - path.floor()
    pixel = (torch.arange(window) + 0.5) / SPRITE * 2 - 1
    ys = pixel[None, None] - fraction[..., 0:1] * 2 / SPRITE
    xs = pixel[None, None] - fraction[..., 1:2] * 2 / SPRITE
    grid = torch.stack([xs[:, :, None].expand(-1, -1, window, -1), ys[:, :, :, None].expand(-1, -1, -1, window)], -1)
    picture = torch.tensor(np.stack([d.image for d in digits]))[:, None]
    drawn = F.grid_sample(picture.repeat_interleave(frames, 0), grid.flatten(0, 1), mode="bicubic", align_corners=False)
    return (drawn * 1.35 - 0.15).clamp(0, 1).view(len(digits), frames, window, window)


def render(clips: list[Clip], height: int, width: int) -> torch.Tensor:
    """Draw clips of the same length: (clips, frames, height, width) in [0, 1]."""
    flat = [d for clip in clips for d in clip.digits]
    frames = len(flat[0].path)
    drawn = sprites(flat).numpy()
    canvas = np.zeros((len(clips), frames, height + 4, width + 4), np.float32)
    owner = [i for i, clip in enumerate(clips) for _ in clip.digits]
    for i, digit, pictures in zip(owner, flat, drawn, strict=True):
        corners = np.floor(digit.path).astype(int)
        for frame, (y, x) in enumerate(corners):
            part = canvas[i, frame, y : y + SPRITE + 4, x : x + SPRITE + 4]
            np.maximum(part, pictures[frame], out=part)
    return torch.from_numpy(canvas[:, :, :height, :width].copy())
