"""hal diff: how the two sides are written, what is printed, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hal import plugins, schemas
from hal.difference import CALLS
from hal.facts import Call
from hal.plan import FORMAT
from hal.resolver import resolve

CATALOG = plugins.catalog()
SCHEMA = schemas.difference()


@pytest.fixture
def facts(hal: Any, tmp_path: Path) -> str:
    path = tmp_path / "worker, second.json"
    path.write_text(hal("facts", "--on", "h100", "--with", "flash-attn==2.8.3", "--json").out)
    return str(path)


@pytest.fixture
def plan(tmp_path: Path) -> str:
    machine = CATALOG.machine("h100").with_packages({"flash_attn_3": "3.0.0"})
    entries = []
    for layer in range(40):
        call = Call.of({**CALLS["self-attention of a video"], "layer": layer})
        d = resolve(call, machine, CATALOG)
        entries.append(
            {
                "component": "transformer",
                "role": "self",
                "layer": layer,
                "call": call.to_json(),
                "backend": d.backend,
                "kernel": d.kernel,
            }
        )
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"hal": "0.1.0", "format": FORMAT, "machine": machine.to_json(), "entries": entries}))
    return str(path)


@pytest.mark.parametrize("preset", ["h100", "mi300x", "x86", "910b"])
def test_no_difference_is_exit_code_0(hal: Any, preset: str) -> None:
    ran = hal("diff", preset, preset)
    assert ran.code == 0
    assert f"no difference  all {len(CALLS)} calls are decided alike" in ran.out
    assert "Facts that differ" not in ran.out


def test_a_difference_is_exit_code_1_and_shows_kernels_and_reasons(hal: Any) -> None:
    ran = hal("diff", "h100", "b200")
    assert ran.code == 1
    for text in (
        "torch_sdpa by sdpa.flash",
        "torch_cudnn_sdpa by sdpa.cudnn",
        "torch_cudnn_sdpa/sdpa.cudnn on A",
        "sm100",
        "180.0 GiB",
    ):
        assert text in ran.out


def test_the_json_is_by_the_published_schema(hal: Any) -> None:
    assert hal("diff", "--schema").json == json.loads(json.dumps(SCHEMA))
    for sides in (("h100", "b200"), ("h100", "mi300x"), ("x86", "x86")):
        ran = hal("diff", *sides, "--json")
        jsonschema.validate(ran.json, SCHEMA)
        assert ran.code == (1 if ran.json["calls"] else 0)
    assert (ran.json["facts"], ran.json["calls"], ran.json["compared"]) == ([], [], len(CALLS))


def test_changes_follow_after_commas(hal: Any) -> None:
    found = hal("diff", "h100,torch==2.12.1,flash-attn-3==3.0.0+cu130", "h100", "--json").json
    assert {f["fact"]: (f["a"], f["b"]) for f in found["facts"]} == {
        "torch": ("2.12.1", "2.13.0"),
        "pkg.flash_attn_3": ("3.0.0+cu130", "absent"),
    }
    reasons = {r["message"] for c in found["calls"] for w in c["why"] if w["on"] == "b" for r in w["reasons"]}
    assert reasons == {"flash_attn_3 is absent"}


def test_a_package_is_taken_away_by_a_dash(hal: Any) -> None:
    ran = hal("diff", "910b", "910b,-torch-npu")
    assert ran.code == 1
    assert "torch_npu is absent" in ran.out
    assert "fix: pip install torch-npu" in ran.out


def test_presets_with_dashes_and_platform_and_arch_are_machines(hal: Any) -> None:
    assert hal("diff", "strix-halo", "Strix-Halo").code == 0
    found = hal("diff", "cuda:9.0", "h100", "--json").json
    assert (found["a"]["arch"], found["b"]["arch"]) == ("sm90", "sm90")


def test_a_facts_file_is_a_machine_even_with_a_comma_in_its_name(hal: Any, facts: str) -> None:
    assert hal("diff", facts, facts).code == 0
    found = hal("diff", facts, "h100", "--json").json
    assert [f["fact"] for f in found["facts"]] == ["pkg.flash_attn"]
    assert found["a"]["origin"] == f"file {facts}"


def test_own_calls_are_compared_in_place_of_the_typical_ones(hal: Any) -> None:
    found = hal(
        "diff", "a100,flash-attn==2.8.3", "a100", "--call", "head_dim=64", "--call", "mask=bool, kv-len=77", "--json"
    ).json
    assert found["compared"] == 2
    assert [c["name"] for c in found["calls"]] == ["head_dim=64"]
    assert found["calls"][0]["call"]["q_len"] == 4096


def test_a_plan_is_compared_with_a_machine_on_its_own_calls(hal: Any, plan: str) -> None:
    assert hal("diff", plan, "h100,flash-attn-3==3.0.0").code == 0
    assert hal("diff", plan, plan).code == 0
    ran = hal("diff", "a100", plan)
    assert ran.code == 1
    assert "decided otherwise (40 of 40)" in ran.out
    assert "transformer.self@6\n" in ran.out
    assert "and 33 more" in ran.out
    assert ran.out.count("fa/fa3 on A") == 1, "what is alike is told once"
    jsonschema.validate(hal("diff", plan, "a100", "--json").json, SCHEMA)


def test_a_layer_that_one_plan_lacks_is_told(hal: Any, plan: str, tmp_path: Path) -> None:
    data = json.loads(Path(plan).read_text())
    data["entries"].pop()
    (tmp_path / "shorter.json").write_text(json.dumps(data))
    ran = hal("diff", plan, str(tmp_path / "shorter.json"))
    assert ran.code == 1
    assert "only A has this call" in ran.out


ERRORS = [
    (("h100",), "two sides are compared, one is given"),
    ((), "two sides are compared, none is given"),
    (("h100", "h1000"), "unknown machine 'h1000'; did you mean 'h100'?"),
    (("a" * 5000, "h100"), "unknown machine 'aaaa"),
    (("h100", "h100,torch"), "'torch' in 'h100,torch' is no change to a machine"),
    (("h100", "h100,-"), "'-' in 'h100,-' is no change to a machine"),
    (("h100", "h100,-torch==2.10"), "'-torch==2.10' in 'h100,-torch==2.10' is no change"),
    (("h100+torch==2.10", "h100"), "changes follow the machine after commas; write, say, h100,torch==2.10"),
    (("h100", "h100,torch==new"), "'new' is no PEP 440 version"),
    (("h100", "h100,flash-atn==2.8.3"), "unknown package 'flash_atn'; did you mean 'flash_attn'?"),
    (("h100", "h100,flash-attn==2.8.3,-flash_attn"), "both name flash_attn"),
    (("h100", "no/such/plan.json"), "cannot be read"),
    (("h100", "b200", "--call", "haed_dim=64"), "unknown call key 'haed_dim'; did you mean 'head_dim'?"),
    (("h100", "b200", "--call", "device=3"), "device 3 was asked for"),
]


@pytest.mark.parametrize(("args", "said"), ERRORS)
def test_bad_input_is_exit_code_2_with_the_offending_text(hal: Any, args: tuple[str, ...], said: str) -> None:
    ran = hal("diff", *args)
    assert ran.code == 2
    assert said in ran.err
    assert ran.out == ""


def test_a_plan_takes_no_changes_and_no_other_calls(hal: Any, plan: str) -> None:
    for args, said in (
        ((f"{plan},torch==2.10", "h100"), "is a plan, and 'torch==2.10' a change to a machine"),
        ((plan, "h100", "--call", "head_dim=64"), "a plan has its own calls"),
    ):
        ran = hal("diff", *args)
        assert ran.code == 2
        assert said in ran.err


def test_a_malformed_plan_is_exit_code_2(hal: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "hal-plan-7"}))
    ran = hal("diff", str(path), "h100")
    assert ran.code == 2
    assert "this hal reads 'hal-plan-1'" in ran.err
