"""What can be read of this machine without importing or initialising anything: files, environment, metadata.

Platforms detect themselves on a ``Host``; a test gives them one of its own.
"""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from functools import cached_property

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STATES = (
    "present",  # its torch build and its hardware are here
    "absent",  # nothing of it
    "hidden",  # here, and hidden by the environment
    "unusable",  # here, and something keeps it from working: the text says what
)

_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


class Detection(namedtuple("Detection", ("platform", "state", "found", "fix"), defaults=((), ""))):
    """What a platform says of this machine (one of STATES), by what it knows (sentences), and what would mend it."""

    __slots__ = ()

    @property
    def present(self) -> bool:
        return self.state == "present"


class Host:
    """Read-only view of a machine: environment, files, installed distributions."""

    def __init__(self, env: Mapping[str, str] | None = None, path: Sequence[str] | None = None, root: str = "/"):
        self.env = os.environ if env is None else env
        self.path = sys.path if path is None else path
        self.root = root
        self.system = sys.platform
        self.processor = os.uname().machine if hasattr(os, "uname") else self.env.get("PROCESSOR_ARCHITECTURE", "")

    def exists(self, path: str) -> bool:
        return os.path.exists(os.path.join(self.root, path.lstrip("/")))

    def glob(self, pattern: str) -> list[str]:
        """Paths that match.  glob is slow to import, and mostly there is nothing: so a look at the folder comes first."""
        path = os.path.join(self.root, pattern.lstrip("/"))
        plain = path[: min(path.find(c) for c in "*?[" if c in path)]
        folder, _, start = plain.rpartition("/")
        try:
            if not any(e.startswith(start) for e in os.listdir(folder or "/")):
                return []
        except OSError:
            return []
        from glob import glob

        return sorted(glob(path))

    def read(self, path: str) -> str:
        """The file's text, or the empty string."""
        try:
            with open(os.path.join(self.root, path.lstrip("/")), encoding="utf-8", errors="replace") as f:
                return f.read()
        except OSError:
            return ""

    def library(self, name: str) -> str | None:
        """Where a shared library is, by the usual folders and LD_LIBRARY_PATH; nothing is loaded."""
        for folder in (*self.env.get("LD_LIBRARY_PATH", "").split(":"), *_LIBRARIES):
            if folder and self.exists(f"{folder}/{name}"):
                return f"{folder}/{name}"
        return None

    def installed(self, module: str) -> bool:
        """Whether a top-level module or package of this name lies on the import path."""
        return any(
            os.path.isdir(os.path.join(p, module)) or os.path.isfile(os.path.join(p, module + ".py")) for p in self.path
        )

    def version(self, *distributions: str) -> str | None:
        """The version of the first of these distributions that is installed in this Python."""
        from importlib.metadata import PackageNotFoundError, version

        for name in distributions:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None

    @property
    def torch_words(self) -> str:
        """A sentence: whether torch is installed, and for which GPUs it is built."""
        build = self.torch_build
        if not build:
            return "torch is not installed"
        kinds = [
            f"{name} {build[key]}"
            for key, name in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU"))
            if build.get(key)
        ]
        return f"torch {build['version']} is built for {', '.join(kinds) or 'no NVIDIA, AMD or Intel GPU'}"

    @cached_property
    def torch_build(self) -> dict[str, str | None]:
        """The installed torch build, read from its ``version.py``: version, cuda, hip, xpu.  Empty without torch."""
        for folder in self.path:
            text = ""
            try:
                with open(os.path.join(folder, "torch", "version.py"), encoding="utf-8") as f:
                    text = f.read()
            except OSError:
                continue
            values: dict[str, str | None] = {}
            for line in text.splitlines():
                name, eq, value = line.partition("=")
                word = value.strip().strip("'\"")
                if eq and not line[:1].isspace():
                    values[name.split(":")[0].strip()] = None if word == "None" else word
            return {"version": values.get("__version__"), **{k: values.get(k) for k in ("cuda", "hip", "xpu")}}
        return {}


def visible_devices(text: str | None) -> tuple[int | str, ...] | None:
    """A visible-device variable: None where all are visible, else indices, UUIDs (``GPU-…``) and ``MIG-…`` names.

    The empty text and ``-1`` hide everything; what stands after a ``-1`` is hidden too, as in CUDA.
    """
    if text is None:
        return None
    out: list[int | str] = []
    for part in (p.strip() for p in text.split(",")):
        if not part or part.startswith("-"):
            break
        out.append(int(part) if part.isdigit() else part)
    return tuple(out)
