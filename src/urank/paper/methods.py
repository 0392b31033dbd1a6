"""The methods of Sections 5.3 and 5.4, each from a log to a policy, and the steps that several of them share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from urank.clicks.config import ClickConfig
from urank.clicks.fit import predictions
from urank.clicks.truth import true_table
from urank.evaluate.quality import auc_metric
from urank.files import new_file
from urank.log.dataset import Block
from urank.log.lists import pad, positions_by_score, where_items
from urank.log.split import SPLITS
from urank.model import load_model
from urank.paper.click_models import keep_click_model
from urank.paper.results import Kind
from urank.paper.trial import Trial
from urank.progress import Report
from urank.propensity.cpbm import fit_cpbm
from urank.propensity.files import load_propensity, save_propensity
from urank.propensity.model import Known, Propensity
from urank.propensity.randomised import fit_randomised
from urank.rankers.baselines import Baseline, fit_baseline
from urank.rankers.gbdt import fit_trees
from urank.rankers.order import Method as RankingMethod
from urank.rankers.policies import ModelPolicy, Policy, ScorerPolicy, TableMatch
from urank.rankers.ranking import RankingModel
from urank.rankers.urank import RankerConfig, fit_urank

__all__ = ["METHODS", "STEPS", "Method", "needs_of", "run_step"]


@dataclass(frozen=True)
class Method:
    """A row of a table.

    Attributes:
        name: as the table shows it.
        kind: baseline, oracle or ours.
        make: trains it and gives its policy.
        needs: the steps before it, besides the data.
        cost: about how long it takes, in units of the shortest.
    """

    name: str
    kind: Kind
    make: Callable[[Trial, Report], Policy]
    needs: tuple[str, ...] = ()
    cost: float = 2.0


def _baseline(ranker: Baseline, variant: str) -> Callable[[Trial, Report], Policy]:
    def make(trial: Trial, report: Report) -> Policy:
        config = trial.config
        propensity: Propensity | None = None
        if variant == "truth":
            propensity = Known(true_table(trial.truth))
        elif variant != "none":
            propensity = load_propensity(trial.path(variant))
        scorer, _ = fit_baseline(
            ranker,
            trial.dataset,
            trial.featurizer,
            config=config.baseline,
            scorer=config.scorer,
            svm=config.svm,
            trees=config.trees,
            propensity=propensity,
            report=report,
        )
        return ScorerPolicy(ranker, trial.featurizer, scorer)

    return make


def _urank(clicks: str, settings: Callable[[Trial], RankerConfig]) -> Callable[[Trial, Report], Policy]:
    def make(trial: Trial, report: Report) -> Policy:
        model = load_model(trial.path(clicks)).clicks
        scorer, _ = fit_urank(trial.dataset, model, settings(trial), report=report)
        return ModelPolicy("U-rank", RankingModel(model, scorer, "score"), "score")

    return make


def _urank_trees(trial: Trial, report: Report) -> Policy:
    model = load_model(trial.path("clicks")).clicks
    scorer, _ = fit_trees(trial.dataset, model, trial.config.scorer, trial.config.trees, report=report)
    return ModelPolicy("U-rank trees", RankingModel(model, scorer, "score"), "score")


def _of_table(clicks: str, method: RankingMethod) -> Callable[[Trial, Report], Policy]:
    def make(trial: Trial, report: Report) -> Policy:
        return ModelPolicy(method, load_model(trial.path(clicks)), method)

    return make


@dataclass(frozen=True, eq=False)
class _SecondSlot:
    """CTR-1 with the off-by-one of the released code: by the click probability at position 2."""

    model: RankingModel
    name: str = "CTR-2"

    @property
    def columns(self) -> Sequence[str]:
        return self.model.clicks.featurizer.names

    def positions(self, block: Block) -> NDArray[np.int64]:
        where = where_items(block.offsets)
        scores = pad(self.model.log_ctr(block.items)[:, :2][:, -1], block.offsets)
        return positions_by_score(scores, where=where)[where]


def _second_slot(trial: Trial, report: Report) -> Policy:
    return _SecondSlot(load_model(trial.path("clicks")))


def _oracle_match(trial: Trial, report: Report) -> Policy:
    return TableMatch("KM", true_table(trial.candidates))


def _weighed(ranker: Baseline, key: str, shown: str, variants: tuple[str, ...], cost: float) -> dict[str, Method]:
    """A ranker with several estimates of examination."""
    names = {
        "none": "none",
        "randomised": "randomisation",
        "cpbm": "CPBM",
        "cpbm-item": "CPBM of items",
        "truth": "ground truth",
    }
    return {
        f"{key}-{variant}": Method(
            f"{shown}, {names[variant]}",
            "oracle" if variant == "truth" else "baseline",
            _baseline(ranker, variant),
            needs=(variant,) if variant not in ("none", "truth") else (),
            cost=cost,
        )
        for variant in variants
    }


_ALL = ("none", "randomised", "cpbm", "cpbm-item", "truth")

METHODS: dict[str, Method] = {
    **_weighed("ranksvm", "svm", "SVMRank", _ALL, 1.0),
    **_weighed("lambdarank", "lambdarank", "LambdaRank", _ALL, 2.0),
    **_weighed("lambdarank-trees", "lambdarank-trees", "LambdaRank trees", ("none", "truth"), 2.0),
    "dla": Method("DLA", "baseline", _baseline("dla", "none")),
    "deepfm": Method("DeepFM", "baseline", _of_table("clicks-deepfm", "ctr1"), ("clicks-deepfm",), 0.1),
    "ctr1": Method("CTR-1", "baseline", _of_table("clicks", "ctr1"), ("clicks",), 0.1),
    "urank-paper": Method(
        "U-rank as printed",
        "ours",
        _urank("clicks-vector", lambda trial: trial.config.faithful),
        ("clicks-vector",),
        4.0,
    ),
    "urank": Method("U-rank", "ours", _urank("clicks", lambda trial: trial.config.scorer), ("clicks",), 4.0),
    "urank-trees": Method("U-rank trees", "ours", _urank_trees, ("clicks",), 4.0),
    "urank-match": Method("U-rank matching", "ours", _of_table("clicks", "match"), ("clicks",), 0.1),
    "urank-a1": Method(
        "U-rank on A1", "ours", _urank("clicks-vector", lambda trial: trial.config.scorer), ("clicks-vector",), 4.0
    ),
    "urank-a2": Method(
        "U-rank on A2", "ours", _urank("clicks-position", lambda trial: trial.config.scorer), ("clicks-position",), 4.0
    ),
    "urank-counterfactual": Method(
        "U-rank on A1, Eq. 3, stable",
        "ours",
        _urank("clicks-vector", lambda trial: trial.config.faithful.model_copy(update={"form": "stable"})),
        ("clicks-vector",),
        4.0,
    ),
    "urank-printed-model": Method(
        "U-rank on A1, table, as printed",
        "ours",
        _urank("clicks-vector", lambda trial: trial.config.faithful.model_copy(update={"target": "model"})),
        ("clicks-vector",),
        4.0,
    ),
    "ctr2": Method("CTR-1 of the released code", "baseline", _second_slot, ("clicks",), 0.1),
    "km": Method("KM (oracle model)", "oracle", _oracle_match, cost=0.1),
}


def _randomised(trial: Trial, report: Report) -> None:
    save_propensity(fit_randomised(trial.swaps), trial.path("randomised"))


def _cpbm(trial: Trial, report: Report) -> None:
    save_propensity(fit_cpbm(trial.dataset, trial.config.cpbm, report=report), trial.path("cpbm"))


def _cpbm_of_items(trial: Trial, report: Report) -> None:
    """Not in the paper: CPBM that knows the item, as its users' attention here asks for."""
    config = trial.config.cpbm.model_copy(update={"context": "item"})
    save_propensity(fit_cpbm(trial.dataset, config, report=report), trial.path("cpbm-item"))


def _clicks(name: str, **settings: object) -> Callable[[Trial, Report], None]:
    def make(trial: Trial, report: Report) -> None:
        config = ClickConfig.model_validate(trial.config.clicks.model_dump() | settings)
        keep_click_model(trial.dataset, config, trial.path(name), report)

    return make


def _auc(family: str) -> Callable[[Trial, Report], None]:
    def make(trial: Trial, report: Report) -> None:
        model = load_model(trial.path(f"clicks-{family}")).clicks
        found = {}
        for split in SPLITS:
            log_p, _, click = predictions(model, trial.dataset, split)
            found[split] = auc_metric(log_p, click)
        with new_file(trial.path(f"auc-{family}")) as working:
            working.write_text(json.dumps(found), encoding="utf-8")

    return make


STEPS: dict[str, tuple[Callable[[Trial, Report], None], tuple[str, ...], float]] = {
    "data": (lambda trial, report: trial.make_data(report), (), 1.0),
    "clicks": (_clicks("clicks"), ("data",), 12.0),
    "clicks-vector": (_clicks("clicks-vector", families=("vector",)), ("data",), 4.0),
    "clicks-position": (_clicks("clicks-position", families=("position",)), ("data",), 6.0),
    "clicks-deepfm": (_clicks("clicks-deepfm", families=("deepfm",)), ("data",), 8.0),
    "auc-vector": (_auc("vector"), ("data", "clicks-vector"), 0.2),
    "auc-position": (_auc("position"), ("data", "clicks-position"), 0.2),
    "randomised": (_randomised, ("data",), 0.2),
    "cpbm": (_cpbm, ("data",), 1.0),
    "cpbm-item": (_cpbm_of_items, ("data",), 1.0),
}
"""What several methods share: how it is made, what it needs, and about how long it takes."""


def needs_of(name: str) -> tuple[tuple[str, ...], float]:
    """The steps before a step or a method, and its cost."""
    if name in STEPS:
        return STEPS[name][1], STEPS[name][2]
    return ("data", *METHODS[name].needs), METHODS[name].cost


def run_step(trial: Trial, name: str, report: Report) -> None:
    """Do one step, or train and judge one method."""
    if name in STEPS:
        STEPS[name][0](trial, report)
        return
    started = time.perf_counter()
    policy = METHODS[name].make(trial, report)
    trial.write_result(name, policy, time.perf_counter() - started)
