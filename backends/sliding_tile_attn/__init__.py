"""Sliding Tile Attention (STA): each tile of 6 x 8 x 8 tokens attends to a window of tiles, which a strategy file gives for
every step, layer and head, and which hal can make by searching and tuning.  Text tokens attend to everything, and
everything to them.

Conditions: hao-ai-lab/FastVideo, fastvideo-kernel/python/fastvideo_kernel/ops.py, and csrc/attn/st_attn before it.
Paper: arXiv 2502.04507.
"""

from __future__ import annotations

from hal import in_tree
from hal.backend import Backend, Kernel, Needs
from hal.facts import FLOATS
from hal.rules import Between, Rule, Same

RULES = (
    Rule("ring.grid", {"ring": Between(2)}, note="a window is of the whole video, and a ring has a part of it",
         fix="run it without a ring"),
    Rule("ulysses.heads", {"ulysses": Between(2)},
         note="the strategy names heads of the whole model, and hal is not told which of them this rank has",
         fix="run it without sequence parallelism"),
)  # fmt: skip
NATIVE = {
    "dtype": frozenset({"bfloat16"}),
    "head_dim": frozenset({64, 128}),
    "v_head_dim": Same("head_dim"),
    "empty": False,
}
PROOF = ("window_size", "text_length", "has_text")

STA = Kernel(
    "sta",
    "hal.backends.sliding_tile_attn.native:st_attn",
    layout="bhsd",
    limits=NATIVE,
    rules=RULES,
    needs=(Needs("st-attn", "st_attn", "sliding_tile_attention", install="pip install st_attn",
                 parameters=("q_all", *PROOF, "dit_seq_shape")),),
    confirm="hal.backends.sliding_tile_attn.native:confirm",
    title="STA of the package st_attn",
)  # fmt: skip
STA_FASTVIDEO = Kernel(
    "sta.fastvideo",
    "hal.backends.sliding_tile_attn.native:fastvideo",
    layout="bhsd",
    limits=NATIVE,
    rules=RULES,
    needs=(
        Needs("fastvideo-kernel", "fastvideo_kernel", "sliding_tile_attention", install="pip install fastvideo-kernel",
              parameters=("q", *PROOF, "seq_shape")),
    ),
    confirm="hal.backends.sliding_tile_attn.native:confirm",
    title="STA of FastVideo's kernels",
)  # fmt: skip
TRITON = Kernel(
    "sta.triton",
    "hal.backends.sliding_tile_attn.portable:triton",
    layout="bhsd",
    honours={"scale", "gqa", "lse", "mask.key_padding"},
    limits=in_tree.LIMITS,
    rules=RULES,
    needs=(in_tree.TRITON,),
    title="STA by hal's Triton kernel",
)
PORTABLE = Kernel(
    "sta.portable",
    "hal.backends.sliding_tile_attn.portable:bind",
    layout="bhsd",
    honours={"scale", "gqa", "grad", "lse", "lse_grad", "mask.key_padding"},
    limits={"dtype": FLOATS | {"float64"}},
    rules=RULES,
    title="STA in PyTorch",
)

BACKEND = Backend(
    "sliding_tile_attn",
    kernels=(STA, STA_FASTVIDEO, TRITON),
    portable=PORTABLE,
    quality="lossy",
    traits=frozenset({"sparse"}),
    needs_grid=True,
    aliases=("sta",),
    fallback="torch_sdpa",
    config="hal.backends.sliding_tile_attn.settings:Settings",
    title="Sliding Tile Attention",
)
