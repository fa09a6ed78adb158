"""A plan: what every layer of a pipeline decided on one machine, as ``hal lock`` saves it.  Reads and checks the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .choices import KEYS
from .errors import HalError, PolicyError, unknown
from .facts import Call, Machine
from .facts.call import KINDS

if TYPE_CHECKING:
    from .decision import Decision

FORMAT = "hal-plan-1"
# Who said something of the choice, the first first: options or arguments, HAL_ATTENTION_BACKEND, --config, HAL_SETTINGS.
SAID = ("words", "environment", "config", "settings")


@dataclass(frozen=True)
class Entry:
    """The decision of one layer for one call.  ``backend`` and ``kernel`` None: refused."""

    component: str
    role: str
    layer: int | str | None
    call: Call
    backend: str | None
    kernel: str | None
    fittings: tuple[str, ...] = ()
    source: str = "automatic"
    warnings: tuple[str, ...] = ()

    @property
    def choice(self) -> tuple[Any, ...]:
        return self.backend, self.kernel, self.fittings

    @property
    def told(self) -> str:
        by = f"{self.backend} by {self.kernel}" if self.backend else "refused"
        return by + (f" with {', '.join(self.fittings)}" if self.fittings else "")

    def to_json(self) -> dict[str, Any]:
        out = {k: getattr(self, k) for k in ("component", "role", "layer", "backend", "kernel", "source")}
        return {**out, "call": self.call.to_json(), "fittings": list(self.fittings), "warnings": list(self.warnings)}

    def __str__(self) -> str:
        where = f"{self.component or 'call'}.{self.role}"
        return where if self.layer is None else f"{where}@{self.layer}"


def entry_of(d: Decision) -> Entry:
    """A decision as an entry; which of several equal devices it ran on does not matter."""
    site = d.policy.site
    call = d.call.but(device=0, refused=(), layer=None, step=None)
    return Entry(
        site.component, site.role, site.layer, call, d.backend, d.kernel, d.fittings, d.source, d.warnings
    )  # fmt: skip


def _apart(planned: Call, found: Call) -> list[str]:
    keys = [k for k in KINDS if getattr(planned, k) != getattr(found, k)]
    return [f"{k} is {getattr(found, k)}, planned {getattr(planned, k)}" for k in keys]


@dataclass(frozen=True, eq=False)
class Plan:
    """The entries with the machine and the policy under which they were decided; ``origin`` is the file.

    ``policy``: for each of ``SAID`` its words, those of ``hal.attach``; and the ``dtype`` that was asked for.
    """

    hal: str
    machine: Machine
    policy: Mapping[str, Any] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    origin: str = ""

    def check(self, d: Decision) -> None:
        """Raises PolicyError where a decision is not the one that the plan has for its layer and call."""
        mine = entry_of(d)
        same = [e for e in self.entries if (e.component, e.role, e.layer) == (mine.component, mine.role, mine.layer)]
        where = f"plan {self.origin}: {mine}"
        if not same:
            raise PolicyError(f"{where} is not in the plan; make it anew with hal lock")
        planned = next((e for e in same if e.call == mine.call), None)
        if planned is None:
            nearest = min((_apart(e.call, mine.call) for e in same), key=len)
            raise PolicyError(
                f"{where} has no such call: {'; '.join(nearest)}; run it as it was locked, or make it anew"
            )
        if planned.choice != mine.choice:
            why = d.error or f"because {d.source}"
            raise PolicyError(
                f"{where} shall run {planned.told}, and here it would be {mine.told} ({why}); nothing has run"
            )

    def to_json(self) -> dict[str, Any]:
        entries = [e.to_json() for e in self.entries]
        out = {"hal": self.hal, "format": FORMAT, "machine": self.machine.to_json(), "policy": dict(self.policy)}
        return {**out, "entries": entries}


def is_plan(path: str | Path) -> bool:
    """Whether the file is a plan (of any format), and no facts file: it says its format."""
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and ("format" in data or "entries" in data)


def read_plan(path: str | Path) -> Plan:
    """The plan in a file.  Raises PolicyError that names the file, the place in it, and what is allowed there."""
    where = f"plan {path}"
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        raise PolicyError(f"{where} cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise PolicyError(f"{where} is no JSON: {e}") from None
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise PolicyError(
            f"{where} has the format {data.get('format')!r}; this hal reads {FORMAT!r}; make it anew with hal lock"
        )
    known = ("hal", "format", "machine", "policy", "entries")
    _only(data, known, where, required=("machine", "entries"))
    entries = _typed(data, "entries", list, where)
    try:
        machine = Machine.from_json(data["machine"], f"machine of {where}")
    except HalError as e:
        raise PolicyError(str(e)) from None
    return Plan(
        _typed(data, "hal", str, where, ""),
        machine,
        _policy(_typed(data, "policy", dict, where, {}), f"{where}, policy"),
        tuple(_entry(e, f"{where}, entry {i}") for i, e in enumerate(entries)),
        str(path),
    )


def _policy(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    _only(data, (*SAID, "dtype"), where)
    if not isinstance(data.get("dtype"), (str, type(None))):
        raise PolicyError(f"{where}: dtype is {data['dtype']!r:.60}; it must be text or null")
    for who in SAID:
        for key, value in _typed(data, who, dict, where, {}).items():
            if key not in KEYS:
                raise PolicyError(f"{where}.{who}: {unknown('key', key, KEYS)}")
            allowed = ("text", *_MORE.get(key, ()))
            if not any(_is(kind, value) for kind in allowed):
                raise PolicyError(f"{where}.{who}: {key} is {value!r:.60}; it must be {', or '.join(allowed)}")
    return data


# What a word may be besides text.
_MORE = {
    "component_attention_backends": ("a list of text", "an object of text"),
    "attention_backend_config": ("an object",),
    "forbid": ("a list of text", "an object of text"),
    "waive": ("a list of text",),
    "fit": ("a list of text",),
}


def _is(kind: str, value: Any) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if kind == "an object":
        return isinstance(value, dict)
    held = value if kind == "a list of text" else list(value.values()) if isinstance(value, dict) else None
    return isinstance(held, list) and all(isinstance(x, str) for x in held)


def _entry(data: Any, where: str) -> Entry:
    required = ("component", "role", "layer", "call", "backend", "kernel")
    _only(data, (*required, "fittings", "source", "warnings"), where, required)
    layer, backend, kernel = data["layer"], data["backend"], data["kernel"]
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, (int, str))):
        raise PolicyError(f"{where}: layer is {layer!r}; it must be a number, a name or null")
    for key, name in (("backend", backend), ("kernel", kernel)):
        if name is not None and (not isinstance(name, str) or not name):
            raise PolicyError(f"{where}: {key} is {name!r}; it must be a name, or null where the call was refused")
    if (backend is None) != (kernel is None):
        raise PolicyError(f"{where}: backend is {backend!r} and kernel is {kernel!r}; both are names, or both are null")
    given = _typed(data, "call", dict, where)
    window = given.get("window")
    if isinstance(window, list):  # as JSON has it
        given = {**given, "window": tuple(window)}
    try:
        call = Call.of(given)
    except HalError as e:
        raise PolicyError(f"{where}, call: {e}") from None
    return Entry(
        _typed(data, "component", str, where),
        _typed(data, "role", str, where),
        layer,
        call,
        backend,
        kernel,
        _texts(data, "fittings", where),
        _typed(data, "source", str, where, "automatic"),
        _texts(data, "warnings", where),
    )


_KINDS: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
_NONE: Any = object()


def _typed(data: Mapping[str, Any], key: str, kind: type, where: str, default: Any = _NONE) -> Any:
    value = data[key] if default is _NONE else data.get(key, default)
    if not isinstance(value, kind):
        raise PolicyError(f"{where}: {key} is {value!r:.60}; it must be {_KINDS[kind]}")
    return value


def _texts(data: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = _typed(data, key, list, where, [])
    if wrong := [x for x in values if not isinstance(x, str)]:
        raise PolicyError(f"{where}: {key} has {wrong[0]!r:.60}; it must be a list of text")
    return tuple(values)


def _only(data: Any, known: tuple[str, ...], where: str, required: tuple[str, ...] = ()) -> None:
    if not isinstance(data, dict):
        raise PolicyError(
            f"{where} is {type(data).__name__} {data!r:.60}; it must be an object with {', '.join(known)}"
        )
    for key in data:
        if key not in known:
            raise PolicyError(f"{where}: {unknown('key', key, known)}")
    if missing := [k for k in required if k not in data]:
        raise PolicyError(f"{where} lacks {', '.join(missing)}; an object of {', '.join(known)} is needed")
