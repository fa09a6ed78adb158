"""hal matrix, facts, presets and known-bad."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import jsonschema
import pytest

from hal import plugins, schemas
from hal.facts import Machine

CATALOG = plugins.catalog()


# ---- matrix


def test_the_matrix_has_every_row_of_every_platform(hal):
    rows = hal("matrix", "--json").json["rows"]
    declared = [
        (p, b, ln.kernel.name)
        for p in CATALOG.platforms
        for b in CATALOG.backends_in_order(p)
        for ln in CATALOG.lines(p, b)
    ]
    assert [(r["platform"], r["backend"], r["kernel"]) for r in rows] == declared


@pytest.mark.parametrize("preset", sorted(CATALOG.presets))
def test_the_matrix_agrees_with_explain_on_architectures(hal, preset):
    """A kernel's architectures, as printed, are those on which explain does not refuse it by its architecture."""
    found = hal("explain", "--on", preset, "--json").json
    rows = hal("matrix", "--json", "--platform", found["platform"]).json["rows"]
    for c in found["candidates"]:
        archs = [r["archs"] for r in rows if (r["backend"], r["kernel"]) == (c["backend"], c["kernel"])]
        if c["kernel"]:
            here = any(a is None or found["device"]["arch"] in a for a in archs)
            assert here == all(r["id"] != "arch" for r in c["reasons"])


@pytest.mark.parametrize("style", ["table", "markdown", "html"])
def test_every_format_names_every_kernel(hal, style):
    out = hal("matrix", "--format", style).out
    kernels = {ln.kernel.name for p in CATALOG.platforms for b in CATALOG.backends for ln in CATALOG.lines(p, b)}
    assert {k for k in kernels if k not in out} == set()


def test_markdown_tables_are_well_formed(hal):
    for line in hal("matrix", "--format", "markdown").out.splitlines():
        assert not line or line.startswith(("## ", "| "))
    table = [
        line
        for line in hal("matrix", "--format", "markdown", "--platform", "cpu").out.splitlines()
        if line.startswith("|")
    ]
    assert len({line.count("|") - line.count("\\|") for line in table}) == 1


def test_html_is_one_closed_page_that_loads_nothing(hal):
    page = hal("matrix", "--format", "html").out
    open_tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert not {"src", "href"} & {name for name, _ in attrs}
            if tag != "meta":
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Reader().feed(page)
    assert open_tags == []
    assert "@import" not in page
    assert "url(" not in page


def test_one_platform(hal):
    found = hal("matrix", "--platform", "CPU", "--json").json
    assert found["platforms"] == ["cpu"]
    assert {r["platform"] for r in found["rows"]} == {"cpu"}


def test_a_row_that_narrows_shows_what_is_left():
    from hal.matrix import _both
    from hal.rules import Mod, OneOf

    assert _both({64, 128, 256}, range(8, 129, 8)) == "64, 128"
    assert _both({64}, None) == "64"
    assert _both(Mod(8), {64, 72}) == "64, 72"
    assert _both(Mod(8), Mod(4)) == "a multiple of 8 and a multiple of 4"
    assert _both(None, None) is None
    assert _both({*range(8, 129, 8), 192}, None) == "8..128 by 8, 192"
    assert _both({32, 64, 96, 128, 256}, range(32, 257)) == "32..128 by 32, 256"
    assert _both(OneOf(range(8, 33, 8), 192), {8, 16, 192, 256}) == "8, 16, 192"


# ---- facts and presets


def test_facts_of_this_machine_are_by_the_schema_and_can_be_read_again(hal, tmp_path):
    ran = hal("facts", "--json")
    jsonschema.validate(ran.json, schemas.machine())
    path = tmp_path / "facts.json"
    path.write_text(ran.out)
    again = hal("facts", "--on", str(path), "--json").json
    assert {**again, "origin": ""} == {**ran.json, "origin": ""}


@pytest.mark.parametrize("preset", sorted(CATALOG.presets))
def test_presets_are_by_the_schema_and_can_be_read_again(preset):
    machine = CATALOG.machine(preset)
    jsonschema.validate(machine.to_json(), schemas.machine())
    again = CATALOG.platform(machine.platform).read(Machine.from_json(json.dumps(machine.to_json())))
    assert again.to_json() == machine.to_json()


@pytest.mark.parametrize(
    "wrong",
    [
        {"platform": "cpu"},
        {"platform": "cpu", "devices": []},
        {"platform": "cpu", "devices": [{"arch": "x86", "cores": 3}]},
        {"platform": "cpu", "devices": [{"arch": "x86"}], "packages": {"flash_attn": {"state": "fine"}}},
        {"platform": "cpu", "devices": [{"arch": "x86", "memory": -1}]},
    ],
)
def test_what_the_schema_refuses_the_reader_refuses(hal, tmp_path, wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schemas.machine())
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(wrong))
    assert hal("facts", "--on", str(path)).code == 2


def test_the_facts_schema_is_published(hal):
    found = hal("facts", "--schema").json
    jsonschema.Draft202012Validator.check_schema(found)
    assert found == schemas.machine()


def test_with_and_without_change_the_facts(hal):
    found = hal("facts", "--on", "x86", "--with", "torch==2.9.1", "--json").json
    assert found["software"]["torch"] == "2.9.1"


def test_presets_lists_all(hal):
    found = hal("presets", "--json").json
    assert {p["name"] for p in found} == set(CATALOG.presets)
    out = hal("presets").out
    assert all(name in out for name in CATALOG.presets)


# ---- known defects


def test_known_bad_lists_every_owners_rules(hal):
    found = hal("known-bad", "--json").json
    assert [(b["id"], b["owner"]) for b in found] == [(b.rule.id, b.owner) for b in CATALOG.known_bad]
    out = hal("known-bad").out
    for b in found:
        assert b["citation"]
        assert b["waiver"] in out


def test_known_bad_of_one_platform_leaves_out_the_others(hal):
    found = hal("known-bad", "--platform", "npu", "--json").json
    assert {b["platform"] for b in found} <= {"npu", None}
    assert not any(set(b["kernels"]) == {"sdpa.cudnn"} for b in found)
