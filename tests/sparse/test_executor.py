"""The executor against the float64 oracle: output, LSE and gradients of any block mask, by every kernel that runs here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad
from torch.nn.attention import flex_attention

from hal import oracle
from hal.errors import CallError, NoKernelError
from hal.sparse import EXECUTORS, BlockMask, Executor, Order, block_sparse_attention, execute, flex, portable, register

# The rounding of inputs and output, and of probabilities in half precision; sums are float32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def tensors(seed: int, b: int, h: int, hk: int, sq: int, sk: int, d: int, dtype=torch.float32, dv: int | None = None):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g).to(dtype)
    return make(b, h, sq, d), make(b, hk, sk, d), make(b, hk, sk, dv or d)


def random_mask(
    seed: int, b: int, h: int, sq: int, sk: int, bq: int, bk: int, density: float, **valid: Any
) -> BlockMask:
    g = torch.Generator().manual_seed(seed)
    keep = torch.rand(b, h, math.ceil(sq / bq), math.ceil(sk / bk), generator=g) < density
    return BlockMask.from_dense(keep, sq, sk, bq, bk, **valid)


def expected(q, k, v, mask: BlockMask, scale=None, bias=None):
    """(out, LSE) of the token-level mask, in float64.  Queries in empty slots attend as others of their block do."""
    seen = BlockMask.from_dense(
        mask.keep, mask.q_len, mask.kv_len, mask.block_q, mask.block_k, kv_valid=mask.kv_valid
    ).to_dense()
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    if bias is not None:
        added = added + bias.double().repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, None]
    return oracle.attention(q, k, v, attn_mask=added, scale=scale, layout="bhsd")


def agree(got, want, dtype=torch.float32) -> None:
    (out, lse), (true_out, true_lse) = got, want
    none = true_lse == -torch.inf
    assert out.dtype is dtype and lse.dtype is torch.float32
    assert torch.equal(lse == -torch.inf, none)
    assert out[none].abs().sum() == 0
    torch.testing.assert_close(out.double(), true_out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double().masked_fill(none, 0), true_lse.masked_fill(none, 0), atol=1e-4, rtol=1e-4)


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "b": st.integers(1, 2),
        "hk": st.integers(1, 2),
        "group": st.integers(1, 3),
        "sq": st.integers(1, 70),
        "sk": st.integers(1, 70),
        "d": st.sampled_from([1, 8, 20]),
        "bq": st.sampled_from([1, 4, 7, 16, 100]),
        "bk": st.sampled_from([1, 4, 7, 16, 100]),
        "density": st.sampled_from([0.0, 0.1, 0.4, 0.8, 1.1]),
        "shared": st.booleans(),
    }
)


def drawn(c, dtype=torch.float32):
    h = c["hk"] * c["group"]
    q, k, v = tensors(c["seed"], c["b"], h, c["hk"], c["sq"], c["sk"], c["d"], dtype)
    b, h = (1, 1) if c["shared"] else (c["b"], h)
    return q, k, v, random_mask(c["seed"], b, h, c["sq"], c["sk"], c["bq"], c["bk"], c["density"])


@settings(max_examples=80)
@given(CASES, st.sampled_from(list(TOLERANCE)), st.sampled_from([None, 0.7]), st.sampled_from([0, 2**11, 2**20]))
def test_any_block_mask_is_the_masked_softmax(case, dtype, scale, memory):
    q, k, v, mask = drawn(case, dtype)
    with mock.patch.object(portable, "budget", lambda q: memory):  # one run at a time, some, all
        got = block_sparse_attention(q, k, v, mask, scale=scale, return_lse=True)
    agree(got, expected(q, k, v, mask, scale), dtype)


@settings(max_examples=40)
@given(CASES, st.data())
def test_blocks_with_fewer_tokens_than_slots_and_a_bias_per_key(case, data):
    q, k, v, mask = drawn(case)
    sizes = data.draw(st.lists(st.integers(0, case["bk"]), min_size=mask.keep.shape[3], max_size=mask.keep.shape[3]))
    mask = BlockMask.from_dense(
        mask.keep, mask.q_len, mask.kv_len, mask.block_q, mask.block_k, kv_valid=torch.tensor(sizes)
    )
    bias = torch.randn(k.shape[:3], generator=torch.Generator().manual_seed(1))
    bias = bias.masked_fill(bias < -1, -torch.inf)
    agree(execute(q, k, v, mask, lse=True, bias=bias), expected(q, k, v, mask, bias=bias))
    agree(execute(q, k, v, mask, lse=True), expected(q, k, v, mask))


@settings(max_examples=40)
@given(CASES, st.booleans(), st.sampled_from([0, 2**20]))
def test_gradients_of_output_and_lse(case, biased, memory):
    q, k, v, mask = drawn(case)
    bias = torch.randn(k.shape[:3]) if biased else None
    leaves = [x.requires_grad_() for x in (q, k, v, bias) if x is not None]
    with mock.patch.object(portable, "budget", lambda q: memory):
        out, lse = execute(q, k, v, mask, bias=bias, lse=True)
        true_out, true_lse = expected(q, k, v, mask, bias=bias)
        some = true_lse.detach() > -torch.inf
        d_out, d_lse = torch.randn(out.shape), torch.randn(lse.shape)
        if not some.any():
            return
        got = grad((out * d_out).sum() + (lse[some] * d_lse[some]).sum(), leaves)
        want = grad((true_out * d_out).sum() + (true_lse[some] * d_lse[some]).sum(), leaves)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=3e-5)


@settings(max_examples=60)
@given(CASES, st.booleans(), st.booleans(), st.sampled_from([None, 4.0]), st.sampled_from([0, 2**11, 2**20]))
def test_bfloat16_has_float32_scores_by_either_way_of_a_cpu(case, products, biased, scale, memory):
    """With a scale of 4 scores are large: rounded to bfloat16 they would miss by a tenth."""
    q, k, v, mask = drawn(case, torch.bfloat16)
    bias = torch.randn(k.shape[:3], generator=torch.Generator().manual_seed(1)) if biased else None
    bias = bias if bias is None else bias.masked_fill(bias < -1, -torch.inf)
    with (
        mock.patch.object(portable, "budget", lambda q: memory),
        mock.patch.object(portable, "_gemm_beats_flash", lambda: products),
    ):
        out, _ = execute(q, k, v, mask, scale=scale, bias=bias)
    want = expected(q, k, v, mask, scale, bias)[0]
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype])


def test_half_precision_has_gradients_of_its_own_dtype():
    q, k, v = (x.requires_grad_() for x in tensors(0, 1, 2, 1, 64, 48, 16, torch.bfloat16))
    mask = random_mask(3, 1, 2, 64, 48, 16, 16, 0.6)
    got = grad(block_sparse_attention(q, k, v, mask).float().square().sum(), (q, k, v))
    want = grad(expected(q, k, v, mask)[0].square().sum(), (q, k, v))
    for a, b in zip(got, want):
        assert a.dtype is torch.bfloat16
        torch.testing.assert_close(a.float(), b.float(), atol=0.06, rtol=0.06)


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize(
    "keep", [torch.ones(1, 1, 4, 4), torch.eye(4)[None, None], torch.ones(4, 4).triu()[None, None]]
)
@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float64])
def test_tensors_of_any_strides(dtype, keep, lse):
    """PyTorch's flash kernel on a CPU reads every last axis as if its elements were adjacent."""
    mask = BlockMask.from_dense(keep.bool(), 32, 32, 8, 8)
    q, k, v = tensors(0, 1, 2, 2, 32, 32, 8, dtype)
    strange = [torch.stack([x, x + 9], -1)[..., 0] for x in (q, k)] + [v.mT.contiguous().mT]
    assert all(x.stride(-1) != 1 for x in strange)
    assert torch.equal(execute(*strange, mask, lse=lse)[0], execute(q, k, v, mask, lse=lse)[0])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_default_device_is_none_of_its_business(dtype):
    q, k, v = tensors(0, 1, 2, 2, 32, 32, 8, dtype)
    mask = random_mask(3, 1, 2, 32, 32, 8, 8, 0.6)
    with torch.device("meta"):
        out = block_sparse_attention(q, k, v, mask)
    assert out.device.type == "cpu"


def test_rows_of_many_lengths_leave_no_code_behind():
    """oneDNN keeps what it made for each shape: products of whole matrices are for few of them."""
    q, k, v = tensors(0, 1, 1, 1, 256, 256, 8, torch.bfloat16)
    with (
        mock.patch.object(portable, "_gemm_beats_flash", lambda: True),
        mock.patch.object(portable, "_in_bfloat16", side_effect=portable._in_bfloat16) as used,
    ):
        block_sparse_attention(
            q, k, v, BlockMask.from_dense(torch.ones(16, 16).tril()[None, None].bool(), 256, 256, 16, 16)
        )
        assert not used.called
        block_sparse_attention(q, k, v, BlockMask.from_dense(torch.eye(16)[None, None].bool(), 256, 256, 16, 16))
        assert used.called


def test_sizes_of_nothing():
    q, k, v = tensors(0, 1, 2, 2, 32, 32, 8)
    mask = random_mask(3, 1, 2, 32, 32, 8, 8, 0.6)
    assert block_sparse_attention(q, k, v[..., :0], mask).shape == (1, 2, 32, 0)
    none = random_mask(3, 1, 1, 32, 32, 8, 8, 0.6)
    assert block_sparse_attention(q[:, :0], k[:, :0], v[:, :0], none).shape == (1, 0, 32, 8)
    with pytest.raises(NoKernelError, match="float8"):
        block_sparse_attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), mask)


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("dv", [8, 24])
def test_without_the_cpus_own_kernel(lse, dv):
    q, k, v = tensors(0, 2, 4, 2, 50, 60, 8, dv=dv)
    mask = random_mask(5, 2, 4, 50, 60, 8, 16, 0.4)
    want = expected(q, k, v, mask)
    with mock.patch.object(portable, "_FLASH", None), mock.patch.object(portable, "MIB", 1):
        got = block_sparse_attention(q, k, v, mask, return_lse=lse)
    if lse:
        agree(got, want)
    else:
        torch.testing.assert_close(got.double(), want[0], atol=1e-5, rtol=1e-5)


def test_zero_sparsity_is_dense_and_reads_keys_as_they_lie():
    q, k, v = tensors(0, 2, 2, 2, 96, 90, 16)
    mask = BlockMask.from_dense(torch.ones(1, 1, 3, 3, dtype=torch.bool), 96, 90, 32, 30)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with mock.patch.object(torch, "index_select", side_effect=AssertionError("gathered")):
        torch.testing.assert_close(block_sparse_attention(q, k, v, mask), dense)


@settings(max_examples=30)
@given(CASES)
def test_disjoint_masks_merge_by_lse_to_their_union(case):
    q, k, v, mask = drawn(case)
    half = torch.rand(mask.keep.shape) < 0.5
    sizes = mask.q_len, mask.kv_len, mask.block_q, mask.block_k
    (o1, l1), (o2, l2) = (
        execute(q, k, v, BlockMask.from_dense(mask.keep & part, *sizes), lse=True) for part in (half, ~half)
    )
    lse = torch.logaddexp(l1, l2)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    out = o1 * (l1 - finite).exp()[..., None] + o2 * (l2 - finite).exp()[..., None]
    agree((out, lse), expected(q, k, v, mask))


@settings(max_examples=30)
@given(CASES)
def test_each_batch_and_head_is_computed_by_itself(case):
    q, k, v, mask = drawn(case)
    whole = block_sparse_attention(q, k, v, mask)
    keep = mask.keep.expand(q.shape[0], q.shape[1], -1, -1)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for j in range(q.shape[1]):
            one = BlockMask.from_dense(keep[i : i + 1, j : j + 1], mask.q_len, mask.kv_len, mask.block_q, mask.block_k)
            alone = block_sparse_attention(
                q[i : i + 1, j : j + 1], *(x[i : i + 1, j // group : j // group + 1] for x in (k, v)), one
            )
            torch.testing.assert_close(whole[i, j], alone[0, 0], atol=1e-6, rtol=1e-6)


@settings(max_examples=25)
@given(CASES)
def test_layout_and_strides_do_not_matter_and_inputs_stay(case):
    q, k, v, mask = drawn(case)
    want, stats = block_sparse_attention(q, k, v, mask, return_lse=True)
    strided = [torch.stack([x, x], 3)[..., 0, :].transpose(1, 2) for x in (q, k, v)]
    before = [x.clone() for x in strided]
    got, got_stats = block_sparse_attention(*strided, mask, layout="bshd", return_lse=True)
    torch.testing.assert_close(got.transpose(1, 2), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got_stats, stats)
    assert all(torch.equal(a, b) for a, b in zip(strided, before))


def test_constant_values_come_back_and_zeros_make_no_nan():
    q, k, v = tensors(0, 1, 1, 1, 40, 40, 8)
    mask = BlockMask.from_dense(torch.eye(5, dtype=torch.bool)[None, None], 40, 40, 8, 8)
    torch.testing.assert_close(block_sparse_attention(q, k, torch.ones_like(v), mask), torch.ones_like(v))
    out, lse = block_sparse_attention(q * 0, k * 0, v, mask, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(8)))
    torch.testing.assert_close(out[0, 0, ::8], v[0, 0].view(5, 8, 8).mean(1))


@settings(max_examples=20)
@given(st.tuples(*(st.integers(1, 6),) * 3), st.tuples(*(st.integers(1, 3),) * 3), st.integers(0, 5), st.integers(0, 9))
def test_ragged_tiles_and_text_end_to_end(grid, tile, suffix, seed):
    order = Order.of(grid, tile, suffix=suffix)
    q, k, v = tensors(seed, 1, 2, 2, order.tokens, order.tokens, 8)
    keep = torch.rand(1, 2, order.blocks, order.blocks) < 0.5
    mask = order.mask(keep)
    out = order.from_blocks(block_sparse_attention(*(order.to_blocks(x) for x in (q, k, v)), mask))
    block = order.slot // order.block  # of each token, in raster order
    seen = keep[:, :, block][..., block]
    want, _ = oracle.attention(q, k, v, attn_mask=seen, layout="bhsd")
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    assert mask.density == pytest.approx(seen.double().mean().item())


def test_float64_stays_float64():
    q, k, v = (x.double() for x in tensors(0, 1, 1, 1, 40, 40, 8))
    mask = random_mask(1, 1, 1, 40, 40, 8, 8, 0.5)
    out, lse = block_sparse_attention(q, k, v, mask, return_lse=True)
    want, want_lse = expected(q, k, v, mask)
    torch.testing.assert_close((out, lse), (want, want_lse), atol=1e-12, rtol=1e-12)


def test_autocast_does_not_change_the_dtype():
    q, k, v = tensors(0, 1, 1, 1, 40, 40, 8)
    mask = random_mask(1, 1, 1, 40, 40, 8, 8, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        agree(block_sparse_attention(q, k, v, mask, return_lse=True), expected(q, k, v, mask))


def test_the_plan_is_made_once_and_serves_gradients_after_inference():
    q, k, v = tensors(0, 1, 1, 1, 40, 40, 8)
    mask = random_mask(1, 1, 1, 40, 40, 8, 8, 0.5)
    with torch.inference_mode():
        block_sparse_attention(q, k, v, mask)
    made = mask.plans["portable"]
    block_sparse_attention(q.requires_grad_(), k, v, mask).sum().backward()
    assert mask.plans["portable"] is made


def test_meta_tensors_have_shapes():
    q, k, v = (torch.empty(2, 4, 40, 8, device="meta", dtype=torch.float16) for _ in range(3))
    mask = random_mask(1, 1, 1, 40, 40, 8, 8, 0.5)
    out, lse = block_sparse_attention(q, k, v, mask, return_lse=True)
    assert (out.shape, out.dtype, out.is_meta) == (q.shape, torch.float16, True)
    assert (lse.shape, lse.dtype) == ((2, 4, 40), torch.float32)


def test_a_backward_pass_inside_autocast_is_the_same():
    q, k, v = tensors(0, 1, 2, 1, 96, 96, 16)
    mask = random_mask(4, 1, 2, 96, 96, 32, 32, 0.5)
    found = []
    for inside in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = block_sparse_attention(*leaves, mask)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for plain, within in zip(*found):
        assert torch.equal(plain, within)


def test_the_default_device_does_not_matter():
    q, k, v = tensors(0, 1, 2, 1, 90, 90, 16)
    want = block_sparse_attention(q, k, v, random_mask(4, 1, 2, 90, 90, 32, 32, 0.5))
    mask = random_mask(4, 1, 2, 90, 90, 32, 32, 0.5)
    with torch.device("meta"):
        out = block_sparse_attention(q, k, v, mask)
    assert torch.equal(out, want)


# ---- the table of kernels


@settings(max_examples=15)
@given(CASES, st.booleans())
def test_flex_computes_the_same_from_the_mask_it_is_given(case, ragged):
    q, k, v, mask = drawn(case)
    if ragged:
        sizes = torch.arange(mask.keep.shape[3]) % (mask.block_k + 1)
        mask = dataclasses.replace(mask, kv_valid=sizes, plans={})
    eager = mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with eager, mock.patch.object(flex, "_compiled", lambda: flex_attention.flex_attention), torch.no_grad():
        out = block_sparse_attention(q, k, v, mask, kernel="flex")
    torch.testing.assert_close(out.double(), expected(q, k, v, mask)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_flex_compiled(ragged):
    q, k, v = tensors(0, 1, 2, 1, 256, 256, 64)
    sizes = torch.tensor([64, 3, 64, 10]) if ragged else None
    mask = random_mask(4, 1, 2, 256, 256, 64, 64, 0.5, kv_valid=sizes)
    mask.keep[0, 0, 1] = False
    out = block_sparse_attention(q, k, v, mask, kernel="flex")
    torch.testing.assert_close(out.double(), expected(q, k, v, mask)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_flex_is_never_left_uncompiled():
    """Past PyTorch's limit of compilations it would hold all scores, and be a hundred times slower."""

    def attend(s):
        return block_sparse_attention(
            *tensors(0, 1, 1, 1, s, s, 16), random_mask(4, 1, 1, s, s, 64, 64, 1.0), kernel="flex"
        )

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        attend(64)
        with pytest.raises(NoKernelError, match="recompile_limit"):
            attend(128)
    torch._dynamo.reset()


def test_a_kernel_is_refused_what_it_does_not_have():
    q, k, v = tensors(0, 1, 1, 1, 40, 40, 8)
    mask = random_mask(4, 1, 1, 40, 40, 8, 8, 0.5)
    with pytest.raises(NoKernelError, match="return_lse"):
        block_sparse_attention(q, k, v, mask, kernel="flex", return_lse=True)
    with pytest.raises(NoKernelError, match="a gradient"):
        block_sparse_attention(q.requires_grad_(), k, v, mask, kernel="flex")
    with pytest.raises(CallError, match="portable"):
        block_sparse_attention(q, k, v, mask, kernel="portabel")


def test_a_registered_kernel_is_chosen_where_it_says_so():
    q, k, v = tensors(0, 1, 1, 1, 40, 40, 8)
    mask = random_mask(4, 1, 1, 40, 40, 8, 8, 0.5)
    refuse = lambda q, v, mask: "head_dim" if q.shape[-1] != 8 else None
    with mock.patch.dict(EXECUTORS), mock.patch.object(portable, "one", lambda *a: (a, None), create=True):
        register(
            Executor("one", "hal.sparse.portable:one", frozenset({"gqa"}), automatic=frozenset({"cpu"}), refuse=refuse)
        )
        chosen = block_sparse_attention(q, k, v, mask, scale=0.5)
        assert chosen[3] is mask and chosen[4:] == (0.5, None, False)
        assert isinstance(block_sparse_attention(q, k, v, mask, return_lse=True)[0], torch.Tensor)  # has no LSE
        assert isinstance(block_sparse_attention(q[..., :4], k[..., :4], v, mask), torch.Tensor)  # refuses


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.zeros(1, 2, 41, 8)}, "41 tokens"),
        ({"k": torch.zeros(1, 2, 39, 8), "v": torch.zeros(1, 2, 39, 8)}, "made for 40 and 40"),
        ({"q": torch.zeros(1, 3, 40, 8)}, "3 query heads are no multiple of 2"),
        ({"q": torch.zeros(1, 2, 40, 8, dtype=torch.float16)}, "cast them to one dtype"),
        ({"block_mask": random_mask(0, 1, 3, 40, 40, 8, 8, 0.5)}, "heads 3 and q 2"),
        ({"block_mask": torch.ones(1, 1, 5, 5)}, "from_dense"),
        ({"scale": -1.0}, "positive"),
        ({"layout": "sbhd"}, "layout"),
        ({"layout": ["bhsd"]}, r"layout is \['bhsd'\]"),
        ({"q": [[1.0]]}, "q is list; it must be a torch.Tensor"),
        ({"v": None}, "v is NoneType"),
        ({"kernel": ["flex"]}, r"unknown kernel \['flex'\]"),
    ],
)
def test_bad_input_is_told_before_anything_runs(change, text):
    q, k, v = tensors(0, 1, 2, 2, 40, 40, 8)
    arguments = {"q": q, "k": k, "v": v, "block_mask": random_mask(0, 1, 1, 40, 40, 8, 8, 0.5), **change}
    with pytest.raises(CallError, match=text):
        block_sparse_attention(**arguments)
    with pytest.raises(CallError, match="bias has shape"):
        execute(q, k, v, random_mask(0, 1, 1, 40, 40, 8, 8, 0.5), bias=torch.zeros(39))
