"""What the tests of policy share: tiny pipelines, a backend of zeros, and a process in which nothing was said."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported
sys.path.append(str(Path(__file__).parents[1] / "integrations"))  # sample, ZEROS

import pytest

import hal
from hal import context, plugins, run
from hal.catalog import Catalog


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a backend whose output is zero, as an outsider would add it."""
    from attached import ZEROS

    catalog = plugins.catalog(frozenset())
    wider = Catalog(catalog.platforms, {**catalog.backends, "zeros": ZEROS}, catalog.problems)
    monkeypatch.setattr(plugins, "catalog", lambda ignore=frozenset(): wider)
    yield "zeros"
    run.forget()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Each test counts from zero and leaves the context as it found it."""
    hal.clear_receipts()
    yield
    assert context.current.get() is context.NOTHING and context.local.generation is context.local
