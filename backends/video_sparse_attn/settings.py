"""The settings of video_sparse_attn."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field, field_validator

from hal.config import Config, Layers

Share = Annotated[float, Field(ge=0, lt=1)]


class Settings(Config):
    """``sparsity`` is upstream's; the others are ours, and by default they change nothing."""

    # The share of video tiles that a tile of queries does not attend to.
    sparsity: Share = Field(0.0, validation_alias=AliasChoices("sparsity", "VSA_sparsity"))
    # [[step, sparsity], ...]: from that denoising step on; before the first of them ``sparsity`` holds.
    schedule: tuple[tuple[Annotated[int, Field(ge=0)], Share], ...] = ()
    # Layers that attend to every tile.
    dense_layers: Layers = ()
    # Add the coarse branch with weight 1 where the model gives no gate, as upstream's kernel does.
    compress_without_gate: bool = False

    @field_validator("schedule")
    @classmethod
    def _rises(cls, value: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        steps = [step for step, _ in value]
        if steps != sorted(set(steps)):
            raise ValueError(f"steps {steps} must rise; write, say, [[0, 0.0], [10, 0.5]]")
        return value
