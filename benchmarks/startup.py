"""What starting costs, against ``import torch`` in the same run: each case is a fresh process, and they take turns."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.common import check, median, report

CASES = {
    "python": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import hal": [sys.executable, "-c", "import hal"],
    "explain json": [sys.executable, "-m", "hal", "explain", "--on", "h100", "--json"],
    "explain table": [sys.executable, "-m", "hal", "explain", "--on", "h100"],
}


def main() -> None:
    seconds: dict[str, list[float]] = {n: [] for n in CASES}
    for i in range(8):
        for name, command in CASES.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if i:  # the first round warms the disk
                seconds[name].append(time.perf_counter() - start)
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
