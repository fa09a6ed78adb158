"""Hybrid window attention for VDN-H3: exact attention in a window of frames, scaled by a gate of each head, and beside it
the Video Delta linear branch over exactly what the window leaves out.

The model projects; the backend does the rest.  A model hands over, around its attention of normed and rotated q and k:

    with hal.sparse.given(hybrid=architecture, gate=gate, linear=branch):  # window.Architecture, [.., rows, H], delta.LinearBranch
        out = hal.attention(q, k, v)  # the window, gated
    hidden = to_out(out.flatten(-2)) if branch.read is None else to_out(out.flatten(-2)) + to_out_linear(branch.read.flatten(-2))

Conditions: SGLang's backend of that name; OpenVDN vdn-minimax-h3.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hal import in_tree
from hal.backend import Backend, Kernel
from hal.backends.fa import FA3, FA3_HUB, FA3_SGL, FA4
from hal.backends.video_sparse_attn_h3 import ONE
from hal.facts import FLOATS
from hal.rules import Between, Rule, Same

RING = Rule("ring.packed", {"ring": Between(2)}, note="states are summed over all frames, and a ring has a part of them",
            fix="split heads instead: Ulysses")  # fmt: skip
FITTINGS = frozenset({"contiguous", "expand_kv"})  # rows and head_dim are those of what the model hands over
NATIVE = {
    "dtype": frozenset({"bfloat16"}),
    "head_dim": frozenset({64, 128}),
    "v_head_dim": Same("head_dim"),
    "empty": False,
}
WHERE = "hal.backends.hybrid_window_attn_h3"

FLASH = tuple(  # the packages' functions for packed sequences: their kernels with other limits
    replace(
        fa,
        name=f"hybrid.{fa.name}",
        bind=f"{WHERE}.native:{fa.name.replace('.', '_')}",
        layout="bhsd",
        honours=frozenset({"scale", "varlen"}),
        limits=NATIVE,
        rules=(RING, ONE),
        fittings=FITTINGS,
        title=f"the window by {fa.title}",
    )
    for fa in (FA3, FA3_HUB, FA3_SGL, FA4)
)
TRITON = Kernel(
    "hybrid.triton",
    f"{WHERE}.portable:triton",
    layout="bhsd",
    honours={"scale", "gqa", "varlen"},
    limits=in_tree.LIMITS,
    rules=(RING, ONE),
    fittings=FITTINGS,
    needs=(in_tree.TRITON,),
    title="the window by hal's Triton kernel",
)
PORTABLE = Kernel(
    "hybrid.portable",
    f"{WHERE}.portable:bind",
    layout="bhsd",
    honours={"scale", "gqa", "varlen", "grad"},
    limits={"dtype": FLOATS | {"float64"}, "v_head_dim": Same("head_dim")},
    rules=(RING, ONE),
    fittings=FITTINGS,
    title="the window in PyTorch",
)

BACKEND = Backend(
    "hybrid_window_attn_h3",
    kernels=(*FLASH, TRITON),
    portable=PORTABLE,
    quality="lossy",
    traits=frozenset({"sparse", "linear"}),
    aliases=("hybrid_window_h3",),
    fallback="torch_sdpa",
    known_bad=str(Path(__file__).parent / "known_bad.toml"),
    config=f"{WHERE}.settings:Settings",
    title="Hybrid window attention for VDN-H3",
)
