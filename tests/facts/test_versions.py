"""Versions are PEP 440 and never text (field cases E7, E8; golden case 25)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import DeclarationError
from hal.facts import ABSENT
from hal.rules import Versions, check, compiled, within

TABLE = [
    # a set, a version, whether it is in
    (">=2.10", "2.9", False),
    (">=2.9", "2.10", True),
    ("<2.9", "2.10", False),
    (">=2.8,<3", "2.8.3+cu13torch2.9", True),
    (">=2.8,<3", "2.8.3+cu130torch2.9cxx11abiTRUE", True),
    ("<2.8.3", "2.8.3+cu13torch2.9", False),
    ("==2.8.3", "2.8.3+cu13torch2.9", True),
    (">2.8.3", "2.8.3+cu13torch2.9", False),
    # a pre-release counts as its release, unless the set itself names a pre-release
    (">=2.12", "2.12.0a0+nv26", True),
    ("<2.12", "2.12.0a0+nv26", False),
    (">=2.9,<2.10", "2.9.0.dev20250901+cu130", True),
    (">=4", "4.0.0b22", True),
    ("<4", "4.0.0b22", False),
    (">=4.0.0b20", "4.0.0b22", True),
    (">=4.0.0b20", "4.0.0b5", False),
    (">=4.0.0b20", "4.0.0", True),
    ("<4.0.0b10", "4.0.0b5", True),
    (">=3.0.0b1,<4", "3.0.0b1", True),
    (">=3.0.0b1,<4", "3.0.0b1+cu128", True),
    ("==3.0.0b1", "3.0.0b1", True),
    ("==3.0.0b1", "3.0.0", False),
    # a post-release is newer than its release
    (">=2.8.3.post1", "2.8.3.post1", True),
    (">=2.8.3.post1", "2.8.3", False),
    (">=2.8.3", "2.8.3.post1", True),
    ("==2.8.3", "2.8.3.post1", False),
    ("<2.8.3.post2", "2.8.3.post1", True),
    (">=0.1.7.post2", "0.1.7.post2.dev18+g1234", True),
    # the other forms of a set
    ("~=2.6", "2.9.1", True),
    ("~=2.6", "3.0", False),
    ("==2.9.*", "2.9.4+cpu", True),
    ("!=2.9.*", "2.9.4", False),
    ("", "anything at all", True),
    # what is no PEP 440 version cannot be compared
    (">=2", "nightly", None),
    (">=2", "2.9-rocm!x", None),
]


@pytest.mark.parametrize("text, version, answer", TABLE, ids=[f"{v} in {t or 'any'}" for t, v, _ in TABLE])
def test_a_version_is_in_a_set_by_its_order(text, version, answer):
    assert within(text, version) is answer


def test_a_set_that_is_none_is_the_declarations_fault():
    with pytest.raises(DeclarationError, match="'2.6 or so' is no PEP 440 version set; write, say, >=2.6,<3"):
        within("2.6 or so", "2.9")


releases = st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 30))


@given(releases, releases, st.sampled_from(("", "+cu130", "+cpu.torch2.9")))
def test_releases_are_ordered_by_their_numbers(a, b, local):
    a_text, b_text = (".".join(map(str, x)) for x in (a, b))
    assert within(f">={b_text}", a_text + local) is (a >= b)
    assert within(f"<{b_text}", a_text + local) is (a < b)


@pytest.mark.parametrize("observed, verdict", [("2.9", True), ("2.11", False), (None, None), (ABSENT, False)])
def test_an_unknown_version_leaves_it_open_and_an_absent_one_does_not(observed, verdict):
    out = []
    check(compiled({"pkg.x": Versions("<2.10")}), {"pkg.x": observed}, out)
    assert [r.verdict for r in out] == ([] if verdict is True else [verdict])
