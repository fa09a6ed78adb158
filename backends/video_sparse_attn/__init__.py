"""Video Sparse Attention (VSA): each cube of 4 x 4 x 4 tokens attends to the cubes whose means fit its own best, and,
where the model has a gate, to the means of all cubes.

Conditions: hao-ai-lab/FastVideo, fastvideo-kernel/python/fastvideo_kernel/ops.py, and csrc/attn/vsa before it.
Paper: arXiv 2505.13389.
"""

from __future__ import annotations

from hal import in_tree
from hal.backend import Backend, Kernel, Needs
from hal.facts import FLOATS
from hal.rules import Between, Rule, Same

RING = Rule("ring.grid", {"ring": Between(2)}, note="tiles are chosen among all of a video's, and a ring has a part of them",
            fix="split heads instead: Ulysses")  # fmt: skip
NATIVE = {
    "dtype": frozenset({"bfloat16"}),
    "head_dim": frozenset({64, 128}),
    "v_head_dim": Same("head_dim"),
    "empty": False,
}
PROOF = ("variable_block_sizes", "topk", "block_size", "compress_attn_weight")

VSA = Kernel(
    "vsa",
    "hal.backends.video_sparse_attn.native:vsa",
    layout="bhsd",
    limits=NATIVE,
    rules=(RING,),
    needs=(Needs("vsa", "vsa", "video_sparse_attn", install="pip install vsa", parameters=PROOF),),
    confirm="hal.backends.video_sparse_attn.native:confirm",
    title="VSA of the package vsa",
)
VSA_FASTVIDEO = Kernel(
    "vsa.fastvideo",
    "hal.backends.video_sparse_attn.native:fastvideo",
    layout="bhsd",
    limits=NATIVE,
    rules=(RING,),
    needs=(
        Needs("fastvideo-kernel", "fastvideo_kernel", "video_sparse_attn", install="pip install fastvideo-kernel",
              parameters=(*PROOF, "q_variable_block_sizes")),
    ),
    confirm="hal.backends.video_sparse_attn.native:confirm",
    title="VSA of FastVideo's kernels",
)  # fmt: skip
TRITON = Kernel(
    "vsa.triton",
    "hal.backends.video_sparse_attn.portable:triton",
    layout="bhsd",
    honours={"scale", "gqa"},
    limits=in_tree.LIMITS,
    rules=(RING,),
    needs=(in_tree.TRITON,),
    title="VSA by hal's Triton kernel",
)
PORTABLE = Kernel(
    "vsa.portable",
    "hal.backends.video_sparse_attn.portable:bind",
    layout="bhsd",
    honours={"scale", "gqa", "grad"},
    limits={"dtype": FLOATS | {"float64"}},
    rules=(RING,),
    title="VSA in PyTorch",
)

BACKEND = Backend(
    "video_sparse_attn",
    kernels=(VSA, VSA_FASTVIDEO, TRITON),
    portable=PORTABLE,
    quality="lossy",
    traits=frozenset({"sparse"}),
    needs_grid=True,
    aliases=("vsa",),
    fallback="torch_sdpa",
    config="hal.backends.video_sparse_attn.settings:Settings",
    title="Video Sparse Attention",
)
