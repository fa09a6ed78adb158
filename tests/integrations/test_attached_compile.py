"""torch.compile of an attached model: no more graphs than without hal, the same numbers, and all through hal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attached import runs
from torch import nn
from torch._dynamo.testing import CompileCounter

import hal
from hal.testing import tiny


def inputs(name):
    def random(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))

    common = {"encoder_hidden_states": random(1, 7, 32), "timestep": torch.tensor([1])}
    return {
        "flux": lambda: dict(
            common,
            hidden_states=random(1, 16, 4),
            pooled_projections=random(1, 32),
            timestep=torch.ones(1),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(7, 3),
        ),
        "sd3": lambda: dict(common, hidden_states=random(1, 4, 8, 8), pooled_projections=random(1, 64)),
        "wan": lambda: dict(common, hidden_states=random(1, 16, 2, 4, 4)),
        "pixart": lambda: dict(
            common,
            hidden_states=random(1, 4, 8, 8),
            encoder_attention_mask=torch.ones(1, 7),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
        "ltx": lambda: dict(
            common,
            hidden_states=random(1, 16, 8),
            encoder_attention_mask=torch.ones(1, 7),
            num_frames=1,
            height=4,
            width=4,
        ),
    }[name]()


def compiled(model, arguments, **options):
    torch._dynamo.reset()
    counter = CompileCounter()
    out = torch.compile(model, backend=counter, **options)(**arguments)
    return out[0], counter.frame_count


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("wan", "flux", "pixart", "ltx")]


@pytest.mark.parametrize("name", ["sd3", *SLOW])
@torch.no_grad()
def test_an_attached_transformer_compiles_into_one_graph(name):
    model, arguments = tiny.PIPELINES[name]().transformer, {**inputs(name), "return_dict": False}
    want = model(**arguments)[0]
    with hal.attach(model):
        got, graphs = compiled(model, arguments, fullgraph=True)
        assert graphs == 1
        torch.testing.assert_close(got, want)
        assert {component for component, _ in runs()} == {"transformer"}
        assert {role for _, role in runs()} == ({"self"} if name in ("flux", "sd3") else {"self", "cross"})


@pytest.mark.slow
@torch.no_grad()
def test_an_attached_text_encoder_compiles_into_one_graph():
    model, tokens = tiny.t5(), torch.randint(5, 120, (1, 7))
    want = model(tokens)[0]
    with hal.attach(model):
        got, graphs = compiled(model, {"input_ids": tokens, "return_dict": False}, fullgraph=True)
    assert graphs == 1 and dict(runs())
    torch.testing.assert_close(got, want)


@pytest.mark.slow
@torch.no_grad()
def test_blocks_compiled_one_by_one_share_their_code():
    """Regional compilation: two equal blocks are one compilation, attached or not."""
    model, arguments = tiny.wan().transformer, inputs("wan")
    want = model(**arguments, return_dict=False)[0]
    counts = []
    for attached in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        for block in model.blocks:
            block.compile(backend=counter)
        with hal.attach(model) if attached else torch.no_grad():
            torch.testing.assert_close(model(**arguments, return_dict=False)[0], want)
        counts.append(counter.frame_count)
    assert counts[1] == counts[0]
    assert runs()


@pytest.mark.parametrize("name", ["sd3", pytest.param("flux", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_model_compiled_before_is_taken_over_and_given_back(name, zeros):
    model, arguments = tiny.PIPELINES[name]().transformer, {**inputs(name), "return_dict": False}
    torch._dynamo.reset()
    fast = torch.compile(model, backend="eager")
    want = fast(**arguments)[0]
    with hal.attach(fast, attention_backend=zeros):
        assert not torch.allclose(fast(**arguments)[0], want)
        assert set(runs()) == {("transformer", "self")}
    torch.testing.assert_close(fast(**arguments)[0], want)


class Methods(nn.Module):
    """Tensor methods that PyTorch writes in Python, around an attention."""

    def forward(self, q):
        q = q.unflatten(-1, (2, 4)).flatten(-2)
        first, second = q.split(3, dim=-2)
        q = torch.cat((first, 1 - second), -2)
        return F.scaled_dot_product_attention(q, q, q)


@torch.no_grad()
def test_python_methods_of_tensors_trace_inside_an_attention():
    model, q = Methods(), torch.randn(1, 2, 6, 8)
    want = model(q)
    with hal.attach(model):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(q), want)
    assert runs()


class Breaks(nn.Module):
    """A graph break between entering the module and its attention."""

    def forward(self, q):
        q = q.unflatten(-1, (2, 4)).flatten(-2)
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(q, q, q)


@torch.no_grad()
def test_a_graph_break_inside_an_attention_loses_no_call(zeros):
    model, q = nn.Sequential(Breaks(), Breaks()), torch.randn(1, 2, 6, 8)
    with hal.attach(model, attention_backend=zeros):
        torch._dynamo.reset()
        fast = torch.compile(model, backend="eager")
        for _ in range(2):
            assert not fast(q).any()
    torch.testing.assert_close(fast(q), model(q))
    assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.slow
def test_gradients_pass_through_compiled_attention():
    model, arguments = tiny.sd3().transformer, inputs("sd3")

    def gradients(call):
        model.zero_grad()
        call(**arguments, return_dict=False)[0].square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = gradients(model)
    with hal.attach(model):
        torch._dynamo.reset()
        torch.testing.assert_close(gradients(torch.compile(model, backend="aot_eager", fullgraph=True)), want)
