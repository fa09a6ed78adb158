"""Shared by all tests: hypothesis' settings, hand-made catalogs, processes and distributions of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tensors are tiny; threads only wait for each other

# The same examples in every run: a red test means a change made it red.  `tox -e explore` draws new ones.
settings.register_profile("hal", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("explore", settings.get_profile("hal"), derandomize=False, print_blob=True)
settings.load_profile("hal")


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _the_process_remembers_no_test() -> Iterator[None]:
    """What the process keeps ends with a test: the environment, read at the first decision, and what compiled code followed."""
    yield
    if "hal.run" in sys.modules:
        sys.modules["hal.run"]._environment = None
    if "hal.ledger" in sys.modules:
        sys.modules["hal.ledger"].traced.clear()


@pytest.fixture(scope="session")
def python() -> Callable[..., Ran]:
    """Runs code in a process of its own: ``python(code, path=[folders], HAL_PLATFORM="cpu")``."""

    def run(code: str, *, path: list[Path] | tuple[Path, ...] = (), **env: str) -> Ran:
        kept = {k: x for k, x in os.environ.items() if k != "HAL_PLATFORM"}
        kept["PYTHONPATH"] = os.pathsep.join([*map(str, path), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        p = subprocess.run(
            [sys.executable, "-c", code], env={**kept, **env}, capture_output=True, text=True, timeout=300, cwd="/"
        )
        return Ran(p.returncode, p.stdout, p.stderr)

    return run


@pytest.fixture
def distribution(tmp_path: Path) -> Callable[..., Path]:
    """Installs a made distribution into a folder: metadata, files by name, entry points by group."""

    def install(name: str, version: str = "1.0", files: dict[str, str] | None = None, **points: dict[str, str]) -> Path:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = [
            f"[hal.{group}]\n" + "".join(f"{k} = {x}\n" for k, x in point.items()) for group, point in points.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(groups))
        for file, text in (files or {}).items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
        tops = {Path(f).parts[0].removesuffix(".py") for f in files or {}}
        (info / "top_level.txt").write_text("\n".join(sorted(tops)))
        (info / "RECORD").write_text("".join(f"{f},,\n" for f in files or {}))
        return tmp_path

    return install
