"""hal generate: a picture or a video from a diffusers folder, with its attention through hal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from .output import Screen, screen

if TYPE_CHECKING:
    from ..integrations.generation import Generation


@click.command(short_help="Make a picture or a video.")
@click.option("--model-path", required=True, metavar="DIR", help="The folder of a saved diffusers pipeline.")
@click.option("--prompt", required=True, metavar="TEXT", help="What to show.")
@click.option("--negative-prompt", metavar="TEXT", help="What not to show.")
@click.option(
    "--out", required=True, metavar="FILE", help="A .png (a video becomes a contact sheet), .gif or .mp4 file."
)
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Denoising steps; else the pipeline's own number.")
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="The same seed gives the same picture."
)
@click.option("--num-frames", type=click.IntRange(1), metavar="N", help="Frames of a video.")
@click.option("--height", type=click.IntRange(1), metavar="N", help="Pixels.")
@click.option("--width", type=click.IntRange(1), metavar="N", help="Pixels.")
@click.option("--guidance-scale", type=float, metavar="X", help="How closely to follow the prompt.")
@click.option("--fps", type=click.IntRange(1), default=16, show_default=True, metavar="N", help="Frames a second.")
@click.option("--dtype", metavar="NAME", help="float32, bfloat16 or float16; else that of the weights.")
@click.option("--device", metavar="NAME", help="Where to run; else the active platform's device.")
@click.option("--backend", metavar="NAME", help="Require an attention backend everywhere.")
def command(fps: int, **given: Any) -> None:
    """Make a picture or a video from a diffusers pipeline, with its attention through hal, and print what ran."""
    out = screen()
    with _progress() as progress:
        from ..integrations.generation import generate

        made = generate(given.pop("model_path"), given.pop("prompt"), fps=fps, progress=progress, **_named(given))
    show(out, made)


def _named(given: dict[str, Any]) -> dict[str, Any]:
    names = {"num_frames": "frames"}
    return {names.get(k, k): x for k, x in given.items() if x is not None}


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar over the denoising steps on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("denoising"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("denoising", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(out: Screen, made: Generation) -> None:
    """Where the picture is, and the receipt of each component."""
    out.line((str(made.out), "bold"), f"  {made.frames} frame{'s' * (made.frames != 1)} in {made.seconds:.1f} s")
    out.heading("Receipt")
    rows = []
    for r in made.receipts:
        fitted = ", ".join(r.fittings)
        rows.append(
            (
                r.component,
                r.role,
                f"{r.backend} / {r.kernel}",
                str(r.runs),
                "\n".join(filter(None, (fitted, *r.warnings))),
            )
        )
    out.table(("component", "role", "backend / kernel", "runs", "fittings and warnings"), rows)
    for c in made.attachment.components.values():
        if c.unreached:
            out.item("note", (f"{c.name}: {len(c.unreached)} attention modules are not reached by hal", "yellow"))
