"""Strategy files: which window each head of each layer has at each denoising step.  ``tables`` makes them by tuning."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from hal.errors import PolicyError
from hal.files import replacing

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


Stamp = tuple[int, int, int]


def stamp(path: str | Path) -> Stamp:
    """What changes as a file does: its times, size and number.  Raises OSError."""
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read(path: str) -> Strategy:
    """The strategy in a file; read once for as long as the file stays as it is.  Raises PolicyError."""
    try:
        now = stamp(path)
    except OSError as e:
        raise PolicyError(
            f"mask_strategy_file_path={path} cannot be read ({e.strerror}); name a strategy file, JSON in which {ENTRY}"
        ) from None
    return _read(path, now)


@lru_cache(maxsize=16)
def _read(path: str, now: Stamp) -> Strategy:
    def twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key stands in it twice")
        return found

    try:
        data = json.loads(Path(path).read_text("utf-8"), object_pairs_hook=twice)
    except (OSError, ValueError, RecursionError) as e:  # no JSON, no UTF-8, or too deep
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


def check_place(path: str) -> None:
    """Raises PolicyError where a strategy file cannot be written."""
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir():
        raise PolicyError(f"mask_strategy_file_path={path}: name a file in a folder that exists")
    if not os.access(folder, os.W_OK):
        raise PolicyError(
            f"mask_strategy_file_path={path}: no permission to write in {str(folder)!r}; name a file elsewhere"
        )


def write(path: str, strategy: Strategy) -> None:
    """Save a strategy in the form that ``read`` and FastVideo take; a file that is there is replaced, at once.

    Raises PolicyError for a file that cannot be written; one that was there is then as it was.
    """
    data = {
        f"{step}_{layer}_{head}": list(window)
        for step, layers in enumerate(strategy.windows)
        for layer, heads in enumerate(layers)
        for head, window in enumerate(heads)
    }
    try:
        with replacing(Path(path)) as part:
            part.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    except OSError as e:
        raise PolicyError(f"cannot write the strategy file {path}: {e}") from e
