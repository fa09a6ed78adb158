"""From tensors to a Call: what does not make one attention call is an error that says so, before anything has run."""

from __future__ import annotations

import pytest
import torch

import hal
from hal import context, run
from hal.errors import CallError, HalError, PolicyError
from hal.tensors import call_of, mask_class, varlen_call_of

B, S, K, H, D = 2, 6, 5, 4, 8


def qkv(**changes):
    """q [B, S, H, D], k and v [B, K, H, D]; ``k=(shape)`` and the like replace one."""
    shapes = {"q": (B, S, H, D), "k": (B, K, H, D), "v": (B, K, H, D), **changes}
    return [torch.randn(x) if isinstance(x, tuple) else x for x in shapes.values()]


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


META = torch.empty(B, K, H, D, device="meta")
BAD = [
    # tensors, arguments, what the text says
    ({"q": (B, S, H * D)}, {}, r"q has shape \(2, 6, 32\); hal.attention takes four axes, B S H D"),
    ({"v": (K, H, D)}, {"layout": "bhsd"}, r"v has shape .*four axes, B H S D"),
    ({"k": (3, K, H, D)}, {}, r"batches of 2, 3 and 2 \(layout bshd\)"),
    ({"v": (B, 7, H, D)}, {}, r"k has 5 tokens and v 7; they must be equal \(layout bshd\)"),
    ({"k": (B, K, H, 16)}, {}, "q has head_dim 8 and k 16"),
    ({"v": (B, K, 2, D)}, {}, "k has 4 heads and v 2"),
    ({"k": (B, K, 2, D), "v": (B, K, 2, D)}, {}, "q has 4 heads and k 2; pass enable_gqa=True if that is meant, or check layout="),
    ({"k": (B, K, 3, D), "v": (B, K, 3, D)}, {"enable_gqa": True}, "4 query heads are no multiple of 3 key heads"),
    ({"k": (B, K, 0, D), "v": (B, K, 0, D)}, {"enable_gqa": True}, "4 query heads are no multiple of 0 key heads"),
    ({"q": (B, S, H, 0), "k": (B, K, H, 0)}, {}, "head_dim 0"),
    ({"v": torch.randn(B, K, H, D).half()}, {}, "torch.float32, torch.float32 and torch.float16; cast them to one dtype"),
    (dict.fromkeys("qkv", torch.ones(B, K, H, D, dtype=torch.int32)), {}, "q is torch.int32; attention takes float16"),
    ({"k": META, "v": META}, {}, "on cpu, meta and meta; move them to one device"),
    ({}, {"layout": "BSHD"}, "unknown layout 'BSHD'; did you mean 'bshd'"),
    ({}, {"layout": ["bshd"]}, r"layout is \['bshd'\]; write plain values"),
    ({}, {"role": "corss"}, "unknown role 'corss'; did you mean 'cross'"),
    ({}, {"scale": float("nan")}, "scale is nan; allowed: a positive number, or None for"),
    ({}, {"scale": 0.0}, "scale is 0.0"),
    ({}, {"scale": -0.2}, "scale is -0.2"),
    ({}, {"scale": float("inf")}, "scale is inf"),
    ({}, {"scale": torch.tensor(0.5)}, r"scale is tensor\(0.5"),
    ({}, {"scale": "auto"}, "scale is 'auto'"),
    ({}, {"dropout_p": 1.0}, "dropout_p is 1.0; allowed: 0.0 to below 1.0"),
    ({}, {"dropout_p": -0.1}, "dropout_p is -0.1"),
    ({}, {"dropout_p": float("nan")}, "dropout_p is nan"),
    ({}, {"dropout_p": None}, "dropout_p is None"),
    ({}, {"window": -2}, "window is -2; allowed: a number of tokens, or"),
    ({}, {"window": (1, 2, 3)}, r"window is \(1, 2, 3\)"),
    ({}, {"window": (1, -5)}, r"window is \(1, -5\)"),
    ({}, {"window": 2.5}, "window is 2.5"),
    ({}, {"window": "3"}, "window is '3'"),
    ({}, {"window": [1, 2]}, r"window is \[1, 2\]; write plain values"),
    ({}, {"attn_mask": torch.ones(S, K, dtype=torch.int64)}, r"attn_mask is torch.int64; .*write mask.bool\(\)"),
    ({}, {"attn_mask": torch.zeros(S, K).half()}, r"attn_mask is torch.float16; .*write mask.to\(torch.float32\)"),
    ({}, {"attn_mask": bools(S, K + 1)}, r"attn_mask has shape \(6, 6\); it must broadcast to .* = \[2, 4, 6, 5\], or be a bool"),
    ({}, {"attn_mask": bools(B, S, K)}, r"attn_mask has shape \(2, 6, 5\); it must broadcast"),
    ({}, {"attn_mask": bools(3, 1, 1, K)}, r"attn_mask has shape \(3, 1, 1, 5\)"),
    ({}, {"attn_mask": bools(1, B, H, S, K)}, "attn_mask has 5 axes"),
    ({"q": (B, B, H, D)}, {"attn_mask": bools(B, K)}, r"may be \[q_len, kv_len\] or \[batch, kv_len\] here"),
    ({}, {"attn_mask": bools(S, K).to("meta")}, "attn_mask is on meta and q on cpu"),
]  # fmt: skip


@pytest.mark.parametrize("tensors, arguments, said", BAD, ids=[said[:44] for _, _, said in BAD])
def test_what_makes_no_attention_call_is_told_before_anything_runs(tensors, arguments, said, monkeypatch):
    monkeypatch.setattr(run, "decide", lambda *a: pytest.fail("it got past the check"))
    with pytest.raises(CallError, match=said):
        hal.attention(*qkv(**tensors), **arguments)
    if "write plain values" not in said:
        with pytest.raises(CallError, match=said):
            hal.explain(*qkv(**tensors), **arguments)


def test_an_unknown_backend_is_told_with_those_that_are_known():
    with pytest.raises(
        PolicyError, match=r"unknown attention backend 'torch_sdap'; did you mean 'torch_sdpa'\? \(known: .*fa2"
    ):
        hal.attention(*qkv(), backend="torch_sdap")


def test_every_error_of_hal_is_of_one_family():
    with pytest.raises(HalError):
        hal.attention(*qkv(), role="x")


def cu(*lengths):
    return torch.tensor(lengths, dtype=torch.int32)


BAD_PACKED = [
    ({"q": (1, 6, H, D)}, {}, "takes packed"),
    ({"v": (5, H, D)}, {}, "k has 6 packed tokens and v 5"),
    ({"k": (6, 3, D), "v": (6, 3, D)}, {"enable_gqa": True}, "4 query heads are no multiple of 3"),
    ({}, {"cu_seqlens_q": cu(0, 6).long()}, "cu_seqlens_q is torch.int64 of shape"),
    ({}, {"cu_seqlens_q": cu(0, 6)[None]}, r"must be int32 of shape \[sequences \+ 1\]"),
    ({}, {"cu_seqlens_q": cu(0, 5)}, r"cu_seqlens_q must rise from 0 to the 6 packed tokens; it is \[0, 5\]"),
    ({}, {"cu_seqlens_q": cu(1, 6)}, "must rise from 0"),
    ({}, {"cu_seqlens_q": cu(0, 5, 4, 6)}, "must rise from 0"),
    ({}, {"cu_seqlens_k": cu(0, 2, 6)}, "tells 1 sequences and cu_seqlens_k 2"),
    ({}, {"max_seqlen_q": 4}, "max_seqlen_q is 4; the longest sequence has 6 tokens"),
    ({}, {"max_seqlen_k": 5}, "max_seqlen_k is 5; the longest sequence has 6 tokens"),
    ({}, {"window": [1, 2]}, r"window is \[1, 2\]; write plain values"),
]  # fmt: skip


@pytest.mark.parametrize("tensors, arguments, said", BAD_PACKED, ids=[said[:44] for _, _, said in BAD_PACKED])
def test_what_makes_no_packed_call_is_told_before_anything_runs(tensors, arguments, said, monkeypatch):
    monkeypatch.setattr(run, "decide", lambda *a: pytest.fail("it got past the check"))
    shapes = {"q": (6, H, D), "k": (6, H, D), "v": (6, H, D), **tensors}
    with pytest.raises(CallError, match=said):
        hal.attention_varlen(*map(torch.randn, shapes.values()), **{"cu_seqlens_q": cu(0, 6), **arguments})


# ---- what is read from tensors that do


@pytest.mark.parametrize("shape, kind, letters", [
    ((B, 1, 1, K), "key_padding", "b11k"),
    ((B, K), "key_padding", "b11k"),
    ((1, 1, 1, K), "key_padding", "111k"),
    ((K,), "key_padding", "111k"),
    ((B, 1, 1, 1), "key_padding", "b11k"),
    ((S, K), "bool", "11qk"),
    ((S, 1), "bool", "11qk"),
    ((H, S, K), "bool", "1hqk"),
    ((B, H, S, K), "bool", "bhqk"),
    ((B, 1, S, K), "bool", "b1qk"),
    ((B, H, 1, K), "bool", "bh1k"),
    ((1, H, 1, K), "bool", "1h1k"),
])  # fmt: skip
def test_a_mask_is_classed_by_the_axes_that_it_has(shape, kind, letters):
    assert mask_class(bools(*shape), B, H, S, K, torch.float32) == (kind, letters)
    if shape != (B, K):
        kind = "additive"
        assert mask_class(torch.zeros(shape), B, H, S, K, torch.float32) == (kind, letters)
        assert mask_class(torch.zeros(shape), B, H, S, K, torch.bfloat16) == (kind, letters), (
            "float32 biases are welcome"
        )


def read(q, k, v, **arguments):
    given = {
        "mask": None,
        "causal": False,
        "scale": None,
        "dropout": 0.0,
        "gqa": True,
        "window": None,
        "layout": "bshd",
        "lse": False,
    }
    return call_of(q, k, v, **{**given, "role": "self", **arguments})


def test_a_call_has_the_sizes_of_its_tensors_in_either_layout():
    q, k, v = torch.randn(B, S, H, D), torch.randn(B, K, 2, D), torch.randn(B, K, 2, 16)
    want = {
        "dtype": "float32",
        "batch": B,
        "q_len": S,
        "kv_len": K,
        "heads": H,
        "kv_heads": 2,
        "head_dim": D,
        "v_head_dim": 16,
    }
    for layout, tensors in (("bshd", (q, k, v)), ("bhsd", [t.transpose(1, 2) for t in (q, k, v)])):
        call = read(*tensors, layout=layout)
        assert {n: getattr(call, n) for n in want} == want
        assert call.layout == layout


def test_a_packed_call_has_its_longest_sequences_and_their_number():
    q, cu_q, cu_k = torch.randn(9, H, D), cu(0, 2, 9), cu(0, 9, 9)
    call = varlen_call_of(q, q, q, cu_q, cu_k, 7, 9, False, None, 0.0, False, None, False, "self")
    assert (call.varlen, call.batch, call.q_len, call.kv_len, call.heads) == (True, 2, 7, 9, H)


@pytest.mark.parametrize("scale, said", [(None, "default"), (D**-0.5, "default"), (0.25, 0.25), (1, 1.0)])
def test_the_scale_that_is_the_default_is_told_as_that(scale, said):
    assert read(*qkv(), scale=scale).scale == said


@pytest.mark.parametrize("window, said", [(None, (-1, -1)), (3, (3, 3)), ((2, -1), (2, -1)), (0, (0, 0))])
def test_one_number_is_a_window_to_both_sides(window, said):
    assert read(*qkv(), window=window).window == said


def test_each_tensor_is_contiguous_by_its_rows():
    call = read(
        torch.randn(B, S, H, 2 * D)[..., ::2],
        torch.randn(B, H, K, D).transpose(1, 2),
        torch.randn(B, K, H, 3 * D)[..., :D],
    )
    assert (call.q_contiguous, call.k_contiguous, call.v_contiguous) == (False, True, True)


def test_gradients_are_asked_for_where_a_tensor_needs_them_and_the_mode_is_on():
    q, k, v = qkv()
    mask = torch.zeros(S, K, requires_grad=True)
    assert not read(q, k, v).grad
    assert read(q, k, v.requires_grad_()).grad
    assert read(q, k, v, mask=mask).mask_grad
    with torch.no_grad():
        assert not read(q, k, v, mask=mask).grad and not read(q, k, v, mask=mask).mask_grad


def test_a_simulated_machine_is_asked_for_its_own_first_device():
    with hal.simulate("h100"):
        assert hal.explain(*qkv()).machine is context.current.get().machine
