"""Strategy files: which window each head of each layer has at each denoising step.

How searching and tuning are to make them (not built; ``portable.bind`` refuses these modes):

- *Searching* is a generation in which every call at (step, layer) computes all candidate windows, the last of which is the
  full one, and returns the full output, so that the generation is the dense one.  For each candidate and head it keeps the
  mean squared and the mean absolute difference from the full output, over batch, tokens and head_dim, in float32:
  a table [steps][layers][candidates][heads] a prompt, written as JSON with the candidates and the grid it was made on.
- *Tuning* reads the tables of all prompts.  For step < skip_time_steps it takes the full window, else for each
  (step, layer, head) the candidate with the least mean squared difference, averaged over prompts; STA_tuning_cfg averages
  over the conditional and the unconditional pass too, which searching keeps apart.  It needs no attention, so it is a
  function of tables and settings, ``tuned(tables, candidates, skip) -> Strategy``, and a command; ``write`` saves it.
  It reports the sparsity, 1 - sum of volumes / sum of full volumes.
- Candidates upstream has for 18 x 48 x 80 alone: (3,1,10) (1,5,7) (3,3,3) (1,6,5) (1,3,10) (3,6,1) and the full (3,6,10).
  For other grids, scale each side by the grid's tiles, and drop doubles; the full window is the grid's own.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from hal.errors import PolicyError

Window = tuple[int, int, int]
ENTRY = 'an entry is "step_layer_head": [frames, rows, columns], numbers of tiles from 1'


class Strategy(NamedTuple):
    windows: tuple[tuple[tuple[Window, ...], ...], ...]  # [steps][layers][heads]

    @property
    def steps(self) -> int:
        return len(self.windows)

    @property
    def layers(self) -> int:
        return len(self.windows[0])

    @property
    def heads(self) -> int:
        return len(self.windows[0][0])


def read(path: str) -> Strategy:
    """The strategy in a file; read once for as long as the file stays as it is.  Raises PolicyError."""
    try:
        stat = Path(path).stat()
    except OSError as e:
        raise PolicyError(
            f"sliding_tile_attn: mask_strategy_file_path={path} cannot be read ({e.strerror}); name a strategy file, JSON "
            f"in which {ENTRY}"
        ) from None
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _read(path: str, changed: int, size: int) -> Strategy:
    def twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key stands in it twice")
        return found

    try:
        data = json.loads(Path(path).read_text("utf-8"), object_pairs_hook=twice)
    except (OSError, ValueError) as e:  # no JSON, no UTF-8
        raise PolicyError(f"strategy file {path} cannot be read: {e}; in it, {ENTRY}") from None
    try:
        return parsed(data)
    except ValueError as e:
        raise PolicyError(f"strategy file {path}: {e}") from None


def parsed(data: object) -> Strategy:
    """A strategy from the object in its file.  Raises ValueError for what is malformed, and for a missing entry."""
    if not isinstance(data, dict) or not data:
        raise ValueError(f"it holds no entries; {ENTRY}")
    found: dict[tuple[int, int, int], Window] = {}
    for key, value in data.items():
        m = re.fullmatch(r"([0-9]{1,5})_([0-9]{1,5})_([0-9]{1,5})", key)
        if not m or not isinstance(value, list) or len(value) != 3 or any(type(n) is not int or n < 1 for n in value):
            raise ValueError(f"{json.dumps(key)}: {json.dumps(value)} is no entry; {ENTRY}")
        at = int(m[1]), int(m[2]), int(m[3])
        if at in found:
            raise ValueError(f"{json.dumps(key)} says again what another key says")
        found[at] = (value[0], value[1], value[2])
    steps, layers, heads = (max(at[axis] for at in found) + 1 for axis in range(3))
    if len(found) != steps * layers * heads:
        missing = next(at for at in product(range(steps), range(layers), range(heads)) if at not in found)
        raise ValueError(
            f"it has {len(found)} entries, and {steps} steps x {layers} layers x {heads} heads need "
            f'{steps * layers * heads}; the first missing is "{"_".join(map(str, missing))}"'
        )
    return Strategy(
        tuple(
            tuple(tuple(found[step, layer, head] for head in range(heads)) for layer in range(layers))
            for step in range(steps)
        )
    )


def write(path: str, strategy: Strategy) -> None:
    """Save a strategy in the form that ``read`` and FastVideo take."""
    data = {
        f"{step}_{layer}_{head}": list(window)
        for step, layers in enumerate(strategy.windows)
        for layer, heads in enumerate(layers)
        for head, window in enumerate(heads)
    }
    Path(path).write_text(json.dumps(data, indent=1) + "\n", "utf-8")
