"""Field cases: what went wrong for real people, as literal rows that the resolver must answer.

A Case is one complaint from a public thread.  Its rows are facts and the answer; what needs a run is a test of its own,
named in ``tests``.  ``later`` says with which part of hal a case becomes a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLAIN = "dtype=bf16,head_dim=128,heads=24,batch=1,q_len=4096"
REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """Facts -> answer.  The call is PLAIN with these changes."""

    name: str
    on: str | Mapping[str, Any]  # preset, platform:arch, or the facts of a machine
    call: str
    takes: str  # backend/kernel, or REFUSED
    packages: str | Mapping[str, Any] = ""  # "name==version …", or name -> version or state
    software: Mapping[str, str | None] = field(default_factory=dict)
    ask: str = ""  # backend, or backend/kernel: required; with "prefer " in front: preferred
    words: Mapping[str, Any] = field(default_factory=dict)  # what the user says, as hal.attach takes it
    at: str = ""  # where the call is: component, or component.role
    layer: Mapping[str, Any] = field(default_factory=dict)  # what its layer says: required, why, default, supported
    waive: str = ""
    fit: str = ""
    fittings: str = ""  # exactly these
    against: Mapping[str, str] = field(default_factory=dict)  # kernel -> exactly these reason ids; "x?": depends on x
    says: tuple[str, ...] = ()  # in the warnings, notes, advice, error or what is said of the kernels in ``against``
    warns: bool | None = None  # whether there is any warning; None: not tested


@dataclass(frozen=True)
class Case:
    id: str
    symptom: str
    does: str  # what hal does about it
    rows: tuple[Row, ...] = ()
    tests: tuple[str, ...] = ()  # file::function, from the folder tests
    rows_of: str = ""  # other cases whose rows say it
    later: str = ""


from . import architectures, detection, golden, graphs, numerics, selection  # noqa: E402

ALL: tuple[Case, ...] = (
    *selection.CASES, *numerics.CASES, *architectures.CASES, *detection.CASES, *graphs.CASES, *golden.CASES,
)  # fmt: skip
