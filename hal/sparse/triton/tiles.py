"""Where the Triton kernel runs, as data: each architecture's limits, and its tiles by head_dim.

``docs/triton-kernels.md`` has what each of these compiles to.  Nobody timed them yet: they are chosen to spill nothing and
to leave room for more than one program on a processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple


class Tile(NamedTuple):
    q: int  # queries of one program
    k: int  # keys of one step
    warps: int
    stages: int  # how many steps' loads are in flight
    rows: int = 0  # of one AMD matrix instruction (0: Triton's choice); where warps * rows > q, work is done twice

    @property
    def options(self) -> dict[str, int]:
        """As Triton's compiler names them."""
        rows = {"matrix_instr_nonkdim": self.rows} if self.rows else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **rows}


class Arch(NamedTuple):
    target: Literal["cuda", "hip"]  # Triton's compiler for it
    warp: int  # lanes
    shared: int  # bytes that one program may have
    matrix: Literal["mma", "wgmma", "tcgen05", "mfma", "wmma"]  # its matrix instructions
    tiles: Mapping[int, tuple[Tile, ...]]  # by head_dim, the preferred one first


DTYPES: Final = ("bfloat16", "float16")  # on a GPU; the interpreter takes float32 too
MAX_HEAD_DIM: Final = 128  # what lies between is padded
KIB: Final = 1024

_AMPERE = {64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)), 128: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))}
_SMALL = {64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)), 128: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2))}
_HOPPER = {64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)), 128: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))}
_BLACKWELL = {64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)), 128: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))}
_CDNA = {d: (Tile(128, 64, 8, 1, 16), Tile(64, 64, 4, 1, 16)) for d in (64, 128)}
_RDNA4 = {64: (Tile(128, 64, 8, 1), Tile(64, 64, 4, 1)), 128: (Tile(128, 32, 8, 1), Tile(64, 32, 4, 1))}

ARCHS: Final[dict[str, Arch]] = {
    "sm80": Arch("cuda", 32, 163 * KIB, "mma", _AMPERE),
    "sm86": Arch("cuda", 32, 99 * KIB, "mma", _SMALL),
    "sm89": Arch("cuda", 32, 99 * KIB, "mma", _SMALL),
    "sm90": Arch("cuda", 32, 227 * KIB, "wgmma", _HOPPER),
    "sm100": Arch("cuda", 32, 227 * KIB, "tcgen05", _BLACKWELL),
    "sm103": Arch("cuda", 32, 227 * KIB, "tcgen05", _BLACKWELL),
    "sm120": Arch("cuda", 32, 99 * KIB, "mma", _SMALL),
    "sm121": Arch("cuda", 32, 99 * KIB, "mma", _SMALL),
    "gfx942": Arch("hip", 64, 64 * KIB, "mfma", _CDNA),
    "gfx950": Arch("hip", 64, 160 * KIB, "mfma", _CDNA),
    "gfx1201": Arch("hip", 32, 64 * KIB, "wmma", _RDNA4),
}
INTERPRETED: Final = Tile(64, 64, 4, 1)  # the interpreter's time goes by steps, not by their size


def tile_of(tiles: tuple[Tile, ...], block_q: int, block_k: int) -> Tile:
    """The tile that computes the fewest pairs for a block of the mask; of several, the first.

    A block need be no multiple of a tile, and may be smaller: what is computed beyond it is dropped.
    """
    return min(tiles, key=lambda t: -(-block_q // t.q) * t.q * -(-block_k // t.k) * t.k)


def tiles_for(arch: str, head_dim: int) -> tuple[Tile, ...]:
    """An architecture's tiles: those of the smallest head_dim that holds this one."""
    return next(tiles for d, tiles in sorted(ARCHS[arch].tiles.items()) if head_dim <= d)
