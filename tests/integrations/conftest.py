"""Tiny pipelines, built once; a backend that returns zeros."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported

import pytest
from attached import install_zeros

import hal
from hal import run
from hal.testing import tiny

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

for library in (diffusers, transformers):
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()

_built: dict[str, Any] = {}


@pytest.fixture(params=list(tiny.PIPELINES))
def named_pipeline(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """Each tiny pipeline with its name; no test may leave it attached."""
    name = request.param
    if name not in _built:
        _built[name] = tiny.PIPELINES[name]()
    return name, _built[name]


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a backend whose output is zero, as an outsider would add it."""
    yield install_zeros(monkeypatch)
    run.forget()


@pytest.fixture(autouse=True)
def fresh_receipts() -> None:
    hal.clear_receipts()
