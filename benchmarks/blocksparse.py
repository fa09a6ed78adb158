"""The portable block-sparse executor against dense SDPA and compiled FlexAttention, and backends end to end, on the CPU.

Parts: the executor, the backends (``endtoend.py``), the workspace.  Each cell of the executor is one head of random tensors
with random blocks, k of them kept in each row.  What is timed starts from the bool map: the plan is made in every call.  Cases
take turns.  One thread is timed in processor time, which other processes on the machine disturb least; more threads, by the
clock.  "Share" is the speed-up over dense, against the ideal 1 / density.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import endtoend
from benchmarks.common import check, median, report
from hal.sparse import BlockMask, block_sparse_attention, pool, top_k

DENSITIES = (0.5, 0.25, 0.1, 0.05)


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(prog="python -m benchmarks.blocksparse", description=__doc__)
    options.add_argument("--quick", action="store_true", help="the shorter length, one block size, few rounds")
    options.add_argument("--json", action="store_true", help="print JSON")  # read by report()
    options.add_argument("--threads", type=int, default=1, metavar="N")
    options.add_argument("--part", choices=("executor", "backends", "workspace", "all"), default="all")
    options.add_argument("--picture", metavar="FILE.png", help="draw speed-up against density")
    options.add_argument("--table", metavar="FILE.md", help="write the table of the backends")
    return options.parse_args()


OPTIONS = _options()
QUICK, THREADS = OPTIONS.quick, OPTIONS.threads


def timed(cases: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each case: the median over rounds in which the cases take turns."""
    clock = time.thread_time if THREADS == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: median(xs) for name, xs in seconds.items()}


def random_keep(s: int, block: int, density: float) -> Tensor:
    n = s // block
    return top_k(torch.rand(1, 1, n, n), max(1, round(density * n)))


def sparse(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, block: int, kernel: str) -> Callable[[], Any]:
    s = q.shape[2]
    if kernel == "flex":  # its mask is made once: it is slow to make
        mask = BlockMask.from_dense(keep, s, s, block, block)
        return lambda: block_sparse_attention(q, k, v, mask, kernel=kernel)
    return lambda: block_sparse_attention(q, k, v, BlockMask.from_dense(keep, s, s, block, block), kernel=kernel)


def cells(dtype: torch.dtype, s: int, d: int, blocks: tuple[int, ...], rounds: int, flex: bool) -> list[dict[str, Any]]:
    q, k, v = (torch.randn(1, 1, s, d, dtype=dtype) for _ in range(3))
    cases: dict[str, Callable[[], Any]] = {"dense": lambda: F.scaled_dot_product_attention(q, k, v)}
    rows: dict[str, dict[str, Any]] = {}
    for block in blocks:
        keeps = {"top_k": [random_keep(s, block, p) for p in DENSITIES]}
        keeps["full"] = [torch.ones(1, 1, s // block, s // block, dtype=torch.bool)]
        if s == 8192 and block == 64:  # rows of all counts
            keeps["ragged"] = [torch.rand(1, 1, s // block, s // block) < p for p in DENSITIES]
        for kind, maps in keeps.items():
            for keep in maps:
                density = keep.float().mean().item()
                name = f"{kind} {block} {density}"
                about = {"dtype": str(dtype)[6:], "S": s, "D": d, "block": block, "mask": kind, "threads": THREADS}
                rows[name] = about | {"density": density}
                cases[name] = sparse(q, k, v, keep, block, "portable")
                if flex and kind == "top_k":
                    cases["flex " + name] = sparse(q, k, v, keep, block, "flex")
                    cases["flex " + name]()  # compiles

    def select() -> Any:
        scores = pool(q, blocks[0]) @ pool(k, blocks[0]).transpose(-1, -2)
        return top_k(scores, scores.shape[-1] // 10)

    cases["select"] = select
    got = timed(cases, rounds)
    for name, row in rows.items():
        row |= {"dense_ms": got["dense"] * 1e3, "ms": got[name] * 1e3, "speedup": got["dense"] / got[name]}
        row |= {"ideal": 1 / row["density"], "share": row["speedup"] * row["density"]}
        row["flex_ms"] = got["flex " + name] * 1e3 if "flex " + name in got else None
        row["select_share"] = got["select"] / got["dense"]
    return [{n: round(x, 4) if isinstance(x, float) else x for n, x in row.items()} for row in rows.values()]


def workspace() -> dict[str, float]:
    """MiB that a call needs beside its inputs and output, at S = 32,768 and H = 8: what the process grew by, at its peak."""
    s, h, d, block = 32768, 8, 64, 64
    q, k, v = (torch.randn(1, h, s, d, dtype=torch.bfloat16) for _ in range(3))
    out = q.numel() * q.element_size() / 2**20
    small = torch.ones(1, h, 2, 2, dtype=torch.bool)
    block_sparse_attention(*(x[:, :, :128] for x in (q, k, v)), BlockMask.from_dense(small, 128, 128, block, block))
    grown, keeps = {}, {}
    for density in (0.05,) if QUICK else DENSITIES:
        keeps[f"density {density}"] = torch.cat([random_keep(s, block, density) for _ in range(h)], 1)
        keeps[f"density {density}, unequal counts"] = torch.rand(1, h, s // block, s // block) < density
    for name, keep in keeps.items():
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed, and what is kept would not be seen to grow
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        before = resident("VmRSS")
        result = block_sparse_attention(q, k, v, BlockMask.from_dense(keep, s, s, block, block), kernel="portable")
        grown[name] = resident("VmHWM") - before - out
        del result
    return {n: round(x, 1) for n, x in grown.items()}


def resident(what: str) -> float:
    """MiB: VmRSS is what the process holds now, VmHWM the most that it held."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def mean(xs: list[float]) -> float:
    return math.exp(sum(map(math.log, xs)) / len(xs))


def picture(executor: list[dict[str, Any]], backends: list[dict[str, Any]], file: str) -> None:
    """Speed-up against density, with the ideal line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    kinds = sorted({(r["dtype"], r["block"]) for r in executor})  # a colour each; a line for each D and length
    for dtype, block, d, s in sorted({(r["dtype"], r["block"], r["D"], r["S"]) for r in executor}):
        mine = [
            r for r in executor if (r["dtype"], r["block"], r["D"], r["S"], r["mask"]) == (dtype, block, d, s, "top_k")
        ]
        color, label = f"C{kinds.index((dtype, block))}", f"executor: {dtype}, blocks of {block}"
        if label in axes.get_legend_handles_labels()[1]:
            label = "_"
        axes.plot([r["density"] for r in mine], [r["speedup"] for r in mine], "o-", ms=3, lw=0.8, c=color, label=label)
    for name, marker in zip(sorted({r["backend"] for r in backends}), "sD^"):
        mine = [r for r in backends if r["backend"] == name]
        axes.plot([r["density"] for r in mine], [r["speedup"] for r in mine], "k" + marker, ms=4, alpha=0.4, label=name)
    axes.plot(DENSITIES, [1 / p for p in DENSITIES], "k--", label="ideal: 1 / density")
    axes.set(xscale="log", yscale="log", xlabel="density", ylabel="speed-up over dense SDPA")
    axes.set_xticks(DENSITIES, [f"{p:g}" for p in DENSITIES], minor=False)
    axes.set_yticks([1, 2, 4, 10, 20], ["1x", "2x", "4x", "10x", "20x"], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=6)
    figure.savefig(file, dpi=150)


def table(backends: list[dict[str, Any]]) -> str:
    """Markdown: each backend's cases, over dtypes and head_dims."""
    lines = [
        "| backend | case | grid | density | ideal | float32 D64 | float32 D128 | bfloat16 D64 | bfloat16 D128 | of the ideal |"
    ]
    lines.append("|---" * 10 + "|")
    for key in dict.fromkeys((r["backend"], r["case"], r["grid"]) for r in backends):
        mine = [r for r in backends if (r["backend"], r["case"], r["grid"]) == key]
        speed = {(r["dtype"], r["D"]): f"{r['speedup']:.1f}x" for r in mine}
        density = mean([r["density"] for r in mine])
        cells = [speed.get((t, d), "") for t in ("float32", "bfloat16") for d in (64, 128)]
        share = [r["share"] for r in mine]
        ends = f"{min(share):.2f} to {max(share):.2f}"
        lines.append("| " + " | ".join((*key, f"{density:.3f}", f"{1 / density:.1f}x", *cells, ends)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # FlexAttention is compiled for every shape here
    load = os.getloadavg()
    part = OPTIONS.part
    memory: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    backends: list[dict[str, Any]] = []
    dtypes, rounds = (torch.float32, torch.bfloat16), 3 if QUICK else 5
    with torch.inference_mode():
        if part in ("workspace", "all"):
            memory = workspace()
        if part in ("executor", "all"):
            rows = [
                row
                for dtype in dtypes
                for s in ((8192,) if QUICK else (8192, 16384))
                for d in (64, 128)
                for row in cells(dtype, s, d, (64,) if QUICK else (64, 128), rounds, flex=not QUICK or d == 64)
            ]
        if part in ("backends", "all"):
            backends = [
                row
                for s, sizes in {8192: (64, 128), **({} if QUICK else {16384: (64,)})}.items()
                for dtype in dtypes
                for d in sizes
                for row in endtoend.cells(dtype, s, d, rounds, timed)
            ]
    kept = [r for r in rows if r["mask"] == "top_k"]
    checks = []
    if rows:
        full = [r["share"] for r in rows if r["mask"] == "full"]
        flex = [r["ms"] / r["flex_ms"] for r in kept if r["flex_ms"]]
        checks += [
            check("ideal over speed-up, geometric mean", 1 / mean([r["share"] for r in kept]), round(1 / 0.75, 4)),
            check("ideal over speed-up, worst cell", 1 / min(r["share"] for r in kept), round(1 / 0.6, 4)),
            check("density 1: time over dense, geometric mean", 1 / mean(full), round(1 / 0.95, 4)),
            check("time over compiled FlexAttention, geometric mean", mean(flex), round(1 / 1.5, 4)),
        ]
    for name in sorted({r["backend"] for r in backends}):
        worst = min(r["share"] for r in backends if r["backend"] == name)
        checks.append(check(f"{name} end to end: ideal over speed-up, worst case", 1 / worst, round(1 / 0.6, 4)))
    if memory:
        checks.append(check("workspace at S = 32,768 and H = 8, at its peak", max(memory.values()), 128, "MiB"))
    if every := [*rows, *backends]:
        checks.append(check("block selection over dense, worst", max(r["select_share"] for r in every), 0.02))
    if file := OPTIONS.picture:
        picture(rows, backends, file)
    if file := OPTIONS.table:
        Path(file).write_text(table(backends), "utf-8")
    report(
        checks,
        threads=THREADS,
        load=[*load, *os.getloadavg()],
        shares={
            dtype: round(mean([r["share"] for r in kept if r["dtype"] == dtype]), 4)
            for dtype in sorted({r["dtype"] for r in kept})
        },
        workspace_mib=memory,
        cells=rows,
        backends=backends,
    )


if __name__ == "__main__":
    main()
