"""Each fitting is lossless: through a kernel that refuses the feature, output, LSE and gradients are the oracle's."""

from __future__ import annotations

import pytest
import torch
from calls import TOLERANCE, calls, close
from hypothesis import given, settings
from hypothesis import strategies as st

from hal import oracle
from hal.backend import Backend, Kernel
from hal.catalog import Catalog
from hal.errors import NoKernelError
from hal.facts import Device, Machine
from hal.facts.flat import FEATURES
from hal.fittings import FITTINGS, next_allowed
from hal.platforms.cpu import CPU
from hal.policy import Policy
from hal.resolver import resolve
from hal.rows import Prefer, Row
from hal.rules import Between, Mod, Not, OneOf, Same
from hal.tensors import call_of

MACHINE = Machine("cpu", (Device("x86-64-v3"),))
SHAPES = {"none", "b1qk", "bhqk", "bh1k"}
PADDED = OneOf({32, 64}, Mod(48))
# what a kernel refuses -> (what it honours, its limits)
REFUSES = {
    "contiguous": (FEATURES, {"contiguous": True}),
    "expand_kv": (FEATURES - {"gqa"}, {}),
    "key_padding_to_varlen": (FEATURES - {"mask.key_padding"}, {}),
    "mask_shape": (FEATURES, {"mask_shape": SHAPES}),
    "pad_head_dim": (FEATURES, {"head_dim": PADDED, "v_head_dim": Same("head_dim")}),
}
ALL = (
    FEATURES - {"gqa", "mask.key_padding"},
    {n: x for _, limits in REFUSES.values() for n, x in limits.items() if n != "mask_shape"},
)


def test_every_fitting_is_tried_here():
    assert set(REFUSES) == set(FITTINGS)


def strict(refuses, layout):
    """A kernel that computes by the oracle, and that fails where it is given what it refuses."""

    def bind(call):
        def run(q, k, v, mask, varlen):
            heads = 1 if varlen or form == "bhsd" else 2
            if "contiguous" in refuses:
                assert all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (q, k, v))
            if "expand_kv" in refuses:
                assert q.shape[heads] == k.shape[heads] == v.shape[heads]
            if "key_padding_to_varlen" in refuses:
                assert mask is None or mask.dtype is not torch.bool or mask.shape[1:3] != (1, 1)
            if "mask_shape" in refuses and mask is not None:
                size = {"1": 1, "b": q.shape[0], "h": q.shape[heads], "q": q.shape[3 - heads], "k": k.shape[3 - heads]}
                assert tuple(mask.shape) == tuple(size[c] for c in call.mask_shape)
            if "pad_head_dim" in refuses:
                assert q.shape[-1] == v.shape[-1] and (q.shape[-1] in (32, 64) or q.shape[-1] % 48 == 0)
            assert (varlen is not None) == call.varlen and q.shape[-1] == call.head_dim
            means = {
                "is_causal": call.causal,
                "scale": None if call.scale == "default" else call.scale,
                "window": call.window,
            }
            if varlen:
                assert int(varlen.cu_k.diff().max()) <= varlen.max_k and int(varlen.cu_q.diff().max()) <= varlen.max_q
                out, lse = oracle.attention_varlen(q, k, v, varlen.cu_q, varlen.cu_k, **means)
            else:
                out, lse = oracle.attention(q, k, v, attn_mask=mask, layout=form, **means)
            return (out.to(q.dtype), lse) if call.lse else out.to(q.dtype)

        form = call.layout if layout == "any" else layout
        return run

    honours, limits = ALL if len(refuses) > 1 else REFUSES[refuses[0]]
    return Kernel("strict", bind, layout=layout, honours=honours, limits=limits)


def catalog(kernel):
    here = type("Here", (CPU,), {"support": {"b": (Row("strict"),)}, "order": (Prefer("b"),)})()
    return Catalog({"cpu": here}, {"b": Backend("b", kernels=(kernel,))})


def decision(drawn, refuses, layout, grad, fit):
    a = drawn.arguments
    with torch.set_grad_enabled(grad):
        call = call_of(
            drawn.q,
            drawn.k,
            drawn.v,
            drawn.mask,
            a["is_causal"],
            a["scale"],
            0.0,
            True,
            a["window"],
            a["layout"],
            a["return_lse"],
            "self",
        )
    return resolve(call, MACHINE, catalog(strict(refuses, layout)), Policy(fit=frozenset(fit)))


def run_both(drawn, d, grad):
    mine, wide = [t.detach().requires_grad_(grad) for t in (drawn.q, drawn.k, drawn.v)], drawn.copied(grad=grad)
    mask = drawn.mask
    if mask is not None and mask.ndim < 4:
        mask = mask.view(*(1,) * (4 - mask.ndim), *mask.shape) if drawn.how["mask"][1] != "bk" else mask[:, None, None]
    got = d.bind()(*mine, mask, None)
    out, lse = got if d.call.lse else (got, None)
    want, want_lse = wide.by_oracle()
    tolerance = TOLERANCE[drawn.q.dtype]
    assert out.shape == want.shape and out.dtype is drawn.q.dtype
    close(out, want, tolerance)
    if lse is not None:
        close(lse, want_lse, tolerance)
    if not grad:
        return
    weight, lse_weight = torch.randn(want.shape, dtype=torch.float64), torch.randn(want_lse.shape, dtype=torch.float64)

    def loss(o, s):
        some = 0.0 if s is None else (s.masked_fill(s == -torch.inf, 0.0).double() * lse_weight).sum()
        return (o.double() * weight).sum() + some

    for g, w in zip(
        torch.autograd.grad(loss(out, lse), mine),
        torch.autograd.grad(loss(want, None if lse is None else want_lse), (wide.q, wide.k, wide.v)),
    ):
        assert (g.double() - w).abs().max() <= 4 * tolerance * max(1.0, float(w.abs().max()))


def wanted(drawn):
    """Which fittings a call needs of kernels that refuse everything, said anew."""
    q, k, v = drawn.q, drawn.k, drawn.v
    h = 2 if drawn.arguments["layout"] == "bshd" else 1
    out = set()
    if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (q, k, v)):
        out.add("contiguous")
    if q.shape[h] != k.shape[h]:
        out.add("expand_kv")
    return out


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "any"])
@settings(max_examples=60)
@given(drawn=calls(masks=()), grad=st.booleans())
def test_contiguous_rows_and_expanded_heads(layout, drawn, grad):
    for name in ("contiguous", "expand_kv"):
        d = decision(drawn, (name,), layout, grad, ())
        assert set(d.fittings) == wanted(drawn) & {name}
        run_both(drawn, d, grad)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "any"])
@settings(max_examples=60)
@given(drawn=calls(masks=("b11k", "bk", "111k", "k", "b111", "1111")), grad=st.booleans())
def test_a_key_padding_mask_is_packed_where_positions_do_not_matter(layout, drawn, grad):
    d = decision(drawn, ("key_padding_to_varlen",), layout, grad, ())
    a = drawn.arguments
    if d.call.mask != "key_padding":
        assert d.fittings == ()
    elif a["is_causal"] or a["window"] is not None:
        assert d.kernel is None
        with pytest.raises(NoKernelError, match="mask.key_padding is asked for; strict does not honour it"):
            d.bind()
        return
    else:
        assert d.fittings == ("key_padding_to_varlen",) and d.fitted[-1].varlen and d.fitted[-1].mask == "none"
    run_both(drawn, d, grad)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "any"])
@settings(max_examples=60)
@given(drawn=calls(masks=("b11k", "b1qk", "bhqk", "11qk", "1hqk", "111k", "1h1k", "qk")), grad=st.booleans())
def test_a_mask_is_expanded_to_a_shape_that_the_kernel_takes(layout, drawn, grad):
    d = decision(drawn, ("mask_shape",), layout, grad, ())
    assert d.kernel and d.fitted[-1].mask_shape in SHAPES
    assert d.fittings == (() if d.call.mask_shape in SHAPES else ("mask_shape",))
    run_both(drawn, d, grad)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "any"])
@settings(max_examples=60)
@given(drawn=calls(), grad=st.booleans())
def test_head_dim_is_padded_on_request_only_and_keeps_its_scale(layout, drawn, grad):
    if drawn.q.shape[-1] == drawn.v.shape[-1] in (32, 48, 64):
        return
    assert decision(drawn, ("pad_head_dim",), layout, grad, ()).kernel is None
    d = decision(drawn, ("pad_head_dim",), layout, grad, ("pad_head_dim",))
    assert d.fittings == ("pad_head_dim",)
    assert d.fitted[-1].scale == (drawn.q.shape[-1] ** -0.5 if d.call.scale == "default" else d.call.scale)
    run_both(drawn, d, grad)


@settings(max_examples=80)
@given(drawn=calls(masks=("b11k", "bhqk")), grad=st.booleans(), layout=st.sampled_from(("bshd", "bhsd", "any")))
def test_fittings_work_together(drawn, grad, layout):
    d = decision(drawn, tuple(REFUSES), layout, grad, ("pad_head_dim",))
    if d.call.mask == "key_padding" and (drawn.arguments["is_causal"] or drawn.arguments["window"]):
        assert d.kernel is None
        return
    packed = {"key_padding_to_varlen"} if d.call.mask == "key_padding" else set()
    assert set(d.fittings) - {"pad_head_dim"} == wanted(drawn) | packed
    run_both(drawn, d, grad)


def test_a_kernel_may_refuse_a_fitting():
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8)
    call = call_of(q, k, k, None, False, None, 0.0, True, None, "bshd", False, "self")
    kernel = Kernel("strict", lambda call: None, honours=FEATURES - {"gqa"}, fittings=set(FITTINGS) - {"expand_kv"})
    assert resolve(call, MACHINE, catalog(kernel)).kernel is None


def test_one_failure_that_nothing_mends_leaves_all_reasons_as_they_were():
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8)
    call = call_of(q, k, k, None, True, None, 0.0, True, None, "bshd", False, "self")
    d = resolve(call, MACHINE, catalog(Kernel("strict", lambda call: None, honours=FEATURES - {"gqa", "causal"})))
    assert [r.id for r in d.candidates[0].reasons] == ["causal", "gqa"] and d.candidates[0].fittings == ()


@pytest.mark.parametrize("feature", ["graph", "compile"])
def test_how_many_keys_are_kept_is_not_read_inside_a_graph(feature):
    q, mask = torch.randn(2, 4, 4, 8), torch.ones(2, 1, 1, 4, dtype=torch.bool)
    call = call_of(q, q, q, mask, False, None, 0.0, True, None, "bshd", False, "self").but(**{feature: True})
    assert resolve(call, MACHINE, catalog(strict(("key_padding_to_varlen",), "bshd"))).kernel is None


@pytest.mark.parametrize("limit, n, answer", [
    ({64, 96, 128}, 72, 96), ({64, 96}, 96, None), (range(8, 257, 8), 12, 16), (range(8, 257, 8), 256, None), (Mod(8), 12, 16), (Mod(8, 4), 5, None),
    (OneOf({128}, Mod(48)), 72, 96), (Between(128), 72, None), (Not({64}), 64, None),
])  # fmt: skip
def test_the_next_head_dim_that_a_limit_allows(limit, n, answer):
    assert next_allowed(limit, n) == answer
