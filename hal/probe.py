"""Packages: looked at by files and metadata; imported only to prove the kernel that was chosen, and isolated."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
import threading
from functools import lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from typing import Any

from .backend import Needs
from .catalog import Catalog
from .facts import Package
from .facts.packages import package_key


def look_all(catalog: Catalog) -> dict[str, Package]:
    """The state of every package that any kernel needs, without importing one."""
    out: dict[str, Package] = {}
    for package in catalog.packages:
        states = [look(n) for n in catalog.needs(package)]
        out[package] = min(states, key=lambda p: not p.available)
    return out


def look(needs: Needs) -> Package:
    """Absent, found, or another project's package of the same name: from metadata and files."""
    version = _version(needs)
    top = needs.module.partition(".")[0]
    place = _place(needs.module)
    if place == "loaded":
        return Package("found", version or getattr(sys.modules[top], "__version__", None))
    if version is None:
        # By the distributions' names alone: PyPI's aiter has the module name of amd-aiter, and is another project.
        others = [d for d in _owners().get(top, ()) if d not in {needs.package, *map(package_key, needs.names)}]
        if place is None:
            return Package("absent")
        if others and place == "package":
            return Package("wrong_distribution", None, f"the module {top!r} here is of the distribution {others[0]!r}")
        if place == "namespace":
            owner = f" (of {others[0]})" if others else ""
            return Package(
                "missing_symbol", None, f"{needs.module!r} is only a namespace here{owner}, without {needs.symbol}"
            )
    elif place is None:
        return Package("missing_symbol", version, f"{needs.package} {version} has no module {needs.module!r}")
    return Package("found", version)


def prove(needs: Needs, before: Package | None = None) -> Package:
    """Import the module and find the very symbol.  Any failure becomes a state with its message; only Ctrl-C passes.

    What the import prints is captured, and the environment variables that it sets are undone: one import at a time.
    """
    with _one_at_a_time:
        return _prove(needs, before)


def _prove(needs: Needs, before: Package | None) -> Package:
    version = before.version if before else _version(needs)
    said, env = io.StringIO(), dict(os.environ)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            module = import_module(needs.module)
            thing: Any = module
            for part in needs.symbol.split(".") if needs.symbol else ():
                thing = getattr(thing, part, None)  # of a lazy module, this is the real import
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        return Package("broken", version, f"{type(e).__name__}: {e}".strip().splitlines()[0])
    finally:
        _restore(env)
    if needs.symbol:
        if thing is None:
            return Package("missing_symbol", version, f"{needs.module} has no {needs.symbol}")
        if needs.parameters:
            try:
                has = inspect.signature(thing).parameters
            except (TypeError, ValueError):
                has = {}  # type: ignore[assignment]
            lacking = [p for p in needs.parameters if has and p not in has]
            if lacking:
                note = f"{needs.module}.{needs.symbol} takes no {lacking[0]}: another version or another package"
                return Package("wrong_distribution", version, note)
    return Package("usable", version or getattr(module, "__version__", None))


_one_at_a_time = threading.RLock()  # stdout and the environment are the process's


def _restore(env: dict[str, str]) -> None:
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _version(needs: Needs) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    for name in dict.fromkeys((needs.package, *needs.names)):
        try:
            return version(name.replace("_", "-"))
        except PackageNotFoundError:
            continue
    return None


def _place(module: str) -> str | None:
    """``package``, ``namespace`` (a folder without code of its own), ``loaded``, or None.  Imports no parent."""
    if module in sys.modules:
        return "loaded"
    path: Any = None
    place = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = PathFinder.find_spec(name, path)
        except KeyError:  # a namespace inside a parent that is not imported
            place, path = "namespace", [d for d in (os.path.join(p, part) for p in path) if os.path.isdir(d)]
            continue
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        place = "package" if spec.origin else "namespace"
        path = spec.submodule_search_locations
        if path is None and name != module:
            return None
    return place


@lru_cache(1)
def _owners() -> dict[str, list[str]]:
    """Top-level module -> distributions that installed it."""
    from importlib.metadata import packages_distributions

    return {m: sorted(set(map(package_key, d))) for m, d in packages_distributions().items()}
