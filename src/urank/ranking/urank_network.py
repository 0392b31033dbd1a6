"""U-rank's scorer s = Φ(f, b) (Section 4.2): a network trained to order lists by highest expected utility.

The EM-like procedure of the paper: the current scores give positions, ΔUtil at these positions weights the pairs, one
gradient step lowers the loss, and so on. Training stops early by the estimated utility of the validation split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from urank import distributed
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.errors import ConfigError
from urank.learning.batches import Batch, Stream, train_and_valid
from urank.learning.features import Featurizer, Inputs, Numeric, own_blocks
from urank.learning.networks import FeatureLayer, build_backbone, chunk_rows
from urank.learning.training import History, seeded, train
from urank.learning.training_settings import Backbone
from urank.log.dataset import Dataset
from urank.log.ragged import positions_by_score, where_items
from urank.progress import Report
from urank.ranking.losses import swap_loss
from urank.ranking.objectives import Target, by_length
from urank.ranking.ranking_settings import RankerConfig
from urank.ranking.utility import earned

MODEL_SHARE = 1 / 3
"""Share of the default passes for a scorer that learns from the click model, whose table has no noise, unless the
settings give one. All passes earned half a percent more (app store, seed 400) in over twice the time."""


class ScoreNetwork(nn.Module):
    """s = Φ(f, b): a backbone for the features, whose output a last hidden layer combines with the value.

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
        self.value, self.hidden = value, tuple(hidden)
        self.kind: Backbone = backbone
        self.backbone = build_backbone(backbone, featurizer, hidden, dropout)
        self.scale = FeatureLayer(Featurizer((value,), ())) if value is not None else None
        width = self.backbone.width + (value is not None)
        self.mix = nn.Linear(width, hidden[-1]) if value is not None and hidden else None
        self.output = nn.Linear(width if self.mix is None else hidden[-1], 1)

    def forward(self, numeric: Tensor, categorical: Tensor, value: Tensor | None = None) -> Tensor:
        """Return scores `[rows]`; the values `[rows]` are used only if the network was trained with values."""
        made: Tensor = self.backbone(numeric, categorical)
        if self.scale is not None:
            assert value is not None  # noqa: S101 - required if the log has values
            made = torch.cat([made, self.scale(value[:, None])], dim=1)
        if self.mix is not None:
            made = torch.relu(self.mix(made))
        result: Tensor = self.output(made)[:, 0]
        return result


@dataclass(frozen=True, eq=False)
class NetworkScorer:
    """A scorer backed by a fitted network."""

    network: ScoreNetwork

    @property
    def family(self) -> str:
        return "network" if self.network.hidden else "linear"

    @property
    def takes_value(self) -> bool:
        return self.network.scale is not None

    def score(self, inputs: Inputs, value: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return scores `[rows]`, computed in chunks."""
        self.network.eval()
        device = next(self.network.parameters()).device
        scores, step = np.empty(len(inputs), dtype=np.float32), chunk_rows(device)
        with torch.inference_mode():
            for start in range(0, len(inputs), step):
                rows = slice(start, start + step)
                # Columns of Arrow and Polars are read-only, which torch would warn about.
                parts = (inputs.numeric[rows], inputs.categorical[rows], np.require(value[rows], requirements="W"))
                scores[rows] = self.network(*(torch.from_numpy(part).to(device) for part in parts)).cpu().numpy()
        return scores


def pad_tensor(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Pad values `[rows]` of a batch to its logged lists `[B, n]`, and return the mask; differentiable."""
    where = torch.from_numpy(where_items(batch.offsets.numpy(force=True))).to(values.device)
    return torch.zeros(where.shape, dtype=values.dtype, device=values.device).masked_scatter(where, values), where


def value_feature(dataset: Dataset) -> Numeric | None:
    """Return the scale of the values in the train split; None if the log has no values."""
    if not dataset.has("value"):
        return None
    return Featurizer.fit(own_blocks(dataset, "train", ["value"]), ["value"], []).numeric[0]


Table = Callable[[Inputs], NDArray[np.float32]]
"""Computes P(click | item, k) `[rows, K]`."""


class RunOptions(TypedDict, total=False):
    """Options of a training: the file from which an interrupted run resumes, and the progress callback."""

    checkpoint: Path | None
    report: Report


def fit_urank(
    dataset: Dataset, clicks: ClickModel, config: RankerConfig, *, table: Table | None = None, **run: Unpack[RunOptions]
) -> tuple[NetworkScorer, History]:
    """Train the scorer on a prepared log.

    Args:
        dataset: trains on train, stops early on valid, does not read test.
        clicks: the click model, from whose table the utility is computed.
        config: settings.
        table: computes P(click | item, k) `[rows, K]` instead of the click model, such as an oracle.
        run: see `RunOptions`.
    """
    look_up = table if table is not None else lambda inputs: np.exp(clicks.log_ctr(inputs))
    featurizer = clicks.featurizer
    splits = train_and_valid(dataset, featurizer, table=look_up)
    if config.target == "model" and config.training.share is None:
        training = config.training.model_copy(update={"share": MODEL_SHARE})
        config = config.model_copy(update={"training": training})
    with seeded(config.seed):
        network = build_scorer(featurizer, value_feature(dataset), config)
    if config.warm_start:
        _warm_start(network, clicks)
    return fit_by_swaps(network, splits, config.objective, config, name="train ranker", **run)


train_by_lists = partial(train, weigh=lambda batch: batch.lists)
"""`train` with a loss that is a mean over lists."""


def fit_by_swaps(
    network: ScoreNetwork,
    splits: tuple[Stream, Stream],
    target: Target,
    config: RankerConfig,
    *,
    name: str,
    **run: Unpack[RunOptions],
) -> tuple[NetworkScorer, History]:
    """Train a network in place to maximise a target by E and M steps.

    Args:
        splits: train and valid, with the columns that the target needs.
        config: the form of the loss, the training and the seed.
        name: of the step in progress reports.
    """

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        return mean_swap_loss(network(batch.numeric, batch.categorical, batch.value), batch, target, config)

    def valid_loss(network: nn.Module) -> float:
        return -estimated_utility(network, splits[1], target)

    history = train_by_lists(network, loss, splits[0], valid_loss, config.training, seed=config.seed, name=name, **run)
    return NetworkScorer(network), history


def mean_swap_loss(scores: Tensor, batch: Batch, target: Target, config: RankerConfig) -> Tensor:
    """Compute the mean of U-rank's loss over the logged lists of a batch, in the order of the scores `[items]`."""
    lists = batch.lists
    batch = batch if target.by_session else batch.once()
    scores = scores.index_select(0, batch.item)
    known = scores.numpy(force=True)
    clip = config.clip if config.form == "paper" else None
    total = scores.new_zeros(())
    for rows, padded in by_length(batch):
        found = target.swaps(known[rows], padded)
        placed = scores[torch.from_numpy(rows).to(scores.device)]
        losses = swap_loss(placed, found, form=config.form, sigma=config.sigma, clip=clip)
        if padded.weight is not None:
            losses = losses * torch.from_numpy(padded.weight).to(losses)
        total = total + losses.sum()
    return total / lists


def estimated_utility(network: nn.Module, stream: Stream, target: Target) -> float:
    """Return the mean utility of the lists of a split in the order of the scores, by the training target."""
    device = next(network.parameters()).device
    network.eval()
    total, lists = 0.0, 0
    with torch.inference_mode():
        for batch in stream.batches():
            on_device = batch.to(device)
            scores = network(on_device.numeric, on_device.categorical, on_device.value).numpy(force=True)
            lists += batch.lists
            distinct = batch if target.by_session else batch.once()
            scores = scores[distinct.item.numpy(force=True)]
            for rows, padded in by_length(distinct):
                positions = positions_by_score(scores[rows], where=padded.where)
                utilities = earned(target(padded), positions)
                total += float((utilities if padded.weight is None else utilities * padded.weight).sum())
    utility, count = distributed.all_reduce_sum([total, lists])
    return utility / max(count, 1)


def build_scorer(featurizer: Featurizer, value: Numeric | None, config: RankerConfig) -> ScoreNetwork:
    """Build the network of a configuration."""
    return ScoreNetwork(featurizer, value, backbone=config.backbone, hidden=config.hidden, dropout=config.dropout)


def _warm_start(network: ScoreNetwork, clicks: ClickModel) -> None:
    """Copy the backbone of the click model."""
    member = next((member for member in clicks.members if isinstance(member, NetworkClicks)), None)
    if member is None:
        raise ConfigError(f"warm_start needs a click model that is a network; got {clicks.name}")
    try:
        network.backbone.load_state_dict(member.network.backbone.state_dict())
    except RuntimeError as error:
        same = "warm_start needs the same backbone and hidden layers in ranker and click model"
        raise ConfigError(f"{same}; they differ") from error
