"""hal generate: a picture or a video from a diffusers folder, with its attention through hal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ..choices import BACKEND
from ..errors import PolicyError, did_you_mean
from . import options
from .options import choosing, installed
from .output import Screen, screen

if TYPE_CHECKING:
    from ..integrations.generation import Generation

RUNNERS = ("auto", "hal", "diffusers")


def _runner(ctx: click.Context, param: click.Parameter, given: str) -> str:
    plain = given.strip().lower()
    if plain in RUNNERS:
        return "diffusers" if plain == "diffusers" else "hal"
    catalog = installed()
    known = given.strip().lower().replace("-", "_")
    own = known in catalog.backends or known in catalog.aliases
    hint = f"; an attention backend is --attention-backend {given}" if own else did_you_mean(given, RUNNERS)
    raise PolicyError(f"--backend {given}: it says who runs the attention, {', '.join(RUNNERS)}{hint}")


def _degree(ctx: click.Context, param: click.Parameter, given: int) -> None:
    if given > 1:
        raise PolicyError(
            f"{param.opts[0]} {given}: this release runs on one device, so 1 is allowed; the parallel layers come later"
        )


def said(key: str, value: Any) -> str:
    named = {"runtime": "backend", "videos": "num_videos", "num_inference_steps": "steps"}
    return options.said(named.get(key, key), value)


def warning(text: str) -> None:
    click.echo(f"hal: warning: {text}", err=True)


@click.command(short_help="Make a picture or a video.")
@click.option(
    "--model-path",
    metavar="DIR",
    help="The folder of a saved diffusers pipeline; else the small text-to-video model that hal ships.",
)
@click.option(
    "--model-variant", metavar="NAME", help="The variant of its weights (fp16), or a pipeline's folder in it."
)
@click.option("--prompt", required=True, metavar="TEXT", help="What to show.")
@click.option("--negative-prompt", metavar="TEXT", help="What not to show.")
@click.option("--out", metavar="FILE", help="A .png (a video becomes a contact sheet), .gif or .mp4 file.")
@click.option("--save-output", is_flag=True, help="Without --out: a new name in the folder outputs.")
@click.option("--force", is_flag=True, help="Replace the file of --out where there is one.")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Denoising steps; else the pipeline's own number.")
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="The same seed gives the same picture."
)
@click.option(
    "--num-videos",
    "videos",
    type=click.IntRange(1),
    metavar="N",
    help="So many, from --seed, --seed + 1, ...; each has its seed at the end of its name.",
)
@options.sized()
@click.option("--fps", type=click.IntRange(1), default=16, show_default=True, metavar="N", help="Frames a second.")
@click.option("--dtype", metavar="NAME", help="float32, bfloat16 or float16; else that of the weights.")
@click.option("--device", metavar="NAME", help="Where to run; else the active platform's device.")
@click.option(
    "--backend",
    "runtime",
    default="auto",
    callback=_runner,
    metavar="auto|hal|diffusers",
    help="Who runs the attention: hal (auto), or diffusers by its own --attention-backend (flash, sage, native, ...).",
)
@choosing
@click.option(
    "--attention-backend-override", metavar="NAME", help="This request's own choice, in the denoising steps only."
)
@click.option(
    "--plan", metavar="FILE", help="Run what hal lock saved in this file, and nothing else; it says the choice."
)
@click.option("--compile", is_flag=True, help="Put the denoiser under torch.compile; its first step takes much longer.")
@click.option("--cuda-graph", is_flag=True, help="Compile, and capture graphs, where the device can.")
@click.option("--ring-degree", type=click.IntRange(1), default=1, metavar="N", expose_value=False, callback=_degree)
@click.option("--ulysses-degree", type=click.IntRange(1), default=1, metavar="N", expose_value=False, callback=_degree)
def command(out: str | None, save_output: bool, words: dict[str, Any], **given: Any) -> None:
    """Make a picture or a video from a diffusers pipeline, with its attention through hal, and print what ran.

    \b
    hal generate --prompt "a seven drifting left" --out seven.gif
    hal generate --model-path DIR --prompt "a cat" --out cat.png
    hal generate --model-path DIR --prompt "a cat" --save-output --attention-backend torch_sdpa
    hal generate --model-path DIR --prompt "a cat" --save-output --component-attention-backends text_encoder=torch_sdpa
    hal generate --model-path DIR --prompt "a cat" --save-output --backend diffusers --attention-backend _native_math
    """
    if out is None and not save_output:
        raise click.UsageError("say where to save it: --out FILE, or --save-output for a new name")
    installed()
    if given["runtime"] == "diffusers" and os.environ.get(BACKEND):
        warning(f"{BACKEND} is for hal, and diffusers runs this; it is not used")
    with _progress() as progress:
        from ..integrations.generation import generate

        named = {("frames" if k == "num_frames" else k): x for k, x in given.items() if x is not None}
        made = generate(
            named.pop("model_path", None),
            named.pop("prompt"),
            out=out,
            said=said,
            progress=progress,
            warn=warning,
            **named,
            **words,
        )
    show(screen(), made)


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar over the denoising steps on a terminal, from done, all and a name; nothing elsewhere."""
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

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=None)

        def told(done: int, total: int, name: str = "denoising") -> None:
            if done == 0:
                bar.reset(task, description=name, total=total or None)
            else:
                bar.update(task, completed=done, total=total)

        yield told


def show(out: Screen, made: Generation) -> None:
    """Where the picture is, and the receipt of each component."""
    frames, several = f"{made.frames} frame{'s' * (made.frames != 1)}", len(made.files) > 1
    for file in made.files:
        out.line((str(file), "bold"), "" if several else f"  {frames} in {made.seconds:.1f} s")
    if several:
        out.line(f"{len(made.files)} files of {frames} in {made.seconds:.1f} s")
    out.heading("Receipt")
    if made.attachment is None:
        _show_diffusers(out, made)
    else:
        rows = []
        for r in made.receipts:
            notes = [*([f"with {', '.join(r.fittings)}"] if r.fittings else []), *r.notes, *r.warnings]
            rows.append((r.component, r.role, f"{r.backend} / {r.kernel}", str(r.runs), r.source, "\n".join(notes)))
        columns = ("component", "role", "backend / kernel", "runs", "asked for by", "notes and warnings")
        noted = len(columns) if any(row[-1] for row in rows) else -1  # an empty column takes the others' width
        out.table(columns[:noted], [row[:noted] for row in rows])
        for c in made.attachment.components.values():
            if c.unreached:
                out.item("note", (f"{c.name}: {len(c.unreached)} attention modules are not reached by hal", "yellow"))
    if made.compiled:
        runs = "" if made.attachment is None else ", and a run there is a trace of its graph"
        out.item("note", f"{', '.join(made.compiled)}: under torch.compile; the time has its compiling in it{runs}")


def _show_diffusers(out: Screen, made: Generation) -> None:
    out.line("  diffusers ran the attention; hal was not attached, and counted nothing")
    if not made.passed:
        return out.line("  no backend was asked for: diffusers' own choice")
    rows = [(p.component, p.backend, f"{p.taking} of {p.layers}", p.source) for p in made.passed]
    out.table(("component", "backend of diffusers", "attention layers", "asked for by"), rows)
