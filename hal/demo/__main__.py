"""``make demo``: build a tiny text-to-video pipeline, save it, and run the main job on it as for any other folder.

Its weights are random, so the video is coloured noise; what it shows is the way from a folder to a picture, and the
receipt of the attention that ran.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..cli import main
from ..testing import tiny

PROMPT = "a cat"
OUT = Path("out/demo.png")


def run() -> None:
    OUT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        print("building a tiny Wan pipeline with random weights", flush=True)
        tiny.wan().save_pretrained(folder)
        size = ["--num-frames", "9", "--height", "64", "--width", "64", "--steps", "4", "--force"]
        main(["generate", "--model-path", folder, "--prompt", PROMPT, "--out", str(OUT), *size], standalone_mode=False)
    print(f"\nthe picture: {OUT.resolve()}")
    print("what else: hal doctor, hal explain --on h100, hal matrix")


if __name__ == "__main__":
    run()
