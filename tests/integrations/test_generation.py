"""From a folder to a picture: what is saved, what is told, and what every kind of bad input says."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from attached import STEPS, runs
from diffusers import DiffusionPipeline
from PIL import Image

import hal
from hal.errors import AttachError, HalError, NoKernelError, PolicyError
from hal.integrations import compiling, generation, media
from hal.integrations.generation import generate
from hal.testing import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A picture pipeline and a video pipeline, saved."""
    root = tmp_path_factory.mktemp("pipelines")
    for name in ("pixart", "ltx"):
        tiny.PIPELINES[name]().save_pretrained(root / name)
    return root


def call(name, **more):
    arguments = {**tiny.CALLS[name], "steps": STEPS, **more}
    arguments["frames"] = arguments.pop("num_frames", None)
    return arguments


def test_a_picture_with_its_receipts(folders, tmp_path):
    steps = []
    done = generate(
        folders / "pixart", "a cat", out=tmp_path / "cat.png", progress=lambda *n: steps.append(n), **call("pixart")
    )
    assert Image.open(done.out).size == (8, 8) and done.frames == 1
    assert steps == [(0, 0), (1, 2), (2, 2)]
    assert {(r.component, r.role): r.runs for r in done.receipts} == dict(runs())
    assert sum(r.runs for r in done.receipts if r.component == "transformer") == 2 * 2 * STEPS
    assert not done.attachment.attached and done.attachment.components["vae"].layers == 2
    again = generate(folders / "pixart", "a cat", out=tmp_path / "again.png", **call("pixart"))
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "cat.png").read_bytes(), "a seed decides"
    assert again.receipts == done.receipts, "receipts are those of one run"
    other = generate(folders / "pixart", "a dog", out=tmp_path / "dog.png", **call("pixart"))
    assert other.out.read_bytes() != done.out.read_bytes(), "a prompt matters"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.png", "cat.png", "dog.png"]


def test_the_picture_is_that_of_the_unattached_pipeline(folders, tmp_path):
    done = generate(folders / "pixart", "a cat", out=tmp_path / "cat.png", **call("pixart"))
    pipeline = DiffusionPipeline.from_pretrained(folders / "pixart")
    arguments = {**tiny.CALLS["pixart"], "num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(0)}
    want = pipeline(prompt="a cat", **arguments).images[0]
    assert Image.open(done.out).tobytes() == want.tobytes()


@pytest.mark.parametrize("suffix", [".png", ".gif", ".mp4"])
def test_a_video_in_each_form(folders, tmp_path, suffix):
    done = generate(folders / "ltx", "a cat", out=tmp_path / f"cat{suffix}", **call("ltx"))
    assert done.frames == 9
    if suffix == ".png":
        assert Image.open(done.out).size == (3 * 34 - 2, 3 * 34 - 2)  # a sheet of 3 x 3, 2 pixels apart
    elif suffix == ".gif":
        assert Image.open(done.out).n_frames == 9
    else:
        import imageio_ffmpeg

        frames = list(imageio_ffmpeg.read_frames(str(done.out)))
        assert frames[0]["size"] == (32, 32) and len(frames) - 1 == 9
    assert [p.name for p in tmp_path.iterdir()] == [f"cat{suffix}"]


@pytest.mark.parametrize("name", tiny.PIPELINES)
def test_each_tiny_pipeline_comes_back_from_disk(name, tmp_path):
    tiny.PIPELINES[name]().save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)

    def run(pipeline):
        arguments = {**tiny.CALLS[name], "num_inference_steps": 1, "generator": torch.Generator().manual_seed(0)}
        return pipeline(prompt="a cat", output_type="pt", **arguments)[0]

    torch.testing.assert_close(run(loaded), run(tiny.PIPELINES[name]()), rtol=0, atol=1e-5)


def test_several_videos_are_each_that_of_its_own_seed(folders, tmp_path):
    steps = []
    more = {"videos": 3, "seed": 40, "progress": lambda *n: steps.append(n)}
    done = generate(folders / "ltx", "a cat", out=tmp_path / "cat.gif", **{**call("ltx"), **more})
    assert [f.name for f in done.files] == ["cat-40.gif", "cat-41.gif", "cat-42.gif"]
    assert steps == [(0, 0), *((n, 3 * STEPS) for n in range(1, 3 * STEPS + 1))]
    alone = generate(folders / "ltx", "a cat", out=tmp_path / "one.gif", **{**call("ltx"), "seed": 41})
    assert alone.out.read_bytes() == done.files[1].read_bytes()
    assert len({f.read_bytes() for f in done.files}) == 3
    assert [r.runs for r in done.receipts] == [3 * r.runs for r in alone.receipts]
    with pytest.raises(AttachError, match="cat-41.gif.*there is such a file"):
        generate(folders / "ltx", "a cat", out=tmp_path / "cat.gif", **{**call("ltx"), "videos": 2, "seed": 41})


def test_what_was_saved_before_an_error_stays_and_is_told(folders, tmp_path):
    def stop(step, steps):
        if step > STEPS:
            raise KeyboardInterrupt

    told = []
    with pytest.raises(KeyboardInterrupt):
        more = {"videos": 2, "progress": stop, "warn": told.append}
        generate(folders / "ltx", "a cat", out=tmp_path / "cat.gif", **{**call("ltx"), **more})
    assert [p.name for p in tmp_path.iterdir()] == ["cat-0.gif"]
    assert told == [f"saved before that: {tmp_path / 'cat-0.gif'}"]


SMALL = {"frames": 16, "height": 64, "width": 64, "steps": 1}  # of the model that hal ships


@pytest.mark.parametrize(
    "more, said",
    [
        ({"height": 33}, "height=33: the model that hal ships makes it in steps of 32; give 32 or 64"),
        ({"frames": 15}, "num_frames=15: .* give 12 or 16"),
        ({"frames": 0}, "num_frames=0: allowed is 1 or more"),
        ({"width": -32}, "width=-32: allowed is 1 or more"),
        ({"steps": 0}, "num_inference_steps=0: allowed is 1 or more"),
        ({"height": 32000}, "video tokens; the model that hal ships makes up to 32,768"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan: allowed is a finite number"),
        ({"videos": 0}, "videos=0: allowed is 1 or more"),
        ({"seed": 2**64}, "a seed of PyTorch lies between"),
        ({"prompt": "a seven, " * 70}, "the prompt is too long: it has 211 tokens, and LTXPipeline reads 128"),
        ({"negative_prompt": "a seven, " * 70}, "the negative_prompt is too long"),
    ],
)
def test_what_the_shipped_model_cannot_do_is_told_before_it_runs(tmp_path, more, said):
    given = {**SMALL, **more}
    with pytest.raises(AttachError, match=said):
        generate(None, given.pop("prompt", "a seven"), out=tmp_path / "seven.gif", **given)
    assert not list(tmp_path.iterdir())


def test_words_that_a_model_does_not_know_are_told(tmp_path):
    told = []
    generate(None, "a 7 on a beach", out=tmp_path / "seven.gif", warn=told.append, **SMALL)
    assert len(told) == 1 and told[0].startswith(
        "the model does not know 'on', 'beach' of the prompt; it knows: a, an,"
    )


def no_index(folder):
    (folder / "model_index.json").unlink()


def bad_json(folder):
    (folder / "model_index.json").write_text("{")


def unknown_class(folder):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "PixArtAlfaPipeline"}))


def truncated(folder):
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])


def half(folder):
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def half_index(folder):
    (folder / "model_index.json").write_text((folder / "model_index.json").read_text()[:200])


def half_tokenizer(folder):
    file = folder / "tokenizer" / "tokenizer.json"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def no_pipeline(folder):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "AutoencoderKL"}))


def no_vae(folder):
    shutil.rmtree(folder / "vae")


def more_layers(folder):
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps({**config, "num_layers": config["num_layers"] + 1}))


def no_weights(folder):
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()


@pytest.mark.parametrize(
    "damage, said",
    [
        (shutil.rmtree, "is not there; --model-path takes the folder"),
        (no_index, "has no model_index.json.*save_pretrained"),
        (bad_json, "is damaged.*download the pipeline again"),
        (unknown_class, "'PixArtAlfaPipeline'.*did you mean 'PixArtAlphaPipeline'.*pip install"),
        (truncated, "transformer/diffusion_pytorch_model.safetensors' is truncated.*download it again"),
        (half, "transformer/diffusion_pytorch_model.safetensors' is truncated.*download it again"),
        (half_index, "is damaged.*download the pipeline again"),
        (half_tokenizer, "tokenizer/tokenizer.json' is truncated"),
        (no_pipeline, "asks for 'AutoencoderKL', which is no pipeline that can run"),
        (no_vae, "the folder 'vae' of model_index.json is missing"),
        (more_layers, "the weights of 'transformer' lack"),
        (no_weights, "cannot be loaded: .*check that every folder"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_folder_without_a_whole_pipeline_says_what_is_wrong(folders, tmp_path, damage, said):
    shutil.copytree(folders / "pixart", tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(AttachError, match=said):
        generate(tmp_path / "model", "a cat", out=tmp_path / "cat.png")
    assert not (tmp_path / "cat.png").exists()


def test_a_file_for_a_folder(folders, tmp_path):
    with pytest.raises(AttachError, match="is a file"):
        generate(folders / "pixart" / "model_index.json", "a cat", out=tmp_path / "cat.png")
    with pytest.raises(AttachError, match=r"did you mean .*ltx'\?"):
        generate(folders, "a cat", out=tmp_path / "cat.png")


@pytest.mark.parametrize(
    "out, said",
    [
        ("cat.jpg", r"ends in one of \.png, \.gif, \.mp4"),
        ("cat", "ends in one of"),
        ("no/cat.png", "does not exist; create it"),
        ("folder.png", "it is a folder"),
        ("x" * 300 + ".png", "too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, out, said):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(AttachError, match=said):
        generate(tmp_path / "no model either", "a cat", out=tmp_path / out)


@pytest.mark.parametrize("missing, out", [("imageio_ffmpeg", "cat.mp4"), ("PIL", "cat.png")])
def test_a_missing_writer_names_its_package(monkeypatch, tmp_path, missing, out):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(media, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(AttachError, match="pip install"):
        media.writable(tmp_path / out)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"heigth": 8}, "PixArtAlphaPipeline takes no heigth; did you mean 'height'"),
        ({"num_frames": 9}, "takes no num_frames"),
        ({"height": 9}, "refused the call: .*divisible"),
        ({"out": "cat.mp4"}, "makes pictures, not videos"),
        ({"attention_backend": "fa9"}, "unknown attention backend 'fa9'"),
        ({"dtype": "bf61"}, "'bf61' is no dtype"),
        ({"device": "abacus"}, "cannot be moved to the device 'abacus'"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(folders, tmp_path, more, said):
    out = tmp_path / more.pop("out", "cat.png")
    with pytest.raises(HalError, match=said):
        generate(folders / "pixart", "a cat", out=out, **{**call("pixart"), **more})
    assert not list(tmp_path.iterdir())


def test_arguments_are_checked_before_the_weights_are_read(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "load", lambda *_: pytest.fail("it read the weights"))
    for more in ({"heigth": 8}, {"attention_backend": "fa9"}, {"out": tmp_path / "cat.mp4"}):
        with pytest.raises(HalError):
            generate(folders / "pixart", "a cat", **{"out": tmp_path / "cat.png", **more})


def test_a_missing_diffusers_names_its_extra(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(AttachError, match=r"pip install 'attention-hal\[diffusers\]'"):
        generate(folders / "pixart", "a cat", out=tmp_path / "cat.png")


def test_a_failed_write_leaves_neither_a_part_nor_the_old_file_changed(monkeypatch, tmp_path):
    path = tmp_path / "cat.png"
    path.write_bytes(b"old")

    def full(self, file, *rest, **more):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(AttachError, match="No space left"):
        media.save([Image.new("RGB", (4, 4))], path)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["cat.png"]


def test_an_mp4_that_its_writer_cannot_finish_is_no_file(monkeypatch, tmp_path):
    import imageio_ffmpeg

    broken = tmp_path / "ffmpeg"
    broken.write_text(
        '#!/bin/sh\nfor last; do :; done\nhead -c 99 > "$last"\necho "No space left on device" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(broken))
    with pytest.raises(AttachError, match="ffmpeg: No space left on device"):
        media.save([Image.new("RGB", (64, 64))] * 16, tmp_path / "cat.mp4")
    assert [p.name for p in tmp_path.iterdir()] == ["ffmpeg"]


def test_an_interrupted_run_leaves_nothing(folders, tmp_path):
    def stop(step, steps):
        if step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(folders / "pixart", "a cat", out=tmp_path / "cat.png", progress=stop, **call("pixart"))
    assert not list(tmp_path.iterdir())
    assert hal.receipts(), "it had run"


@pytest.mark.parametrize(
    "count, size, sheet", [(1, (8, 8), (8, 8)), (3, (8, 8), (18, 18)), (6, (8, 8), (28, 18)), (4, (16, 8), (34, 18))]
)
def test_a_contact_sheet_is_as_square_as_it_goes(count, size, sheet):
    assert media.sheet([Image.new("RGB", size)] * count).size == sheet


# ---- what is chosen


def test_the_override_is_prepared_before_anything_runs_and_shows_in_the_receipts(folders, tmp_path):
    more = {"attention_backend": "torch_sdpa", "attention_backend_override": "torch_sdpa"}
    done = generate(folders / "ltx", "a cat", out=tmp_path / "cat.gif", **{**call("ltx"), **more})
    sources = {(r.component, r.source.partition("=")[0]) for r in done.receipts}
    assert sources == {("text_encoder", "attention_backend"), ("transformer", "attention_backend_override")}
    with pytest.raises(PolicyError, match="attention_backend_override='fa' is rejected, nothing was switched: .*cpu"):
        generate(
            folders / "ltx", "a cat", out=tmp_path / "no.gif", **{**call("ltx"), "attention_backend_override": "fa"}
        )
    assert not (tmp_path / "no.gif").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        ({"attention_backend": "fa"}, "asked for by attention_backend='fa', cannot serve transformer.self on cpu"),
        ({"component_attention_backends": {"vae": "fa"}}, "cannot serve vae.self on cpu"),
        ({"kernel": "sdpa.flash"}, "cpu has no row for this kernel"),
        ({"forbid": "vae=torch_sdpa"}, "no attention kernel can serve vae.self"),
    ],
    ids=str,
)
def test_what_this_machine_cannot_serve_is_refused_before_the_pipeline_runs(folders, tmp_path, words, said):
    steps = []
    with pytest.raises(NoKernelError, match=said):
        generate(
            folders / "pixart",
            "a cat",
            out=tmp_path / "cat.png",
            progress=lambda *n: steps.append(n),
            **{**call("pixart"), **words},
        )
    assert not steps and not hal.receipts() and not list(tmp_path.iterdir())


def test_a_compiled_denoiser_gives_the_same_picture(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "COMPILE", {"backend": "eager"})
    plain = generate(folders / "pixart", "a cat", out=tmp_path / "plain.png", **call("pixart"))
    own = {"compile": True, "waive": "memory.math"}  # places of its own: no earlier attachment has equal ones
    done = generate(folders / "pixart", "a cat", out=tmp_path / "cat.png", **{**call("pixart"), **own})
    assert done.compiled == ("transformer",) and plain.compiled == ()
    assert done.out.read_bytes() == plain.out.read_bytes()
    traced = sum(r.runs for r in done.receipts if r.component == "transformer")
    assert traced > 0 and traced % 4 == 0, "each trace meets the four layers"


def test_what_goes_wrong_while_compiling_is_told_by_its_cause():
    refused = NoKernelError("fa cannot serve")
    wrapped = torch._dynamo.exc.Unsupported("graph break")
    wrapped.__cause__ = refused
    assert generation.explained(wrapped, object, (), ("transformer",), generation._as_argument) is refused
    alone = torch._dynamo.exc.Unsupported("no C++ compiler")
    told = str(generation.explained(alone, object, (), ("transformer",), generation._as_argument))
    assert "torch.compile of transformer failed: Unsupported: no C++ compiler" in told and "run it without" in told
    other = KeyError("x")
    assert generation.explained(other, object, (), (), generation._as_argument) is other


def test_captured_outputs_are_copies(monkeypatch):
    """One compiled call must not write over what an earlier one returned, as replayed graphs do."""

    class Part(torch.nn.Module):
        def forward(self, x):
            return (x + 1,)

    part, memory = Part(), torch.zeros(2)

    def replayed(self):
        self._compiled_call_impl = lambda x: (memory.copy_(x + 1),)

    monkeypatch.setattr(Part, "compile", lambda self, **options: replayed(self))
    pipeline = type("P", (), {"components": {"transformer": part}})()
    assert compiling.compiled(pipeline, graphs=True) == ("transformer",)
    first, second = part(torch.ones(2))[0], part(torch.full((2,), 5.0))[0]
    assert first.tolist() == [2, 2] and second.tolist() == [6, 6]


# ---- names


def test_a_generated_name_is_the_prompts_and_never_taken_twice(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {**call("pixart"), "steps": 1, "seed": 7, "max_sequence_length": 64}
    names = [generate(folders / "pixart", "A cat, on a (sunny) beach!", **arguments).out for _ in range(2)]
    assert [str(n) for n in names] == ["outputs/a-cat-on-a-sunny-beach-7.png", "outputs/a-cat-on-a-sunny-beach-7-2.png"]
    assert sorted(p.name for p in (tmp_path / "outputs").iterdir()) == sorted(n.name for n in names)


@pytest.mark.parametrize(
    "prompt, name",
    [("", "output-0.png"), ("../../x", "x-0.png"), ("Кот", "кот-0.png"), ("a" * 99, "a" * 48 + "-0.png")],
)
def test_any_prompt_makes_a_name(tmp_path, monkeypatch, prompt, name):
    monkeypatch.chdir(tmp_path)
    assert str(media.generated(prompt, 0, "png")) == f"outputs/{name}"
    assert not list(tmp_path.iterdir())


def test_a_failed_write_under_a_generated_name_leaves_no_file(monkeypatch, tmp_path):
    taken = tmp_path / "cat-0.png"
    taken.write_bytes(b"old")
    monkeypatch.setattr(media, "_save", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(AttachError, match="full"):
        media.save([Image.new("RGB", (4, 4))], taken, new=True)
    assert [p.name for p in tmp_path.iterdir()] == ["cat-0.png"] and taken.read_bytes() == b"old"


# ---- variants


def test_a_variant_is_that_of_the_weights_or_a_folder_inside(folders, tmp_path):
    both = tmp_path / "model"
    DiffusionPipeline.from_pretrained(folders / "pixart").save_pretrained(both, variant="fp16")
    shutil.copytree(folders / "ltx", both / "video")
    done = generate(both, "a cat", out=tmp_path / "cat.png", **{**call("pixart"), "steps": 1}, model_variant="fp16")
    assert done.frames == 1
    done = generate(both, "a cat", out=tmp_path / "cat.gif", **{**call("ltx"), "steps": 1}, model_variant="video")
    assert done.frames == 9
    with pytest.raises(
        AttachError, match=r"model_variant='vide'.*did you mean 'video'.*weights: fp16; pipelines: video"
    ):
        generate(both, "a cat", out=tmp_path / "no.png", model_variant="vide")
    with pytest.raises(AttachError, match="it has no variant at all"):
        generate(folders / "ltx", "a cat", out=tmp_path / "no.png", model_variant="../pixart")


def test_the_variant_of_a_weight_file():
    from hal.integrations import loading

    class Folder:
        files = ("a.safetensors", "a.fp16.safetensors", "m.bf16-00001-of-00002.safetensors", "m.safetensors.index.json")

        def glob(self, _):
            from pathlib import Path

            return map(Path, (*self.files, "w-00001-of-00002.int8.bin", "config.v1.json"))

    assert loading._weights(Folder()) == ["bf16", "fp16", "int8"]
