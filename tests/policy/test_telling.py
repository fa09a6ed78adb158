"""Who is told: a line in the log for each distinct decision, a callback per decision and per run."""

from __future__ import annotations

import json
import logging
import threading

import pytest
import torch

import hal
from hal import context


def qkv(n=4, dim=8):
    return [torch.ones(1, n, 1, dim) for _ in range(3)]


@pytest.fixture
def lines(caplog):
    """The records of hal's logger for one component."""
    caplog.set_level(logging.DEBUG, "hal")
    return lambda component: [r for r in caplog.records if r.name == "hal" and r.hal["component"] == component]


def test_a_thousand_equal_calls_log_one_line(lines):
    x = qkv()
    with hal.component("thousand"):
        for _ in range(1000):
            hal.attention(*x)
    assert len(lines("thousand")) == 1
    assert [r.runs for r in hal.receipts()] == [1000]


def test_equal_calls_in_scopes_of_their_own_log_one_line_too(lines):
    for _ in range(20):
        with hal.component("scoped", "torch_sdpa"):
            hal.attention(*qkv())
    hal.forget()
    with hal.component("scoped", "torch_sdpa"):
        hal.attention(*qkv())
    assert len(lines("scoped")) == 1


def test_a_decision_of_another_kind_logs_another_line(lines, zeros):
    with hal.component("kinds"):
        hal.attention(*qkv())
        hal.attention(*qkv(), role="cross")
        hal.attention(*qkv(7))  # another size, the same decision
        with hal.force(zeros):
            hal.attention(*qkv())
    assert [(r.hal["role"], r.hal["backend"]) for r in lines("kinds")] == [
        ("self", "torch_sdpa"), ("cross", "torch_sdpa"), ("self", zeros),
    ]  # fmt: skip


def test_a_line_is_text_for_people_and_data_for_programs(lines, zeros):
    with hal.component("vae_told"), hal.force(zeros):
        hal.attention(*qkv())
    (record,) = lines("vae_told")
    assert record.getMessage().startswith("vae_told.self: zeros by zeros on cpu (hal.force('zeros')")
    assert record.levelno == logging.WARNING  # its portable form runs
    told = json.loads(json.dumps(record.hal))
    assert (told["backend"], told["kernel"], told["source"], told["role"]) == (
        zeros,
        zeros,
        "hal.force('zeros')",
        "self",
    )
    assert told["warnings"][0].startswith("tier.portable") and "head_dim=8" in told["call"]


def test_what_was_passed_over_is_in_the_line(lines):
    with hal.component("text_encoder_told"), hal.scope(attention_backend="fa"):
        hal.explain(*qkv())
        assert not lines("text_encoder_told")  # asking is no running
        hal.attention(*qkv())
        with hal.component("transformer", "sdpa"), hal.force("sdpa"):
            hal.attention(*qkv())
    (record,) = lines("text_encoder_told")
    assert "fa (attention_backend='fa') is passed" in record.getMessage() and record.hal["notes"]


def test_nothing_is_printed_by_itself(python):
    code = "import torch, hal; x = torch.ones(1, 2, 1, 8); hal.attention(x, x, x)"
    ran = python(code)
    assert (ran.code, ran.out, ran.err) == (0, "", "")


# ---- hooks


def test_hooks_see_each_decision_once_and_every_run(zeros):
    decisions, ran = [], []
    x = qkv()
    hal.attention(*x)
    with hal.hooks(decision=decisions.append, run=ran.append):
        for _ in range(3):
            hal.attention(*x)
        with hal.force(zeros):
            hal.attention(*x)
        hal.explain(*x)
    hal.attention(*x)
    assert [d.backend for d in ran] == ["torch_sdpa"] * 3 + [zeros]
    assert [d.backend for d in decisions] == ["torch_sdpa", zeros, "torch_sdpa"]  # the last was asked for
    assert ran[0] is decisions[0]


def test_hooks_nest_and_end_with_their_block():
    one, two = [], []
    x = qkv()
    with hal.hooks(run=one.append):
        with pytest.raises(ZeroDivisionError), hal.hooks(run=two.append):
            hal.attention(*x)
            raise ZeroDivisionError
        hal.attention(*x)
    hal.attention(*x)
    assert (len(one), len(two)) == (2, 1)


def test_the_same_callback_twice_is_called_twice_and_ends_twice():
    seen = []
    with hal.hooks(run=seen.append):
        with hal.hooks(run=seen.append):
            hal.attention(*qkv())
        hal.attention(*qkv())
    hal.attention(*qkv())
    assert len(seen) == 3


def test_hooks_see_other_threads_and_attached_models():
    from attached import Plain

    model = torch.nn.Sequential(Plain())
    q = torch.randn(1, 2, 5, 8)
    seen = []
    with (
        hal.attach(model, component="vae"),
        hal.hooks(run=lambda d: seen.append((threading.get_ident(), d.policy.site.component))),
    ):
        model(q)
        thread = threading.Thread(target=model, args=(q,))
        thread.start()
        thread.join()
        model(q)
    assert [c for _, c in seen] == ["vae"] * 3 and len({t for t, _ in seen}) == 2


@pytest.mark.parametrize("which", ["decision", "run"])
def test_an_error_of_a_callback_is_the_callers_and_leaves_nothing(which):
    def fail(d):
        raise LookupError("mine")

    x = qkv()
    with pytest.raises(LookupError, match="mine"), hal.hooks(**{which: fail}), hal.component("hooked"):
        hal.attention(*x)
    assert hal.attention(*x).any() and context.current.get() is context.NOTHING
