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
from pydantic import Field
from torch import Tensor, nn

from urank import distributed
from urank.clicks.click_model import ClickModel, NetworkClicks
from urank.config import Settings
from urank.errors import ConfigError
from urank.learning.batches import Batch, Stream, train_and_valid
from urank.learning.features import Featurizer, Inputs, Numeric, own_items
from urank.learning.networks import Backbone, FeatureLayer, build_backbone, chunk_rows
from urank.learning.training import History, TrainingConfig, seeded, train
from urank.log.dataset import Dataset
from urank.log.ragged import positions_by_score, where_items
from urank.progress import Report, silent
from urank.ranking.losses import Form, swap_loss, swaps
from urank.ranking.objectives import Target, UtilityTarget, by_length
from urank.ranking.utility import FLOOR, earned

__all__ = [
    "NetworkScorer",
    "RankerConfig",
    "ScoreNetwork",
    "build_scorer",
    "estimated_utility",
    "fit_by_swaps",
    "fit_urank",
    "mean_swap_loss",
    "pad_tensor",
    "value_feature",
]


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


Kind = Literal["model", "counterfactual", "blend"]


class RankerConfig(Settings):
    """All that decides a ranker, but for its click model."""

    target: Kind = Field(
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
    hidden: tuple[int, ...] = Field((128, 64), description="sizes of the hidden layers; none for a linear score")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of hidden units left out at each step")
    warm_start: bool = Field(False, description="start from the hidden layers of the click model")
    training: TrainingConfig = TrainingConfig(epochs=12, learning_rate=2e-3, weight_decay=1e-3)
    seed: int = Field(0, ge=0, description="of all random numbers")

    @property
    def objective(self) -> UtilityTarget:
        """The target with λ, the share of Eq. 3 in it."""
        return UtilityTarget({"model": 0.0, "counterfactual": 1.0, "blend": self.blend}[self.target], self.floor)


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
    featurizer = clicks.featurizer
    splits = train_and_valid(dataset, featurizer, config.training.batch_lists, table=look_up)
    with seeded(config.seed):
        network = build_scorer(featurizer, value_feature(dataset), config)
    if config.warm_start:
        _warm_start(network, clicks)
    return fit_by_swaps(network, splits, config.objective, config, checkpoint=checkpoint, report=report)


def fit_by_swaps(
    network: ScoreNetwork,
    splits: tuple[Stream, Stream],
    target: Target,
    config: RankerConfig,
    *,
    checkpoint: Path | None = None,
    report: Report = silent,
    name: str = "train ranker",
) -> tuple[NetworkScorer, History]:
    """Train a network in place so that its order earns the most by a target, whatever that is: the E and M steps.

    Args:
        network: gives the scores.
        splits: train and valid, with lists that the target understands.
        target: u(i, k) of some lists.
        config: the form of the loss, the steps and the seed.
        checkpoint: a file from which a run that was killed goes on.
        report: told how far it is.
        name: of the step that is reported.
    """

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        return mean_swap_loss(network(batch.numeric, batch.categorical, batch.value), batch, target, config)

    history = train(
        network,
        loss,
        splits[0],
        lambda network: -estimated_utility(network, splits[1], target),
        config.training,
        seed=config.seed,
        checkpoint=checkpoint,
        report=report,
        name=name,
        weigh=lambda batch: batch.lists,
    )
    return NetworkScorer(network), history


def mean_swap_loss(scores: Tensor, batch: Batch, target: Target, config: RankerConfig) -> Tensor:
    """The mean over the lists of a batch of U-rank's loss, with positions and weights from the scores as they are.

    The lists are taken in chunks by length, which changes nothing but the order of a sum.

    Args:
        scores: `[rows]`, with their gradients.
        batch: the lists.
        target: u(i, k) of some lists.
        config: the form of the loss.
    """
    known = scores.numpy(force=True)
    clip = config.clip if config.form == "paper" else None
    losses = []
    for rows, lists in by_length(batch):
        found = swaps(known[rows], target(lists), where=lists.where)
        padded = scores[torch.from_numpy(rows).to(scores.device)]
        losses.append(swap_loss(padded, found, form=config.form, sigma=config.sigma, clip=clip))
    return torch.cat(losses).sum() / (len(batch.offsets) - 1)


def estimated_utility(network: nn.Module, stream: Stream, target: Target) -> float:
    """The mean utility of the lists of a split in the order of the scores, by the target that is trained on."""
    device = next(network.parameters()).device
    network.eval()
    total, lists = 0.0, 0
    with torch.inference_mode():
        for batch in stream.batches():
            on_device = batch.to(device)
            scores = network(on_device.numeric, on_device.categorical, on_device.value).numpy(force=True)
            for rows, padded in by_length(batch):
                positions = positions_by_score(scores[rows], where=padded.where)
                total += float(earned(target(padded), positions).sum())
            lists += len(batch.offsets) - 1
    earnings, count = distributed.all_reduce_sum([total, lists])
    return earnings / max(count, 1)


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
