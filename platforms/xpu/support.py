"""What runs on Intel GPUs: backend -> rows, the better kernel first.  Portable forms are added by the catalog."""

from __future__ import annotations

from hal.rows import Prefer, Row
from hal.rules import Between, Versions

from .kernels import TORCH_FLASH, XPU_FLASH

XE_HPC = frozenset({"pvc"})
XE_HPG = frozenset({"acm"})
XE_LPG = frozenset({"mtl", "arl"})
XE2 = frozenset({"bmg", "lnl"})
XE3 = frozenset({"ptl"})

SUPPORT = {
    "fa": (
        Row(XPU_FLASH, {"bmg"}, cite="sgl-project/sgl-kernel-xpu src/BuildOnLinux.cmake: compiled for bmg"),
        Row(XPU_FLASH, XE_HPC, tier="experimental", cite="sgl-kernel-xpu flash_attn.py: chips with fp64"),
    ),
    "torch_sdpa": (
        Row("sdpa.fused", limits={"head_dim": Between(1, 576), "v_head_dim": Between(1, 576)}, lacks={"grad"},
            cite="pytorch aten/src/ATen/native/mkldnn/xpu/Attention.cpp: oneDNN, no backward (torch-xpu-ops#1749)"),
        Row(TORCH_FLASH, XE_HPC | {"bmg"}, {"torch": Versions(">=2.11,<2.16")},
            cite="pytorch sdp_utils.cpp of XPU: SYCL-TLA flash, with a backward from 2.11 (torch-xpu-ops#2232)"),
    ),
}  # fmt: skip

ORDER = (
    Prefer("fa", why="sgl-kernel-xpu's flash attention, where it takes the call"),
    Prefer("torch_sdpa", why="oneDNN's fused attention, and PyTorch's own"),
)

FAMILIES = {"Xe-HPC": XE_HPC, "Xe-HPG": XE_HPG, "Xe-LPG": XE_LPG, "Xe2": XE2, "Xe3": XE3}
