"""The settings of video_sparse_attn_h3, all of them upstream's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field, model_validator

from hal.config import Config, Layers


class Settings(Config):
    # The share of video tiles that a tile of video queries does not attend to.  FastH3 was trained with 0.9.
    sparsity: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, validation_alias=AliasChoices("sparsity", "VSA_sparsity")
    )
    # exempt: every tile of text, pictures and sound is kept.  compete: they take part in the top-k, and it keeps as many
    # tiles in all as exempt does.
    vsa_mode: Literal["exempt", "compete"] = "exempt"
    # Denoising steps before this one attend to every tile.
    vsa_dense_first_n_steps: Annotated[int, Field(ge=0)] = 0
    # Layers that attend to every tile.
    vsa_dense_layers: Layers = ()
    # Tokens of a tile: 4 x 4 x 4, as the models were trained.
    vsa_tile_size: Literal[64] = 64
    # The share of the tiles of each reference video that is kept; null: as much as of the video that is made.
    vsa_ref_keep_rate: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _refs_are_exempt(self) -> Settings:
        if self.vsa_ref_keep_rate is not None and self.vsa_mode != "exempt":
            raise ValueError("vsa_ref_keep_rate is for vsa_mode=exempt; drop one of them")
        return self
