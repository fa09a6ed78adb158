"""The window of VDN-H3: its architecture, as the checkpoint has it, and which rows attend to which.  Pure numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hal.errors import CallError, unknown

if TYPE_CHECKING:
    from hal.sparse import PackedRows

Range = tuple[int, int]  # from the first to before the last
KEY = "hybrid_attention"  # under which transformer/config.json has the architecture
ALLOWED = {
    "anchor_frames": ("none", "columns", "rows", "both"),
    "delta_rule": ("vdn_solve", "sana_scaled", "vdn_scaled"),
    "bridge": ("alpha", "none"),
}


@dataclass(frozen=True)
class Architecture:
    """What a checkpoint was trained with.  A model hands it over: ``hal.sparse.given(hybrid=Architecture.of(config), ...)``.

    ``chunk``: frames of a chunk; a frame attends to its own and ``radius`` chunks on each side; 0: to ``radius`` frames
    on each side.  ``anchor_frames``: whether the first and the last frame are attended to by all (columns), attend to all
    (rows), or both.  The others are of the linear branch, but for ``enable_softmax_gate``.
    Raises CallError for a value that it cannot be, naming what is allowed.
    """

    chunk: int = 5
    radius: int = 1
    anchor_frames: str = "both"
    enable_softmax_gate: bool = True
    delta_rule: str = "vdn_solve"
    bridge: str = "alpha"
    a_fp32: bool = True
    enable_text_state: bool = True
    short_conv: tuple[str, ...] = ("k", "v")
    linear_head_dim: int = 128

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise _wrong(name, getattr(self, name), "one of " + ", ".join(allowed))
        for name, least in (("chunk", 0), ("radius", 0), ("linear_head_dim", 1)):
            n = getattr(self, name)
            if isinstance(n, bool) or not isinstance(n, int) or n < least:
                raise _wrong(name, n, f"an integer of at least {least}")
        for name in ("enable_softmax_gate", "a_fp32", "enable_text_state"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        convs = self.short_conv
        listed = isinstance(convs, (tuple, list)) and all(isinstance(c, str) for c in convs)
        if not listed or set(convs) - {"q", "k", "v"} or len(set(convs)) != len(convs):
            raise _wrong("short_conv", convs, "some of q, k, v, each once")
        object.__setattr__(self, "short_conv", tuple(convs))

    @staticmethod
    def of(config: Mapping[str, Any]) -> Architecture:
        """From a transformer's config, or what it has under ``hybrid_attention``: flat, or nested as its trainer writes it.

        What is left out has the trainer's default.  Raises CallError for a config without it, and for an unknown key.
        """
        given = config.get(KEY, config)
        if not isinstance(given, Mapping) or not {"radius", "softmax_attention"} & set(given):
            raise CallError(
                f"the config has no {KEY}, so it is no VDN-H3: MiniMax-H3 and FastH3 have no linear branch; choose another "
                "backend for these weights"
            )
        flat: dict[str, Any] = {}
        for key, value in given.items():
            nested = key in ("softmax_attention", "linear_attention") and isinstance(value, Mapping)
            flat.update(value if nested else {key: value})
        convs = flat.get("short_conv", ())
        flat["short_conv"] = convs.get("targets", ()) if isinstance(convs, Mapping) else convs or ()
        names = [f.name for f in fields(Architecture)]
        for key in flat:
            if key not in names:
                raise CallError(unknown(f"key of {KEY}", key, names))
        for key in ("radius", "linear_head_dim"):
            if key not in flat:
                raise CallError(f"{KEY} has no {key}; it must be an integer")
        return Architecture(**{"chunk": 0, "anchor_frames": "none", "enable_text_state": False, **flat})

    @property
    def rows(self) -> bool:
        """Whether the first and the last frame attend to all."""
        return self.anchor_frames in ("rows", "both")

    @property
    def columns(self) -> bool:
        """Whether all attend to the first and the last frame."""
        return self.anchor_frames in ("columns", "both")

    def bounds(self, frames: int) -> list[Range]:
        """The first and the last frame that each attends to, not cut to those that there are."""
        r, c = self.radius, self.chunk
        if c == 0:
            return [(t - r, t + r) for t in range(frames)]
        return [((t // c - r) * c, (t // c + r + 1) * c - 1) for t in range(frames)]

    def full(self, frames: int) -> bool:
        """Whether every window has all frames: attention is dense, and nothing is left to the linear branch."""
        return all(lo <= 0 and hi >= frames - 1 for lo, hi in self.bounds(frames))

    def kept(self, frames: int) -> list[tuple[int, ...]]:
        """The frames that each attends to by softmax."""
        ends = {0, frames - 1}
        out = []
        for t, (lo, hi) in enumerate(self.bounds(frames)):
            window = set(range(max(lo, 0), min(hi, frames - 1) + 1)) | (ends if self.columns else set())
            out.append(tuple(range(frames) if self.rows and t in ends else sorted(window)))
        return out

    def linear(self, frames: int) -> tuple[range, list[Range]]:
        """The frames of the linear branch, and among them the bounds of each, outside of which it reads.

        Under both anchors the first and the last frame are softmax's alone: none of theirs is read, and they read nothing.
        """
        skip = 1 if self.anchor_frames == "both" else 0
        inner = range(skip, max(frames - skip, skip))
        bounds = self.bounds(frames)
        return inner, [(bounds[t][0] - skip, bounds[t][1] - skip) for t in inner]


def _wrong(name: str, value: Any, allowed: str) -> CallError:
    return CallError(f"{KEY}: {name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True)
class Group:
    """Frames in a row that attend to the same keys.  Ranges of rows, those of ``keys`` rising."""

    queries: Range
    keys: tuple[Range, ...]

    @property
    def gathered(self) -> int:
        return count(self.keys)


@dataclass(frozen=True, eq=False)
class Plan:
    """Which rows attend to which: ``dense`` ones to all that are used, each group to its keys.

    ``passes``: the groups whose keys are gathered together, up to a number of rows; one group alone may have more.
    """

    used: int
    dense: tuple[Range, ...]
    passes: tuple[tuple[Group, ...], ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(g for one in self.passes for g in one)


def count(ranges: Sequence[Range]) -> int:
    return sum(b - a for a, b in ranges)


@lru_cache(maxsize=64)
def plan(architecture: Architecture, rows: PackedRows, most: int) -> Plan:
    """The plan of packed rows, one video among them; all other used rows attend to all, and are attended to by all."""
    frames, height, width = rows.video
    per, first = height * width, rows.first
    last = first + frames * per
    at = lambda t: (first + t * per, first + (t + 1) * per)
    others = [r for r in ((0, first), (last, rows.used)) if r[0] < r[1]]
    dense, groups = list(others), list[tuple[tuple[int, ...], Range]]()
    for t, kept in enumerate(architecture.kept(frames)):
        if len(kept) == frames:
            dense.append(at(t))
        elif groups and groups[-1][0] == kept and groups[-1][1][1] == at(t)[0]:
            groups[-1] = kept, (groups[-1][1][0], at(t)[1])
        else:
            groups.append((kept, at(t)))
    passes: list[list[Group]] = []
    for kept, queries in groups:
        group = Group(queries, merged([*others, *map(at, kept)]))
        if passes and sum(g.gathered for g in passes[-1]) + group.gathered <= most:
            passes[-1].append(group)
        else:
            passes.append([group])
    return Plan(rows.used, merged(dense), tuple(map(tuple, passes)))


def merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same rows in rising order, in as few ranges as can be."""
    out: list[Range] = []
    for a, b in sorted(ranges):
        if out and out[-1][1] >= a:
            out[-1] = out[-1][0], max(out[-1][1], b)
        else:
            out.append((a, b))
    return tuple(out)
