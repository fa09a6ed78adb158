"""Plug-ins on the command line: a stranger's backend is seen everywhere; one that fails is named and can be left out."""

from __future__ import annotations

import pytest

from hal import plugins

BACKEND = """
from hal.backend import Backend, Kernel
from hal.rows import Row

K = Kernel("stranger.k", "stranger:bind", honours={"causal", "lse"}, limits={"dtype": {"bfloat16"}, "head_dim": {64, 128}})
BACKEND = Backend("stranger", kernels=(K,), support={"cuda": (Row("stranger.k", {"sm90"}),)})
"""


@pytest.fixture
def stranger(distribution) -> dict[str, str]:
    return {
        "PYTHONPATH": str(
            distribution("hal-stranger", files={"stranger.py": BACKEND}, backends={"stranger": "stranger:BACKEND"})
        )
    }


def test_a_strangers_backend_is_in_the_matrix_and_explained(process, stranger):
    rows = process("matrix", "--json", "--platform", "cuda", **stranger).json["rows"]
    (row,) = [r for r in rows if r["backend"] == "stranger"]
    assert (row["archs"], row["dtypes"], row["head_dims"]) == (["sm90"], ["bfloat16"], "64, 128")
    found = process("explain", "--on", "h100", "--backend", "stranger", "--json", **stranger).json
    assert found["kernel"] == "stranger.k"
    refused = process(
        "explain", "--on", "a100", "--backend", "stranger", "--call", "dtype=fp16,head_dim=72", "--json", **stranger
    )
    assert refused.code == 2
    (mine,) = [c for c in refused.json["candidates"] if c["backend"] == "stranger"]
    assert [r["id"] for r in mine["reasons"]] == ["arch", "dtype", "head_dim"]


@pytest.fixture
def broken_backend(distribution) -> dict[str, str]:
    return {
        "PYTHONPATH": str(
            distribution(
                "hal-broken", files={"broken.py": "raise OSError('no libfoo.so')"}, backends={"broken": "broken:B"}
            )
        )
    }


def test_a_backend_that_fails_is_named_on_stderr_and_takes_nothing_down(process, broken_backend):
    ran = process("explain", "--on", "h100", "--json", **broken_backend)
    assert ran.code == 0
    assert ran.json["backend"]
    for said in ("'broken'", "'hal-broken'", "OSError: no libfoo.so", "--ignore-plugin broken"):
        assert said in ran.err
    assert process("explain", "--on", "h100", "--json", "--ignore-plugin", "broken", **broken_backend).err == ""


@pytest.fixture
def broken_platform(distribution) -> dict[str, str]:
    return {
        "PYTHONPATH": str(
            distribution(
                "hal-broken", files={"broken.py": "raise OSError('no libfoo.so')"}, platforms={"broken": "broken:P"}
            )
        )
    }


def test_a_platform_that_fails_is_never_a_quiet_cpu(process, broken_platform):
    """Field cases D1 and D2."""
    ran = process("explain", "--json", **broken_platform)
    assert ran.code == 2
    assert ran.out == ""
    for said in ("'broken'", "'hal-broken'", "OSError: no libfoo.so", "--ignore-plugin broken"):
        assert said in ran.err
    assert "Traceback" not in ran.err
    assert process("explain", "--json", "--ignore-plugin", "broken", **broken_platform).code == 0
    assert process("explain", "--on", "h100", "--json", **broken_platform).code == 0


def test_the_doctor_tells_of_a_platform_that_fails_with_its_place(process, broken_platform):
    """Field case D3: the trace of every platform is there all the same."""
    ran = process("doctor", "--json", **broken_platform)
    assert ran.code == 1
    assert "hal-broken" in ran.json["error"]
    assert any("broken.py:1" in p for p in ran.json["problems"])
    assert len(ran.json["detections"]) >= 7


@pytest.mark.parametrize("name", sorted(plugins.catalog().backends))
def test_going_on_without_any_one_backend_leaves_the_others(hal, name):
    """Rows and known defects of a platform may name kernels of a backend that is not here."""
    ran = hal("explain", "--on", "mi300x", "--json", "--ignore-plugin", name)
    assert name not in {c["backend"] for c in ran.json["candidates"]}
    assert ran.code == (2 if name == "torch_sdpa" else 0)
    assert hal("known-bad", "--ignore-plugin", name).code == 0


@pytest.mark.parametrize("name", sorted(set(plugins.catalog().platforms) - {"rocm"}))
def test_going_on_without_any_one_platform_leaves_the_others(hal, name):
    assert hal("explain", "--on", "mi300x", "--json", "--ignore-plugin", name).code == 0
    assert name not in hal("matrix", "--json", "--ignore-plugin", name).json["platforms"]
