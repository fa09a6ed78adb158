"""What the tests of these platforms share: a catalog of them, decisions from text, hosts made of a folder."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from hal.backends.fa import BACKEND as FA
from hal.backends.torch_sdpa import BACKEND as TORCH_SDPA
from hal.catalog import Catalog
from hal.decision import Decision
from hal.facts import Call
from hal.host import Host
from hal.platforms.cpu import PLATFORM as CPU
from hal.platforms.mps import PLATFORM as MPS
from hal.platforms.musa import PLATFORM as MUSA
from hal.platforms.npu import PLATFORM as NPU
from hal.platforms.xpu import PLATFORM as XPU
from hal.policy import Policy, Request
from hal.resolver import resolve

PLAIN = "dtype=bf16,head_dim=128,heads=24,batch=1,q_len=4096"


@lru_cache(1)
def catalog() -> Catalog:
    return Catalog({p.name: p for p in (CPU, MPS, MUSA, NPU, XPU)}, {b.name: b for b in (FA, TORCH_SDPA)})


def decide(
    on: str,
    call: str = "",
    packages: str = "",
    backend: str = "",
    kernel: str = "",
    waive: str = "",
    fit: str = "",
    **software: str,
) -> Decision:
    """The decision for a plain call with these changes, on a preset with these packages (``name==version …``)."""
    c = catalog()
    given = dict(p.split("==") for p in packages.split())
    machine = c.machine(on).with_packages({c.package(n): v for n, v in given.items()}).with_software(**software)
    requests = (Request(backend, kernel=kernel),) if backend or kernel else ()
    return resolve(
        Call.parse([PLAIN, call]), machine, c, Policy(requests, frozenset(waive.split()), frozenset(fit.split()))
    )


def took(d: Decision) -> str:
    return f"{d.backend}/{d.kernel}" if d.chosen else "nothing"


def reasons(d: Decision, kernel: str) -> set[str]:
    """The ids of every reason against a kernel, over all of its rows."""
    found = [c for c in d.candidates if c.kernel and c.kernel.name == kernel]
    assert found, f"{kernel} is no candidate here"
    return {r.id for c in found for r in c.reasons}


def host(
    root: Path,
    files: dict[str, str] | None = None,
    torch: dict[str, str] | None = None,
    modules: tuple[str, ...] = (),
    **env: str,
) -> Host:
    """A machine that is a folder: these files, this torch build (None: no torch), these importable packages."""
    site = root / "site"
    for path, text in (files or {}).items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    for name in modules:
        (site / name).mkdir(parents=True)
    if torch is not None:
        (site / "torch").mkdir(parents=True)
        values: dict[str, Any] = {"__version__": "2.13.0", "cuda": None, "hip": None, "xpu": None, **torch}
        (site / "torch" / "version.py").write_text("".join(f"{k} = {v!r}\n" for k, v in values.items()))
    h = Host(env, [str(site)], str(root))
    h.system, h.processor = "linux", "x86_64"
    return h
