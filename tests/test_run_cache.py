"""One decision per key, counted receipts, and bound decisions that guard what they were decided on."""

from __future__ import annotations

import threading

import pytest
import torch

import hal
from hal import context, run
from hal.backend import Backend, Kernel
from hal.catalog import Catalog
from hal.errors import CallError, GuardError, NoKernelError
from hal.facts import Call, Device, Machine
from hal.platform import Platform
from hal.policy import AUTOMATIC, Policy, Request, Site
from hal.resolver import resolve
from hal.rows import Prefer, Row


@pytest.fixture(autouse=True)
def fresh():
    run.forget()
    hal.clear_receipts()
    yield
    run.forget()


@pytest.fixture
def decided(monkeypatch):
    """Every call that was decided, in order."""
    seen = []
    real = run.decide
    monkeypatch.setattr(run, "decide", lambda call, *rest: (seen.append(call), real(call, *rest))[1])
    return seen


def x(*shape, **more):
    return torch.randn(*(shape or (1, 4, 2, 8)), **more)


def policy(*requests, **more):
    return context.changed(policy=Policy(requests, **more))


def test_a_thousand_equal_calls_decide_once(decided):
    for _ in range(1000):
        hal.attention(x(), x(), x())
    assert len(decided) == 1
    (receipt,) = hal.receipts()
    assert (receipt.backend, receipt.kernel, receipt.runs, receipt.source) == (
        "torch_sdpa",
        "sdpa.cpu",
        1000,
        "automatic",
    )


APART = [
    {"q": (1, 3, 2, 8)}, {"k": (1, 5, 2, 8)}, {"v_dim": 16}, {"dtype": torch.float16}, {"is_causal": True}, {"scale": 0.3},
    {"dropout_p": 0.1}, {"window": 2}, {"layout": "bhsd"}, {"return_lse": True}, {"role": "cross"}, {"backend": "torch_sdpa"},
    {"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, {"attn_mask": torch.zeros(4, 4)}, {"attn_mask": torch.zeros(1, 1, 4, 4)},
    {"attn_mask": torch.zeros(4, 4, requires_grad=True)}, {"strided": True}, {"grad": True}, {"deterministic": True}, {"flash": False},
    {"site": Site("vae")}, {"policy": Policy((Request("torch_sdpa", kernel="sdpa.math"),))}, {"policy": Policy(waive=frozenset({"memory.math"}))},
    {"machine": Machine("cpu", (Device("x86-64-v2"),), {"torch": "2.13.0"})},
]  # fmt: skip


@pytest.mark.parametrize("change", APART, ids=lambda c: next(iter(c)))
def test_whatever_a_decision_depends_on_makes_another(decided, change):
    def call(
        q=(1, 4, 2, 8),
        k=(1, 4, 2, 8),
        v_dim=8,
        dtype=torch.float32,
        strided=False,
        grad=False,
        deterministic=False,
        flash=True,
        **rest,
    ):
        outer = {n: rest.pop(n) for n in ("site", "policy", "machine") if n in rest}
        q, k, v = x(*q).to(dtype), x(*k).to(dtype), x(*k[:3], v_dim).to(dtype)
        if strided:
            q = torch.cat([q, q], -1)[..., ::2]
        torch.set_deterministic_debug_mode(1 if deterministic else 0)
        torch.backends.cuda.enable_flash_sdp(flash)
        try:
            with context.changed(**outer):
                hal.attention(q.requires_grad_(grad), k, v, **rest)
        finally:
            torch.set_deterministic_debug_mode(0)
            torch.backends.cuda.enable_flash_sdp(True)

    call()
    call(**change)
    assert len(decided) == 2
    call(**change)
    call()
    assert len(decided) == 2


def test_without_gradients_a_tensor_that_could_need_them_is_as_any_other(decided):
    with torch.no_grad():
        hal.attention(x(), x(), x())
        hal.attention(x(requires_grad=True), x(), x())
    assert len(decided) == 1


def test_the_cache_is_bounded_and_receipts_outlive_it(monkeypatch):
    monkeypatch.setattr(run, "LIMIT", 10)
    for n in range(1, 36):
        hal.attention(x(1, n, 1, 8), x(1, n, 1, 8), x(1, n, 1, 8))
        assert len(run._entries) <= 10
    assert [r.runs for r in hal.receipts()] == [35]


def test_receipts_tell_component_role_fittings_and_source_and_are_cleared():
    with hal.component("transformer"):
        hal.attention(x(), x(), x(), role="cross", backend="sdpa")
        hal.attention(x(1, 4, 2, 16)[..., ::2], x(), x())
    hal.attention(x(), x(), x(), dropout_p=0.1)
    told = {(r.component, r.role, r.kernel, r.fittings, r.source) for r in hal.receipts()}
    assert told == {
        ("transformer", "cross", "sdpa.cpu", (), "backend='sdpa' of the call"),
        ("transformer", "self", "sdpa.cpu", ("contiguous",), "automatic"),
        ("", "self", "sdpa.math", (), "automatic"),
    }
    assert all(r.to_json()["runs"] == 1 and r.platform == "cpu" for r in hal.receipts())
    hal.clear_receipts()
    assert hal.receipts() == []
    hal.attention(x(), x(), x(), dropout_p=0.1)
    assert [r.runs for r in hal.receipts()] == [1]


def test_a_refused_call_leaves_no_receipt():
    with policy(Request("torch_sdpa", kernel="sdpa.cpu", source="--kernel")):
        with pytest.raises(NoKernelError, match="asked for by --kernel") as refusal:
            hal.attention(x(), x(), x(), dropout_p=0.5)
    assert [c.kernel.name for c in refusal.value.decision.candidates if c.kernel][0] == "sdpa.cpu"
    assert hal.receipts() == []


def test_explain_runs_nothing():
    assert hal.explain(x(), x(), x()).kernel == "sdpa.cpu"
    assert hal.receipts() == []


def test_contexts_nest_and_are_undone():
    with hal.component("a"), policy(Request("torch_sdpa")):
        with hal.component("b"):
            inner = context.current.get()
            assert (inner.site.component, inner.policy.requests[0].backend) == ("b", "torch_sdpa")
        assert context.current.get().site.component == "a"
    assert context.current.get() is context.NOTHING and context.current.get().policy is AUTOMATIC


def test_each_thread_has_its_own_context_and_all_are_counted():
    names, failures = [f"c{n}" for n in range(8)], []

    def work(name):
        try:
            with hal.component(name):
                for n in range(50):
                    hal.attention(x(1, 1 + n % 5, 1, 8), x(1, 1 + n % 5, 1, 8), x(1, 1 + n % 5, 1, 8))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in names]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert {r.component: r.runs for r in hal.receipts()} == dict.fromkeys(names, 50)


@pytest.mark.parametrize("cu", [[0, 4, 5], [1, 4, 6], [0, 5, 4, 6], [0, 1, 6]])
def test_packed_lengths_are_checked_at_every_call_on_a_cpu(cu):
    q = x(6, 2, 8)
    hal.attention_varlen(
        q, q, q, cu_seqlens_q=torch.tensor([0, 2, 6], dtype=torch.int32), max_seqlen_q=4, max_seqlen_k=4
    )
    with pytest.raises(CallError, match="cu_seqlens_q must rise|the longest sequence has 5 tokens"):
        hal.attention_varlen(q, q, q, cu_seqlens_q=torch.tensor(cu, dtype=torch.int32), max_seqlen_q=4, max_seqlen_k=4)


# ---- what only a real call needs


class Chip(Platform):
    """An accelerator that may be capturing a graph."""

    name = device_type = "chip"
    order = (Prefer("b"),)
    support = {"b": (Row("k"),)}
    busy = False

    def capturing(self):
        return self.busy


def on_chip(call=None, **kernel):
    k = Kernel("k", lambda call: lambda q, k, v, mask, varlen: q, **kernel)
    chip = Chip()
    catalog = Catalog({"chip": chip}, {"b": Backend("b", kernels=(k,))})
    call = call or Call.of(dtype="fp32", head_dim=8, heads=2, batch=1, q_len=4)
    return chip, resolve(call, Machine("chip", (Device("c"),)), catalog, Policy((Request("b"),)))


def test_a_kernel_that_no_graph_may_hold_is_stopped_while_one_is_captured():
    chip, decision = on_chip()
    q = x()
    ran = run.runnable(decision, q, q, None)
    assert ran(q, q, q, None, None) is q
    chip.busy = True
    with pytest.raises(GuardError, match="k .no fittings. cannot be captured into a graph"):
        ran(q, q, q, None, None)
    chip, decision = on_chip(honours={"graph"})
    chip.busy = True
    assert run.runnable(decision, q, q, None)(q, q, q, None, None) is q


def test_what_depends_on_an_unknown_fact_is_not_run():
    _, decision = on_chip(Call.of(dtype="fp32", head_dim=8, heads=2, batch=1), limits={"q_len": {128}})
    assert decision.kernel == "k" and decision.warnings
    with pytest.raises(NoKernelError, match="whether k may run this call depends on q_len"):
        run.runnable(decision, x(), x(), None)


# ---- bound decisions


def test_a_bound_decision_gives_what_attention_gives_and_is_counted(decided):
    q, k, v, mask = x(), x(), x(), torch.ones(4, 4).tril().bool()
    bound = hal.bind(q, k, v, attn_mask=mask, scale=0.3)
    assert bound.decision.kernel == "sdpa.cpu" and len(decided) == 1
    assert torch.equal(bound(q, k, v, mask), hal.attention(q, k, v, attn_mask=mask, scale=0.3))
    bound(k, q, v, mask)
    assert sum(r.runs for r in hal.receipts()) == 3


@pytest.mark.parametrize("change, said", [
    ({"q": x(1, 5, 2, 8)}, r"the shape of q is torch.Size\(\[1, 5, 2, 8\]\), bound for torch.Size\(\[1, 4, 2, 8\]\)"),
    ({"k": x(1, 5, 2, 8), "v": x(1, 5, 2, 8)}, "the shape of k is .*; the shape of v is"),
    ({"q": x().half(), "k": x().half(), "v": x().half()}, "the dtype of q is torch.float16, bound for torch.float32"),
    ({"q": x().to("meta")}, "the device is meta, cpu and cpu, bound for cpu"),
    ({"q": x(requires_grad=True)}, "the need of gradients is True, bound for False"),
    ({"v": x(requires_grad=True)}, "the need of gradients is True, bound for False"),
    ({"k": x().half()}, "the dtype of k is torch.float16, bound for torch.float32"),
    ({"attn_mask": None}, "the mask is None"),
    ({"attn_mask": torch.zeros(4, 4)}, "the mask is"),
    ({"attn_mask": torch.ones(1, 4).bool()}, "the mask is"),
])  # fmt: skip
def test_a_bound_decision_guards_what_it_was_decided_on(change, said):
    given = {"q": x(), "k": x(), "v": x(), "attn_mask": torch.ones(4, 4).bool()}
    bound = hal.bind(**given)
    with pytest.raises(GuardError, match=said + r".*bind again for these tensors, or call hal.attention"):
        bound(**{**given, **change})
    assert hal.receipts() == []


def test_a_bound_decision_does_not_follow_autocast():
    bound = hal.bind(x(), x(), x())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(GuardError, match="call it outside torch.autocast"):
        bound(x(), x(), x())


def test_rows_may_lie_anywhere_as_long_as_they_are_contiguous():
    q = x()
    bound = hal.bind(q, q, q)
    assert torch.equal(bound(*[q.transpose(1, 2).contiguous().transpose(1, 2)] * 3), bound(q, q, q))


def test_what_was_bound_without_gradients_is_not_run_with_them():
    q = x(requires_grad=True)
    with torch.no_grad():
        bound = hal.bind(q, q, q, return_lse=True)
        assert bound.decision.kernel == "sdpa.cpu"  # its LSE has no gradient
        bound(q, q, q)
    with pytest.raises(GuardError, match="need of gradients"):
        bound(q, q, q)
