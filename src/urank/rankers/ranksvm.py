"""SVMRank with propensities (Joachims, Swaminathan and Schnabel 2017): a linear score and the pairwise hinge loss.

    min_w  ½ |w|² + C Σ_lists Σ_{i clicked} 1/p_i Σ_{j ≠ i} max(0, 1 − w·(x_i − x_j))

Pairs are never written out: the loss of a batch of lists is computed from its scores, and the one training loop goes
over the log as it does for networks (a stochastic subgradient method, as Pegasos is). So a log larger than memory
does, where scikit-learn's LinearSVC needs a row of features for every pair. The tests hold the objective that is
reached against LinearSVC's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor, nn

from urank.config import Settings
from urank.features import Featurizer
from urank.log.dataset import Dataset
from urank.losses import hinge_loss
from urank.progress import Report, silent
from urank.rankers.network import NetworkScorer, ScoreNetwork, pad_tensor, value_feature
from urank.rankers.targets import LabelGain
from urank.stream import Batch, Gain, train_and_valid
from urank.training import History, TrainingConfig, mean_loss, seeded, train

__all__ = ["RankSvmConfig", "fit_ranksvm"]


class RankSvmConfig(Settings):
    """What decides a RankSVM."""

    c: float = Field(1.0, gt=0, description="C: what a unit of hinge loss weighs against ½ |w|²")
    training: TrainingConfig = TrainingConfig(epochs=15, learning_rate=1e-2, weight_decay=0.0, patience=1)
    seed: int = Field(0, ge=0, description="of all random numbers")


def fit_ranksvm(
    dataset: Dataset,
    featurizer: Featurizer,
    gain: Gain,
    config: RankSvmConfig,
    *,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> tuple[NetworkScorer, History]:
    """Train a linear scorer on a prepared log; valid stops it by its hinge loss. Arguments as for LambdaRank."""
    train_split, valid_split = train_and_valid(dataset, featurizer, config.training.batch_lists, gain=gain)
    lists = sum(group.lists for group in train_split.groups)
    graded = isinstance(gain, LabelGain)
    with seeded(config.seed):
        network = ScoreNetwork(featurizer, value_feature(dataset), hidden=())
    with torch.no_grad():
        for parameter in network.output.parameters():
            parameter.zero_()

    def hinge(network: nn.Module, batch: Batch) -> Tensor:
        assert batch.gain is not None  # noqa: S101 - the streams above have one
        scores, where = pad_tensor(network(batch.numeric, batch.categorical, batch.value), batch)
        return hinge_loss(scores, pad_tensor(batch.gain, batch)[0], where=where, graded=graded).mean()

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        squared = torch.stack([(parameter**2).sum() for parameter in network.parameters() if parameter.ndim > 1]).sum()
        return hinge(network, batch) + squared / (2 * config.c * max(lists, 1))

    history = train(
        network,
        loss,
        train_split,
        lambda network: mean_loss(network, hinge, valid_split),
        config.training,
        seed=config.seed,
        checkpoint=checkpoint,
        report=report,
        name="train ranksvm",
        weigh=lambda batch: batch.lists,
    )
    return NetworkScorer(network), history
