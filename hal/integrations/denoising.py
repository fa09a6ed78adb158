"""Which step, of how many, at which timestep, on which token grid: told by an attachment while a pipeline denoises.

The pipeline's scheduler gets, while attached, a subclass of its own class (same name) that counts; the denoiser one that
sets the position around each of its calls.  Neither pipeline nor model is asked to do anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..context import number, position, where
from ..models import grids, minimax_h3
from ..policy import DENOISER
from .disguise import put_on, subclass


class Steps:
    """Where a scheduler stands in its loop."""

    def __init__(self) -> None:
        self.done, self.first, self.loop = 0, 0, 0
        self.timesteps: list[float] = []

    def begin(self, scheduler: Any) -> None:
        steps = getattr(scheduler, "timesteps", None)
        self.done, self.first, self.loop = 0, 0, number()
        self.timesteps = [] if steps is None else [float(t) for t in steps]  # read once: a device must be waited for

    def now(self) -> dict[str, Any]:
        """Step, steps, timestep and loop; a pipeline that starts in the middle (strength) counts from there."""
        total, at = len(self.timesteps) - self.first, self.done + self.first
        if not 0 <= self.done < total:
            return {}
        return {"step": self.done, "steps": total, "timestep": self.timesteps[at], "loop": self.loop}


def watch(model: Any, parts: dict[str, nn.Module], layers: Mapping[str, int], undo: ExitStack) -> None:
    """Set step, steps, timestep, grid and number of ``layers`` around the denoisers of ``model`` until ``undo`` is closed."""
    steps = Steps()
    scheduler = None if isinstance(model, nn.Module) else getattr(model, "scheduler", None)
    if hasattr(scheduler, "step") and hasattr(scheduler, "set_timesteps"):
        put_on(scheduler, _counting(type(scheduler), steps), undo)
    for name, part in parts.items():
        if DENOISER.fullmatch(name) and not hasattr(part, "_supports_sdpa"):
            put_on(part, _placing(type(part), steps, layers.get(name)), undo)


def _counting(cls: type, steps: Steps) -> type:
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = cls.set_timesteps(self, *args, **kwargs)  # type: ignore[attr-defined]
        steps.begin(self)
        return out

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = cls.step(self, *args, **kwargs)  # type: ignore[attr-defined]
        steps.done += 1
        return out

    def set_begin_index(self: Any, begin_index: int = 0) -> Any:
        steps.first = begin_index or 0
        return cls.set_begin_index(self, begin_index)  # type: ignore[attr-defined]

    methods: dict[str, Any] = {"set_timesteps": set_timesteps, "step": step}
    if hasattr(cls, "set_begin_index"):
        methods["set_begin_index"] = set_begin_index
    for name, method in methods.items():  # pipelines look at the parameters of set_timesteps
        method.__signature__ = inspect.signature(getattr(cls, name))
    made: type = subclass(cls, methods)
    return made


_rows = WeakTensorKeyDictionary()  # of a request's position_ids: so a step reads nothing anew


def packed(cls: type, given: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Tells attention inside how the rows of a transformer over one packed sequence lie, where they are of a known family."""
    at = given.get("position_ids")
    if not isinstance(at, torch.Tensor) or not minimax_h3.CLASSES & {c.__name__ for c in cls.__mro__}:
        return nullcontext()
    from ..sparse.given import given as telling
    from ..sparse.given import is_given

    if is_given("rows"):  # by someone who knows better
        return nullcontext()
    version = None if at.is_inference() else at._version
    known = _rows.get(at)
    if known is None or known[0] != version:
        known = _rows[at] = version, minimax_h3.rows(given)
    return nullcontext() if known[1] is None else telling(rows=known[1])


def _placing(cls: type[nn.Module], steps: Steps, layers: int | None) -> type[nn.Module]:
    parameters = list(inspect.signature(cls.forward).parameters)[1:]

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph serves every step, so it can know none
            return super(ours, self).__call__(*args, **kwargs)
        model = getattr(self, "_orig_mod", self)  # torch.compile's wrapper
        given = {**dict(zip(parameters, args)), **kwargs}
        found = None if where().grid else grids.find(type(model).__name__, given, getattr(model, "config", {}))
        here = steps.now()
        # A grid that somebody has set is by someone who knows better.
        with position(layers=layers, **here, **({} if found is None else {"grid": found})), packed(type(model), given):
            return super(ours, self).__call__(*args, **kwargs)

    ours = subclass(cls, {"__call__": __call__})
    return ours
