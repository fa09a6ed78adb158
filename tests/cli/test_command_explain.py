"""hal explain: what --on, --with, --call and the requests mean, and the JSON that comes out."""

from __future__ import annotations

import json

import jsonschema
import pytest

from hal import plugins, schemas

SCHEMA = schemas.explanation()
KEYS = [
    "platform",
    "device",
    "backend",
    "kernel",
    "quality",
    "source",
    "fittings",
    "warnings",
    "candidates",
    "advice",
    "error",
]
PRESETS = sorted(plugins.catalog().presets)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_explains_a_typical_call_by_the_published_schema(hal, preset):
    ran = hal("explain", "--on", preset, "--json")
    assert ran.code == 0
    jsonschema.validate(ran.json, SCHEMA)
    assert ran.json["backend"]
    assert ran.json["error"] is None
    assert [c for c in ran.json["candidates"] if c["accepted"]]


CALLS = [
    "head_dim=?",
    "mask=bool,dtype=fp32",
    "causal=true,kv_len=77",
    "varlen=true",
    "ring=2",
    "grad=true,kv_heads=8,dropout=0.1",
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("preset", PRESETS[::4])
def test_any_call_explains_by_the_published_schema(hal, preset, call):
    ran = hal("explain", "--on", preset, "--call", call, "--json")
    jsonschema.validate(ran.json, SCHEMA)
    assert ran.code == (0 if ran.json["backend"] else 2)


@pytest.mark.parametrize(
    "asked", [(), ("--attention-backend", "torch_sdpa"), ("--backend", "fa"), ("--kernel", "sta.portable")]
)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_candidate_is_chosen_or_has_a_reason(hal, preset, asked):
    told = hal("explain", "--on", preset, *asked, "--json").json
    for c in told["candidates"]:
        chosen = (c["backend"], c["kernel"]) == (told["backend"], told["kernel"])
        assert chosen or c["reasons"] or c["passed_over"], c
        assert not (c["passed_over"] and c["verdict"] != "yes"), c


@pytest.mark.parametrize(
    "asked, kernel, why",
    [
        ((), "sdpa.math", "behind torch_sdpa/sdpa.flash in the order of cuda"),
        ((), "sdpa.cudnn", "its place in the order of cuda is for other calls: arch is sm90; allowed: sm100"),
        ((), "vsa.portable", "lossy, so only where it is named"),
        (("--backend", "torch_sdpa"), "vsa.portable", "torch_sdpa is asked for"),
        (("--backend", "torch_sdpa"), "sdpa.math", "behind torch_sdpa/sdpa.flash"),
    ],
)
def test_why_a_row_that_fits_is_not_chosen(hal, asked, kernel, why):
    options = ("explain", "--on", "h100", *asked)
    found = {c["kernel"]: c["passed_over"] for c in hal(*options, "--json").json["candidates"]}
    assert found[kernel] == why
    assert why in " ".join(hal(*options).out.split()) and why in hal(*options, "--tree").out


def test_the_json_has_the_agreed_keys(hal):
    found = hal("explain", "--on", "x86", "--call", "v_head_dim=64", "--json").json
    assert set(KEYS) <= set(found)
    assert found["device"]["arch"] == "x86-64-v3"
    refused = next(c for c in found["candidates"] if not c["accepted"] and c["kernel"])
    assert {"backend", "kernel", "accepted", "reasons"} <= set(refused)
    assert {"id", "observed", "allowed", "message", "fix", "citation"} <= set(refused["reasons"][0])


def test_what_is_left_open_is_typical_and_said(hal):
    found = hal("explain", "--on", "x86", "--call", "head-dim=64", "--call", "q_len=77", "--json").json
    assert {k: found["call"][k] for k in ("dtype", "head_dim", "heads", "batch", "q_len")} == {
        "dtype": "bfloat16", "head_dim": 64, "heads": 24, "batch": 1, "q_len": 77,
    }  # fmt: skip
    assert found["assumed"] == ["dtype", "heads", "batch"]
    assert "assumed: dtype, heads, batch" in hal("explain", "--on", "x86", "--call", "head_dim=64,q_len=77").out


def test_a_device_without_bfloat16_is_asked_for_float32(hal, tmp_path):
    facts = {"platform": "cpu", "devices": [{"arch": "armv8", "dtypes": ["float32", "float16"]}]}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(facts))
    assert hal("explain", "--on", str(path), "--json").json["call"]["dtype"] == "float32"


def test_a_refused_request_prints_its_json_and_exits_with_2(hal):
    ran = hal("explain", "--on", "x86", "--backend", "torch_cudnn_sdpa", "--json")
    assert ran.code == 2
    jsonschema.validate(ran.json, SCHEMA)
    assert ran.json["backend"] is None
    assert "--backend torch_cudnn_sdpa" in ran.json["error"]
    assert "torch_sdpa" in " ".join(ran.json["advice"])


def test_a_refused_request_is_said_to_people(hal):
    ran = hal("explain", "--on", "x86", "--backend", "cudnn")
    assert ran.code == 2
    assert "refused" in ran.out
    assert "cudnn" in ran.out


def test_a_request_names_who_asked(hal):
    found = hal("explain", "--on", "x86", "--kernel", "sdpa.math", "--json").json
    assert (found["backend"], found["kernel"], found["source"]) == ("torch_sdpa", "sdpa.math", "--kernel sdpa.math")


@pytest.mark.parametrize("name", ["flash-attn-3", "flash_attn_3", "FLASH.ATTN.3", "flash_attn_interface"])
def test_with_takes_any_spelling_of_a_package_and_the_choice_follows(hal, name):
    without = hal("explain", "--on", "h100", "--call", "causal=true", "--json").json
    found = hal("explain", "--on", "h100", "--call", "causal=true", "--with", f"{name}==3.0.0", "--json").json
    assert without["backend"] == "torch_sdpa"
    assert (found["backend"], found["kernel"]) == ("fa", "fa3")


def test_without_takes_away_what_a_preset_has(hal):
    assert hal("explain", "--on", "910b", "--call", "ring=2", "--json").json["backend"] == "fa"
    found = hal("explain", "--on", "910b", "--call", "ring=2", "--without", "torch-npu", "--json").json
    assert found["backend"] == "torch_sdpa"
    assert any("torch_npu" in a for a in found["advice"])


def test_with_sets_torch_cudnn_and_triton(hal):
    """Field case B4: cuDNN 9.19 with few key heads on B200."""
    call = ("--call", "heads=4", "--backend", "torch_cudnn_sdpa", "--json")
    assert hal("explain", "--on", "b200", "--with", "torch==2.12,cudnn==9.19", *call).code == 2
    assert hal("explain", "--on", "b200", "--with", "torch==2.14.0,cudnn==9.24", *call).code == 0
    assert hal("facts", "--on", "b200", "--with", "triton==3.7.0", "--json").json["software"]["triton"] == "3.7.0"


def test_a_waiver_of_a_known_defect_lets_a_request_pass(hal):
    """Golden case 2."""
    asked = (
        "explain",
        "--on",
        "b200",
        "--with",
        "torch==2.12,cudnn==9.19",
        "--call",
        "heads=4",
        "--backend",
        "cudnn",
        "--json",
    )
    refused = hal(*asked)
    (reason,) = [r for c in refused.json["candidates"] if c["backend"] == "torch_cudnn_sdpa" for r in c["reasons"]]
    assert reason["citation"]
    assert hal(*asked, "--waive", reason["waiver"]).code == 0


def test_fit_lets_hal_pad_the_head_dim(hal):
    asked = (
        "explain",
        "--on",
        "a100",
        "--with",
        "flash-attn==2.8.3",
        "--backend",
        "fa2",
        "--call",
        "head_dim=72",
        "--json",
    )
    assert hal(*asked).code == 2
    assert hal(*asked, "--fit", "pad_head_dim").json["fittings"] == ["pad_head_dim"]


@pytest.mark.parametrize(
    ("request_", "said"), [(("--kernel", "fa4"), "rocm has no row"), (("--backend", "cudnn"), "platform is rocm")]
)
def test_what_a_platform_has_no_row_for_is_refused_with_that_reason(hal, request_, said):
    assert said in hal("explain", "--on", "mi300x", *request_).out
    assert said in hal("explain", "--on", "mi300x", *request_, "--json").json["error"]


def test_each_device_of_a_machine_is_explained_by_itself(hal, tmp_path):
    """Golden case 27."""
    path = tmp_path / "two.json"
    path.write_text(json.dumps({"platform": "cuda", "devices": [{"arch": "7.0"}, {"arch": "sm_86"}]}))
    kernels = [hal("explain", "--on", str(path), "--call", f"device={i}", "--json").json for i in (0, 1)]
    assert [k["device"]["arch"] for k in kernels] == ["sm70", "sm86"]
    assert kernels[0]["kernel"] != kernels[1]["kernel"]


def test_waive_lets_a_request_pass_a_budget(hal):
    asked = ("explain", "--on", "x86", "--kernel", "sdpa.math", "--call", "q_len=65536", "--json")
    assert hal(*asked).code == 2
    assert hal(*asked, "--waive", "memory.math").code == 0


def test_facts_of_another_machine_are_explained_here(hal, tmp_path):
    """Field case A34: facts of the worker, decided elsewhere."""
    path = tmp_path / "worker.json"
    path.write_text(hal("facts", "--on", "arm", "--json").out)
    ran = hal("explain", "--on", str(path), "--json")
    assert ran.json["device"]["arch"] == "armv8.2"
    assert ran.json["origin"] == f"file {path}"


def test_this_machine_is_explained_without_on(process):
    found = process("explain", "--json", HAL_PLATFORM="cpu").json
    assert (found["platform"], found["origin"], found["backend"]) == ("cpu", "detected", "torch_sdpa")


def test_tree(hal):
    ran = hal("explain", "--on", "x86", "--tree")
    assert "torch_sdpa by sdpa.cpu" in ran.out
    assert "candidates" in ran.out


def test_the_schema_is_published(hal):
    found = hal("explain", "--schema").json
    jsonschema.Draft202012Validator.check_schema(found)
    assert found == SCHEMA


def test_people_see_choice_candidates_and_advice(hal):
    out = hal("explain", "--on", "x86", "--call", "v_head_dim=64").out
    assert "torch_sdpa by sdpa.math" in out
    assert "chosen" in out
    assert "v_head_dim is 64; allowed: the same as head_dim" in out


def test_the_help_lists_every_call_key(hal):
    from hal.facts.call import CONTIGUOUS, KEYS

    listed = hal("explain", "--help").out.partition("Call keys:")[2].partition(".")[0].split()
    assert sorted(listed) == sorted(set(KEYS) - set(CONTIGUOUS))  # contiguous stands for the three of them


PLACED = [
    # the options; role and layer of the call
    ("--component transformer.cross", "cross", None),
    ("--component transformer.cross@3-5", "cross", 3),
    ("--component transformer@3-5 --call layer=4", None, 4),
    ("--component transformer.cross --role cross", "cross", None),
    ("--component transformer.self@2 --call role=self,layer=2", "self", 2),
]


@pytest.mark.parametrize("options, role, layer", PLACED)
def test_a_component_says_role_and_layer_too(hal, options, role, layer):
    own = ["--component-attention-backends", "transformer.cross=torch_cudnn_sdpa"]
    found = hal("explain", "--on", "h100", *options.split(), *own, "--json").json
    assert found["call"]["layer"] == layer
    assert found["call"]["role"] == role or role is None
    assert (found["backend"] == "torch_cudnn_sdpa") == (role == "cross")


@pytest.mark.parametrize(
    "options, other",
    [
        ("transformer.cross --role self", "--role self"),
        ("transformer.cross --call role=self", "--call role=self"),
        ("transformer@0-2 --call layer=3", "--call layer=3"),
    ],
)
def test_a_component_and_a_call_must_not_contradict_each_other(hal, options, other):
    ran = hal("explain", "--on", "h100", "--component", *options.split())
    assert ran.code == 2
    assert ran.err == f"hal: --component {options.split()[0]} and {other} contradict each other; drop one of them\n"


@pytest.mark.parametrize(
    "name, near", [("tranformer", "transformer"), ("transformer2", "transformer"), ("unett", "unet")]
)
def test_a_name_that_only_looks_like_a_usual_component_is_an_error(hal, name, near):
    ran = hal("explain", "--on", "h100", "--component", name)
    assert ran.code == 2 and f"--component {name}: unknown component" in ran.err and f"did you mean '{near}" in ran.err


@pytest.mark.parametrize("name", ["transformer", "transformer_2", "unet", "text_encoder", "vae", "controlnet"])
def test_a_known_name_is_not_noted(hal, name):
    assert "note" not in hal("explain", "--on", "h100", "--component", name).err
