"""hal.request: one request's own choice in the denoising loop, or a refusal before anything is switched."""

from __future__ import annotations

import threading

import pytest
import torch
from attached import ZEROS, Plain
from torch import nn

import hal
from hal import context, plugins, requests, run
from hal.backend import Backend, Kernel
from hal.catalog import Catalog
from hal.errors import PolicyError


def backend(name, **more):
    return Backend(name, portable=ZEROS.portable, **{"per_request": True, **more})


@pytest.fixture
def stand_ins(monkeypatch):
    """``quick`` may be switched to; ``tiles`` is sparse; ``zeros`` is like quick, but may not."""
    catalog = plugins.catalog(frozenset())
    more = (
        backend("quick", quality="near", traits=frozenset({"quantised"})),
        backend("tiles", quality="lossy", traits=frozenset({"sparse"}), roles=frozenset({"self"}), per_request=False),
        backend("zeros", per_request=False),
    )  # fmt: skip
    wider = Catalog(catalog.platforms, {**catalog.backends, **{b.name: b for b in more}}, catalog.problems)
    monkeypatch.setattr(plugins, "catalog", lambda ignore=frozenset(): wider)
    yield
    run.forget()


def model(**says):
    with hal.component("transformer"):
        return Layers(**says)


class Layers(nn.Module):
    def __init__(self, **says):
        super().__init__()
        self.a, self.b = hal.LocalAttention(2, 8), hal.LocalAttention(2, 8, **says)

    def forward(self, x):
        return self.a(x, x, x).any().item(), self.b(x, x, x).any().item()


X = torch.ones(1, 5, 2, 8)


def switch(m, **more):
    return hal.request(m, **{"attention_backend_override": "quick", **more})


def test_valid_targets_are_exactly_those_that_say_so(stand_ins):
    m = model()
    catalog = plugins.catalog()
    able = {b.name for b in catalog.backends.values() if b.per_request}
    assert able == {"fa", "torch_sdpa", "quick"}  # and, where they are, sage_attn and sage_attn_3
    for name in catalog.backends:
        if name in able:
            continue
        with (
            pytest.raises(PolicyError, match=rf"{name}.*allowed: fa, quick, torch_sdpa"),
            switch(m, attention_backend_override=name),
        ):
            raise AssertionError
    for bad in ("fa9", "", "default"):
        with pytest.raises(PolicyError), switch(m, attention_backend_override=bad):
            raise AssertionError


def test_it_holds_inside_the_block_and_no_longer(stand_ins):
    m = model()
    assert m(X) == (True, True)
    with switch(m) as r:
        assert m(X) == (False, False)
        assert (r.attention_backend_override, r.switched) == ("quick", ("transformer.self",))
        with switch(m, attention_backend_override="sdpa"):
            assert m(X) == (True, True)
        assert m(X) == (False, False)
    assert m(X) == (True, True)
    with pytest.raises(ZeroDivisionError), switch(m):
        raise ZeroDivisionError
    assert m(X) == (True, True) and context.current.get() is context.NOTHING


def test_without_an_override_nothing_is_changed(stand_ins):
    with hal.request() as r:
        assert (r.signature, r.attention_backend_override, r.switched) == ("", None, ())
        assert context.current.get() is context.NOTHING


def test_it_is_the_requests_own_also_in_another_thread(stand_ins):
    m = model()
    seen = []
    with switch(m):
        thread = threading.Thread(target=lambda: seen.append(m(X)))
        thread.start()
        thread.join()
        assert seen == [(True, True)] and m(X) == (False, False)


@pytest.mark.parametrize("given, want", [
    ({}, ""),
    ({"attention_backend_override": "quick"}, "attention_backend_override=quick"),
    ({"attention_backend_override": "fa3"}, "attention_backend_override=fa"),
    ({"attention_backend_override": " FA "}, "attention_backend_override=fa"),
    ({"skip_softmax_params": {"threshold_scale_factor": 500}}, "skip_softmax_params=threshold_scale_factor:500.0+start_step:0"),
    ({"skip_softmax_params": {"start_step": 0, "threshold_scale_factor": 500.0}}, "skip_softmax_params=threshold_scale_factor:500.0+start_step:0"),
    ({"attention_backend_override": "quick", "skip_softmax_params": {"threshold_scale_factor": 0.5, "start_step": 14}},
     "attention_backend_override=quick;skip_softmax_params=threshold_scale_factor:0.5+start_step:14"),
])  # fmt: skip
def test_the_signature_is_the_same_for_the_same_request(stand_ins, given, want):
    assert requests.signature(**given) == want


@pytest.mark.parametrize("params, said", [
    ({}, "threshold_scale_factor is required"),
    ({"start_step": 3}, "threshold_scale_factor is required"),
    *(({"threshold_scale_factor": x}, "allowed: a finite number > 0") for x in (0, -1.0, float("inf"), float("nan"), True, "500", [1])),
    *(({"threshold_scale_factor": 1.0, "start_step": x}, "allowed: an integer >= 0") for x in (-1, 1.5, True, "3", None)),
    ({"threshold_scale_factor": 1.0, "start_steps": 3}, "unknown key 'start_steps'; did you mean 'start_step'"),
    ([("threshold_scale_factor", 1.0)], "write {'threshold_scale_factor': 500.0"),
    ({"threshold_scale_factor": 1.0}, "no kernel that is installed skips softmax tiles"),
])  # fmt: skip
def test_skip_softmax_is_checked_before_anything_runs(stand_ins, params, said):
    with pytest.raises(PolicyError, match=said), switch(model(), skip_softmax_params=params):
        raise AssertionError


# ---- rejected, with nothing switched


def test_a_layer_that_cannot_follow_rejects_the_whole_request(stand_ins, monkeypatch):
    class Odd(Layers):
        def __init__(self):
            super().__init__()
            self.b = hal.LocalAttention(2, 20, causal=True)

    catalog = plugins.catalog()
    kernel = Kernel("picky", ZEROS.portable.bind, layout="any", limits={"head_dim": {8}})
    picky = Backend("picky", portable=kernel, per_request=True)
    wider = Catalog(catalog.platforms, {**catalog.backends, "picky": picky})
    monkeypatch.setattr(plugins, "catalog", lambda ignore=frozenset(): wider)
    with hal.component("transformer"):
        m = Odd()
    with (
        pytest.raises(PolicyError, match=r"(?s)is rejected, nothing was switched: .*'picky'.*head_dim is 20"),
        switch(m, attention_backend_override="picky"),
    ):
        raise AssertionError
    assert context.current.get() is context.NOTHING and m.a(X, X, X).any()


def test_a_machine_without_the_target_rejects_with_the_reasons(stand_ins):
    with pytest.raises(PolicyError, match=r"attention_backend_override='fa3'.*nothing was switched: .*'fa'.*cpu"):
        with switch(model(), attention_backend_override="fa3"):
            raise AssertionError


def test_a_sparse_default_is_not_mixed_with_it(stand_ins, monkeypatch):
    m = model()
    for around in (hal.scope(attention_backend="tiles"), hal.component("transformer", "tiles")):
        with pytest.raises(
            PolicyError, match="transformer.self runs tiles by default, which is sparse; a request cannot mix"
        ):
            with around, switch(m):
                raise AssertionError
    monkeypatch.setenv("HAL_ATTENTION_BACKEND", "tiles")
    hal.forget()
    with pytest.raises(PolicyError, match="runs tiles by default, which is sparse"), switch(m):
        raise AssertionError


def test_what_outranks_it_rejects_it(stand_ins):
    m = model()
    with hal.force("zeros"), pytest.raises(PolicyError, match=r"would run zeros .hal.force"), switch(m):
        raise AssertionError
    with hal.scope(forbid="quick"), pytest.raises(PolicyError, match="quick.*forbid"), switch(m):
        raise AssertionError


def test_a_compiled_denoiser_keeps_its_graph_and_rejects_it(stand_ins):
    m = torch.compile(model(), backend="eager")
    with pytest.raises(PolicyError, match="under torch.compile, whose graph keeps its kernel"):
        with hal.attach(m, component="transformer") as handle, switch(handle):
            raise AssertionError
    inner = nn.Sequential(Plain())
    inner.compile(backend="eager")
    with hal.attach(inner, component="transformer") as handle:
        with pytest.raises(PolicyError, match="under torch.compile"), switch(handle):
            raise AssertionError


def test_a_graph_capture_rejects_it(stand_ins, monkeypatch):
    monkeypatch.setattr(type(hal.current_platform()), "capturing", lambda self: True)
    with pytest.raises(PolicyError, match="a traced or captured graph keeps its kernel"), switch(model()):
        raise AssertionError


@pytest.mark.parametrize(
    "what", [lambda: nn.Linear(2, 2), lambda: object(), lambda: Plain()], ids=["linear", "object", "plain"]
)
def test_a_model_without_attention_of_hal_is_told(stand_ins, what):
    with (
        pytest.raises(PolicyError, match="has no denoiser attention that hal can switch; call hal.attach"),
        switch(what()),
    ):
        raise AssertionError


# ---- required layers, cross-attention, other components


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_layer_that_requires_a_backend_keeps_it(stand_ins, attached, first):
    m = model(required_backend="sdpa", why="its gates")
    if first:  # whichever layer comes first
        m.a, m.b = m.b, m.a
    with hal.attach(m) if attached else hal.component("transformer"), switch(m) as r:
        assert m(X) == ((True, False) if first else (False, True))
        assert r.switched == ("transformer.self",)
    with hal.component("transformer"):
        only = nn.Sequential(hal.LocalAttention(2, 8, required_backend="sdpa"))
    with (
        pytest.raises(PolicyError, match="no layer can switch: transformer.self keeps torch_sdpa, which it requires"),
        switch(only),
    ):
        raise AssertionError


def test_only_the_denoiser_is_switched(stand_ins):
    denoiser, encoder = nn.Sequential(Plain()), nn.Sequential(Plain())
    pipeline = type("TinyPipeline", (), {})()
    pipeline.components = {"transformer": denoiser, "text_encoder": encoder}
    pipeline.transformer, pipeline.text_encoder = denoiser, encoder
    q = torch.randn(1, 2, 5, 8)
    with hal.attach(pipeline) as handle:
        for target in (pipeline, handle, denoiser, None):
            with switch(target):
                assert not denoiser(q).any() and encoder(q).any()
            assert denoiser(q).any()
        with pytest.raises(PolicyError, match="has no denoiser attention"), switch(encoder[0]):
            raise AssertionError
        assert {(r.component, r.backend) for r in handle.receipts()} == {
            ("transformer", "quick"), ("transformer", "torch_sdpa"), ("text_encoder", "torch_sdpa"),
        }  # fmt: skip


def test_it_is_decided_for_a_simulated_machine_inside_one():
    with hal.component("transformer"):
        m = nn.Sequential(hal.LocalAttention(2, 64, dtype=torch.bfloat16))
    with hal.simulate("h100", packages={"flash_attn_3": "3.0.0"}):
        with hal.request(m, attention_backend_override="fa") as r:
            assert r.switched == ("transformer.self",)
    with (
        hal.simulate("h100"),
        pytest.raises(PolicyError, match="flash"),
        hal.request(m, attention_backend_override="fa"),
    ):
        raise AssertionError
    with hal.simulate("m3"), pytest.raises(PolicyError, match="mps"), hal.request(m, attention_backend_override="fa"):
        raise AssertionError
