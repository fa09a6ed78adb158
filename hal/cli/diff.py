"""hal diff: what two machines, releases or plans decide otherwise, and why."""

from __future__ import annotations

from os.path import isfile
from typing import TYPE_CHECKING, Any

import click

from ..errors import PolicyError
from .options import as_json, installed, machine_of
from .output import Cell, Part, Row, Screen, emit, lined, screen

if TYPE_CHECKING:
    from ..catalog import Catalog
    from ..difference import Choice, Difference, Differing, Question, Side
    from ..facts import Machine
    from ..plan import Plan
    from ..policy import Request

MOST = 8  # names of calls that are told for one difference


@click.command(short_help="Tell what two machines, releases or plans decide otherwise.")
@click.argument("a", metavar="A", required=False)
@click.argument("b", metavar="B", required=False)
@click.option("--call", "calls", multiple=True, metavar="KEY=VALUE,...", help="A call to compare; may be repeated.")
@as_json
@click.option("--schema", is_flag=True, help="Print the JSON schema of --json.")
@click.pass_context
def command(
    ctx: click.Context, a: str | None, b: str | None, calls: tuple[str, ...], as_json: bool, schema: bool
) -> None:
    """Tell what two machines, releases or plans decide otherwise, and why: the reasons, and the facts behind them.

    A and B are a preset, platform:arch, a facts file, or a plan of hal lock.  Changes to a machine follow after commas:
    NAME==VERSION adds a package or sets torch, cudnn or triton; -NAME takes a package away.

    \b
    hal diff h100 b200
    hal diff h100,torch==2.10,flash-attn==2.8.3 h100,torch==2.13
    hal diff plan.json mi300x
    hal diff worker.json worker.json,-flash-attn --call head_dim=72 --call mask=bool,kv_len=77

    Without --call, calls that are typical of diffusion transformers are compared; of a plan, its own.
    Exit code 0: every call is decided alike.  1: some are not.  2: an error.
    """
    if schema:
        from ..schemas import difference

        return emit(difference())
    if a is None or b is None:
        raise click.UsageError(
            f"two sides are compared, {'one' if a else 'none'} is given; write, say, hal diff h100 b200"
        )
    found = _compared(installed(), a, b, calls)
    if as_json:
        emit(found.to_json())
    else:
        show(screen(), found)
    ctx.exit(1 if found.calls else 0)


def _compared(catalog: Catalog, a: str, b: str, calls: tuple[str, ...]) -> Difference:
    from .. import difference
    from ..plan import Plan

    given = {text: _given(catalog, text) for text in (a, b)}
    plans = [x for x in given.values() if isinstance(x, Plan)]
    if plans and calls:
        raise PolicyError(f"--call {calls[0]} was given, and {plans[0].origin} is a plan; a plan has its own calls")
    asked: dict[Question, Request | None]
    if plans:
        asked = difference.asked(plans[0])
    else:
        asked = difference.questions(_calls(calls)) if calls else difference.typical()

    def side(text: str) -> Side:
        x = given[text]
        if isinstance(x, Plan):
            return difference.planned(text, x, catalog)
        return difference.decided(text, x, catalog, asked)

    return difference.compare(side(a), side(b))


def _given(catalog: Catalog, text: str) -> Machine | Plan:
    """The plan or machine that a text names, with its changes.  A comma is in no name of a machine, package or version."""
    from ..plan import is_plan, read_plan

    base, *rest = [text] if isfile(text) else text.split(",")
    base, changes = base.strip(), [c.strip() for c in rest if c.strip()]
    if isfile(base) and is_plan(base):
        if changes:
            raise PolicyError(f"{base} is a plan, and {changes[0]!r} a change to a machine; a plan is what was decided")
        return read_plan(base)
    if "==" in base:
        raise PolicyError(f"{text!r}: changes follow the machine after commas; write, say, h100,torch==2.10")
    gone = tuple(c[1:].strip() for c in changes if c.startswith("-"))
    added = tuple(c for c in changes if not c.startswith("-"))
    for c in (*(x for x in added if "==" not in x), *(f"-{x}" for x in gone if "==" in x or not x)):
        raise PolicyError(
            f"{c!r} in {text!r} is no change to a machine; NAME==VERSION adds a package or sets software, -NAME takes a "
            f"package away: {base},flash-attn==2.8.3 or {base},-flash-attn"
        )
    return machine_of(catalog, base, added, gone)


def _calls(texts: tuple[str, ...]) -> dict[str, Any]:
    from ..facts import Call
    from .explain import TYPICAL

    def keys(text: str) -> set[str]:
        return {p.partition("=")[0].strip().lower().replace("-", "_") for p in text.split(",")}

    return {t: Call.parse(t, {k: x for k, x in TYPICAL.items() if k not in keys(t)}) for t in texts}


# ---- for people


def show(out: Screen, d: Difference) -> None:
    for letter, side in (("A", d.a), ("B", d.b)):
        device = side.machine.devices[0]
        where = " ".join(x for x in (side.machine.platform, device.arch, device.name) if x)
        out.line((letter, "bold"), f"  {side.name}", (f"  {where}", "dim"))
    if d.facts:
        out.heading("Facts that differ")
        out.table(("fact", "A", "B"), [(f.fact, _value(f.fact, f.a), _value(f.fact, f.b)) for f in d.facts])
    if not d.calls:
        return out.line(("\nno difference", "bold green"), f"  all {d.compared} calls are decided alike")
    out.heading(f"Calls that are decided otherwise ({len(d.calls)} of {d.compared})")
    rows: dict[Any, list[Differing]] = {}
    for c in d.calls:  # many calls, such as those of a model's layers, differ in one way
        rows.setdefault((str(c.a), str(c.b), c.why), []).append(c)
    out.table(("call", "A", "B", "why"), [_row(many) for many in rows.values()])


def _row(many: list[Differing]) -> Row:
    c = many[0]
    names = list(dict.fromkeys(c.question.name for c in many))
    shown, more = (names, 0) if len(names) <= MOST else (names[: MOST - 1], len(names) - MOST + 1)
    told: list[list[Part]] = [[(n, "bold")] for n in shown]
    told += [[(f"and {more} more", "dim")]] if more else []
    lines: list[list[Part]] = []
    for w in c.why:
        lines.append([(f"{w.kernel} on {w.on.upper()}", "bold")])
        for r in w.causes:
            lines.append(["  ", (r.id, "yellow"), f"  {r.message}"])
            lines += [[f"    fix: {r.fix}"]] if r.fix else []
            lines += [[(f"    see: {r.citation}", "dim")]] if r.citation else []
    if c.a is None or c.b is None:
        lines.append([f"only {'B' if c.a is None else 'A'} has this call"])
    return lined(told), _choice(c.a), _choice(c.b), lined(lines)


def _choice(c: Choice | None) -> Cell:
    if c is None:
        return "-", "dim"
    return str(c), "green" if c.backend else "red"


def _value(fact: str, x: Any) -> Cell:
    if x is None:
        return "unknown", "dim"
    if fact.endswith("memory"):
        return f"{x / 2**30:.1f} GiB" if x >= 2**30 else f"{x / 2**10:.0f} KiB"
    return " ".join(x) if isinstance(x, list) else str(x)
