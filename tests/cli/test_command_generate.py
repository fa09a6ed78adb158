"""hal generate as people type it: the examples of the document, the receipt, and what every mistake says."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from hal.integrations import generation
from hal.testing import tiny

SIZES = {
    "flux": "--height 8 --width 8 --steps 1",
    "ltx": "--height 32 --width 32 --num-frames 9 --steps 1",
    "sd3": "--height 32 --width 32 --steps 1",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipelines")
    for name in SIZES:
        tiny.PIPELINES[name]().save_pretrained(root / name)
    return root


@pytest.fixture
def run(hal, folders, tmp_path, monkeypatch):
    """run("ltx", "--save-output …"): in a new folder, with the sizes that suit the tiny pipeline."""
    monkeypatch.chdir(tmp_path)

    def call(name, options, **env):
        path = f"--model-path {folders / name} {SIZES.get(name, '')}".split()
        return hal("generate", *path, "--prompt", "A cat walking", *options.split(), **env)

    return call


def receipt(out):
    """component.role -> (backend / kernel, who asked), of the table that is printed."""
    lines = out.splitlines()
    head = next(line for line in lines if line.lstrip().startswith("component"))
    at = [head.index(c) for c in ("component", "role", "backend", "runs", "asked", "notes") if c in head]
    rows = [[line[a:b].strip() for a, b in zip(at, [*at[1:], None])] for line in lines[lines.index(head) + 1 :]]
    return {f"{r[0]}.{r[1]}": (r[2], r[4]) for r in rows if r[1] in ("self", "cross") and int(r[3]) > 0}


SDPA = "torch_sdpa / sdpa.cpu"
GLOBAL = (SDPA, "--attention-backend torch_sdpa")
OWN = "--component-attention-backends"
RUNS = [
    # the options; what the receipt says of some components
    ("", {"transformer.self": (SDPA, "automatic"), "transformer.cross": (SDPA, "automatic")}),
    ("--backend auto --ring-degree 1 --ulysses_degree 1", {"transformer.self": (SDPA, "automatic")}),
    ("--attention-backend torch_sdpa", {"transformer.self": GLOBAL, "text_encoder.self": GLOBAL}),
    ("--attention_backend=torch_sdpa --backend hal", {"transformer.self": GLOBAL}),
    (
        f"--attention-backend torch_sdpa {OWN} text_encoder=torch_sdpa",
        {"transformer.self": GLOBAL, "text_encoder.self": (SDPA, f"{OWN} text_encoder=torch_sdpa")},
    ),
    (
        f"{OWN} text_encoder=torch_sdpa,transformer=torch_sdpa",
        {"transformer.cross": (SDPA, f"{OWN} transformer=torch_sdpa"), "text_encoder.self": (SDPA, f"{OWN} text_encoder=torch_sdpa")},
    ),
    (f"{OWN}.text_encoder torch_sdpa", {"text_encoder.self": (SDPA, f"{OWN} text_encoder=torch_sdpa")}),
    (
        "--component_attention_backends.transformer.cross=torch_sdpa",
        {"transformer.cross": (SDPA, f"{OWN} transformer.cross=torch_sdpa"), "transformer.self": (SDPA, "automatic")},
    ),
    (
        "--attention-backend-override torch_sdpa --attention-backend torch_sdpa",
        {"transformer.self": (SDPA, "--attention-backend-override torch_sdpa"), "text_encoder.self": GLOBAL},
    ),
    (
        f"--attention-backend fa3 --attention-fallback declared {OWN} text_encoder=torch_sdpa",
        {"transformer.self": (SDPA, "--attention-backend fa3"), "text_encoder.self": (SDPA, f"{OWN} text_encoder=torch_sdpa")},
    ),
    ("--kernel sdpa.math", {"transformer.self": ("torch_sdpa / sdpa.math", "--kernel sdpa.math")}),
    ("--forbid vae=torch_cudnn_sdpa --waive memory.math", {"transformer.self": (SDPA, "automatic")}),
]  # fmt: skip


@pytest.mark.parametrize("options, told", RUNS, ids=[o or "nothing said" for o, _ in RUNS])
def test_what_is_said_shows_in_the_receipt(run, tmp_path, options, told):
    ran = run("ltx", f"--out cat.gif {options}")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("cat.gif  9 frames in ")
    got = receipt(ran.out)
    assert {k: got[k] for k in told} == told
    assert ("policy.fallback" in ran.out) == ("declared" in options)
    assert [p.name for p in tmp_path.iterdir()] == ["cat.gif"]


@pytest.mark.parametrize("name, file", [("flux", "a-cat-walking-3.png"), ("ltx", "a-cat-walking-3.mp4")])
def test_save_output_makes_a_new_name_of_the_pipelines_kind(run, tmp_path, name, file):
    assert run(name, "--save-output --seed 3").out.startswith(f"outputs/{file}")
    assert run(name, "--save_output --seed 3").out.startswith(f"outputs/{file.replace('-3.', '-3-2.')}")
    assert len(list((tmp_path / "outputs").iterdir())) == 2


REFUSED = [
    # the examples whose backends this machine cannot have
    ("--attention-backend fa", "asked for by --attention-backend fa, cannot serve transformer.self on cpu"),
    ("--attention-backend fa", "fa declares torch_sdpa as its fallback"),
    (f"--attention-backend fa {OWN} text_encoder=torch_sdpa", "asked for by --attention-backend fa, cannot serve"),
    (f"{OWN} text_encoder=fa", f"asked for by {OWN} text_encoder=fa, cannot serve text_encoder.self on cpu"),
    ("--attention-backend-override fa", "--attention-backend-override fa is rejected, nothing was switched"),
    (f"{OWN}.tokenizer torch_sdpa", "hal reaches no attention in 'tokenizer', as it is no model with attention"),
    (
        "--backend diffusers --attention-backend flash",
        "--attention-backend flash: diffusers cannot use it for transformer",
    ),
    ("--kernel sdpa.flash", "cpu has no row for this kernel"),
]


@pytest.mark.parametrize("options, said", REFUSED)
def test_what_this_machine_cannot_do_is_refused_with_every_reason(run, tmp_path, options, said):
    ran = run("ltx", f"--save-output {options}")
    assert ran.code == 2 and ran.out == ""
    assert ran.err.startswith("hal: ") and said in ran.err and "Traceback" not in ran.err
    assert not list(tmp_path.iterdir())


MISTAKES = [
    ("", "say where to save it: --out FILE, or --save-output"),
    ("--out cat.gif --attention-backend torch_spda", "--attention-backend torch_spda: unknown attention backend 'torch_spda'; did you mean 'torch_sdpa'?"),
    ("--out cat.gif --attention-backend sage_attn", "--attention-backend sage_attn: "),
    ("--out cat.gif --attention-bakend fa", "unknown option '--attention-bakend'; did you mean '--attention-backend'?"),
    ("--out cat.gif --component-attention-backend.vae fa", "did you mean '--component-attention-backends'?"),
    (f"--out cat.gif {OWN} txt_encoder=torch_sdpa", f"{OWN} txt_encoder=torch_sdpa: unknown component 'txt_encoder'; did you mean 'text_encoder'?"),
    (f"--out cat.gif {OWN}.vae", f"{OWN}.vae needs a component and a backend"),
    (f"--out cat.gif {OWN}.vae --seed 1", f"{OWN}.vae needs a component and a backend"),
    (f"--out cat.gif {OWN} torch_sdpa", "'torch_sdpa' is no COMPONENT=BACKEND"),
    (f"--out cat.gif {OWN} vae=torch_sdpa,vae=fa", "vae was given torch_sdpa as well; keep one"),
    (f"--out cat.gif {OWN} transformer.crss=fa", "did you mean 'cross'?"),
    ("--out cat.gif --attention-backend torch_sdpa --attention-backend-config topk=0.5", "torch_sdpa has no settings, so 'topk' cannot be given"),
    ("--out cat.gif --attention-backend-config topk=0.5", "'topk' is for no backend"),
    ("--out cat.gif --attention-backend-override torch_cudnn_sdpa", "--attention-backend-override torch_cudnn_sdpa: torch_cudnn_sdpa cannot be switched per request; allowed: "),
    ("--out cat.gif --attention-backend-override sage", "--attention-backend-override sage: "),
    ("--out cat.gif --attention-fallback declare", "did you mean 'declared'?"),
    ("--out cat.gif --kernel sdpa.cpuu", "did you mean 'sdpa.cpu'?"),
    ("--out cat.gif --forbid torch_sdpa --attention-backend torch_sdpa", "required by --attention-backend torch_sdpa and forbidden by --forbid torch_sdpa"),
    ("--out cat.gif --waive memory.mth", "did you mean 'memory.math'?"),
    ("--out cat.gif --fit pad_headdim", "did you mean 'pad_head_dim'?"),
    ("--out cat.gif --config none.yaml", "'none.yaml' cannot be read"),
    ("--out cat.gif --plan none.json", "plan none.json cannot be read"),
    ("--out cat.gif --backend fa", "--backend fa: it says who runs the attention, auto, hal, diffusers; an attention backend is --attention-backend fa"),
    ("--out cat.gif --backend difusers", "did you mean 'diffusers'?"),
    ("--out cat.gif --backend diffusers --attention-backend flahs", "did you mean 'flash'?"),
    ("--out cat.gif --backend diffusers --attention-backend native --kernel sdpa.math", "--kernel sdpa.math is for hal and cannot go with --backend diffusers: diffusers sets one backend"),
    (f"--out cat.gif --backend diffusers {OWN} vae=native", f"{OWN} vae=native is for hal"),
    ("--out cat.gif --ring-degree 2", "--ring-degree 2: this release runs on one device"),
    ("--out cat.gif --ulysses_degree 4", "--ulysses-degree 4: this release runs on one device"),
    ("--out cat.gif --ulysses-degree 0", "0 is not in the range x>=1"),
    ("--out cat.gif --cuda-graph --device cpu", "--cuda-graph: cpu cannot capture graphs"),
    ("--out cat.gif --compile --attention-backend-override torch_sdpa", "--compile and --attention-backend-override torch_sdpa exclude each other"),
    ("--out cat.gif --cuda-graph --attention-backend-override fa", "--cuda-graph and --attention-backend-override fa exclude each other"),
    ("--out cat.gif --plan none.json --compile", "--plan none.json and --compile exclude each other"),
    ("--out cat.gif --plan none.json --cuda-graph", "--plan none.json and --cuda-graph exclude each other"),
    ("--out cat.gif --plan none.json --attention-backend fa", "--plan none.json and --attention-backend fa exclude each other: the plan says what is chosen"),
    ("--out cat.gif --plan none.json --forbid fa --config c.yaml", "--plan none.json and --forbid fa exclude each other"),
    ("--out cat.gif --plan none.json --config c.yaml", "--plan none.json and --config c.yaml exclude each other"),
    ("--out cat.gif --plan none.json --attention-backend-override fa", "and --attention-backend-override fa exclude each other"),
    ("--out cat.gif --model-variant fp16", "--model-variant fp16: "),
    ("--out cat.jpg", "ends in one of .png, .gif, .mp4"),
    ("--out cat.gif --seed x", "'x' is not a valid integer"),
]  # fmt: skip


@pytest.mark.parametrize("options, said", MISTAKES, ids=[o or "no place" for o, _ in MISTAKES])
def test_a_mistake_is_one_line_before_the_weights_are_read(run, tmp_path, monkeypatch, options, said):
    if "no settings" not in said:  # the pipeline's own names and values are checked without its weights
        monkeypatch.setattr(generation, "load", lambda *_: pytest.fail("it read the weights"))
    ran = run("ltx", options)
    assert ran.code == 2 and ran.out == ""
    assert len(ran.err.splitlines()) == 1 and ran.err.startswith("hal: ")
    assert said in ran.err
    assert not list(tmp_path.iterdir())


def test_a_missing_option_is_named(hal):
    ran = hal("generate", "--model-path", "x", "--out", "x.png")
    assert ran.code == 2 and "Missing option '--prompt'" in ran.err


def test_a_settings_file_comes_after_the_command_line_and_the_environment(run, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(
        "attention_fallback: declared\nkernel: sdpa.math\ncomponent_attention_backends:\n  text_encoder: fa\n"
    )
    got = receipt(run("ltx", "--out cat.gif --config settings.yaml").out)
    assert got["transformer.self"] == ("torch_sdpa / sdpa.math", "settings.yaml, line 2, kernel: sdpa.math")
    assert got["text_encoder.self"] == (
        SDPA,
        "settings.yaml, line 4, component_attention_backends: text_encoder=fa",
    )
    got = receipt(run("ltx", "--out cat.gif --force --config settings.yaml", HAL_ATTENTION_BACKEND="torch_sdpa").out)
    assert got["transformer.self"] == (SDPA, "HAL_ATTENTION_BACKEND=torch_sdpa")
    got = receipt(run("ltx", "--out cat.gif --force --config settings.yaml --attention-backend fa").out)
    assert got["transformer.self"] == (SDPA, "--attention-backend fa"), "the file's fallback is that of the words too"
    file.write_text("attention_backend: torch_sdpa\natention_fallback: declared\n")
    ran = run("ltx", "--out no.gif --config settings.yaml")
    assert ran.code == 2 and "settings.yaml, line 2: unknown setting 'atention_fallback'; did you mean" in ran.err


def test_an_override_that_no_layer_uses_is_an_error_and_nothing_is_saved(run, tmp_path):
    ran = run("flux", f"--out cat.png {OWN} transformer.cross=torch_sdpa")
    assert ran.code == 2 and "no attention layer of 'transformer.cross' used torch_sdpa" in ran.err
    assert not list(tmp_path.iterdir())


def test_diffusers_runs_it_and_the_receipt_says_so(run):
    ran = run("flux", "--out cat.png --backend diffusers --attention-backend _native_math", HAL_ATTENTION_BACKEND="fa")
    assert ran.code == 0
    assert "diffusers ran the attention; hal was not attached" in ran.out
    assert "_native_math" in ran.out and "2 of 2" in ran.out and "torch_sdpa" not in ran.out
    assert "HAL_ATTENTION_BACKEND is for hal" in ran.err
    assert "diffusers' own choice" in run("flux", "--out cat.png --force --backend diffusers").out


def test_a_pipeline_that_ignores_diffusers_backends_is_refused(run, tmp_path):
    ran = run("sd3", "--out cat.png --backend diffusers --attention-backend native")
    assert ran.code == 2 and "--attention-backend native is not consumed: transformer ignores" in ran.err
    assert "JointAttnProcessor2_0" in ran.err and not list(tmp_path.iterdir())


def test_a_plan_runs_as_it_was_locked_or_not_at_all(hal, run, folders, tmp_path):
    size = SIZES["flux"].replace(" --steps 1", "").split()
    path = ["--model-path", str(folders / "flux"), *size, "--prompt", "A cat walking"]
    assert hal("lock", *path, "--attention-backend", "torch_sdpa", "--out", str(tmp_path / "plan.json")).code == 0
    ran = run("flux", "--out cat.png --plan plan.json")
    assert ran.code == 0, ran.err
    assert receipt(ran.out)["transformer.self"] == (SDPA, "plan plan.json, attention_backend: torch_sdpa")
    ran = run("flux", "--out no.png --plan plan.json --height 16")
    assert ran.code == 2 and "plan plan.json: transformer.self@0 has no such call: q_len is" in ran.err
    assert not (tmp_path / "no.png").exists()


def test_a_plan_has_what_its_settings_file_said(hal, run, folders, tmp_path):
    (tmp_path / "settings.yaml").write_text("attention_backend: fa\nattention_fallback: declared\n")
    path = ["--model-path", str(folders / "flux"), "--height", "8", "--width", "8", "--prompt", "A cat walking"]
    made = hal("lock", *path, "--config", str(tmp_path / "settings.yaml"), "--out", str(tmp_path / "plan.json"))
    assert made.code == 0 and "settings.yaml, line 1, attention_backend: fa" in made.out
    (tmp_path / "settings.yaml").unlink()
    ran = run("flux", "--out cat.png --plan plan.json")
    assert ran.code == 0, ran.err
    assert receipt(ran.out)["transformer.self"] == (SDPA, "plan plan.json, attention_backend: fa")


def test_a_file_that_is_there_is_replaced_only_by_force(run, tmp_path):
    (tmp_path / "cat.png").write_bytes(b"mine")
    ran = run("flux", "--out cat.png")
    assert ran.code == 2 and ran.err == "hal: cannot write 'cat.png': there is such a file; --force replaces it\n"
    assert (tmp_path / "cat.png").read_bytes() == b"mine"
    assert run("flux", "--out cat.png --force").code == 0
    assert (tmp_path / "cat.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["cat.png"]
