"""A plan of a pipeline: made here for any machine, whatever is said around; read back; and a run kept to it."""

from __future__ import annotations

import json
import threading

import pytest
import torch

import hal
from hal import plugins
from hal.errors import AttachError, PolicyError
from hal.integrations.generation import generate
from hal.integrations.locking import lock
from hal.plan import read_plan
from hal.testing import tiny

SIZE = {"num_frames": 5, "height": 32, "width": 32}
RUN = {"frames": 5, "height": 32, "width": 32, "steps": 1}
PLACES = {("transformer", "self"), ("transformer", "cross"), ("text_encoder", "self"), ("vae", "self")}


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    tiny.wan().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def here(wan):
    """A plan of this machine, as Python has it."""
    return lock(wan, prompt="a cat", **SIZE)


def saved(plan, path):
    path.write_text(json.dumps(plan.to_json()))
    return str(path)


@pytest.fixture
def h100():
    catalog = plugins.catalog(frozenset())
    return catalog.changed(catalog.machine("h100"), {"flash_attn_3": "3.0.0"}, {})


def chosen(plan):
    return {(e.component, e.role): (e.backend, e.source) for e in plan.entries}


# ---- locking


def test_a_plan_has_every_layer_for_itself(here):
    assert {(e.component, e.role) for e in here.entries} == PLACES
    assert {e.layer for e in here.entries if e.component == "transformer"} == {0, 1}
    assert all(e.kernel == "sdpa.cpu" and e.source == "automatic" for e in here.entries if e.component != "vae")


def test_a_plan_reads_back_as_it_was_made(here, tmp_path):
    again = read_plan(saved(here, tmp_path / "p.json"))
    assert again.entries == here.entries and again.policy == here.policy


def test_a_plan_for_another_machine_has_its_choice(wan, h100):
    plan = lock(wan, h100, prompt="a cat", dtype="bf16", **SIZE)
    assert plan.machine.platform == "cuda" and {(e.component, e.role) for e in plan.entries} == PLACES
    assert {e.call.dtype for e in plan.entries} == {"bfloat16"}
    assert all(e.backend for e in plan.entries)


SAYINGS = [
    # the environment, the words, a settings file; who decides in the denoiser on an H100
    ({"HAL_ATTENTION_BACKEND": "torch_cudnn_sdpa"}, {}, None, "HAL_ATTENTION_BACKEND=torch_cudnn_sdpa"),
    ({"HAL_ATTENTION_BACKEND": "fa"}, {"attention_backend": "torch_cudnn_sdpa"}, None, "attention_backend="),
    ({}, {}, "attention_backend: torch_cudnn_sdpa\n", "file.yaml, line 1, attention_backend: torch_cudnn_sdpa"),
    (
        {"HAL_ATTENTION_BACKEND": "torch_cudnn_sdpa"},
        {},
        "attention_backend: fa\n",
        "HAL_ATTENTION_BACKEND=torch_cudnn_sdpa",
    ),
]


@pytest.mark.parametrize("env, words, file, source", SAYINGS)
def test_what_is_said_is_for_the_target_and_stops_no_run_here(
    wan, h100, tmp_path, monkeypatch, env, words, file, source
):
    """This machine has no cuDNN; nor does an outer scope count while the calls are learnt."""
    monkeypatch.chdir(tmp_path)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    if file:
        (tmp_path / "file.yaml").write_text(file)
    with hal.force("torch_cudnn_sdpa"):
        plan = lock(wan, h100, words=words, config="file.yaml" if file else None, prompt="a cat", dtype="bf16", **SIZE)
    got = chosen(plan)
    assert got["text_encoder", "self"][0] == "torch_cudnn_sdpa" and got["text_encoder", "self"][1].startswith(source)
    backend, by = got["transformer", "self"]
    assert backend is None and by.startswith(source), "its head_dim of 12 is refused there, and that is in the plan"
    said = [x["attention_backend"] for x in plan.policy.values() if isinstance(x, dict)]
    assert said[0] == "torch_cudnn_sdpa", "in the order in which it counts"


def test_only_the_pipelines_own_calls_are_in_it(wan, here):
    """Another thread attends all the while; hooks see it, the plan does not."""
    stop, q = threading.Event(), torch.zeros(1, 3, 1, 8)

    def attend():
        while not stop.wait(0.002):
            hal.forget()
            hal.attention(q, q, q)

    other = threading.Thread(target=attend)
    other.start()
    try:
        plan = lock(wan, prompt="a cat", **SIZE)
    finally:
        stop.set()
        other.join()
    assert set(plan.entries) == set(here.entries)


@pytest.mark.parametrize(
    "more, error, said",
    [
        ({"heigth": 8}, AttachError, "WanPipeline takes no heigth"),
        ({"height": 33}, AttachError, "failed in the one step .*divisible"),
        ({"words": {"attention_backend": "fa9"}}, PolicyError, "unknown attention backend 'fa9'"),
        ({"words": {"component_attention_backends": "vea=fa"}}, PolicyError, "did you mean 'vae'"),
        ({"config": "none.yaml"}, PolicyError, "'none.yaml' cannot be read"),
    ],
    ids=str,
)
def test_a_mistake_is_told(wan, more, error, said):
    with pytest.raises(error, match=said):
        lock(wan, **{**SIZE, **more})


# ---- running by it


def test_a_run_by_the_plan_is_the_run_without_it(wan, here, tmp_path):
    plain = generate(wan, "a cat", out=tmp_path / "plain.png", **RUN)
    kept = generate(wan, "a cat", out=tmp_path / "kept.png", plan=saved(here, tmp_path / "p.json"), **RUN)
    assert kept.out.read_bytes() == plain.out.read_bytes()
    assert {(r.component, r.role) for r in kept.receipts} == PLACES


def test_the_plan_needs_neither_file_nor_environment_and_says_who_asked(wan, tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text(
        "component_attention_backends: {text_encoder: fa}\nattention_fallback: declared\nwaive: [memory.math]\n"
    )
    monkeypatch.setenv("HAL_ATTENTION_BACKEND", "torch_sdpa")
    made = lock(wan, config=str(tmp_path / "s.yaml"), words={"kernel": "sdpa.math"}, prompt="a cat", **SIZE)
    file = saved(made, tmp_path / "p.json")
    monkeypatch.delenv("HAL_ATTENTION_BACKEND")
    (tmp_path / "s.yaml").unlink()
    done = generate(wan, "a cat", out=tmp_path / "cat.png", plan=file, **RUN)
    ran = {(r.component, r.role): (r.kernel, r.source) for r in done.receipts}
    assert ran["transformer", "self"] == ("sdpa.math", f"plan {file}, kernel: sdpa.math")
    assert ran["text_encoder", "self"] == ("sdpa.cpu", f"plan {file}, component_attention_backends: text_encoder=fa")


REFUSED = [
    ({"height": 64}, "transformer.self@0 has no such call: .*q_len is"),
    ({"frames": 9}, "has no such call: .*q_len is"),
    ({"dtype": "bfloat16"}, "has no such call: dtype is bfloat16, planned float32"),
    ({"attention_backend": "torch_sdpa"}, "and attention_backend='torch_sdpa' exclude each other: the plan says"),
    ({"config": "x.yaml"}, "and config='x.yaml' exclude each other: the plan says"),
    ({"attention_backend_override": "torch_sdpa"}, "and attention_backend_override='torch_sdpa' exclude each other"),
    ({"compile": True}, "and compile=True exclude each other"),
    ({"cuda_graph": True}, "and cuda_graph=True exclude each other"),
]


@pytest.mark.parametrize("more, said", REFUSED, ids=lambda x: str(x)[:40])
def test_what_the_plan_does_not_have_is_refused_and_nothing_is_saved(wan, here, tmp_path, more, said):
    file = saved(here, tmp_path / "p.json")
    with pytest.raises(PolicyError, match=said):
        generate(wan, "a cat", out=tmp_path / "no.png", plan=file, **{**RUN, **more})
    assert not (tmp_path / "no.png").exists()


def test_another_choice_around_the_run_is_refused(wan, here, tmp_path):
    file = saved(here, tmp_path / "p.json")
    said = r"p.json: .* shall run torch_sdpa by sdpa.cpu, and here it would be torch_sdpa by sdpa.math \(because hal"
    with hal.force("torch_sdpa", kernel="sdpa.math"), pytest.raises(PolicyError, match=said):
        generate(wan, "a cat", out=tmp_path / "no.png", plan=file, **RUN)
    assert not (tmp_path / "no.png").exists()


# ---- a file that somebody wrote

WRITTEN = [
    ({"words": {"attention_bakend": "fa"}}, "policy.words: unknown key 'attention_bakend'; did you mean"),
    ({"words": ["fa"]}, "policy: words is \\['fa'\\]; it must be an object"),
    ({"words": {"attention_backend": 3}}, "policy.words: attention_backend is 3; it must be text"),
    ({"words": {"waive": [3]}}, "waive is \\[3\\]; it must be text, or a list of text"),
    ({"config": {"forbid": {"vae": 1}}}, "policy.config: forbid is"),
    ({"config": {"attention_backend_config": 0.5}}, "it must be text, or an object"),
    ({"environment": {"kernel": None}}, "policy.environment: kernel is None; it must be text"),
    ({"wrods": {}}, "policy: unknown key 'wrods'; did you mean 'words'"),
    ({"dtype": 16}, "policy: dtype is 16; it must be text or null"),
]


@pytest.mark.parametrize("policy, said", WRITTEN, ids=lambda x: str(x)[:40])
def test_a_policy_that_is_no_policy_is_told_by_its_place(here, tmp_path, policy, said):
    (tmp_path / "p.json").write_text(json.dumps({**here.to_json(), "policy": policy}))
    with pytest.raises(PolicyError, match=said):
        read_plan(tmp_path / "p.json")


@pytest.mark.parametrize(
    "words, said",
    [
        ({"attention_backend": "fa9"}, "p.json, attention_backend: fa9: unknown attention backend 'fa9'"),
        ({"attention_backend_config": {"topk": 0.5}}, "p.json, attention_backend_config.*'topk' is for no backend"),
        ({"component_attention_backends": {"vea": "fa"}}, "p.json, component_attention_backends: vea=fa: unknown"),
    ],
    ids=str,
)
def test_a_wrong_value_is_told_as_the_plans(wan, here, tmp_path, words, said):
    (tmp_path / "p.json").write_text(json.dumps({**here.to_json(), "policy": {"words": words}}))
    with pytest.raises(PolicyError, match=said):
        generate(wan, "a cat", out=tmp_path / "no.png", plan=str(tmp_path / "p.json"), **RUN)
