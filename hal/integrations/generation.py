"""A diffusers pipeline from a folder to a picture, with its attention through hal, or by diffusers' own backends."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import choices, current_platform, detect, plugins
from ..context import changed, current
from ..demo import shipped
from ..errors import AttachError, HalError, PolicyError, did_you_mean, unknown
from ..facts import Call
from ..ledger import Receipt
from ..plan import Plan, read_plan
from ..policy import Policy
from ..requests import request
from ..run import decide_in
from . import compiling, limits, media, passthrough
from .attachment import Attachment, attach
from .loading import component_names, load, located, pipeline_class
from .locking import planned
from .passthrough import Passed

Progress = Callable[[int, int], None]  # steps done, steps in all; (0, 0): it begins
RUNTIMES = ("hal", "diffusers")


@dataclass(frozen=True)
class Generation:
    """What :func:`generate` did.  ``receipts`` are those of this call alone; none where diffusers ran the attention."""

    files: tuple[Path, ...]
    attachment: Attachment | None  # detached; its components say what was reached
    receipts: tuple[Receipt, ...]
    frames: int  # of each file
    seconds: float
    passed: tuple[Passed, ...] = ()  # what diffusers was told
    compiled: tuple[str, ...] = ()  # components under torch.compile: their runs are traces, seconds has the compiling

    @property
    def out(self) -> Path:
        """The file, or the first of several."""
        return self.files[0]


def _as_argument(key: str, value: Any) -> str:
    return f"{key}={value!r}"


def generate(
    model_path: str | os.PathLike[str] | None,
    prompt: str,
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    steps: int | None = None,
    seed: int = 0,
    videos: int = 1,
    frames: int | None = None,
    fps: int = 16,
    dtype: str | None = None,
    device: str | None = None,
    runtime: str = "hal",
    attention_backend_override: str | None = None,
    model_variant: str | None = None,
    compile: bool = False,
    cuda_graph: bool = False,
    config: str | None = None,
    plan: str | None = None,
    said: Callable[[str, Any], str] = _as_argument,
    progress: Progress | None = None,
    warn: Callable[[str], Any] = warnings.warn,
    **arguments: Any,
) -> Generation:
    """Load the pipeline in the folder ``model_path``, run it on ``prompt`` with hal attached, and save the result.

    None: the small text-to-video model that hal ships, at the size and steps that it was trained for.

    ``out`` ends in ``.png`` (a video becomes a contact sheet), ``.gif`` or ``.mp4``; it is written whole or not at all.
    A file that is there is an error unless ``force``; one that comes there while this runs stays, and the name gets a
    number.  None: a new name in ``outputs``.

    ``videos`` (or pictures) are made one after the other, from the seeds ``seed``, ``seed + 1``, …, so that each is the same
    as when it is made alone.  Each has its seed at the end of its name, and is saved when it is done.

    ``device`` is the active platform's unless given; ``dtype`` is the one the weights
    were saved in unless given.  ``model_variant`` is that of the weight files, or a folder inside.

    The words of ``hal.attach`` say what is chosen (``attention_backend=…``); the environment comes after them, and then
    ``config``, a settings file.  ``plan`` is a file of ``hal lock``: it says all of that, and nothing else than it has
    may run.
    ``attention_backend_override`` is this request's own choice in the denoiser.
    ``runtime="diffusers"`` leaves the attention to diffusers; ``attention_backend`` is then one of its names.
    ``compile`` puts the denoiser under ``torch.compile``, ``cuda_graph`` has that capture graphs too.  All other
    ``arguments`` (``negative_prompt``, ``height``, …) go to the pipeline's ``__call__``.  What is ``None`` is left open.
    ``said(key, value)`` names an argument as the user knows it.  ``warn`` is told of words that the model does not know, of
    sizes that it made otherwise, and of the files that were saved before something went wrong.

    Raises AttachError (with the fix) for a folder that holds no loadable pipeline, arguments that the pipeline refuses, a
    prompt that it would cut, or a file that cannot be written; PolicyError for a choice that contradicts itself or that nothing would use; and
    what ``hal.attention`` raises.
    """
    words = {key: arguments.pop(key) for key in choices.KEYS if key in arguments}
    words = {key: value for key, value in words.items() if value is not None and value != ()}
    override = attention_backend_override
    others = {"attention_backend_override": override, "config": config, "plan": plan}
    _combined(runtime, words, others, "compile" if compile else "cuda_graph" if cuda_graph else "", said)
    locked = None if plan is None else read_plan(plan)
    if locked is not None:
        dtype = dtype or locked.policy.get("dtype")
    given = {"num_inference_steps": steps, "num_frames": frames, **arguments}
    call = {key: value for key, value in given.items() if value is not None}
    limits.check_numbers(call, said)
    if model_path is None:
        model_path, call = shipped.model_folder(), shipped.arguments(call, said)
    seeds = _seeds(seed, videos, said)
    folder, variant = located(model_path, model_variant, said)
    paths = [] if out is None else media.numbered(media.writable(out), seeds)
    for path in paths:
        media.free(path, force, said("force", True))
    cls = pipeline_class(folder)
    paths = paths or [media.generated(prompt, s, "mp4" if _makes_videos(cls) else "png") for s in seeds]
    check_arguments(cls, call)
    _check_suffix(cls, paths[0])
    device = device or current_platform().device_type
    if cuda_graph:
        compiling.check_graphs(device, said)
    attention = _attention(runtime, words, override, config, locked, component_names(folder), said)
    pipeline = load(folder, dtype, variant)
    try:
        pipeline = pipeline.to(device)
    except (RuntimeError, AssertionError, ValueError) as e:
        raise AttachError(f"{cls.__name__} cannot be moved to the device {device!r}: {e}") from e
    pipeline.set_progress_bar_config(disable=True)
    for text in limits.check_prompts(pipeline, prompt, call):
        warn(text)

    start = time.perf_counter()
    files: list[Path] = []
    with attention(pipeline) as ran:
        compiled = compiling.compiled(pipeline, cuda_graph) if compile or cuda_graph else ()
        try:
            for number, (path, one) in enumerate(zip(paths, seeds)):
                told = reporting(pipeline, progress, number, videos)
                generator = torch.Generator("cpu").manual_seed(one)
                with explaining(cls, ran, compiled, said):
                    made = pipeline(prompt=prompt, generator=generator, output_type="pil", **call, **told)
                if isinstance(ran, Attachment):
                    ran.check_used()
                images = _images(made, cls.__name__)
                files.append(media.save(images, path, fps, new=out is None or not force))
        except BaseException:
            if files:
                warn(f"saved before that: {', '.join(map(str, files))}")
            raise
    seconds = time.perf_counter() - start
    if other := limits.otherwise(call, images, cls.__name__):
        warn(other)
    attachment = ran if isinstance(ran, Attachment) else None
    receipts = tuple(attachment.receipts()) if attachment else ()
    passed = () if isinstance(ran, Attachment) else ran
    return Generation(tuple(files), attachment, receipts, len(images), seconds, passed, compiled)


# ---- before anything is loaded


def _combined(runtime: str, words: dict[str, Any], others: dict[str, Any], graphs: str, said: Any) -> None:
    """Refuse what cannot be asked for together."""
    if runtime not in RUNTIMES:
        raise PolicyError(f"{said('runtime', runtime)}: {unknown('runtime', runtime, RUNTIMES)}")
    override = others["attention_backend_override"]
    if override is not None and graphs:
        raise PolicyError(
            f"{said(graphs, True)} and {said('attention_backend_override', override)} exclude each other: a compiled or captured "
            "graph keeps the kernel that it has seen; drop one of them"
        )
    if others["plan"] is not None:
        _with_plan(said("plan", others["plan"]), words, others, graphs, said)
    if runtime == "hal":
        return
    hals = {k: x for k, x in words.items() if k != "attention_backend"}
    hals |= {k: x for k, x in others.items() if x is not None}
    for key, value in hals.items():
        raise PolicyError(
            f"{said(key, _as_text(value))} is for hal and cannot go with {said('runtime', runtime)}: diffusers sets one backend for "
            f"a whole model, by its name alone; drop {said('runtime', runtime)}, or give only the attention backend"
        )


def _with_plan(plan: str, words: dict[str, Any], others: dict[str, Any], graphs: str, said: Any) -> None:
    if graphs:
        raise PolicyError(
            f"{plan} and {said(graphs, True)} exclude each other: hal lock saves the calls of a pipeline that is not "
            "compiled, and a traced layer makes others; drop one of them"
        )
    for key, value in {**words, **{k: x for k, x in others.items() if k != "plan" and x is not None}}.items():
        raise PolicyError(
            f"{plan} and {said(key, _as_text(value))} exclude each other: the plan says what is chosen; drop one of them, "
            "or give hal lock the choice and save a new plan"
        )


def _as_text(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _seeds(first: int, videos: int, said: Any) -> Sequence[int]:
    if videos < 1:
        raise AttachError(f"{said('videos', videos)}: allowed is 1 or more")
    seeds = range(first, first + videos)
    if seeds[0] < -(2**63) or seeds[-1] >= 2**64:
        raise AttachError(f"{said('seed', first)}: a seed of PyTorch lies between -2**63 and 2**64 - 1")
    return seeds


def _makes_videos(cls: type) -> bool:
    return "num_frames" in inspect.signature(cls.__call__).parameters


def check_arguments(cls: type, call: Mapping[str, Any]) -> None:
    """Refuse arguments that the pipeline does not take, before its weights are read."""
    parameters = inspect.signature(cls.__call__).parameters
    if strange := sorted(set(call) - set(parameters)):
        raise AttachError(f"{cls.__name__} takes no {', '.join(strange)}{did_you_mean(strange[0], parameters)}")


def _check_suffix(cls: type, path: Path) -> None:
    if path.suffix.lower() == ".mp4" and not _makes_videos(cls):
        raise AttachError(f"{cls.__name__} makes pictures, not videos; name a .png file")


def _attention(
    runtime: str,
    words: dict[str, Any],
    override: str | None,
    config: str | None,
    plan: Plan | None,
    components: list[str],
    said: Any,
) -> Callable[[Any], Any]:
    """What runs a pipeline's attention: a context for the pipeline.  Every name is checked now."""
    if runtime == "hal":
        catalog = plugins.catalog(detect.ignored())
        if plan is not None:
            policy = planned(plan, catalog, components)
        else:
            policy = choices.asked(catalog, words, config, components=components, said=said)
        if override is not None:
            try:
                catalog.per_request(override)
            except PolicyError as e:
                own = f"attention_backend_override={override!r}: "
                raise PolicyError(
                    f"{said('attention_backend_override', override)}: {str(e).removeprefix(own)}"
                ) from None
        return lambda pipeline: _by_hal(pipeline, policy, override, plan, said)
    name = words.get("attention_backend")
    if name is None:
        return _as_it_is
    source = said("attention_backend", name)
    backend = passthrough.backend_name(name, source)
    return lambda pipeline: passthrough.passed(pipeline, backend, source)


# ---- the run


@contextmanager
def _as_it_is(pipeline: Any) -> Iterator[tuple[Passed, ...]]:
    yield ()


@contextmanager
def _by_hal(pipeline: Any, policy: Policy, override: str | None, plan: Plan | None, said: Any) -> Iterator[Attachment]:
    around = nullcontext() if plan is None else changed(plan=plan, policy=replace(current.get().policy, by_layer=True))
    with around, attach(pipeline, policy=policy) as attachment:
        _check_served(attachment)
        source = said("attention_backend_override", override)
        with request(pipeline, attention_backend_override=override, source=source):
            yield attachment


def _check_served(attachment: Attachment) -> None:
    """Raise now what a step would raise whatever its call is: a choice that this machine cannot serve."""
    here = current.get()
    for name, part in attachment.parts.items():
        first = next(part.parameters(), None)
        if first is None or here.machine is not None:
            continue
        for place in {p.key: p for p in attachment.places[name]}.values():
            for role in ("self", "cross"):
                d = decide_in(place.within(here), Call(role=role), first.device.type)
                asked = d.request is not None and d.request.kind in ("global", "override")
                exact = [c for c in d.candidates if c.backend.quality == "exact"]  # nobody is given another unasked
                if d.error and (asked or all(c.verdict is False for c in exact)):
                    raise d.refusal()


@contextmanager
def explaining(cls: type, ran: Any, compiled: tuple[str, ...] = (), said: Any = _as_argument) -> Iterator[None]:
    """What the pipeline raises inside is raised as :func:`explained` tells it."""
    try:
        yield
    except Exception as e:
        error = explained(e, cls, ran, compiled, said)
        raise error from (None if error is e else e)


def explained(e: Exception, cls: type, ran: Any, compiled: tuple[str, ...] = (), said: Any = _as_argument) -> Exception:
    """The error to raise for one that the pipeline raised: hal's own, and one line for what the user can change."""
    cause: BaseException | None = e
    while cause is not None:
        if isinstance(cause, HalError):  # torch.compile wraps what it meets
            return cause
        cause = cause.__cause__ or cause.__context__
    line = passthrough.line(e)
    if compiled and isinstance(e, torch._dynamo.exc.TorchDynamoException):
        return AttachError(
            f"torch.compile of {', '.join(compiled)} failed: {line}; run it without {said('compile', True)}"
        )
    if not isinstance(ran, Attachment) and ran:
        under = f" while diffusers ran the attention by {ran[0].backend!r} ({ran[0].source})"
        return AttachError(f"{cls.__name__} failed{under}: {line}")
    if isinstance(e, (TypeError, ValueError, ArithmeticError)):
        return AttachError(f"{cls.__name__} refused the call: {e}")
    if isinstance(e, (RuntimeError, MemoryError)):
        return AttachError(f"{cls.__name__} failed: {line}; are these sizes and this dtype ones that it can do here?")
    return e


def reporting(pipeline: Any, progress: Progress | None, number: int = 0, of: int = 1) -> dict[str, Any]:
    """The pipeline's argument that reports each step to ``progress``, in the newer or the older form.

    It reports the run ``number`` of so many equal ones; the first begins now.
    """
    if progress is None:
        return {}

    def at_end(_: Any, step: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
        steps = len(pipeline.scheduler.timesteps)
        progress(number * steps + step + 1, of * steps)
        return state

    if number == 0:
        progress(0, 0)
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
