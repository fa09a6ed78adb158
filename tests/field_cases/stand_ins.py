"""Backends that are not here yet, by stand-ins of the same traits: the rules of selection are about the traits."""

from __future__ import annotations

from typing import Any

from hal.backend import Backend, Kernel, Needs
from hal.facts.flat import FEATURES
from hal.rows import Row


def _unbound(call: Any) -> Any:
    raise AssertionError("a stand-in is chosen, and never run")


HALF = {"float16", "bfloat16"}
# As the sparse video backends: self-attention on one chip, no mask, no LSE, never automatic.
SPARSE = Backend(
    "made_sparse",
    kernels=(Kernel("made.sparse", _unbound, limits={"dtype": HALF, "head_dim": {64, 128}}, honours=frozenset({"rectangular"})),),
    quality="lossy",
    traits=frozenset({"sparse"}),
    roles=frozenset({"self"}),
    support={"cuda": (Row("made.sparse", {"sm90"}),)},
)  # fmt: skip
# As Sage: dense, quantised, from a package of its own, with FlashAttention as its declared fallback.
NEAR = Backend(
    "made_near",
    kernels=(
        Kernel(
            "made.near",
            _unbound,
            needs=(Needs("made-near", "made_near", "attention", "", "pip install made-near"),),
            limits={"dtype": HALF, "head_dim": {64, 96, 128}},
            honours=FEATURES - {"mask.bool", "mask.additive", "mask.key_padding"},
        ),
    ),
    quality="near",
    traits=frozenset({"quantised"}),
    fallback="fa",
    per_request=True,
    support={"cuda": (Row("made.near", {"sm80", "sm89", "sm90"}),)},
)
ALL = (SPARSE, NEAR)
