"""What runs on Moore Threads GPUs: backend -> rows, the better kernel first.  The catalog adds portable forms."""

from __future__ import annotations

from hal.facts import HALF
from hal.rows import Prefer, Row
from hal.rules import OneOf, Pairs

from .kernels import MUSA_FA2, MUSA_FLASH

CHUNXIAO = frozenset({"mp21"})
QUYUAN = frozenset({"mp22"})
PINGHU = frozenset({"mp31"})

SUPPORT = {
    "fa": (
        Row(MUSA_FLASH, PINGHU, cite="MooreThreads/mate README.md: MP31"),
        Row(MUSA_FA2, QUYUAN | PINGHU, tier="experimental", cite="transformers PR#48612, transformers#47892"),
    ),
    "torch_sdpa": (
        Row(
            "sdpa.fused",
            QUYUAN | PINGHU,
            {
                "dtype": HALF,
                "head_dim": OneOf(range(1, 129), 160, 192),
                "v_head_dim": OneOf(range(1, 129), Pairs("head_dim", {(160, 160), (192, 128)})),
            },
            cite="MooreThreads/torch_musa torch_musa/csrc/aten/ops/attention/mudnn/SDPUtils.h",
        ),
    ),
}

ORDER = (
    Prefer("fa", why="MATE's flash attention, or the vendor's build of flash_attn"),
    Prefer("torch_sdpa", why="torch_musa registers muDNN's flash attention with PyTorch"),
)

FAMILIES = {"Chunxiao": CHUNXIAO, "Quyuan": QUYUAN, "Pinghu": PINGHU}
