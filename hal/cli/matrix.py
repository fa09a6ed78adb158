"""hal matrix: the support matrix, from the declarations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import as_json, installed
from .output import Cell, Screen, dtypes, emit, screen

if TYPE_CHECKING:
    from ..catalog import Catalog
    from ..matrix import Entry

FORMATS = ("table", "markdown", "json", "html")
COLUMNS = ("backend", "kernel", "tier", "arch", "dtypes", "head_dim", "packages")
STYLES = {"native": "green", "in-tree": "green", "portable": "", "experimental": "yellow", "no": "dim"}


@click.command(short_help="Show what is supported where.")
@click.option(
    "--format", "style", type=click.Choice(FORMATS), default="table", help="How to print it.", show_default=True
)
@click.option("--platform", "platforms", multiple=True, metavar="NAME", help="Only this platform.")
@as_json
def command(style: str, platforms: tuple[str, ...], as_json: bool) -> None:
    """Show what is supported where: each platform's rows, joined with what the kernels declare.

    \b
    native        the vendor's or a shared package's kernel
    in-tree       a kernel of ours
    portable      plain PyTorch, wherever PyTorch runs
    experimental  runs, and the vendor does not stand behind it
    """
    from ..matrix import entries, summary

    catalog = installed()
    names = [catalog.platform(p.lower()).name for p in platforms] or list(catalog.platforms)
    found = entries(catalog, names)
    if as_json or style == "json":
        return emit({"platforms": names, "summary": summary(found), "rows": [e.to_json() for e in found]})
    tables = _tables(catalog, names, found)
    if style == "table":
        _show(screen(), tables)
    else:
        click.echo(_markdown(tables) if style == "markdown" else _html(tables))


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # heading, columns, rows


def _tables(catalog: Catalog, names: list[str], found: list[Entry]) -> list[Table]:
    from ..matrix import summary

    out: list[Table] = []
    if len(names) > 1:
        rows = [(b, *(tiers.get(p, "no") for p in names)) for b, tiers in summary(found).items()]
        out.append(("Backends and platforms", ("backend", *names), rows))
    for name in names:
        title = catalog.platforms[name].title
        heading = f"{name} ({title})" if title and title.lower() != name else name
        out.append((heading, COLUMNS, [_cells(e) for e in found if e.platform == name]))
    return out


def _cells(e: Entry) -> tuple[str, ...]:
    return (
        e.backend if e.quality == "exact" else f"{e.backend} ({e.quality})",
        e.kernel,
        e.tier,
        "all" if e.archs is None else " ".join(e.archs),
        dtypes(e.dtypes),
        e.head_dims or "any",
        "; ".join(e.packages),
    )


def _show(out: Screen, tables: list[Table]) -> None:
    for heading, columns, rows in tables:
        out.heading(heading)
        body: list[list[Cell]] = []
        if columns == COLUMNS:  # narrower: a backend's name stands above its kernels
            columns = ("kernel", *columns[2:])
            backend = ""
            for row in rows:
                if row[0] != backend:
                    body.append([(row[0], "bold")])
                body.append(["  " + row[1], *map(_styled, row[2:])])
                backend = row[0]
        else:
            body = [[(row[0], "bold"), *map(_styled, row[1:])] for row in rows]
        out.table(columns, body)


def _styled(cell: str) -> Cell:
    return (cell, STYLES[cell]) if cell in STYLES else cell


def _markdown(tables: list[Table]) -> str:
    out = []
    for heading, columns, rows in tables:
        out += [f"## {heading}", "", _md_row(columns), _md_row(["---"] * len(columns)), *map(_md_row, rows), ""]
    return "\n".join(out)


def _md_row(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hal support matrix</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }}
h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ border-bottom: 1px solid #8884; padding: .35rem .7rem .35rem 0; text-align: left; vertical-align: top; }}
th {{ font-weight: 600; opacity: .7; }}
.native, .in-tree {{ color: #1a7f37; }}
.experimental {{ color: #b35900; }}
.no {{ opacity: .45; }}
</style>
</head>
<body>
<h1>hal {version}: what is supported where</h1>
{body}
</body>
</html>"""


def _html(tables: list[Table]) -> str:
    from html import escape

    from .. import __version__

    parts = []
    for heading, columns, rows in tables:
        head = "".join(f"<th>{escape(c)}</th>" for c in columns)
        lines = [f"<h2>{escape(heading)}</h2>", f"<div><table>\n<tr>{head}</tr>"]
        for row in rows:
            cells = (f'<td class="{c}">{c}</td>' if c in STYLES else f"<td>{escape(c)}</td>" for c in row)
            lines.append(f"<tr>{''.join(cells)}</tr>")
        parts.append("\n".join([*lines, "</table></div>"]))
    return _PAGE.format(version=__version__, body="\n".join(parts))
