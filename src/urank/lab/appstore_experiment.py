"""The methods of Table 3, each from the store's log to an order in both scenarios, and the steps that they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import rmtree

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.clicks.fitting import ClickConfig
from urank.errors import DataError
from urank.lab.appstore import (
    NOT_LEARNED,
    draw_requests,
    production_ranker,
    random_traffic,
    ranked_by,
    serve,
    traffic,
    with_table,
    write_days,
)
from urank.lab.letor_experiment import SeedFolder, keep_click_model
from urank.lab.market import Market, build_market
from urank.lab.results import Kind, store_metrics
from urank.lab.settings import StoreConfig
from urank.learning.features import Featurizer, fit_featurizer
from urank.log.dataset import Block, Dataset
from urank.log.prepare import prepare
from urank.log.ragged import list_ids, offsets_of_runs, pad, positions_by_score, where_items
from urank.log.reader import read
from urank.model_io import load_model
from urank.progress import Report
from urank.propensity.methods import load_propensity, save_propensity
from urank.propensity.randomised import ByCategory, fit_by_category
from urank.ranking.baselines import Baseline, fit_baseline
from urank.ranking.matching import match
from urank.ranking.policies import ScorerPolicy
from urank.ranking.positions import Method
from urank.ranking.ranking_model import RankingModel
from urank.ranking.urank_network import fit_urank
from urank.ranking.urank_trees import TreesConfig
from urank.ranking.utility import earned, item_gains
from urank.storage import new_file, new_folder

__all__ = [
    "STORE_METHODS",
    "STORE_STEPS",
    "Orders",
    "StoreMethod",
    "StoreTrial",
    "judged_visits",
    "run_store_step",
    "store_needs",
]

TINY = 1e-12

Orders = Callable[[int], NDArray[np.int64]]
"""Where a method puts each item `[rows]`, given the number of first positions that count."""


@dataclass(frozen=True, eq=False)
class StoreTrial(SeedFolder):
    """One seed.

    Attributes:
        config: of the experiment, with this seed.
    """

    config: StoreConfig

    def dataset(self, *, bids: bool) -> Dataset:
        """The seven days, with the value of a download (Scenario 2) or without (Scenario 1)."""
        return Dataset(self.folder / "data" / ("bids" if bids else "clicks"))

    @cached_property
    def featurizer(self) -> Featurizer:
        """What all methods see of the features."""
        return fit_featurizer(self.dataset(bids=False))

    @cached_property
    def test(self) -> pl.DataFrame:
        """The eighth day, the items of a visit together in an order that tells nothing."""
        return pl.read_parquet(self.folder / "test.parquet")

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where each visit of the eighth day lies."""
        return offsets_of_runs(self.test["query_id"].rle_id().to_numpy())

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """The true P(download) `[rows, K]`."""
        return _tables(self.test)

    @cached_property
    def propensity(self) -> ByCategory:
        """Q(o | category, k), from the random traffic."""
        found = load_propensity(self.folder / "propensity.json")
        assert isinstance(found, ByCategory)  # noqa: S101 - this trial wrote it
        return found

    def block(self, *, bids: bool) -> Block:
        """The eighth day as rankers take it: without clicks and truth."""
        hidden = ("table", "click", "position", "timestamp", "policy", *(() if bids else ("value",)))
        frame = self.test.drop(hidden)
        queries = pa.table({"query_id": frame["query_id"].gather(self.offsets[:-1]).to_arrow()})
        return Block(queries, frame.to_arrow(), self.offsets)

    def make_data(self, report: Report) -> None:
        """Simulate the store, estimate examination, and prepare what methods learn from."""
        market = build_market(self.config.market)
        learned = range(1, market.config.days)
        with new_folder(self.folder / "data", marker="clicks") as folder:
            propensity = _propensity(market, folder / "random", report)
            ranker = ranked_by(production_ranker(market, self.config.production, report=report))
            days = traffic(market, ranker, learned, policy="production")
            log = folder / "log.parquet"
            write_days(log, days, len(learned), "production", report)
            visitors = draw_requests(market, market.config.days, visits=self.config.test_visits)
            last = serve(visitors, ranker, policy="production")
            hidden = [name for name in NOT_LEARNED if name in pl.read_parquet_schema(log)]
            for name, dropped in (("clicks", hidden), ("bids", [each for each in hidden if each != "value"])):
                prepare(read(log, drop=dropped), folder / name, test=0.0, report=report)
            log.unlink()
            save_propensity(propensity, self.folder / "propensity.json")
            with new_file(self.folder / "test.parquet") as working:
                _shuffled(with_table(last), self.config.market.seed).write_parquet(working)

    def path(self, name: str) -> Path:
        """Where a step or a method leaves what it made."""
        steps = {
            "store-data": "data",
            "store-deepfm-model": "deepfm",
            "store-clicks": "clicks",
        }
        return self.folder / steps.get(name, f"results/{name}.parquet")

    def write_result(self, name: str, clicks: Orders, bids: Orders, seconds: float) -> None:
        """Judge a method in both scenarios and keep what came of it."""
        frame = judged_visits(self.test, self.propensity.examination(self.block(bids=False)), clicks, bids)
        with new_file(self.path(name)) as working:
            frame.with_columns(seconds=pl.lit(seconds)).write_parquet(working)


def judged_visits(test: pl.DataFrame, examination: NDArray[np.float64], clicks: Orders, bids: Orders) -> pl.DataFrame:
    """A row for each visit: the metrics of Table 3 in the two scenarios, debiased and by the true table.

        #click@K = Σ_{k_i ≤ K} Q(k_i) / Q(k_i^h) · c_i,      Revenue@K = Σ_{k_i ≤ K} Q(k_i) / Q(k_i^h) · c_i · b_i

    which is Eq. 3 with examination in place of the click table.

    Args:
        test: a row for each item shown, those of a visit together, with `position` k^h, `click` c, `value` b and
            `table`.
        examination: Q(o = 1 | category, k) of each, `[rows, K]`.
        clicks: the order of Scenario 1.
        bids: the order of Scenario 2.
    """
    offsets = offsets_of_runs(test["query_id"].rle_id().to_numpy())
    K = examination.shape[1]
    logged = pad(test["position"].to_numpy().astype(np.int64), offsets, fill=1)
    click = pad(test["click"].to_numpy(), offsets)
    value = pad(test["value"].to_numpy().astype(np.float64), offsets)
    truth = pad(_tables(test), offsets)
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


def _propensity(market: Market, folder: Path, report: Report) -> ByCategory:
    """Q(o | category, k) from random traffic, which is removed again.

    Raises:
        DataError: when there was too little of it.
    """
    folder.mkdir()
    path = folder / "random.parquet"
    write_days(path, random_traffic(market), market.config.random_days, "random", report)
    kept = ("query_id", "item_id", "position", "click", "category")
    others = [name for name in pl.read_parquet_schema(path) if name not in kept]
    prepare(read(path, drop=others), folder / "prepared", valid=0.0, test=0.0, report=report)
    found = fit_by_category(Dataset(folder / "prepared"))
    for name, curve in {**found.curves, "all categories": found.overall}.items():
        if min(curve.values) == 0:  # a download there would count without limit
            raise DataError(
                f"the random traffic must have downloads at every position; {name} has none at "
                f"{curve.values.index(0) + 1}: raise store.market.random_visits"
            )
    rmtree(folder)
    return found


def _tables(shown: pl.DataFrame) -> NDArray[np.float64]:
    """The true tables as one array `[rows, K]`."""
    return shown["table"].explode().to_numpy().reshape(shown.height, -1).astype(np.float64)


def _shuffled(shown: pl.DataFrame, seed: int) -> pl.DataFrame:
    """The items of each visit in another order, which does not tell where they were shown."""
    visits = list_ids(offsets_of_runs(shown["query_id"].rle_id().to_numpy()))
    return shown[np.lexsort((np.random.default_rng([seed, 200]).random(shown.height), visits))]


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
