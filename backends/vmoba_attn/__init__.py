"""V-MoBA: keys lie in chunks, by layer of frames, of a window in space, or of both; each query attends to its own chunk and
to the chunks whose mean keys fit it best.

Conditions: hao-ai-lab/FastVideo, fastvideo-kernel/python/fastvideo_kernel/vmoba.py, and csrc/attn/vmoba_attn before it.
Paper: arXiv 2506.23858.
"""

from __future__ import annotations

from hal.backend import Backend, Kernel, Needs
from hal.facts import FLOATS
from hal.rules import Between, Rule, Same

RING = Rule("ring.grid", {"ring": Between(2)}, note="chunks are chosen among all of a video's, and a ring has a part of them",
            fix="split heads instead: Ulysses")  # fmt: skip
# FlashAttention 2 computes the chunks in both packages, which import what they call of it themselves.
NATIVE = {
    "dtype": frozenset({"float16", "bfloat16"}),
    "head_dim": range(8, 257, 8),
    "v_head_dim": Same("head_dim"),
    "empty": False,
}
PROOF = ("moba_chunk_size", "moba_topk", "select_mode", "simsum_threshold", "threshold_type")
FLASH = Needs("flash-attn", "flash_attn", "flash_attn_varlen_func", ">=2.7.1,<3",
              install="pip install 'flash-attn>=2.7.1' --no-build-isolation")  # fmt: skip

VMOBA = Kernel(
    "vmoba",
    "hal.backends.vmoba_attn.native:kernel",
    layout="bhsd",
    limits=NATIVE,
    rules=(RING,),
    # PyPI's package kernel is another project.  Upstream's distribution is called vmoba.
    needs=(
        Needs("kernel", "kernel.attn.vmoba_attn.vmoba", "moba_attn_varlen", names=("vmoba",), parameters=PROOF,
              install="install V-MoBA from FastVideo's csrc/attn; PyPI's kernel is another project"),
        FLASH,
    ),
    confirm="hal.backends.vmoba_attn.native:confirm",
    title="V-MoBA of the package kernel.attn",
)  # fmt: skip
VMOBA_FASTVIDEO = Kernel(
    "vmoba.fastvideo",
    "hal.backends.vmoba_attn.native:fastvideo",
    layout="bhsd",
    limits=NATIVE,
    rules=(RING,),
    needs=(
        Needs("fastvideo-kernel", "fastvideo_kernel", "moba_attn_varlen", install="pip install fastvideo-kernel",
              parameters=PROOF),
        FLASH,
    ),
    confirm="hal.backends.vmoba_attn.native:confirm",
    title="V-MoBA of FastVideo's kernels",
)  # fmt: skip
PORTABLE = Kernel(
    "vmoba.portable",
    "hal.backends.vmoba_attn.portable:bind",
    layout="bhsd",
    honours={"scale", "gqa", "grad", "lse", "lse_grad"},
    limits={"dtype": FLOATS | {"float64"}},
    rules=(RING,),
    title="V-MoBA in PyTorch",
)

BACKEND = Backend(
    "vmoba_attn",
    kernels=(VMOBA, VMOBA_FASTVIDEO),
    portable=PORTABLE,
    quality="lossy",
    traits=frozenset({"sparse"}),
    needs_grid=True,
    aliases=("vmoba",),
    fallback="torch_sdpa",
    config="hal.backends.vmoba_attn.settings:Settings",
    title="V-MoBA",
)
