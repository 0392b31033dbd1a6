"""What a click model is and how it is trained, as a configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from urank.clicks.gbdt import GbdtConfig
from urank.networks import Backbone
from urank.training import TrainingConfig

__all__ = ["AUTO", "ClickConfig", "ClickFamily"]

ClickFamily = Literal["vector", "position", "deepfm", "factorised", "monotone", "pbm", "gbdt"]
AUTO: tuple[ClickFamily, ...] = ("monotone", "factorised", "vector")
"""The families of `auto`, the best of which, or the mean of all, is kept by held-out log loss."""


class ClickConfig(BaseModel):
    """All that decides a click model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: tuple[ClickFamily, ...] = Field(
        AUTO,
        min_length=1,
        description="families to train; kept is the one with the best held-out log loss, or all when the mean "
        "of their tables is better",
    )
    mix: bool = Field(False, description="keep the mean of all families in any case")
    ensemble: int = Field(1, ge=1, le=100, description="number of seeds whose tables are averaged")
    backbone: Backbone = Field(
        "mlp", description="what stands behind every network: mlp or deepfm; the family deepfm is always on a DeepFM"
    )
    hidden: tuple[int, ...] = Field((128, 64), min_length=1, description="sizes of the hidden layers")
    dropout: float = Field(0.05, ge=0, lt=1, description="share of hidden units left out at each step")
    calibration: Literal["none", "temperature", "isotonic"] = Field(
        "temperature", description="how the table is calibrated on the validation split, by position"
    )
    min_count: int = Field(5, ge=1, description="how often a category must be seen to have an embedding of its own")
    training: TrainingConfig = TrainingConfig()
    trees: GbdtConfig = GbdtConfig()
    seed: int = Field(0, ge=0, description="of all random numbers")
