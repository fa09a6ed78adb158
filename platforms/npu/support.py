"""What runs on Ascend NPUs: backend -> rows, the better kernel first.  Portable forms are added by the catalog."""

from __future__ import annotations

from hal.facts import FLOATS
from hal.rows import Prefer, Row
from hal.rules import Between

from .kernels import ASCEND_FA

A2 = frozenset({"ascend910b"})
A3 = frozenset({"ascend910c"})
A5 = frozenset({"ascend950"})
A1 = frozenset({"ascend910"})
INFERENCE = frozenset({"ascend310p", "ascend310b"})

SUPPORT = {
    "fa": (
        Row(
            ASCEND_FA,
            A2 | A3,
            cite="Ascend/op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_infer_attention_score.md",
        ),
    ),
    "torch_sdpa": (
        Row(
            "sdpa.fused",
            A2 | A3 | A5,
            {
                "dtype": FLOATS,
                "head_dim": Between(1, 512),
                "v_head_dim": Between(1, 512),
                "heads": Between(1, 2048),
                "mask_shape": {"none", "b1qk", "bhqk", "11qk"},
            },
            lacks={"mask.additive"},
            cite="Ascend/op-plugin op_plugin/ops/opapi/ScaledDotProductAttentionKernelNpuOpApi.cpp, vllm-omni PR#1031",
        ),
    ),
}

ORDER = (
    Prefer("fa", {"ring": Between(2)}, why="ring attention merges by LSE, which only Ascend's own kernel returns"),
    Prefer("fa", {"lse": True}, why="the same, for a call that asks for its LSE"),
    Prefer("torch_sdpa", why="torch_npu registers its fused attention with PyTorch"),
    Prefer("fa", why="rather than the math path over its budget"),
)

FAMILIES = {"A1": A1, "A2": A2, "A3": A3, "A5": A5, "inference": INFERENCE}
