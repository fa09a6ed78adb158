"""Video Sparse Attention for MiniMax-H3 and FastH3: one packed sequence of text, pictures, sound and video.  A cube of
4 x 4 x 4 video tokens attends to the cubes whose means fit its own best and, unless they compete, to all other rows;
where the model has a gate, to the means of all tiles too.  Rows of no video attend to everything.

Conditions: hao-ai-lab/FastVideo, fastvideo/attention/backends/video_sparse_attn_h3.py; SGLang's backend of that name.
"""

from __future__ import annotations

from hal import in_tree
from hal.backend import Backend, Kernel
from hal.facts import FLOATS
from hal.rules import Between, Rule

RING = Rule("ring.packed", {"ring": Between(2)}, note="tiles are chosen among all rows of the packed sequence, and a ring has a part of them",
            fix="split heads instead: Ulysses")  # fmt: skip
ONE = Rule("packed.one", {"varlen": True}, {"batch": Between(1, 2)}, note="the packed rows are one sequence, and perhaps a second of pad rows",
           fix="call it once for each sequence")  # fmt: skip
FITTINGS = frozenset({"contiguous", "expand_kv"})  # rows and head_dim are those of what the model hands over

TRITON = Kernel(
    "vsa_h3.triton",
    "hal.backends.video_sparse_attn_h3.portable:triton",
    layout="bhsd",
    honours={"scale", "gqa", "varlen"},
    limits=in_tree.LIMITS,
    rules=(RING, ONE),
    fittings=FITTINGS,
    needs=(in_tree.TRITON,),
    title="VSA-H3 by hal's Triton kernel",
)
PORTABLE = Kernel(
    "vsa_h3.portable",
    "hal.backends.video_sparse_attn_h3.portable:bind",
    layout="bhsd",
    honours={"scale", "gqa", "varlen", "grad"},
    limits={"dtype": FLOATS | {"float64"}},
    rules=(RING, ONE),
    fittings=FITTINGS,
    title="VSA-H3 in PyTorch",
)

BACKEND = Backend(
    "video_sparse_attn_h3",
    kernels=(TRITON,),
    portable=PORTABLE,
    quality="lossy",
    traits=frozenset({"sparse"}),
    aliases=("vsa_h3",),
    fallback="torch_sdpa",
    config="hal.backends.video_sparse_attn_h3.settings:Settings",
    title="Video Sparse Attention for MiniMax-H3",
)
