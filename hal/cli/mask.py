"""hal mask: a picture of which blocks a sparse backend attends to."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ..errors import AttachError, PolicyError
from ..files import replacing
from .generate import _progress
from .options import as_json, installed, sized
from .output import emit, screen

GENERATION = ("model_path", "steps", "seed", "num_frames", "height", "width", "guidance_scale", "device", "kernel")
GRID = ("text", "text_first", "head_count")


def _three(ctx: click.Context, param: click.Parameter, given: str | None) -> tuple[int, int, int] | None:
    """Frames, rows and columns as one text."""
    if given is None:
        return None
    m = re.fullmatch(r"\s*(\d{1,6})\s*[x×,*]\s*(\d{1,6})\s*[x×,*]\s*(\d{1,6})\s*", given)
    least = 0 if param.name == "query" else 1
    if not m or min(map(int, m.groups())) < least:
        raise PolicyError(
            f"{param.opts[0]} {given}: write three numbers from {least}, frames x rows x columns: 12x24x32"
        )
    return int(m[1]), int(m[2]), int(m[3])


@click.command(short_help="Draw which blocks a sparse backend attends to.")
@click.option("--backend", required=True, metavar="NAME", help="A sparse attention backend.")
@click.option("--grid", callback=_three, metavar="FxHxW", help="Frames, rows and columns of tokens.")
@click.option(
    "--prompt", metavar="TEXT", help="In place of a grid: a call of a generation, for what depends on the data."
)
@click.option("--config", "--attention-backend-config", metavar="TEXT", help="Settings: a file, JSON, or key=value,...")
@click.option("--out", default="mask.png", show_default=True, metavar="FILE", help="The picture, a .png file.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option(
    "--step", type=click.IntRange(0), metavar="N", help="The denoising step; else the first that is not dense."
)
@click.option("--layer", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="The layer.")
@click.option(
    "--heads", type=click.IntRange(1), default=4, show_default=True, metavar="N", help="Patterns drawn at most."
)
@click.option("--query", callback=_three, metavar="FxHxW", help="A token whose tile is outlined; else the middle one.")
@click.option("--text", type=click.IntRange(0), metavar="N", help="With --grid: text tokens after the video.")
@click.option("--text-first", is_flag=True, default=None, help="With --grid: they are before the video.")
@click.option(
    "--head-count",
    type=click.IntRange(1),
    metavar="N",
    help="With --grid: heads of the layer; else those of the settings.",
)
@click.option(
    "--model-path", metavar="DIR", help="With --prompt: a saved diffusers pipeline; else the one that hal ships."
)
@click.option("--kernel", metavar="NAME", help="With --prompt: the kernel that runs.")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="With --prompt: denoising steps.")
@click.option("--seed", type=int, metavar="N", help="With --prompt: of the noise.")
@sized("With --prompt: ")
@click.option("--device", metavar="NAME", help="With --prompt: where to run.")
@as_json
def command(
    backend: str,
    grid: tuple[int, int, int] | None,
    prompt: str | None,
    config: str | None,
    out: str,
    force: bool,
    step: int | None,
    layer: int,
    heads: int,
    query: tuple[int, int, int] | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Draw which blocks of keys each block of queries attends to, by head, and what one tile of a video attends to in time
    and space.  What follows the grid alone needs no model; what depends on the data is taken from a call of a generation.

    \b
    hal mask --backend video_sparse_attn --config sparsity=0.8 --prompt "a seven drifting left" --layer 3 --step 5
    hal mask --backend sliding_tile_attn --grid 12x24x32 --config mask_strategy_file_path=s.json,skip_time_steps=2
    """
    named = {k: x for k, x in given.items() if x is not None}
    _check(grid, prompt, named)
    path = _writable(out, force)
    installed()
    from ..context import Grid
    from ..integrations import pattern
    from ..sparse import pictures

    of = pattern.backend_of(backend)
    if grid is not None:
        where = Grid(*grid, named.get("text", 0), named.get("text_first", False))
        settings = pattern.settings_of(of, config)
        seen = pattern.of_grid(backend, where, settings, step=step, layer=layer, heads=named.get("head_count"))
    else:
        frames = {"frames": named.pop("num_frames")} if "num_frames" in named else {}
        with _progress() as progress:
            seen = pattern.of_generation(
                backend, str(prompt), config, step=step, layer=layer, progress=progress, **frames, **named
            )
    found = pictures.patterns(seen, named.get("head_count"))
    order, at = seen[0].order, seen[0].position
    density = sum(p.density * len(p.heads) for p in found) / sum(len(p.heads) for p in found)
    said = _where(order, at)
    title = f"{of.name}: {density:.1%} of all pairs of query and key kept\n{said}"
    try:
        with replacing(path) as part:
            pictures.draw(found, order, part, title, query, heads)
    except OSError as e:
        raise AttachError(f"cannot write {str(path)!r}: {e}") from e
    if as_json:
        return emit(
            {
                "picture": str(path),
                "backend": of.name,
                "grid": None if order is None else list(order.grid),
                "tile": None if order is None else list(order.tile),
                "step": at.step,
                "layer": at.layer,
                "density": density,
                "patterns": [{"heads": list(p.heads), "density": p.density} for p in found],
            }
        )
    page = screen()
    page.line((str(path), "bold"))
    page.line(f"  {of.name}: {density:.1%} of all pairs of query and key are kept")
    page.line(f"  {said}")
    if all(p.density == 1 for p in found):
        page.item(
            "note", "every key is attended to there; --step and --layer name another call, and --config other settings"
        )
    rows = [(", ".join(map(str, p.heads)), f"{p.density:.1%}") for p in found]
    page.table(("heads", "kept"), rows)


def _where(order: Any, at: Any) -> str:
    here = f"step {at.step}, layer {at.layer}"
    if order is None:
        return here
    text = order.prefix + order.suffix
    return f"{_by(order.grid)} tokens{f' and {text} of text' if text else ''}, tiles of {_by(order.tile)}; {here}"


def _by(three: tuple[int, ...]) -> str:
    return " x ".join(map(str, three))


def _check(grid: Any, prompt: str | None, named: dict[str, Any]) -> None:
    """Refuse what cannot be asked for together."""
    if grid is not None and prompt is not None:
        raise PolicyError("--grid and --prompt both say what to draw; keep one")
    if grid is None and prompt is None:
        raise PolicyError(
            "say what to draw: --grid FxHxW for a grid alone, or --prompt TEXT for a call of a generation"
        )
    for key in GENERATION if prompt is None else GRID:
        if key in named:
            option = f"--{key.replace('_', '-')}"
            raise PolicyError(
                f"{option} goes with {'--prompt' if prompt is None else '--grid'}, and not with "
                f"{'--grid' if prompt is None else '--prompt'}; drop it"
            )


def _writable(out: str, force: bool) -> Path:
    from ..integrations import media

    if Path(out).suffix.lower() != ".png":
        raise AttachError(f"cannot write {out!r}: a mask is one picture; name a .png file")
    path = media.writable(out)
    media.free(path, force, "--force")
    if find_spec("matplotlib") is None:
        raise AttachError("masks are drawn by matplotlib, which is not installed; pip install matplotlib")
    return path
