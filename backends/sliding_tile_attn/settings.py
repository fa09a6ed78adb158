"""The settings of sliding_tile_attn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from hal.config import Config


class Settings(Config):
    # The strategy file: a JSON object of "step_layer_head": [frames, rows, columns], windows in tiles of 6 x 8 x 8 tokens.
    mask_strategy_file_path: Annotated[str, Field(min_length=1)]
    # STA_inference reads the strategy file.  The others would make one; see strategy.py.
    sta_mode: Literal["STA_inference", "STA_searching", "STA_tuning", "STA_tuning_cfg"] = Field(
        "STA_inference", validation_alias=AliasChoices("sta_mode", "STA_mode")
    )
    # Denoising steps before this one attend to everything.
    skip_time_steps: Annotated[int, Field(ge=0)] = 15
