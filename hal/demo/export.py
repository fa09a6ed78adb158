"""Write the model of a run as a diffusers pipeline folder: ``python -m hal.demo.export RUN FOLDER``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch

from . import recipe
from .codec import Codec
from .train import RECORD


def pipeline_of(state: dict[str, Any]) -> Any:
    """The pipeline of a checkpoint, with the running average of its weights.

    Transformer and VAE are stored in float16, and diffusers loads them as it is told.  The text encoder stays float32:
    transformers would otherwise load it as float16.
    """
    text_encoder, transformer = recipe.build_text_encoder(), recipe.build_transformer().eval()
    for name, module in (("text_encoder.", text_encoder), ("transformer.", transformer)):
        module.load_state_dict({k.removeprefix(name): v for k, v in state["ema"].items() if k.startswith(name)})
    pipe = recipe.build_pipeline(Codec.of(state["codec"]), text_encoder, transformer)
    pipe.transformer.to(torch.float16)
    pipe.vae.to(torch.float16)
    return pipe


def export(run: Path, folder: Path) -> None:
    """The pipeline of a run, and beside it where its training stood."""
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    pipeline_of(state).save_pretrained(folder)
    (folder / RECORD).write_text(json.dumps({k: state[k] for k in ("step", "seconds", "cpu_seconds")}), "utf-8")


@click.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def main(run: Path, folder: Path) -> None:
    """Write the model of the run RUN to FOLDER."""
    export(run, folder)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    click.echo(f"{folder}: {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
