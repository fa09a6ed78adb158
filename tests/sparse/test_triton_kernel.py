"""The Triton kernel in Triton's interpreter, against the float64 oracle, at small sizes.

The interpreter must be chosen before Triton is imported: a worker process runs every call.  It computes bfloat16 products
wrongly, so there bfloat16 is widened first; what a GPU's own rounding does is told by the last test, on a GPU.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal import oracle
from hal.errors import CallError, NoKernelError
from hal.sparse import BlockMask, block_sparse_attention
from hal.sparse.triton.tiles import ARCHS, Tile

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")  # and may not import it here

TOLERANCE = {  # absolute, relative: what the output's own rounding costs, and float16's rounding of the probabilities
    torch.float32: (1e-5, 1e-5),
    torch.float16: (1e-3, 2**-10),
    torch.bfloat16: (1e-5, 2**-8),
}
SHAPES = sorted({(t.q, t.k) for arch in ARCHS.values() for tiles in arch.tiles.values() for t in tiles})
Case = dict[str, Any]


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _call(shape: tuple[int, int] | None, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    from hal.sparse.triton import launch

    launch.INTERPRETED = Tile(*(shape or (64, 64)), 4, 1)
    return launch.block_sparse(**case)


class Interpreter(ProcessPoolExecutor):
    """Calls in the worker: the launcher itself, with a tile of one's choice, or the executor."""

    def __init__(self) -> None:
        super().__init__(1, get_context("spawn"), initializer=_interpret)

    def __call__(self, case: Case, shape: tuple[int, int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.submit(_call, shape, case).result()

    def executor(self, *tensors: Any, **arguments: Any) -> Any:
        return self.submit(block_sparse_attention, *tensors, **arguments).result()


@pytest.fixture(scope="module")
def run() -> Iterator[Interpreter]:
    with Interpreter() as worker:
        yield worker


def make(
    seed: int = 0, batch: int = 1, heads: int = 2, groups: int = 1, q_len: int = 128, kv_len: int = 128, d: int = 64,
    block_q: int = 64, block_k: int = 64, dtype: torch.dtype = torch.float32, valid: str = "", bias: str = "",
) -> Case:  # fmt: skip
    """Random tensors and lists; what no one may read is nan, or an index far outside."""
    g = torch.Generator().manual_seed(seed)
    nq, nk = -(-q_len // block_q), -(-kv_len // block_k)
    q = torch.randn(batch, heads * groups, q_len, d, generator=g).to(dtype)
    k, v = (torch.randn(batch, heads, kv_len, d, generator=g).to(dtype) for _ in range(2))
    order = torch.rand(batch, heads * groups, nq, nk, generator=g).argsort(-1).int()
    counts = torch.randint(0, nk + 1, (batch, heads * groups, nq), generator=g, dtype=torch.int32)
    index = order.masked_fill(torch.arange(nk) >= counts[..., None], 2**30)
    case: Case = {"q": q, "k": k, "v": v, "index": index, "counts": counts, "block_q": block_q, "block_k": block_k}
    if valid:
        size = (kv_len - torch.arange(nk) * block_k).clamp(max=block_k)
        some = (torch.rand(*((batch, nk) if valid == "batch" else (nk,)), generator=g) * (size + 1)).int()
        case["valid"] = some
        for t in (k, v):
            t.masked_fill_(~_is_key(case)[:, None, :, None], math.nan)
    if bias:
        shape = (batch, heads, kv_len) if bias == "heads" else (batch, kv_len)
        hidden = torch.rand(shape, generator=g) < 0.2
        case["bias"] = torch.randn(shape, generator=g).masked_fill(hidden, -torch.inf)
    return case


def _is_key(case: Case) -> torch.Tensor:
    """bool [B, Sk]: the slots that are keys."""
    batch, kv_len = case["q"].shape[0], case["k"].shape[2]
    slot = torch.arange(kv_len)
    if (valid := case.get("valid")) is None:
        return torch.ones(batch, kv_len, dtype=torch.bool)
    return (slot % case["block_k"] < valid[..., slot // case["block_k"]]).expand(batch, kv_len)


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, index, counts = (case[n] for n in ("q", "k", "v", "index", "counts"))
    q_block, k_block = (torch.arange(t.shape[2]) // case[n] for t, n in ((q, "block_q"), (k, "block_k")))
    kept = torch.zeros(*index.shape[:3], int(k_block[-1]) + 1, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        kept[b, h, i, index[b, h, i, : counts[b, h, i]].long()] = True
    keep = kept[:, :, q_block][..., k_block] & _is_key(case)[:, None, None]
    mask = torch.zeros(keep.shape, dtype=torch.float64)
    if (bias := case.get("bias")) is not None:
        bias = bias[:, None] if bias.ndim == 2 else bias.repeat_interleave(q.shape[1] // k.shape[1], 1)
        mask = mask + bias[:, :, None]
    mask = mask.masked_fill(~keep, -torch.inf)
    k, v = (t.nan_to_num(0.0) for t in (k, v))
    return oracle.attention(q, k, v, attn_mask=mask, scale=case.get("scale"), layout="bhsd")


def check(case: Case, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = expected(case)
    absolute, relative = TOLERANCE[case["q"].dtype]
    assert found[0].dtype is case["q"].dtype and found[1].dtype is torch.float32
    torch.testing.assert_close(found[0].double(), out, atol=absolute, rtol=relative)
    torch.testing.assert_close(found[1].double(), lse, atol=1e-5, rtol=1e-5)  # -inf where it should be, and only there


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    groups=st.integers(1, 2),
    q_len=st.integers(1, 100),
    kv_len=st.integers(1, 140),
    d=st.sampled_from([8, 40, 64, 96, 128]),
    block_q=st.sampled_from([24, 64, 72]),
    block_k=st.sampled_from([24, 64, 100]),
    dtype=st.sampled_from(list(TOLERANCE)),
    valid=st.sampled_from(["", "shared", "batch"]),
    bias=st.sampled_from(["", "batch", "heads"]),
)
def test_any_lists_over_any_blocks_are_masked_attention(run: Interpreter, **sizes: Any) -> None:
    case = make(**sizes)
    check(case, run(case))


@pytest.mark.parametrize("valid", ["", "shared"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_every_tile_of_the_table_gives_the_same(run: Interpreter, shape: tuple[int, int], d: int, valid: str) -> None:
    case = make(q_len=256, kv_len=256, d=d, block_q=128, block_k=128, valid=valid, dtype=torch.float16)
    check(case, run(case, shape))


def test_all_blocks_listed_is_dense_attention(run: Interpreter) -> None:
    case = make(q_len=192, kv_len=192)
    case["index"] = torch.arange(3, dtype=torch.int32).expand(1, 2, 3, 3)  # shared by heads and rows: stride 0
    case["counts"] = torch.tensor(3, dtype=torch.int32).expand(1, 2, 3)
    out, lse = run(case)
    dense, dense_lse = oracle.attention(*(case[n] for n in "qkv"), layout="bhsd")
    torch.testing.assert_close(out.double(), dense, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), dense_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("why", ["no block listed", "no key in the blocks", "every key hidden by the bias"])
def test_rows_without_keys_are_0_and_minus_infinity(run: Interpreter, why: str) -> None:
    case = make(q_len=100, kv_len=128)
    case["index"] = torch.arange(2, dtype=torch.int32).expand(1, 2, 2, 2)
    case["counts"] = torch.full((1, 2, 2), 0 if why == "no block listed" else 2, dtype=torch.int32)
    if why == "no key in the blocks":
        case["valid"] = torch.zeros(2, dtype=torch.int32)
        case["k"].fill_(math.nan)
        case["v"].fill_(math.nan)
    if why == "every key hidden by the bias":
        case["bias"] = torch.full((1, 128), -torch.inf)
    out, lse = run(case)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_a_hidden_first_block_leaves_no_trace(run: Interpreter) -> None:
    """The running maximum is -inf until the second block."""
    case = make(kv_len=192, valid="shared")
    case["index"] = torch.arange(3, dtype=torch.int32).expand(1, 2, 2, 3).contiguous()
    case["counts"] = torch.full((1, 2, 2), 3, dtype=torch.int32)
    case["valid"] = torch.tensor([0, 17, 64], dtype=torch.int32)
    case["k"], case["v"] = torch.randn(2, 1, 2, 192, 64, generator=torch.Generator().manual_seed(1))
    check(case, run(case))


@pytest.mark.parametrize("scale", [None, 1.0, 0.02, 0.0, -0.3])
def test_the_scale_is_the_caller_s(run: Interpreter, scale: float | None) -> None:
    case = make() | {"scale": scale}
    check(case, run(case))


def test_large_scores_do_not_overflow(run: Interpreter) -> None:
    """Weights as large as e**700.  The bound is what float32 sums of 64 products may be off by, twice for a quotient."""
    case = make(kv_len=192) | {"scale": 40.0}
    out, lse = run(case)
    wanted, wanted_lse = expected(case)
    near = (64 + 2) * 2**-24 * 40.0 * float((case["q"].abs() @ case["k"].abs().mT).max())
    assert wanted_lse.max() > 700
    torch.testing.assert_close(lse.double(), wanted_lse, atol=near, rtol=0.0)
    torch.testing.assert_close(out.double(), wanted, atol=2 * near * float(case["v"].abs().max()), rtol=0.0)


def test_strides_are_free_and_inputs_are_left_alone(run: Interpreter) -> None:
    case = make(groups=2, batch=2, bias="batch")
    packed = {n: case[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    assert not packed["q"].is_contiguous()
    backwards = {n: case[n].transpose(2, 3).contiguous().transpose(2, 3) for n in "qkv"}
    before = {n: x.clone() for n, x in packed.items()}
    plain = run(case)
    for strided in (packed, backwards):
        for a, b in zip(run(case | strided), plain):
            assert torch.equal(a, b)
    assert all(torch.equal(packed[n], before[n]) for n in "qkv")


def test_batches_and_heads_do_not_see_each_other(run: Interpreter) -> None:
    case = make(batch=2, groups=2, bias="batch")
    out, lse = run(case)
    for b in range(2):
        alone = {n: x[b : b + 1] if isinstance(x, torch.Tensor) else x for n, x in case.items()}
        for h in range(4):
            one = alone | {n: alone[n][:, h : h + 1] for n in ("q", "index", "counts")}
            one |= {n: alone[n][:, h // 2 : h // 2 + 1] for n in "kv"}
            o, s = run(one)
            assert torch.equal(o[0, 0], out[b, h]) and torch.equal(s[0, 0], lse[b, h])


@pytest.mark.parametrize("sizes", [{"q_len": 0}, {"batch": 0}])
def test_nothing_to_compute_is_no_error(run: Interpreter, sizes: dict[str, int]) -> None:
    batch, q_len = sizes.get("batch", 1), sizes.get("q_len", 64)
    case = make() | {"q": torch.zeros(batch, 2, q_len, 64), "k": torch.zeros(batch, 2, 128, 64)}
    case |= {"v": case["k"], "index": torch.zeros(batch, 2, 0, 0).int(), "counts": torch.zeros(batch, 2, 0).int()}
    out, lse = run(case)
    assert out.shape == (batch, 2, q_len, 64) and lse.shape == (batch, 2, q_len)


@pytest.mark.parametrize(
    "change, text",
    [
        (
            {"q": torch.zeros(1, 2, 128, 64, dtype=torch.float64)},
            "it takes bfloat16, float16, float32, and q is float64",
        ),
        ({n: torch.zeros(1, 2, 128, 192) for n in "qkv"}, "it takes one head_dim up to 128; q has 192 and v 192"),
        ({"v": torch.zeros(1, 2, 128, 32)}, "q has 64 and v 32"),
    ],
)
def test_what_it_does_not_take_is_refused(run: Interpreter, change: Case, text: str) -> None:
    with pytest.raises(CallError, match=text):
        run(make() | change)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kept_for", [(1, 1), (2, 4)])
def test_it_is_a_kernel_of_the_executor(run: Interpreter, layout: str, ragged: bool, kept_for: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, s, 64, generator=g) for h, s in ((4, 150), (2, 200), (2, 200)))
    keep = torch.rand(*kept_for, 3, 4, generator=g) < 0.5
    valid = torch.tensor([50, 0, 1, 8]) if ragged else None
    mask = BlockMask.from_dense(keep, 150, 200, 50, 64, kv_valid=valid)
    wanted = oracle.attention(q, k, v, attn_mask=mask.to_dense(), layout="bhsd")
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    out, lse = run.executor(q, k, v, mask, layout=layout, return_lse=True, kernel="triton")
    out = out.transpose(1, 2) if layout == "bshd" else out
    torch.testing.assert_close(out.double(), wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted[1], atol=1e-5, rtol=1e-5)


def test_the_executor_says_why_it_cannot_take_a_call() -> None:
    q = torch.zeros(1, 1, 64, 64)
    mask = BlockMask.from_dense(torch.ones(1, 1, 1, 1, dtype=torch.bool), 64, 64, 64, 64)
    from hal.sparse.triton import launch

    if launch.INTERPRETER:
        pytest.skip("TRITON_INTERPRET is set")
    for x, text in (
        (q, "it takes bfloat16, float16, and q is float32"),
        (q.half(), "it runs on cuda, and q is on cpu"),
    ):
        with pytest.raises(NoKernelError, match=f"kernel 'triton' .* cannot serve this: {text}"):
            block_sparse_attention(x, x, x, mask, kernel="triton")


@pytest.mark.skipif(os.environ.get("HAL_HARDWARE") != "1", reason="needs an accelerator: set HAL_HARDWARE=1 there")
@pytest.mark.parametrize("platform", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in ("cuda", "rocm")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [64, 96, 128])
def test_on_a_gpu_it_computes_what_the_oracle_computes(platform: str, dtype: torch.dtype, d: int) -> None:
    from hal.sparse.triton.launch import block_sparse

    for block, (valid, bias) in itertools.product((64, 100, 128), (("", ""), ("shared", ""), ("batch", "heads"))):
        case = make(batch=2, groups=2, q_len=700, kv_len=900, d=d, block_q=block, block_k=block,
                    dtype=dtype, valid=valid, bias=bias)  # fmt: skip
        out, lse = block_sparse(**{n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in case.items()})
        wanted, wanted_lse = expected(case)
        # The output's rounding, and that of the probabilities before they meet v.
        unit = torch.finfo(dtype).eps
        near = unit * float(case["v"].nan_to_num(0.0).abs().max())
        torch.testing.assert_close(out.cpu().double(), wanted, atol=near, rtol=unit)
        torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=1e-3, rtol=1e-5)
