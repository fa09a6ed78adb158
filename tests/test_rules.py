"""Limits and rules are data with three answers: yes, no, and depends."""

from __future__ import annotations

import pytest

from hal.errors import DeclarationError
from hal.facts import ABSENT
from hal.rules import (
    Between,
    Mod,
    Not,
    OneOf,
    Pairs,
    Reason,
    Rule,
    Same,
    Versions,
    check,
    compiled,
    limit_of,
    plain,
    show,
)

INF = float("inf")

# limit, facts of x (and others), answer
LIMITS = [
    (64, {"x": 64}, True),
    (64, {"x": 65}, False),
    ("bhsd", {"x": "bhsd"}, True),
    ("bhsd", {"x": "bshd"}, False),
    (True, {"x": True}, True),
    (False, {"x": True}, False),
    ({64, 128}, {"x": 128}, True),
    ({64, 128}, {"x": 96}, False),
    (frozenset({"a"}), {"x": "a"}, True),
    (range(8, 257, 8), {"x": 256}, True),
    (range(8, 257, 8), {"x": 257}, False),
    (range(8, 257, 8), {"x": 12}, False),
    (Mod(8), {"x": 72}, True),
    (Mod(8), {"x": 73}, False),
    (Mod(128, 64), {"x": 192}, True),
    (Mod(128, 64), {"x": 128}, False),
    (Between(128), {"x": 128}, True),
    (Between(128), {"x": 127}, False),
    (Between(high=4), {"x": 4}, True),
    (Between(high=4), {"x": 5}, False),
    (Between(2, 4), {"x": 3}, True),
    (Between(2, 4), {"x": 1}, False),
    (Same("y"), {"x": 3, "y": 3}, True),
    (Same("y"), {"x": 3, "y": 4}, False),
    (Same("y"), {"x": 3, "y": None}, None),
    (Same("y"), {"x": 3}, None),
    (Same("y"), {"x": None, "y": 3}, None),
    (Pairs("y", {(192, 128)}), {"x": 128, "y": 192}, True),
    (Pairs("y", {(192, 128)}), {"x": 128, "y": 128}, False),
    (Pairs("y", {(192, 128)}), {"x": 64, "y": None}, False),
    (Pairs("y", {(192, 128)}), {"x": 128, "y": None}, None),
    (Pairs("y", {(192, 128)}), {"x": None, "y": 192}, None),
    (Versions(">=2.6,<3"), {"x": "2.8.3+cu13"}, True),
    (Versions(">=2.6,<3"), {"x": "3.0"}, False),
    (Versions(">=2.6,<3"), {"x": "nightly"}, None),
    (Versions(""), {"x": "anything"}, True),
    (OneOf({1, 2}, Between(10)), {"x": 2}, True),
    (OneOf({1, 2}, Between(10)), {"x": 11}, True),
    (OneOf({1, 2}, Between(10)), {"x": 5}, False),
    (OneOf({1}, Same("y")), {"x": 1, "y": None}, True),
    (OneOf({1}, Same("y")), {"x": 2, "y": None}, None),
    (Not({1, 2}), {"x": 3}, True),
    (Not({1, 2}), {"x": 2}, False),
    (Not(Same("y")), {"x": 2, "y": None}, None),
    (Not("a"), {"x": "b"}, True),
]


@pytest.mark.parametrize("limit, facts, answer", LIMITS, ids=[f"{show(s)} | {f}" for s, f, _ in LIMITS])
def test_a_limit_says_yes_no_or_depends(limit, facts, answer):
    out = []
    check(compiled({"x": limit}), facts, out)
    assert [r.verdict for r in out] == ([] if answer is True else [answer])
    for r in out:
        assert (r.id, r.fact, r.observed) == ("x", "x", facts.get("x")) and r.allowed is limit


EVERY = [
    64,
    "bhsd",
    {1},
    range(3),
    Mod(8),
    Between(1),
    Same("y"),
    Pairs("y", {(1, 2)}),
    Versions(">=1"),
    OneOf(1, 2),
    Not(3),
]


@pytest.mark.parametrize("limit", EVERY, ids=lambda s: type(s).__name__)
def test_an_unknown_fact_leaves_any_limit_open_and_an_absent_one_breaks_it(limit):
    for x, verdict in ((None, None), (ABSENT, False)):
        out = []
        check(compiled({"x": limit}), {"x": x, "y": 1}, out)
        assert [r.verdict for r in out] == [verdict]


@pytest.mark.parametrize("limit", EVERY, ids=lambda s: type(s).__name__)
def test_every_limit_can_be_shown_to_people_and_written_as_json(limit):
    assert "object at 0x" not in show(limit)
    assert isinstance(plain(limit), (str, int, list))


@pytest.mark.parametrize("x, said", [
    ({64, 128, 8}, "8, 64, 128"), (range(8, 257, 8), "8..256 by 8"), (range(2, 5), "2..4"), (True, "true"), (None, "unknown"),
    (ABSENT, "absent"), (Between(128), "128 or more"), (Between(high=9), "9 or less"), (Between(1, 9), "1 to 9"),
    (Mod(8), "a multiple of 8"), (Mod(128, 64), "n % 128 = 64"), (Not({1}), "anything but 1"), (Same("y"), "the same as y"),
    (OneOf({1}, Mod(2)), "1 or a multiple of 2"), (Pairs("d", {(192, 128)}), "128 with d=192"), (Versions(""), "any version"),
])  # fmt: skip
def test_people_read_a_limit_as_a_sentence(x, said):
    assert show(x) == said


# ---- as TOML writes it

TOML = [
    ("head_dim", [64, 128], {64: True, 96: False}),
    ("head_dim", 64, {64: True, 65: False}),
    ("causal", True, {True: True, False: False}),
    ("q_len", "% 128 = 64", {192: True, 128: False}),
    ("q_len", "%128=0", {256: True, 100: False}),
    ("q_len", ">=8,<64", {7: False, 8: True, 63: True, 64: False}),
    ("q_len", "> 8, <= 64", {8: False, 9: True, 64: True, 65: False}),
    ("scores", ">4294967296", {4294967296: False, 4294967297: True}),
    ("torch", ">=2.11,<2.14", {"2.9.1": False, "2.11.0+cu130": True, "2.14.0": False}),
    ("cudnn", "==9.19.*", {"9.19.0": True, "9.20": False}),
    ("pkg.flash_attn", "!=2.7.2", {"2.7.2": False, "2.8": True}),
    ("dtype", "not float32", {"float16": True, "float32": False}),
    ("q_len", "not % 8 = 0", {8: False, 9: True}),
    ("head_dim", "not >=64", {63: True, 64: False}),
    ("env.X", "1", {"1": True, "0": False}),
    ("arch", ["sm90"], {"sm90": True, "sm100": False}),
]


@pytest.mark.parametrize("fact, value, answers", TOML, ids=[f"{f} {v}" for f, v, _ in TOML])
def test_a_limit_is_read_from_toml(fact, value, answers):
    (test,) = compiled({fact: limit_of(fact, value)})
    assert {x: test.meets(x, {}) for x in answers} == answers


def test_the_same_as_another_fact_is_read_from_toml():
    (test,) = compiled({"kv_heads": limit_of("kv_heads", "same as heads")})
    assert test.meets(4, {"heads": 4}) is True and test.meets(4, {"heads": 8}) is False


@pytest.mark.parametrize("fact, value, said", [
    ("arch", ">=sm80", "arch '>=sm80': an architecture is one of a set, never an order"),
    ("arch", "not >=sm80", "an architecture is one of a set"),
    ("arch", "!=sm80", "an architecture is one of a set"),
    ("head_dim", ">=x", "head_dim = '>=x' is no bound; write, say, >=8,<64"),
    ("q_len", "==8", "is no bound"),
])  # fmt: skip
def test_a_limit_that_cannot_be_meant_is_refused(fact, value, said):
    with pytest.raises(DeclarationError, match=said):
        limit_of(fact, value)


# ---- rules


def reasons(rule, **facts):
    out = []
    rule.check(facts, out)
    return out


NEVER = Rule("never", {"a": 1, "b": 2}, note="n", fix="f", citation="c", waiver="w")
MUST = Rule("must", {"a": 1}, {"b": {2, 3}, "c": Between(5)})
ALWAYS = Rule("always", require={"b": 2})
CASES = [
    # rule, facts, verdicts
    (NEVER, {"a": 1, "b": 2}, [False]),
    (NEVER, {"a": 1, "b": 3}, []),
    (NEVER, {"a": 0, "b": None}, []),
    (NEVER, {"a": None, "b": 3}, []),
    (NEVER, {"a": 1, "b": None}, [None]),
    (NEVER, {"a": None, "b": None}, [None]),
    (NEVER, {"a": 1, "b": ABSENT}, []),
    (MUST, {"a": 1, "b": 2, "c": 9}, []),
    (MUST, {"a": 1, "b": 4, "c": 9}, [False]),
    (MUST, {"a": 1, "b": 4, "c": 1}, [False, False]),
    (MUST, {"a": 1, "b": None, "c": 1}, [None, False]),
    (MUST, {"a": 1, "b": ABSENT, "c": 9}, [False]),
    (MUST, {"a": 2, "b": 4, "c": 1}, []),
    (MUST, {"a": None, "b": 4, "c": 1}, [None, None]),
    (MUST, {"a": None, "b": 2, "c": 9}, []),
    (ALWAYS, {"b": 2}, []),
    (ALWAYS, {"b": 3}, [False]),
    (ALWAYS, {"b": None}, [None]),
]


@pytest.mark.parametrize("rule, facts, verdicts", CASES, ids=[f"{r.id} {f}" for r, f, _ in CASES])
def test_where_all_of_when_holds_all_of_require_must(rule, facts, verdicts):
    out = reasons(rule, **facts)
    assert [r.verdict for r in out] == verdicts
    assert all(r.id == rule.id for r in out)


def test_a_reason_carries_what_the_rule_says():
    (r,) = reasons(NEVER, a=1, b=2)
    assert (r.message, r.fix, r.citation, r.waiver, r.soft, r.observed) == ("n", "f", "c", "w", False, "a=1, b=2")
    assert r.to_json() == {
        "id": "never", "observed": "a=1, b=2", "allowed": "any other combination", "message": "n", "fix": "f", "citation": "c",
        "waiver": "w", "depends": False,
    }  # fmt: skip


def test_without_a_note_the_reason_makes_its_sentence():
    assert [r.message for r in reasons(MUST, a=1, b=4, c=1)] == ["b is 4; allowed: 2, 3", "c is 1; allowed: 5 or more"]
    assert [r.message for r in reasons(ALWAYS, b=None)] == ["depends on b (allowed: 2)"]
    assert [r.message for r in reasons(NEVER, a=1, b=None)] == ["depends on a, b (n)"]


@pytest.mark.parametrize("effect, soft", [("reject", False), ("warn", False), ("budget", True)])
def test_only_a_budget_is_soft(effect, soft):
    assert [r.soft for r in reasons(Rule("r", {"a": 1}, effect=effect), a=1)] == [soft]


@pytest.mark.parametrize("make, said", [
    (lambda: Rule("r", {"a": 1}, effect="panic"), "rule r: effect is 'panic'; allowed: reject, warn, budget"),
    (lambda: Rule("r"), "rule r: says neither when it applies nor what it requires"),
])  # fmt: skip
def test_a_rule_that_says_nothing_is_refused(make, said):
    with pytest.raises(DeclarationError, match=said):
        make()


def test_reasons_accumulate_all_of_them_always():
    out = []
    check(compiled({"a": 1, "b": {2}, "c": Mod(8)}), {"a": 0, "b": None, "c": 9}, out)
    MUST.check({"a": 1, "b": 9, "c": 0}, out)
    assert [(r.id, r.verdict) for r in out] == [
        ("a", False),
        ("b", None),
        ("c", False),
        ("must", False),
        ("must", False),
    ]


@pytest.mark.parametrize(
    "x", [{2, 1}, frozenset({"b", "a"}), range(3), (1, -1), None, True, 1.5, "t", ABSENT, Versions(">=1")], ids=str
)
def test_any_observed_or_allowed_value_becomes_json(x):
    import json

    assert json.loads(json.dumps(Reason("i", "f", x, x).to_json()))["id"] == "i"
