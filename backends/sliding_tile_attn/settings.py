"""The settings of sliding_tile_attn.  Files that they name are looked at when they are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, model_validator
from typing_extensions import Self

from hal.config import Config

from . import strategy, tables

Tiles = Annotated[int, Field(ge=1)]


class Settings(Config):
    # The strategy file: a JSON object of "step_layer_head": [frames, rows, columns], windows in tiles of 6 x 8 x 8 tokens.
    # STA_inference reads it, and the tuning modes write it.
    mask_strategy_file_path: Annotated[str, Field(min_length=1)]
    # STA_inference attends by the strategy.  STA_searching attends to everything and writes a table of what each candidate
    # window would have changed.  STA_tuning makes the strategy from all tables and attends by it; STA_tuning_cfg also
    # averages over the unconditional pass of guidance.
    sta_mode: Literal["STA_inference", "STA_searching", "STA_tuning", "STA_tuning_cfg"] = Field(
        "STA_inference", validation_alias=AliasChoices("sta_mode", "STA_mode")
    )
    # Denoising steps before this one attend to everything.
    skip_time_steps: Annotated[int, Field(ge=0)] = 15
    # The folder of search tables; null: the name of the strategy file with .search in place of its suffix.
    mask_search_path: Annotated[str, Field(min_length=1)] | None = None
    # The windows that STA_searching tries; empty: FastVideo's six, scaled to the grid.
    mask_candidates: tuple[tuple[Tiles, Tiles, Tiles], ...] = ()

    @property
    def search_folder(self) -> Path:
        return Path(self.mask_search_path or Path(self.mask_strategy_file_path).with_suffix(".search"))

    @property
    def tunes(self) -> bool:
        return self.sta_mode.startswith("STA_tuning")

    @property
    def searches(self) -> bool:
        return self.sta_mode == "STA_searching"

    @property
    def heads(self) -> int | None:
        """The query heads that they are for; None: any."""
        return None if self.searches else self.opened().heads

    def opened(self) -> strategy.Strategy:
        """The strategy to attend by, of the files as they are now: the strategy file, or in the tuning modes the search
        tables.  A file that stays as it is is read once.  Raises PolicyError.
        """
        return self.tuned().strategy if self.tunes else strategy.read(self.mask_strategy_file_path)

    def tuned(self) -> tables.Tuned:
        """What the search tables give.  Raises PolicyError."""
        return tables.tuned_by(self.search_folder, self.skip_time_steps, self.sta_mode == "STA_tuning_cfg")

    @model_validator(mode="after")
    def _files(self) -> Self:
        if self.sta_mode == "STA_inference":
            strategy.read(self.mask_strategy_file_path)
        else:
            tables.check_folder(self.search_folder, must_exist=self.tunes)
            strategy.check_place(self.mask_strategy_file_path)
        return self
