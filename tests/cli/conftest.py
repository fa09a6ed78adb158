"""Runs the command in this process, or in a new one with a hand-made import path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from hal import detect
from hal.cli import main

ROOT = Path(__file__).resolve().parents[2]


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Hal = Callable[..., Ran]


@pytest.fixture
def hal(monkeypatch: pytest.MonkeyPatch) -> Hal:
    """hal("explain", "--on", "h100") in this process."""
    monkeypatch.setenv(detect.IGNORE, "")
    monkeypatch.setattr(detect, "_detected", detect.detected())  # --ignore-plugin detects anew: put back afterwards
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*args: str, **env: str) -> Ran:
        result = CliRunner().invoke(main, args, env=env)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def process() -> Hal:
    """``python -m hal args`` (or ``python -c code args``) in a process of its own, away from the repository."""

    def run(*args: str, code: str = "", options: tuple[str, ...] = (), **env: str) -> Ran:
        dropped = ("HAL_IGNORE_PLUGIN", "HAL_PLATFORM", "FORCE_COLOR")
        environment = {**{k: x for k, x in os.environ.items() if k not in dropped}, **env}
        command = [sys.executable, *options, *(["-c", code] if code else ["-m", "hal"]), *args]
        p = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd="/")
        return Ran(p.returncode, p.stdout, p.stderr)

    return run
