"""Platforms, backends and model cards are found by entry points, ours exactly as a vendor's.

The metadata is read straight from ``sys.path``: importing importlib.metadata alone costs more than all the rest.
"""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from functools import lru_cache
from importlib import import_module

from .errors import PluginError
from .platform import Platform

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from .catalog import Catalog

PLATFORMS, BACKENDS, MODELS = GROUPS = "hal.platforms", "hal.backends", "hal.models"
OURS = "attention-hal"


class Problem(namedtuple("Problem", ("group", "name", "distribution", "error"))):
    """A plug-in that could not be loaded: three texts, and the exception."""

    __slots__ = ()

    def __str__(self) -> str:
        kind = self.group.removeprefix("hal.").rstrip("s")
        said = f"{type(self.error).__name__}: {self.error}"
        return f"{kind} {self.name!r} of the distribution {self.distribution!r} failed: {said}"

    def as_error(self) -> PluginError:
        """To raise where this machine is resolved: what is missing might have been its kernel."""
        if isinstance(self.error, PluginError):  # a clash of names, which says itself how to choose
            return PluginError(str(self))
        error = PluginError(f"{self}; go on without it by --ignore-plugin {self.name} or HAL_IGNORE_PLUGIN={self.name}")
        error.__cause__ = self.error
        return error


class EntryPoint(namedtuple("EntryPoint", ("group", "name", "target", "distribution"))):
    """An entry point of ours: four texts."""

    __slots__ = ()

    def load(self) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)


@lru_cache(1)
def entry_points(path: tuple[str, ...] | None = None) -> tuple[EntryPoint, ...]:
    """Every entry point of ours on the path; of a distribution that lies there twice, the first counts."""
    out: list[EntryPoint] = []
    seen: set[str] = set()
    for folder in sys.path if path is None else path:
        try:
            infos = sorted(e.name for e in os.scandir(folder or ".") if e.name.endswith((".dist-info", ".egg-info")))
        except NotADirectoryError:
            out += _archived(folder, seen)
            continue
        except OSError:
            continue
        for info in infos:
            name = info.rsplit(".", 1)[0].split("-")[0].lower().replace("_", "-")
            if name in seen:
                continue
            seen.add(name)
            try:
                with open(os.path.join(folder, info, "entry_points.txt"), encoding="utf-8", errors="replace") as f:
                    out += _parsed(f.read(), name)
            except OSError:
                continue
    return tuple(out)


def _parsed(text: str, distribution: str) -> list[EntryPoint]:
    out: list[EntryPoint] = []
    group = ""
    if not any(f"[{g}]" in text for g in GROUPS):
        return out
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("["):
            group = line[1:-1].strip()
        elif "=" in line and group in GROUPS:
            name, target = (s.strip() for s in line.split("=", 1))
            out.append(EntryPoint(group, name, target.split("[")[0].strip(), distribution))
    return out


def _archived(folder: str, seen: set[str]) -> list[EntryPoint]:
    """A zip on the path: rare, so importlib.metadata may cost what it costs."""
    from importlib.metadata import distributions

    out = []
    for d in distributions(path=[folder]):
        name = d.metadata["Name"].lower().replace("_", "-")
        if name not in seen:
            seen.add(name)
            out += _parsed(d.read_text("entry_points.txt") or "", name)
    return out


def _quietly(e: EntryPoint) -> Any:
    """A stranger's import prints nothing: a command's JSON is on the same stdout."""
    import io

    out, err = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = io.StringIO()
    try:
        return e.load()
    finally:
        sys.stdout, sys.stderr = out, err


def load(group: str, kind: type[Any], ignore: frozenset[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Objects by name; a plug-in that fails, or that takes a name of another, is a Problem and not an exception."""
    found: dict[str, Any] = {}
    owner: dict[str, EntryPoint] = {}
    taken: dict[str, str] = {}  # alias -> backend
    problems: list[Problem] = []
    points = sorted((e for e in entry_points() if e.group == group), key=lambda e: e.distribution != OURS)
    for e in points:
        if ignore & {e.name, e.distribution, f"{e.distribution}:{e.name}"}:
            continue
        try:
            if e.name in found:
                first = owner[e.name].distribution
                raise PluginError(
                    f"the name {e.name!r} is taken by the distribution {first!r}; keep one with "
                    f"--ignore-plugin {e.distribution}:{e.name} or --ignore-plugin {first}:{e.name}"
                )
            thing = e.load() if e.distribution == OURS else _quietly(e)
            if isinstance(thing, type) and issubclass(thing, kind):
                thing = thing()
            if not isinstance(thing, kind):
                raise TypeError(f"{e.target} is {type(thing).__name__}, not a {kind.__name__}")
            for alias in getattr(thing, "aliases", ()):
                if alias in found or alias in taken:
                    first = taken.get(alias, alias)
                    raise PluginError(f"its alias {alias!r} is a name of the backend {first!r}; rename it")
            if thing.name != e.name:
                raise TypeError(f"{e.target} calls itself {thing.name!r}, its entry point {e.name!r}")
        except (Exception, SystemExit) as error:
            problems.append(Problem(group, e.name, e.distribution, error))
        else:
            found[e.name], owner[e.name] = thing, e
            taken.update(dict.fromkeys(getattr(thing, "aliases", ()), e.name))
    return found, problems


@lru_cache(8)
def platforms(ignore: frozenset[str] = frozenset()) -> tuple[dict[str, Platform], tuple[Problem, ...]]:
    """The platforms alone: all that detection needs."""
    found, problems = load(PLATFORMS, Platform, ignore)
    return found, tuple(problems)


@lru_cache(8)
def catalog(ignore: frozenset[str] = frozenset()) -> Catalog:
    """The Catalog of everything installed, without the plug-ins (names or distributions) in ``ignore``."""
    from .backend import Backend
    from .catalog import Catalog
    from .models import Card

    found, problems = platforms(ignore)
    backends, more = load(BACKENDS, Backend, ignore)
    cards, worse = load(MODELS, Card, ignore)
    failed = (*problems, *more, *worse)
    return Catalog(found, backends, failed, partial=bool(ignore or failed), models=cards)


def distribution_of(platform: str) -> str:
    """Which distribution a platform comes from."""
    return next((e.distribution for e in entry_points() if e.group == PLATFORMS and e.name == platform), OURS)


def outside(platform: str) -> bool:
    """Whether a platform comes from a distribution other than ours."""
    return distribution_of(platform) != OURS
