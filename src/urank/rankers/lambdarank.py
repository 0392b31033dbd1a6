"""LambdaRank (Burges 2010) on clicks over propensities, or on labels; as a network and as trees.

Gains are real numbers, c / p, not grades: each pair weighs as much as swapping it changes Σ gain / log₂(1 + k), the
discounted cumulative gain that inverse propensities make unbiased. Seen so it is U-rank's loss for another target
(`targets.DiscountedGain`), and shares its code.
"""

from __future__ import annotations

from pathlib import Path

from urank.features import Featurizer
from urank.log.dataset import Dataset
from urank.progress import Report, silent
from urank.rankers.gbdt import TreesConfig, TreesScorer, grow_by_swaps, tree_streams
from urank.rankers.network import NetworkScorer, value_feature
from urank.rankers.targets import DiscountedGain, LabelGain
from urank.rankers.urank import RankerConfig, build_scorer, fit_by_swaps
from urank.stream import Gain, train_and_valid
from urank.training import History, seeded

__all__ = ["fit_lambdarank", "fit_lambdarank_trees"]


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
