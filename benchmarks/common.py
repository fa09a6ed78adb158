"""Shared by all benchmarks: interleaved timing, and telling what was measured against what was promised."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def interleaved(cases: Mapping[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call of each case, a figure per round; the cases take turns, so that a noisy neighbour hits all alike."""
    out: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        for _ in range(max(calls // 10, 1)):
            run()
    for _ in range(rounds):
        for name, run in cases.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            out[name].append((time.perf_counter() - start) / calls)
    return out


def median(xs: Sequence[float]) -> float:
    return statistics.median(xs)


def check(name: str, value: float, limit: float, unit: str = "x") -> dict[str, Any]:
    """A measured figure beside its limit (at most)."""
    return {"name": name, "value": round(value, 4), "limit": limit, "unit": unit, "ok": value <= limit}


def report(checks: list[dict[str, Any]], **measured: Any) -> None:
    """Print (JSON with ``--json``) and exit 1 where a limit was missed."""
    ok = all(c["ok"] for c in checks)
    if "--json" in sys.argv[1:]:
        print(json.dumps({"ok": ok, "checks": checks, **measured}, indent=2))
    else:
        for name, value in measured.items():
            print(f"{name}: {value}")
        for c in checks:
            print(f"{'ok  ' if c['ok'] else 'MISS'} {c['name']}: {c['value']} {c['unit']} (at most {c['limit']})")
    sys.exit(0 if ok else 1)
