"""Rankers of other papers, to compare U-rank with: LambdaRank, RankSVM and the dual learning algorithm (DLA).

They learn from clicks, if asked weighted by 1 / examination, or from relevance labels; DLA learns the examination
together with the ranker.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, Unpack, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from urank.config import Settings
from urank.learning.batches import Batch, Gain, train_and_valid
from urank.learning.features import Featurizer
from urank.learning.training import History, TrainingConfig, mean_loss, seeded
from urank.log.dataset import Dataset
from urank.progress import Report, silent
from urank.propensity.examination import CLIP, ExaminationCurve, Propensity
from urank.ranking.losses import hinge_loss, softmax_loss
from urank.ranking.objectives import BaselineConfig, DiscountedGain, LabelGain, gain_of
from urank.ranking.urank_network import (
    NetworkScorer,
    RankerConfig,
    RunOptions,
    ScoreNetwork,
    build_scorer,
    fit_by_swaps,
    pad_tensor,
    train_by_lists,
    value_feature,
)
from urank.ranking.urank_trees import TreesConfig, TreesScorer, grow_by_swaps, tree_streams

Baseline = Literal["lambdarank", "lambdarank-trees", "ranksvm", "dla"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
WEIGHTED_BASELINES: tuple[Baseline, ...] = ("lambdarank", "lambdarank-trees", "ranksvm")
"""Those that take an estimate of examination, or labels; DLA learns examination itself, from clicks."""


class RankSvmConfig(Settings):
    """Settings of a RankSVM."""

    c: float = Field(1.0, gt=0, description="C: weight of a unit of hinge loss relative to ½ |w|²")
    training: TrainingConfig = TrainingConfig(epochs=15, learning_rate=1e-2, weight_decay=0.0)
    seed: int = Field(0, ge=0, description="seed of all random numbers")


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
    **run: Unpack[RunOptions],
) -> tuple[NetworkScorer | TreesScorer, History]:
    """Train a ranker of another paper on a prepared log.

    Args:
        dataset: trains on train, stops early on valid, does not read test.
        featurizer: fitted on train.
        config: clicks or labels, and their weights.
        scorer: network and training of LambdaRank and DLA, and the seed.
        svm, trees: settings of RankSVM and of trees.
        propensity: weights of clicks; None for unweighted clicks.
        run: see `RunOptions`.
    """
    if name == "dla":
        found, _, history = fit_dla(dataset, featurizer, scorer, clip=config.clip, **run)
        return found, history
    gain = gain_of(dataset, config, propensity)
    if name == "ranksvm":
        return fit_ranksvm(dataset, featurizer, gain, svm, **run)
    if name == "lambdarank":
        return fit_lambdarank(dataset, featurizer, gain, scorer, **run)
    return fit_lambdarank_trees(dataset, featurizer, gain, scorer, trees, report=run.get("report", silent))


# LambdaRank


def fit_lambdarank(
    dataset: Dataset, featurizer: Featurizer, gain: Gain, config: RankerConfig, **run: Unpack[RunOptions]
) -> tuple[NetworkScorer, History]:
    """Train LambdaRank (Burges 2010) as a network; stops early by the discounted cumulative gain of valid.

    Args:
        gain: the gain of each item, as returned by `gain_of`.
        config: the network, its training and the seed; its target is not used.
        dataset, featurizer, run: as in `fit_baseline`.
    """
    splits = train_and_valid(dataset, featurizer, gain=gain)
    with seeded(config.seed):
        network = build_scorer(featurizer, value_feature(dataset), config)
    target = DiscountedGain(dataset.positions, normalised=isinstance(gain, LabelGain))
    return fit_by_swaps(network, splits, target, config, name="train lambdarank", **run)


def fit_lambdarank_trees(
    dataset: Dataset,
    featurizer: Featurizer,
    gain: Gain,
    config: RankerConfig,
    trees: TreesConfig,
    *,
    report: Report = silent,
) -> tuple[TreesScorer, History]:
    """Train LambdaRank as LightGBM trees, whose own `lambdarank` takes integer grades only."""
    splits = tree_streams(dataset, featurizer, trees, gain=gain)
    target = DiscountedGain(dataset.positions, normalised=isinstance(gain, LabelGain))
    return grow_by_swaps(splits, target, config, trees, report=report)


# RankSVM


def fit_ranksvm(
    dataset: Dataset, featurizer: Featurizer, gain: Gain, config: RankSvmConfig, **run: Unpack[RunOptions]
) -> tuple[NetworkScorer, History]:
    """Train a linear scorer by the pairwise hinge loss; stops early by that of valid."""
    splits = train_and_valid(dataset, featurizer, gain=gain)
    lists = max(sum(group.lists for group in splits[0].groups), 1)
    graded = isinstance(gain, LabelGain)
    with seeded(config.seed):
        network = ScoreNetwork(featurizer, value_feature(dataset), hidden=())
    for parameter in network.output.parameters():
        nn.init.zeros_(parameter)

    def hinge(network: nn.Module, batch: Batch) -> Tensor:
        assert batch.gain is not None  # noqa: S101 - the streams above have one
        scores = network(batch.numeric, batch.categorical, batch.value).index_select(0, batch.item)
        scores, where = pad_tensor(scores, batch)
        return hinge_loss(scores, pad_tensor(batch.gain, batch)[0], where=where, graded=graded).mean()

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        squared = torch.stack([(parameter**2).sum() for parameter in network.parameters() if parameter.ndim > 1]).sum()
        return hinge(network, batch) + squared / (2 * config.c * lists)

    valid_loss = partial(mean_loss, loss=hinge, stream=splits[1])
    fit = partial(train_by_lists, seed=config.seed, name="train ranksvm", **run)
    history = fit(network, loss, splits[0], valid_loss, config.training)
    return NetworkScorer(network), history


# Dual learning algorithm

STEP_SCALE = 20.0
"""A step of Adam changes a parameter by about the learning rate, whatever the gradient. That suits the weights of a
network, but the K parameters of g would need thousands of steps, so they are stored divided by this."""


class DualNetwork(nn.Module):
    """Ranker f and propensity model g of DLA (Ai et al. 2018); g has one parameter per position."""

    def __init__(self, scorer: ScoreNetwork, positions: int) -> None:
        super().__init__()
        self.scorer = scorer
        self.slow_places = nn.Parameter(torch.zeros(positions))

    @property
    def log_examination(self) -> Tensor:
        """log g(k) `[K]`, up to a constant."""
        return STEP_SCALE * self.slow_places

    def curve(self) -> ExaminationCurve:
        """Return the learned examination, relative to position 1."""
        log_g = self.log_examination.detach()
        return ExaminationCurve("dla", tuple(torch.exp(log_g - log_g[0]).double().tolist()))


def dual_weights(
    scores: Tensor, log_g: Tensor, position: Tensor, *, where: Tensor, clip: float = CLIP
) -> tuple[Tensor, Tensor]:
    """Compute the weights g(1)/g(k_i) and f̂(1)/f̂(i) of every item, `[B, n]` each, without gradient.

    Args:
        scores: `[B, n]`, f.
        log_g: `[B, n]`, the log of g at these positions.
        position: `[B, n]`, the logged positions, from 1 to K; the lowest of a list is its top.
        where: `[B, n]`, true where there is an item.
        clip: upper bound of a weight.

    >>> scores, log_g, position = torch.tensor([[0.0, 1.0]]), torch.tensor([[-2.0, 0.0]]), torch.tensor([[2, 1]])
    >>> weights = dual_weights(scores, log_g, position, where=torch.tensor([[True, True]]))
    >>> [weight.log().round().tolist() for weight in weights]  # log e^(0 + 2), log e^0; log e^(1 − 0), log e^0
    [[[2.0, 0.0]], [[1.0, 0.0]]]
    """
    with torch.no_grad():
        top = torch.where(where, position, torch.iinfo(position.dtype).max).argmin(dim=1, keepdim=True)
        examined = torch.exp(log_g.gather(1, top) - log_g).clamp(max=clip)
        relevant = torch.exp(scores.gather(1, top) - scores).clamp(max=clip)
    return examined, relevant


def fit_dla(
    dataset: Dataset, featurizer: Featurizer, config: RankerConfig, *, clip: float = CLIP, **run: Unpack[RunOptions]
) -> tuple[NetworkScorer, ExaminationCurve, History]:
    """Train ranker and propensity model together on the clicks of a prepared log.

    Args:
        config: the network, its training and the seed.
        clip: upper bound of a weight.
        dataset, featurizer, run: as in `fit_baseline`.
    """
    splits = train_and_valid(dataset, featurizer)
    with seeded(config.seed):
        network = DualNetwork(build_scorer(featurizer, value_feature(dataset), config), dataset.positions)

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        scores, log_g, click, position, where, shown = _dual_batch(network, batch)
        examined, relevant = dual_weights(scores, log_g, position, where=where, clip=clip)
        ranking = softmax_loss(scores, click * examined, where=where)
        return (ranking + softmax_loss(log_g, click * relevant, where=shown)).mean()

    def click_loss(network: nn.Module, batch: Batch) -> Tensor:
        # The weights of both losses change from round to round, so they cannot be compared between rounds. The
        # likelihood of the clicked items of a list under the product of both models can.
        scores, log_g, click, _, _, shown = _dual_batch(network, batch)
        return softmax_loss(scores + log_g, click, where=shown).mean()

    valid_loss = partial(mean_loss, loss=click_loss, stream=splits[1])
    fit = partial(train_by_lists, seed=config.seed, name="train dla", **run)
    history = fit(network, loss, splits[0], valid_loss, config.training)
    return NetworkScorer(network.scorer), network.curve(), history


def _dual_batch(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return f, log g, click values, positions, and where there is an item and one was shown, `[B, n]` each.

    An item below position K was not shown: f ranks it with the others, but g is not defined for it.
    """
    assert isinstance(network, DualNetwork)  # noqa: S101 - this module trains no other
    scores = network.scorer(batch.numeric, batch.categorical, batch.value).index_select(0, batch.item)
    scores, where = pad_tensor(scores, batch)
    click, position = (pad_tensor(each, batch)[0] for each in (batch.click * batch.value[batch.item], batch.position))
    K = len(network.slow_places)
    return scores, network.log_examination[position.clamp(1, K) - 1], click, position, where, where & (position <= K)
