"""One prompt and seed under several backends: what each costs, and how far its picture is from the exact one's."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import config, current_platform, detect, plugins
from ..errors import AttachError, PolicyError
from ..ledger import Receipt
from ..policy import DENOISER
from ..sparse.selected import watched_masks
from . import limits, media
from .attachment import attach
from .generation import check_arguments, explaining, reporting
from .loading import load, pipeline_class

if TYPE_CHECKING:
    from PIL import Image

Progress = Callable[[str, int, int], None]  # variant, steps done, steps in all
Judge = Callable[[np.ndarray, str], "tuple[int, int]"]  # frames [F, H, W, 3] in [0, 1] and prompt -> (found, asked)
COLUMNS = 8  # frames that are drawn


@dataclass(frozen=True)
class Variant:
    """What is compared: a name, and the words of ``hal.attach`` that make it."""

    name: str
    words: Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """One variant against the first.  Distances are of the frames, in [0, 1]; PSNR in dB, infinite where they are equal."""

    name: str
    backend: str
    quality: str
    seconds: float
    kept: float | None  # share of the (query, key) pairs that self-attention computed, over all calls; None: not told
    relative_l1: float
    cosine: float
    psnr: float
    ssim: float
    digits_found: int | None
    digits_asked: int | None

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        return out | {"psnr": None if math.isinf(self.psnr) else self.psnr}


def variants(backends: Sequence[str], settings: Sequence[str] = ()) -> list[Variant]:
    """From backends' names, and from ``NAME:SETTINGS`` texts (``sol_attn:tau=0.5``).  Raises PolicyError."""
    catalog = plugins.catalog(detect.ignored())
    out = []
    for n in backends:
        own = catalog.backend_name(n)
        try:
            config.defaults(catalog.backends[own])
        except PolicyError as e:
            raise PolicyError(f"{str(e).partition(';')[0]}; give it by --variant {n}:KEY=VALUE,...") from None
        out.append(Variant(n, {"attention_backend": own}))
    for text in settings:
        name, colon, given = text.partition(":")
        if not colon or not given:
            raise PolicyError(f"{text!r} is no BACKEND:SETTINGS; write, say, sol_attn:tau=0.5")
        own = catalog.backend_name(name)
        out.append(Variant(text, {"attention_backend": own, "attention_backend_config": given}))
    names = [v.name for v in out]
    if twice := [n for n in names if names.count(n) > 1]:
        raise PolicyError(f"{twice[0]!r} is compared twice; name it once")
    if len(out) < 2:
        raise PolicyError(f"a comparison needs two backends or more, not {', '.join(names) or 'none'}")
    first = catalog.backends[out[0].words["attention_backend"]]
    if first.quality != "exact":
        raise PolicyError(
            f"{first.name} is {first.quality}; the first backend is what the others are measured against: name an exact one"
        )
    return out


def compare(
    model_path: str | os.PathLike[str],
    prompt: str,
    asked: Sequence[Variant],
    *,
    out: str | os.PathLike[str],
    seed: int = 0,
    device: str | None = None,
    judge: Judge | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], Any] = warnings.warn,
    **arguments: Any,
) -> list[Measured]:
    """Run the pipeline once per variant from the same noise; draw them (rows) over time (columns) into the PNG ``out``.

    Under each variant but the first stands its difference from the first, four times as strong.  ``arguments`` go to the
    pipeline.  Raises what ``hal.attach`` and ``hal.attention`` raise: a variant that cannot run is no comparison.
    """
    path = media.writable(out)
    if path.suffix.lower() != ".png":
        raise AttachError(f"cannot write {str(path)!r}: a comparison is one picture; name a .png file")
    try:
        import skimage.metrics  # noqa: F401
    except ImportError as e:
        raise AttachError(
            f"SSIM is computed by scikit-image, which is not installed ({e}); pip install scikit-image"
        ) from e
    cls = pipeline_class(model_path)
    check_arguments(cls, arguments)
    pipeline = load(model_path).to(device or current_platform().device_type)
    pipeline.set_progress_bar_config(disable=True)
    for text in limits.check_prompts(pipeline, prompt, arguments):
        warn(text)
    clips: list[np.ndarray] = []
    measured: list[Measured] = []
    for variant in asked:
        frames, seconds, receipts, kept = _run(pipeline, variant, prompt, seed, progress, arguments)
        clips.append(frames)
        measured.append(_measured(variant, clips[0], frames, seconds, receipts, kept, judge, prompt))
    media.save([drawn([v.name for v in asked], clips)], path)
    return measured


def _run(
    pipeline: Any, variant: Variant, prompt: str, seed: int, progress: Progress | None, arguments: Mapping[str, Any]
) -> tuple[np.ndarray, float, list[Receipt], list[float]]:
    told = None if progress is None else partial(progress, variant.name)
    generator = torch.Generator("cpu").manual_seed(seed)
    start = time.perf_counter()
    with attach(pipeline, **variant.words) as attachment, _kept() as (kept, measuring):
        reported = reporting(pipeline, told)
        with explaining(type(pipeline), attachment):
            made = pipeline(prompt=prompt, generator=generator, output_type="np", **arguments, **reported)
    seconds = time.perf_counter() - start - sum(measuring)
    images = getattr(made, "frames", None)
    images = made.images if images is None else images[0]
    return np.asarray(images, dtype=np.float64), seconds, attachment.receipts(), kept


@contextmanager
def _kept() -> Iterator[tuple[list[float], list[float]]]:
    """The kept share of each sparse call inside, and the seconds that measuring them took.

    A call's masks are measured as the next one begins, and let go.
    """
    shares: list[float] = []
    seconds: list[float] = []

    def measure(_: Any = None) -> bool:
        if found:
            start = time.perf_counter()
            whole = [(len(w.heads or "1"), 1.0 if w.mask is None else w.mask.density) for w in found]
            shares.append(sum(n * share for n, share in whole) / sum(n for n, _ in whole))
            found.clear()
            seconds.append(time.perf_counter() - start)
        return True

    with watched_masks(measure) as found:
        yield shares, seconds
        measure()


def _measured(
    variant: Variant,
    exact: np.ndarray,
    frames: np.ndarray,
    seconds: float,
    receipts: list[Receipt],
    kept: list[float],
    judge: Judge | None,
    prompt: str,
) -> Measured:
    mine = [r for r in receipts if DENOISER.fullmatch(r.component) and r.role == "self"]
    catalog = plugins.catalog(detect.ignored())
    sparse = any("sparse" in catalog.backends[r.backend].traits for r in mine)
    found, of = judge(frames, prompt) if judge else (None, None)
    return Measured(
        variant.name,
        ", ".join(dict.fromkeys(f"{r.backend} / {r.kernel}" for r in mine)),
        ", ".join(dict.fromkeys(r.quality for r in mine)),
        seconds,
        1.0 if not sparse else float(np.mean(kept)) if kept else None,
        *distances(exact, frames),
        found,
        of,
    )


def distances(exact: np.ndarray, frames: np.ndarray) -> tuple[float, float, float, float]:
    """Relative L1, cosine, PSNR and SSIM of frames [F, H, W, C] in [0, 1]."""
    from skimage.metrics import structural_similarity

    difference = frames - exact
    scale = float(np.abs(exact).sum()) or 1.0
    norms = float(np.linalg.norm(exact) * np.linalg.norm(frames)) or 1.0
    error = float((difference**2).mean())
    side = min(7, *(n - 1 + n % 2 for n in exact.shape[1:3]))  # the window of SSIM: odd, and within the frame
    ssim = [structural_similarity(a, b, data_range=1.0, channel_axis=-1, win_size=side) for a, b in zip(exact, frames)]
    psnr = math.inf if error == 0 else -10 * math.log10(error)
    return float(np.abs(difference).sum()) / scale, float((exact * frames).sum()) / norms, psnr, float(np.mean(ssim))


def drawn(names: Sequence[str], clips: Sequence[np.ndarray]) -> Image.Image:
    """Rows of frames, each named, with its difference from the first row below."""
    from PIL import Image, ImageDraw

    count, height, width = clips[0].shape[:3]
    chosen = [round(i * (count - 1) / max(1, min(COLUMNS, count) - 1)) for i in range(min(COLUMNS, count))]
    label, gap = 14, 2
    rows: list[tuple[str, np.ndarray]] = []
    for i, (name, clip) in enumerate(zip(names, clips)):
        rows.append((name, clip))
        if i:
            rows.append((f"{name}: difference from {names[0]}, x4", np.abs(clip - clips[0]) * 4))
    whole = Image.new("RGB", (len(chosen) * (width + gap) + gap, len(rows) * (height + label + gap)), "white")
    pen = ImageDraw.Draw(whole)
    for i, (text, clip) in enumerate(rows):
        top = i * (height + label + gap)
        pen.text((gap, top + 1), text, fill="black")
        for j, frame in enumerate(chosen):
            pixels = Image.fromarray((np.clip(clip[frame], 0, 1) * 255).round().astype(np.uint8))
            whole.paste(pixels, (gap + j * (width + gap), top + label))
    return whole
