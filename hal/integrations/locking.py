"""A plan of a pipeline: what every attention layer of it decides, on this machine or on any other."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import __version__, choices, detect, log, models, plugins
from ..context import changed, current
from ..decision import Decision
from ..errors import AttachError
from ..facts import Machine, dtype_name
from ..plan import Entry, Plan, entry_of
from ..resolver import resolve
from .attachment import attach
from .generation import load, pipeline_class


def lock(
    model_path: str | os.PathLike[str],
    machine: Machine | None = None,
    *,
    prompt: str = "a picture",
    dtype: str | None = None,
    words: Mapping[str, Any] | None = None,
    said: Any = lambda key, value: f"{key}={value!r}",
    **arguments: Any,
) -> Plan:
    """The decisions of every layer of the pipeline in a folder, for ``machine`` (None: this one).

    The pipeline runs one denoising step here, without a policy, so that its calls are known; they are then decided for
    the machine, in ``dtype`` (the weights' own unless given), under ``words`` (those of ``hal.attach``).  ``arguments``
    (height, width, num_frames, …) go to the pipeline: a plan holds for these sizes.
    Raises AttachError for a folder that holds no pipeline, PolicyError for an unknown word.
    """
    cls = pipeline_class(model_path)
    call = {k: x for k, x in {"num_inference_steps": 1, **arguments}.items() if x is not None}
    if unknown := sorted(set(call) - set(inspect.signature(cls.__call__).parameters)):
        raise AttachError(f"{cls.__name__} takes no {', '.join(unknown)}")
    pipeline = load(model_path, None)
    catalog = plugins.catalog(detect.ignored())
    policy = choices.policy_of(catalog, **(words or {}), components=list(pipeline.components), said=said)
    seen: list[Decision] = []
    pipeline.set_progress_bar_config(disable=True)
    with (
        changed(policy=replace(current.get().policy, by_layer=True)),
        log.hooks(decision=seen.append),
        attach(pipeline) as attached,
    ):
        pipeline(prompt=prompt, **call)
    cards = models.policy(models.of(pipeline, attached.parts, catalog), catalog)
    target = machine or detect.real_machine(detect.real_platform().name)
    entries: dict[Any, Entry] = {}
    for d in seen:
        of_call = d.call if dtype is None else d.call.but(dtype=dtype_name(dtype))
        here = policy.over(cards).over(choices.environment(catalog)).at(d.policy.site)
        entry = entry_of(resolve(of_call.but(device=target.devices[0].index), target, catalog, here))
        entries.setdefault((entry.component, entry.role, entry.layer, str(entry.call)), entry)
    given = {"words": {k: x for k, x in (words or {}).items() if x is not None and x != ()}, "dtype": dtype}
    return Plan(__version__, target, given, tuple(entries.values()), str(model_path))
