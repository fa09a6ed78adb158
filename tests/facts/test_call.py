"""A Call: read from values or text, checked, and told again; any key may be unknown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import CallError, FactError
from hal.facts import DTYPES, Call
from hal.facts.call import KEYS, KINDS

sizes, bools = st.integers(0, 10**6), st.booleans()
counts = st.integers(1, 512)
VALUES = {
    "dtype": st.sampled_from(sorted(DTYPES)),
    **dict.fromkeys(("head_dim", "v_head_dim", "heads", "kv_heads"), counts),
    **dict.fromkeys(("batch", "q_len", "kv_len", "step", "layer", "device"), sizes),
    **dict.fromkeys(("causal", "varlen", "lse", "grad", "mask_grad", "deterministic", "compile", "graph"), bools),
    **dict.fromkeys(("q_contiguous", "k_contiguous", "v_contiguous"), bools),
    "mask": st.sampled_from(("none", "key_padding", "bool", "additive")),
    "mask_shape": st.sampled_from(("none", "b11k", "b1qk", "bhqk", "11qk", "1hqk", "bh1k", "111k", "1h1k")),
    "dropout": st.floats(0, 1, exclude_max=True),
    "window": st.tuples(st.integers(-1, 9999), st.integers(-1, 9999)),
    "scale": st.one_of(st.just("default"), st.floats(0, 1e6, exclude_min=True)),
    "layout": st.sampled_from(("bshd", "bhsd", "thd")),
    "role": st.sampled_from(("self", "cross")),
    **dict.fromkeys(("ring", "ulysses", "kv_gather"), st.integers(1, 64)),
}


def test_every_key_is_drawn_here():
    assert set(VALUES) == set(KINDS)


@st.composite
def given_values(draw):
    """Some keys with values or unknown, without contradictions."""
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True))
    out = {k: draw(st.one_of(st.none(), VALUES[k])) if k != "device" else draw(VALUES[k]) for k in keys}
    if out.get("heads") and out.get("kv_heads"):
        out["heads"] = out["heads"] * out["kv_heads"]
    if "mask_shape" in out and out["mask_shape"] is not None and out.get("mask", "none") is not None:
        out["mask_shape"] = {"none": "none", "key_padding": "b11k"}.get(out.get("mask", "none"), "bhqk")
    return out


@given(given_values())
def test_a_call_is_read_from_the_text_that_it_tells(values):
    call = Call.of(values)
    assert Call.parse(str(call)) == call
    assert Call.of(call.to_json()) == call
    assert Call.of(json.loads(json.dumps(call.to_json()))) == call


@given(given_values())
def test_text_and_values_are_read_alike(values):
    def text(x):
        return "?" if x is None else ":".join(map(str, x)) if isinstance(x, tuple) else str(x)

    assert Call.parse(",".join(f"{k}={text(x)}" for k, x in values.items())) == Call.of(values)


SAME = [
    ("dtype=bf16", {"dtype": "bfloat16"}),
    ("dtype=torch.float16", {"dtype": "float16"}),
    ("dtype=HALF", {"dtype": "float16"}),
    ("dtype=fp8", {"dtype": "float8_e4m3fn"}),
    ("causal=yes,lse=on,grad=1", {"causal": True, "lse": True, "grad": True}),
    ("causal=False,lse=off,grad=0", {}),
    ("q_len=75_600", {"q_len": 75600}),
    ("Head-Dim=64", {"head_dim": 64}),
    ("q.contiguous=false", {"q_contiguous": False}),
    ("contiguous=false", {"q_contiguous": False, "k_contiguous": False, "v_contiguous": False}),
    ("window=5", {"window": (5, 5)}),
    ("window=4/0", {"window": (4, 0)}),
    ("window=none", {}),
    ("scale=none", {}),
    ("scale=0.125", {"scale": 0.125}),
    ("ring=true", {"ring": 2}),
    ("ulysses=4", {"ulysses": 4}),
    ("ring=false", {}),
    ("head_dim=?,dtype=unknown,causal=null", {"head_dim": None, "dtype": None, "causal": None}),
    ("", {}),
    (" head_dim = 8 , , heads=2 ", {"head_dim": 8, "heads": 2}),
]


@pytest.mark.parametrize("text, values", SAME, ids=[t for t, _ in SAME])
def test_people_write_it_in_many_ways(text, values):
    assert Call.parse(text) == Call.of(values)


def test_later_text_overrides_earlier_and_the_base():
    assert Call.parse(["head_dim=64,heads=2", "head_dim=128"], {"heads": 8, "dtype": "fp16"}) == Call.of(
        dtype="fp16", head_dim=128, heads=2
    )


@pytest.mark.parametrize("given, follows", [
    ({"head_dim": 64}, {"v_head_dim": 64}),
    ({"heads": 8}, {"kv_heads": 8}),
    ({"q_len": 9}, {"kv_len": 9}),
    ({"q_len": 9, "kv_len": None}, {"kv_len": None}),
    ({"heads": 8, "kv_heads": 2}, {"kv_heads": 2}),
    ({}, {"mask": "none", "mask_shape": "none", "v_head_dim": None, "causal": False, "scale": "default"}),
    ({"mask": "key_padding"}, {"mask_shape": "b11k"}),
    ({"mask": "bool"}, {"mask_shape": "b1qk"}),
    ({"mask": "bool", "mask_shape": "?"}, {"mask_shape": None}),
    ({"mask": None}, {"mask_shape": None}),
])  # fmt: skip
def test_what_is_not_said_is_the_same_as_usual(given, follows):
    call = Call.of(given)
    assert {k: getattr(call, k) for k in follows} == follows


BAD = [
    # key, value, what is allowed, as the error says it
    ("head_dim", "0", "a whole number from 1"),
    ("head_dim", "-8", "a whole number from 1"),
    ("head_dim", "64.0", "a whole number from 1"),
    ("head_dim", 64.0, "a whole number from 1"),
    ("heads", True, "a whole number from 1"),
    ("q_len", "-1", "a whole number from 0"),
    ("batch", "two", "a whole number from 0"),
    ("causal", "maybe", "true or false"),
    ("lse", "2", "true or false"),
    ("grad", "", "true or false"),
    ("mask", "padding", "one of none, key_padding, bool, additive"),
    ("mask_shape", "bqk", "one of none, b11k"),
    ("dropout", "1", "a probability from 0 to below 1"),
    ("dropout", "-0.1", "a probability"),
    ("dropout", "nan", "a probability"),
    ("dropout", True, "a probability"),
    ("window", "1:2:3", "left:right in tokens"),
    ("window", "-2", "left:right in tokens"),
    ("window", (1.5, 2), "left:right in tokens"),
    ("window", "wide", "left:right in tokens"),
    ("scale", "inf", "a positive number"),
    ("scale", "auto", "a positive number"),
    ("scale", True, "a positive number"),
    ("scale", "0", "a positive number"),
    ("scale", "-0.1", "a positive number"),
    ("layout", "sbhd", "one of bshd, bhsd, thd"),
    ("role", "both", "one of self, cross"),
    ("ring", "-1", "a degree"),
    ("ring", "many", "a degree"),
    ("v.contiguous", "rows", "true or false"),
]


@pytest.mark.parametrize("key, value, allowed", BAD, ids=[f"{k}={x}" for k, x, _ in BAD])
def test_a_bad_value_is_quoted_with_what_is_allowed(key, value, allowed):
    with pytest.raises(FactError) as e:
        Call.of({key: value})
    assert f"call key {key!r} is {value!r}; allowed: " in str(e.value)
    assert allowed in str(e.value) and "or ? for unknown" in str(e.value)


def test_a_bad_dtype_is_quoted_with_a_suggestion_and_the_known():
    with pytest.raises(
        FactError, match=r"'bfloat61' is no dtype; did you mean 'bfloat16'\? \(known: bfloat16, float16"
    ):
        Call.of(dtype="bfloat61")


def test_a_bad_key_is_quoted_with_a_suggestion_and_all_keys():
    with pytest.raises(FactError) as e:
        Call.parse("hed_dim=64")
    assert "unknown call key 'hed_dim'; did you mean 'head_dim'?" in str(e.value)
    assert all(k in str(e.value) for k in KEYS)


def test_text_that_is_no_pair_is_quoted():
    with pytest.raises(FactError, match="'causal' is no key=value; write, say, head_dim=128"):
        Call.parse("head_dim=64,causal")


@pytest.mark.parametrize("given, said", [
    ({"heads": 8, "kv_heads": 3}, "heads=8 is no multiple of kv_heads=3"),
    ({"heads": 2, "kv_heads": 4}, "heads=2 is no multiple of kv_heads=4"),
    ({"mask": "none", "mask_shape": "b11k"}, "mask=none contradicts mask_shape=b11k"),
    ({"mask_shape": "b11k"}, "mask=none contradicts mask_shape=b11k"),
    ({"mask": "bool", "mask_shape": "none"}, "mask=bool contradicts mask_shape=none"),
])  # fmt: skip
def test_contradictions_are_told(given, said):
    with pytest.raises(CallError, match=said):
        Call.of(given)


@pytest.mark.parametrize("given", [
    {"heads": None, "kv_heads": 4}, {"heads": 8, "kv_heads": None}, {"mask": "bool", "mask_shape": None}, {"mask": None, "mask_shape": "bhqk"}
])  # fmt: skip
def test_what_is_unknown_contradicts_nothing(given):
    call = Call.of(given)
    assert {k: getattr(call, k) for k in given} == given
