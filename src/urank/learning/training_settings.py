"""Settings of the training of networks and trees. They do not import torch or LightGBM, which are slow to load."""

from __future__ import annotations

from math import log2
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Backbone = Literal["mlp", "deepfm", "pnn", "pin"]

STEPS = 1_500
"""About the number of steps of a training, unless batches would be too small or too large."""

ROW_BYTES = 80
"""Memory of an impression besides its bins: a score (8 bytes), two derivatives and a label (4 each), copies of these on
their way to LightGBM and back, and its index in a leaf."""

MAX_LEAVES = 512  # a tree can be as deep as it has leaves, and its JSON is read by recursion


class TrainingConfig(BaseModel):
    """Settings of the training of a network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int | None = Field(
        None, ge=1, description="passes over the training data; by default 4 to 15, fewer for more lists"
    )
    share: float | None = Field(
        None, gt=0, le=1, description="share of the default number of passes; by default 1, and 1/3 for U-rank's scorer"
    )
    patience: int = Field(5, ge=1, description="rounds without improvement before training stops")
    batch_lists: int | None = Field(
        None, ge=1, description="distinct lists per batch; by default 32 to 1,024, more for more lists"
    )
    learning_rate: float | None = Field(None, gt=0, description="highest learning rate of AdamW; 0.004 by default")
    weight_decay: float = Field(0.1, ge=0, description="weight decay of AdamW")
    clip: float = Field(5.0, gt=0, description="maximum gradient norm")
    round_rows: int = Field(4_000_000, ge=1, description="impressions between evaluations of the held-out loss")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device to train networks on")

    def plan(self, lists: int) -> Plan:
        """Choose what is not set by the number of distinct lists of the train split; see `plan_for`."""
        default = plan_for(lists)
        return Plan(
            self.epochs or max(1, round((self.share or 1) * default.epochs)),
            self.batch_lists or default.batch_lists,
            self.learning_rate or default.learning_rate,
        )


class Plan(NamedTuple):
    """The length of a training, the size of its steps, and the learning rate."""

    epochs: int
    batch_lists: int
    learning_rate: float


def plan_for(lists: int) -> Plan:
    """Choose a plan by the number of distinct lists of the train split.

    One or two thousand steps suffice for most logs: small logs are read more often in smaller batches, down to 32
    lists, and large ones less often in larger batches, up to 1,024.

    >>> plan_for(2_000), plan_for(100_000)
    (Plan(epochs=15, batch_lists=32, learning_rate=0.004), Plan(epochs=4, batch_lists=256, learning_rate=0.004))
    """
    epochs = 15 if lists < 5_000 else 10 if lists < 20_000 else 6 if lists < 50_000 else 4
    batch_lists = 2 ** round(log2(max(1, epochs * lists / STEPS)))
    return Plan(epochs, min(max(batch_lists, 32), 1024), 4e-3)


class GrowthConfig(BaseModel):
    """Settings of tree growth."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    trees: int = Field(300, ge=1, le=100_000, description="maximum number of trees; early stopping keeps fewer")
    learning_rate: float = Field(0.1, gt=0, le=1, description="shrinkage of each tree")
    leaves: int = Field(31, ge=2, le=MAX_LEAVES, description="maximum number of leaves per tree")
    min_data_in_leaf: int = Field(50, ge=1, description="minimum number of impressions in a leaf")
    row_share: float = Field(1.0, gt=0, le=1, description="fraction of the impressions sampled for each tree")
    feature_share: float = Field(0.8, gt=0, le=1, description="fraction of the features sampled for each tree")
    l2: float = Field(0.0, ge=0, description="L2 regularisation of the leaf values")
    bins: int = Field(255, ge=2, le=65_535, description="maximum number of bins per numeric feature")
    early_stopping: int = Field(20, ge=1, description="number of trees without validation improvement before stopping")
    threads: int = Field(0, ge=0, description="number of LightGBM threads; 0 uses all cores")

    def row_bytes(self, features: int, positions: int = 0) -> int:
        """Estimate the bytes of an impression: bins, scores, derivatives, and for a ranker its gain by position."""
        return features * (1 if self.bins <= 255 else 2) + 4 * positions + ROW_BYTES

    def params(self, seed: int) -> dict[str, Any]:
        """Return the parameters of LightGBM; equal seeds give equal trees."""
        return {
            "learning_rate": self.learning_rate,
            "num_leaves": self.leaves,
            "min_data_in_leaf": self.min_data_in_leaf,
            "bagging_fraction": self.row_share,
            "bagging_freq": 1,
            "feature_fraction": self.feature_share,
            "lambda_l2": self.l2,
            "max_bin": self.bins,
            "num_threads": self.threads,
            "seed": seed,
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
        }
