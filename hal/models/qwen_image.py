"""Qwen-Image: people get black pictures from it under SageAttention."""

from . import Card, Need

CARD = Card(
    "qwen_image",
    classes=frozenset({"QwenImageTransformer2DModel"}),
    needs=(Need("forbid", frozenset({"sage_attn"}), "its pictures turn black", citation="ComfyUI#9184"),),
    title="Qwen-Image",
)
