"""resolve: the platform's order filtered by capability, requests before it, every reason told.  On hand-made catalogs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal import plugins, schemas
from hal.backend import Backend, Kernel, Needs
from hal.catalog import Catalog, read_known_bad
from hal.errors import DeclarationError, HalError, NoKernelError, PlatformError, PolicyError
from hal.facts import Call, Device, Machine
from hal.facts.flat import FEATURES
from hal.platform import Platform
from hal.policy import Policy, Request, Target
from hal.resolver import resolve
from hal.rows import Prefer, Row
from hal.rules import Between, Rule

HALF = {"float16", "bfloat16"}
SOFT = Rule(
    "memory",
    require={"math_bytes": Between(high=10_000)},
    effect="budget",
    waiver="memory",
    fix="waive memory",
    note="too much",
)


def kernel(name, **more):
    return Kernel(name, lambda call: lambda q, k, v, mask, varlen: name, **{"honours": FEATURES, **more})


FAST = Backend("fast", kernels=(kernel("fast.k", limits={"dtype": HALF, "head_dim": {64, 96, 128}}, honours=frozenset({"causal", "grad"})),),
               aliases=("fa9",), fallback="plain")  # fmt: skip
PLAIN = Backend(
    "plain", kernels=(kernel("plain.k", limits={"v_head_dim": {64}}),), portable=kernel("plain.math", rules=(SOFT,))
)
ROUGH = Backend("rough", kernels=(kernel("rough.k"),), quality="lossy")
NEAR = Backend("near", kernels=(kernel("near.k"),), quality="near")
PACKED = Backend(
    "packed", kernels=(kernel("packed.k", needs=(Needs("pkg-a", "pkg_a", "f", ">=2", "pip install pkg-a"),)),)
)
CROSSLESS = Backend("selfish", kernels=(kernel("selfish.k"),), roles=frozenset({"self"}))
BACKENDS = (FAST, PLAIN, ROUGH, NEAR, PACKED, CROSSLESS)
SUPPORT = {
    "fast": (Row("fast.k", {"a1", "a2"}),), "plain": (Row("plain.k"),), "rough": (Row("rough.k"),), "near": (Row("near.k"),),
    "packed": (Row("packed.k"),), "selfish": (Row("selfish.k"),),
}  # fmt: skip
ORDER = (Prefer("rough"), Prefer("near"), Prefer("fast", {"causal": False}), Prefer("plain"))


def catalog(support=None, order=ORDER, backends=BACKENDS, folder="/nowhere"):
    made = type(
        "Made",
        (Platform,),
        {"name": "made", "device_type": "made", "support": support or SUPPORT, "order": order, "folder": Path(folder)},
    )
    return Catalog({"made": made()}, {b.name: b for b in backends})


CATALOG = catalog()
MACHINE = Machine("made", (Device("a1"), Device("a3", 1)), {"torch": "2.13"})
KNOWN = {"dtype": "fp16", "head_dim": 64, "heads": 4, "batch": 1, "q_len": 8}


def decided(*requests, on=MACHINE, of=CATALOG, waive=(), fit=(), **changes):
    return resolve(Call.of({**KNOWN, **changes}), on, of, Policy(requests, frozenset(waive), frozenset(fit)))


def ids(d, name):
    return [r.id for c in d.candidates if str(c) == name for r in c.reasons]


# ---- automatic


@pytest.mark.parametrize("call, chosen", [
    ({}, "fast.k"),
    ({"causal": True}, "plain.k"),  # misses `when`: not refused, merely not first
    ({"dtype": "fp32"}, "plain.k"),
    ({"head_dim": 96}, "fast.k"),
    ({"head_dim": 80}, "plain.math"),
    ({"device": 1}, "plain.k"),
    ({"lse": True}, "plain.k"),
    ({"mask": "bool"}, "plain.k"),
])  # fmt: skip
def test_the_first_of_the_order_that_fits_is_taken(call, chosen):
    d = decided(**call)
    assert (d.kernel, d.source) == (chosen, "automatic")


def test_a_call_that_misses_when_is_refused_nothing():
    d = decided(causal=True)
    assert ids(d, "fast/fast.k") == []
    assert decided(Request("fast"), causal=True).kernel == "fast.k"


def test_near_and_lossy_backends_are_never_taken_automatically_and_are_on_request():
    everything = [decided(**c) for c in ({}, {"head_dim": 80, "q_len": 999}, {"dtype": "fp32"})]
    assert not {"rough", "near"} & {d.backend for d in everything}
    assert decided(Request("rough")).kernel == "rough.k"


def test_a_backend_outside_the_order_is_never_taken_automatically():
    only = catalog(order=(Prefer("plain"),))
    assert decided(of=only).kernel == "plain.k"
    assert "fast" in {c.backend.name for c in decided(of=only).candidates}


def test_the_portable_form_comes_last_on_every_platform_without_a_row():
    lines = CATALOG.lines("made", "plain")
    assert [(line.kernel.name, line.row.tier) for line in lines] == [("plain.k", "native"), ("plain.math", "portable")]
    bare = catalog(support={"fast": SUPPORT["fast"]})
    assert [line.kernel.name for line in bare.lines("made", "plain")] == ["plain.math"]
    assert decided(head_dim=80).warnings, "its form for any device is worth a word"


def test_a_platform_may_place_the_portable_form_itself():
    placed = catalog(support={**SUPPORT, "plain": (Row("plain.math"), Row("plain.k"))})
    assert [line.kernel.name for line in placed.lines("made", "plain")] == ["plain.math", "plain.k"]


def test_a_budget_is_passed_with_a_warning_when_nothing_else_fits_and_refused_on_request():
    small, large = {"head_dim": 80}, {"head_dim": 80, "q_len": 99}
    assert decided(**small).kernel == "plain.math" and not any("memory" in w for w in decided(**small).warnings)
    d = decided(**large)
    assert d.kernel == "plain.math" and d.error is None
    assert [w for w in d.warnings if w == "memory: too much; waive memory"]
    assert next(c for c in d.to_json()["candidates"] if c["kernel"] == "plain.math")["accepted"]
    asked = decided(Request("plain", source="--backend plain"), **large)
    assert asked.kernel is None and "memory: too much" in asked.error
    assert "waiving memory (--waive memory) would allow plain/plain.math" in asked.advice
    assert decided(Request("plain"), waive=["memory"], **large).kernel == "plain.math"
    assert not any("memory" in w for w in decided(waive=["memory"], **large).warnings)


def test_a_budget_is_no_obstacle_while_something_else_fits():
    assert decided(q_len=999).kernel == "fast.k"


@pytest.mark.parametrize("unknown", ["head_dim", "dtype", "heads", "causal", "lse"])
def test_what_depends_on_an_unknown_fact_is_said_to_and_nothing_crashes(unknown):
    d = decided(Request("fast"), **{unknown: "?"})
    (c,) = [c for c in d.candidates if str(c) == "fast/fast.k"]
    if unknown == "causal":
        assert c.verdict is True
        return
    assert c.verdict is None and d.kernel == "fast.k"
    assert all(r.verdict is None and r.message.startswith("depends on ") for r in c.reasons)
    assert any("depends on " in w for w in d.warnings)
    told = next(c for c in d.to_json()["candidates"] if c["kernel"] == "fast.k")
    assert told["verdict"] == "depends" and all(r["depends"] for r in told["reasons"])


def test_automatic_choice_takes_only_what_is_sure():
    assert decided(head_dim="?", v_head_dim=64).kernel == "plain.k"
    d = decided(head_dim="?", of=catalog(order=(Prefer("fast"),)))
    assert d.kernel is None and "depends on head_dim" in d.error


def test_an_unknown_architecture_or_package_version_is_told_as_any_other():
    odd = Machine("made", (Device("a9"),)).with_packages({"pkg-a": {"version": "dev"}})
    d = decided(on=odd)
    assert ids(d, "fast/fast.k") == ["arch"] and d.kernel == "plain.k"
    (r,) = [r for c in d.candidates if c.backend is PACKED for r in c.reasons]
    assert (r.id, r.verdict) == ("package.version", None)


# ---- requests


@pytest.mark.parametrize("requests, chosen, source", [
    ([Request("plain", source="env")], "plain.k", "env"),
    ([Request("plain", "prefer", "card")], "plain.k", "card"),
    ([Request("fast", "prefer", "card"), Request("plain", source="env")], "fast.k", "card"),
    ([Request("plain", source="a"), Request("fast", source="b")], "plain.k", "a"),
    ([Request("plain", kernel="plain.math", source="k")], "plain.math", "k"),
    ([Request(kernel="rough.k", source="k")], "rough.k", "k"),
    ([Request("fast", "forbid", "x")], "plain.k", "automatic"),
    ([Request("fast", "forbid", "x"), Request("plain", kernel="plain.k", mode="forbid")], "plain.math", "automatic"),
    ([Request(kernel="fast.k", mode="forbid", source="x")], "plain.k", "automatic"),
    ([Request("near", "prefer", "card")], "near.k", "card"),
])  # fmt: skip
def test_the_strongest_request_decides(requests, chosen, source):
    d = decided(*requests)
    assert (d.kernel, d.source) == (chosen, source)


@pytest.mark.parametrize("mode, chosen", [("require", None), ("prefer", "plain.k")])
def test_require_is_strict_and_prefer_follows_the_declared_fallback(mode, chosen):
    d = decided(Request("fast", mode, "the user"), dtype="fp32")
    assert (d.kernel, d.source) == (chosen, "the user")
    assert [w.split(":")[0] for w in d.warnings] == (["policy.fallback"] if chosen else [])


def test_a_preference_follows_what_its_backend_declares_and_not_the_next_request():
    d = decided(Request("fast", "prefer", "card"), Request("rough", source="env"), dtype="fp32")
    assert (d.kernel, d.source) == ("plain.k", "card")
    assert [(s.outcome, s.backend) for s in d.steps] == [("taken", "plain"), ("outranked", "")]


CHAIN = tuple(
    Backend(name, kernels=(kernel(f"{name}.k", limits={"head_dim": {size}}),), fallback=after)
    for name, size, after in (("first", 16, "second"), ("second", 32, "third"), ("third", 64, "first"))
)


@pytest.mark.parametrize("head_dim, chosen", [(16, "first.k"), (32, "second.k"), (64, "third.k"), (128, None)])
def test_declared_fallbacks_are_followed_one_after_another_and_never_round_and_round(head_dim, chosen):
    of = catalog({b.name: (Row(f"{b.name}.k"),) for b in CHAIN} | SUPPORT, backends=(*BACKENDS, *CHAIN))
    d = decided(Request("first", "prefer", "card"), of=of, head_dim=head_dim)
    assert (d.kernel, d.source) == (chosen, "card")
    assert bool(d.warnings) == (head_dim in (32, 64))


def test_a_sparse_fallback_is_stepped_over_in_cross_attention():
    first = Backend("first", kernels=(kernel("first.k", limits={"head_dim": {16}}),), fallback="sparse")
    sparse = Backend("sparse", kernels=(kernel("sparse.k"),), quality="lossy", traits=frozenset({"sparse"}),
                     roles=frozenset({"self"}), fallback="plain")  # fmt: skip
    of = catalog(
        {**SUPPORT, "first": (Row("first.k"),), "sparse": (Row("sparse.k"),)}, backends=(*BACKENDS, first, sparse)
    )
    assert decided(Request("first", "prefer"), of=of).kernel == "sparse.k"
    assert decided(Request("first", "prefer"), of=of, role="cross").kernel == "plain.k"


def test_a_declared_fallback_that_is_not_installed_is_none():
    alone = catalog({"fast": SUPPORT["fast"]}, backends=(FAST,), order=())
    for mode in ("prefer", "require"):
        d = decided(Request("fast", mode), of=alone, dtype="fp32")
        assert d.kernel is None and "dtype is float32" in d.error and not any("declares" in a for a in d.advice)


def test_a_preference_without_a_declared_fallback_is_refused_and_advised_on():
    d = decided(Request("packed", "prefer", "card"))
    assert (d.kernel, d.source) == (None, "card")
    assert d.advice == ("installing pkg_a (pip install pkg-a) would allow packed/packed.k",)


@pytest.mark.parametrize(
    "lacks", [{"lse": True}, {"mask": "bool"}, {"varlen": True}, {"role": "cross"}, {"dropout": 0.1}]
)
def test_no_fallback_is_taken_for_what_the_call_asks_for(lacks):
    only = Backend(
        "only", kernels=(kernel("only.k", honours=frozenset()),), fallback="plain", roles=frozenset({"self"})
    )
    of = catalog({**SUPPORT, "only": (Row("only.k", {"a1"}),)}, backends=(*BACKENDS, only))
    assert decided(Request("only", "prefer"), of=of).kernel == "only.k"
    d = decided(Request("only", "prefer", "the user"), of=of, **lacks)
    assert d.kernel is None and d.error.startswith("attention backend 'only', asked for by the user, cannot serve")
    elsewhere = decided(Request("only", "prefer"), of=of, device=1, **lacks)
    assert elsewhere.backend == "plain", "a machine that cannot have it at all is another matter"


def test_no_fallback_is_taken_for_what_is_forbidden():
    d = decided(Request("fast", "prefer", "env"), Request("fast", "forbid", "card"))
    assert d.kernel is None and "forbidden by card" in d.error


def test_when_no_fallback_serves_a_preference_the_error_tells_of_all_that_were_tried():
    d = decided(Request("fast", "prefer", "card"), head_dim=80, q_len=99)
    assert d.kernel is None and d.source == "card"
    assert "fast/fast.k:" in d.error and "plain/plain.k:" in d.error and "memory: too much" in d.error
    assert not any("declares plain" in a for a in d.advice), "it was tried"


def test_what_is_forbidden_says_who_forbade_it():
    d = decided(Request("fast", "forbid", "the model's card"))
    (r,) = [r for c in d.candidates if c.backend is FAST for r in c.reasons]
    assert (r.id, r.observed) == ("policy.forbid", "forbidden by the model's card")
    kernel = decided(Request("fast", source="env"), Request("fast", "forbid", "card", "fast.k"))
    assert kernel.kernel is None and "forbidden by card" in kernel.error


@pytest.mark.parametrize("forbidden, contradicts", [
    (Request("fast", "forbid", "card"), True),
    (Request("fast", "forbid", "card", target=Target("transformer")), True),
    (Request("fast", "forbid", "card", target=Target("vae")), False),
    (Request("fast", "forbid", "card", target=Target("transformer", "cross")), False),  # the rest is left
    (Request("fast", "forbid", "card", "fast.k"), False),
    (Request("plain", "forbid", "card"), False),
])  # fmt: skip
def test_to_require_what_is_forbidden_is_a_contradiction_that_names_both(forbidden, contradicts):
    asked = Request("fast", "require", "env", target=Target("transformer"))
    if contradicts:
        with pytest.raises(PolicyError, match="fast is required by env and forbidden by card; drop one of them"):
            Policy((asked, forbidden))
    else:
        assert Policy((asked, forbidden)).requests == (asked, forbidden)


def test_a_refused_request_says_what_was_asked_found_allowed_and_what_would_help():
    d = decided(Request("fast", source="--backend fa9"), dtype="fp32", head_dim=80, lse=True)
    assert d.error.startswith(
        "attention backend 'fast', asked for by --backend fa9, cannot serve this call on made a1."
    )
    assert ids(d, "fast/fast.k") == ["dtype", "head_dim", "lse"], "reasons accumulate"
    for said in (
        "dtype is float32; allowed: float16, bfloat16",
        "head_dim is 80; allowed: 64, 96, 128",
        "lse is asked for",
    ):
        assert said in d.error
    assert "advice: fast declares plain as its fallback; ask for plain to use it" in d.error
    with pytest.raises(NoKernelError) as e:
        d.bind()
    assert e.value.decision is d and str(e.value) == d.error and isinstance(e.value, HalError)


def test_a_kernel_that_is_asked_for_where_no_row_has_it_is_refused():
    d = decided(Request("plain", kernel="fast.k", source="k"))
    assert d.kernel is None and "made has no row for this kernel; it has plain.k, plain.math" in d.error
    bare = catalog(support={"plain": SUPPORT["plain"]})
    d = decided(Request("fast", kernel="fast.k", source="k"), of=bare)
    assert d.kernel is None and "platform is made; allowed: a platform with a kernel for it" in d.error


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(PolicyError, match=r"unknown request mode 'insist' \(known: forbid, prefer, require\)"):
        Request("fast", "insist")


# ---- packages, features, rows


@pytest.mark.parametrize("package, found", [
    (None, ["package.absent"]),
    ("1.9", ["package.version"]),
    ("2.0", []),
    ({"state": "found", "version": "2.1"}, []),
    ({"state": "broken", "note": "undefined symbol: _ZN3c10"}, ["package.broken"]),
    ({"state": "wrong_distribution"}, ["package.wrong_distribution"]),
    ({"state": "missing_symbol"}, ["package.missing_symbol"]),
])  # fmt: skip
def test_a_package_is_usable_until_it_is_known_not_to_be(package, found):
    d = decided(Request("packed"), on=MACHINE.with_packages({"pkg-a": package}))
    assert ids(d, "packed/packed.k") == found
    assert (d.kernel is None) == bool(found)
    if found:
        assert "pip install pkg-a" in d.error
    if found == ["package.broken"]:
        assert "undefined symbol: _ZN3c10" in d.error


def test_hardware_and_package_are_separate_reasons():
    lone = Backend("lone", kernels=(kernel("lone.k", needs=PACKED.kernels[0].needs),))
    of = catalog(support={"lone": (Row("lone.k", {"a1"}),)}, backends=(lone,), order=())
    assert ids(decided(of=of, device=1), "lone/lone.k") == ["package.absent", "arch"]
    with_it = MACHINE.with_packages({"pkg-a": "2.0"})
    assert ids(decided(of=of, on=with_it, device=1), "lone/lone.k") == ["arch"]


FEATURE_CALLS = {
    "causal": {"causal": True}, "lse": {"lse": True}, "varlen": {"varlen": True}, "grad": {"grad": True}, "mask_grad": {"mask": "additive", "mask_grad": True},
    "deterministic": {"deterministic": True}, "compile": {"compile": True}, "graph": {"graph": True}, "gqa": {"kv_heads": 2},
    "rectangular": {"kv_len": 5}, "dropout": {"dropout": 0.1}, "window": {"window": 3}, "scale": {"scale": 0.3},
    "lse_grad": {"lse": True, "grad": True}, "mask.key_padding": {"mask": "key_padding"}, "mask.bool": {"mask": "bool"},
    "mask.additive": {"mask": "additive"},
}  # fmt: skip


def test_every_feature_is_tried_here():
    assert set(FEATURE_CALLS) == set(FEATURES)


@pytest.mark.parametrize("feature", sorted(FEATURE_CALLS))
def test_a_feature_that_a_kernel_or_a_row_lacks_is_refused_and_never_dropped(feature):
    less = Backend("less", kernels=(kernel("less.k", honours=FEATURES - {feature}, fittings=frozenset()),))
    full = Backend("full", kernels=(kernel("full.k", fittings=frozenset()),))
    of = catalog(
        support={"less": (Row("less.k"),), "full": (Row("full.k", lacks={feature}),)}, backends=(less, full), order=()
    )
    d = decided(of=of, **FEATURE_CALLS[feature])
    assert ids(d, "less/less.k") == ids(d, "full/full.k") == [feature]
    assert ids(decided(of=of), "less/less.k") == []


def test_ring_wants_the_lse():
    of = catalog(
        support={"b": (Row("k"),)}, backends=(Backend("b", kernels=(kernel("k", honours=frozenset()),)),), order=()
    )
    assert ids(decided(of=of, ring=2), "b/k") == ["lse"]
    assert ids(decided(of=of, ring=2, grad=True), "b/k") == ["grad", "lse", "lse_grad"]


def test_a_backend_for_one_role_says_so_in_the_other():
    assert ids(decided(role="cross"), "selfish/selfish.k") == ["role"]
    assert ids(decided(role="?"), "selfish/selfish.k") == ["role"]
    assert decided(Request("selfish")).kernel == "selfish.k"


def test_rows_narrow_a_kernel_by_limits_and_rules():
    row = Row("plain.k", {"a1"}, {"head_dim": {128}}, rules=(Rule("row", {"causal": True}, {"q_len": Between(16)}),))
    of = catalog(support={"plain": (row,)})
    assert ids(decided(of=of, causal=True), "plain/plain.k") == ["head_dim", "row"]


def test_the_better_row_comes_first_and_only_those_that_bear_on_the_chip_are_told():
    b = Backend("b", kernels=(kernel("one"), kernel("two")))
    of = catalog(
        support={"b": (Row("one", {"a1"}), Row("two", {"a1", "a3"}), Row("one", {"a2"}, {"head_dim": {1}}))},
        backends=(b,),
        order=(Prefer("b"),),
    )
    assert decided(of=of).kernel == "one"
    assert [str(c) for c in decided(of=of).candidates] == ["b/one", "b/two"]
    d = decided(of=of, device=1)
    assert d.kernel == "two" and ids(d, "b/one") == ["arch"]
    assert "a1, a2" in next(c for c in d.candidates if c.verdict is False).reasons[0].message


def test_a_backend_from_outside_says_itself_where_it_runs():
    stranger = Backend("stranger", kernels=(kernel("stranger.k"),), support={"made": (Row("stranger.k", {"a1"}),)})
    of = catalog(backends=(*BACKENDS, stranger))
    assert decided(Request("stranger"), of=of).kernel == "stranger.k"
    assert ids(decided(Request("stranger"), of=of, device=1), "stranger/stranger.k") == ["arch"]
    assert decided(of=of).kernel == "fast.k"


def test_what_pytorch_refused_for_exactly_this_call_is_a_reason():
    d = resolve(Call.of(KNOWN).but(refused=(("fast.k", "the driver said no"),)), MACHINE, CATALOG)
    (r,) = [r for c in d.candidates if c.backend is FAST for r in c.reasons]
    assert (r.id, r.message) == ("refused", "the driver said no")
    assert d.kernel == "plain.k"


# ---- known-bad rules


def known_bad(tmp_path, text):
    (tmp_path / "known_bad.toml").write_text(text)
    return catalog(folder=tmp_path)


DEFECT = """
[[rule]]
id = "black"
kernels = ["fast.k"]
when = { torch = "<2.14", arch = ["a1"] }
note = "black images"
citation = "made#1"
fix = "upgrade torch"
"""


def test_a_known_bad_combination_is_avoided_refused_and_waived_by_name(tmp_path):
    of = known_bad(tmp_path, DEFECT)
    d = decided(of=of)
    assert d.kernel == "plain.k"
    (r,) = [r for c in d.candidates if c.backend is FAST for r in c.reasons]
    assert (r.id, r.citation, r.waiver) == ("known_bad.black", "made#1", "black")
    asked = decided(Request("fast", source="x"), of=of)
    assert asked.kernel is None and "black images" in asked.error
    assert "waiving black (--waive black) would allow fast/fast.k" in asked.advice
    assert decided(Request("fast"), of=of, waive=["black"]).kernel == "fast.k"
    assert decided(of=of, on=MACHINE.with_software(torch="2.14")).kernel == "fast.k"


def test_a_defect_that_only_warns_does_not_refuse(tmp_path):
    d = decided(of=known_bad(tmp_path, DEFECT + 'effect = "warn"\n'))
    assert d.kernel == "fast.k"
    assert d.warnings == ("known_bad.black: black images (made#1)",)
    assert decided(of=known_bad(tmp_path, DEFECT + 'effect = "warn"\n'), waive=["black"]).warnings == ()


@pytest.mark.parametrize("old, new, said", [
    ('"fast.k"', '"fsat.k"', "unknown kernel 'fsat.k'; did you mean 'fast.k'"),
    ("torch =", "troch =", "unknown fact 'troch'; did you mean 'torch'"),
    ("note =", "ntoe =", "unknown key 'ntoe'; did you mean 'note'"),
    ('["a1"]', '">=a1"', "an architecture is one of a set, never an order"),
])  # fmt: skip
def test_a_defect_that_names_what_does_not_exist_is_refused(tmp_path, old, new, said):
    with pytest.raises(DeclarationError, match=said):
        known_bad(tmp_path, DEFECT.replace(old, new)).known_bad  # noqa: B018


def test_no_file_is_no_rule():
    assert read_known_bad(Path("/nowhere/known_bad.toml"), "x") == []


# ---- advice, names, purity


@pytest.mark.parametrize("changes, request_, said", [
    ({"dtype": "fp32"}, None, "to cast q, k and v to float16, bfloat16 would allow fast/fast.k"),
    ({"head_dim": 72}, None, "to pad head_dim 72 to 96 (--fit pad_head_dim) would allow fast/fast.k"),
    ({}, Request("packed"), "installing pkg_a (pip install pkg-a) would allow packed/packed.k"),
])  # fmt: skip
def test_advice_is_the_one_change_that_would_bring_something_better(changes, request_, said):
    assert said in decided(*[request_] if request_ else [], **changes).advice


def test_no_advice_where_two_things_are_wrong_or_the_best_was_taken():
    assert not [a for a in decided(dtype="fp32", head_dim=72).advice if "fast" in a]
    assert decided().advice == ()


def test_padding_is_done_only_when_asked_for():
    d = decided(fit=["pad_head_dim"], head_dim=72)
    assert (d.kernel, d.fittings) == ("plain.math", ()), (
        "the padded call still asks for a scale, which fast.k does not take"
    )
    scaled = Backend("fast", kernels=(kernel("fast.k", limits={"head_dim": {64, 96}}),))
    of = catalog(backends=(scaled, PLAIN))
    assert decided(of=of, head_dim=72).kernel == "plain.math"
    d = decided(of=of, fit=["pad_head_dim"], head_dim=72)
    assert (d.kernel, d.fittings, d.fitted[-1].head_dim, d.fitted[-1].scale) == (
        "fast.k",
        ("pad_head_dim",),
        96,
        72**-0.5,
    )


@pytest.mark.parametrize("spelling", ["fast", "FAST", " fa9 ", "FA9"])
def test_a_backend_has_one_name_for_all_its_spellings(spelling):
    assert CATALOG.backend_name(spelling) == "fast"


@pytest.mark.parametrize("ask, error, said", [
    (lambda: CATALOG.backend_name("fsat"), PolicyError, r"unknown attention backend 'fsat'; did you mean 'fast'\? \(known: fa9, fast"),
    (lambda: CATALOG.kernel_name("fast.q"), PolicyError, "unknown kernel 'fast.q'; did you mean 'fast.k'"),
    (lambda: CATALOG.platform("maid"), PlatformError, "unknown platform 'maid'; did you mean 'made'"),
    (lambda: resolve(Call(), Machine("other", (Device("x"),)), CATALOG), PlatformError, "unknown platform 'other'"),
])  # fmt: skip
def test_a_name_that_does_not_exist_is_told_with_a_suggestion(ask, error, said):
    with pytest.raises(error, match=said):
        ask()


@pytest.mark.parametrize("make, said", [
    (lambda: Row("k", "a1"), "architectures are a set"),
    (lambda: Row("k", tier="good"), "tier 'good'; allowed: native"),
    (lambda: Row("k", lacks={"colour"}), "lacks colour, which is no feature"),
    (lambda: kernel("k", honours={"colour"}), "kernel k: honours colour; known: causal"),
    (lambda: kernel("k", fittings={"hammer"}), "kernel k: fittings hammer; known: contiguous"),
    (lambda: kernel("k", layout="sbhd"), "kernel k: layout 'sbhd'; allowed: bshd, bhsd, any"),
    (lambda: kernel("k", limits={"arch": {"a1"}}), "said by a platform's rows, not by the kernel"),
    (lambda: Backend("b", quality="fine"), "quality 'fine'; allowed: exact, near, lossy"),
    (lambda: catalog(support={"fast": (Row("nowhere.k"),)}).lines("made", "fast"), "backend fast: unknown kernel 'nowhere.k'"),
    (lambda: catalog(backends=(FAST, Backend("c", kernels=(kernel("fast.k"),)))).kernels, "two kernels are named 'fast.k'"),
])  # fmt: skip
def test_a_declaration_that_contradicts_itself_is_refused(make, said):
    with pytest.raises(DeclarationError, match=said):
        make()


@given(st.fixed_dictionaries({}, optional={
    "dtype": st.sampled_from(("fp16", "fp32", "?")), "head_dim": st.sampled_from((64, 72, 80, "?")), "causal": st.sampled_from((True, False, "?")),
    "mask": st.sampled_from(("none", "bool", "key_padding", "?")), "kv_heads": st.sampled_from((4, 2, "?")), "lse": st.booleans(),
    "q_len": st.sampled_from((8, 99, "?")), "device": st.integers(0, 1), "v.contiguous": st.booleans(),
}), st.sampled_from(((), (Request("fast"),), (Request("fast", "prefer"),), (Request("fast", "forbid"),))))  # fmt: skip
def test_the_same_facts_give_the_same_decision_and_it_obeys_the_schema(changes, requests):
    jsonschema = pytest.importorskip("jsonschema")
    first, second = (decided(*requests, **changes) for _ in range(2))
    assert first.to_json() == second.to_json()
    text = json.dumps(first.to_json())
    jsonschema.Draft202012Validator(schemas.explanation()).validate(json.loads(text))
    assert (first.error is None) == (first.kernel is not None)
    accepted = [c for c in first.candidates if first.chosen and c.line is first.chosen.line]
    assert len(accepted) == (first.chosen is not None), "the trace agrees with the choice"
    for c in accepted:
        assert c.reasons == first.chosen.reasons
    for form in ("text", "tree"):
        told = first.explain(form)
        assert all(str(c) in told for c in first.candidates)


def test_resolving_imports_no_torch_and_reads_no_file(python):
    ran = python("""
import builtins, sys
import hal, hal.plugins, hal.resolver
catalog = hal.plugins.catalog()
machine = catalog.machine("x86")
call = hal.Call.of(dtype="bf16", head_dim=128, heads=8, batch=1, q_len=64)
hal.resolve(call, machine, catalog).to_json()
builtins.open = lambda *a, **k: sys.exit(f"opened {a}")
print(hal.resolve(call.but(causal=True), machine, catalog).kernel, "torch" in sys.modules)
""")
    assert (ran.code, ran.out.split()) == (0, ["sdpa.cpu", "False"]), ran.err


def test_packing_is_advised_for_key_padding_only_where_the_kernel_takes_packed_sequences():
    """A fix that the same kernel would refuse again is none."""
    call, catalog = (
        Call(dtype="float32", head_dim=64, heads=4, batch=1, q_len=288, mask="key_padding"),
        plugins.catalog(),
    )
    against = {
        "varlen" in c.line.honours: r.fix
        for c in resolve(call, catalog.machine("x86"), catalog).candidates
        for r in c.reasons
        if r.id == "mask.key_padding" and c.line
    }
    assert against == {
        True: "drop attn_mask, or pack the sequences and call hal.attention_varlen",
        False: "drop attn_mask",
    }
