"""hal.attention inside torch.compile(fullgraph=True): dynamic lengths, masks, gradients, and a policy change traces again."""

from __future__ import annotations

import pytest
import torch
from calls import close, kernel

import hal
from hal import context, oracle, run
from hal.errors import NoKernelError
from hal.policy import Policy, Request

pytestmark = pytest.mark.slow  # torch.compile costs seconds to import


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    run.forget()
    hal.clear_receipts()


def compiled(f, **more):
    return torch.compile(f, fullgraph=True, backend="aot_eager", **more)


def x(s=6, h=2, d=8, grad=False):
    return torch.randn(2, s, h, d, requires_grad=grad)


def traces():
    return sum(r.runs for r in hal.receipts())


ARGUMENTS = [
    {}, {"is_causal": True}, {"scale": 0.3}, {"window": (2, 1)}, {"window": 3, "is_causal": True}, {"layout": "bhsd"},
    {"attn_mask": torch.rand(6, 6) < 0.7}, {"attn_mask": torch.randn(2, 2, 6, 6)}, {"attn_mask": torch.rand(2, 6) < 0.9}, {"role": "cross"},
]  # fmt: skip


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: " ".join(a) or "plain")
def test_every_argument_means_the_same_when_compiled(arguments):
    given = dict(arguments)
    if given.get("layout") == "bhsd":
        q, k, v = (x().transpose(1, 2) for _ in range(3))
    else:
        q, k, v = x(), x(), x()
    f = compiled(
        lambda q, k, v, mask: hal.attention(q, k, v, **{**given, **({"attn_mask": mask} if mask is not None else {})})
    )
    want, _ = oracle.attention(q, k, v, **{n: a for n, a in arguments.items() if n != "role"})
    close(f(q, k, v, given.get("attn_mask")), want, 2e-5)
    assert traces() >= 1


def test_lse_comes_with_the_output():
    f = compiled(lambda q, k, v: hal.attention(q, k, v, return_lse=True))
    q, k, v = x(), x(), x()
    out, lse = f(q, k, v)
    want, want_lse = oracle.attention(q, k, v)
    close(out, want, 2e-5)
    close(lse, want_lse, 2e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_may_be_symbols(causal):
    f = compiled(lambda q, k, v: hal.attention(q, k, v, is_causal=causal), dynamic=True)
    counts = []
    for s, t in ((6, 6), (9, 9), (17, 17), (5, 8), (8, 5), (11, 3), (7, 7)):
        q, k, v = x(s), x(t), x(t)
        close(f(q, k, v), oracle.attention(q, k, v, is_causal=causal)[0], 2e-5)
        counts.append(traces())
    assert counts[0] == counts[1] == counts[2] and len(set(counts)) <= 2, "a length is no constant"


@pytest.mark.parametrize("name", ["sdpa.cpu", "sdpa.math"])
def test_gradients_flow_through(name):
    mask = torch.rand(6, 6) < 0.7
    f = compiled(lambda q, k, v: hal.attention(q, k, v, attn_mask=mask).square().sum())
    mine = [x(grad=True) for _ in range(3)]
    wide = [t.detach().double().requires_grad_() for t in mine]
    with kernel(name):
        got = torch.autograd.grad(f(*mine), mine)
    assert {r.kernel for r in hal.receipts()} == {name}
    for g, w in zip(got, torch.autograd.grad(oracle.attention(*wide, attn_mask=mask)[0].square().sum(), wide)):
        close(g, w, 1e-4)


def test_a_changed_policy_traces_again():
    f, q, counts = compiled(lambda q: hal.attention(q, q, q) + 0), x(), []
    for name in ("sdpa.cpu", "sdpa.cpu", "sdpa.math", "sdpa.math", "sdpa.cpu"):
        if name == "sdpa.math":
            with kernel(name):
                f(q)
        else:
            f(q)
        counts.append({r.kernel: r.runs for r in hal.receipts()})
    first, again, other, other_again, back = counts
    assert first == again and set(first) == {"sdpa.cpu"}, "what is compiled is run, and decides nothing"
    assert other == other_again and other["sdpa.cpu"] == first["sdpa.cpu"] and other["sdpa.math"] > 0
    assert back == other, "what was compiled before is found again"


def test_a_refusal_is_told_while_tracing():
    f = compiled(lambda q: hal.attention(q, q, q, dropout_p=0.5))
    with context.changed(policy=Policy((Request("torch_sdpa", kernel="sdpa.cpu", source="the test"),))):
        with pytest.raises(Exception, match="traced") as e:
            f(x())
    causes, cause = [], e.value
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    assert any(
        isinstance(c, NoKernelError) and "asked for by the test, cannot serve this call" in str(c) for c in causes
    )


def test_a_bound_decision_traces_as_it_is():
    q, k, v = x(), x(), x()
    bound = hal.bind(q, k, v, is_causal=True)
    f = compiled(lambda q, k, v: bound(q, k, v) * 2)
    close(f(q, k, v), 2 * oracle.attention(q, k, v, is_causal=True)[0], 4e-5)
    with pytest.raises(Exception, match="_refuse"):  # torch.compile tells its own error in place of GuardError
        f(x(7), k, v)


def test_autocast_means_the_same_when_compiled():
    q, k, v = x(), x(), x()
    f = compiled(lambda q, k, v: hal.attention(q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = f(q, k, v)
        assert torch.equal(out, hal.attention(q, k, v)) and out.dtype is torch.bfloat16


def test_packed_sequences_are_refused_in_words():
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    f = compiled(lambda q: hal.attention_varlen(q, q, q, cu_seqlens_q=cu, max_seqlen_q=4, max_seqlen_k=4))
    with pytest.raises(Exception, match="cannot be traced; call it outside torch.compile"):
        f(torch.randn(6, 2, 8))
