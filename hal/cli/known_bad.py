"""hal known-bad: the known defects of every owner, as one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import as_json, installed
from .output import Part, Row, emit, lined, screen

if TYPE_CHECKING:
    from ..catalog import KnownBad


@click.command(short_help="List the known defects.")
@click.option("--platform", "platforms", multiple=True, metavar="NAME", help="Only what concerns this platform.")
@as_json
def command(platforms: tuple[str, ...], as_json: bool) -> None:
    """List the known defects: where, since when, whose word it is, and the name by which --waive overrules each."""
    catalog = installed()
    names = {catalog.platform(p.lower()).name for p in platforms}
    kernels = {p: {line.kernel.name for b in catalog.backends for line in catalog.lines(p, b)} for p in names}

    def concerns(b: KnownBad) -> bool:
        return not names or any(b.platform in ("", p) and b.kernels & kernels[p] for p in names)

    found = [b for b in catalog.known_bad if concerns(b)]
    if as_json:
        return emit([_json(b) for b in found])
    rows: list[Row] = []
    owner = ""
    for b in found:
        if b.owner != owner:
            rows.append([(b.owner, "bold cyan")])
        rows.append(_row(b))
        owner = b.owner
    screen().table(("waiver", "effect", "where and what"), rows)


def _row(b: KnownBad) -> Row:
    r = b.rule
    where = f" where {_conditions(r.when)}" if r.when else ""
    more = f", unless {_conditions(r.require)}" if r.require else ""
    lines: list[list[Part]] = [[(f"{', '.join(sorted(b.kernels))}{where}{more}", "bold")]]
    lines += [[f"{word}{x}"] for word, x in (("", r.note), ("fix: ", r.fix)) if x]
    lines += [[(f"see: {r.citation}", "dim")]] if r.citation else []
    return f"  {r.waiver}", (r.effect, "yellow" if r.effect == "warn" else "red"), lined(lines)


def _conditions(limits: Any) -> str:
    from ..rules import show

    return ", ".join(f"{fact} is {show(limit)}" for fact, limit in limits.items())


def _json(b: KnownBad) -> dict[str, Any]:
    from ..rules import plain

    r = b.rule
    return {
        "id": r.id,
        "owner": b.owner,
        "platform": b.platform or None,
        "kernels": sorted(b.kernels),
        "when": {f: plain(x) for f, x in r.when.items()},
        "require": {f: plain(x) for f, x in r.require.items()},
        "effect": r.effect,
        "note": r.note or None,
        "fix": r.fix or None,
        "citation": r.citation or None,
        "waiver": r.waiver or None,
    }
