"""What a site's call says to hal: shapes, masks, causality, role and place; and that nothing leaks between calls."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from attached import Plain, runs, sample
from diffusers import UNet2DConditionModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_processor import Attention, IPAdapterAttnProcessor2_0
from torch import nn

import hal
from hal import context, run
from hal.testing import tiny


def test_hal_knows_component_layer_and_role_of_every_call(monkeypatch):
    seen, real = [], run.attention

    def spy(q, k, v, **arguments):
        seen.append((context.current.get().site.component, context.where().layer, arguments["role"]))
        return real(q, k, v, **arguments)

    monkeypatch.setattr(run, "attention", spy)
    pipeline = tiny.pixart()
    with hal.attach(pipeline):
        sample("pixart", pipeline, num_inference_steps=1)
    block = [
        ("transformer", 0, "self"),
        ("transformer", 0, "cross"),
        ("transformer", 1, "self"),
        ("transformer", 1, "cross"),
    ]
    assert [s for s in seen if s[0] == "transformer"] == block
    assert [s for s in seen if s[0] == "vae"] == [("vae", 1, "self")]  # layer 0 is the encoder's
    assert context.current.get().site.component == "" and context.where().layer is None


def test_joint_attention_is_self_attention():
    for name in ("flux", "sd3"):
        pipeline = tiny.PIPELINES[name]()
        with hal.attach(pipeline.transformer):
            sample(name, pipeline, num_inference_steps=1)
    assert {role for _, role in runs()} == {"self"}


@torch.no_grad()
def test_an_image_prompt_beside_the_text_is_cross_attention():
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(4, 8),
        norm_num_groups=2,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
    ).eval()
    for name, module in unet.named_modules():
        if name.endswith("attn2"):
            module.set_processor(IPAdapterAttnProcessor2_0(hidden_size=8, cross_attention_dim=8, num_tokens=(9,)))
    arguments = {"timestep": 1, "encoder_hidden_states": (torch.randn(2, 5, 8), [torch.randn(2, 1, 9, 8)])}
    noise = torch.randn(2, 4, 8, 8)
    want = unet(noise, **arguments).sample
    with hal.attach(unet):
        assert torch.equal(unet(noise, **arguments).sample, want)
    assert dict(runs()) == {("unet", "self"): 4, ("unet", "cross"): 2 * 4}  # text and image, each by itself


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)], ids=str)
def test_a_module_without_processor_is_reached_in_any_shape(shape):
    model, q = Plain(), torch.randn(shape)
    mask = torch.rand(5, 5) > 0.3
    mask[:, 0] = True
    for arguments in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3}):
        want = model(q, **arguments)
        with hal.attach(model):
            torch.testing.assert_close(model(q, **arguments), want)
    assert sum(runs().values()) == 4


def test_batch_dimensions_are_broadcast_as_by_pytorch():
    model = Plain()
    q, k, v = torch.randn(1, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    mask = torch.rand(2, 1, 5, 7)
    want = model(q, k, v, attn_mask=mask)
    with hal.attach(model):
        torch.testing.assert_close(model(q, k, v, attn_mask=mask), want)


@pytest.mark.parametrize("q_len, kv_len", [(5, 5), (3, 7), (7, 3), (1, 4)])
def test_causal_keeps_the_top_left_alignment_of_its_caller(q_len, kv_len):
    model = Plain()
    q, k, v = torch.randn(1, 2, q_len, 8), torch.randn(1, 2, kv_len, 8), torch.randn(1, 2, kv_len, 8)
    want = model(q, k, v, is_causal=True)
    with hal.attach(model):
        torch.testing.assert_close(model(q, k, v, is_causal=True), want)


class Outer(nn.Module):
    """Calls attention itself, and holds a module that does."""

    def __init__(self):
        super().__init__()
        self.inner = Plain()

    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q) + self.inner(q)


def test_a_call_counts_once_even_where_sites_nest_and_the_kernel_is_pytorchs(monkeypatch):
    roles = []

    def kernel(q, k, v, *, role, layout, **arguments):
        roles.append(role)
        return F.scaled_dot_product_attention(q, k, v, **arguments)

    monkeypatch.setattr(run, "attention", kernel)
    model, q = Outer(), torch.randn(1, 2, 5, 8)
    want = model(q)
    with hal.attach(model):
        assert torch.equal(model(q), want)
    assert roles == ["self", "self"]


def test_an_exception_inside_leaves_no_trace():
    model, q = Plain(), torch.randn(1, 2, 4, 8)
    with hal.attach(model):
        with pytest.raises(TypeError):
            model(q, nonsense=1)
        F.scaled_dot_product_attention(q, q, q)
        assert torch.overrides._len_torch_function_stack() == 0 and not hal.receipts()


def test_threads_do_not_meet(zeros):
    """One thread runs an attached model while another runs plain attention."""
    model, q = Plain(), torch.randn(1, 2, 64, 8)
    want = F.scaled_dot_product_attention(q, q, q)
    wrong = []

    def plain():
        for _ in range(200):
            if not torch.equal(F.scaled_dot_product_attention(q, q, q), want):
                wrong.append("another thread")

    with hal.attach(model, attention_backend=zeros):
        thread = threading.Thread(target=plain)
        thread.start()
        for _ in range(200):
            if model(q).any():
                wrong.append("this thread")
        thread.join()
    assert not wrong


def test_gradients_are_the_same():
    for name in ("sd3", "flux"):
        model = tiny.PIPELINES[name]().transformer
        image = torch.randn(1, 16, 4) if name == "flux" else torch.randn(1, 4, 8, 8)
        arguments = {
            "hidden_states": image,
            "encoder_hidden_states": torch.randn(1, 7, 32),
            "timestep": torch.ones(1),
            "pooled_projections": torch.randn(1, 32 if name == "flux" else 64),
        }
        if name == "flux":
            arguments |= {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)}

        def gradients(model=model, arguments=arguments):
            model.zero_grad()
            model(**arguments, return_dict=False)[0].square().sum().backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        want = gradients()
        with hal.attach(model):
            torch.testing.assert_close(gradients(), want)
            model.enable_gradient_checkpointing()
            torch.testing.assert_close(gradients(), want)


class Masked:
    """A processor that passes its mask to diffusers' dispatcher as it is."""

    _attention_backend = None

    def __call__(self, attn, x, encoder_hidden_states=None, attention_mask=None):
        q = x.unflatten(-1, (2, -1))
        backend = self._attention_backend
        return attention_dispatch.dispatch_attention_fn(q, q, q, attn_mask=attention_mask, backend=backend).flatten(2)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (5, 5), (3, 1, 1, 5), (1, 2, 5, 5)], ids=str)
def test_masks_mean_what_they_mean_to_diffusers(shape, additive):
    model = Attention(query_dim=8, heads=2, dim_head=4, processor=Masked())
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    mask = torch.where(mask, torch.rand(shape), -torch.inf) if additive else mask
    x = torch.randn(3, 5, 8)
    want = model(x, attention_mask=mask)
    with hal.attach(model):
        torch.testing.assert_close(model(x, attention_mask=mask), want)
    assert sum(runs().values()) == 1
