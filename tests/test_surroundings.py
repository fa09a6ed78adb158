"""What surrounds a call is part of its decision: autocast, gradients of the mask, PyTorch's flags, simulated machines."""

from __future__ import annotations

import threading

import pytest
import torch

import hal
from hal import context, oracle
from hal.errors import CallError, FactError, GuardError, SimulationError


def x(*shape: int, **options: object) -> torch.Tensor:
    return torch.randn(*(shape or (2, 16, 4, 32)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["sdpa.cpu", "sdpa.math"])
@pytest.mark.parametrize("lse", [False, True])
def test_under_autocast_attention_runs_in_the_autocast_dtype_as_pytorchs_own(kernel: str, lse: bool) -> None:
    q, k, v = x(), x(), x()
    policy = hal.Policy((hal.Request("torch_sdpa", kernel=kernel),))
    with context.changed(policy=policy), torch.autocast("cpu", torch.bfloat16):
        assert hal.explain(q, k, v).call.dtype == "bfloat16"
        out = hal.attention(q, k, v, return_lse=lse)
        own = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    out, stats = out if lse else (out, None)
    assert out.dtype == own.dtype == torch.bfloat16
    assert (out.double() - oracle.attention(q, k, v)[0]).abs().max() < 0.03
    assert stats is None or stats.dtype == torch.float32


def test_packed_calls_follow_autocast_too() -> None:
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    q = x(16, 4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert hal.attention_varlen(q, q, q, cu_seqlens_q=cu).dtype == torch.bfloat16


def test_a_mask_that_wants_a_gradient_gets_it_also_after_a_call_without() -> None:
    mask = torch.zeros(1, 1, 16, 16, requires_grad=True)
    q, k, v = x(), x(), x()
    with torch.no_grad():
        hal.attention(q, k, v, attn_mask=mask, return_lse=True)
    out, _ = hal.attention(q, k, v, attn_mask=mask, return_lse=True)
    out.sum().backward()
    assert mask.grad is not None


def test_flags_that_a_user_sets_are_part_of_the_decision() -> None:
    q = x()
    assert hal.explain(q, q, q).kernel == "sdpa.cpu"
    hal.attention(q, q, q)
    hal.clear_receipts()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        hal.attention(q, q, q)
    assert [r.kernel for r in hal.receipts()] == ["sdpa.math"]


def test_packed_lengths_are_checked_at_every_call_on_a_cpu() -> None:
    q = x(10, 2, 8)
    hal.attention_varlen(q, q, q, cu_seqlens_q=torch.tensor([0, 4, 10], dtype=torch.int32), max_seqlen_q=8)
    with pytest.raises(CallError, match="must rise from 0 to the 10 packed tokens"):
        hal.attention_varlen(q, q, q, cu_seqlens_q=torch.tensor([0, 4, 8], dtype=torch.int32), max_seqlen_q=8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.bfloat16(), "the dtype of k is torch.bfloat16"),
        (lambda t: t.to("meta"), "the device is cpu, meta and cpu"),
    ],
)
def test_a_bound_decision_guards_keys_as_well_as_queries(change, said) -> None:
    q, k, v = x(), x(), x()
    bound = hal.bind(q, k, v)
    with pytest.raises(GuardError, match=said):
        bound(q, change(k), v)


def test_receipts_outlive_the_cache() -> None:
    q = x()
    hal.clear_receipts()
    bound = hal.bind(q, q, q)
    bound(q, q, q)
    hal.attention(q, q, q)
    hal.forget()
    bound(q, q, q)
    hal.attention(q, q, q)
    assert sum(r.runs for r in hal.receipts()) == 4


@pytest.mark.parametrize(
    "typo",
    [{"packages": {"flash_atn_3": "3.0"}}, {"without": "flash_atn"}, {"tourch": "2.9"}],
)
def test_a_simulated_machine_is_spelt_right_or_refused(typo) -> None:
    with pytest.raises(FactError, match="did you mean"):
        with hal.simulate("h100", **typo):
            pass


def test_a_kernel_of_a_simulated_machine_says_that_it_cannot_run_here() -> None:
    q = x(dtype=torch.float16)
    with hal.simulate("h100"):
        with pytest.raises(SimulationError, match="explain inside hal.simulate, run outside"):
            hal.attention(q, q, q)


def test_contexts_that_nobody_uses_are_forgotten() -> None:
    before = len(context._interned)
    for _ in range(20):
        with hal.simulate("h100"):
            pass
    import gc

    gc.collect()
    assert len(context._interned) <= before + 1


def test_a_policy_in_one_thread_makes_no_other_trace_again() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with hal.simulate("a100"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    try:
        assert context.local.generation is context.local  # nothing was said here
    finally:
        leave.set()
        thread.join()


def test_cudnn_may_be_written_as_pytorch_prints_it() -> None:
    for text in ("9.19.0", "91900"):
        with hal.simulate("b200", cudnn=text) as machine:
            assert machine.software["cudnn"] == "9.19.0"
    with hal.simulate("v100", cudnn="8907") as machine:
        assert machine.software["cudnn"] == "8.9.7"


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(FactError, match="no PEP 440 version"):
        with hal.simulate("h100", packages={"flash_attn": "latest"}):
            pass


@pytest.mark.parametrize("kernel", ["sdpa.cpu", "sdpa.math"])
def test_mixed_dtypes_are_refused_after_a_call_of_one_dtype_as_before_it(kernel: str) -> None:
    q = x()
    with context.changed(policy=hal.Policy((hal.Request("torch_sdpa", kernel=kernel),))):
        hal.attention(q, q, q)
        with pytest.raises(CallError, match="cast them to one dtype"):
            hal.attention(q, q.bfloat16(), q)
        with pytest.raises(CallError, match="cast them to one dtype"):
            hal.attention(q, q, q.bfloat16())
