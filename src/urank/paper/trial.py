"""One seed of an experiment on disk: the log that methods learn from, and the candidates that judge them.

    seed-0/
      data/simulation, data/prepared   the log, as a learner gets it; removed when all methods are done
      data/swaps                       the online experiment with random swaps
      candidates.parquet               the test queries: items, labels and the true click table
      clicks/, clicks-vector/, …       click models
      randomised.json, cpbm.safetensors, auc-vector.json, …
      results/METHOD.parquet           a row for each test query: items, positions, metrics

Everything appears by rename when it is complete, so what is there need not be made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.clicks.truth import read_truth
from urank.evaluate.metrics import average_precision_metric, clicks_metric, ctr_metric, ndcg_metric
from urank.features import Featurizer, fit_featurizer
from urank.files import new_file, new_folder
from urank.log.dataset import Block, Dataset
from urank.log.letor import read_letor
from urank.log.lists import offsets_of_runs, pad, where_items
from urank.log.prepare import prepare
from urank.log.read import read
from urank.log.split import SPLITS, split_by_hash, stable_hash
from urank.paper.config import ExperimentConfig
from urank.paper.results import METRICS
from urank.paper.seed_folder import SeedFolder
from urank.progress import Report
from urank.rankers.policies import Policy
from urank.simulate.config import SimulationConfig
from urank.simulate.letor import simulate, write_simulation

__all__ = ["Trial", "judged"]

LISTS = 100_000
"""Lists that a log of given documents has, if the configuration does not say: as many as that of generated ones."""


@dataclass(frozen=True, eq=False)
class Trial(SeedFolder):
    """One seed.

    Attributes:
        config: of the experiment, with this seed.
    """

    config: ExperimentConfig

    @cached_property
    def dataset(self) -> Dataset:
        """The log that methods learn from."""
        return Dataset(self.folder / "data" / "prepared")

    @cached_property
    def swaps(self) -> Dataset:
        """The log of the experiment with random swaps."""
        return Dataset(self.folder / "data" / "swaps")

    @cached_property
    def truth(self) -> pl.DataFrame:
        """All candidates of the simulation with their true table."""
        return read_truth(self.folder / "data" / "simulation")

    @cached_property
    def candidates(self) -> pl.DataFrame:
        """Those of the test queries, in an order that tells nothing."""
        return pl.read_parquet(self.folder / "candidates.parquet")

    @cached_property
    def featurizer(self) -> Featurizer:
        """What the baselines see of the features; that of click models is the same."""
        return fit_featurizer(self.dataset)

    @property
    def block(self) -> Block:
        """The candidates as policies take them."""
        frame = self.candidates.drop("table", "relevance")
        offsets = offsets_of_runs(frame["query_id"].rle_id().to_numpy())
        queries = pa.table({"query_id": frame["query_id"].gather(offsets[:-1]).to_arrow()})
        return Block(queries, frame.to_arrow(), offsets)

    def make_data(self, report: Report) -> None:
        """Simulate, write and prepare both logs."""
        simulation = self._simulation()
        with new_folder(self.folder / "data", marker="simulation") as folder:
            write_simulation(simulate(simulation, report), folder / "simulation", progress=report)
            swapped = simulation.model_copy(
                update={
                    "randomise": "swap",
                    "randomise_share": 1.0,
                    "sessions": self.config.swap_sessions,
                    "truth": "test",
                }
            )
            write_simulation(simulate(swapped, report), folder / "swapped", progress=report)
            valid, test = simulation.valid, simulation.test
            for source, target in (("simulation", "prepared"), ("swapped", "swaps")):
                # A learner sees neither labels nor the chance of a placement.
                log = read(folder / source / "log.parquet", drop=["relevance", "propensity"])
                prepare(log, folder / target, valid=valid, test=test, report=report)
                (folder / source / "log.parquet").unlink()
            truth = read_truth(folder / "simulation")
            split = split_by_hash(stable_hash(truth["query_id"]), valid=valid, test=test)
            rng = np.random.default_rng(simulation.seed)
            judging = truth.filter(pl.Series(split == SPLITS.index("test")))
            shuffled = judging.with_columns(__place=pl.Series(rng.random(judging.height))).sort(
                pl.col("query_id").rle_id(), "__place"
            )
            with new_file(self.folder / "candidates.parquet") as working:
                shuffled.drop("__place").write_parquet(working)

    def _simulation(self) -> SimulationConfig:
        given = self.config.simulation
        if given.data is None or "sessions" in given.model_fields_set:
            return given
        sessions = max(1, min(200, LISTS // read_letor(given.data).n_queries))
        return given.model_copy(update={"sessions": sessions})

    def path(self, name: str) -> Path:
        """Where a step or a method leaves what it made."""
        special = {
            "data": "data",
            "randomised": "randomised.json",
            "cpbm": "cpbm.safetensors",
            "cpbm-item": "cpbm-item.safetensors",
        }
        if name in special or name.startswith("clicks"):
            return self.folder / special.get(name, name)
        if name.startswith("auc"):
            return self.folder / f"{name}.json"
        return self.folder / "results" / f"{name}.parquet"

    def write_result(self, name: str, policy: Policy, seconds: float) -> None:
        """Judge a method by the truth and keep what it did."""
        frame = judged(self.candidates, policy.positions(self.block)).with_columns(seconds=pl.lit(seconds))
        with new_file(self.path(name)) as working:
            frame.write_parquet(working)


def judged(candidates: pl.DataFrame, position: NDArray[np.int64]) -> pl.DataFrame:
    """A row for each query: its items with their positions, and the metrics of Table 1 by the true table.

    Args:
        candidates: a row for each item with `query_id`, `item_id`, `relevance` and `table`, the items of a query
            together.
        position: `[rows]`, where a method puts each.
    """
    offsets = offsets_of_runs(candidates["query_id"].rle_id().to_numpy())
    where = where_items(offsets)
    table = pad(np.array(candidates["table"].to_list(), dtype=np.float64), offsets)
    label = pad(candidates["relevance"].to_numpy().astype(np.float64), offsets)
    positions = pad(position, offsets, fill=1)
    values: dict[str, Any] = {
        "MAP": average_precision_metric(positions, label, where=where),
        "nDCG@10": ndcg_metric(positions, label, where=where),
        "#Click": clicks_metric(positions, table, where=where),
        "CTR": ctr_metric(positions, table, where=where),
    }
    lists = candidates.select("query_id", "item_id").with_columns(position=position)
    lists = lists.group_by("query_id", maintain_order=True).agg("item_id", "position")
    return lists.with_columns(**{name: values[name] for name in METRICS})
