"""What the Triton kernel becomes on every architecture that its tile table names, without a GPU.

``python -m benchmarks.triton_aot`` compiles all of it and compares with ``docs/triton-kernels.md``; ``--write`` writes it.
Exit 1 where a case breaks a rule or the page says something else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import triton

from hal.sparse.triton.compilation import FORMS, Compiled, cases, compiled
from hal.sparse.triton.tiles import ARCHS, KIB

PAGE = Path(__file__).parent.parent / "docs" / "triton-kernels.md"
HEAD = """\
# The Triton kernel, compiled

This page is generated: `python -m benchmarks.triton_aot --write`. `tox -e aot` compiles everything again and compares.

Block-sparse attention (`hal/sparse/triton/`) was compiled with Triton {version} for every architecture that its tile table
(`tiles.py`) names, on a machine without a GPU. Each of the {count} cases below meets these rules:

- All multiplications of both products are done by the architecture's own matrix instructions. Except where loads overlap on
  `tcgen05` (their instructions do not say their shape), none is done twice.
- Nothing is spilled: no stack memory in the NVIDIA binary (`cuobjdump`), no spilled vector or scalar register and no scratch
  memory in the AMD metadata.
- The shared memory of a program, and its tensor memory (512 columns), fit the architecture.

**Not checked here:** nothing of this ran on a GPU. The numbers were checked in Triton's interpreter, which does not show
races, alignment faults, or what a GPU rounds (bfloat16 most of all). Nothing was timed: tiles, warps and stages are chosen by
these figures, not by speed. A launch with strides that are no multiples of 16 elements, or a head_dim other than 64 and 128
(padded to a power of two), or other block sizes, compiles to something else than what is shown.

The assemblers are those in the Triton wheel, and it has one for every architecture here: `ptxas` {ptxas} up to sm90,
`ptxas-blackwell` {blackwell} from sm100 on, LLVM for AMD.
A program works on a tile of queries x keys. Three forms are compiled: *full* (every slot of every block is a key), *ragged*
(the valid keys of each block are read) and *bias* (ragged, with an additive bias per key); a block of the mask is one tile of
queries and two of keys.

| arch | head_dim | dtype | tile | warps | stages | matrix instructions: full, ragged, bias | registers: full, ragged, bias | spilled | shared memory, of | tensor memory |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(results: Sequence[Compiled]) -> str:
    versions = {"ptxas": triton.knobs.nvidia.ptxas.version, "blackwell": triton.knobs.nvidia.ptxas_blackwell.version}
    head = HEAD.format(version=".".join(triton.__version__.split(".")[:2]), count=len(results), **versions)
    return head + "".join(row(list(forms)) + "\n" for _, forms in groupby(results, lambda r: r.case[:4]))


def row(forms: Sequence[Compiled]) -> str:
    """The forms of one (arch, head_dim, dtype, tile), in the order of FORMS."""
    assert [f.case.form for f in forms] == list(FORMS)
    case, arch = forms[0].case, ARCHS[forms[0].case.arch]
    cells = [
        *case[:3],
        f"{case.tile.q} x {case.tile.k}",
        case.tile.warps,
        case.tile.stages,
        f"`{arch.matrix}` {', '.join(str(f.matrix) for f in forms)}",
        ", ".join(str(f.registers) for f in forms),
        max(f.spilled for f in forms),
        f"{max(f.shared for f in forms) / KIB:.1f} of {arch.shared // KIB} KiB",
        max(f.tensor_memory for f in forms) or "",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def measure() -> Iterable[Compiled]:
    for case in cases():
        result = compiled(case)
        print(f"{case}: {'; '.join(result.problems) or 'ok'}", file=sys.stderr, flush=True)
        yield result


def main() -> int:
    results = list(measure())
    broken = [r for r in results if r.problems]
    text = page(results)
    if "--write" in sys.argv[1:] and not broken:
        PAGE.write_text(text)
    differs = not PAGE.exists() or PAGE.read_text() != text
    print(
        f"{len(results)} cases, {len(broken)} break a rule; {os.path.relpath(PAGE)} {'differs' if differs else 'is right'}"
    )
    return int(bool(broken) or differs)


if __name__ == "__main__":
    sys.exit(main())
