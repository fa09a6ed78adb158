"""Which door leads into which attention: every class that diffusers ships, and code that people write themselves."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn

from hal.integrations.sites import find, other_sequence, uses

ROOT = Path(diffusers.__file__).parent
FUNCTIONS = {"scaled_dot_product_attention", "dispatch_attention_fn"}


def attention_classes():
    """Every class in diffusers whose own source calls SDPA or the dispatcher, by reading the files."""
    for file in sorted((*ROOT.glob("models/**/*.py"), *ROOT.glob("pipelines/kolors/*.py"))):
        source = file.read_text("utf-8")
        if file.name == "attention_dispatch.py" or not any(name in source for name in FUNCTIONS):
            continue
        module = ".".join(("diffusers", *file.relative_to(ROOT).with_suffix("").parts))
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                called = {
                    getattr(c.func, "attr", getattr(c.func, "id", ""))
                    for c in ast.walk(node)
                    if isinstance(c, ast.Call)
                }
                if called & FUNCTIONS:
                    yield pytest.param(module, node.name, id=node.name)


# They ask for FlexAttention whatever is set, so there is nothing to take over.
FLEX = {"AnyFlowCausalAttnProcessor", "Kandinsky6SRAttnProcessor", "LTX2VideoVaeNeighborhoodAttnProcessor"}


@pytest.mark.parametrize("module, name", list(attention_classes()))
def test_every_attention_class_of_diffusers_is_reached(module, name):
    cls = getattr(importlib.import_module(module), name)
    made = object.__new__(cls)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    site = made
    if "Processor" in name:
        site = nn.Identity()
        site.processor = made
    sites, unreached = find(site)
    assert len(sites) == (name not in FLEX)
    if name in FLEX:
        assert len(unreached) == 1 and "lex" in unreached[0].why
    source = inspect.getsource(cls)
    if sites and "scaled_dot_product_attention(" in source:
        assert "call" in next(iter(sites)).doors
    if sites and "backend=self._attention_backend" in source:
        assert "backend" in next(iter(sites)).doors


def helper(q):
    return F.scaled_dot_product_attention(q, q, q)


class ByHelper(nn.Module):
    def forward(self, q):
        return helper(q)


class ByMethod(nn.Module):
    def forward(self, q):
        return self.attend(q)

    def attend(self, q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)


class ByClosure(nn.Module):
    def forward(self, q):
        return torch.stack([F.scaled_dot_product_attention(x, x, x) for x in q.unbind()])


class Asks(nn.Module):
    """Asks PyTorch what it has, as diffusers' blocks do; calls nothing."""

    def forward(self, q):
        return q if hasattr(F, "scaled_dot_product_attention") else None


class SomeAttention(nn.Module):
    def forward(self, q):
        return torch.softmax(q @ q.mT, -1) @ q


class AttentionBlock(nn.Module):
    """Only holds attention."""

    def __init__(self):
        super().__init__()
        self.inner = ByMethod()

    def forward(self, q):
        return self.inner(q)


class Processor:
    _attention_backend = None

    def __call__(self, attn, x):
        return dispatch_attention_fn(x, x, x, backend=self._attention_backend)


class HalfProcessor(Processor):
    def __call__(self, attn, x):
        return dispatch_attention_fn(x, x, x, backend=self._attention_backend) + dispatch_attention_fn(x, x, x)


class Holder(nn.Module):
    def __init__(self, processor):
        super().__init__()
        self.processor = processor

    def forward(self, x):
        return self.processor(self, x)


@pytest.mark.parametrize(
    "module, doors, unreached",
    [
        (ByHelper(), {"call"}, ""),
        (ByMethod(), {"call"}, ""),
        (ByClosure(), {"call"}, ""),
        (Asks(), None, ""),
        (SomeAttention(), None, "own code"),
        (AttentionBlock(), {"call"}, ""),
        (Holder(Processor()), {"backend"}, ""),
        (Holder(HalfProcessor()), {"backend", "call"}, ""),
        (Holder(lambda attn, x: x), None, "own code"),
        (nn.MultiheadAttention(4, 2), None, "MultiheadAttention"),
        (nn.TransformerEncoderLayer(4, 2), None, "MultiheadAttention"),
        (nn.Linear(4, 4), None, ""),
    ],
    ids=lambda x: type(getattr(x, "processor", x)).__name__ if isinstance(x, nn.Module) else "",
)
def test_code_is_read_not_names(module, doors, unreached):
    sites, missed = find(module)
    assert [set(site.doors) for site in sites] == ([] if doors is None else [doors])
    assert [unreached in u.why for u in missed] == ([True] if unreached else [])


def test_a_forward_patched_by_its_user_is_read_instead_of_the_class():
    module = SomeAttention()
    module.forward = helper
    sites, missed = find(module)
    assert len(sites) == 1 and not missed


def test_the_argument_that_carries_another_sequence_is_found():
    from diffusers.models.attention_processor import Attention
    from diffusers.models.transformers.transformer_wan import WanAttention
    from transformers.models.t5.modeling_t5 import T5Attention

    assert other_sequence(Attention) == ("encoder_hidden_states", 1)
    assert other_sequence(WanAttention) == ("encoder_hidden_states", 1)
    assert other_sequence(T5Attention)[0] == "key_value_states"
    assert other_sequence(nn.Linear) is None


def test_reading_stops_at_the_dispatcher_and_at_pytorch():
    names, _ = uses(Processor, Processor.__call__)
    assert names["dispatch_attention_fn"] == 1 and "get_active_backend" not in names
