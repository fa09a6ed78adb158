"""The settings of hybrid_window_attn_h3.  What a checkpoint was trained with is no setting: window.Architecture."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hal.config import Config


class Settings(Config):
    # Run VDN-H3's weights densely, without gates and without the linear branch: to compare them with MiniMax-H3 and a LoRA.
    # A study, not a sample.
    vdn_h3_dense_smoke: bool = False
    # Rows of keys that one call of FlashAttention gathers at most; the keys of one chunk may be more.  It changes how many
    # calls there are and what they need of memory, and nothing else.
    vdn_max_gather_rows: Annotated[int, Field(ge=1)] = 200_000
