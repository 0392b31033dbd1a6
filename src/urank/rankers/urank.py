"""U-rank's scorer s = Φ(f, b) (Section 4.2): a network that learns the order of highest expected utility.

The EM-like procedure of the paper: the current scores give positions, ΔUtil at these positions weighs the pairs, one
step lowers the loss, and again. Training stops by the estimated utility of the validation split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from urank.clicks.model import ClickModel, NetworkClicks
from urank.errors import ConfigError
from urank.features import Featurizer, Inputs, Numeric
from urank.log.dataset import Dataset
from urank.log.lists import pad, positions_by_score, where_items
from urank.losses import Form, swap_loss, swaps
from urank.networks import Backbone, FeatureLayer, build_backbone
from urank.progress import Report, silent
from urank.stream import Batch, Stream
from urank.training import History, TrainingConfig, seeded, train
from urank.utility import FLOOR, earned, item_gains

__all__ = ["NetworkScorer", "RankerConfig", "ScoreNetwork", "batch_gains", "build_scorer", "fit_urank", "value_feature"]

CHUNK_ROWS = 65_536
Target = Literal["model", "counterfactual", "blend"]


class RankerConfig(BaseModel):
    """All that decides a ranker, but for its click model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    target: Target = Field(
        "model",
        description="the utility u(i, k) that is maximised: what the click model expects (model), Eq. 3 on the logged "
        "clicks (counterfactual, the paper's), or both (blend)",
    )
    blend: float = Field(0.5, ge=0, le=1, description="share of the counterfactual target in the blend")
    floor: float = Field(FLOOR, gt=0, le=1, description="least that a logged click probability counts as in Eq. 3")
    form: Form = Field("stable", description="the loss: stable, or paper (Eq. 9 as printed, with clipped scores)")
    sigma: float = Field(1.0, gt=0, description="σ of the pairwise logistic loss")
    clip: float = Field(5.0, gt=0, description="C: scores are clipped to [−C, C] in the paper's form of the loss")
    backbone: Backbone = Field("mlp", description="what stands behind the scores: mlp or deepfm")
    hidden: tuple[int, ...] = Field((128, 64), min_length=1, description="sizes of the hidden layers")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of hidden units left out at each step")
    warm_start: bool = Field(False, description="start from the hidden layers of the click model")
    training: TrainingConfig = TrainingConfig(epochs=12, learning_rate=2e-3, weight_decay=1e-3)
    seed: int = Field(0, ge=0, description="of all random numbers")

    @property
    def share(self) -> float:
        """λ, the share of the counterfactual target."""
        return {"model": 0.0, "counterfactual": 1.0, "blend": self.blend}[self.target]


class ScoreNetwork(nn.Module):
    """s = Φ(f, b): a backbone for the features; the value joins what it makes of them, and a layer mixes both."""

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
        self.backbone = build_backbone(backbone, featurizer, hidden, dropout)
        self.scale = FeatureLayer(Featurizer((value,), ())) if value is not None else None
        self.mix = nn.Linear(self.backbone.width + 1, hidden[-1]) if value is not None else None
        self.output = nn.Linear(self.backbone.width if value is None else hidden[-1], 1)

    def forward(self, numeric: Tensor, categorical: Tensor, value: Tensor | None = None) -> Tensor:
        """Scores `[rows]`; the values `[rows]` count only where the network was trained with them."""
        made: Tensor = self.backbone(numeric, categorical)
        if self.scale is not None and self.mix is not None:
            assert value is not None  # noqa: S101 - callers that know of no values have a network without them
            made = torch.relu(self.mix(torch.cat([made, self.scale(value[:, None])], dim=1)))
        result: Tensor = self.output(made)[:, 0]
        return result


@dataclass(frozen=True, eq=False)
class NetworkScorer:
    """A fitted network as a ranker."""

    network: ScoreNetwork

    @property
    def family(self) -> str:
        return "network"

    @property
    def takes_value(self) -> bool:
        return self.network.scale is not None

    def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores `[rows]`, a chunk of rows at a time."""
        self.network.eval()
        device = next(self.network.parameters()).device
        scores = np.empty(len(inputs), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(inputs), CHUNK_ROWS):
                rows = slice(start, start + CHUNK_ROWS)
                # A column of Arrow or Polars is read-only, of which torch would warn.
                parts = (inputs.numeric[rows], inputs.categorical[rows], np.require(value[rows], requirements="W"))
                scores[rows] = self.network(*(torch.from_numpy(part).to(device) for part in parts)).cpu().numpy()
        return scores


def fit_urank(
    dataset: Dataset,
    clicks: ClickModel,
    config: RankerConfig,
    *,
    table: Callable[[Inputs], NDArray[np.float32]] | None = None,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> tuple[NetworkScorer, History]:
    """Train the scorer on a prepared log.

    Args:
        dataset: train teaches, valid stops, test is not looked at.
        clicks: the click model; its table is what the utility is computed from.
        config: settings.
        table: what gives P(click | item, k) `[rows, K]` in place of the click model, such as the truth of a simulation.
        checkpoint: a file from which a run that was killed goes on.
        report: told how far it is.
    """
    look_up = table if table is not None else lambda inputs: np.exp(clicks.log_ctr(inputs))
    featurizer, lists = clicks.featurizer, config.training.batch_lists
    train_split = Stream(dataset, "train", featurizer, batch_lists=lists, table=look_up)
    valid_split = Stream(dataset, "valid", featurizer, batch_lists=8 * lists, table=look_up)
    with seeded(config.seed):
        network = build_scorer(featurizer, value_feature(dataset), config)
    if config.warm_start:
        _warm_start(network, clicks)

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        scores = network(batch.numeric, batch.categorical, batch.value)
        offsets = batch.offsets.numpy(force=True)
        where = where_items(offsets)
        found = swaps(pad(scores.numpy(force=True), offsets), batch_gains(batch, config), where=where)
        padded = torch.zeros(where.shape, device=scores.device)
        padded = padded.masked_scatter(torch.from_numpy(where).to(scores.device), scores)
        clip = config.clip if config.form == "paper" else None
        return swap_loss(padded, found, form=config.form, sigma=config.sigma, clip=clip).mean()

    history = train(
        network,
        loss,
        train_split,
        lambda network: -estimated_utility(network, valid_split, config),
        config.training,
        seed=config.seed,
        checkpoint=checkpoint,
        report=report,
        name="train ranker",
    )
    return NetworkScorer(network), history


def estimated_utility(network: nn.Module, stream: Stream, config: RankerConfig) -> float:
    """The mean utility of the lists of a split in the order of the scores, by the target that is trained on."""
    device = next(network.parameters()).device
    network.eval()
    total, lists = 0.0, 0
    with torch.inference_mode():
        for batch in stream.batches():
            on_device = batch.to(device)
            scores = network(on_device.numeric, on_device.categorical, on_device.value).numpy(force=True)
            offsets = batch.offsets.numpy()
            where = where_items(offsets)
            positions = positions_by_score(pad(scores, offsets), where=where)
            total += float(earned(batch_gains(batch, config), positions).sum())
            lists += len(offsets) - 1
    return total / max(lists, 1)


def batch_gains(batch: Batch, config: RankerConfig) -> NDArray[np.float64]:
    """u(i, k) of the lists of a batch, padded."""
    assert batch.table is not None  # noqa: S101 - the streams of a ranker have one
    offsets = batch.offsets.numpy(force=True)
    table, value, click, logged = (
        pad(tensor.numpy(force=True), offsets) for tensor in (batch.table, batch.value, batch.click, batch.position)
    )
    where = where_items(offsets)
    return item_gains(
        table, value=value, click=click, logged=logged, where=where, blend=config.share, floor=config.floor
    )


def value_feature(dataset: Dataset) -> Numeric | None:
    """The scale of the values in the train split; none when the log has no values."""
    if not dataset.has("value"):
        return None
    blocks = (block.items for block in dataset.blocks("train", ["value"]))
    return Featurizer.fit(blocks, ["value"], []).numeric[0]


def build_scorer(featurizer: Featurizer, value: Numeric | None, config: RankerConfig) -> ScoreNetwork:
    """The network that a configuration asks for."""
    return ScoreNetwork(featurizer, value, backbone=config.backbone, hidden=config.hidden, dropout=config.dropout)


def _warm_start(network: ScoreNetwork, clicks: ClickModel) -> None:
    """Take over what the click model makes of the features."""
    member = next((member for member in clicks.members if isinstance(member, NetworkClicks)), None)
    if member is None:
        raise ConfigError(f"warm_start needs a click model that is a network; got {clicks.name}")
    try:
        network.backbone.load_state_dict(member.network.backbone.state_dict())
    except RuntimeError as error:
        raise ConfigError(
            "warm_start needs a ranker with the backbone and the hidden layers of its click model; they differ"
        ) from error
