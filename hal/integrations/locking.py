"""A plan of a pipeline: what every attention layer of it decides, on this machine or on any other."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import __version__, choices, detect, log, models, plugins, source
from ..catalog import Catalog
from ..context import changed
from ..decision import Decision
from ..errors import AttachError, HalError
from ..facts import Machine, dtype_name
from ..ledger import Ledger, receipt_of
from ..plan import SAID, Entry, Plan, entry_of
from ..policy import ANYWHERE, AUTOMATIC, Policy, Request
from ..resolver import resolve
from ..settlement import settle
from . import passthrough
from .attachment import attach
from .loading import component_names, load, pipeline_class


def lock(
    model_path: str | os.PathLike[str],
    machine: Machine | None = None,
    *,
    prompt: str = "a picture",
    dtype: str | None = None,
    words: Mapping[str, Any] | None = None,
    config: str | None = None,
    said: Any = lambda key, value: f"{key}={value!r}",
    **arguments: Any,
) -> Plan:
    """The decisions of every layer of the pipeline in a folder, for ``machine`` (None: this one).

    The pipeline runs one denoising step here, by PyTorch's own attention whatever is asked for, so that its calls are
    known; they are then decided for the machine, in ``dtype`` (the weights' own unless given), under ``words`` (those
    of ``hal.attach``), the environment, and ``config``, a settings file, in the order of ``hal.generate``.  The plan
    has what all of them said.  ``arguments`` (height, width, num_frames, …) go to the pipeline: a plan holds for these.
    A choice that cannot be served is an entry without a backend.  Raises PolicyError for an unknown word and for a choice
    that nothing would use, AttachError for a folder that holds no pipeline or a call that it refuses.
    """
    cls = pipeline_class(model_path)
    call = {k: x for k, x in {"num_inference_steps": 1, **arguments}.items() if x is not None}
    if unknown := sorted(set(call) - set(inspect.signature(cls.__call__).parameters)):
        raise AttachError(f"{cls.__name__} takes no {', '.join(unknown)}")
    as_dtype = {} if dtype is None else {"dtype": dtype_name(dtype)}
    catalog = plugins.catalog(detect.ignored())
    words = {k: x for k, x in (words or {}).items() if x is not None and x != ()}
    policy = choices.asked(catalog, words, config, components=component_names(Path(model_path)), said=said)
    pipeline = load(model_path, None)
    seen, parts = _recorded(pipeline, prompt, call)
    cards = models.policy(models.of(pipeline, parts, catalog), catalog)
    policy = Policy(by_layer=True).over(policy).over(cards).over(choices.environment(catalog))
    target = machine or detect.real_machine(detect.real_platform().name)
    decide = resolve if machine else settle
    entries: dict[Any, Entry] = {}
    ledger = Ledger()
    for d in seen:
        there = d.call.but(device=target.devices[0].index, refused=(), **as_dtype)
        decision = decide(there, target, catalog, policy.at(d.policy.site))
        ledger.count(decision, receipt_of(decision), 0)
        entry = entry_of(decision)
        entries.setdefault((entry.component, entry.role, entry.layer, str(entry.call)), entry)
    ledger.check_used([r for r in policy.requests if r.kind in ("override", "global")], parts)
    return Plan(__version__, target, {**_said(words, config), "dtype": dtype}, tuple(entries.values()), str(model_path))


def _recorded(pipeline: Any, prompt: str, call: Mapping[str, Any]) -> tuple[list[Decision], dict[str, Any]]:
    """The decisions of one run, for their calls and sites, and the components that were attached."""
    seen: list[Decision] = []
    mine = threading.get_ident()

    def record(d: Decision) -> None:
        if threading.get_ident() == mine:  # hooks see every thread
            seen.append(d)

    # Nothing that is said for the target may stop the run here, so one request comes before all of it.  Its source is of
    # this run alone: equal contexts share decisions, and those that another thread has taken would not be seen.
    request = Request("torch_sdpa", "require", f"hal lock, to learn the calls ({id(seen):x})", kind="call")
    pipeline.set_progress_bar_config(disable=True)
    try:
        with (
            changed(policy=Policy((request,), by_layer=True), machine=None, site=ANYWHERE, plan=None),
            log.hooks(decision=record),
            attach(pipeline) as attached,
        ):
            pipeline(prompt=prompt, **call)
    except HalError as e:
        raise AttachError(
            f"the pipeline runs one step here, so that its calls are known, and that failed: {e}; "
            "make the plan on the machine that it is for"
        ) from e
    except Exception as e:
        said = passthrough.line(e)
        raise AttachError(
            f"{type(pipeline).__name__} failed in the one step that is run to learn its calls: {said}; "
            "give sizes that it can do (height, width, num_frames)"
        ) from e
    return seen, attached.parts


# ---- what was said, in the plan and out of it


def _said(words: Mapping[str, Any], config: str | None) -> dict[str, Any]:
    """Who said what, the first first: everything that the plan's policy was made of, without a file or the environment."""
    env = os.environ
    given: dict[str, dict[str, Any]] = {
        "words": dict(words),
        "environment": {"attention_backend": env.get(choices.BACKEND) or None},
        "config": _file(config),
        "settings": _file(env.get(choices.SETTINGS)),
    }
    around = env.get(choices.FALLBACK) or None
    last = around or given["settings"].get("attention_fallback")
    first = words.get("attention_fallback") or around or given["config"].get("attention_fallback") or last
    out: dict[str, Any] = {}
    for who, mine in given.items():
        mine["attention_fallback"] = first if who in ("words", "config") else last
        settings = mine.get("attention_backend_config")
        if isinstance(settings, str):
            mine["attention_backend_config"] = source.read(settings).data
        kept = {k: _plain(x) for k, x in mine.items() if x is not None}
        if set(kept) - {"attention_fallback"}:
            out[who] = kept
    return out


def _file(path: str | None) -> dict[str, Any]:
    return dict(source.read(path, "the settings file").data) if path else {}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str) else list(value)


def planned(plan: Plan, catalog: Catalog, components: list[str] | None = None) -> Policy:
    """The policy that a plan was made under.  Raises PolicyError that names the plan for a word that is wrong here."""
    out = AUTOMATIC
    for who in SAID:
        words = dict(plan.policy.get(who, {}))
        if isinstance(settings := words.get("attention_backend_config"), Mapping):
            words["attention_backend_config"] = source.Source(settings, _source(plan, "attention_backend_config"))
        known = components if who == "words" else None
        said = lambda key, value: f"{_source(plan, key)}: {value}"
        out = out.over(choices.policy_of(catalog, **words, components=known, said=said))
    return out


def _source(plan: Plan, key: str) -> str:
    return f"plan {plan.origin}, {key}"
