"""What hal.attention returns: held against the oracle for every argument, kernel by kernel."""

from __future__ import annotations

import pytest
import torch
from calls import TOLERANCE, calls, close, kernel
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import hal
from hal import oracle
from hal.backends.torch_sdpa import BACKEND
from hal.errors import NoKernelError

KERNELS = ("sdpa.cpu", "sdpa.math")
INFINITE = float("-inf")


def test_the_tolerances_are_those_that_the_backend_declares():
    assert {str(t).removeprefix("torch."): x for t, x in TOLERANCE.items()} == BACKEND.tolerance


def may(name, call):
    """Whether the kernel is for this call, said anew: PyTorch's CPU flash path wants equal head dims."""
    return name == "sdpa.math" or call.q.shape[-1] == call.v.shape[-1]


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=150)
@given(call=calls())
def test_the_numbers_are_those_of_the_oracle(name, call):
    before = [t.clone() for t in (call.q, call.k, call.v)] + ([call.mask.clone()] if call.mask is not None else [])
    with kernel(name):
        if not may(name, call):
            with pytest.raises(NoKernelError, match="v_head_dim"):
                hal.attention(call.q, call.k, call.v, **call.arguments)
            return
        got = hal.attention(call.q, call.k, call.v, **call.arguments)
    out, lse = got if call.arguments["return_lse"] else (got, None)
    want, want_lse = call.by_oracle()
    assert out.shape == want.shape and out.dtype == call.q.dtype
    close(out, want, TOLERANCE[call.q.dtype])
    if lse is not None:
        assert lse.shape == want_lse.shape and lse.dtype is (
            torch.float64 if call.q.dtype is torch.float64 else torch.float32
        )
        close(lse, want_lse, TOLERANCE[call.q.dtype])
    for t, was in zip((call.q, call.k, call.v, call.mask), before):
        assert torch.equal(t, was), "an input was changed"


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=80)
@given(call=calls(lse=False, equal_dims=True))
def test_the_gradients_are_those_of_the_oracle(name, call):
    tolerance = 4 * TOLERANCE[call.q.dtype]
    mine = [t.detach().requires_grad_() for t in (call.q, call.k, call.v)]
    wide = call.copied(grad=True)
    with kernel(name):
        out = hal.attention(*mine, **call.arguments)
    want, _ = wide.by_oracle()
    weight = torch.randn(want.shape, dtype=torch.float64)
    got = torch.autograd.grad((out.double() * weight).sum(), mine)
    for g, w in zip(got, torch.autograd.grad((want * weight).sum(), (wide.q, wide.k, wide.v))):
        assert (g.double() - w).abs().max() <= tolerance * max(1.0, float(w.abs().max()))


# ---- the corners


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mask", [
    torch.tensor([[True, True, False], [False, False, False], [True, False, True]]),
    torch.tensor([[0.0, 1.0, INFINITE], [INFINITE] * 3, [0.0, INFINITE, 0.0]]),
], ids=["bool", "additive"])  # fmt: skip
def test_a_row_without_keys_is_zero_and_minus_infinity_and_has_no_gradient(name, mask):
    q, k, v = (torch.randn(2, 3, 2, 8, requires_grad=True) for _ in range(3))
    with kernel(name):
        out = hal.attention(q, k, v, attn_mask=mask)
        with torch.no_grad():
            lse = hal.attention(q, k, v, attn_mask=mask, return_lse=True)[1]
    assert (out[:, 1] == 0).all() and (lse[:, :, 1] == INFINITE).all()
    assert (out[:, ::2] != 0).all() and lse[:, :, ::2].isfinite().all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, 1] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(2, 0, 5, 3), (2, 5, 0, 3), (0, 4, 4, 3), (2, 4, 4, 0), (2, 0, 0, 1)], ids=str)
def test_a_call_without_tokens_is_served(sizes, causal):
    b, sq, sk, h = sizes
    q, k, v = torch.randn(b, sq, h, 8), torch.randn(b, sk, h, 8), torch.randn(b, sk, h, 8)
    assert hal.explain(q, k, v, is_causal=causal).kernel == "sdpa.math"
    out, lse = hal.attention(q, k, v, is_causal=causal, return_lse=True)
    assert out.shape == (b, sq, h, 8) and lse.shape == (b, h, sq)
    assert (out == 0).all() and (lse == INFINITE).all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("q_len, kv_len, sees", [
    (2, 4, [{0, 1, 2}, {0, 1, 2, 3}]),
    (3, 3, [{0}, {0, 1}, {0, 1, 2}]),
    (4, 2, [set(), set(), {0}, {0, 1}]),
    (1, 3, [{0, 1, 2}]),
])  # fmt: skip
def test_causal_is_aligned_at_the_bottom_right(name, q_len, kv_len, sees):
    q, k = torch.zeros(1, q_len, 1, kv_len), torch.zeros(1, kv_len, 1, kv_len)
    v = torch.eye(kv_len)[None, :, None]  # the output of a row is the weight of each key
    with kernel(name):
        out = hal.attention(q, k, v, is_causal=True)[0, :, 0]
    assert [{j for j in range(kv_len) if row[j] > 0} for row in out.tolist()] == sees


@pytest.mark.parametrize("name", KERNELS)
def test_a_mask_and_causality_and_a_window_all_apply(name):
    q = torch.zeros(1, 5, 1, 5)
    v = torch.eye(5)[None, :, None]
    mask = torch.tensor([True, True, False, True, True])
    with kernel(name):
        out = hal.attention(q, q, v, attn_mask=mask, is_causal=True, window=2)[0, :, 0]
    assert [{j for j in range(5) if row[j] > 0} for row in out.tolist()] == [{0}, {0, 1}, {0, 1}, {1, 3}, {3, 4}]


def test_query_heads_share_key_heads_in_order():
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 2, 8)
    v = torch.tensor([1.0, 2.0])[None, None, :, None].expand(1, 1, 2, 8)
    for name in KERNELS:
        with kernel(name):
            assert hal.attention(q, k, v, enable_gqa=True)[0, 0, :, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=80)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    heads=st.sampled_from(((1, 1), (2, 2), (4, 2), (6, 2))),
    arguments=st.fixed_dictionaries({
        "is_causal": st.booleans(), "scale": st.sampled_from((None, 0.3)), "window": st.sampled_from((None, 2, (1, -1)))
    }),
    dtype=st.sampled_from(tuple(TOLERANCE)), same=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
@example([(0, 0)], (1, 1), {}, torch.float64, True, 0)
@example([(0, 3), (2, 0), (3, 3)], (2, 2), {"is_causal": True}, torch.float32, False, 0)
def test_packed_sequences_attend_each_to_itself(name, lengths, heads, arguments, dtype, same, seed):
    lengths = [(a, a if same else b) for a, b in lengths]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in zip(*lengths))
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(int(cu[-1]), h, 8, generator=g).to(dtype)
        for cu, h in ((cu_q, heads[0]), (cu_k, heads[1]), (cu_k, heads[1]))
    )
    with kernel(name):
        if name == "sdpa.cpu" and 0 in (max(n) for n in zip(*lengths)):
            with pytest.raises(NoKernelError, match="empty"):
                hal.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, enable_gqa=True, **arguments)
            return
        out, lse = hal.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=None if same else cu_k,
            enable_gqa=True,
            return_lse=True,
            **arguments,
        )
        alone = hal.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, enable_gqa=True, **arguments)
    want, want_lse = oracle.attention_varlen(q, k, v, cu_q, cu_k, **arguments)
    assert out.dtype is dtype and lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    close(out, want, TOLERANCE[dtype])
    close(lse, want_lse, TOLERANCE[dtype])
    close(alone, want, TOLERANCE[dtype])


# ---- which of PyTorch's paths


@settings(max_examples=250)
@given(
    call=calls(lse=False), dropout=st.sampled_from((0.0, 0.0, 0.0, 0.1)), needs=st.sampled_from(("", "q", "v", "mask"))
)
def test_the_predicted_path_is_the_one_that_pytorch_takes(call, dropout, needs):
    """Where PyTorch and hal mean the same by the arguments: square causality without a mask, and no window."""
    assume(min(call.how["q"][-1], call.how["v"][-1]) > 1)  # a row of one column has no stride to speak of
    mask, arguments = call.mask, call.arguments
    arguments["window"] = None
    arguments["is_causal"] = arguments["is_causal"] and mask is None and call.how["q"][:2] == call.how["k"][:2]
    for name, t in (("q", call.q), ("v", call.v), ("mask", mask)):
        if name == needs and t is not None and t.is_floating_point():
            t.requires_grad_()
    q, k, v = (t if arguments["layout"] == "bhsd" else t.transpose(1, 2) for t in (call.q, call.k, call.v))
    given = {"attn_mask": mask, "dropout_p": dropout, "is_causal": arguments["is_causal"], "scale": arguments["scale"]}
    if mask is not None and mask.ndim < 4:
        assume(call.how["mask"][1] != "bk")
        given["attn_mask"] = mask.view(*(1,) * (4 - mask.ndim), *mask.shape)
    assume(mask is None or mask.dtype in (torch.bool, q.dtype) or q.dtype in (torch.float16, torch.bfloat16))
    gqa = q.shape[1] != k.shape[1]
    theirs = torch._fused_sdp_choice(q, k, v, **given, enable_gqa=gqa)
    d = hal.explain(call.q, call.k, call.v, dropout_p=dropout, **arguments)
    if "contiguous" in d.fittings:  # hal copies such tensors, where PyTorch goes to its math path
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        theirs = torch._fused_sdp_choice(q, k, v, **given, enable_gqa=gqa)
    assert d.kernel == {0: "sdpa.math", 1: "sdpa.cpu"}[theirs], d.explain()


@pytest.mark.parametrize("arguments, kernel, reason", [
    ({"dropout_p": 0.1}, "sdpa.math", "dropout"),
    ({"return_lse": True}, "sdpa.cpu", ""),
    ({"return_lse": True, "grad": True}, "sdpa.math", "lse_grad"),
    ({"mask_grad": True}, "sdpa.math", "mask_grad"),
    ({"flag": False}, "sdpa.math", "refused"),
])  # fmt: skip
def test_the_path_follows_what_is_asked(arguments, kernel, reason):
    given = dict(arguments)
    q = torch.randn(1, 4, 2, 8, requires_grad=given.pop("grad", False))
    if given.pop("mask_grad", False):
        given["attn_mask"] = torch.zeros(4, 4, requires_grad=True)
    flag = given.pop("flag", True)
    torch.backends.cuda.enable_flash_sdp(flag)
    try:
        d = hal.explain(q, q, q, **given)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert d.kernel == kernel
    cpu = next(c for c in d.candidates if c.kernel and c.kernel.name == "sdpa.cpu")
    assert {r.id for r in cpu.reasons} == ({reason} if reason else set())


# ---- dropout, determinism


def test_dropout_keeps_the_share_that_it_says_and_the_mean():
    torch.manual_seed(0)
    n, p = 200, 0.25
    q, k = torch.zeros(1, n, 4, 1), torch.zeros(1, n, 4, 1)  # every weight is 1 / n
    v = torch.eye(n).repeat(1, 1, 4).view(1, n, 4, n)
    out = hal.attention(q, k, v, dropout_p=p)
    kept = out > 0
    assert torch.allclose(out[kept] * n, torch.tensor(1 / (1 - p)))
    assert abs(kept.float().mean() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    assert not torch.equal(out, hal.attention(q, k, v, dropout_p=p))
    torch.manual_seed(0)
    assert torch.equal(out, hal.attention(q, k, v, dropout_p=p)), "the global generator decides"


def test_the_gradient_under_dropout_is_that_of_the_weights_that_were_kept():
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64) for _ in range(3))
    v.requires_grad_()
    torch.manual_seed(3)
    weights = hal.attention(q, k, torch.eye(6, dtype=torch.float64)[None, :, None].expand(1, 6, 2, 6), dropout_p=0.5)
    torch.manual_seed(3)
    (grad,) = torch.autograd.grad(hal.attention(q, k, v, dropout_p=0.5).sum(), v)
    close(grad, weights.sum(1)[0].T[None, :, :, None].expand_as(grad), 1e-12)


def test_in_deterministic_mode_only_deterministic_kernels_run_and_repeat_themselves():
    q = torch.randn(2, 33, 4, 16, requires_grad=True)
    torch.set_deterministic_debug_mode("error")
    try:
        d = hal.explain(q, q, q)
        assert d.call.deterministic and "deterministic" in d.chosen.kernel.honours
        first, second = (torch.autograd.grad(hal.attention(q, q, q).square().sum(), q)[0] for _ in range(2))
    finally:
        torch.set_deterministic_debug_mode("default")
    assert torch.equal(first, second)
    assert not hal.explain(q, q, q).call.deterministic


# ---- autocast


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_under_autocast_attention_runs_in_the_autocast_dtype_as_pytorchs_own_does(layout):
    q, k, v = (torch.randn(2, 4, 4, 8) for _ in range(3))
    bias = torch.randn(4, 4)
    hal.attention(q, k, v, attn_mask=bias, layout=layout)  # cached without
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = hal.attention(q, k.bfloat16(), v, attn_mask=bias, layout=layout)
        d = hal.explain(q, k, v, attn_mask=bias, layout=layout)
        t = (x if layout == "bhsd" else x.transpose(1, 2) for x in (q, k, v))
        theirs = torch.nn.functional.scaled_dot_product_attention(*t, bias)
        assert hal.attention(*(x.double() for x in (q, k, v))).dtype is torch.float64, "autocast leaves float64 alone"
        with torch.autocast("cpu", enabled=False):
            assert hal.attention(q, k, v).dtype is torch.float32
    assert out.dtype is theirs.dtype is torch.bfloat16 and d.call.dtype == "bfloat16"
    assert torch.equal(out, theirs if layout == "bhsd" else theirs.transpose(1, 2))
    assert hal.attention(q, k, v, attn_mask=bias, layout=layout).dtype is torch.float32


def test_packed_sequences_are_cast_too():
    q, cu = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = hal.attention_varlen(q, q, q, cu_seqlens_q=cu)
    assert out.dtype is torch.bfloat16
    close(out, oracle.attention_varlen(q, q, q, cu, cu)[0], TOLERANCE[torch.bfloat16])
