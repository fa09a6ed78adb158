"""What differs between two sides, and why; plans as files; all without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal import difference, plugins, schemas
from hal.difference import CALLS, Difference, Side, asked, compare, decided, planned, questions, typical
from hal.errors import FactError, PolicyError
from hal.facts import Call
from hal.plan import FORMAT, Plan, is_plan, read_plan
from hal.policy import Policy, Request
from hal.resolver import resolve

CATALOG = plugins.catalog()
PRESETS = sorted(CATALOG.presets)
SCHEMA = jsonschema.Draft202012Validator(schemas.difference())
FA3 = {"flash_attn_3": "3.0.0"}


def side(on: str, packages: dict[str, Any] | None = None, calls: Any = None, **software: str) -> Side:
    machine = CATALOG.changed(CATALOG.machine(on), packages or {}, software)
    return decided(on, machine, CATALOG, typical() if calls is None else calls)


def causes(d: Difference, on: str, kernel: str) -> dict[str, str]:
    """id -> message of all that keeps a side from a kernel."""
    return {c.id: c.message for x in d.calls for w in x.why if (w.on, w.kernel) == (on, kernel) for c in w.causes}


# ---- machines


@pytest.mark.parametrize("preset", PRESETS)
def test_a_machine_does_not_differ_from_itself(preset: str) -> None:
    found = compare(side(preset), side(preset))
    assert (found.calls, found.facts, found.compared) == ((), (), len(CALLS))


PACKAGES = st.dictionaries(
    st.sampled_from(sorted(CATALOG.packages)), st.sampled_from(("2.8.3", "3.0.0", "4.0.0b36", None))
)
MACHINES = st.tuples(st.sampled_from(PRESETS), PACKAGES)


@settings(max_examples=40)
@given(MACHINES, MACHINES)
def test_turned_round_the_difference_is_the_same_and_every_one_has_a_reason_on_each_side(one: Any, other: Any) -> None:
    a, b = side(*one), side(*other)
    there, back = compare(a, b), compare(b, a)
    assert {str((f.fact, f.a, f.b)) for f in there.facts} == {str((f.fact, f.b, f.a)) for f in back.facts}
    turned = {"a": "b", "b": "a"}
    assert {(c.question, c.a, c.b, frozenset(c.why)) for c in there.calls} == {
        (c.question, c.b, c.a, frozenset(w._replace(on=turned[w.on]) for w in c.why)) for c in back.calls
    }
    for c in there.calls:
        assert c.a and c.b and c.a.outcome != c.b.outcome
        assert {w.on for w in c.why} == {on for on, other in (("b", c.a), ("a", c.b)) if other.backend}
        assert all(w.causes for w in c.why)
    alike = set(a.choices) - {c.question for c in there.calls}
    assert all(a.choices[q].outcome == b.choices[q].outcome for q in alike)
    SCHEMA.validate(json.loads(json.dumps(there.to_json())))


def test_a_package_that_is_taken_away_is_the_reason_and_the_fact() -> None:
    found = compare(side("h100", FA3), side("h100"))
    assert [tuple(f) for f in found.facts] == [("pkg.flash_attn_3", "3.0.0", "absent")]
    assert {c.question.name for c in found.calls} == set(CALLS) - {"VAE", "float32"}
    assert causes(found, "b", "fa/fa3") == {"package.absent": "flash_attn_3 is absent"}, "and not what fittings mend"
    assert causes(found, "a", "torch_sdpa/sdpa.flash")["order"].startswith("it fits, and fa comes first on cuda: ")


def test_another_architecture_shows_its_kernels() -> None:
    found = compare(
        side("h100", {**FA3, "flash_attn_4": "4.0.0b36"}), side("b200", {**FA3, "flash_attn_4": "4.0.0b36"})
    )
    assert {f.fact for f in found.facts} == {"arch", "device", "memory"}
    video = next(c for c in found.calls if c.question.name == "self-attention of a video")
    assert (str(video.a), str(video.b)) == ("fa by fa3", "torch_cudnn_sdpa by sdpa.cudnn")
    assert "sm100" in causes(found, "b", "fa/fa3")["arch"]
    assert "arch is sm90" in causes(found, "a", "torch_cudnn_sdpa/sdpa.cudnn")["order"]
    text = next(c for c in found.calls if c.question.name == "text encoder")
    assert (str(text.a), str(text.b)) == ("fa by fa3", "fa by fa4")


def test_another_platform_has_no_row() -> None:
    found = compare(side("h100", FA3), side("x86"))
    assert "cpu" in causes(found, "b", "fa/fa3")["platform"]
    assert {"platform", "arch", "device", "memory", "cudnn"} <= {f.fact for f in found.facts}


def test_another_release_of_a_library_is_the_reason() -> None:
    """Field case B4: cuDNN 9.19 with few key heads on B200."""
    calls = questions({"few heads": Call.of({**CALLS["self-attention of an image"], "heads": 4})})
    found = compare(side("b200", calls=calls, cudnn="9.19"), side("b200", calls=calls, torch="2.14.0", cudnn="9.24"))
    assert {f.fact for f in found.facts} == {"torch", "cudnn"}
    assert any(i.startswith("known_bad.") for i in causes(found, "a", "torch_cudnn_sdpa/sdpa.cudnn"))


def test_one_kernel_with_other_fittings_tells_what_they_mend() -> None:
    calls = questions({"masked": Call.of(CALLS["cross-attention with a text mask"])})
    (c,) = compare(side("s4000", calls=calls), side("910b", calls=calls)).calls
    assert (str(c.a), str(c.b)) == ("torch_sdpa by sdpa.fused", "torch_sdpa by sdpa.fused with mask_shape")
    there, here = c.why
    assert (there.on, there.causes[0].id) == ("b", "mask_shape")
    assert (here.on, here.causes[0].message) == ("a", "it fits as it is")


def test_facts_may_differ_without_a_consequence() -> None:
    found = compare(side("h100"), side("h200"))
    assert found.calls == () and {f.fact for f in found.facts} == {"device", "memory"}


def test_every_device_is_compared_and_what_is_absent_is_no_unknown() -> None:
    facts = CATALOG.machine("h100").to_json()
    two = {
        **facts,
        "devices": [facts["devices"][0], {"index": 1, "arch": "sm86", "memory": 2**34}],
        "packages": {**facts["packages"], "flash_attn": None},
    }
    machines = [type(CATALOG.machine("h100")).from_json(f) for f in (facts, two)]
    a, b = (decided(n, m, CATALOG, typical()) for n, m in zip("ab", machines))
    told = {f.fact: (f.a, f.b) for f in compare(a, b).facts}
    assert told["device 1 arch"] == (None, "sm86") and told["device 1 memory"] == (None, 2**34)
    assert not [f for f in told if f.startswith("pkg.")]


# ---- plans


def saved(
    path: Path, on: str = "h100", packages: Any = None, policy: Policy | None = None, calls: Any = None, **more: Any
) -> Path:
    """A plan as hal lock saves it: the typical calls as layers of a transformer."""
    machine = CATALOG.changed(CATALOG.machine(on), packages or {}, {})
    entries = []
    for i, call in enumerate(calls or [Call.of(c) for c in CALLS.values()]):
        d = resolve(call, machine, CATALOG, policy or Policy())
        chosen = {
            "backend": d.backend,
            "kernel": d.kernel,
            "fittings": list(d.fittings),
            "source": d.source,
            "warnings": list(d.warnings),
        }
        entries.append({"component": "transformer", "role": call.role, "layer": i, "call": call.to_json(), **chosen})
    data = {"hal": "0.1.0", "format": FORMAT, "machine": machine.to_json(), "policy": {}, "entries": entries, **more}
    path.write_text(json.dumps(data))
    return path


def plan(path: Path, **more: Any) -> Plan:
    return read_plan(saved(path, **more))


def test_a_plan_reads_back_as_it_was_decided(tmp_path: Path) -> None:
    found = plan(tmp_path / "p.json", packages=FA3)
    assert [e.call for e in found.entries] == [Call.of(c) for c in CALLS.values()]
    assert [str(e) for e in found.entries[1:3]] == ["transformer.self@1", "transformer.cross@2"]
    assert found.entries[2].fittings == ("key_padding_to_varlen",)
    assert found.machine.packages["flash_attn_3"].version == "3.0.0"
    assert found.hal == "0.1.0" and found.origin.endswith("p.json")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_plan_does_not_differ_from_its_machine_nor_from_itself(preset: str, tmp_path: Path) -> None:
    made = plan(tmp_path / "p.json", on=preset)
    mine = planned("plan", made, CATALOG)
    assert compare(mine, planned("again", made, CATALOG)).calls == ()
    here = compare(mine, decided("machine", CATALOG.machine(preset), CATALOG, asked(made)))
    assert here.calls == () and {f.fact for f in here.facts} <= {"hal"}


def test_a_plans_calls_are_decided_on_the_machine(tmp_path: Path) -> None:
    made = plan(tmp_path / "p.json", packages=FA3)
    found = compare(planned("plan", made, CATALOG), decided("t4", CATALOG.machine("t4"), CATALOG, asked(made)))
    assert {c.question.layer for c in found.calls} >= {i for i, e in enumerate(made.entries) if e.backend == "fa"}
    assert "arch is sm75" in causes(found, "b", "fa/fa3")["arch"]
    SCHEMA.validate(json.loads(json.dumps(found.to_json())))


def test_what_somebody_asked_for_in_a_plan_runs_on_the_machine_or_is_refused(tmp_path: Path) -> None:
    policy = Policy((Request("fa", source="--attention-backend fa"),))
    call = Call.of(CALLS["text encoder"])
    made = plan(tmp_path / "p.json", packages=FA3, policy=policy, calls=[call])
    (c,) = compare(planned("plan", made, CATALOG), decided("x86", CATALOG.machine("x86"), CATALOG, asked(made))).calls
    assert c.a and c.b and (str(c.a), str(c.b)) == ("fa by fa3", "refused")
    assert "asked for by --attention-backend fa" in (c.b.error or "")
    assert [cause.id for cause in c.why[0].causes] == ["refused", "platform"]
    assert [w.on for w in c.why] == ["b"], "nothing of a refusal could be taken"


def test_layers_that_one_plan_lacks_and_equal_calls_of_one_layer_are_counted(tmp_path: Path) -> None:
    call = Call.of(CALLS["text encoder"])
    one, three = plan(tmp_path / "1.json", calls=[call]), plan(tmp_path / "3.json", calls=[call] * 3)
    found = compare(planned("1", one, CATALOG), planned("3", three, CATALOG))
    assert [(c.question.layer, c.a, c.b is None) for c in found.calls] == [(1, None, False), (2, None, False)]
    data = json.loads(Path(three.origin).read_text())
    for e in data["entries"]:
        e["layer"] = None
    Path(three.origin).write_text(json.dumps(data))
    assert [q.nth for q in asked(read_plan(three.origin))] == [0, 1, 2]


def test_a_plan_of_another_hal_that_decided_otherwise_is_told(tmp_path: Path) -> None:
    path = saved(tmp_path / "old.json", packages=FA3, hal="0.0.1")
    data = json.loads(path.read_text())
    data["entries"][0] |= {"backend": "torch_sdpa", "kernel": "sdpa.flash"}
    path.write_text(json.dumps(data))
    new = plan(tmp_path / "new.json", packages=FA3)
    found = compare(planned("old", read_plan(path), CATALOG), planned("new", new, CATALOG))
    assert [tuple(f) for f in found.facts] == [("hal", "0.0.1", "0.1.0")]
    assert len(found.calls) == 1
    assert "this hal decides fa by fa3" in causes(found, "a", "fa/fa3")["plan.other"]
    assert "fa comes first" in causes(found, "b", "torch_sdpa/sdpa.flash")["order"]


def test_a_plan_with_a_backend_or_kernel_that_is_not_here_is_told_as_such(tmp_path: Path) -> None:
    path = saved(tmp_path / "p.json", calls=[Call.of(CALLS["VAE"])] * 3)
    data = json.loads(path.read_text())
    data["entries"][0] |= {"backend": "vendor_attn", "kernel": "vendor"}
    data["entries"][1] |= {"backend": "vendor_attn", "kernel": "vendor", "source": "--attention-backend vendor_attn"}
    data["entries"][2] |= {"backend": "torch_sdpa", "kernel": "sdpa.vendor"}
    path.write_text(json.dumps(data))
    made = read_plan(path)
    found = compare(planned("plan", made, CATALOG), decided("h100", CATALOG.machine("h100"), CATALOG, asked(made)))
    first, second, third = found.calls
    assert first.why[0].causes == (difference.Cause("backend", "vendor_attn is not installed in this hal"),)
    assert second.b and second.b.backend is None and "unknown attention backend 'vendor_attn'" in (second.b.error or "")
    assert third.why[0].causes[0].message == "cuda has no row for sdpa.vendor"


def test_a_refused_entry_is_a_refusal(tmp_path: Path) -> None:
    policy = Policy((Request("torch_cudnn_sdpa", source="the test"),))
    made = plan(tmp_path / "p.json", on="x86", policy=policy, calls=[Call.of(CALLS["VAE"])])
    (choice,) = planned("plan", made, CATALOG).choices.values()
    assert (str(choice), choice.error) == ("refused", "refused when the plan was made")


ENTRY = {"component": "vae", "role": "self", "layer": None, "call": {"head_dim": 64}, "backend": "b", "kernel": "k"}
BAD: list[tuple[Any, str]] = [
    ([], "is list"),
    ({"format": "hal-plan-2"}, "has the format 'hal-plan-2'; this hal reads 'hal-plan-1'"),
    ({"entries": []}, "has the format None"),
    ({"format": FORMAT}, "lacks machine, entries"),
    ({"entrys": []}, "unknown key 'entrys'; did you mean 'entries'?"),
    ({"entries": {}}, "entries is {}; it must be a list"),
    ({"policy": 3}, "policy is 3; it must be an object"),
    ({"hal": 1}, "hal is 1; it must be text"),
    ({"machine": {"platform": "cuda"}}, "a machine needs a platform (text) and devices"),
    ({"entries": [{}]}, "entry 0 lacks component, role, layer, call, backend, kernel"),
    ({"entries": [ENTRY, 7]}, "entry 1 is int 7"),
    ({"entries": [ENTRY | {"kernal": "fa3"}]}, "entry 0: unknown key 'kernal'; did you mean 'kernel'?"),
    ({"entries": [ENTRY | {"kernel": None}]}, "backend is 'b' and kernel is None"),
    ({"entries": [ENTRY | {"backend": ""}]}, "backend is ''; it must be a name"),
    ({"entries": [ENTRY | {"layer": 1.5}]}, "layer is 1.5; it must be a number, a name or null"),
    ({"entries": [ENTRY | {"layer": True}]}, "layer is True"),
    ({"entries": [ENTRY | {"component": None}]}, "component is None; it must be text"),
    ({"entries": [ENTRY | {"fittings": "pad"}]}, "fittings is 'pad'; it must be a list"),
    ({"entries": [ENTRY | {"warnings": [1]}]}, "warnings has 1; it must be a list of text"),
    (
        {"entries": [ENTRY | {"call": {"haed_dim": 64}}]},
        "entry 0, call: unknown call key 'haed_dim'; did you mean 'head_dim'?",
    ),
    ({"entries": [ENTRY | {"call": {"head_dim": "wide"}}]}, "entry 0, call: call key 'head_dim' is 'wide'"),
    (
        {"entries": [ENTRY | {"call": {"heads": 5, "kv_heads": 2}}]},
        "entry 0, call: heads=5 is no multiple of kv_heads=2",
    ),
]


@pytest.mark.parametrize(("change", "said"), BAD)
def test_a_malformed_plan_is_refused_with_its_place(change: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    whole = {"hal": "1", "format": FORMAT, "machine": CATALOG.machine("x86").to_json(), "policy": {}, "entries": []}
    bare = isinstance(change, list) or change in ({"format": FORMAT}, {"entries": []})
    path.write_text(json.dumps(change if bare else {**whole, **change}))
    with pytest.raises(PolicyError) as caught:
        read_plan(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"), [(b"{", "is no JSON"), (b"\xff\xfe", "is no JSON"), (None, "cannot be read")]
)
def test_a_file_that_is_no_plan_at_all(text: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_bytes(text)
    assert not is_plan(path)
    with pytest.raises(PolicyError, match=said):
        read_plan(path)


def test_plans_and_facts_files_are_told_apart(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps(CATALOG.machine("h100").to_json()))
    assert (
        not is_plan(facts)
        and is_plan(saved(tmp_path / "p.json"))
        and is_plan(saved(tmp_path / "q.json", format="hal-plan-9"))
    )


def test_a_machine_that_no_platform_here_reads_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "p.json", machine={"platform": "cuda", "devices": [{"arch": "sm_nine"}]})
    with pytest.raises(FactError, match="sm_nine"):
        planned("plan", read_plan(path), CATALOG)
