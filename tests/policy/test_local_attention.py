"""hal.LocalAttention: a layer that chooses where it is built, and keeps what surrounded that."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hal
from hal.errors import CallError, NoKernelError, PolicyError


def qkv(heads=2, kv_heads=2, dim=8, q_len=5, kv_len=5):
    g = torch.Generator().manual_seed(0)
    shapes = [(1, q_len, heads, dim), (1, kv_len, kv_heads, dim), (1, kv_len, kv_heads, dim)]
    return [torch.randn(*s, generator=g) for s in shapes]


def is_zero(layer, **shape):
    return not layer(*qkv(**shape)).any()


def test_it_computes_what_it_says():
    q, k, v = qkv(heads=4, q_len=3)
    bhsd = [t.transpose(1, 2) for t in (q, k, v)]
    for given in ({}, {"scale": 0.3}):
        want = F.scaled_dot_product_attention(*bhsd, enable_gqa=True, **given).transpose(1, 2)
        torch.testing.assert_close(hal.LocalAttention(4, 8, kv_heads=2, **given)(q, k, v), want)
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2)  # bottom-right aligned
    want = F.scaled_dot_product_attention(*bhsd, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    out, lse = hal.LocalAttention(4, 8, kv_heads=2, causal=True)(q, k, v, return_lse=True)
    torch.testing.assert_close(out, want)
    assert lse.shape == (1, 4, 3)
    masked = hal.LocalAttention(4, 8, kv_heads=2)(q, k, v, attn_mask=seen)
    torch.testing.assert_close(masked, want)


def test_what_surrounds_its_construction_stays_with_it(zeros):
    plain = hal.LocalAttention(2, 8)
    with hal.component("text_encoder", zeros):
        pinned = hal.LocalAttention(2, 8)
    with hal.scope(attention_backend=zeros), hal.component("transformer"):
        chosen = hal.LocalAttention(2, 8)
    assert (plain.backend, pinned.backend, chosen.backend) == (None, zeros, zeros)
    assert not is_zero(plain) and is_zero(pinned) and is_zero(chosen)
    assert {(r.component, r.backend) for r in hal.receipts()} == {
        ("", "torch_sdpa"), ("text_encoder", zeros), ("transformer", zeros),
    }  # fmt: skip
    with hal.force("torch_sdpa"):  # where it runs still counts
        assert not is_zero(pinned)
    with pytest.raises(PolicyError, match="text_encoder.self chose zeros"):
        with hal.scope(component_attention_backends={"text_encoder": "torch_sdpa"}):
            assert is_zero(pinned)  # its own override was there first, and the other is told to be of no use


ORDER = [  # what surrounds it, what it says itself, whether it runs the backend of zeros
    (None, {"default_backend": "zeros"}, True),
    ("torch_sdpa", {"default_backend": "zeros"}, False),
    ("zeros", {"default_backend": "torch_sdpa"}, True),
    ("zeros", {"supported_backends": "torch_sdpa"}, True),  # a set guides automatic choice only
    ("zeros", {"supported_backends": ("torch_sdpa", "fa")}, True),
    (None, {"supported_backends": ("torch_sdpa",)}, False),
    ("torch_sdpa", {"required_backend": "zeros", "why": "its gates"}, True),
    ("zeros", {"required_backend": "sdpa"}, False),
]


@pytest.mark.parametrize("around, says, zero", ORDER)
@pytest.mark.parametrize("deferred", [False, True])
def test_what_it_says_itself(zeros, around, says, zero, deferred):
    with hal.scope(attention_backend=around) if around else hal.component("transformer"):
        layer = hal.LocalAttention(2, 8, deferred=deferred, **says)
        assert (layer.backend is None) is (deferred or not (around or "supported_backends" not in says))
        assert is_zero(layer) is zero
        if around and "required_backend" in says:  # else the scope would rightly say that nothing followed it
            hal.attention(*qkv())
    assert is_zero(layer) is zero


def test_a_required_backend_outranks_even_force(zeros):
    layer = hal.LocalAttention(2, 8, required_backend=zeros, why="it skips the gates otherwise")
    with hal.force("torch_sdpa"):
        assert is_zero(layer)
    assert layer.decision.source == "the layer, for correctness: it skips the gates otherwise"
    with pytest.raises(
        PolicyError,
        match="no attention layer of 'transformer' used torch_sdpa; its layers: transformer.self chose zeros",
    ):
        with hal.component("transformer", "torch_sdpa"):
            hal.LocalAttention(2, 8, required_backend=zeros)


@pytest.mark.parametrize("says, error, said", [
    ({"required_backend": "fa9"}, PolicyError, "unknown attention backend 'fa9'; did you mean 'fa"),
    ({"default_backend": "nope"}, PolicyError, "unknown attention backend 'nope'"),
    ({"supported_backends": ("fa", "sdpaa")}, PolicyError, "unknown attention backend 'sdpaa'"),
    ({"role": "both"}, CallError, "role is 'both'; allowed: self, cross"),
    ({"kv_heads": 3}, CallError, "heads=4 is no multiple of kv_heads=3"),
    ({"required_backend": "fa", "why": "packed rows"}, NoKernelError, "asked for by the layer, for correctness: packed rows, cannot serve"),
])  # fmt: skip
def test_a_layer_that_cannot_be_is_refused_where_it_is_built(says, error, said):
    with pytest.raises(error, match=said):
        hal.LocalAttention(4, 8, **says)


def test_an_explicit_choice_that_does_not_fit_is_refused_where_it_is_built():
    with hal.scope(attention_backend="fa"), hal.component("transformer"):
        with pytest.raises(
            NoKernelError, match="'fa', asked for by attention_backend='fa', cannot serve transformer.self"
        ):
            hal.LocalAttention(2, 8)
    with hal.simulate("h100", packages={"flash_attn_3": "3.0.0"}), hal.component("transformer", "fa"):
        layer = hal.LocalAttention(2, 64, dtype=torch.bfloat16)
        assert (layer.backend, layer.decision.kernel) == ("fa", "fa3")
        with pytest.raises(NoKernelError, match="head_dim"):
            hal.LocalAttention(2, 72 * 8, dtype=torch.bfloat16)
        with pytest.raises(NoKernelError, match="dtype"):
            hal.LocalAttention(2, 64, dtype=torch.float32)


def test_a_layer_that_defers_chooses_at_its_first_use(zeros):
    with hal.component(
        "text_encoder", "fa"
    ):  # which this machine has not; nothing is asked yet, and the override counts
        layer = hal.LocalAttention(2, 8, deferred=True)
    assert layer.backend is None
    with pytest.raises(NoKernelError, match="'fa', asked for by hal.component"):
        layer(*qkv())
    with hal.component("vae", zeros):
        layer = hal.LocalAttention(2, 8, deferred=True)
    assert is_zero(layer)


@pytest.mark.parametrize("build, said", [
    (lambda: None, "no attention layer of 'vae' used zeros; no attention that hal can reach ran there"),
    (lambda: nn.MultiheadAttention(8, 2), "no attention that hal can reach ran there"),
    (lambda: hal.LocalAttention(2, 8, required_backend="sdpa"), r"vae.self chose torch_sdpa \(the layer, for correctness"),
])  # fmt: skip
def test_a_component_that_uses_no_override_says_so_with_what_it_chose(zeros, build, said):
    with pytest.raises(PolicyError, match=said), hal.component("vae", zeros):
        build()


def test_a_role_of_a_component_is_overridden_alone(zeros):
    with hal.component("transformer.cross", zeros):
        here, across = hal.LocalAttention(2, 8), hal.LocalAttention(2, 8, role="cross")
    assert (here.backend, across.backend) == (None, zeros)
    assert not is_zero(here) and is_zero(across, kv_len=7)
    with pytest.raises(
        PolicyError, match=r"'transformer.cross' used zeros; its layers: transformer.self chose torch_sdpa .automatic."
    ):
        with hal.component("transformer.cross", zeros):
            hal.LocalAttention(2, 8)


class Block(nn.Module):
    def __init__(self, **says):
        super().__init__()
        self.own, self.cross = hal.LocalAttention(2, 8, **says), hal.LocalAttention(2, 8, role="cross")
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        return self.own(x, x, x) * self.scale, self.cross(x, y, y) * self.scale


def test_attach_takes_it_over_and_gives_it_back(zeros):
    with hal.component("transformer"):
        model = Block(default_backend="torch_sdpa")
    x, y = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
    with hal.attach(model, component_attention_backends={"transformer.self": zeros}) as handle:
        own, cross = model(x, y)
        assert not own.any() and cross.any()
        assert {(r.role, r.backend) for r in handle.receipts()} == {("self", zeros), ("cross", "torch_sdpa")}
    own, cross = model(x, y)
    assert own.any() and cross.any() and model.own.attached is None
    with hal.attach(model, component="transformer_2", attention_backend=zeros):
        assert not model(x, y)[0].any()


def test_what_a_layer_requires_outranks_what_is_attached(zeros):
    model = Block(required_backend="torch_sdpa")
    x, y = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
    with hal.attach(model, component_attention_backends={"transformer": zeros}):
        own, cross = model(x, y)
    assert own.any() and not cross.any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_is_a_layer_too(zeros, copied):
    with hal.component("transformer", "torch_sdpa"):
        model = nn.Sequential(hal.LocalAttention(2, 8, deferred=copied is not copy.deepcopy))
    twin = copied(model)
    x = qkv()
    assert torch.equal(twin[0](*x), model[0](*x)) and twin[0].backend == model[0].backend
    with hal.request(twin, attention_backend_override="torch_sdpa") as r:
        assert r.switched == ("transformer.self",)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_into_one_graph_and_follows_the_policy(zeros, backend):
    with hal.component("transformer"):
        model = Block()
    with hal.component("vae", zeros):
        pinned = hal.LocalAttention(2, 8)
    step = torch.compile(lambda x, y: (*model(x, y), pinned(x, x, x)), fullgraph=True, backend=backend)
    x, y = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
    for a, b in zip(step(x, y), (*model(x, y), pinned(x, x, x))):
        torch.testing.assert_close(a, b)
    with hal.force(zeros, on="transformer.cross"):
        own, cross, rest = step(x, y)
        assert own.any() and not cross.any() and not rest.any()
    own, cross, rest = step(x, y)
    assert own.any() and cross.any() and not rest.any()


def test_gradients_pass_and_a_repr_tells_it():
    layer = hal.LocalAttention(2, 8, kv_heads=1)
    q, k, v = (t.requires_grad_() for t in qkv(kv_heads=1))
    layer(q, k, v).sum().backward()
    assert v.grad is not None and v.grad.any()
    assert "heads=2, kv_heads=1, head_dim=8, role=self, backend=automatic" in repr(layer)
