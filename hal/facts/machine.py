"""Device and Machine: what is known of the hardware and software.  JSON in and out; any machine can be simulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import FactError, did_you_mean
from .packages import Package, package_key
from .values import dtype_name


@dataclass(frozen=True)
class Device:
    """One accelerator.  Its facts are its own: device 0 never speaks for the others."""

    arch: str
    index: int = 0
    name: str = ""
    memory: int | None = None  # bytes
    dtypes: frozenset[str] | None = None  # those that tensors may have here
    shared_memory: int | None = None  # bytes that one block or work-group may use

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"index": self.index, "name": self.name, "arch": self.arch, "memory": self.memory}
        if self.dtypes is not None:
            out["dtypes"] = sorted(self.dtypes)
        if self.shared_memory is not None:
            out["shared_memory"] = self.shared_memory
        return out


@dataclass(frozen=True, eq=False)
class Machine:
    """A platform with its devices and its software (versions as text; an environment variable as ``env.NAME``)."""

    platform: str
    devices: tuple[Device, ...]
    software: Mapping[str, str | None] = field(default_factory=dict)
    packages: Mapping[str, Package] = field(default_factory=dict)
    origin: str = ""  # where these facts come from: detected, preset h100, file x.json

    def device(self, index: int = 0) -> Device:
        for d in self.devices:
            if d.index == index:
                return d
        has = ", ".join(str(d.index) for d in self.devices) or "none"
        raise FactError(f"device {index} was asked for; this {self.platform} machine has: {has}")

    def with_packages(self, changes: Mapping[str, Any]) -> Machine:
        """The same machine with packages set (version or Package) or taken away (``None``)."""
        new = {package_key(n): Package.of(p) for n, p in changes.items()}
        return replace(self, packages={**self.packages, **new})

    def with_software(self, **versions: str | None) -> Machine:
        return replace(self, software={**self.software, **versions})

    def to_json(self) -> dict[str, Any]:
        return {
            "platform": self.platform,
            "origin": self.origin,
            "devices": [d.to_json() for d in self.devices],
            "software": dict(self.software),
            "packages": {n: p.to_json() for n, p in sorted(self.packages.items())},
        }

    @staticmethod
    def from_json(data: Any, origin: str = "") -> Machine:
        """Reads what ``to_json`` writes.  Architectures stay as written: their platform reads them."""
        if isinstance(data, (str, bytes)):
            import json

            try:
                data = json.loads(data)
            except ValueError as e:
                raise FactError(f"{origin or 'the facts'}: no JSON: {e}") from None
        where = f"{origin}: " if origin else ""
        keys = ("platform", "devices", "software", "packages", "origin")
        _only(data, keys, where + "a machine")
        if not isinstance(data.get("origin", ""), str):
            raise FactError(f"{where}origin is {data['origin']!r}; it must be text")
        if (
            not isinstance(data.get("platform"), str)
            or not isinstance(data.get("devices"), list)
            or not data["devices"]
        ):
            raise FactError(f"{where}a machine needs a platform (text) and devices (a list of at least one)")
        devices = tuple(_device(d, i, where) for i, d in enumerate(data["devices"]))
        indices = [d.index for d in devices]
        if twice := [i for i in indices if indices.count(i) > 1]:
            raise FactError(f"{where}two devices have the index {twice[0]}")
        software, packages = data.get("software") or {}, data.get("packages") or {}
        for part, value in (("software", software), ("packages", packages)):
            if not isinstance(value, dict):
                raise FactError(f"{where}{part} is {value!r}; it must be an object of name to version")
        for name, version in software.items():
            if version is not None and not isinstance(version, str):
                raise FactError(f'{where}software {name} is {version!r}; versions are text, such as "2.13.0"')
        return Machine(
            data["platform"].lower(),
            devices,
            dict(software),
            {package_key(n): _package(n, p, where) for n, p in packages.items()},
            origin or data.get("origin", ""),
        )


def _only(data: Any, keys: Iterable[str], what: str) -> None:
    keys = tuple(keys)
    if not isinstance(data, dict):
        raise FactError(f"{what} is {type(data).__name__} {data!r:.60}; it must be an object with {', '.join(keys)}")
    for k in data:
        if k not in keys:
            raise FactError(f"{what} has the unknown key {k!r}{did_you_mean(k, keys)} (known: {', '.join(keys)})")


def _package(name: str, value: Any, where: str) -> Package:
    try:
        return Package.of(value)
    except FactError as e:
        raise FactError(f"{where}package {name}: {e}") from None


def _device(data: Any, index: int, where: str) -> Device:
    what = f"{where}device {index}"
    _only(data, ("index", "name", "arch", "memory", "dtypes", "shared_memory"), what)
    arch = data.get("arch")
    if isinstance(arch, list):  # (12, 0) as JSON
        arch = ".".join(map(str, arch))
    if not isinstance(arch, (str, int, float)) or isinstance(arch, bool):
        raise FactError(f'{what} has the arch {arch!r}; it must be text, such as "sm90" or "gfx942"')
    for k in ("index", "memory", "shared_memory"):
        if data.get(k) is not None and (not isinstance(data[k], int) or isinstance(data[k], bool) or data[k] < 0):
            raise FactError(f"{what} has {k} {data[k]!r}; it must be a whole number from 0")
    name, dtypes = data.get("name", ""), data.get("dtypes")
    if not isinstance(name, str):
        raise FactError(f"{what} has the name {name!r}; it must be text")
    if dtypes is not None and not isinstance(dtypes, list):
        raise FactError(f'{what} has dtypes {dtypes!r}; they must be a list, such as ["bfloat16"]')
    try:
        dtypes = None if dtypes is None else frozenset(map(dtype_name, dtypes))
    except FactError as e:
        raise FactError(f"{what}: {e}") from None
    return Device(
        str(arch),
        data["index"] if data.get("index") is not None else index,
        name,
        data.get("memory"),
        dtypes,
        data.get("shared_memory"),
    )
