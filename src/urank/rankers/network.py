"""The network that gives scores, s = Φ(f, b) (Section 4.2), whatever loss it is trained by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from urank.features import Featurizer, Inputs, Numeric, own_items
from urank.log.dataset import Dataset
from urank.log.lists import where_items
from urank.networks import Backbone, FeatureLayer, build_backbone, chunk_rows
from urank.stream import Batch

__all__ = ["NetworkScorer", "ScoreNetwork", "pad_tensor", "value_feature"]


class ScoreNetwork(nn.Module):
    """s = Φ(f, b): a backbone for the features; the value joins what it makes of them, and a layer mixes both.

    Without hidden layers the score is linear in the standardised features and the value.
    """

    def __init__(
        self,
        featurizer: Featurizer,
        value: Numeric | None,
        *,
        backbone: Backbone = "mlp",
        hidden: tuple[int, ...] = (128, 64),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.value = value
        self.hidden = tuple(hidden)
        self.kind: Backbone = backbone
        self.backbone = build_backbone(backbone, featurizer, hidden, dropout)
        self.scale = FeatureLayer(Featurizer((value,), ())) if value is not None else None
        width = self.backbone.width + (value is not None)
        self.mix = nn.Linear(width, hidden[-1]) if value is not None and hidden else None
        self.output = nn.Linear(width if self.mix is None else hidden[-1], 1)

    def forward(self, numeric: Tensor, categorical: Tensor, value: Tensor | None = None) -> Tensor:
        """Scores `[rows]`; the values `[rows]` count only where the network was trained with them."""
        made: Tensor = self.backbone(numeric, categorical)
        if self.scale is not None:
            assert value is not None  # noqa: S101 - callers that know of no values have a network without them
            made = torch.cat([made, self.scale(value[:, None])], dim=1)
        if self.mix is not None:
            made = torch.relu(self.mix(made))
        result: Tensor = self.output(made)[:, 0]
        return result


@dataclass(frozen=True, eq=False)
class NetworkScorer:
    """A fitted network as a ranker."""

    network: ScoreNetwork

    @property
    def family(self) -> str:
        return "network" if self.network.hidden else "linear"

    @property
    def takes_value(self) -> bool:
        return self.network.scale is not None

    def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores `[rows]`, a chunk of rows at a time."""
        self.network.eval()
        device = next(self.network.parameters()).device
        scores = np.empty(len(inputs), dtype=np.float32)
        with torch.inference_mode():
            step = chunk_rows(device)
            for start in range(0, len(inputs), step):
                rows = slice(start, start + step)
                # A column of Arrow or Polars is read-only, of which torch would warn.
                parts = (inputs.numeric[rows], inputs.categorical[rows], np.require(value[rows], requirements="W"))
                scores[rows] = self.network(*(torch.from_numpy(part).to(device) for part in parts)).cpu().numpy()
        return scores


def pad_tensor(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Values `[rows]` of a batch as padded lists `[B, n]`, and where there is an item; gradients pass through."""
    where = torch.from_numpy(where_items(batch.offsets.numpy(force=True))).to(values.device)
    return torch.zeros(where.shape, dtype=values.dtype, device=values.device).masked_scatter(where, values), where


def value_feature(dataset: Dataset) -> Numeric | None:
    """The scale of the values in the train split; none when the log has no values."""
    if not dataset.has("value"):
        return None
    return Featurizer.fit(own_items(dataset, "train", ["value"]), ["value"], []).numeric[0]
