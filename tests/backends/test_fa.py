"""FlashAttention: every package's kernel, through a fake that has its recorded signature and computes with the oracle."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import hal
from hal import oracle, policy, settlement
from hal.backends.fa import BACKEND
from hal.backends.fa import kernels as bound
from hal.errors import NoKernelError
from hal.facts import Call, Package
from hal.fittings import Varlen
from hal.flash import packed_rows_without_keys
from hal.testing import fakes

settings = hypothesis_settings(max_examples=25, deadline=None)

# kernel -> (record, package, version): every recorded package that the kernel may meet
PACKAGES = {
    "fa2": [
        ("flash_attn-2.6.3", "flash-attn", "2.6.3"),
        ("flash_attn-2.8.3.post1", "flash-attn", "2.8.3.post1+cu13torch2.9"),
    ],
    "fa2.vllm": [("vllm_flash_attn-main", "vllm-flash-attn", "0.28.0")],
    "fa3": [
        ("flash_attn_3-3.0.0b1-v2.8.0", "flash_attn_3", "3.0.0b1"),
        ("flash_attn_3-3.0.0b1-v2.8.3", "flash_attn_3", "3.0.0b1"),
        ("flash_attn_3-3.0.0", "flash_attn_3", "3.0.0"),
    ],
    "fa3.hub": [("flash_attn_3-3.0.0", "kernels", "0.17.2")],
    "fa3.sgl": [("sgl_kernel-0.3.21", "sgl-kernel", "0.3.21"), ("sgl_kernel-0.4.10", "sgl-kernel", "0.4.10")],
    "fa4": [("flash_attn_4-4.0.0b5", "flash-attn-4", "4.0.0b5"), ("flash_attn_4-4.0.0b36", "flash-attn-4", "4.0.0b36")],
}
CASES = [pytest.param(k, *p, id=f"{k}-{p[0]}") for k, packages in PACKAGES.items() for p in packages]
NO_LSE = "flash_attn_3-3.0.0b1-v2.8.3"  # the builds between: no LSE by the public functions
DENSE_BY_PACKING = {"fa2.vllm", "fa3.sgl"}


@contextmanager
def machine_with(kernel, record, package, version, **returns):
    """The fake is importable, and the simulated machine has this package alone."""
    with ExitStack() as stack:
        if kernel == "fa3.hub":
            fake = fakes.of(record, **returns)
            compute = {
                "install_kernel": lambda a: a["repo_id"],
                "get_local_kernel": lambda a: SimpleNamespace(**fake.functions),
            }
            stack.enter_context(fakes.installed("kernels-0.17.2", compute))
        else:
            fake = stack.enter_context(fakes.installed(record, **returns))
        stack.enter_context(fakes.workbench(BACKEND, **{package: version}))
        yield fake


def tensors(seed, b, sq, sk, heads, kv_heads, d, dv=None, layout="bshd", dtype=torch.bfloat16, **options):
    g = torch.Generator().manual_seed(seed)
    shapes = [(b, sq, heads, d), (b, sk, kv_heads, d), (b, sk, kv_heads, dv or d)]
    out = [torch.randn(s, generator=g).to(dtype) for s in shapes]
    if layout == "bhsd":
        out = [t.transpose(1, 2) for t in out]
    return [t.requires_grad_(**options) for t in out] if options else out


def near(out, wanted, dtype):
    name = str(dtype).removeprefix("torch.")
    torch.testing.assert_close(out.double(), wanted, atol=BACKEND.tolerance[name], rtol=0)


@st.composite
def calls(draw):
    kv_heads = draw(st.sampled_from([1, 2]))
    causal = draw(st.booleans())
    sq, sk = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    window = draw(st.sampled_from([None, (3, 0), (0, 5), (-1, 2), (7, -1), 4]))
    if window is not None and not causal:
        sk = sq  # other windows are refused by FlashAttention 2; a test of its own says so
    return {
        "shape": (
            draw(st.integers(1, 3)),
            sq,
            sk,
            kv_heads * draw(st.sampled_from([1, 3])),
            kv_heads,
            draw(st.sampled_from([32, 64])),
        ),
        "seed": draw(st.integers(0, 99)),
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16])),
        "arguments": {
            "is_causal": causal,
            "window": window,
            "scale": draw(st.sampled_from([None, 0.3])),
            "layout": draw(st.sampled_from(["bshd", "bhsd"])),
        },
        "lse": draw(st.booleans()),
    }


@pytest.mark.parametrize("kernel, record, package, version", CASES)
@given(case=calls())
@settings
def test_equals_the_oracle(kernel, record, package, version, case):
    arguments, lse = case["arguments"], case["lse"] and record != NO_LSE
    q, k, v = tensors(case["seed"], *case["shape"], layout=arguments["layout"], dtype=case["dtype"])
    before = [t.clone() for t in (q, k, v)]
    with machine_with(kernel, record, package, version) as fake:
        out = hal.attention(q, k, v, backend="fa", enable_gqa=True, return_lse=lse, **arguments)
        assert hal.explain(q, k, v, backend="fa", enable_gqa=True, return_lse=lse, **arguments).kernel == kernel
    wanted, wanted_lse = oracle.attention(q, k, v, **arguments)
    out, stats = out if lse else (out, None)
    assert out.shape == wanted.shape and out.dtype == q.dtype
    near(out, wanted, q.dtype)
    if lse:
        assert stats.dtype is torch.float32 and stats.shape == wanted_lse.shape
        torch.testing.assert_close(stats.double(), wanted_lse, atol=1e-4, rtol=1e-4)
    for t, was in zip((q, k, v), before):
        assert torch.equal(t, was)
    (call,) = fake.calls
    assert call["softmax_scale"] == (arguments["scale"] or q.shape[-1] ** -0.5)
    assert call["causal"] is arguments["is_causal"]
    packed = call["symbol"] == "flash_attn_varlen_func"
    assert packed is (kernel in DENSE_BY_PACKING)
    b, sq, sk, heads, kv_heads, d = case["shape"]
    assert call["q"].shape == ((b * sq, heads, d) if packed else (b, sq, heads, d))
    assert call["k"].shape == ((b * sk, kv_heads, d) if packed else (b, sk, kv_heads, d))


@st.composite
def packings(draw):
    lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5)
    kv_heads = draw(st.sampled_from([1, 2]))
    return {
        "lengths": draw(lengths),
        "heads": (kv_heads * draw(st.sampled_from([1, 2])), kv_heads),
        "causal": draw(st.booleans()),
        "lse": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("kernel, record, package, version", CASES)
@given(case=packings())
@settings
def test_packed_sequences_equal_the_oracle(kernel, record, package, version, case):
    lse = case["lse"] and record != NO_LSE
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in zip(*case["lengths"]))
    heads, kv_heads = case["heads"]
    g = torch.Generator().manual_seed(case["seed"])
    q, k, v = (
        torch.randn(int(n), h, 32, generator=g).bfloat16()
        for n, h in ((cu_q[-1], heads), (cu_k[-1], kv_heads), (cu_k[-1], kv_heads))
    )
    with machine_with(kernel, record, package, version):
        out = hal.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            is_causal=case["causal"],
            enable_gqa=True,
            return_lse=lse,
            backend="fa",
        )
    wanted, wanted_lse = oracle.attention_varlen(q, k, v, cu_q, cu_k, is_causal=case["causal"])
    out, stats = out if lse else (out, None)
    assert out.shape == wanted.shape and out.dtype == q.dtype
    near(out, wanted, q.dtype)
    if lse:  # also: no key, no weight, though packages write +inf, 0 or -inf there
        assert stats.dtype is torch.float32
        torch.testing.assert_close(stats.double(), wanted_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel, record, package, version", CASES)
def test_key_padding_is_packed(kernel, record, package, version):
    q, k, v = tensors(1, 3, 8, 10, 4, 2, 64, layout="bhsd")
    mask = torch.arange(10) < torch.tensor([10, 4, 0])[:, None]  # the last has no key at all
    lse = record != NO_LSE
    with machine_with(kernel, record, package, version) as fake:
        arguments = {"attn_mask": mask, "layout": "bhsd", "enable_gqa": True, "return_lse": lse}
        out = hal.attention(q, k, v, backend="fa", **arguments)
        assert hal.explain(q, k, v, backend="fa", **arguments).fittings == ("key_padding_to_varlen",)
    wanted, wanted_lse = oracle.attention(q, k, v, attn_mask=mask[:, None, None], layout="bhsd")
    near(out[0] if lse else out, wanted, q.dtype)
    if lse:
        torch.testing.assert_close(out[1].double(), wanted_lse, atol=1e-4, rtol=1e-4)
    (call,) = fake.calls
    assert call["symbol"] == "flash_attn_varlen_func"
    assert call["cu_seqlens_q"].tolist() == [0, 8, 16, 24] and call["cu_seqlens_k"].tolist() == [0, 10, 14, 14]


@pytest.mark.parametrize("kernel, record, package, version", CASES)
@pytest.mark.parametrize(
    "reason, arguments",
    [
        ("mask.bool", {"attn_mask": torch.ones(8, 8, dtype=torch.bool).tril()}),
        ("mask.additive", {"attn_mask": torch.zeros(8, 8)}),
        ("mask.key_padding", {"attn_mask": torch.ones(2, 1, 1, 8, dtype=torch.bool), "is_causal": True}),
    ],
)
def test_other_masks_are_refused(kernel, record, package, version, reason, arguments):
    q, k, v = tensors(1, 2, 8, 8, 2, 2, 64)
    with machine_with(kernel, record, package, version) as fake:
        with pytest.raises(NoKernelError) as refused:
            hal.attention(q, k, v, backend="fa", **arguments)
        mine = next(c for c in refused.value.decision.candidates if c.kernel.name == kernel)
        assert [r.id for r in mine.reasons] == [reason]
        assert not fake.calls


PLAIN = {"dtype": "bfloat16", "head_dim": 64, "heads": 4, "batch": 2, "q_len": 128}


# ---- what each package is told, and what it may return


def test_flash_attention_2_is_told_everything():
    q, k, v = tensors(1, 2, 8, 8, 2, 2, 64)
    told = []
    compute = {"flash_attn_func": lambda a: told.append(a) or a["q"]}
    with fakes.installed("flash_attn-2.8.3.post1", compute), fakes.workbench(BACKEND, flash_attn="2.8.3"):
        hal.attention(q, k, v, backend="fa", dropout_p=0.25, is_causal=True, window=(5, -1), scale=0.5)
        bound.fa2(Call.of({**PLAIN, "deterministic": True}))(q, k, v, None, None)
    wanted = {"dropout_p": 0.25, "window_size": (5, -1), "softmax_scale": 0.5, "causal": True}
    assert {name: told[0][name] for name in wanted} == wanted
    assert [a["deterministic"] for a in told] == [False, True]


def test_flash_attention_4_says_unlimited_by_none():
    q, k, v = tensors(1, 1, 8, 8, 2, 2, 64)
    with machine_with("fa4", *PACKAGES["fa4"][-1]) as fake:
        for window in (None, (3, -1), (-1, 0), (2, 4)):
            hal.attention(q, k, v, backend="fa", window=window)
    assert [c["window_size"] for c in fake.calls] == [(None, None), (3, None), (None, 0), (2, 4)]


@pytest.mark.parametrize("values", [2, 3, 5])
def test_flash_attention_4_may_return_more_values(values):
    q, k, v = tensors(1, 1, 8, 8, 2, 2, 64)
    with machine_with("fa4", *PACKAGES["fa4"][-1], values=values):
        out = hal.attention(q, k, v, backend="fa")
        both = hal.attention(q, k, v, backend="fa", return_lse=True)
    assert torch.is_tensor(out) and len(both) == 2 and torch.equal(out, both[0])


def test_flash_attention_3_is_asked_for_lse_only_where_it_can_be():
    q, k, v = tensors(1, 1, 8, 8, 2, 2, 64)
    with machine_with("fa3", *PACKAGES["fa3"][-1]) as fake:
        hal.attention(q, k, v, backend="fa")
        hal.attention(q, k, v, backend="fa", return_lse=True)
    assert ["return_attn_probs" in c for c in fake.calls] == [False, True]
    with machine_with("fa3", *PACKAGES["fa3"][0]) as fake:
        assert len(hal.attention(q, k, v, backend="fa", return_lse=True)) == 2
    assert "return_attn_probs" not in fake.calls[0]


def settled(record, version, call, tensors):
    with fakes.installed(record), fakes.workbench(BACKEND, flash_attn_3=Package("found", version)) as machine:
        ask = policy.Policy((policy.Request("fa", "require", "test", "fa3"),))
        return settlement.settle(call, machine, hal.plugins.catalog(), ask, tensors)


@pytest.mark.parametrize("record, version", [(r, version) for r, _, version in PACKAGES["fa3"]])
def test_a_build_of_flash_attention_3_that_cannot_be_asked_for_lse_is_found_out(record, version):
    q, k, v = tensors(1, 1, 8, 8, 2, 2, 64)
    call = Call.of({**PLAIN, "lse": True})
    d = settled(record, version, call, (q, k, v, None))
    assert (d.kernel == "fa3") is (version == "3.0.0")
    if not d.chosen:
        assert "takes no return_attn_probs" in d.error
    assert settled(record, version, call.but(lse=False), (q, k, v, None)).kernel == "fa3"


def test_a_missing_lse_is_an_error_and_never_a_split_batch():
    q, k, v = tensors(1, 2, 8, 8, 2, 2, 64)
    with machine_with("fa3", *PACKAGES["fa3"][1]), pytest.raises(RuntimeError, match="returned none"):
        hal.attention(q, k, v, backend="fa", return_lse=True)


def test_the_hub_kernel_is_taken_from_the_local_cache_only():
    q, k, v = tensors(1, 1, 8, 8, 2, 2, 64)

    def missing(arguments):
        raise FileNotFoundError("Cannot find a build variant:\n\ntorch212-cu130: Torch version (2.12) does not match")

    ask = policy.Policy((policy.Request("fa", "require", "test", "fa3.hub"),))
    with (
        fakes.installed("kernels-0.16.0", {"install_kernel": missing, "get_local_kernel": missing}) as fake,
        fakes.workbench(BACKEND, kernels=Package("found", "0.16.0")) as machine,
    ):
        d = settlement.settle(Call.of(PLAIN), machine, hal.plugins.catalog(), ask, (q, k, v, None))
    assert d.chosen is None
    assert "torch212-cu130: Torch version (2.12) does not match" in d.error  # the variants, each with its reason
    assert "install_kernel('kernels-community/flash-attn3', revision='v1')" in d.error
    assert all(c["local_files_only"] is True for c in fake.calls)


def test_gradients_flow_through():
    for kernel in ("fa2", "fa3", "fa3.hub", "fa4"):
        q, k, v = tensors(3, 2, 8, 8, 4, 2, 64, requires_grad=True)
        wanted = torch.autograd.grad(oracle.attention(q, k, v, is_causal=True)[0].float().sum(), (q, k, v))
        with machine_with(kernel, *PACKAGES[kernel][-1]):
            out = hal.attention(q, k, v, backend="fa", is_causal=True, enable_gqa=True)
        for got, want in zip(torch.autograd.grad(out.float().sum(), (q, k, v)), wanted):
            torch.testing.assert_close(got.float(), want.float(), atol=3e-2, rtol=3e-2)


def test_the_lse_of_flash_attention_4_has_a_gradient():
    q, k, v = tensors(3, 1, 8, 8, 2, 2, 64, requires_grad=True)
    with machine_with("fa4", *PACKAGES["fa4"][-1]):
        _, lse = hal.attention(q, k, v, backend="fa", return_lse=True)
    (got,) = torch.autograd.grad(lse.sum(), q)
    (want,) = torch.autograd.grad(oracle.attention(q, k, v)[1].sum(), q)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kernel", PACKAGES)
@pytest.mark.parametrize("b, sq, sk", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_nothing_to_attend_to_launches_nothing(kernel, b, sq, sk):
    q, k, v = tensors(1, b, sq, sk, 4, 2, 64)
    with machine_with(kernel, *PACKAGES[kernel][-1]) as fake:
        out, lse = hal.attention(q, k, v, backend="fa", enable_gqa=True, return_lse=True)
    assert not fake.calls
    assert out.shape == (b, sq, 4, 64) and out.dtype == q.dtype and not out.any()
    assert lse.shape == (b, 4, sq) and lse.dtype is torch.float32 and (lse == -torch.inf).all()


def test_a_single_packed_query_is_not_folded():
    """FlashAttention 2 reshapes grouped queries by the batch when max_seqlen_q is 1, which fails for an empty sequence."""
    q, k, v = torch.randn(1, 4, 64).half(), torch.randn(5, 2, 64).half(), torch.randn(5, 2, 64).half()
    cu_q, cu_k = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    for kernel in ("fa2", "fa2.vllm"):
        with machine_with(kernel, *PACKAGES[kernel][-1]) as fake:
            hal.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, enable_gqa=True, backend="fa")
        assert fake.calls[0]["max_seqlen_q"] == 2


def test_the_hub_kernel_is_loaded_once():
    q, k, v = tensors(1, 1, 8, 8, 2, 2, 64)
    with machine_with("fa3.hub", *PACKAGES["fa3.hub"][-1]):
        bound._loaded.cache_clear()
        for scale in (0.25, 0.5):  # two decisions, each with a confirmation and a binding
            hal.attention(q, k, v, backend="fa", scale=scale)
        assert bound._loaded.cache_info().misses == 1


def test_rows_without_keys():
    """The mask of packed rows against the oracle's, for every alignment of causal and windowed sequences."""
    lens = list(itertools.product((0, 1, 3), (0, 1, 2, 4)))
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in zip(*lens))
    q, k = torch.randn(int(cu_q[-1]), 1, 8), torch.randn(int(cu_k[-1]), 1, 8)
    for right in (-1, 0, 1, 2):
        _, lse = oracle.attention_varlen(q, k, k, cu_q, cu_k, window=(-1, right))
        n = Varlen(cu_q, cu_k, 3, 4)
        assert torch.equal(packed_rows_without_keys(q, n, right), lse[0] == -torch.inf), right


def test_compile_is_refused_where_the_package_registers_no_kernels(monkeypatch):
    q, k, v = tensors(1, 1, 16, 16, 2, 2, 64)
    with machine_with("fa4", *PACKAGES["fa4"][-1]):
        monkeypatch.setattr("hal.run.is_compiling", lambda: True)
        d = hal.run.decided(q, k, v, backend="fa")
        assert "compile" in [r.id for c in d.candidates if c.kernel.name == "fa4" for r in c.reasons]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_compiles_with_dynamic_lengths_and_gradients(kernel):
    """What hal adds around a package's functions has no graph break; the fakes' functions are traced through."""
    options = {"is_causal": True, "enable_gqa": True}
    with machine_with(kernel, *PACKAGES[kernel][-1]):
        compiled = torch.compile(
            lambda q, k, v: hal.attention(q, k, v, backend="fa", **options),
            fullgraph=True,
            backend="aot_eager",
            dynamic=True,
        )
        for seed, sq, sk in ((0, 16, 19), (1, 24, 24), (2, 33, 40)):
            q, k, v = tensors(seed, 2, sq, sk, 4, 2, 64, requires_grad=True)
            out, wanted = compiled(q, k, v), oracle.attention(q, k, v, is_causal=True)[0]
            near(out, wanted, q.dtype)
            (got,), (want,) = (torch.autograd.grad(o.double().sum(), q) for o in (out, wanted))
            torch.testing.assert_close(got.float(), want.float(), atol=3e-2, rtol=3e-2)
