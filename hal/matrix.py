"""The support matrix as data, read from the declarations: one entry for every kernel that a platform has a row for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .catalog import Catalog, Line
from .platform import Platform
from .rows import TIERS
from .rules import OneOf, meeting, plain, show

DTYPE_ORDER = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


class Entry(NamedTuple):
    """A row of a platform, joined with its kernel.  ``None``: without limit."""

    platform: str
    backend: str
    kernel: str
    tier: str
    quality: str
    archs: tuple[str, ...] | None
    dtypes: tuple[str, ...]
    head_dims: str | None
    features: tuple[str, ...]
    packages: tuple[str, ...]
    citation: str

    def to_json(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in self._asdict().items()}


def entries(catalog: Catalog, platforms: Iterable[str] = ()) -> list[Entry]:
    """Of all platforms, or of those that are named; the platform's order, the better kernel first."""
    out = []
    for name in platforms or catalog.platforms:
        platform = catalog.platform(name)
        for backend in catalog.backends_in_order(name):
            out += [_entry(platform, line) for line in catalog.lines(name, backend)]
    return out


def summary(entries: Iterable[Entry]) -> dict[str, dict[str, str]]:
    """backend -> platform -> the best tier that it has there."""
    out: dict[str, dict[str, str]] = {}
    for e in entries:
        tiers = out.setdefault(e.backend, {})
        tiers[e.platform] = min(e.tier, tiers.get(e.platform, e.tier), key=TIERS.index)
    return out


def _entry(platform: Platform, line: Line) -> Entry:
    kernel, row = line.kernel, line.row
    dtypes = [d for d in platform.dtypes if _allowed(d, kernel.limits.get("dtype"), row.limits.get("dtype"))]
    packages = (n.package + (f" {n.versions}" if n.versions else "") for n in line.needs)
    return Entry(
        platform.name,
        line.backend.name,
        kernel.name,
        row.tier,
        line.backend.quality,
        None if row.on is None else tuple(sorted(row.on, key=_natural)),
        tuple(sorted(dtypes, key=DTYPE_ORDER.index)),
        _both(kernel.limits.get("head_dim"), row.limits.get("head_dim")),
        tuple(sorted(line.honours)),
        tuple(packages),
        row.cite,
    )


def _allowed(x: str, *limits: Any) -> bool:
    return all(meeting(limit)(x, {}) is not False for limit in limits if limit is not None)


def _both(a: Any, b: Any) -> str | None:
    """Two limits of one fact as a text; sets and ranges are intersected."""
    limits = [x for x in (a, b) if x is not None]
    sets = [m for m in map(_members, limits) if m is not None]
    if limits and len(sets) == len(limits):
        return _compact(frozenset.intersection(*sets))
    if len(limits) == 2 and _members(b) is not None:
        return _both(None, b)  # a row only narrows
    return " and ".join(map(show, limits)) or None


def _compact(numbers: frozenset[int]) -> str:
    """8, 16, … 128, 192 as "8..128 by 8, 192"."""
    out: list[str] = []
    rest = sorted(numbers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        n = next((i for i in range(1, len(rest)) if rest[i] - rest[i - 1] != step), len(rest))
        if n > 3:
            out.append(f"{rest[0]}..{rest[n - 1]}" + (f" by {step}" if step > 1 else ""))
        else:
            n = 1
            out.append(str(rest[0]))
        rest = rest[n:]
    return ", ".join(out)


def _members(limit: Any) -> frozenset[int] | None:
    if isinstance(limit, (set, frozenset, range)):
        return frozenset(limit)
    if isinstance(limit, int):
        return frozenset({limit})
    if isinstance(limit, OneOf):
        parts = [_members(x) for x in limit.limits]
        return None if None in parts else frozenset().union(*parts)  # type: ignore[arg-type]
    return None


def _natural(text: str) -> tuple[int, str]:
    return len(text), text
