"""The command starts without torch, and works where there is none."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = """
import sys
from hal.cli import main
try:
    main(sys.argv[1:])
finally:
    print("\\n" + ",".join(sorted(sys.modules)), file=sys.stderr)
"""

LIGHT = [
    "--version",
    "--help",
    "explain --on x86",
    "explain --on x86 --json",
    "explain --on x86 --backend torch_sdpa --call head_dim=72 --json",
    "explain --on x86 --tree",
    "explain --schema",
    "facts --on x86",
    "facts --schema",
    "diff x86 x86",
    "diff --schema",
    "matrix",
    "matrix --json",
    "matrix --format html",
    "presets",
    "presets --json",
    "known-bad",
    "known-bad --json",
]


def _modules(err: str) -> set[str]:
    return set(err.strip().splitlines()[-1].split(","))


@pytest.mark.parametrize("command", LIGHT)
def test_what_needs_no_tensor_imports_no_torch(process, command):
    ran = process(*command.split(), code=LOADED)
    assert ran.code == 0, ran.err
    assert not {"torch", "numpy", "pydantic", "importlib.metadata"} & _modules(ran.err)


@pytest.mark.parametrize("command", [c for c in LIGHT if "--tree" not in c])
def test_rich_is_imported_for_terminals_alone(process, command):
    assert "rich" not in _modules(process(*command.split(), code=LOADED).err)


@pytest.fixture(scope="module")
def laptop(tmp_path_factory) -> dict[str, str]:
    """An import path with hal and its dependencies, and without torch."""
    folder = tmp_path_factory.mktemp("site")
    site = Path(sysconfig.get_paths()["purelib"])
    wanted = ("click", "packaging", "rich", "pygments", "markdown_it", "mdurl", "typing_extensions", "tomli")
    for found in site.iterdir():
        stem = found.name.split("-")[0].removesuffix(".py").lower()
        if stem in wanted or (stem == "attention_hal" and found.suffix == ".dist-info"):
            os.symlink(found, folder / found.name)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.mark.parametrize("command", LIGHT)
def test_a_laptop_without_torch_runs_it(process, laptop, command):
    ran = process(*command.split(), code=LOADED, options=("-S",), **laptop)
    assert ran.code == 0, ran.err
    assert "error" not in ran.err.lower().splitlines()[:-1]


def test_the_doctor_of_a_laptop_without_torch_says_so(process, laptop):
    ran = process("doctor", "--json", options=("-S",), **laptop)
    found = json.loads(ran.out)
    assert ran.code == 1
    assert found["torch"]["state"] == "absent"
    assert "PyTorch" in found["torch"]["fix"]
    assert found["checks"]
    assert not any(c["levels"]["installed"]["ok"] for c in found["checks"])
    assert "torch is absent" in process("doctor", options=("-S",), **laptop).out


def test_explaining_this_machine_without_torch_warns(process, laptop):
    ran = process("explain", "--json", options=("-S",), **laptop)
    assert ran.code == 0
    assert ran.json["backend"] == "torch_sdpa"
    assert "torch is not installed here" in ran.err
