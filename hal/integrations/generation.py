"""A diffusers pipeline from a folder to a picture, with its attention through hal."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import AttachError, HalError, did_you_mean
from ..facts import dtype_name
from . import media
from .attachment import Attachment, attach, backend_name

Progress = Callable[[int, int], None]  # steps done, steps in all


@dataclass(frozen=True)
class Generation:
    """What :func:`generate` did.  ``receipts`` are those of this run alone."""

    out: Path
    attachment: Attachment  # detached; its components say what was reached
    receipts: tuple[Any, ...]
    frames: int
    seconds: float


def generate(
    model_path: str | os.PathLike[str],
    prompt: str,
    *,
    out: str | os.PathLike[str],
    steps: int | None = None,
    seed: int = 0,
    frames: int | None = None,
    fps: int = 16,
    dtype: str | None = None,
    device: str | None = None,
    backend: str | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> Generation:
    """Load the pipeline in the folder ``model_path``, run it on ``prompt`` with hal attached, and save the result.

    ``out`` ends in ``.png`` (a video becomes a contact sheet), ``.gif`` or ``.mp4``; it is written whole or not at all.
    ``device`` is the active platform's unless given; ``dtype`` is the one the weights were saved in unless given.
    ``arguments`` (``negative_prompt``, ``height``, ``width``, ``guidance_scale``, …) go to the pipeline's ``__call__``;
    one that it does not have is an error.  What is ``None`` is left to the pipeline.

    Raises AttachError (with the fix) for a folder that holds no loadable pipeline, arguments that the pipeline refuses,
    or a file that cannot be written; and what ``hal.attention`` raises.
    """
    from .. import current_platform, receipts

    path = media.writable(out)
    cls = pipeline_class(model_path)
    given = {"num_inference_steps": steps, "num_frames": frames, **arguments}
    call = {key: value for key, value in given.items() if value is not None}
    _check(cls, call, path)
    if backend is not None:
        backend = backend_name(backend)
    pipeline = load(model_path, dtype)
    device = device or current_platform().device_type
    try:
        pipeline = pipeline.to(device)
    except (RuntimeError, AssertionError, ValueError) as e:
        raise AttachError(f"{cls.__name__} cannot be moved to the device {device!r}: {e}") from e
    pipeline.set_progress_bar_config(disable=True)

    import torch

    before = {replace(r, runs=0): r.runs for r in receipts()}
    start = time.perf_counter()
    with attach(pipeline, backend=backend) as attachment:
        try:
            made = pipeline(
                prompt=prompt,
                generator=torch.Generator("cpu").manual_seed(seed),
                output_type="pil",
                **call,
                **_callback(pipeline, progress),
            )
        except HalError:
            raise
        except (TypeError, ValueError) as e:
            raise AttachError(f"{cls.__name__} refused the call: {e}") from e
    seconds = time.perf_counter() - start
    images = _images(made, cls.__name__)
    media.save(images, path, fps)
    mine = (replace(r, runs=r.runs - before.get(replace(r, runs=0), 0)) for r in receipts())
    return Generation(path, attachment, tuple(r for r in mine if r.runs), len(images), seconds)


def _check(cls: type, call: dict[str, Any], path: Path) -> None:
    """Refuse arguments that the pipeline does not take, before its weights are read."""
    parameters = inspect.signature(cls.__call__).parameters
    if unknown := sorted(set(call) - set(parameters)):
        raise AttachError(f"{cls.__name__} takes no {', '.join(unknown)}{did_you_mean(unknown[0], parameters)}")
    if path.suffix.lower() == ".mp4" and "num_frames" not in parameters:
        raise AttachError(f"{cls.__name__} makes pictures, not videos; name a .png file")


def pipeline_class(model_path: str | os.PathLike[str]) -> type:
    """The class of the pipeline in a folder.  Raises AttachError, naming the fix, when there is none."""
    folder = Path(model_path)
    if not folder.is_dir():
        state = "a file" if folder.exists() else "not there"
        raise AttachError(f"{str(folder)!r} is {state}; --model-path takes the folder of a saved diffusers pipeline")
    index = folder / "model_index.json"
    if not index.is_file():
        inside = sorted(p.parent.name for p in folder.glob("*/model_index.json"))
        hint = f"; did you mean {str(folder / inside[0])!r}?" if inside else ""
        raise AttachError(
            f"{str(folder)!r} has no model_index.json, so it is no diffusers pipeline{hint or '; '}"
            + ("" if hint else "save one there with pipeline.save_pretrained(), or give the folder that has it")
        )
    try:
        name = json.loads(index.read_text("utf-8"))["_class_name"]
    except (ValueError, KeyError, TypeError) as e:
        raise AttachError(f"{str(index)!r} is damaged ({type(e).__name__}: {e}); download the pipeline again") from e
    try:
        import diffusers
    except ImportError as e:
        raise AttachError(f"pipelines are run by diffusers ({e}); pip install 'attention-hal[diffusers]'") from e
    if not isinstance(name, str) or not hasattr(diffusers, name):
        pipelines = [n for n in dir(diffusers) if n.endswith("Pipeline")]
        raise AttachError(
            f"{str(index)!r} asks for the class {name!r}, which diffusers {diffusers.__version__} does not have"
            f"{did_you_mean(str(name), pipelines)}; pip install --upgrade diffusers"
        )
    found: type = getattr(diffusers, name)
    return found


def load(model_path: str | os.PathLike[str], dtype: str | None = None) -> Any:
    """``DiffusionPipeline.from_pretrained`` on a folder, without network.  Raises AttachError when it cannot be loaded."""
    import torch
    from diffusers import DiffusionPipeline

    options = {} if dtype is None else {"torch_dtype": getattr(torch, dtype_name(dtype))}
    try:
        with _quiet():
            return DiffusionPipeline.from_pretrained(str(model_path), local_files_only=True, **options)
    except Exception as e:
        if damaged := _damaged(Path(model_path)):
            raise AttachError(
                f"the pipeline in {str(model_path)!r} cannot be loaded: {damaged}; download that file again"
            ) from e
        first = str(e).strip().splitlines()[0] if str(e).strip() else ""
        raise AttachError(
            f"the pipeline in {str(model_path)!r} cannot be loaded: {type(e).__name__}: {first}; "
            "check that every folder that model_index.json names is complete, and that the libraries are recent"
        ) from e


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' loading bars: the caller shows progress."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    shown = [bars for bars in (diffusers_logging, transformers_logging) if bars.is_progress_bar_enabled()]
    for bars in shown:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        for bars in shown:
            bars.enable_progress_bar()


def _damaged(folder: Path) -> str:
    """Which weight file is truncated or not what it says."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as e:
            return f"{str(file.relative_to(folder))!r} is truncated or damaged ({e})"
    return ""


def _callback(pipeline: Any, progress: Progress | None) -> dict[str, Any]:
    """The pipeline's argument that reports each step to ``progress``, in the newer or the older form."""
    if progress is None:
        return {}

    def at_end(_: Any, step: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
        progress(step + 1, len(pipeline.scheduler.timesteps))
        return state

    parameters = inspect.signature(pipeline.__call__).parameters
    if "callback_on_step_end" in parameters:
        return {"callback_on_step_end": at_end}
    if "callback" in parameters:
        return {"callback": lambda step, timestep, latents: at_end(None, step, timestep, {})}
    return {}


def _images(made: Any, name: str) -> list[Any]:
    """The Pillow images of a pipeline's output: all its pictures, or the frames of its first video."""
    for key in ("images", "frames"):
        images = getattr(made, key, None)
        if images is not None and len(images):
            return list(images[0]) if isinstance(images[0], (list, tuple)) else list(images)
    raise AttachError(f"{name} returned neither images nor frames, so there is nothing to save")
