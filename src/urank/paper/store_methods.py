"""The methods of Table 3, each from the store's log to an order in both scenarios, and the steps that they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from urank.clicks.config import ClickConfig
from urank.log.lists import pad, positions_by_score, where_items
from urank.matching import match
from urank.model import load_model
from urank.paper.click_models import keep_click_model
from urank.paper.results import Kind
from urank.paper.store_trial import Orders, StoreTrial
from urank.progress import Report
from urank.rankers.baselines import Baseline, fit_baseline
from urank.rankers.gbdt import TreesConfig
from urank.rankers.order import Method
from urank.rankers.policies import ScorerPolicy
from urank.rankers.ranking import RankingModel
from urank.rankers.urank import fit_urank

__all__ = ["STORE_METHODS", "STORE_STEPS", "StoreMethod", "run_store_step", "store_needs"]


@dataclass(frozen=True)
class StoreMethod:
    """A row of Table 3.

    Attributes:
        name: as the table shows it.
        kind: baseline, oracle or ours.
        make: trains it for one scenario, with bids or without, and gives its orders of the eighth day.
        needs: the steps before it, besides the data.
        cost: about how long it takes, in units of the shortest.
    """

    name: str
    kind: Kind
    make: Callable[[StoreTrial, bool, Report], Orders]
    needs: tuple[str, ...] = ()
    cost: float = 0.2


def _always(positions: NDArray[np.int64]) -> Orders:
    """The same order whatever counts."""
    return lambda cutoff: positions


def _baseline(ranker: Baseline, *, weighed: bool = False) -> Callable[[StoreTrial, bool, Report], Orders]:
    def make(trial: StoreTrial, bids: bool, report: Report) -> Orders:
        config = trial.config
        scorer, _ = fit_baseline(
            ranker,
            trial.dataset(bids=bids),
            trial.featurizer,
            config=config.baseline,
            scorer=config.scorer,
            svm=config.svm,
            trees=TreesConfig(),
            propensity=trial.propensity if weighed else None,
            report=report,
        )
        return _always(ScorerPolicy(ranker, trial.featurizer, scorer).positions(trial.block(bids=bids)))

    return make


def _of_table(clicks: str, method: Method) -> Callable[[StoreTrial, bool, Report], Orders]:
    def make(trial: StoreTrial, bids: bool, report: Report) -> Orders:
        block = trial.block(bids=bids)
        return _always(load_model(trial.path(clicks)).order(block.items, block.offsets, method=method))

    return make


def _urank(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    clicks = load_model(trial.path("store-clicks")).clicks
    scorer, _ = fit_urank(trial.dataset(bids=bids), clicks, trial.config.scorer, report=report)
    block = trial.block(bids=bids)
    return _always(RankingModel(clicks, scorer, "score").order(block.items, block.offsets))


def _matched(trial: StoreTrial, table: NDArray[np.float64], bids: bool) -> Orders:
    """The matching for as many positions as count."""
    offsets, where = trial.offsets, where_items(trial.offsets)
    worth = table * trial.test["value"].to_numpy()[:, None] if bids else table
    return lambda cutoff: match(pad(worth[:, :cutoff], offsets), where=where)[where]


def _match_for_the_cutoff(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    model = load_model(trial.path("store-clicks"))
    return _matched(trial, np.exp(model.log_ctr(trial.block(bids=bids).items).astype(np.float64)), bids)


def _true_match(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    return _always(_matched(trial, trial.table, bids)(trial.table.shape[1]))


def _true_ctr1(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    offsets, where = trial.offsets, where_items(trial.offsets)
    worth = trial.table[:, 0] * (trial.test["value"].to_numpy() if bids else 1.0)
    return _always(positions_by_score(pad(worth, offsets), where=where)[where])


def _logged(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    return _always(trial.test["position"].to_numpy().astype(np.int64))


STORE_METHODS: dict[str, StoreMethod] = {
    "store-logged": StoreMethod("as logged", "baseline", _logged),
    "store-svm-none": StoreMethod("SVMRank, none", "baseline", _baseline("ranksvm"), cost=2.0),
    "store-svm-truth": StoreMethod("SVMRank, ground truth", "baseline", _baseline("ranksvm", weighed=True), cost=2.0),
    "store-lambdarank-none": StoreMethod("LambdaRank, none", "baseline", _baseline("lambdarank"), cost=4.0),
    "store-lambdarank-truth": StoreMethod(
        "LambdaRank, ground truth", "baseline", _baseline("lambdarank", weighed=True), cost=4.0
    ),
    "store-dla": StoreMethod("DLA", "baseline", _baseline("dla"), cost=4.0),
    "store-deepfm": StoreMethod("DeepFM", "baseline", _of_table("store-deepfm-model", "ctr1"), ("store-deepfm-model",)),
    "store-urank": StoreMethod("U-rank", "ours", _urank, ("store-clicks",), 6.0),
    "store-match": StoreMethod("U-rank matching", "ours", _of_table("store-clicks", "match"), ("store-clicks",)),
    "store-match-cutoff": StoreMethod(
        "U-rank matching for the cut-off", "ours", _match_for_the_cutoff, ("store-clicks",)
    ),
    "store-ctr1-truth": StoreMethod("by the true CTR at 1", "oracle", _true_ctr1),
    "store-km": StoreMethod("KM (oracle model)", "oracle", _true_match),
}


def _clicks(name: str, config: Callable[[StoreTrial], ClickConfig]) -> Callable[[StoreTrial, Report], None]:
    def make(trial: StoreTrial, report: Report) -> None:
        keep_click_model(trial.dataset(bids=False), config(trial), trial.path(name), report)

    return make


STORE_STEPS: dict[str, tuple[Callable[[StoreTrial, Report], None], tuple[str, ...], float]] = {
    "store-data": (lambda trial, report: trial.make_data(report), (), 6.0),
    "store-deepfm-model": (
        _clicks("store-deepfm-model", lambda trial: trial.config.production),
        ("store-data",),
        8.0,
    ),
    "store-clicks": (_clicks("store-clicks", lambda trial: trial.config.clicks), ("store-data",), 8.0),
}
"""What several methods share: how it is made, what it needs, and about how long it takes."""


def store_needs(name: str) -> tuple[tuple[str, ...], float]:
    """The steps before a step or a method, and its cost."""
    if name in STORE_STEPS:
        return STORE_STEPS[name][1], STORE_STEPS[name][2]
    method = STORE_METHODS[name]
    return ("store-data", *method.needs), method.cost


def run_store_step(trial: StoreTrial, name: str, report: Report) -> None:
    """Do one step, or train and judge one method in both scenarios."""
    if name in STORE_STEPS:
        STORE_STEPS[name][0](trial, report)
        return
    started = time.perf_counter()
    orders = [STORE_METHODS[name].make(trial, bids, report) for bids in (False, True)]
    trial.write_result(name, orders[0], orders[1], time.perf_counter() - started)
