"""hal facts: a machine's facts, as they can be explained and replayed elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import as_json, installed, machine_of, on_machine
from .output import Row, Screen, dtypes, emit, screen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..facts import Machine, Package


@click.command(short_help="Show this machine's facts.")
@on_machine
@as_json
@click.option("--schema", is_flag=True, help="Print the JSON schema of --json.")
def command(on: str | None, with_: tuple[str, ...], without: tuple[str, ...], as_json: bool, schema: bool) -> None:
    """Show this machine's facts, or a simulated machine's.

    \b
    hal facts --json > FACTS.json        here
    hal explain --on FACTS.json          anywhere
    """
    if schema:
        from ..schemas import machine as machine_schema

        return emit(machine_schema())
    machine = machine_of(installed(), on, with_, without)
    if as_json:
        return emit(machine.to_json())
    out = screen()
    out.line((machine.platform, "bold"), (f"  {machine.origin}", "dim"))
    show_machine(out, machine)


def show_machine(out: Screen, m: Machine) -> None:
    out.heading("Devices")
    columns = ("index", "arch", "name", "memory", "dtypes")
    rows: list[Row] = []
    for d in m.devices:
        memory = f"{d.memory / 2**30:.1f} GiB" if d.memory else "unknown"
        takes = dtypes(d.dtypes) if d.dtypes is not None else "unknown"
        rows.append((str(d.index), (d.arch, "bold"), d.name, memory, takes))
    out.table(columns, rows)
    out.heading("Software")
    out.table(("name", "version"), [(n, v or ("unknown", "dim")) for n, v in m.software.items()])
    show_packages(out, m.packages)


STATES = {"usable": "green", "found": "", "absent": "dim"}


def show_packages(out: Screen, packages: Mapping[str, Package]) -> None:
    out.heading("Packages")
    rows: list[Row] = []
    for name, p in sorted((n, p) for n, p in packages.items() if ":" not in n):
        rows.append((name, (p.state.replace("_", " "), STATES.get(p.state, "red")), p.version or "", p.note))
    if rows:
        out.table(("package", "state", "version", "note"), rows)
    else:
        out.line("  no kernel needs one")
