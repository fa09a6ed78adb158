"""Facts as the judge sees them, and the rules that many kernels share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import Version

HALF = {"float16", "bfloat16"}
FLOATS = {*HALF, "float32"}
FLASH_SIZES = {32, 64, 96, 128, 160, 192, 224, 256}

TENSOR_CORES = {
    "sm80",
    "sm86",
    "sm87",
    "sm89",
    "sm90",
    "sm100",
    "sm103",
    "sm107",
    "sm110",
    "sm120",
    "sm121",
}  # 8.0 to 12.1
BEFORE = {"sm50", "sm52", "sm53", "sm60", "sm61", "sm62", "sm70", "sm72", "sm75"}
SMALL = {"sm86", "sm89", "sm120", "sm121"}  # 99 KiB of shared memory for a block
CDNA = {"gfx90a", "gfx942", "gfx950"}
RDNA = {f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152, 1153, 1200, 1201)}


class Unknown(Exception):
    """A rule read a fact that is not known."""


class Facts:
    """Facts by attribute."""

    def __init__(self, facts: Mapping[str, Any], packages: Mapping[str, str | None]):
        self._facts, self._packages = facts, packages

    def __getattr__(self, name: str) -> Any:
        value = self._facts.get(name)
        if value is None:
            raise Unknown(name)
        return value

    def __getitem__(self, name: str) -> Any:
        """The fact, or None."""
        return self._facts[name]

    # ---- versions: a pre-release of 2.12 counts as 2.12, one of a package that has had nothing else by its own place

    def from_(self, software: str, least: str) -> bool:
        return Version(Version(getattr(self, software)).base_version) >= Version(least)

    def has(self, package: str, least: str = "", below: str = "") -> bool:
        """The package is there and works, in this range of versions."""
        found = self._packages.get(package)
        if found is None:
            return False
        if Version(least or "0").is_prerelease:
            return Version(found) >= Version(least)
        version = Version(Version(found).base_version)
        return version >= Version(least or "0") and (not below or version < Version(below))

    # ---- what follows

    @property
    def square(self) -> bool:
        return bool(self.q_len == self.kv_len)

    @property
    def scores(self) -> int:
        return int(self.q_len * self.kv_len)

    @property
    def mask_reaches_it(self) -> bool:
        """One was given, or PyTorch is given one for a window or for causality from the bottom right."""
        return self.mask != "none" or self.window != (-1, -1) or (self.causal and (self.varlen or not self.square))


Rule = tuple[str, Callable[[Facts], bool]]


def only_if(condition: Callable[[Facts], bool], then: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
    return lambda f: not condition(f) or then(f)


def sizes(*allowed: int) -> Rule:
    return "head_dim", lambda f: f.head_dim in allowed


def at_most(n: int, step: int) -> Rule:
    return f"head_dim up to {n} by {step}", lambda f: 0 < f.head_dim <= n and f.head_dim % step == 0


HALF_TYPES: Rule = ("float16 or bfloat16", lambda f: f.dtype in HALF)
FLOAT_TYPES: Rule = ("float16, bfloat16 or float32", lambda f: f.dtype in FLOATS)
EQUAL: Rule = ("equal head dims", lambda f: f.head_dim == f.v_head_dim)
ROWS: Rule = ("contiguous rows", lambda f: f.q_contiguous and f.k_contiguous and f.v_contiguous)
TOKENS: Rule = ("tokens on both sides", lambda f: 0 not in [f[k] for k in ("batch", "heads", "q_len", "kv_len")])
TOP_LEFT: Rule = ("causal only where square", only_if(lambda f: f.causal, lambda f: f.square and not f.varlen))
SAME_OR_192: Rule = (
    "equal head dims, or 192 with 128",
    lambda f: f.head_dim == f.v_head_dim or (f.head_dim, f.v_head_dim) == (192, 128),
)


def on(platform: str, archs: set[str]) -> Callable[[Facts], bool]:
    return lambda f: f.platform == platform and f.arch in archs
