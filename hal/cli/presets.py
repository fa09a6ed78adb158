"""hal presets: the machines that can be simulated by name."""

from __future__ import annotations

import click

from .options import as_json, installed
from .output import Row, emit, screen


@click.command(short_help="List the machines that can be simulated.")
@click.option("--platform", "platforms", multiple=True, metavar="NAME", help="Only this platform.")
@as_json
def command(platforms: tuple[str, ...], as_json: bool) -> None:
    """List the machines that can be simulated by name: hal explain --on NAME."""
    catalog = installed()
    names = [catalog.platform(p.lower()).name for p in platforms] or list(catalog.platforms)
    machines = {n: catalog.machine(n) for p in names for n in sorted(catalog.platforms[p].presets)}
    if as_json:
        return emit([{"name": n, **m.to_json()} for n, m in machines.items()])
    rows: list[Row] = []
    for name, m in machines.items():
        d = m.devices[0]
        memory = f"{d.memory / 2**30:.0f} GiB" if d.memory else ""
        family = catalog.platforms[m.platform].family(d.arch)
        rows.append(((name, "bold"), m.platform, d.arch, family, d.name, memory, m.software.get("torch") or ""))
    screen().table(("preset", "platform", "arch", "family", "device", "memory", "torch"), rows)
