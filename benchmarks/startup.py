"""What starting costs, against ``import torch`` in the same run: each case is a fresh process, and they take turns.

"Table" is what a terminal gets: FORCE_COLOR makes rich draw, though the output goes nowhere.

Bytecode is cached for all alike, in a folder of the run's own: some containers switch the cache off, and pip fills it for
torch alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from benchmarks.common import check, median, report

CASES = {
    "python": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import hal": [sys.executable, "-c", "import hal"],
    "explain json": [sys.executable, "-m", "hal", "explain", "--on", "h100", "--json"],
    "explain table": [sys.executable, "-m", "hal", "explain", "--on", "h100"],
}
TERMINAL = {"explain table": {"FORCE_COLOR": "1", "COLUMNS": "120"}}


def measure() -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {n: [] for n in CASES}
    with tempfile.TemporaryDirectory() as cache:
        unwanted = ("PYTHONDONTWRITEBYTECODE", "FORCE_COLOR")
        env = {k: x for k, x in os.environ.items() if k not in unwanted} | {"PYTHONPYCACHEPREFIX": cache}
        for i in range(9):
            for name, command in CASES.items():
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env | TERMINAL.get(name, {}))
                if i:  # the first round fills the cache
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    seconds = measure()
    s = {n: median(xs) for n, xs in seconds.items()}
    torch = s["import torch"]
    report(
        [
            check("import hal, against import torch", s["import hal"] / torch, 0.02),
            check("hal explain --on h100 --json, against import torch", s["explain json"] / torch, 0.1),
            check("hal explain --on h100 with tables, against import torch", s["explain table"] / torch, 0.2),
        ],
        milliseconds={n: round(x * 1e3, 1) for n, x in s.items()},
    )


if __name__ == "__main__":
    main()
