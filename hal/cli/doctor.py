"""hal doctor: what is here, and does it work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .facts import show_machine, show_packages
from .options import as_json
from .output import Row, Screen, emit, screen

if TYPE_CHECKING:
    from ..checkup import Checkup, Level

STATES = {"present": "green", "absent": "dim", "hidden": "yellow", "unusable": "red"}


@click.command(short_help="Examine this machine.")
@as_json
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Examine this machine: platforms, devices, packages, and every backend against the oracle.

    \b
    installed   the packages that a kernel needs are here
    imports     they import, and have what the kernel calls
    device      the kernel has code for this device
    numbers     a small real run agrees with the float64 oracle

    Exit code 0: a plain call gives right numbers on every device.
    """
    from ..checkup import examine_here

    out = screen()
    checkup = examine_here(out.progress)
    out.progress("")
    if as_json:
        emit(checkup.to_json())
    else:
        show(out, checkup)
    ctx.exit(0 if checkup.ok else 1)


def show(out: Screen, c: Checkup) -> None:
    from .. import __version__

    out.line((f"hal {__version__}", "bold"), f"  torch {c.torch.version or ''} {c.torch.state}")
    if c.torch.note or c.torch_fix:
        out.item("torch", (c.torch.note or "torch is absent", "red"))
        out.item("fix", (c.torch_fix, "bold"))
    out.heading("Platforms")
    rows: list[Row] = []
    for d in c.detections:
        name = (f"* {d.platform}" if d.platform == c.platform else f"  {d.platform}", "bold" if d.present else "")
        said = "\n".join((*d.found, *((f"fix: {d.fix}",) if d.fix else ())))
        rows.append((name, (d.state, STATES[d.state]), said))
    out.table(("platform", "state", "by what it is known"), rows)
    for p in c.problems:
        out.item("plug-in", (p, "red"))
    if c.error:
        out.item("error", (c.error, "bold red"))
    if c.machine:
        show_machine(out, c.machine)
    else:
        show_packages(out, c.packages)
    if c.checks:
        out.heading("Backends")
        out.table(("backend / kernel", "installed", "imports", "device", "numbers", "note"), _checks(c))
    out.heading("Verdict")
    for v in c.defaults:
        which = f" on {v.arch}" if v.arch else ""
        verb = "runs" if v.ok else "would run"
        what = f"{verb} {v.backend} by {v.kernel}" if v.backend else "cannot run"
        mark = ("  pass", "bold green") if v.ok else ("  FAIL", "bold red")
        out.line(mark, f"  a plain call{which} {what}: {v.note}")
    if not c.defaults:
        out.line(("  FAIL", "bold red"), "  no platform is chosen, so nothing can run")


def _checks(c: Checkup) -> list[Row]:
    rows: list[Row] = []
    several = len({x.arch for x in c.checks}) > 1
    for x in c.checks:
        name = f"{x.backend}/{x.kernel}" + (f" on {x.arch}" if several else "")
        levels = (x.installed, x.imports, x.supported, x.right)
        first = x.failed
        note = (first.note if first else x.right.note) + (f"\nfix: {x.fix}" if x.fix else "")
        rows.append((name, *map(_mark, levels), note))
    return rows


def _mark(level: Level) -> tuple[str, str]:
    return {True: ("yes", "green"), False: ("no", "red"), None: ("-", "dim")}[level.ok]
