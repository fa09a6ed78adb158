"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def beside(path: Path) -> Path:
    """The file that is written first, with the suffix of ``path``; no other process or thread has the same."""
    return path.with_name(f".hal-{os.getpid()}-{threading.get_ident()}.part{path.suffix.lower()}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write; it takes the place of ``path`` where the block ends well, and is gone where it does not."""
    part = beside(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
