"""MiniMax-H3 and FastH3: one transformer over a packed sequence of text, pictures, sound and video.

FastH3 is MiniMax-H3 with trained gates (``to_gate_compress``) for video_sparse_attn_h3.  VDN-H3, with a linear branch beside
its attention, has a card of its own.  Names are those of diffusers' ``MiniMaxH3Transformer3DModel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import Card, Need

if TYPE_CHECKING:
    from ..sparse import PackedRows

SPARSE = frozenset({"video_sparse_attn_h3", "hybrid_window_attn_h3"})
SDPA = frozenset({"torch_sdpa", "torch_cudnn_sdpa"})
DOCUMENT = "SGLang docs, VSA-H3 constraints"
CLASSES = frozenset({"MiniMaxH3Transformer3DModel"})
VIDEO = 2  # of text, audio and video rows

# What holds of every transformer of the family.
NEEDS = (
    Need("only", SDPA, "the H3 text encoder has layers for PyTorch's SDPA only", "text_encoder", DOCUMENT),
    *(
        Need("forbid", SPARSE, "only the transformer's blocks attend to a packed video", part, DOCUMENT)
        for part in ("token_refiner", "vae", "audio_vae")
    ),
)
CARD = Card(
    "minimax_h3",
    classes=CLASSES,
    needs=(*NEEDS, Need("forbid", frozenset({"hybrid_window_attn_h3"}), "it has no linear branch; VDN-H3 has", citation=DOCUMENT)),
    without=("*.linear_attention.*", "*.to_out_linear.*"),
    apart=("token_refiner",),
    gates=("*.to_gate_compress.weight",),
    title="MiniMax-H3, FastH3",
)  # fmt: skip


def rows(given: Mapping[str, Any]) -> PackedRows | None:
    """How the packed rows of a call lie, from the arguments of the transformer's forward; None: they do not say.

    Runs of text, video and audio rows are segments.  The last run of video rows is the video that is made; pictures and
    reference videos come before it, and are segments like text.  Waits for the device.
    """
    import torch

    from ..sparse import PackedRows

    at, *indices = (given.get(k) for k in ("position_ids", "text_indices", "audio_indices", "video_indices"))
    if at is None or any(i is None for i in indices):
        return None
    kinds = torch.full((at.shape[0],), -1)
    for kind, index in enumerate(indices):
        kinds[index.cpu()] = kind  # type: ignore[union-attr]
    runs, counts = kinds.unique_consecutive(return_counts=True)
    kind, sizes = runs.tolist(), counts.tolist()
    if VIDEO not in kind or -1 in kind:
        return None
    last = len(kind) - 1 - kind[::-1].index(VIDEO)
    first = sum(sizes[:last])
    video = at[first : first + sizes[last]].cpu()
    axes = [video[:, axis].unique() for axis in range(3)]
    if not torch.equal(video[:, :3], torch.cartesian_prod(*axes)):  # another picture touches it
        return None
    frames, height, width = (axis.numel() for axis in axes)
    return PackedRows(tuple(sizes[:last]), (frames, height, width), tuple(sizes[last + 1 :]))
