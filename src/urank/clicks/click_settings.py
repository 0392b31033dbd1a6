"""Settings of a click model. They do not import torch, which is slow to load, until they build a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from urank.learning.features import Featurizer, WithinList
from urank.learning.training_settings import Backbone, GrowthConfig, TrainingConfig

if TYPE_CHECKING:
    from urank.clicks.families import Head
    from urank.clicks.shrunk import ShrunkNetwork

NetworkFamily = Literal["vector", "position", "deepfm", "factorised", "monotone", "pbm", "pal"]
ClickFamily = Literal["shrunk", "vector", "position", "deepfm", "factorised", "monotone", "pbm", "pal", "gbdt"]
CalibrationKind = Literal["none", "temperature", "isotonic"]
DEFAULT: tuple[ClickFamily, ...] = ("shrunk",)
DROPOUT_LISTS = 20_000
"""Distinct training lists up to which the shrunk family needs dropout."""


class GbdtConfig(GrowthConfig):
    """Settings of the trees."""

    row_share: float = Field(0.8, gt=0, le=1, description="fraction of the impressions sampled for each tree")


class ClickConfig(BaseModel):
    """Settings of a click model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: tuple[ClickFamily, ...] = Field(
        DEFAULT,
        min_length=1,
        description="click model families, of which the best is kept (`urank help click-models`)",
    )
    mix: bool = Field(False, description="always keep the mean of all families")
    ensemble: int = Field(1, ge=1, le=100, description="number of random seeds whose predictions are averaged")
    backbone: Backbone = Field(
        "mlp", description="backbone of the networks: a multilayer perceptron, a DeepFM, a PNN or a PIN"
    )
    hidden: tuple[int, ...] | None = Field(
        None, min_length=1, description="sizes of the hidden layers; by default 64 for shrunk, 128 and 64 for others"
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="dropout rate of the hidden layers; by default 0.2 for shrunk on up to 20,000 lists, otherwise 0",
    )
    calibration: CalibrationKind | None = Field(
        None,
        description="calibration of P(click) by position, fitted on the validation split; by default none for shrunk, "
        "whose weights are fitted there, and temperature for others",
    )
    min_count: int = Field(5, ge=1, description="minimum number of occurrences of a category with its own embedding")
    within_list: WithinList = Field(
        "auto",
        description="numeric features that are also compared within their list, by z-score, rank and list mean: names, "
        "**auto** for all that vary within lists, or **off**",
    )
    training: TrainingConfig = TrainingConfig()
    trees: GbdtConfig = GbdtConfig()
    seed: int = Field(0, ge=0, description="seed of all random numbers")

    def network(self, family: NetworkFamily, featurizer: Featurizer, positions: int) -> Head:
        """Build a network with fresh weights from torch's global generator."""
        from urank.clicks.families import build_network

        hidden, dropout = self.hidden or (128, 64), self.dropout or 0.0
        return build_network(family, featurizer, positions, backbone=self.backbone, hidden=hidden, dropout=dropout)

    def shrunk(self, featurizer: Featurizer, positions: int, lists: int = 0) -> ShrunkNetwork:
        """Build the networks of the shrunk family, for this many training lists, with fresh weights as `network`."""
        from urank.clicks.shrunk import ShrunkNetwork

        dropout = (0.2 if lists < DROPOUT_LISTS else 0.0) if self.dropout is None else self.dropout
        return ShrunkNetwork(featurizer, positions, self.hidden or (64,), dropout)
