"""The token grid of a video or image transformer: read from the arguments of its forward, by family.

A family is data: which classes, and which reading.  What is not listed has no grid that hal knows; ``hal.grid`` sets it.
Shapes and argument names are those of diffusers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..context import Grid

Arguments = Mapping[str, Any]


def _patches(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Latent frames, rows and columns that make one token."""
    size = config.get("patch_size", 1)
    if isinstance(size, (tuple, list)):
        t, h, w = (1, *size)[-3:]
        return int(t), int(h), int(w)
    return int(config.get("patch_size_t") or 1), int(size or 1), int(size or 1)


def _latents(order: str) -> Callable[[Arguments, Mapping[str, Any]], tuple[int, int, int] | None]:
    """From ``hidden_states``, latents whose axes are ``order``; channels are no token."""

    def read(given: Arguments, config: Mapping[str, Any]) -> tuple[int, int, int] | None:
        x = given.get("hidden_states")
        if x is None or x.dim() != len(order):
            return None
        sizes = dict(zip(order, x.shape))
        t, h, w = _patches(config)
        frames = sizes.get("t", 1)
        return -(-frames // t), sizes["h"] // h, sizes["w"] // w

    return read


def _named(given: Arguments, config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Tokens are packed already, and the sizes are arguments."""
    sizes = tuple(given.get(k) for k in ("num_frames", "height", "width"))
    return None if None in sizes else tuple(map(int, sizes))  # type: ignore[arg-type, return-value]


def _ids(given: Arguments, config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Tokens are packed already; ``img_ids`` [tokens, 3] has the row and the column of each."""
    ids, x = given.get("img_ids"), given.get("hidden_states")
    if ids is None or x is None:
        return None
    ids = ids[0] if ids.dim() == 3 else ids
    rows, columns = int(ids[:, -2].max()) + 1, int(ids[:, -1].max()) + 1
    return (1, rows, columns) if rows * columns == x.shape[1] else None  # else several pictures, or a reference


FAMILIES: tuple[tuple[frozenset[str], Callable[[Arguments, Mapping[str, Any]], tuple[int, int, int] | None]], ...] = (
    (
        frozenset(
            {
                "AllegroTransformer3DModel",
                "ChronoEditTransformer3DModel",
                "CosmosTransformer3DModel",
                "HunyuanVideo15Transformer3DModel",
                "HunyuanVideoTransformer3DModel",
                "MochiTransformer3DModel",
                "MotifVideoTransformer3DModel",
                "SanaVideoTransformer3DModel",
                "SkyReelsV2Transformer3DModel",
                "WanTransformer3DModel",
                "WanVACETransformer3DModel",
            }
        ),
        _latents("bcthw"),
    ),
    (frozenset({"CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"}), _latents("btchw")),
    (frozenset({"LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel"}), _named),
    (
        frozenset(
            {
                "BriaTransformer2DModel",
                "ChromaTransformer2DModel",
                "FluxTransformer2DModel",
                "LongCatImageTransformer2DModel",
                "OvisImageTransformer2DModel",
            }
        ),
        _ids,
    ),
    (
        frozenset(
            {
                "AuraFlowTransformer2DModel",
                "CogView3PlusTransformer2DModel",
                "CogView4Transformer2DModel",
                "Lumina2Transformer2DModel",
                "PixArtTransformer2DModel",
                "SD3Transformer2DModel",
                "SanaTransformer2DModel",
            }
        ),
        _latents("bchw"),
    ),
)


# Joint attention over text and video in which diffusers puts the text first; elsewhere it comes last, or is not among them.
TEXT_FIRST = frozenset(
    {
        "AuraFlowTransformer2DModel",
        "BriaTransformer2DModel",
        "ChromaTransformer2DModel",
        "CogVideoXTransformer3DModel",
        "CogView3PlusTransformer2DModel",
        "CogView4Transformer2DModel",
        "ConsisIDTransformer3DModel",
        "FluxTransformer2DModel",
        "LongCatImageTransformer2DModel",
        "Lumina2Transformer2DModel",
        "OvisImageTransformer2DModel",
    }
)


def find(cls: str, given: Arguments, config: Mapping[str, Any]) -> Grid | None:
    """The grid of a call of a transformer of class ``cls``; None: not a family that is known here."""
    for classes, read in FAMILIES:
        if cls in classes:
            sizes = read(given, config)
            text = given.get("encoder_hidden_states")
            length = text.shape[1] if text is not None and getattr(text, "dim", lambda: 0)() == 3 else 0
            return None if sizes is None else Grid(*sizes, text=length, text_first=cls in TEXT_FIRST)
    return None
