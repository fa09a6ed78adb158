"""--backend diffusers: a name goes to diffusers, is used or refused, and leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attached import STEPS, sample
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from PIL import Image

import hal
from hal.errors import AttachError, PolicyError
from hal.integrations import generation, passthrough
from hal.integrations.generation import generate
from hal.integrations.passthrough import backend_name, passed
from hal.testing import tiny

MATH = AttentionBackendName._NATIVE_MATH


@pytest.fixture(scope="module")
def flux():
    return tiny.flux()


@pytest.fixture
def calls(monkeypatch):
    """The calls of diffusers' math backend."""
    real, seen = _AttentionBackendRegistry._backends[MATH], []

    def counted(*args, **kwargs):
        seen.append(1)
        return real(*args, **kwargs)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, MATH, counted)
    return seen


def state(*parts):
    """The processors' own settings, and the process's."""
    own = [vars(m.processor).copy() for part in parts for m in part.modules() if getattr(m, "processor", None)]
    return own, passthrough.active()


def test_it_is_used_inside_and_put_back_after(flux, calls):
    first = next(m.processor for m in flux.transformer.modules() if getattr(m, "processor", None))
    first._attention_backend = AttentionBackendName.NATIVE  # set by someone before
    try:
        before = state(flux.transformer, flux.vae)
        with passed(flux, "_native_math", "--attention-backend _native_math") as told:
            sample("flux", flux)
            assert passthrough.active() == "_native_math"
        assert len(calls) == 2 * STEPS, "each layer of the denoiser, each step"
        (one,) = told
        assert (one.component, one.taking, one.layers) == ("transformer", 2, 2)
        assert state(flux.transformer, flux.vae) == before and before[1] == "native"
        sample("flux", flux)
        assert len(calls) == 2 * STEPS
    finally:
        del first._attention_backend


@pytest.mark.parametrize("name", ["_native_math", "flash"])  # an error inside, and one of diffusers' own
def test_it_is_put_back_after_an_error(flux, name):
    before = state(flux.transformer)
    with pytest.raises((KeyboardInterrupt, PolicyError)):
        with passed(flux, name, "x"):
            raise KeyboardInterrupt
    assert state(flux.transformer) == before


@pytest.mark.parametrize(
    "name, processor", [("sd3", "JointAttnProcessor2_0, which calls PyTorch's SDPA"), ("pixart", "AttnProcessor2_0")]
)
def test_a_pipeline_that_ignores_it_is_an_error_that_says_why(name, processor):
    pipeline = tiny.PIPELINES[name]()
    with pytest.raises(PolicyError, match=f"asked is not consumed: transformer ignores .*{processor}"):
        with passed(pipeline, "_native_math", "asked"):
            pytest.fail("it ran")
    assert passthrough.active() == "native"


def test_where_one_of_two_denoisers_ignores_it_none_is_set(flux):
    pipeline = SimpleNamespace(components={"transformer": flux.transformer, "transformer_2": tiny.sd3().transformer})
    before = state(flux.transformer)
    with pytest.raises(PolicyError, match="transformer_2 ignores"):
        with passed(pipeline, "_native_math", "asked"):
            pytest.fail("it ran")
    assert state(flux.transformer) == before
    with pytest.raises(PolicyError, match="has no transformer and no unet"):
        with passed(SimpleNamespace(components={"vae": flux.vae}), "native", "asked"):
            pytest.fail("it ran")


def test_every_backend_of_diffusers_is_a_name():
    for member in AttentionBackendName:
        assert backend_name(f" {member.value.upper()} ", "asked") == member.value


@pytest.mark.parametrize(
    "name, said",
    [
        ("flahs", "asked: unknown backend of diffusers 'flahs'; did you mean 'flash'"),
        ("torch_sdpa", "torch_sdpa is a backend of hal, which runs it without --backend diffusers"),
        ("FA3", "FA3 is a backend of hal"),
        ("", "unknown backend of diffusers ''"),
    ],
)
def test_another_name_is_told_apart(name, said):
    with pytest.raises(PolicyError, match=said):
        backend_name(name, "asked")


def test_generating_by_diffusers(flux, calls, tmp_path):
    flux.save_pretrained(tmp_path / "flux")
    arguments = {**tiny.CALLS["flux"], "steps": STEPS, "runtime": "diffusers"}
    done = generate(tmp_path / "flux", "a cat", out=tmp_path / "a.png", attention_backend="_native_math", **arguments)
    assert len(calls) == 2 * STEPS and passthrough.active() == "native"
    assert done.attachment is None and done.receipts == () and not hal.receipts()
    assert [(p.component, p.backend) for p in done.passed] == [("transformer", "_native_math")]
    plain = generate(tmp_path / "flux", "a cat", out=tmp_path / "b.png", **arguments)
    assert plain.passed == () and len(calls) == 2 * STEPS
    given = {**tiny.CALLS["flux"], "num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(0)}
    assert Image.open(plain.out).tobytes() == flux(prompt="a cat", **given).images[0].tobytes()
    with pytest.raises(AttachError, match="by '_native_cudnn' .attention_backend='_native_cudnn'.: RuntimeError"):
        generate(tmp_path / "flux", "a cat", out=tmp_path / "c.png", attention_backend="_native_cudnn", **arguments)
    assert passthrough.active() == "native" and not (tmp_path / "c.png").exists()


@pytest.mark.parametrize(
    "more",
    [
        {"component_attention_backends": {"vae": "native"}},
        {"attention_backend_config": "a=1"},
        {"attention_backend_override": "fa"},
        {"attention_fallback": "declared"},
        {"kernel": "sdpa.math"},
        {"forbid": "fa"},
        {"waive": "memory.math"},
        {"fit": "pad_head_dim"},
        {"config": "x.yaml"},
        {"plan": "x.json"},
    ],
    ids=str,
)
def test_what_is_for_hal_cannot_go_with_it(tmp_path, monkeypatch, more):
    monkeypatch.setattr(generation, "load", lambda *_: pytest.fail("it read the weights"))
    (key,) = more
    with pytest.raises(PolicyError, match=f"{key}=.* cannot go with runtime='diffusers': diffusers sets one backend"):
        generate(tmp_path, "a cat", out=tmp_path / "cat.png", runtime="diffusers", **more)


def test_another_runtime_is_an_error(tmp_path):
    with pytest.raises(PolicyError, match="unknown runtime 'diffuser'; did you mean 'diffusers'"):
        generate(tmp_path, "a cat", out=tmp_path / "cat.png", runtime="diffuser")
