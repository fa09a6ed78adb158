"""Tiny pipelines, built once; a backend that returns zeros."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported

import pytest
from attached import ZEROS

import hal
from hal import plugins, run
from hal.catalog import Catalog
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
    catalog = plugins.catalog(frozenset())
    wider = Catalog(catalog.platforms, {**catalog.backends, "zeros": ZEROS}, catalog.problems)
    monkeypatch.setattr(plugins, "catalog", lambda ignore=frozenset(): wider)
    yield "zeros"
    run.forget()


@pytest.fixture(autouse=True)
def fresh_receipts() -> None:
    hal.clear_receipts()
