"""One seed of Section 6.1 on disk: seven days of an app store's log to learn from, and the eighth to judge by.

seed-0/store/
  data/clicks, data/bids   the seven days, without and with the value of a download; removed when all is done
  data/random              the random traffic before them
  test.parquet             the eighth day: what was shown and downloaded, and the true table
  propensity.json          examination by category, from the random traffic
  deepfm/, clicks/         click models
  results/METHOD.parquet   a row for each visit of the eighth day: every metric, debiased and true
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import rmtree

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.errors import DataError
from urank.features import Featurizer, fit_featurizer
from urank.files import new_file, new_folder
from urank.log.dataset import Block, Dataset
from urank.log.lists import list_ids, offsets_of_runs, pad
from urank.log.prepare import prepare
from urank.log.read import read
from urank.paper.results import store_metrics
from urank.paper.seed_folder import SeedFolder
from urank.paper.store_config import StoreConfig
from urank.progress import Report
from urank.propensity.categories import ByCategory, fit_by_category
from urank.propensity.files import load_propensity, save_propensity
from urank.simulate.appstore import draw_requests, serve, traffic
from urank.simulate.market import Market, build_market
from urank.simulate.production import NOT_LEARNED, production_ranker, random_traffic, ranked_by, with_table, write_days
from urank.utility import earned, item_gains

__all__ = ["Orders", "StoreTrial", "judged_visits"]

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
