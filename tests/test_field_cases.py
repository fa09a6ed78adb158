"""Every handed field case that concerns dense attention, as rows of facts and answers.  Needs no torch."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from field_cases import ALL, PLAIN, REFUSED, Case, Row, stand_ins, table

from hal import choices, detect, plugins
from hal.catalog import Catalog
from hal.decision import Decision
from hal.errors import DeclarationError
from hal.facts import Call, Machine
from hal.host import Host
from hal.policy import Policy, Request, Site, Target, names
from hal.resolver import resolve
from hal.rules import limit_of

TESTS = Path(__file__).parent
ROWS = [pytest.param(row, id=f"{case.id} {row.name}".replace(" ", "-")) for case in ALL for row in case.rows]


def decided(row: Row) -> Decision:
    c = wider()
    if isinstance(row.on, str):
        machine = c.machine(row.on)
    else:
        machine = c.platform(row.on["platform"]).read(Machine.from_json(json.dumps(row.on), "the row"))
    given = dict(p.split("==") for p in row.packages.split()) if isinstance(row.packages, str) else row.packages
    machine = machine.with_packages({c.package(n): v for n, v in given.items()}).with_software(**row.software)
    mode = "prefer" if row.ask.startswith("prefer ") else "require"
    backend, _, kernel = row.ask.removeprefix("prefer ").partition("/")
    requests = (Request(c.backend_name(backend), mode, "the row", kernel and c.kernel_name(kernel)),) if backend else ()
    policy = Policy(requests, names(row.waive), names(row.fit)).over(choices.policy_of(c, **row.words))
    target = Target.parse(row.at)
    site = Site(target.component, target.role or "self", **row.layer)
    call = Call.parse([PLAIN, row.call, f"role={target.role}" if target.role else ""])
    return resolve(call, machine, c, policy.at(site))


@lru_cache(1)
def wider() -> Catalog:
    """What is here, with stand-ins for what is not yet."""
    c = plugins.catalog()
    return Catalog(c.platforms, {**c.backends, **{b.name: b for b in stand_ins.ALL}}, c.problems)


@pytest.mark.parametrize("row", ROWS)
def test_field_case(row: Row) -> None:
    d = decided(row)
    assert (f"{d.backend}/{d.kernel}" if d.chosen else REFUSED) == row.takes, str(d)
    assert (d.error is None) == (row.takes != REFUSED)
    if d.chosen:
        assert d.fittings == tuple(row.fittings.split())
        assert d.chosen.backend.quality == "exact" or d.request is not None, "never automatic"
    text = [*d.warnings, *d.notes, *d.advice, d.error or ""]
    for kernel, ids in row.against.items():
        mine = [c for c in d.candidates if c.kernel and c.kernel.name == kernel]
        assert mine, f"{kernel} is no candidate: {d}"
        found = [r for c in mine for r in c.reasons]
        assert {r.id + ("?" if r.verdict is None else "") for r in found} == set(ids.split())
        text += [x for r in found for x in (r.message, r.fix, r.citation)]
    for fragment in row.says:
        assert fragment in "\n".join(text)
    if row.warns is not None:
        assert bool(d.warnings) == row.warns, d.warnings


# ---- the list itself

HANDED = {
    "A": "1 2 3 4 6 7 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 37 39 40 41 42",
    "B": "1 2 3 4 5 6 8 10 11 12 13 14 15 17 18 19 20 21 22 24 26 27 28 29",
    "C": "1 2 4 5 7 8 9 10 12 13 14 15 16 18 20 21",
    "D": "1 2 3 5 7 10 11 12 14 15 16",
    "E": "1 2 3 4 6 7 8 9 10 11 12",
    "F": "1 2 3",
    "G": "2 4 5",
    "golden ": "1 2 3 5 6 7 8 9 11 13 14 16 17 18 19 20 21 22 23 24 25 26 27 28 31 32 34 36 37 38 40",
}


def test_every_handed_case_is_here_once() -> None:
    handed = [kind + n for kind, numbers in HANDED.items() for n in numbers.split()]
    assert [c.id for c in ALL] == handed


@pytest.mark.parametrize("case", ALL, ids=[c.id.replace(" ", "-") for c in ALL])
def test_every_case_has_rows_or_tests_or_a_time(case: Case) -> None:
    assert case.rows or case.tests or case.rows_of or case.later
    by_id = {c.id: c for c in ALL}
    for other in case.rows_of.split():
        assert by_id[other].rows
    for test in case.tests:
        file, _, function = test.partition("::")
        tree = ast.parse((TESTS / file).read_text("utf-8"))
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, test


def test_the_page_is_current() -> None:
    """After a change: python tests/field_cases/table.py"""
    assert (TESTS.parent / "docs" / "field-cases.md").read_text("utf-8") == table.page()


# ---- what needs more than facts


def test_no_row_says_at_least() -> None:
    for p in plugins.catalog().platforms.values():
        archs = {a for rows in p.support.values() for r in rows for a in r.on or ()}
        assert all(p.parse_arch(a) == a for a in archs)
    with pytest.raises(DeclarationError, match="never an order"):
        limit_of("arch", ">=sm80")


def host(
    root: Path, torch_build: dict[str, Any], files: Mapping[str, str], modules: tuple[str, ...] = (), **env: str
) -> Host:
    """A machine that is a folder: these files, this torch build, these importable packages."""
    for path, text in files.items():
        (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (root / path.lstrip("/")).write_text(text)
    site = root / "site"
    for name in ("torch", *modules):
        (site / name).mkdir(parents=True)
    values = {"__version__": "2.13.0", "cuda": None, "hip": None, "xpu": None, **torch_build}
    (site / "torch" / "version.py").write_text("".join(f"{k} = {x!r}\n" for k, x in values.items()))
    h = Host(env, [str(site)], str(root))
    h.system, h.processor = "linux", "x86_64"
    return h


NVIDIA = {"/dev/nvidiactl": "", "/dev/nvidia0": "", "/proc/driver/nvidia/version": "Kernel Module  580.65.06  x"}


def told(h: Host) -> dict[str, detect.Detection]:
    return {d.platform: d for d in detect.detections(plugins.catalog().platforms, h)}


def test_a_cpu_build_of_torch_on_a_machine_with_a_gpu_is_the_cpu(tmp_path: Path) -> None:
    h = host(tmp_path, {"__version__": "2.13.0+cpu"}, NVIDIA)
    d = told(h)
    assert d["cuda"].state == "unusable" and "pip install torch" in d["cuda"].fix
    assert detect.choose(plugins.catalog().platforms, tuple(d.values()), h) == "cpu"


@pytest.mark.parametrize("text", ["", "-1"])
def test_hidden_is_not_absent(tmp_path: Path, text: str) -> None:
    h = host(tmp_path, {"cuda": "13.0"}, NVIDIA, CUDA_VISIBLE_DEVICES=text)
    d = told(h)
    assert d["cuda"].state == "hidden" and d["rocm"].state == "absent"
    assert any("CUDA_VISIBLE_DEVICES" in f for f in d["cuda"].found) and "unset" in d["cuda"].fix
    assert told(host(tmp_path / "seen", {"cuda": "13.0"}, NVIDIA))["cuda"].state == "present"


def test_a_package_without_a_device_is_no_platform(tmp_path: Path) -> None:
    h = host(tmp_path, {"__version__": "2.8.0+cpu"}, {}, modules=("intel_extension_for_pytorch",))
    d = told(h)
    assert d["xpu"].state == "absent" and any("the package alone makes no XPU" in f for f in d["xpu"].found)
    assert detect.choose(plugins.catalog().platforms, tuple(d.values()), h) == "cpu"


def test_no_package_is_proven_by_a_private_symbol() -> None:
    c = plugins.catalog()
    parts = [part for p in c.packages for n in c.needs(p) for part in n.symbol.split(".")]
    assert parts and not [part for part in parts if part.startswith("_")]


def test_hal_is_imported_and_explains_without_triton_or_torch(python: Any) -> None:
    ran = python(
        "import sys; sys.modules.update({n: None for n in ('torch', 'triton', 'torch_npu', 'numpy')})\n"
        "import hal; from hal import plugins\n"
        "c = plugins.catalog(); assert not c.problems\n"
        "d = hal.resolve(hal.Call.parse('dtype=bf16,head_dim=64,heads=2,batch=1,q_len=64,ring=2'), c.machine('910b'), c)\n"
        "print(d.kernel, len(d.candidates), bool(d.explain('json')))"
    )
    assert ran.code == 0, ran.err
    assert ran.out.split()[0] == "ascend_fa"
