"""The rankers of other papers, by name: each learns from clicks, weighed or not, or from labels."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from urank.config import Settings
from urank.learning.batches import Batch, Gain, train_and_valid
from urank.learning.features import Featurizer
from urank.learning.training import History, TrainingConfig, mean_loss, seeded, train
from urank.log.dataset import Dataset
from urank.progress import Report, silent
from urank.propensity.examination import CLIP, ExaminationCurve, Propensity
from urank.ranking.losses import hinge_loss, softmax_loss
from urank.ranking.objectives import BaselineConfig, DiscountedGain, LabelGain, gain_of
from urank.ranking.urank_network import (
    NetworkScorer,
    RankerConfig,
    ScoreNetwork,
    build_scorer,
    fit_by_swaps,
    pad_tensor,
    value_feature,
)
from urank.ranking.urank_trees import TreesConfig, TreesScorer, grow_by_swaps, tree_streams

__all__ = [
    "BASELINES",
    "WEIGHED",
    "Baseline",
    "DualNetwork",
    "RankSvmConfig",
    "dual_weights",
    "fit_baseline",
    "fit_dla",
    "fit_lambdarank",
    "fit_lambdarank_trees",
    "fit_ranksvm",
]


def fit_lambdarank(
    dataset: Dataset,
    featurizer: Featurizer,
    gain: Gain,
    config: RankerConfig,
    *,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> tuple[NetworkScorer, History]:
    """Train a network on a prepared log; valid stops it by its discounted cumulative gain.

    Args:
        dataset: train teaches, valid stops, test is not looked at.
        featurizer: fitted on train.
        gain: what each item is worth, as `targets.gain_of` gives it.
        config: the network, its training and the seed; its target is not used.
        checkpoint: a file from which a run that was killed goes on.
        report: told how far it is.
    """
    splits = train_and_valid(dataset, featurizer, config.training.batch_lists, gain=gain)
    with seeded(config.seed):
        network = build_scorer(featurizer, value_feature(dataset), config)
    target = DiscountedGain(dataset.positions, normalised=isinstance(gain, LabelGain))
    return fit_by_swaps(network, splits, target, config, checkpoint=checkpoint, report=report, name="train lambdarank")


def fit_lambdarank_trees(
    dataset: Dataset,
    featurizer: Featurizer,
    gain: Gain,
    config: RankerConfig,
    trees: TreesConfig,
    *,
    report: Report = silent,
) -> tuple[TreesScorer, History]:
    """Grow LightGBM trees instead; LightGBM's own `lambdarank` takes whole grades only. Arguments as above."""
    splits = tree_streams(dataset, featurizer, trees, gain=gain)
    target = DiscountedGain(dataset.positions, normalised=isinstance(gain, LabelGain))
    return grow_by_swaps(splits, target, config, trees, report=report)


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


PACE = 20.0
"""A step of Adam moves a number by about its learning rate, whatever the gradient. So small a step is right for the
weights of a network, but the K numbers of g would need thousands of them; they are kept divided by this."""


class DualNetwork(nn.Module):
    """The two models: `scorer` gives f, `places` the log of g up to a constant."""

    def __init__(self, scorer: ScoreNetwork, positions: int) -> None:
        super().__init__()
        self.scorer = scorer
        self.slow_places = nn.Parameter(torch.zeros(positions))

    @property
    def places(self) -> Tensor:
        """log g(k) `[K]`."""
        return PACE * self.slow_places

    def curve(self) -> ExaminationCurve:
        """The examination that it learned, relative to position 1."""
        relative = torch.exp(self.places.detach() - self.places.detach()[0])
        return ExaminationCurve("dla", tuple(relative.double().tolist()))


def _of_batch(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """f, log g, what a click was worth, the position, where there is an item, and where one was shown, `[B, n]` each.

    An item below position K was not shown: f orders it with the others, but g knows nothing of it.
    """
    assert isinstance(network, DualNetwork)  # noqa: S101 - this module trains no other
    scores, where = pad_tensor(network.scorer(batch.numeric, batch.categorical, batch.value), batch)
    click, position = (pad_tensor(each, batch)[0] for each in (batch.click * batch.value, batch.position))
    K = len(network.slow_places)
    return scores, network.places[position.clamp(1, K) - 1], click, position, where, where & (position <= K)


def dual_weights(
    scores: Tensor, places: Tensor, position: Tensor, *, where: Tensor, clip: float = CLIP
) -> tuple[Tensor, Tensor]:
    """g(1)/g(k_i) and f̂(1)/f̂(i) of every item, `[B, n]` each, without gradient.

    Args:
        scores: `[B, n]`, f.
        places: `[B, n]`, the log of g at these positions.
        position: `[B, n]`, the logged positions, from 1 to K; the lowest of a list is its top.
        where: `[B, n]`, true where there is an item.
        clip: the most that a weight may be.

    >>> scores, places, position = torch.tensor([[0.0, 1.0]]), torch.tensor([[-2.0, 0.0]]), torch.tensor([[2, 1]])
    >>> weights = dual_weights(scores, places, position, where=torch.tensor([[True, True]]))
    >>> [weight.log().round().tolist() for weight in weights]  # log e^(0 + 2), log e^0; log e^(1 − 0), log e^0
    [[[2.0, 0.0]], [[1.0, 0.0]]]
    """
    with torch.no_grad():
        top = torch.where(where, position, torch.iinfo(position.dtype).max).argmin(dim=1, keepdim=True)
        examined = torch.exp(places.gather(1, top) - places).clamp(max=clip)
        relevant = torch.exp(scores.gather(1, top) - scores).clamp(max=clip)
    return examined, relevant


def fit_dla(
    dataset: Dataset,
    featurizer: Featurizer,
    config: RankerConfig,
    *,
    clip: float = CLIP,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> tuple[NetworkScorer, ExaminationCurve, History]:
    """Train both models on the clicks of a prepared log.

    Args:
        dataset: train teaches, valid stops, test is not looked at.
        featurizer: fitted on train.
        config: the network, its training and the seed.
        clip: the most that a weight may be.
        checkpoint: a file from which a run that was killed goes on.
        report: told how far it is.

    Returns:
        the ranker, the examination that was learned with it, and the rounds.
    """
    train_split, valid_split = train_and_valid(dataset, featurizer, config.training.batch_lists)
    with seeded(config.seed):
        network = DualNetwork(build_scorer(featurizer, value_feature(dataset), config), dataset.positions)

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        scores, at, click, position, where, shown = _of_batch(network, batch)
        examined, relevant = dual_weights(scores, at, position, where=where, clip=clip)
        ranking = softmax_loss(scores, click * examined, where=where)
        return (ranking + softmax_loss(at, click * relevant, where=shown)).mean()

    def surprise(network: nn.Module, batch: Batch) -> Tensor:
        # Both losses weigh clicks by what has been learned, so that they cannot be compared from round to round. Which
        # items of a list were clicked, by the product of both models, can.
        scores, at, click, _, _, shown = _of_batch(network, batch)
        return softmax_loss(scores + at, click, where=shown).mean()

    history = train(
        network,
        loss,
        train_split,
        lambda network: mean_loss(network, surprise, valid_split),
        config.training,
        seed=config.seed,
        checkpoint=checkpoint,
        report=report,
        name="train dla",
        weigh=lambda batch: batch.lists,
    )
    return NetworkScorer(network.scorer), network.curve(), history


Baseline = Literal["lambdarank", "lambdarank-trees", "ranksvm", "dla"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
WEIGHED: tuple[Baseline, ...] = ("lambdarank", "lambdarank-trees", "ranksvm")
"""Those that take an estimate of examination, or labels; DLA learns its own, from clicks."""


def fit_baseline(
    name: Baseline,
    dataset: Dataset,
    featurizer: Featurizer,
    *,
    config: BaselineConfig,
    scorer: RankerConfig,
    svm: RankSvmConfig,
    trees: TreesConfig,
    propensity: Propensity | None = None,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> tuple[NetworkScorer | TreesScorer, History]:
    """Train a ranker of another paper on a prepared log.

    Args:
        name: which.
        dataset: train teaches, valid stops, test is not looked at.
        featurizer: fitted on train.
        config: what it learns from.
        scorer: the network of LambdaRank and DLA, its training, and the seed.
        svm: settings of RankSVM.
        trees: how trees grow.
        propensity: by which clicks are weighed; none for clicks as they are.
        checkpoint: a file from which a run that was killed goes on.
        report: told how far it is.
    """
    if name == "dla":
        found, _, history = fit_dla(dataset, featurizer, scorer, clip=config.clip, checkpoint=checkpoint, report=report)
        return found, history
    gain = gain_of(dataset, config, propensity)
    if name == "ranksvm":
        return fit_ranksvm(dataset, featurizer, gain, svm, checkpoint=checkpoint, report=report)
    if name == "lambdarank":
        return fit_lambdarank(dataset, featurizer, gain, scorer, checkpoint=checkpoint, report=report)
    return fit_lambdarank_trees(dataset, featurizer, gain, scorer, trees, report=report)
