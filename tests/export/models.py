"""Small models of every kind that can be exported, untrained or grown on noise, whose outputs are not all alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import lightgbm
import numpy as np
import torch

from urank.clicks.calibration import fit_calibration
from urank.clicks.click_model import ClickModel, Member, NetworkClicks
from urank.clicks.families import build_network
from urank.clicks.trees import GbdtClicks
from urank.learning.features import Categorical, Featurizer, Numeric
from urank.learning.training import seeded
from urank.ranking.ranking_model import RankingModel, Scorer
from urank.ranking.ranking_settings import RankerConfig
from urank.ranking.urank_network import NetworkScorer, build_scorer
from urank.ranking.urank_trees import TreesScorer

K = 5
NUMBERS = (
    Numeric("price", 3.0, 1.5, missing=True),
    Numeric("emb[0]", 0.0, 1.0, missing=False),
    Numeric("2nd rate", 2e-3, 5e-4, missing=True),
)
CATEGORIES = (Categorical("shop", ("a", "b", "ä c")), Categorical("if", tuple("defghij")))
FEATURIZERS = {
    "both": Featurizer(NUMBERS, CATEGORIES),
    "numbers": Featurizer(NUMBERS, ()),
    "categories": Featurizer((), CATEGORIES),
}


@dataclass(frozen=True)
class Case:
    """What a model is made of; `clicks` has a letter for each member, n for a network and t for trees."""

    scorer: str | None
    clicks: str
    features: str
    value: bool = False
    calibration: Any = "none"

    def __str__(self) -> str:
        return f"{self.scorer}-{self.clicks}-{self.features}-{'value' if self.value else 'plain'}-{self.calibration}"


CASES = [
    Case("network", "n", "both", value=True),
    Case("network", "t", "numbers"),
    Case("linear", "t", "categories", value=True),
    Case("trees", "t", "both", value=True),
    Case("trees", "t", "categories"),
    Case("trees", "nt", "both", calibration="temperature"),
    Case(None, "nt", "both", calibration="isotonic"),
    Case(None, "t", "numbers"),
]
ALONE = CASES[-1]  # the quickest to export
TREES = CASES[3]


@cache
def build(case: Case, seed: int = 0) -> RankingModel:
    """The model of a case."""
    featurizer = FEATURIZERS[case.features]
    rng = np.random.default_rng(seed)
    members: list[Member] = [
        _network(featurizer, seed) if letter == "n" else _trees(featurizer, rng) for letter in case.clicks
    ]
    log_p = np.log(rng.uniform(0.01, 0.9, 2000))
    click = rng.random(2000) < np.exp(log_p) ** 1.5
    calibration = fit_calibration(case.calibration, log_p, rng.integers(1, K + 1, 2000), click, K, monotone=True)
    clicks = ClickModel(featurizer, K, tuple(members), calibration)
    return RankingModel(clicks, _scorer(case, featurizer, rng, seed), "match" if case.scorer is None else "score")


def _scorer(case: Case, featurizer: Featurizer, rng: np.random.Generator, seed: int) -> Scorer | None:
    if case.scorer is None:
        return None
    if case.scorer == "trees":
        text = _grown(featurizer, rng, extra=rng.lognormal(size=600) if case.value else None)
        return TreesScorer.from_text(text, featurizer, case.value)
    hidden = (16, 8) if case.scorer == "network" else ()
    value = Numeric("value", 1.0, 0.7, missing=False) if case.value else None
    with seeded(seed):
        network = build_scorer(featurizer, value, RankerConfig(hidden=hidden))
    return NetworkScorer(network)


def _network(featurizer: Featurizer, seed: int) -> NetworkClicks:
    with seeded(seed):
        network = build_network("monotone", featurizer, K, hidden=(16, 8))
    with torch.no_grad():
        network.output.weight *= 5
    return NetworkClicks("monotone", network)


def _trees(featurizer: Featurizer, rng: np.random.Generator) -> GbdtClicks:
    text = _grown(featurizer, rng, extra=rng.integers(1, K + 1, 600), objective="binary")
    return GbdtClicks.from_text(text, K, featurizer)


def _grown(featurizer: Featurizer, rng: np.random.Generator, *, extra: Any, objective: str = "regression") -> str:
    """LightGBM on random rows, whose labels depend on all columns."""
    numbers = [rng.normal(each.mean, each.std, 600) for each in featurizer.numeric]
    numbers = [np.where(rng.random(600) < 0.1, np.nan, np.sign(each) * np.expm1(np.abs(each))) for each in numbers]
    codes = [rng.integers(0, n, 600) for n in featurizer.cardinalities]
    columns = np.column_stack([*numbers, *codes, *([] if extra is None else [extra])])
    signal = sum(np.nan_to_num(column) > np.nanmedian(column) for column in columns.T) + rng.random(600)
    label = signal > np.median(signal) if objective == "binary" else signal
    categorical = list(range(len(numbers), len(numbers) + len(codes)))
    data = lightgbm.Dataset(columns, np.asarray(label, dtype=float), categorical_feature=categorical)
    params = {"objective": objective, "verbosity": -1, "num_threads": 1, "min_data_per_group": 10, "seed": 0}
    return str(lightgbm.train(params, data, num_boost_round=8).model_to_string())
