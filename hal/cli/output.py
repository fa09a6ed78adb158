"""Printing: tables and colours by rich on a terminal, plain aligned text elsewhere.  rich is imported only where it draws."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

Part = str | tuple[str, str]  # text, or text with a style of rich
Cell = Part | list[Part]
Row = Sequence[Cell]


def emit(data: Any) -> None:
    """JSON on stdout."""
    click.echo(json.dumps(data, indent=2))


def dtypes(names: Iterable[str]) -> str:
    """The short names, the smaller first: fp16 bf16 fp32."""
    from ..matrix import DTYPE_ORDER

    return " ".join(sorted(names, key=DTYPE_ORDER.index)).replace("bfloat", "bf").replace("float", "fp")


def lined(lines: Iterable[list[Part]]) -> list[Part]:
    """Lines as one cell."""
    out: list[Part] = []
    for line in lines:
        out += ["\n", *line] if out else line
    return out


def on_terminal() -> bool:
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


class Screen:
    """Headings, lines and tables; this one writes plain text."""

    fancy = False

    def heading(self, text: str) -> None:
        click.echo(f"\n{text}")

    def line(self, *parts: Part) -> None:
        click.echo(_text(list(parts)))

    def item(self, name: str, *parts: Part) -> None:
        """A name with what is said of it; a dash for an item of a list."""
        click.echo(f"  {name.ljust(0 if name == '-' else 8)} {_text(list(parts))}")

    def progress(self, text: str) -> None:
        """What is being done, on a terminal until the next is said; empty: nothing more."""

    def table(self, columns: Sequence[str], rows: Iterable[Row]) -> None:
        """A row may be short: one cell alone is a heading of those below it."""
        cells = [[_text(c) for c in row] + [""] * (len(columns) - len(row)) for row in (columns, *rows)]
        split = [[c.split("\n") for c in row] for row in cells]
        widths = [max(len(part) for row in split for part in row[i]) for i in range(len(columns))]
        for row in split:
            for n in range(max(map(len, row))):
                parts = [(c[n] if n < len(c) else "").ljust(w) for c, w in zip(row, widths)]
                click.echo(("  " + "  ".join(parts)).rstrip())


class RichScreen(Screen):
    fancy = True

    def __init__(self) -> None:
        from rich.console import Console

        self.console: Console = Console(highlight=False)

    def progress(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}" if text else "\r\x1b[K")
            sys.stderr.flush()

    def heading(self, text: str) -> None:
        self.console.print()
        self.console.print(_styled((text, "bold cyan")))

    def line(self, *parts: Part) -> None:
        self.console.print(_styled(list(parts)))

    def item(self, name: str, *parts: Part) -> None:
        from rich.padding import Padding
        from rich.table import Table

        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=1 if name == "-" else 8, style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(name, _styled(list(parts)))
        self.console.print(Padding(grid, (0, 0, 0, 2)))

    def table(self, columns: Sequence[str], rows: Iterable[Row]) -> None:
        from rich import box
        from rich.padding import Padding
        from rich.table import Table

        table = Table(
            box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", show_edge=False, padding=(0, 1, 0, 0)
        )
        for i, name in enumerate(columns):
            table.add_column(name, overflow="fold", no_wrap=i == 0)
        for row in rows:
            table.add_row(*map(_styled, row))
        self.console.print(Padding(table, (0, 0, 0, 2)))


def _text(cell: Cell) -> str:
    parts = cell if isinstance(cell, list) else [cell]
    return "".join(p if isinstance(p, str) else p[0] for p in parts)


def _styled(cell: Cell) -> Any:
    from rich.text import Text

    return Text.assemble(*(cell if isinstance(cell, list) else [cell]))


def screen() -> Screen:
    """rich on a terminal; plain text in a pipe, in a file, and on a terminal that can do no more."""
    return RichScreen() if on_terminal() else Screen()
