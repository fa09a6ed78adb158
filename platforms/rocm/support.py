"""What runs on which AMD GPU: backend -> rows, the better kernel first.  This table is the support matrix.

Portable forms (sdpa.math) are added by the catalog; an architecture that stands in no row has those only.
PyTorch's flash and efficient paths are AOTriton's kernels.  Which chips it has, and which as experiments only, is said
by ``isArchExperimentallySupported`` in its releases 0.10 to 0.13.
"""

from __future__ import annotations

from hal.rows import Prefer, Row
from hal.rules import Between, Rule, Same, Versions

from . import VARIABLE

CDNA2 = frozenset({"gfx90a"})
CDNA3 = frozenset({"gfx942"})
CDNA4 = frozenset({"gfx950"})
CDNA = CDNA2 | CDNA3 | CDNA4
RDNA3 = frozenset({"gfx1100", "gfx1101", "gfx1102", "gfx1103"})
RDNA35 = frozenset({"gfx1150", "gfx1151", "gfx1152", "gfx1153"})
RDNA4 = frozenset({"gfx1200", "gfx1201"})
RDNA = RDNA3 | RDNA35 | RDNA4
OFFICIAL = CDNA | {"gfx1100", "gfx1201"}
STRIX_HALO = frozenset({"gfx1151"})  # out of AOTriton's experiments from 0.12 on
EXPERIMENTAL = RDNA - OFFICIAL
LATER = frozenset({"gfx1102", "gfx1103", "gfx1152", "gfx1153"})

SDP = "pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, USE_ROCM"
AOTRITON = "aotriton v3src/util.cc isArchExperimentallySupported"
FA2 = "flash-attention README.md, setup.py"
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

SUPPORT = {
    "fa": (
        Row("fa2", CDNA, cite=FA2),
        Row("fa2", RDNA, tier="experimental", cite=FA2),
    ),
    "aiter": (
        Row("aiter", CDNA3 | CDNA4, cite=AITER),
        Row("aiter", CDNA2, tier="experimental", cite="aiter aiter/jit/core.py; the README does not list it"),
        Row("aiter.triton", CDNA3 | CDNA4, cite=AITER),
        Row("aiter.triton", {"gfx1100", "gfx1151", "gfx1201"}, tier="experimental", cite=AITER),
    ),
    "torch_sdpa": (
        Row("sdpa.flash", OFFICIAL, cite=AOTRITON),
        Row("sdpa.flash", STRIX_HALO, FROM_012, cite=AOTRITON),
        Row("sdpa.flash", EXPERIMENTAL, rules=BY_REQUEST, tier="experimental", cite=AOTRITON),
        Row("sdpa.efficient", OFFICIAL, TO_512, EFFICIENT, cite=AOTRITON),
        Row("sdpa.efficient", STRIX_HALO, {**TO_512, **FROM_012}, EFFICIENT, cite=AOTRITON),
        Row("sdpa.efficient", EXPERIMENTAL, TO_512, (*BY_REQUEST, *EFFICIENT), tier="experimental", cite=AOTRITON),
    ),
}

ORDER = (
    Prefer("fa", why="where flash_attn is installed; AITER is taken on request"),
    Prefer("torch_sdpa", why="runs everywhere"),
)

FAMILIES = {
    "CDNA 2": CDNA2,
    "CDNA 3": CDNA3,
    "CDNA 4": CDNA4,
    "RDNA 3": RDNA3,
    "RDNA 3.5": RDNA35,
    "RDNA 4": RDNA4,
}
