"""Rankers of other papers, to compare U-rank with.

RankNet, LambdaRank, LambdaLoss and RankSVM learn from clicks, if asked weighted by 1 / examination, or from relevance
labels. DLA, Unbiased LambdaMART and regression EM learn the examination together with the ranker, from clicks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from urank.learning.batches import Batch, Gain, train_and_valid
from urank.learning.features import Featurizer
from urank.learning.lightgbm_data import sample_for_trees
from urank.learning.training import History, mean_loss, seeded
from urank.log.dataset import Dataset
from urank.progress import Report, silent
from urank.propensity.em import EmConfig, fit_relevance
from urank.propensity.examination import CLIP, ExaminationCurve, Propensity
from urank.ranking.losses import Swaps, hinge_loss, softmax_loss
from urank.ranking.objectives import DiscountedGain, LabelGain, LambdaLossGain, RankNetGain, gain_of
from urank.ranking.ranking_settings import Baseline, BaselineConfig, RankerConfig, RankSvmConfig, TreesConfig
from urank.ranking.urank_network import (
    NetworkScorer,
    RunOptions,
    ScoreNetwork,
    build_scorer,
    fit_by_swaps,
    pad_tensor,
    train_by_lists,
    value_feature,
)
from urank.ranking.urank_trees import TreesScorer, grow_by_swaps, tree_streams


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
        scorer: network and training of all but RankSVM and trees, and the seed.
        svm, trees: settings of RankSVM and of trees.
        propensity: weights of clicks; None for unweighted clicks.
        run: see `RunOptions`.
    """
    if name == "dla":
        found, _, history = fit_dla(dataset, featurizer, scorer, clip=config.clip, **run)
        return found, history
    if name == "unbiased-lambdamart":
        report = run.get("report", silent)
        grown, _, rounds = fit_unbiased_lambdamart(dataset, featurizer, scorer, trees, clip=config.clip, report=report)
        return grown, rounds
    if name == "regression-em":
        return fit_regression_em(dataset, featurizer, scorer, trees, report=run.get("report", silent))
    gain = gain_of(dataset, config, propensity)
    if name == "ranksvm":
        return fit_ranksvm(dataset, featurizer, gain, svm, **run)
    if name in PAIRWISE:
        return fit_pairwise(name, dataset, featurizer, gain, scorer, **run)
    return fit_lambdarank_trees(dataset, featurizer, gain, scorer, trees, report=run.get("report", silent))


# RankNet, LambdaRank and LambdaLoss

PAIRWISE: dict[Baseline, type[DiscountedGain]] = {
    "lambdarank": DiscountedGain,
    "ranknet": RankNetGain,
    "lambdaloss": LambdaLossGain,
}


def fit_pairwise(
    name: Baseline,
    dataset: Dataset,
    featurizer: Featurizer,
    gain: Gain,
    config: RankerConfig,
    **run: Unpack[RunOptions],
) -> tuple[NetworkScorer, History]:
    """Train RankNet (Burges et al. 2005), LambdaRank (Burges 2010) or LambdaLoss (Wang et al. 2018) as a network.

    They differ in the weights of the pairs only; training stops early by the discounted cumulative gain of valid.

    Args:
        name: one of `PAIRWISE`.
        gain: the gain of each item, as returned by `gain_of`.
        config: the network, its training and the seed; its target is not used.
        dataset, featurizer, run: as in `fit_baseline`.
    """
    splits = train_and_valid(dataset, featurizer, gain=gain)
    with seeded(config.seed):
        network = build_scorer(featurizer, value_feature(dataset), config)
    target = PAIRWISE[name](dataset.positions, normalised=isinstance(gain, LabelGain))
    return fit_by_swaps(network, splits, target, config, name=f"train {name}", **run)


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


# Unbiased LambdaMART

BIAS_NORM = 1.0
"""p of Hu et al. 2019: ratios of losses are raised to 1 / (1 + p), which regularises t⁺ and t⁻."""


@dataclass(eq=False)
class PairBias:
    """The ratios t⁺ and t⁻ `[K]` of Unbiased LambdaMART (Hu et al. 2019), 1 at position 1, by which pairs are weighted.

        loss = Σ_{i clicked, j not} |Δ_ij| log₂(1 + e^{−σ(s_i − s_j)}) / (t⁺(k_i) t⁻(k_j))
        t⁺(k) ← [Σ_{k_i = k} loss_ij / t⁻(k_j)  ÷  the same at k = 1]^(1 / (1 + p)),      t⁻ likewise

    with loss_ij before weighting. Items below position K were not shown and form no pairs.

    Attributes:
        position: `[rows]`, the logged positions of the train split.
        plus, minus: t⁺ and t⁻, at least 1 / clip.
        sigma, clip: σ, and the upper bound of 1 / t.
    """

    position: NDArray[np.int64]
    plus: NDArray[np.float64]
    minus: NDArray[np.float64]
    sigma: float = 1.0
    clip: float = CLIP

    def __post_init__(self) -> None:
        self._losses, self._lock = np.zeros((2, len(self.plus))), Lock()

    def __call__(self, rows: NDArray[np.int64], scores: NDArray[np.float32], found: Swaps) -> Swaps:
        K, m = len(self.plus), found.delta.shape[2]
        position = np.take_along_axis(self.position[rows], found.order, axis=1)
        placed = np.take_along_axis(scores, found.order, axis=1).astype(np.float64) * self.sigma
        place, shown = np.minimum(position, K) - 1, position <= K
        click, other = (np.where(shown, 1 / t[place], 0.0) for t in (self.plus, self.minus))
        lower = found.delta > 0  # the lower item is the clicked one
        weight = np.where(lower, click[:, :, None] * other[:, None, :m], other[:, :, None] * click[:, None, :m])
        apart = np.where(lower, 1, -1) * (placed[:, :, None] - placed[:, None, :m])
        loss = np.abs(found.delta) * np.logaddexp(0, -apart) * (weight > 0)
        pair = np.broadcast_arrays(place[:, :, None], place[:, None, :m])
        clicked, unclicked = (np.where(lower, one, two).ravel() for one, two in (pair, pair[::-1]))
        losses = [
            np.bincount(clicked, (loss.ravel() / self.minus[unclicked]), K),
            np.bincount(unclicked, (loss.ravel() / self.plus[clicked]), K),
        ]
        with self._lock:
            self._losses += losses
        return replace(found, delta=(found.delta * weight).astype(np.float32))

    def update(self) -> None:
        """Update t⁺ and t⁻ by the losses of all pairs since the last update."""
        top = self._losses[:, :1]
        ratio = np.divide(self._losses, top, out=np.ones_like(self._losses), where=top > 0)
        self.plus, self.minus = np.maximum(ratio ** (1 / (1 + BIAS_NORM)), 1 / self.clip)
        self._losses[:] = 0


def fit_unbiased_lambdamart(
    dataset: Dataset,
    featurizer: Featurizer,
    config: RankerConfig,
    trees: TreesConfig,
    *,
    clip: float = CLIP,
    report: Report = silent,
) -> tuple[TreesScorer, PairBias, History]:
    """Train Unbiased LambdaMART (Hu et al. 2019) on the clicks of a prepared log: LambdaRank trees with `PairBias`.

    t⁺ and t⁻ are updated before each tree.
    """
    splits = tree_streams(dataset, featurizer, trees, gain=gain_of(dataset, BaselineConfig(), None))
    groups = [splits[0].lists(group).position for group in range(len(splits[0].groups))]
    ones = np.ones(dataset.positions)
    position = np.concatenate([np.zeros(0, dtype=np.int64), *groups])
    bias = PairBias(position, ones, ones.copy(), config.sigma, clip)
    found = grow_by_swaps(splits, DiscountedGain(dataset.positions), config, trees, weigh=bias, report=report)
    return found[0], bias, found[1]


# Regression EM


def fit_regression_em(
    dataset: Dataset, featurizer: Featurizer, config: RankerConfig, trees: TreesConfig, *, report: Report = silent
) -> tuple[TreesScorer, History]:
    """Rank by the relevance of regression EM (Wang et al. 2018), whose trees do not read values."""
    dataset = sample_for_trees(dataset, trees.row_bytes(featurizer.width))
    fit = fit_relevance(dataset, featurizer, EmConfig(**trees.model_dump()), seed=config.seed, report=report)
    rounds = [{"round": float(place), "valid": loss} for place, loss in enumerate(fit.losses)]
    best = int(np.argmin(fit.losses))
    scorer = TreesScorer.from_text(fit.text, featurizer, takes_value=False)
    return scorer, History(rounds, fit.losses[best], best)


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
