"""Machines and packages: plain data, JSON in and out; bad input is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal import plugins, schemas
from hal.backend import Backend, Kernel
from hal.catalog import Catalog
from hal.errors import FactError
from hal.facts import ABSENT, DTYPES, PACKAGE_STATES, Call, Device, Machine, Package, facts_of
from hal.platform import Platform
from hal.resolver import resolve
from hal.rows import Prefer, Row

text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
sizes = st.one_of(st.none(), st.integers(0, 2**45))
devices = st.builds(
    Device,
    text,
    st.integers(0, 9),
    text,
    sizes,
    st.one_of(st.none(), st.frozensets(st.sampled_from(sorted(DTYPES)))),
    sizes,
)
packages = st.builds(Package, st.sampled_from(PACKAGE_STATES), st.one_of(st.none(), text), text)
names = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
machines = st.builds(
    Machine, names, st.lists(devices, min_size=1, max_size=3, unique_by=lambda d: d.index).map(tuple),
    st.dictionaries(names, st.one_of(st.none(), text), max_size=3), st.dictionaries(names, packages, max_size=3), text,
)  # fmt: skip


@given(machines)
def test_a_machine_is_read_from_the_json_that_it_writes(m):
    again = Machine.from_json(json.dumps(m.to_json()))
    assert again.to_json() == m.to_json()
    assert (again.platform, again.devices, again.software, again.origin) == (
        m.platform,
        m.devices,
        m.software,
        m.origin,
    )


@given(machines)
def test_what_a_machine_writes_obeys_the_published_schema(m):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(schemas.machine()).validate(m.to_json())


def facts(**changes):
    return {"platform": "made", "devices": [{"arch": "a1"}], **changes}


BAD = [
    # facts, what the error says
    ("{", "no JSON"),
    ([], "a machine is list .*; it must be an object with platform, devices"),
    ("[1]", r"a machine is list \[1\]; it must be an object"),
    ({}, "a machine needs a platform"),
    (facts(platform=None), "a machine needs a platform"),
    (facts(devices=[]), r"devices \(a list of at least one\)"),
    (facts(devices={"arch": "a1"}), "a list of at least one"),
    (facts(devcies=[]), "a machine has the unknown key 'devcies'; did you mean 'devices'?"),
    (facts(devices=["a1"]), "device 0 is str 'a1'; it must be an object with index, name, arch"),
    (facts(devices=[{"arch": "a1"}, {}]), "device 1 has the arch None; it must be text"),
    (facts(devices=[{"arch": True}]), "device 0 has the arch True"),
    (facts(devices=[{"arch": "a1", "memroy": 1}]), "device 0 has the unknown key 'memroy'; did you mean 'memory'?"),
    (facts(devices=[{"arch": "a1", "memory": "80GB"}]), "device 0 has memory '80GB'; it must be a whole number from 0"),
    (facts(devices=[{"arch": "a1", "memory": -1}]), "device 0 has memory -1"),
    (facts(devices=[{"arch": "a1", "index": True}]), "device 0 has index True"),
    (facts(devices=[{"arch": "a1", "index": 1}, {"arch": "a1"}]), "two devices have the index 1"),
    (facts(devices=[{"arch": "a1", "name": 5}]), "device 0 has the name 5; it must be text"),
    (facts(devices=[{"arch": "a1", "dtypes": ["bf61"]}]), "'bf61' is no dtype"),
    (facts(devices=[{"arch": "a1", "dtypes": "bfloat16"}]), "device 0 has dtypes 'bfloat16'; they must be a list"),
    (facts(devices=[{"arch": "a1", "dtypes": 5}]), "device 0 has dtypes 5"),
    (facts(software=["torch"]), r"software is \['torch'\]; it must be an object"),
    (facts(software={"torch": 2.13}), "software torch is 2.13; versions are text"),
    (facts(packages=["fa"]), "packages is"),
    (facts(packages={"fa": 2.8}), "package fa: 2.8 is no package: give a version, null, or an object"),
    (facts(packages={"fa": {"version": 2.8}}), "package fa: version 2.8 is no text"),
    (facts(packages={"fa": {"state": None}}), "package fa: state None is no text"),
    (facts(packages={"fa": {"state": "boken"}}), "package fa: unknown package state 'boken'; did you mean 'broken'?"),
    (facts(packages={"fa": {"verison": "2"}}), "package fa: .* is no package"),
    (facts(packages={"fa": []}), r"package fa: \[\] is no package"),
    (facts(origin=5), "origin is 5; it must be text"),
]  # fmt: skip


@pytest.mark.parametrize("data, said", BAD, ids=[said[:40] for _, said in BAD])
def test_bad_facts_are_one_clear_error_that_names_their_place(data, said):
    with pytest.raises(FactError, match=f"^file x.json: .*{said}"):
        Machine.from_json(data, "file x.json")


@pytest.mark.parametrize("data", [d for d, said in BAD if isinstance(d, dict) and "two devices" not in said], ids=str)
def test_bad_facts_break_the_published_schema_too(data):
    jsonschema = pytest.importorskip("jsonschema")
    assert not jsonschema.Draft202012Validator(schemas.machine()).is_valid(data)


@pytest.mark.parametrize("arch, read", [("sm90", "sm90"), (90, "90"), (9.0, "9.0"), ([12, 0], "12.0")])
def test_an_architecture_may_be_text_a_number_or_a_pair(arch, read):
    assert Machine.from_json(facts(devices=[{"arch": arch}])).devices[0].arch == read


# ---- packages


@pytest.mark.parametrize("given, state, version", [
    (None, "absent", None),
    ("2.8.3", "usable", "2.8.3"),
    ({"version": "2.8.3"}, "usable", "2.8.3"),
    ({"state": "broken", "note": "undefined symbol"}, "broken", None),
    (Package("found", "1"), "found", "1"),
])  # fmt: skip
def test_a_package_is_a_version_nothing_or_a_state(given, state, version):
    p = Package.of(given)
    assert (p.state, p.version) == (state, version)
    assert Package.of(p.to_json()) == p


def test_found_and_usable_are_available_and_nothing_else():
    assert {s for s in PACKAGE_STATES if Package(s).available} == {"found", "usable"}


@pytest.mark.parametrize("state", PACKAGE_STATES)
def test_a_rule_sees_the_version_of_what_is_available_and_absent_of_what_is_not(state):
    m = Machine("made", (Device("a1"),)).with_packages({"Flash-Attn": Package(state, "2.8")})
    found = facts_of(Call(), m, ("flash_attn", "other"))
    assert found["pkg.flash_attn"] == ("2.8" if state in ("found", "usable") else ABSENT)
    assert found["pkg.other"] is ABSENT


def test_a_package_has_one_key_however_it_is_spelt():
    m = Machine("made", (Device("a1"),)).with_packages({"Flash_Attn": "2", "flash-attn": "3", "flash.attn": None})
    assert {n: p.state for n, p in m.packages.items()} == {"flash_attn": "absent"}


def test_changes_make_a_new_machine():
    m = Machine("made", (Device("a1"),), {"torch": "2.13"})
    m.with_software(torch="2.9", cudnn="9.1"), m.with_packages({"x": "1"})
    assert m.software == {"torch": "2.13"} and m.packages == {}


# ---- facts are per device


class Made(Platform):
    name = device_type = "made"
    order = (Prefer("fast"), Prefer("slow"))
    support = {"fast": (Row("fast.k", {"sm86"}),), "slow": (Row("slow.k"),)}

    folder = Path("/nowhere")


def kernel(name):
    return Kernel(name, lambda call: None, limits={"dtype": {"float16", "bfloat16"}})


CATALOG = Catalog({"made": Made()}, {n: Backend(n, kernels=(kernel(f"{n}.k"),)) for n in ("fast", "slow")})
BOTH = Machine("made", (
    Device("sm70", 0, memory=16, dtypes=frozenset({"float16"}), shared_memory=96), Device("sm86", 1, memory=24, shared_memory=100)
))  # fmt: skip


@pytest.mark.parametrize("device, chosen", [(0, "slow"), (1, "fast")])
def test_each_device_decides_for_itself(device, chosen):
    call = Call.of(dtype="fp16", head_dim=64, heads=4, q_len=16, device=device)
    d = resolve(call, BOTH, CATALOG)
    assert d.backend == chosen
    assert d.to_json()["device"]["arch"] == BOTH.devices[device].arch
    found = facts_of(call, BOTH)
    assert (found["memory"], found["shared_memory"]) == ((16, 96), (24, 100))[device]


def test_each_device_has_its_own_dtypes():
    assert "dtype.device" in {r.id for c in resolve(Call.of(dtype="bf16"), BOTH, CATALOG).candidates for r in c.reasons}
    assert resolve(Call.of(dtype="bf16", heads=4, q_len=16, device=1), BOTH, CATALOG).backend == "fast"


def test_a_device_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(FactError, match="device 2 was asked for; this made machine has: 0, 1"):
        resolve(Call.of(device=2), BOTH, CATALOG)


def test_a_device_is_found_by_its_index_and_not_by_its_place():
    m = Machine("made", (Device("sm86", 3), Device("sm70", 1)))
    assert (m.device(1).arch, m.device(3).arch) == ("sm70", "sm86")


def test_two_generations_of_gpus_in_one_box_decide_each_for_itself():
    """Golden case 27."""
    m = (
        plugins.catalog()
        .platforms["cuda"]
        .read(
            Machine("cuda", (Device("sm70", 0), Device("8.6", 1)), {"torch": "2.13.0"}).with_packages(
                {"flash-attn": "2.8.3"}
            )
        )
    )
    call = Call.of(dtype="fp16", head_dim=64, heads=8, batch=1, q_len=512)
    volta, ampere = (resolve(call.but(device=n), m, plugins.catalog()) for n in (0, 1))
    assert (volta.kernel, ampere.kernel) == ("sdpa.efficient", "fa2")
    (fa2,) = [c for c in volta.candidates if c.kernel and c.kernel.name == "fa2"]
    assert [(r.id, r.observed) for r in fa2.reasons] == [("arch", "sm70")], "the package is not to blame"
