"""The doctor: four answers of every kernel, whatever a kernel does."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hal import probe
from hal.backend import Backend, Kernel, Needs
from hal.catalog import Catalog
from hal.checkup import Check, Checkup, examine_machine, torch_fix
from hal.cli.doctor import show
from hal.cli.output import Screen
from hal.errors import CallError
from hal.facts import Device, Machine, Package
from hal.platforms.cpu import CPU
from hal.rows import Prefer, Row


def good(q: Any, k: Any, v: Any, mask: Any, varlen: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v)


def broken_in_run(q: Any, k: Any, v: Any, mask: Any, varlen: Any) -> Any:
    raise RuntimeError("no kernel image is available\nand a second line")


def leaving(q: Any, k: Any, v: Any, mask: Any, varlen: Any) -> Any:
    sys.exit("not with this driver")


def broken_in_bind(call: Any) -> Any:
    raise OSError("libvendor.so: undefined symbol")


def kernel(name: str = "k", run: Any = good, **more: Any) -> Kernel:
    bind = run if run is broken_in_bind or isinstance(run, str) else lambda call: run
    return Kernel(name, bind, layout="bhsd", **more)


def examined(
    *kernels: Kernel, rows: tuple[Row, ...] | None = None, packages: dict[str, Package] | None = None, torch_state: str = "usable",
    devices: tuple[Device, ...] = (Device("x86-64-v3"),), known: bool = True,
) -> Checkup:  # fmt: skip
    class Here(CPU):
        support = {"b": rows or tuple(Row(k.name) for k in kernels)}
        order = (Prefer("b"),)

    platform = Here()
    catalog = Catalog({"cpu": platform}, {"b": Backend("b", kernels=kernels)})
    out = Checkup(Package(torch_state), platform="cpu", packages={**probe.look_all(catalog), **(packages or {})})
    out.machine = Machine("cpu", devices, {"torch": "2.13.0"}) if known else None
    examine_machine(out, platform, catalog)
    return out


def only(c: Checkup) -> Check:
    assert len(c.checks) == 1
    return c.checks[0]


def answers(c: Check) -> tuple[bool | None, ...]:
    return c.installed.ok, c.imports.ok, c.supported.ok, c.right.ok


def test_a_good_kernel_passes_all_four():
    c = examined(kernel())
    assert answers(only(c)) == (True, True, True, True)
    assert c.ok
    assert 0 < only(c).error <= only(c).tolerance


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (broken_in_run, "raised RuntimeError: no kernel image is available"),
        (broken_in_bind, "raised OSError: libvendor.so: undefined symbol"),
        ("no.such.module:bind", "raised ModuleNotFoundError"),
        (leaving, "raised SystemExit: not with this driver"),
        (lambda q, k, v, m, s: torch.zeros_like(q), "error"),
        (lambda q, k, v, m, s: good(q, k, v, m, s) * float("nan"), "error nan"),
        (
            lambda q, k, v, m, s: good(q, k, v, m, s).float(),
            "(2, 256, 4, 128) of torch.float32 where (2, 256, 4, 128) of torch.bfloat16 is due",
        ),
        (lambda q, k, v, m, s: good(q, k, v, m, s)[..., :8], "returned (2, 256, 4, 8)"),
        (
            lambda q, k, v, m, s: good(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), m, s).transpose(1, 2),
            "error",
        ),
        (lambda q, k, v, m, s: F.scaled_dot_product_attention(q, k, v, scale=1.0), "error"),
        (lambda q, k, v, m, s: None, "raised AttributeError"),
    ],
)
def test_a_bad_kernel_is_told_and_fails(run, said):
    c = examined(kernel(run=run))
    assert answers(only(c)) == (True, True, True, False)
    assert said in only(c).right.note
    assert "\n" not in only(c).right.note
    assert not c.ok


def test_one_that_fails_hides_no_other():
    c = examined(kernel("bad", broken_in_run), kernel("good"))
    assert [answers(x)[3] for x in c.checks] == [False, True]
    assert not c.ok, "a plain call takes the first, which is broken"


def test_a_broken_second_choice_is_no_failure_of_the_machine():
    assert examined(kernel("good"), kernel("bad", broken_in_run)).ok


NEEDS = Needs("nowhere", "nowhere", "f", install="pip install nowhere")


def test_an_absent_package_is_not_installed_and_has_its_fix():
    c = only(examined(kernel(needs=(NEEDS,))))
    assert answers(c) == (False, None, True, None)
    assert c.fix == "pip install nowhere"


def test_a_package_that_fails_to_import_is_installed_and_told(tmp_path, monkeypatch):
    (tmp_path / "hal_test_broken.py").write_text("raise OSError('undefined symbol: _Z3foo')")
    monkeypatch.syspath_prepend(tmp_path)
    needs = Needs("hal_test_broken", "hal_test_broken", "f", install="reinstall it")
    c = examined(kernel(needs=(needs,)), packages={"hal_test_broken": Package("found", "1.0")})
    assert answers(only(c)) == (True, False, True, None)
    assert "undefined symbol" in only(c).imports.note
    assert c.packages["hal_test_broken"].state == "broken"


def test_two_kernels_of_one_package_answer_each_for_its_own_symbol(tmp_path, monkeypatch):
    (tmp_path / "hal_test_half.py").write_text("def old(): pass")
    monkeypatch.syspath_prepend(tmp_path)
    old, new = (Needs("hal_test_half", "hal_test_half", s) for s in ("old", "new"))
    c = examined(
        kernel("a", needs=(new,)), kernel("b", needs=(old,)), packages={"hal_test_half": Package("found", "1.0")}
    )
    assert [x.imports.ok for x in c.checks] == [False, True]


def test_a_row_for_other_chips_has_nothing_for_this_one():
    c = examined(kernel(), rows=(Row("k", {"x86-64-v4"}),))
    assert answers(only(c)) == (True, True, False, None)
    assert "arch is x86-64-v3; allowed: x86-64-v4" in only(c).supported.note


def test_a_kernel_that_takes_no_small_call_is_not_run_and_says_why():
    c = only(examined(kernel(limits={"head_dim": {72}})))
    assert answers(c) == (True, True, True, None)
    assert "head_dim is 128; allowed: 72" in c.right.note


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_first_dtype_that_is_served_is_run(dtype):
    c = only(examined(kernel(limits={"dtype": {dtype}})))
    assert c.right.ok
    assert f"dtype={dtype}" in c.call


def test_each_architecture_answers_for_itself():
    devices = (Device("x86-64-v3", 0), Device("x86-64-v4", 1), Device("x86-64-v3", 2))
    c = examined(kernel(), rows=(Row("k", {"x86-64-v3"}),), devices=devices)
    assert [(x.device, x.supported.ok) for x in c.checks] == [(0, True), (1, False)]
    assert [(d.arch, d.ok) for d in c.defaults] == [("x86-64-v3", True), ("x86-64-v4", False)]
    assert not c.ok


def test_broken_torch_leaves_the_rest_to_be_seen():
    c = examined(kernel(needs=(NEEDS,)), kernel("plain"), torch_state="broken")
    assert [answers(x) for x in c.checks] == [(False, None, True, None), (True, False, True, None)]
    assert not c.ok


def test_unreadable_devices_leave_the_packages_to_be_seen():
    c = examined(kernel(), known=False)
    assert answers(only(c)) == (True, True, None, None)
    assert not c.ok


@pytest.mark.parametrize(
    ("note", "fix"),
    [
        (
            "RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension auto-loading with "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0.",
            "set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or take the package away: pip uninstall torch-npu",
        ),
        ("OSError: libcudart.so.13: cannot open shared object file", "install PyTorch again for this machine"),
    ],
)
def test_broken_torch_has_its_fix(note, fix):
    assert torch_fix(Package("broken", "2.13.0", note)).startswith(fix)


@pytest.mark.parametrize(
    "c",
    [examined(kernel("bad", broken_in_run), kernel(needs=(NEEDS,))), Checkup(Package("absent"), error="two platforms")],
)
def test_any_checkup_prints_and_is_json(capsys, c):
    show(Screen(), c)
    assert "FAIL" in capsys.readouterr().out
    json.loads(json.dumps(c.to_json(), allow_nan=False))


def test_the_doctor_of_this_cpu_passes(process):
    ran = process("doctor", "--json", HAL_PLATFORM="cpu")
    assert ran.code == 0, ran.err
    assert ran.json["ok"]
    assert ran.json["platform"] == "cpu"
    assert {d["platform"] for d in ran.json["detections"]} >= {"cpu", "cuda", "rocm", "xpu", "musa", "mps", "npu"}
    assert all(d["found"] for d in ran.json["detections"])
    (default,) = ran.json["defaults"]
    assert default["backend"] == "torch_sdpa"


def test_an_unknown_platform_in_the_environment_is_told(process):
    ran = process("doctor", HAL_PLATFORM="cpuu")
    assert ran.code == 1
    assert "did you mean 'cpu'?" in ran.out
    assert "Packages" in ran.out


def test_an_unknown_variable_is_an_error_and_the_doctor_still_works(process):
    said = "unknown environment variable 'HAL_PLATFROM'; did you mean 'HAL_PLATFORM'?"
    ran = process("doctor", HAL_PLATFROM="cpu")
    assert ran.code == 1 and said in ran.out and "Packages" in ran.out and "FAIL" in ran.out
    for command in (("explain",), ("explain", "--on", "h100")):
        ran = process(*command, HAL_PLATFROM="cpu")
        assert ran.code == 2 and ran.err.startswith(f"hal: {said}") and not ran.out


@pytest.mark.slow
def test_the_doctor_works_where_the_real_torch_npu_makes_import_torch_raise(process, tmp_path):
    """No driver is here, so the wheel's autoload fails, and with it every import of torch in the environment."""
    import subprocess

    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        "torch-npu==2.13.0",
    ]
    subprocess.run(install, check=True, timeout=600)
    assert process(code="import torch", PYTHONPATH=str(tmp_path)).code != 0
    found = process("doctor", "--json", PYTHONPATH=str(tmp_path)).json
    ran = process("doctor", PYTHONPATH=str(tmp_path))
    assert ran.code == 1
    assert "Traceback" not in ran.out + ran.err
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in ran.out
    assert "pip uninstall torch-npu" in ran.out
    assert found["torch"]["state"] == "broken"
    assert "torch_npu" in found["torch"]["note"]
    assert found["platform"] == "cpu"
    assert found["machine"]["devices"]
    assert found["packages"]
    assert {c["backend"] for c in found["checks"]} >= {"torch_sdpa"}
    healed = process("doctor", PYTHONPATH=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert healed.code == 0, healed.out


def test_what_needs_more_than_a_small_call_is_not_tried_and_is_not_called_wrong():
    def needy(q, k, v, m, varlen):
        raise CallError("it needs the grid")

    c = only(examined(kernel(run=needy)))
    assert answers(c) == (True, True, True, None) and c.right.note == "not tried: CallError: it needs the grid"
