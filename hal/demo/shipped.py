"""What hal ships to look at: a small text-to-video pipeline, and the classifier that reads its digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import AttachError

HERE = Path(__file__).parent
MODEL, JUDGE = HERE / "model", HERE / "judge.safetensors"
PROMPT = "a seven drifting left"
# What the model does best as far as it is trained (docs/demo-model.md): arguments of its pipeline's __call__.
DEFAULTS = {"num_frames": 16, "height": 128, "width": 128, "num_inference_steps": 10, "guidance_scale": 7.0}
STEPS = {"num_frames": 4, "height": 32, "width": 32}  # of one token, and what its pipeline asks for
MOST = 32_768  # video tokens, of 4 frames x 8 x 8 pixels: four times as many as it is meant for


def model_folder() -> Path:
    """The folder of the pipeline, as ``DiffusionPipeline.from_pretrained`` takes it.  Raises AttachError where it is missing."""
    if not (MODEL / "model_index.json").is_file():
        raise AttachError(
            f"this installation of hal has no model of its own ({str(MODEL)!r} is missing); install hal again, or give "
            "--model-path"
        )
    return MODEL


def arguments(given: Mapping[str, Any], said: Callable[[str, Any], str] = "{}={!r}".format) -> dict[str, Any]:
    """What the pipeline is called with: what is given, else the defaults.  Raises AttachError for a size that it has not."""
    call = {**DEFAULTS, **given}
    for key, step in STEPS.items():
        if call[key] % step or call[key] < 1:
            below = call[key] // step * step
            near = " or ".join(str(n) for n in (below, below + step) if n > 0)
            raise AttachError(
                f"{said(key, call[key])}: the model that hal ships makes it in steps of {step}; give {near}"
            )
    tokens = math.prod(call[key] // side for key, side in (("num_frames", 4), ("height", 8), ("width", 8)))
    if tokens > MOST:
        sizes = ", ".join(said(key, call[key]) for key in STEPS)
        raise AttachError(f"{sizes}: {tokens:,} video tokens; the model that hal ships makes up to {MOST:,}, give less")
    return call


def digits_found(frames: Any, prompt: str) -> tuple[int, int]:
    """How many of the digits that the prompt asks for a clip shows, and how many it asks for.

    ``frames``: [frames, height, width, 3] in [0, 1].
    """
    import torch

    from .judge import asked

    video = torch.as_tensor(frames, dtype=torch.float32).mean(-1)
    wanted = asked(prompt)
    found = _judge().find(video[None])[0]
    return sum(min(found[d], n) for d, n in wanted.items()), sum(wanted.values())


@cache
def _judge() -> Any:
    from .judge import load

    return load(JUDGE)
