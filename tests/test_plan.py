"""A plan keeps a run to what was decided, whatever has changed since."""

from __future__ import annotations

import json

import pytest
import torch

import hal
from hal import context
from hal.errors import PolicyError
from hal.plan import Plan, entry_of, read_plan

Q = torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(0))


def planned(*decisions, **changes) -> Plan:
    return Plan("0", hal.explain(Q, Q, Q).machine, entries=tuple(map(entry_of, decisions)), origin="p.json", **changes)


def test_a_run_that_is_in_the_plan_runs_and_another_choice_is_refused_before_it_runs():
    plan = planned(hal.explain(Q, Q, Q))
    with context.changed(plan=plan):
        hal.attention(Q, Q, Q)
        with (
            hal.scope(kernel="sdpa.math"),
            pytest.raises(PolicyError, match=r"p.json: call.self shall run .*sdpa.cpu.*sdpa.math"),
        ):
            hal.attention(Q, Q, Q)


@pytest.mark.parametrize(
    "arguments, said",
    [({"is_causal": True}, "causal is True, planned False"), ({"role": "cross"}, "call.cross is not in the plan")],
)
def test_a_call_that_is_not_in_the_plan_is_told_with_what_is_near(arguments, said):
    with context.changed(plan=planned(hal.explain(Q, Q, Q))), pytest.raises(PolicyError, match=said):
        hal.attention(Q, Q, Q, **arguments)


def test_a_plan_is_read_back_as_it_was_written(tmp_path):
    with hal.component("transformer"):
        plan = planned(hal.explain(Q, Q, Q, is_causal=True), policy={"words": {"attention_backend": "torch_sdpa"}})
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan.to_json()))
    again = read_plan(file)
    assert again.entries == plan.entries and again.policy == plan.policy
    assert {**again.to_json(), "machine": 0} == {**plan.to_json(), "machine": 0}  # whose origin is the file now
    with context.changed(plan=again), hal.component("transformer"):
        hal.attention(Q, Q, Q, is_causal=True)
