"""``make demo``: the main job on the model that hal ships, and where to look."""

from __future__ import annotations

from pathlib import Path

from ..cli import main
from .shipped import PROMPT

OUT = Path("out/seven.gif")


def run() -> None:
    OUT.parent.mkdir(exist_ok=True)
    command = ["generate", "--prompt", PROMPT, "--out", str(OUT), "--force"]
    print("$ hal", *(f'"{word}"' if " " in word else word for word in command), flush=True)
    main(command, standalone_mode=False)
    print(f"\nthe video: {OUT.resolve()}")
    print("the model is small and misses its targets: docs/demo-model.md")
    print("what else: hal doctor, hal explain --on h100, hal matrix")


if __name__ == "__main__":
    run()
