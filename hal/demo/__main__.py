"""``make demo``: the main job on the model that hal ships, and where to look."""

from __future__ import annotations

from pathlib import Path

from ..cli import main
from .shipped import PROMPT

OUT = Path("out")


def run() -> None:
    OUT.mkdir(exist_ok=True)
    for name in ("seven.gif", "seven.png"):
        command = ["generate", "--prompt", PROMPT, "--out", str(OUT / name), "--force"]
        print("$ hal", *(f'"{word}"' if " " in word else word for word in command), flush=True)
        main(command, standalone_mode=False)
    print(f"\nthe video: {(OUT / 'seven.gif').resolve()}\nits frames: {(OUT / 'seven.png').resolve()}")
    print("the model is small and its training is not finished: docs/demo-model.md")
    print("what else: hal doctor, hal explain --on h100, hal matrix")


if __name__ == "__main__":
    run()
