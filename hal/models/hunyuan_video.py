"""HunyuanVideo: its token refiner attends to the text alone, under a mask of its own, so no choice for the video is for it."""

from . import Card

CARD = Card(
    "hunyuan_video",
    classes=frozenset(
        {
            "HunyuanVideo15Transformer3DModel",
            "HunyuanVideoFramepackTransformer3DModel",
            "HunyuanVideoTransformer3DModel",
        }
    ),
    apart=("context_embedder.token_refiner",),
    title="HunyuanVideo",
)
