"""hal compare: one prompt and seed under several backends, as one picture and one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .generate import _progress, said, warning
from .options import as_json, installed, sized
from .output import emit, screen


@click.command(short_help="Compare backends on one prompt.")
@click.option(
    "--backends", multiple=True, metavar="NAME,...", help="What is compared; the first, exact, is the measure."
)
@click.option(
    "--variant", "variants", multiple=True, metavar="NAME:SETTINGS", help="A backend with settings; may be repeated."
)
@click.option(
    "--model-path", metavar="DIR", help="The folder of a saved diffusers pipeline; else the one that hal ships."
)
@click.option("--prompt", required=True, metavar="TEXT", help="What to show.")
@click.option("--out", default="compare.png", show_default=True, metavar="FILE", help="The picture, a .png file.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--steps", "num_inference_steps", type=click.IntRange(1), metavar="N", help="Denoising steps.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="The noise that all begin with.")
@sized()
@click.option("--device", metavar="NAME", help="Where to run; else the active platform's device.")
@as_json
def command(
    backends: tuple[str, ...],
    variants: tuple[str, ...],
    model_path: str | None,
    out: str,
    force: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Run one prompt and seed under several backends, draw them side by side, and measure each against the first.

    kept: the share of all pairs of query and key that self-attention computed.  rel. L1, cosine, PSNR (dB), SSIM: of the
    frames, against the first variant's.  digits: how many of the digits asked for a judge finds; others do not count.

    \b
    hal compare --backends torch_sdpa,fa --prompt "a seven drifting left"
    hal compare --backends torch_sdpa --variant video_sparse_attn:sparsity=0.5 --prompt "a seven drifting left"
    """
    from ..integrations import comparison, media
    from ..policy import pieces

    installed()
    asked = comparison.variants(pieces(backends), variants)
    media.free(Path(out), force, "--force")
    judge, folder, prompt = None, Path(model_path or ""), given.pop("prompt")
    arguments = {k: x for k, x in given.items() if x is not None}
    if model_path is None:
        from ..demo import shipped

        judge, folder = shipped.digits_found, shipped.model_folder()
        arguments = shipped.arguments(arguments, said)
    with _progress() as progress:
        shown = None if progress is None else lambda name, done, total: progress(done, total, name)
        measured = comparison.compare(
            folder,
            prompt,
            asked,
            out=out,
            judge=judge,
            progress=shown,
            warn=warning,
            **arguments,
        )
    if as_json:
        return emit({"picture": out, "variants": [m.to_json() for m in measured]})
    page = screen()
    page.line((out, "bold"))
    head = (
        "variant",
        "ran",
        "quality",
        "seconds",
        "kept",
        "rel. L1",
        "cosine",
        "PSNR",
        "SSIM",
        *(("digits",) if judge else ()),
    )
    rows = []
    for m in measured:
        kept = "?" if m.kept is None else f"{m.kept:.2f}"
        row = (
            m.name,
            m.backend,
            m.quality,
            f"{m.seconds:.1f}",
            kept,
            f"{m.relative_l1:.4f}",
            f"{m.cosine:.5f}",
            f"{m.psnr:.1f}",
        )
        rows.append((*row, f"{m.ssim:.4f}", *((f"{m.digits_found} of {m.digits_asked}",) if judge else ())))
    page.table(head, rows)
    for m in measured:
        if m.quality == "lossy" and m.kept == 1:
            page.item(
                "note",
                f"{m.name}: every key was attended to; settings make it sparse, by --variant {m.name.partition(':')[0]}:KEY=VALUE",
            )
