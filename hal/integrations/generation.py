"""A diffusers pipeline from a folder to a picture, with its attention through hal, or by diffusers' own backends."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
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
from ..policy import DENOISER, Policy
from ..requests import request
from ..run import decide_in
from . import media, passthrough
from .attachment import Attachment, attach
from .loading import component_names, load, located, pipeline_class
from .locking import planned
from .passthrough import Passed

Progress = Callable[[int, int], None]  # steps done, steps in all
RUNTIMES = ("hal", "diffusers")


@dataclass(frozen=True)
class Generation:
    """What :func:`generate` did.  ``receipts`` are those of this run alone; none where diffusers ran the attention."""

    out: Path
    attachment: Attachment | None  # detached; its components say what was reached
    receipts: tuple[Receipt, ...]
    frames: int
    seconds: float
    passed: tuple[Passed, ...] = ()  # what diffusers was told
    compiled: tuple[str, ...] = ()  # components under torch.compile: their runs are traces, seconds has the compiling


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
    **arguments: Any,
) -> Generation:
    """Load the pipeline in the folder ``model_path``, run it on ``prompt`` with hal attached, and save the result.

    None: the small text-to-video model that hal ships, at the size and steps that it was trained for.

    ``out`` ends in ``.png`` (a video becomes a contact sheet), ``.gif`` or ``.mp4``; it is written whole or not at all.
    A file that is there is an error unless ``force``; one that comes there while this runs stays, and the name gets a
    number.  None: a new name in ``outputs``.  ``device`` is the active platform's unless given; ``dtype`` is the one the weights
    were saved in unless given.  ``model_variant`` is that of the weight files, or a folder inside.

    The words of ``hal.attach`` say what is chosen (``attention_backend=…``); the environment comes after them, and then
    ``config``, a settings file.  ``plan`` is a file of ``hal lock``: it says all of that, and nothing else than it has
    may run.
    ``attention_backend_override`` is this request's own choice in the denoiser.
    ``runtime="diffusers"`` leaves the attention to diffusers; ``attention_backend`` is then one of its names.
    ``compile`` puts the denoiser under ``torch.compile``, ``cuda_graph`` has that capture graphs too.  All other
    ``arguments`` (``negative_prompt``, ``height``, …) go to the pipeline's ``__call__``.  What is ``None`` is left open.
    ``said(key, value)`` names an argument as the user knows it.

    Raises AttachError (with the fix) for a folder that holds no loadable pipeline, arguments that the pipeline refuses,
    or a file that cannot be written; PolicyError for a choice that contradicts itself or that nothing would use; and
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
    if model_path is None:
        model_path, call = shipped.model_folder(), {**shipped.DEFAULTS, **call}
    folder, variant = located(model_path, model_variant, said)
    path = None if out is None else media.writable(out)
    if path is not None:
        media.free(path, force, said("force", True))
    cls = pipeline_class(folder)
    path = path or media.generated(prompt, seed, "mp4" if _makes_videos(cls) else "png")
    _check(cls, call, path)
    device = device or current_platform().device_type
    if cuda_graph:
        _check_graphs(device, said)
    attention = _attention(runtime, words, override, config, locked, component_names(folder), said)
    pipeline = load(folder, dtype, variant)
    try:
        pipeline = pipeline.to(device)
    except (RuntimeError, AssertionError, ValueError) as e:
        raise AttachError(f"{cls.__name__} cannot be moved to the device {device!r}: {e}") from e
    pipeline.set_progress_bar_config(disable=True)

    start = time.perf_counter()
    with attention(pipeline) as ran:
        compiled = _compiled(pipeline, cuda_graph) if compile or cuda_graph else ()
        try:
            made = pipeline(
                prompt=prompt,
                generator=torch.Generator("cpu").manual_seed(seed),
                output_type="pil",
                **call,
                **reporting(pipeline, progress),
            )
        except Exception as e:
            raise _told(e, cls, ran, compiled, said) from e
    seconds = time.perf_counter() - start
    images = _images(made, cls.__name__)
    path = media.save(images, path, fps, new=out is None or not force)
    attachment = ran if isinstance(ran, Attachment) else None
    receipts = tuple(attachment.receipts()) if attachment else ()
    passed = () if isinstance(ran, Attachment) else ran
    return Generation(path, attachment, receipts, len(images), seconds, passed, compiled)


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


def _makes_videos(cls: type) -> bool:
    return "num_frames" in inspect.signature(cls.__call__).parameters


def _check(cls: type, call: dict[str, Any], path: Path) -> None:
    """Refuse arguments that the pipeline does not take, before its weights are read."""
    parameters = inspect.signature(cls.__call__).parameters
    if strange := sorted(set(call) - set(parameters)):
        raise AttachError(f"{cls.__name__} takes no {', '.join(strange)}{did_you_mean(strange[0], parameters)}")
    if path.suffix.lower() == ".mp4" and not _makes_videos(cls):
        raise AttachError(f"{cls.__name__} makes pictures, not videos; name a .png file")


def _check_graphs(device: str, said: Any) -> None:
    platform = detect.platform_for(device.partition(":")[0])
    if not hasattr(platform.module(), "is_current_stream_capturing"):
        raise PolicyError(
            f"{said('cuda_graph', True)}: {platform.name} cannot capture graphs (PyTorch has no stream capture for "
            f"{device!r} devices); {said('compile', True)} compiles without them"
        )


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
                if d.error and (asked or all(c.verdict is False for c in d.candidates)):
                    raise d.refusal()


def _compiled(pipeline: Any, graphs: bool) -> tuple[str, ...]:
    """Put the denoiser under torch.compile, in place."""
    parts = {n: p for n, p in pipeline.components.items() if isinstance(p, torch.nn.Module) and DENOISER.fullmatch(n)}
    if not parts:
        raise AttachError(f"{type(pipeline).__name__} has no transformer and no unet to compile")
    for part in parts.values():
        part.compile(**(GRAPHS if graphs else COMPILE))
        if graphs:
            _keep_outputs(part)
    return tuple(parts)


COMPILE: dict[str, Any] = {}
GRAPHS: dict[str, Any] = {"mode": "reduce-overhead"}


def _keep_outputs(part: torch.nn.Module) -> None:
    """A captured graph writes its next output over the last one, and guidance holds two at once: hand out copies."""
    from torch.utils._pytree import tree_map_only

    replay: Any = part._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return tree_map_only(torch.Tensor, torch.Tensor.clone, replay(*args, **kwargs))

    part._compiled_call_impl = call


def _told(e: Exception, cls: type, ran: Any, compiled: tuple[str, ...], said: Any) -> Exception:
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
    if isinstance(e, (TypeError, ValueError)):
        return AttachError(f"{cls.__name__} refused the call: {e}")
    if isinstance(e, RuntimeError):
        return AttachError(f"{cls.__name__} failed: {line}; are these sizes and this dtype ones that it can do here?")
    return e


def reporting(pipeline: Any, progress: Progress | None) -> dict[str, Any]:
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
