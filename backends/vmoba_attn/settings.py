"""The settings of vmoba_attn."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from hal.config import Config

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Settings(Config):
    groups: ClassVar[tuple[str, ...]] = ("moba_config",)

    # A chunk of a temporal layer is so many whole frames; the last may have fewer.
    temporal_chunk_size: Positive
    # How many chunks a query attends to in mode topk, its own included.
    temporal_topk: Positive
    # A chunk of a spatial layer is a window of rows and columns, in all frames.
    spatial_chunk_size: tuple[Positive, Positive]
    spatial_topk: Positive
    # A chunk of a spatio-temporal layer: frames, rows, columns.
    st_chunk_size: tuple[Positive, Positive, Positive]
    st_topk: Positive
    # topk takes a number of chunks, threshold as many as reach a share of the scores.
    moba_select_mode: Literal["threshold", "topk"] = "threshold"
    # The share of the scores, each less the lowest, that the chunks of a query must reach.
    moba_threshold: Annotated[float, Field(ge=0, le=1)] = 0.25
    # What competes: the chunks of a query; the queries of a chunk; everything; everything of a head.
    moba_threshold_type: Literal["query_head", "block", "overall", "head_global"] = "query_head"
    # Denoising steps and layers before these attend to everything.
    first_full_step: Count = 12
    first_full_layer: Count = 0
    # From first_full_layer on, so many temporal layers, then spatial, then spatio-temporal ones; and again.
    temporal_layer: Count = 1
    spatial_layer: Count = 1
    st_layer: Count = 1

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if not self.temporal_layer + self.spatial_layer + self.st_layer:
            raise ValueError("temporal_layer, spatial_layer and st_layer are all 0; one of them must be 1 or more")
        if self.moba_select_mode == "topk" and self.moba_threshold_type == "block":
            raise ValueError(
                "moba_threshold_type=block is for moba_select_mode=threshold; with topk, write query_head, overall or head_global"
            )
        return self
