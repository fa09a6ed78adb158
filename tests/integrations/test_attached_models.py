"""hal.attach on transformers models: masks, causality, grouped queries, position biases, configs."""

from __future__ import annotations

import pytest
import torch
import transformers
from attached import runs
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaModel,
    StaticCache,
    T5Config,
    T5Model,
)

import hal
from hal import run
from hal.errors import AttachError
from hal.integrations import routing
from hal.testing import tiny

TOKENS = torch.randint(5, 120, (2, 7), generator=torch.Generator().manual_seed(0))
RIGHT, LEFT = torch.ones_like(TOKENS), torch.ones_like(TOKENS)
RIGHT[1, 5:] = 0
LEFT[1, :2] = 0
MASKS = {"none": None, "full": torch.ones_like(TOKENS), "right padding": RIGHT, "left padding": LEFT}


@pytest.fixture
def spied(monkeypatch):
    """Arguments of every call that reaches hal."""
    calls, real = [], run.attention

    def spy(q, k, v, **arguments):
        calls.append({"q": q, "k": k, **arguments})
        return real(q, k, v, **arguments)

    monkeypatch.setattr(run, "attention", spy)
    return calls


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("name", tiny.MODELS)
@torch.no_grad()
def test_an_attached_model_gives_the_same_output(name, mask):
    model = tiny.MODELS[name]()
    want = model(TOKENS, attention_mask=mask).last_hidden_state
    with hal.attach(model):
        got = model(TOKENS, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got, want)
    assert dict(runs()) == {("text_encoder", "self"): 2}


@pytest.mark.parametrize("name", tiny.MODELS)
@torch.no_grad()
def test_a_backend_of_zeros_changes_the_output(name, zeros):
    model = tiny.MODELS[name]()
    want = model(TOKENS).last_hidden_state
    with hal.attach(model, attention_backend=zeros):
        assert not torch.allclose(model(TOKENS).last_hidden_state, want)
    assert torch.equal(model(TOKENS).last_hidden_state, want)


@torch.no_grad()
def test_eager_models_are_taken_over_too_and_get_their_implementation_back():
    model = tiny.t5()
    model.set_attn_implementation("eager")
    want = model(TOKENS, attention_mask=RIGHT).last_hidden_state
    with hal.attach(model):
        assert model.config._attn_implementation == "hal"
        got = model(TOKENS, attention_mask=RIGHT).last_hidden_state
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == model.encoder.config._attn_implementation == "eager"


@torch.no_grad()
def test_keys_are_not_repeated_for_grouped_queries(spied):
    with hal.attach(model := tiny.llama()):
        model(TOKENS)
        model(TOKENS, attention_mask=RIGHT)
    assert len(spied) == 4
    for call in spied:
        assert (call["q"].shape[1], call["k"].shape[1], call["enable_gqa"]) == (4, 2, True)


@torch.no_grad()
def test_causality_is_said_and_masks_are_boolean(spied):
    with hal.attach(model := tiny.qwen2()):
        model(TOKENS)
        model(TOKENS, attention_mask=RIGHT)
    assert [(c["is_causal"], c["attn_mask"] is None) for c in spied] == [(True, True)] * 2 + [(False, False)] * 2
    assert spied[-1]["attn_mask"].dtype == torch.bool


@torch.no_grad()
def test_t5_adds_its_bias_to_the_mask_and_keeps_its_scale(spied):
    with hal.attach(model := tiny.t5()):
        model(TOKENS, attention_mask=RIGHT)
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(7, 7)
    for call in spied:
        assert call["scale"] == 1.0 and not call["is_causal"]
        torch.testing.assert_close(call["attn_mask"][0], bias[0])
        assert (call["attn_mask"][1, :, :, 5:] == torch.finfo(torch.float32).min).all()


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_decoding_with_a_cache_gives_the_same_tokens(cache):
    model = tiny.llama()

    def decoded():
        past = StaticCache(model.config, max_cache_len=16) if cache else None
        out = model(TOKENS, use_cache=True, past_key_values=past)
        states = [out.last_hidden_state]
        for step in range(3):
            out = model(TOKENS[:, step : step + 1], use_cache=True, past_key_values=out.past_key_values)
            states.append(out.last_hidden_state)
        out = model(TOKENS[:, :3], use_cache=True, past_key_values=out.past_key_values)  # several tokens after a prefix
        return torch.cat([*states, out.last_hidden_state], 1)

    want = decoded()
    with hal.attach(model):
        torch.testing.assert_close(decoded(), want)
    assert dict(runs()) == {("text_encoder", "self"): 2 * 5}


@torch.no_grad()
def test_a_decoder_that_looks_at_an_encoder_has_both_roles(spied):
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, decoder_start_token_id=0)
    torch.manual_seed(0)
    model = T5Model(config).eval()
    want = model(TOKENS, attention_mask=RIGHT, decoder_input_ids=TOKENS[:, :4]).last_hidden_state
    with hal.attach(model, component="t5"):
        got = model(TOKENS, attention_mask=RIGHT, decoder_input_ids=TOKENS[:, :4]).last_hidden_state
    torch.testing.assert_close(got, want)
    assert [c["role"] for c in spied] == ["self", "self", "cross"]  # encoder, decoder, decoder to encoder
    assert dict(runs()) == {("t5", "self"): 2, ("t5", "cross"): 1}


@torch.no_grad()
def test_models_that_share_a_config_object_do_not_meet(zeros):
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    one, two = LlamaModel(config).eval(), LlamaModel(config).eval()
    want = two(TOKENS).last_hidden_state
    with hal.attach(one, attention_backend=zeros):
        assert one.config._attn_implementation == "hal" and two.config._attn_implementation == "sdpa"
        assert torch.equal(two(TOKENS).last_hidden_state, want)
        one.config.use_cache = False
    assert one.config is two.config is config and config._attn_implementation == "sdpa"
    assert config.use_cache is False, "what was set on an attached model's config stays"


@torch.no_grad()
def test_sub_configs_are_set_and_restored():
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = CLIPModel(
        CLIPConfig(
            text_config={**small, "vocab_size": 128, "max_position_embeddings": 77, "eos_token_id": 1},
            vision_config={**small, "image_size": 8, "patch_size": 4},
            projection_dim=16,
        )
    ).eval()
    configs = model.config, model.config.text_config, model.config.vision_config
    model.config.vision_config._attn_implementation = "eager"
    arguments = {"input_ids": TOKENS, "pixel_values": torch.randn(2, 3, 8, 8)}
    want = model(**arguments).logits_per_image
    with hal.attach(model, component="clip"):
        assert model.config.text_config._attn_implementation == model.config.vision_config._attn_implementation == "hal"
        torch.testing.assert_close(model(**arguments).logits_per_image, want)
    assert dict(runs()) == {("clip", "self"): 2}
    assert (model.config, model.config.text_config, model.config.vision_config) == configs
    assert model.config is configs[0] and model.config.vision_config is configs[2]
    assert [c._attn_implementation for c in configs] == ["sdpa", "sdpa", "eager"]


def test_transformers_registries_are_as_before():
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    assert not any("hal" in mapping for mapping in before)
    with hal.attach(tiny.t5()), hal.attach(tiny.clip_text()):
        assert "hal" in AttentionInterface._global_mapping
    assert (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)) == before


def test_what_hal_does_not_compute_is_refused():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(AttachError, match="Linear asks for softcap"):
        routing._transformers(torch.nn.Linear(1, 1), q, q, q, None, softcap=50.0)


def test_a_model_that_transformers_would_not_switch_is_named():
    config = transformers.XLNetConfig(vocab_size=128, d_model=32, n_layer=1, n_head=4, d_inner=37)
    with pytest.raises(AttachError, match="XLNet"):
        hal.attach(transformers.XLNetModel(config))


def test_gradients_are_the_same():
    model = tiny.llama()

    def gradients():
        model.zero_grad()
        model(TOKENS, attention_mask=RIGHT).last_hidden_state.square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients()
    with hal.attach(model):
        torch.testing.assert_close(gradients(), want)
