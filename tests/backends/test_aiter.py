"""AITER's two parts, through fakes that have their recorded signatures and compute with the oracle."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import hal
from hal import oracle, policy, probe, resolver
from hal.backends.aiter import AITER, AITER_TRITON, BACKEND
from hal.errors import NoKernelError
from hal.facts import Call
from hal.testing import fakes

settings = hypothesis_settings(max_examples=20, deadline=None)
CASES = [  # (kernel, record, version)
    ("aiter", "amd_aiter-0.1.7.post2.dev18", "0.1.7.post2.dev18"),
    ("aiter", "amd_aiter-0.1.20", "0.1.20.post1"),
    ("aiter.triton", "amd_aiter_triton-0.1.10", "0.1.10"),
    ("aiter.triton", "amd_aiter_triton-0.1.20", "0.1.20.post1"),
]
PLAIN = {"dtype": "bfloat16", "head_dim": 64, "heads": 4, "batch": 2, "q_len": 128}


@contextmanager
def machine_with(kernel, record, version, **returns):
    """The fake is importable, and the simulated machine has this package; the other part of it is forbidden."""
    other = "aiter" if kernel == "aiter.triton" else "aiter.triton"
    with (
        fakes.installed(record, **returns) as fake,
        fakes.workbench(BACKEND, amd_aiter=version),
        hal.context.changed(policy=policy.Policy((policy.Request("aiter", "forbid", "test", other),))),
    ):
        yield fake


def near(out, wanted, dtype):
    torch.testing.assert_close(out.double(), wanted, atol=BACKEND.tolerance[str(dtype).removeprefix("torch.")], rtol=0)


@pytest.mark.parametrize("kernel, record, version", CASES)
@given(
    b=st.integers(1, 2), sq=st.integers(1, 24), sk=st.integers(1, 24), groups=st.sampled_from([1, 4]),
    causal=st.booleans(), window=st.sampled_from([None, (3, 2), 4]), scale=st.sampled_from([None, 0.3]),
    layout=st.sampled_from(["bshd", "bhsd"]), lse=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings
def test_equals_the_oracle(kernel, record, version, b, sq, sk, groups, causal, window, scale, layout, lse, seed):
    if kernel == "aiter.triton":
        window = None  # refused, as a test below says
    elif window and not causal:
        sk = sq
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, s, h, 64, generator=g).half() for s, h in ((sq, 2 * groups), (sk, 2), (sk, 2)))
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    arguments = {"is_causal": causal, "window": window, "scale": scale, "layout": layout}
    with machine_with(kernel, record, version) as fake:
        out = hal.attention(q, k, v, backend="aiter", enable_gqa=True, return_lse=lse, **arguments)
    wanted, wanted_lse = oracle.attention(q, k, v, **arguments)
    out, stats = out if lse else (out, None)
    assert out.shape == wanted.shape and out.dtype == q.dtype
    near(out, wanted, q.dtype)
    if lse:
        assert stats.shape == wanted_lse.shape and stats.dtype is torch.float32
        torch.testing.assert_close(stats.double(), wanted_lse, atol=1e-4, rtol=1e-4)
    (call,) = fake.calls
    assert call["softmax_scale"] == (scale or 64**-0.5)  # never left to the package
    assert (call["causal"], call["return_lse"], call["deterministic"]) == (causal, lse, False)
    assert call["q"].shape == (b, sq, 2 * groups, 64) and call["k"].shape == (b, sk, 2, 64)


@pytest.mark.parametrize("kernel, record, version", CASES)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    causal=st.booleans(), lse=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings
def test_packed_sequences_equal_the_oracle(kernel, record, version, lengths, causal, lse, seed):
    lse = lse and not (causal and kernel == "aiter.triton")  # refused, as a test below says
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in zip(*lengths))
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(int(n), h, 32, generator=g).half() for n, h in ((cu_q[-1], 4), (cu_k[-1], 2), (cu_k[-1], 2)))
    options = {"is_causal": causal, "enable_gqa": True, "return_lse": lse, "backend": "aiter"}
    with machine_with(kernel, record, version):
        out = hal.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    wanted, wanted_lse = oracle.attention_varlen(q, k, v, cu_q, cu_k, is_causal=causal)
    out, stats = out if lse else (out, None)
    near(out, wanted, q.dtype)
    if lse:  # [H, T], also of the Triton part, which has [T, H]
        torch.testing.assert_close(stats.double(), wanted_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel, record, version", CASES)
def test_key_padding_is_packed_and_other_masks_are_refused(kernel, record, version):
    q, k, v = (torch.randn(2, 6, 2, 32).half() for _ in range(3))
    mask = torch.arange(6) < torch.tensor([6, 3])[:, None]
    with machine_with(kernel, record, version) as fake:
        out = hal.attention(q, k, v, backend="aiter", attn_mask=mask[:, None, None])
        assert fake.calls[0]["cu_seqlens_k"].tolist() == [0, 6, 9]
        for other in (torch.ones(6, 6, dtype=torch.bool).tril(), torch.zeros(6, 6)):
            with pytest.raises(NoKernelError, match="mask.bool" if other.dtype is torch.bool else "mask.additive"):
                hal.attention(q, k, v, backend="aiter", attn_mask=other)
    near(out, oracle.attention(q, k, v, attn_mask=mask[:, None, None])[0], q.dtype)


@pytest.mark.parametrize("kernel, record, version", CASES)
def test_a_gradient_asks_for_the_lse(kernel, record, version):
    """AITER's backward asserts return_lse; the caller gets the output alone."""
    q, k, v = (torch.randn(1, 6, 2, 32).half().requires_grad_() for _ in range(3))
    with machine_with(kernel, record, version, grad_needs_lse=True) as fake:
        out = hal.attention(q, k, v, backend="aiter")
        assert fake.calls[0]["return_lse"] is True and torch.is_tensor(out)
        with torch.no_grad():
            hal.attention(q, k, v, backend="aiter")
        assert fake.calls[1]["return_lse"] is False
    (got,) = torch.autograd.grad(out.float().sum(), q)
    (want,) = torch.autograd.grad(oracle.attention(q, k, v)[0].sum(), q)
    torch.testing.assert_close(got.float(), want.float(), atol=1e-2, rtol=1e-2)


def decided(kernel, call, arch="any", version="0.1.20", shared_memory=None, package="amd-aiter"):
    with fakes.workbench(BACKEND, arch=arch, shared_memory=shared_memory, **{package: version}) as machine:
        ask = policy.Policy((policy.Request("aiter", "require", "test", kernel),))
        d = resolver.resolve(Call.of({**PLAIN, **call}), machine, hal.plugins.catalog(), ask)
        (mine,) = [c for c in d.candidates if c.kernel.name == kernel]
        return [r.id for r in mine.reasons if r.verdict is False] if d.chosen is None else []


TABLE = [  # (kernel, call, machine, reasons)
    ("aiter", {"window": (2, 2), "causal": True}, {}, []),
    ("aiter", {"window": (-1, 0)}, {}, ["window.zero"]),
    ("aiter", {"window": (2, 2), "kv_len": 64}, {}, ["window.rectangular"]),
    ("aiter", {"head_dim": 192, "v_head_dim": 128, "grad": True, "lse": False}, {}, []),
    ("aiter", {"grad": True, "lse": True}, {}, ["lse_grad"]),
    ("aiter", {"dropout": 0.1}, {}, ["dropout"]),
    ("aiter", {"compile": True}, {}, ["compile"]),
    ("aiter", {"dtype": "float32"}, {}, ["dtype"]),
    ("aiter.triton", {"window": (2, 2)}, {}, ["window"]),
    ("aiter.triton", {"causal": True, "varlen": True}, {}, []),
    ("aiter.triton", {"causal": True, "varlen": True, "lse": True}, {}, ["causal.varlen.lse"]),
    ("aiter.triton", {"causal": True, "varlen": True, "grad": True}, {}, ["causal.varlen.grad"]),
    ("aiter.triton", {"head_dim": 256}, {"arch": "gfx1201", "shared_memory": 65536}, ["known_bad.aiter.shared_memory"]),
    ("aiter.triton", {"head_dim": 128}, {"arch": "gfx1201", "shared_memory": 65536}, []),
    ("aiter.triton", {"head_dim": 256}, {"arch": "gfx942", "shared_memory": 65536}, []),
    ("aiter", {}, {"version": "0.13.20191203"}, ["package.version"]),  # PyPI's aiter, whatever it is called
    ("aiter", {}, {"version": "0.1.4"}, ["package.version"]),
    ("aiter.triton", {}, {"version": "0.1.9"}, ["package.version"]),  # its Triton part lay elsewhere
    ("aiter", {}, {"package": "aiter"}, []),  # people say aiter
]


@pytest.mark.parametrize("kernel, call, machine, reasons", TABLE)
def test_decisions(kernel, call, machine, reasons):
    assert decided(kernel, call, **machine) == reasons


# ---- what is installed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the import path, alone in having an aiter."""
    monkeypatch.syspath_prepend(str(tmp_path))
    probe._owners.cache_clear()
    yield tmp_path
    probe._owners.cache_clear()


def test_the_aiter_of_pypi_is_another_project(folder):
    fakes.distribution(folder, "aiter", "0.13.20191203", {"aiter/__init__.py": "def aiter(it): ...\n"})
    (needs,) = AITER.needs
    state = probe.look(needs)
    assert state.state == "wrong_distribution" and "distribution 'aiter'" in state.note
    with fakes.workbench(BACKEND, amd_aiter=state) as machine:
        d = resolver.resolve(Call.of(PLAIN), machine, hal.plugins.catalog(), policy.Policy((policy.Request("aiter"),)))
    assert d.chosen is None and "package.wrong_distribution" in d.error and "github.com/ROCm/aiter" in d.error


def test_amd_aiter_is_found_and_its_parts_are_proven(folder):
    body = "def flash_attn_func(q, k, v, softmax_scale=None, return_lse=False): ...\n"
    fakes.distribution(folder, "amd-aiter", "0.1.20", {"aiter/__init__.py": body})
    (ck,), (triton,) = AITER.needs, AITER_TRITON.needs
    assert (probe.look(ck).state, probe.look(ck).version) == ("found", "0.1.20")
    assert probe.look(triton).state == "missing_symbol"  # no such module in this build
    try:
        assert probe.prove(ck, probe.look(ck)).state == "usable"
    finally:
        import sys

        sys.modules.pop("aiter", None)
