"""hal lock: the decision of every layer of a pipeline, saved as a plan that hal generate keeps to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import PolicyError
from ..integrations import media
from .options import as_json, choosing, installed, machine_of, on_machine, said
from .output import emit, screen

if TYPE_CHECKING:
    from ..plan import Plan


@click.command(short_help="Save every layer's decision as a plan.")
@click.option("--model-path", required=True, metavar="DIR", help="The folder of a saved diffusers pipeline.")
@on_machine
@choosing
@click.option("--prompt", default="a picture", metavar="TEXT", help="Its length is a fact of cross-attention.")
@click.option("--dtype", metavar="NAME", help="float32, bfloat16 or float16; else that of the weights.")
@click.option("--num-frames", type=click.IntRange(1), metavar="N", help="Frames of a video.")
@click.option("--height", type=click.IntRange(1), metavar="N", help="Pixels.")
@click.option("--width", type=click.IntRange(1), metavar="N", help="Pixels.")
@click.option("--out", metavar="FILE", help="Where to save the plan, a .json file.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@as_json
def command(
    model_path: str,
    on: str | None,
    with_: tuple[str, ...],
    without: tuple[str, ...],
    words: dict[str, Any],
    out: str | None,
    force: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Save the decision of every attention layer of a pipeline, for this machine or any other.

    The pipeline runs one denoising step here to learn its calls.  hal generate --plan FILE then refuses to run anything
    else, and hal diff compares two plans.

    \b
    hal lock --model-path DIR --on h100 --dtype bfloat16 --out plan.json
    hal lock --model-path DIR --attention-backend torch_sdpa --out here.json
    """
    path = None if out is None else Path(out)
    if path is None and not as_json:
        raise click.UsageError("give --out FILE, or --json to print the plan")
    if path is not None:
        media.free(path, force, "--force")
    if path is not None and not path.parent.is_dir():
        raise PolicyError(f"--out {out}: there is no folder {str(path.parent)!r}")
    catalog = installed()
    machine = machine_of(catalog, on, with_, without) if on or with_ or without else None
    from ..integrations.locking import lock

    plan = lock(model_path, machine, words=words, said=said, **given)
    if path is not None:
        path.write_text(json.dumps(plan.to_json(), indent=1) + "\n", "utf-8")
    if as_json:
        emit(plan.to_json())
    else:
        _show(path, plan)
    refused = next((e for e in plan.entries if e.backend is None), None)
    if refused is not None:
        raise PolicyError(
            f"{refused} is refused under this plan ({refused.source}), so nothing can run by it; hal explain tells why"
        )


def _show(path: Path | None, plan: Plan) -> None:
    kinds: dict[tuple[str, ...], int] = {}
    for e in plan.entries:
        kind = e.component, e.role, e.told, e.source
        kinds[kind] = kinds.get(kind, 0) + 1
    shown = screen()
    shown.line(
        (str(path), "bold"), f"  {len(plan.entries)} decisions for {plan.machine.origin or plan.machine.platform}"
    )
    shown.table(
        ("component", "role", "backend by kernel", "asked for by", "layers"), [(*k, str(n)) for k, n in kinds.items()]
    )
