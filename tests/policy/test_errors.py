"""What is wrong is told where it is said, in hal's own errors, before anything runs."""

from __future__ import annotations

import pytest
import torch

import hal
from hal.backend import Backend

Q = torch.ones(1, 4, 2, 8)


def test_a_request_that_cannot_be_served_is_a_policy_error_and_a_missing_kernel():
    with pytest.raises(hal.PolicyError) as e:
        hal.attention(Q, Q, Q, backend="fa")
    assert isinstance(e.value, hal.NoKernelError) and e.value.decision.request.backend == "fa"


@pytest.mark.parametrize("wrong", [3, ["fa"], "", True])
def test_a_backend_is_named_by_a_text(wrong):
    for use in (
        lambda: hal.force(wrong).__enter__(),
        lambda: hal.component("vae", backend=wrong).__enter__(),
        lambda: hal.scope(attention_backend=wrong).__enter__(),
        lambda: hal.explain(Q, Q, Q, backend=wrong),
    ):
        with pytest.raises(hal.PolicyError):
            use()


def test_a_forced_kernel_is_one_of_the_backends():
    with pytest.raises(hal.PolicyError, match="sdpa.math is no kernel of fa; its kernels: fa"):
        hal.force("fa", kernel="sdpa.math").__enter__()


MISSPELT = [
    ("transformr", "transformer"),
    ("text_encodr", "text_encoder"),
    ("audio_encoder", ""),
    ("transformer_7", ""),
    ("my_denoiser", ""),
]


@pytest.mark.parametrize("name, meant", MISSPELT)
def test_a_component_that_is_nearly_a_usual_one_is_refused_where_nobody_knows_better(name, meant):
    for use in (
        lambda: hal.component(name),
        lambda: hal.force("torch_sdpa", on=name),
        lambda: hal.scope(forbid=f"{name}=fa"),
    ):
        if not meant:
            with use():
                pass
            continue
        with pytest.raises(hal.PolicyError, match=f"unknown component '{name}'; did you mean '{meant}'"), use():
            pass


def test_a_force_for_what_did_not_run_is_told_when_it_ends():
    with pytest.raises(hal.PolicyError, match="no attention layer of 'transformer.cross' used torch_sdpa"):
        with hal.component("transformer"), hal.force("torch_sdpa", on="transformer.cross"):
            hal.attention(Q, Q, Q)
    with hal.force("torch_sdpa", on="transformer"):  # nothing ran at all
        pass


@pytest.mark.parametrize("wrong", [None, 3])
def test_a_target_is_a_text(wrong):
    for use in (lambda: hal.component(wrong), lambda: hal.force("torch_sdpa", on=wrong or [])):
        with pytest.raises(hal.PolicyError, match="a target is a text"), use():
            pass


def test_a_layer_that_is_given_no_tensor_says_so():
    with pytest.raises(hal.CallError, match="q is NoneType"):
        hal.LocalAttention(2, 8)(None, Q, Q)


GEOMETRY = [
    ((2, 32), {}),
    ((7, 8), {}),
    ((0, 8), {}),
    (("2", 8), {}),
    ((2, 8), {"layer": -1}),
    ((2, 8), {"kv_heads": 0}),
]


@pytest.mark.parametrize("sizes, more", GEOMETRY)
def test_a_layer_takes_what_it_was_built_for(sizes, more):
    with pytest.raises(hal.CallError):
        hal.LocalAttention(*sizes, **more)(Q, Q, Q)


def test_a_sparse_backend_is_for_self_attention_unless_it_says_otherwise():
    sparse = frozenset({"sparse"})
    assert Backend("a", traits=sparse).roles == {"self"}
    assert Backend("b", traits=sparse, roles=frozenset({"self", "cross"})).roles == {"self", "cross"}
    assert Backend("c").roles == {"self", "cross"}


def test_callbacks_are_functions():
    with pytest.raises(hal.PolicyError, match=r"hal.hooks\(run=3\)"), hal.hooks(run=3):
        pass


def test_a_request_is_refused_under_compile_however_it_was_compiled():
    layer = torch.compile(hal.LocalAttention(2, 8), backend="eager")
    layer(Q, Q, Q)
    with pytest.raises(Exception, match="torch.compile"):
        with hal.request(layer, attention_backend_override="torch_sdpa"):
            layer(Q, Q, Q)
    torch.testing.assert_close(layer(Q, Q, Q), Q)  # and works on
