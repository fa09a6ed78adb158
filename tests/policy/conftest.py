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
from hal import context, run


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a backend whose output is zero, as an outsider would add it."""
    from attached import install_zeros

    yield install_zeros(monkeypatch)
    run.forget()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Each test counts from zero and leaves the context as it found it."""
    hal.clear_receipts()
    yield
    assert context.current.get() is context.NOTHING and context.local.generation is context.local
