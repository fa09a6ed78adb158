"""VDN-H3: MiniMax-H3 whose blocks attend in a window of frames, with a gate for each head and a linear branch for the rest."""

from __future__ import annotations

from . import Card, Need
from .minimax_h3 import CLASSES, NEEDS

HYBRID = frozenset({"hybrid_window_attn_h3"})
DOCUMENT = "SGLang docs, hybrid window attention constraints"
WHY = (
    "another backend would skip VDN-H3's linear branch and its gates, and compute another model; to run it densely for a "
    "study, set vdn_h3_dense_smoke of hybrid_window_attn_h3"
)

CARD = Card(
    "vdn_h3",
    classes=CLASSES,
    needs=(*NEEDS, Need("only", HYBRID, WHY, citation=DOCUMENT), Need("default", HYBRID, "it was trained with it")),
    weights=("*.linear_attention.*", "*.to_out_linear.*"),
    apart=("token_refiner",),
    gates=("*.softmax_gate.up.weight",),
    geometry=("hybrid_attention",),
    title="VDN-H3",
)
