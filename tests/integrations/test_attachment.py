"""hal.attach on pipelines: same picture, everything through hal, and nothing left behind."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from attached import STEPS, Plain, runs, sample
from diffusers.models import attention_dispatch
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

import hal
from hal.errors import AttachError, PolicyError
from hal.testing import tiny

REGISTRY = attention_dispatch._AttentionBackendRegistry

# Attention calls of one run: layers x steps (x 2 prompts where classifier-free guidance runs them one by one).
EXPECTED = {
    "wan": {
        ("text_encoder", "self"): 2 * 2,
        ("transformer", "self"): 2 * STEPS * 2,
        ("transformer", "cross"): 2 * STEPS * 2,
        ("vae", "self"): 3,
    },  # the video VAE decodes 3 latent frames one by one
    "flux": {
        ("text_encoder", "self"): 2,
        ("text_encoder_2", "self"): 2,
        ("transformer", "self"): 2 * STEPS,
        ("vae", "self"): 1,
    },
    "sd3": {
        ("text_encoder", "self"): 2 * 2,
        ("text_encoder_2", "self"): 2 * 2,
        ("text_encoder_3", "self"): 2 * 2,
        ("transformer", "self"): 1 * STEPS,
        ("vae", "self"): 1,
    },
    "pixart": {
        ("text_encoder", "self"): 2 * 2,
        ("transformer", "self"): 2 * STEPS,
        ("transformer", "cross"): 2 * STEPS,
        ("vae", "self"): 1,
    },
    "ltx": {("text_encoder", "self"): 2 * 2, ("transformer", "self"): 1 * STEPS, ("transformer", "cross"): 1 * STEPS},
}


def state(*models: nn.Module) -> object:
    """All that attaching could leave behind: in the process, and in the models."""
    process = (
        REGISTRY._active_backend,
        dict(REGISTRY._backends),
        dict(REGISTRY._constraints),
        dict(REGISTRY._supported_arg_names),
        set(REGISTRY._supports_context_parallel),
        list(attention_dispatch.AttentionBackendName.__members__),
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        torch.overrides._len_torch_function_stack(),
        torch.are_deterministic_algorithms_enabled(),
        F.scaled_dot_product_attention,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.is_grad_enabled(),
    )
    modules = []
    for model in models:
        for module in model.modules():
            processor = getattr(module, "processor", None)
            config = vars(module).get("config")
            modules.append(
                (
                    type(module),
                    sorted(vars(module)),
                    id(processor),
                    sorted(getattr(processor, "__dict__", {}).items(), key=str),
                    len(module._forward_pre_hooks),
                    len(module._forward_hooks),
                    id(config),
                    getattr(config, "_attn_implementation", None),
                )
            )
    return process, modules


def parts(pipeline):
    return [c for c in pipeline.components.values() if isinstance(c, nn.Module)]


def test_an_attached_pipeline_makes_the_same_picture_and_counts_every_call(named_pipeline):
    name, pipeline = named_pipeline
    want = sample(name, pipeline)
    before = state(*parts(pipeline))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = hal.attach(pipeline)
    try:
        assert torch.equal(sample(name, pipeline), want)
        assert dict(runs()) == EXPECTED[name]
        assert set(handle.components) == {n for n, c in pipeline.components.items() if isinstance(c, nn.Module)}
        assert not any(c.unreached for c in handle.components.values())
    finally:
        handle.detach()
    handle.detach()
    assert not handle.attached
    assert state(*parts(pipeline)) == before
    hal.clear_receipts()
    assert torch.equal(sample(name, pipeline), want) and not hal.receipts()


class CountSDPA(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_no_attention_bypasses_hal(named_pipeline, zeros):
    name, pipeline = named_pipeline
    want = sample(name, pipeline)
    with CountSDPA() as plain:
        sample(name, pipeline)
    assert plain.calls == sum(EXPECTED[name].values())
    with hal.attach(pipeline, attention_backend=zeros), CountSDPA() as attached:
        got = sample(name, pipeline)
    assert attached.calls == 0
    assert not torch.equal(got, want)
    assert {r.backend for r in hal.receipts()} == {"zeros"}


def test_each_component_alone_goes_through_hal(named_pipeline, zeros):
    name, pipeline = named_pipeline
    want = sample(name, pipeline)
    for component in sorted({component for component, _ in EXPECTED[name]}):
        hal.clear_receipts()
        with hal.attach(getattr(pipeline, component), component=component, attention_backend=zeros):
            got = sample(name, pipeline)
        assert not torch.equal(got, want), component
        assert dict(runs()) == {key: n for key, n in EXPECTED[name].items() if key[0] == component}
        assert torch.equal(sample(name, pipeline), want)


@pytest.mark.parametrize("name", ["wan", "sd3"])
def test_another_pipeline_in_the_process_is_not_touched(name, zeros):
    attached, other = tiny.PIPELINES[name](), tiny.PIPELINES[name]()
    want = sample(name, other)
    before = state(*parts(other))[1]
    with hal.attach(attached, attention_backend=zeros):
        assert torch.equal(sample(name, other), want)
        assert not hal.receipts()
        assert state(*parts(other))[1] == before


def test_two_attachments_end_independently():
    first, second = tiny.flux(), tiny.flux()
    before = state()
    one, two = hal.attach(first), hal.attach(second)
    one.detach()
    sample("flux", second)
    assert dict(runs()) == EXPECTED["flux"]
    two.detach()
    assert state() == before


def test_layers_are_counted_by_block_within_each_component():
    pipeline = tiny.wan()
    with hal.attach(pipeline) as handle:
        found = handle.components["transformer"]
        assert [(site.name, site.layer) for site in found.reached] == [
            ("blocks.0.attn1", 0),
            ("blocks.0.attn2", 0),
            ("blocks.1.attn1", 1),
            ("blocks.1.attn2", 1),
        ]
        assert found.layers == 2
        assert [site.layer for site in handle.components["vae"].reached] == [0, 1]


def test_a_users_own_backend_setting_comes_back():
    model = tiny.ltx().transformer
    first, second = (block for block in (model.transformer_blocks[0].attn1, model.transformer_blocks[0].attn2))
    first.processor._attention_backend = attention_dispatch.AttentionBackendName._NATIVE_MATH
    with hal.attach(model):
        assert first.processor._attention_backend.value == second.processor._attention_backend.value == "hal"
    assert first.processor._attention_backend is attention_dispatch.AttentionBackendName._NATIVE_MATH
    assert "_attention_backend" not in vars(second.processor)


def test_a_setting_made_while_attached_stays():
    model = tiny.ltx().transformer
    with hal.attach(model):
        model.transformer_blocks[0].attn1.processor._attention_backend = attention_dispatch.AttentionBackendName.NATIVE
    assert (
        model.transformer_blocks[0].attn1.processor._attention_backend is attention_dispatch.AttentionBackendName.NATIVE
    )


def test_a_processor_object_that_an_unattached_model_shares_works_as_before(zeros):
    pipeline, other = tiny.flux(), tiny.flux()
    for mine, its in zip(pipeline.transformer.modules(), other.transformer.modules()):
        if hasattr(mine, "processor"):
            its.processor = mine.processor
    want = sample("flux", other)
    with hal.attach(pipeline, attention_backend=zeros):
        assert torch.equal(sample("flux", other), want)
        assert not hal.receipts()


class OwnSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = SelfMadeAttention()
        self.plain = Plain()

    def forward(self, x):
        return self.attention(x) + self.plain(x)


class SelfMadeAttention(nn.Module):
    def forward(self, x):
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x


def test_what_hal_cannot_reach_is_named_once_for_each_component():
    model = OwnSoftmax()
    with pytest.warns(UserWarning, match="component 'transformer'.*SelfMadeAttention.*'attention'.*own code") as said:
        handle = hal.attach(model)
    assert len(said) == 1
    handle.detach()
    assert [u.name for u in handle.components["transformer"].unreached] == ["attention"]


def test_processors_with_a_softmax_of_their_own_are_named():
    pipeline = tiny.pixart()
    pipeline.transformer.transformer_blocks[0].attn1.set_processor(AttnProcessor())
    with pytest.warns(UserWarning, match="'transformer'.*AttnProcessor.*transformer_blocks.0.attn1"):
        handle = hal.attach(pipeline)
    handle.detach()
    assert [type(p) for p in pipeline.transformer.attn_processors.values()].count(AttnProcessor2_0) == 3


@pytest.mark.parametrize(
    "model, said",
    [
        (nn.Linear(2, 2), "no attention was found"),
        (SelfMadeAttention(), "SelfMadeAttention"),
        ("a path", "takes a diffusers pipeline.*not a str"),
        (None, "not a NoneType"),
    ],
)
def test_a_thing_without_attention_to_take_over_is_refused(model, said):
    before = state()
    with pytest.raises(AttachError, match=said):
        hal.attach(model)
    assert state() == before


def test_attaching_twice_is_refused_and_harmless():
    pipeline = tiny.flux()
    want = sample("flux", pipeline)
    with hal.attach(pipeline.transformer):
        with pytest.raises(AttachError, match=r"'transformer' \(FluxTransformer2DModel\) is attached.*detach"):
            hal.attach(pipeline)
        assert torch.equal(sample("flux", pipeline), want)
    with hal.attach(pipeline):
        pass
    with pytest.raises(AttachError, match="own component names"):
        hal.attach(pipeline, component="transformer")


def test_an_unknown_backend_is_refused_before_anything_is_changed():
    pipeline = tiny.flux()
    before = state(*parts(pipeline))
    with pytest.raises(PolicyError, match="unknown attention backend 'fa9'"):
        hal.attach(pipeline, attention_backend="fa9")
    assert state(*parts(pipeline)) == before


@pytest.mark.parametrize("target, said", [
    ("scheduler", "hal reaches no attention in 'scheduler', as it is no model with attention; it reaches vae, text_encoder, text_encoder_2, transformer$"),
    ("transfomer", "unknown component 'transfomer'; did you mean 'transformer'"),
    ("transformer.cros", "unknown role in 'transformer.cros' 'cros'; did you mean 'cross'"),
])  # fmt: skip
def test_an_override_for_what_has_no_attention_is_refused_before_anything_is_changed(target, said):
    pipeline = tiny.flux()
    before = state(*parts(pipeline))
    with pytest.raises(PolicyError, match=said):
        hal.attach(pipeline, component_attention_backends={target: "torch_sdpa"})
    assert state(*parts(pipeline)) == before


def test_an_override_for_a_role_without_layers_is_told_when_it_ends(zeros):
    pipeline = tiny.flux()
    sample("flux", pipeline)
    before = state(*parts(pipeline))
    with pytest.raises(
        PolicyError, match="no attention layer of 'transformer.cross' used zeros; its layers: transformer.self"
    ):
        with hal.attach(pipeline, component_attention_backends={"transformer.cross": zeros}):
            sample("flux", pipeline)
    assert state(*parts(pipeline)) == before


@pytest.mark.parametrize("target", ["transformer.cross", "transformer.self", "transformer@1", "text_encoder", "vae"])
def test_an_override_is_followed_by_exactly_its_target(target, zeros):
    pipeline = tiny.wan()
    component, role = target.partition("@")[0].partition(".")[::2]
    with hal.attach(pipeline, component_attention_backends={target: zeros}) as handle:
        got = sample("wan", pipeline)
    counted = {(r.component, r.role, r.backend): r.runs for r in handle.receipts()}
    want = {}
    for (c, r), n in EXPECTED["wan"].items():
        mine = c == component and role in ("", r)
        half = n // 2 if mine and "@" in target else 0  # one of two layers
        want[c, r, zeros if mine else "torch_sdpa"] = n - half
        want |= {(c, r, "torch_sdpa"): half} if half else {}
    assert counted == want
    assert not torch.equal(got, sample("wan", pipeline))


def test_diffusers_context_parallelism_is_refused():
    model = tiny.flux().transformer
    with hal.attach(model):
        for block in model.transformer_blocks:
            block.attn.processor._parallel_config = object()
        with pytest.raises(AttachError, match="context parallelism"):
            model(
                torch.randn(1, 16, 4),
                torch.randn(1, 7, 32),
                torch.randn(1, 32),
                torch.ones(1),
                torch.zeros(16, 3),
                torch.zeros(7, 3),
            )


def test_calls_by_diffusers_active_backend_are_reached_only_while_it_is_native():
    class ByActiveBackend:
        def __call__(self, attn, x, encoder_hidden_states=None, attention_mask=None):
            q = attn.to_q(x).unflatten(-1, (attn.heads, -1))
            return attention_dispatch.dispatch_attention_fn(q, q, q).flatten(2)

    model = Attention(query_dim=8, heads=2, dim_head=4, processor=ByActiveBackend())
    with hal.attach(model):
        model(torch.randn(1, 5, 8))
    assert sum(runs().values()) == 1
    with attention_dispatch.attention_backend("_native_math"), pytest.warns(UserWarning, match="_native_math"):
        hal.attach(model).detach()
