"""The experiments of Section 6 in an app store: Table 3, and the live test.

For Table 3 (Section 6.1) rankers are trained on seven days of the store's log and judged on the eighth, by the paper's
debiased metrics and by the truth. Scenario 1 counts downloads, Scenario 2 weighs each download with the app's bid. The
live test (Section 6.2) is that of `live_test`, once for each seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from shutil import rmtree

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.clicks.click_settings import ClickConfig
from urank.errors import DataError
from urank.lab import appstore, experiment
from urank.lab.experiment import ComparedMethod, ExperimentStep, StoreConfig, Trial
from urank.lab.experiment_results import MethodKind, store_metrics
from urank.lab.live_test import judge_abtest, simulate_abtest
from urank.lab.market import Market, build_market
from urank.learning.features import Featurizer, fit_featurizer
from urank.log.dataset import Block, Dataset
from urank.log.prepare import prepare
from urank.log.ragged import pad, positions_by_score, where_items
from urank.log.reader import read
from urank.model_io import load_model
from urank.progress import Report
from urank.propensity.methods import load_propensity, save_propensity
from urank.propensity.randomised import ByCategory, fit_by_category
from urank.ranking.matching import Method, match
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import Baseline
from urank.ranking.urank_network import fit_urank
from urank.ranking.utility import earned, item_gains
from urank.storage import new_file, new_folder

TINY = 1e-12

Orders = Callable[[int], NDArray[np.int64]]
"""Returns the position `[rows]` of each item, given the number of positions that count."""


@dataclass(frozen=True, eq=False)
class StoreTrial(Trial[tuple[Orders, Orders]]):
    """One seed. `config` is the experiment's, with this seed; a trained method is its orders in both scenarios."""

    config: StoreConfig

    def dataset(self, *, bids: bool) -> Dataset:
        """The seven days, with the value of a download (Scenario 2) or without (Scenario 1)."""
        return Dataset(self.folder / "data" / ("bids" if bids else "clicks"))

    @cached_property
    def featurizer(self) -> Featurizer:
        """The features of all methods."""
        return fit_featurizer(self.dataset(bids=False))

    @cached_property
    def test(self) -> pl.DataFrame:
        """The eighth day, grouped by visit, the items of a visit in random order."""
        return pl.read_parquet(self.folder / "test.parquet")

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Offsets of the visits of the eighth day."""
        return experiment.query_offsets(self.test)

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """The true P(download) `[rows, K]`."""
        return experiment.table_array(self.test)

    @cached_property
    def propensity(self) -> ByCategory:
        """Q(o | category, k), from the random traffic."""
        found = load_propensity(self.folder / "propensity.json")
        assert isinstance(found, ByCategory)  # noqa: S101 - written by `make_data`
        return found

    def block(self, *, bids: bool) -> Block:
        """The eighth day without clicks and truth."""
        hidden = ("table", "click", "position", "timestamp", "policy")
        return experiment.as_block(self.test.drop(*hidden, *(() if bids else ("value",))))

    def judge(self, trained: tuple[Orders, Orders]) -> pl.DataFrame:
        """Compute the metrics of Table 3."""
        return visit_metrics(self.test, self.propensity.examination(self.block(bids=False)), *trained)

    def make_data(self, report: Report) -> None:
        """Simulate the store, estimate examination, and prepare the training logs."""
        market = build_market(self.config.market)
        learned = range(1, market.config.log_days)
        with new_folder(self.folder / "data", marker="clicks") as folder:
            propensity = _estimate_propensity(market, folder / "random", report)
            ranker = appstore.ranked_by(appstore.production_ranker(market, self.config.production, report=report))
            log = folder / "log.parquet"
            days = appstore.traffic(market, ranker, learned, policy="production")
            appstore.write_days(log, days, len(learned), "production", report)
            visitors = appstore.draw_requests(market, market.config.log_days, visits=self.config.test_visits)
            last = appstore.serve(visitors, ranker, policy="production")
            hidden = [name for name in appstore.NOT_LEARNED if name in pl.read_parquet_schema(log)]
            for name, dropped in (("clicks", hidden), ("bids", [each for each in hidden if each != "value"])):
                prepare(read(log, drop=dropped), folder / name, test=0.0, report=report)
            log.unlink()
            save_propensity(propensity, self.folder / "propensity.json")
            with new_file(self.folder / "test.parquet") as working:
                rng = np.random.default_rng([self.config.market.seed, 200])
                experiment.shuffled_lists(appstore.with_table(last), rng).write_parquet(working)


def _estimate_propensity(market: Market, folder: Path, report: Report) -> ByCategory:
    """Estimate Q(o | category, k) from random traffic, and remove the traffic."""
    folder.mkdir()
    path = folder / "random.parquet"
    appstore.write_days(path, appstore.random_traffic(market), market.config.random_days, "random", report)
    kept = ("query_id", "item_id", "position", "click", "category")
    others = [name for name in pl.read_parquet_schema(path) if name not in kept]
    prepare(read(path, drop=others), folder / "prepared", valid=0.0, test=0.0, report=report)
    found = fit_by_category(Dataset(folder / "prepared"))
    for name, curve in {**found.curves, "all categories": found.overall}.items():
        if min(curve.values) == 0:  # the weight of a download there would be infinite
            raise DataError(
                f"the random traffic must have downloads at every position; {name} has none at "
                f"{curve.values.index(0) + 1}: raise store.market.random_visits"
            )
    rmtree(folder)
    return found


def visit_metrics(test: pl.DataFrame, examination: NDArray[np.float64], clicks: Orders, bids: Orders) -> pl.DataFrame:
    """Return a row for each visit: the metrics of Table 3 in both scenarios, debiased and by the true table.

        #click@K = Σ_{k_i ≤ K} Q(k_i) / Q(k_i^h) · c_i,      Revenue@K = Σ_{k_i ≤ K} Q(k_i) / Q(k_i^h) · c_i · b_i

    which is Eq. 3 with examination in place of the click table.

    Args:
        test: a row for each item shown, grouped by visit, with `position` k^h, `click` c, `value` b and `table`.
        examination: Q(o = 1 | category, k) of each, `[rows, K]`.
        clicks: the order of Scenario 1.
        bids: the order of Scenario 2.
    """
    offsets = experiment.query_offsets(test)
    K = examination.shape[1]
    logged = pad(test["position"].to_numpy().astype(np.int64), offsets, fill=1)
    click = pad(test["click"].to_numpy(), offsets)
    value = pad(test["value"].to_numpy().astype(np.float64), offsets)
    truth = pad(experiment.table_array(test), offsets)
    seen = pad(examination, offsets)
    found: dict[str, NDArray[np.float64]] = {}
    for scenario, orders, worth in (("#click", clicks, np.ones_like(value)), ("Revenue", bids, value)):
        debiased = item_gains(seen, value=worth, click=click, logged=logged, blend=1.0, floor=TINY)
        expected = item_gains(truth, value=worth)
        for metric, cutoff in store_metrics(scenario, K).items():
            positions = pad(orders(cutoff), offsets, fill=1)
            found[metric] = earned(debiased[..., :cutoff], positions)
            found[f"{metric} true"] = earned(expected[..., :cutoff], positions)
    return test.select("query_id").gather(offsets[:-1]).with_columns(**found)


StoreMethod = ComparedMethod[StoreTrial, tuple[Orders, Orders]]
StoreStep = ExperimentStep[StoreTrial]
Scenario = Callable[[StoreTrial, bool, Report], Orders]
"""Trains a method for one scenario, with bids or without."""


def _method(
    name: str, kind: MethodKind, train: Scenario, needs: tuple[str, ...] = (), cost: float = 0.2
) -> StoreMethod:
    def both(trial: StoreTrial, report: Report) -> tuple[Orders, Orders]:
        return train(trial, False, report), train(trial, True, report)

    return StoreMethod(name, kind, both, needs, cost)


def _always(positions: NDArray[np.int64]) -> Orders:
    """The same order for every cutoff."""
    return lambda cutoff: positions


def _logged(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    return _always(trial.test["position"].to_numpy().astype(np.int64))


def _baseline(ranker: Baseline, weighted: bool, trial: StoreTrial, bids: bool, report: Report) -> Orders:
    options = {"propensity": trial.propensity if weighted else None, "report": report}
    dataset = trial.dataset(bids=bids)
    policy = experiment.baseline_policy(ranker, dataset, trial.featurizer, trial.config, **options)
    return _always(policy.positions(trial.block(bids=bids)))


def _by_click_model(clicks: str, method: Method, trial: StoreTrial, bids: bool, report: Report) -> Orders:
    block = trial.block(bids=bids)
    return _always(load_model(trial.folder / clicks).order(block.items, block.offsets, method=method))


def _urank(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    clicks = load_model(trial.folder / "clicks").clicks
    scorer, _ = fit_urank(trial.dataset(bids=bids), clicks, trial.config.scorer, report=report)
    block = trial.block(bids=bids)
    return _always(RankingModel(clicks, scorer, "score").order(block.items, block.offsets))


def _matched(trial: StoreTrial, table: NDArray[np.float64], bids: bool) -> Orders:
    """The matching for the positions up to the cutoff."""
    offsets, where = trial.offsets, where_items(trial.offsets)
    worth = table * trial.test["value"].to_numpy()[:, None] if bids else table
    return lambda cutoff: match(pad(worth[:, :cutoff], offsets), where=where)[where]


def _match_for_the_cutoff(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    model = load_model(trial.folder / "clicks")
    block = trial.block(bids=bids)
    return _matched(trial, np.exp(model.log_ctr(block.items, block.offsets).astype(np.float64)), bids)


def _true_match(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    return _always(_matched(trial, trial.table, bids)(trial.table.shape[1]))


def _true_ctr1(trial: StoreTrial, bids: bool, report: Report) -> Orders:
    offsets, where = trial.offsets, where_items(trial.offsets)
    worth = trial.table[:, 0] * (trial.test["value"].to_numpy() if bids else 1.0)
    return _always(positions_by_score(pad(worth, offsets), where=where)[where])


STORE_METHODS: dict[str, StoreMethod] = {
    "store-logged": _method("as logged", "baseline", _logged),
    "store-svm-none": _method("SVMRank, none", "baseline", partial(_baseline, "ranksvm", False), cost=2.0),
    "store-svm-truth": _method("SVMRank, ground truth", "baseline", partial(_baseline, "ranksvm", True), cost=2.0),
    "store-lambdarank-none": _method("LambdaRank, none", "baseline", partial(_baseline, "lambdarank", False), cost=4.0),
    "store-lambdarank-truth": _method(
        "LambdaRank, ground truth", "baseline", partial(_baseline, "lambdarank", True), cost=4.0
    ),
    "store-dla": _method("DLA", "baseline", partial(_baseline, "dla", False), cost=4.0),
    "store-deepfm": _method("DeepFM", "baseline", partial(_by_click_model, "deepfm", "ctr1"), ("store-deepfm-model",)),
    "store-urank": _method("U-rank", "ours", _urank, ("store-clicks",), 6.0),
    "store-match": _method("U-rank matching", "ours", partial(_by_click_model, "clicks", "match"), ("store-clicks",)),
    "store-match-cutoff": _method("U-rank matching for the cut-off", "ours", _match_for_the_cutoff, ("store-clicks",)),
    "store-ctr1-truth": _method("by the true CTR at 1", "oracle", _true_ctr1),
    "store-km": _method("KM (oracle model)", "oracle", _true_match),
}


def _clicks(output: str, config: Callable[[StoreConfig], ClickConfig]) -> StoreStep:
    def run(trial: StoreTrial, report: Report) -> None:
        experiment.keep_click_model(trial.dataset(bids=False), config(trial.config), trial.folder / output, report)

    return StoreStep(run, output, ("store-data",), 8.0)


LIVE = "store-live"


def _live(trial: StoreTrial, report: Report) -> None:
    """Simulate and analyse the live test; its exposure log is removed."""
    started = time.perf_counter()
    folder = trial.folder / "live"
    run = simulate_abtest(trial.config.live, folder, overwrite=True, report=report)
    found = judge_abtest(run, report=report).by_period()
    experiment.keep_results(trial.folder, LIVE, found, time.perf_counter() - started)
    rmtree(folder)


STORE_STEPS: dict[str, StoreStep] = {
    "store-data": StoreStep(StoreTrial.make_data, "data", cost=6.0),
    "store-deepfm-model": _clicks("deepfm", lambda config: config.production),
    "store-clicks": _clicks("clicks", lambda config: config.clicks),
    **experiment.method_steps(STORE_METHODS, data="store-data"),
    LIVE: StoreStep(_live, f"results/{LIVE}.parquet", cost=30.0),
}
