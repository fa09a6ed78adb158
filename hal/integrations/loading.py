"""A pipeline's folder: which class it holds, which variants of it there are, and loading it without a network."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import AttachError, did_you_mean
from ..facts import dtype_name

WEIGHTS = (".safetensors", ".bin")


def located(
    model_path: str | os.PathLike[str], variant: str | None, said: Callable[[str, Any], str]
) -> tuple[Path, str | None]:
    """The folder of the pipeline and diffusers' ``variant=``, for a variant by name (None: the folder as it is).

    A variant is that of weight files (``model.fp16.safetensors``), or else a folder inside that holds a pipeline.
    Raises AttachError that lists what there is.
    """
    folder = Path(model_path)
    if variant is None or not folder.is_dir():
        return folder, None
    weights, inside = _weights(folder), _inside(folder)
    if variant in weights:
        return folder, variant
    if variant in inside:
        return folder / variant, None
    kinds = (("weights", weights), ("pipelines", inside))
    there = "; ".join(f"{what}: {', '.join(found)}" for what, found in kinds if found) or "no variant at all"
    raise AttachError(
        f"{said('model_variant', variant)}: {str(folder)!r} has neither such weight files nor such a folder of a "
        f"pipeline{did_you_mean(variant, [*weights, *inside])} (it has {there})"
    )


def _weights(folder: Path) -> list[str]:
    """The variants of the weight files in the components' folders: fp16 of ``model.fp16-00001-of-00002.safetensors``."""
    found = set()
    for file in folder.glob("*/*"):
        if file.suffix in WEIGHTS:
            _, dot, variant = re.sub(r"-\d{5}-of-\d{5}", "", file.stem).partition(".")
            found |= {variant} if dot else set()
    return sorted(found)


def _inside(folder: Path) -> list[str]:
    return sorted(p.parent.name for p in folder.glob("*/model_index.json"))


def component_names(folder: Path) -> list[str]:
    """The names that overrides may use: the components in ``model_index.json``, which :func:`pipeline_class` has read."""
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    return [name for name, value in index.items() if isinstance(value, list)]


def pipeline_class(model_path: str | os.PathLike[str]) -> type:
    """The class of the pipeline in a folder.  Raises AttachError, naming the fix, when there is none."""
    folder = Path(model_path)
    if not folder.is_dir():
        state = "a file" if folder.exists() else "not there"
        raise AttachError(f"{str(folder)!r} is {state}; --model-path takes the folder of a saved diffusers pipeline")
    index = folder / "model_index.json"
    if not index.is_file():
        inside = _inside(folder)
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
    found = getattr(diffusers, name)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline) and "__call__" in dir(found)):
        raise AttachError(
            f"{str(index)!r} asks for {name!r}, which is no pipeline that can run; give the folder of a whole pipeline"
        )
    return found


def load(model_path: str | os.PathLike[str], dtype: str | None = None, variant: str | None = None) -> Any:
    """``DiffusionPipeline.from_pretrained`` on a folder, without network.  Raises AttachError when it cannot be loaded."""
    import torch
    from diffusers import DiffusionPipeline

    options = {} if dtype is None else {"torch_dtype": getattr(torch, dtype_name(dtype))}
    try:
        with _quiet():
            pipeline = DiffusionPipeline.from_pretrained(
                str(model_path), local_files_only=True, variant=variant, **options
            )
    except Exception as e:
        if damaged := _damaged(Path(model_path)):
            raise AttachError(
                f"the pipeline in {str(model_path)!r} cannot be loaded: {damaged}; download it again"
            ) from e
        first = str(e).strip().splitlines()[0] if str(e).strip() else ""
        raise AttachError(
            f"the pipeline in {str(model_path)!r} cannot be loaded: {type(e).__name__}: {first}; "
            "check that every folder that model_index.json names is complete, and that the libraries are recent"
        ) from e
    for name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module) and (left := [n for n, p in part.named_parameters() if p.is_meta]):
            raise AttachError(
                f"the pipeline in {str(model_path)!r} cannot be loaded: the weights of {name!r} lack {len(left)} tensors that "
                f"its config.json asks for ({left[0]!r}, ...); download that folder again"
            )
    return pipeline


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
    """What of a pipeline is missing, truncated, or not what it says."""
    from safetensors import SafetensorError, safe_open

    for name, value in json.loads((folder / "model_index.json").read_text("utf-8")).items():
        if isinstance(value, list) and any(value) and not (folder / name).is_dir():
            return f"the folder {name!r} of model_index.json is missing"
    for file in sorted([*folder.rglob("*.safetensors"), *folder.rglob("*.json")]):
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
                continue
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError, ValueError) as e:
            return f"{str(file.relative_to(folder))!r} is truncated or damaged ({e})"
    return ""
