"""Backend: the name that a user chooses, and what is computed under it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import DeclarationError
from .kernel import Kernel, Needs
from .rows import Row

__all__ = ["Backend", "Kernel", "Needs"]

QUALITIES = ("exact", "near", "lossy")
# The names of the document that hal implements.  They are names whether or not a backend of it is installed.
NAMED = (
    "fa",
    "torch_sdpa",
    "sliding_tile_attn",
    "sage_attn",
    "sage_attn_3",
    "sparge_attn",
    "sol_attn",
    "video_sparse_attn",
    "subblock_sparse_attn",
    "video_sparse_attn_h3",
    "hybrid_window_attn_h3",
    "vmoba_attn",
    "aiter",
    "aiter_sage",
    "sla_attn",
    "sage_sla_attn",
    "sparse_video_gen_2_attn",
    "laser_attn",
    "block_sparse_attn",
    "rain_fusion_attn",
    "fp8_fa_sm120",
)


@dataclass(frozen=True, eq=False)
class Backend:
    """The name that a user chooses: a function of q, k and v.

    ``quality``: exact; near (rounds otherwise than the exact); lossy.  ``traits`` may be several of sparse, quantised,
    linear.  ``fallback`` is another backend's name.  ``portable`` runs wherever PyTorch does.  ``known_bad`` is a TOML
    file of defects, beside the declaration.
    """

    name: str
    kernels: tuple[Kernel, ...] = ()
    quality: str = "exact"
    traits: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()  # self, cross; not said: both, and self alone for a sparse backend
    aliases: tuple[str, ...] = ()
    fallback: str | None = None
    portable: Kernel | None = None
    needs_grid: bool = False  # its blocks follow the token grid, so each grid has a decision of its own
    per_request: bool = False  # exact or drop-in dense: one request may switch to it while others keep theirs
    tolerance: Mapping[str, float] = field(default_factory=dict)  # dtype -> max abs error on N(0, 1) data
    known_bad: str = ""
    # Its settings: a subclass of hal.config.Config, or "module:Class", which is imported when it is needed.
    config: str | type[Any] | None = None
    title: str = ""
    # Rows for platforms whose owners have none for it: how a backend from outside the tree says where its kernels run.
    support: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.roles:
            both = frozenset({"self"}) if "sparse" in self.traits else frozenset({"self", "cross"})
            object.__setattr__(self, "roles", both)
        if self.quality not in QUALITIES:
            raise DeclarationError(f"backend {self.name}: quality {self.quality!r}; allowed: {', '.join(QUALITIES)}")
