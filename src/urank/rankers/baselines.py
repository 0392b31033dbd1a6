"""The rankers of other papers, by name: each learns from clicks, weighed or not, or from labels."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from urank.features import Featurizer
from urank.log.dataset import Dataset
from urank.progress import Report, silent
from urank.propensity.model import Propensity
from urank.rankers.dla import fit_dla
from urank.rankers.gbdt import TreesConfig, TreesScorer
from urank.rankers.lambdarank import fit_lambdarank, fit_lambdarank_trees
from urank.rankers.network import NetworkScorer
from urank.rankers.ranksvm import RankSvmConfig, fit_ranksvm
from urank.rankers.targets import BaselineConfig, gain_of
from urank.rankers.urank import RankerConfig
from urank.training import History

__all__ = ["BASELINES", "WEIGHED", "Baseline", "fit_baseline"]

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
