"""What the rows of AMD GPUs say more than once: sources, and limits under a condition."""

from __future__ import annotations

from hal.rules import Between, Rule, Same, Versions

from . import VARIABLE
from .arch import LATER, RDNA3, RDNA35

SDP = "pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, USE_ROCM"
AOTRITON = "aotriton v3src/util.cc isArchExperimentallySupported"
# Composable Kernel is what flash-attn builds on ROCm unless it is told otherwise; its Triton part is what RDNA has.
FA2_CK = "flash-attention csrc/flash_attn_ck/mha_fwd.cpp, mha_bwd.cpp: window, dropout and deterministic are passed on"
FA2_TRITON = (
    "flash-attention README.md, flash_attn/flash_attn_triton_amd/interface_v2.py: a window has no backward, every call "
    "drops the same places, deterministic is not looked at"
)
AITER = "aiter README.md, supported hardware"

BY_REQUEST = (
    Rule(
        "aotriton.experimental",
        require={f"env.{VARIABLE}": "1"},
        note=f"AOTriton calls this GPU experimental, and PyTorch takes its math path unless {VARIABLE}=1",
        fix=f"set {VARIABLE}=1 before Python starts",
        citation="unsloth#8225, PR#8821; pytorch PR#156499",
    ),
    Rule(
        "aotriton.images",
        {"arch": LATER},
        {"torch": Versions(">=2.11")},
        note="AOTriton has code for this GPU from 0.11.2 on, which torch 2.11 brings",
        fix="upgrade to torch 2.11 or newer",
        citation="aotriton PR#138, PR#142; pytorch PR#174105; TheRock#1908",
    ),
)
EFFICIENT = (
    Rule("head_dim.rdna3", {"arch": RDNA3 | RDNA35}, {"head_dim": Between(high=256)}, citation=SDP),
    Rule(
        "aotriton.sizes",
        {"torch": Versions("<2.13")},
        {"head_dim": Between(high=256), "v_head_dim": Same("head_dim")},
        note="AOTriton before 0.12, which torch 2.13 brings, takes equal head_dim up to 256",
        fix="upgrade to torch 2.13 or newer",
        citation="pytorch PR#184288",
    ),
)
TO_512 = {"head_dim": Between(high=512)}
FROM_012 = {"aotriton": Versions(">=0.12")}
