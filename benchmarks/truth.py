"""The truth of a simulation: what an order of the candidates of its test queries earns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.lab.letor_simulation import SimulationConfig
from urank.lab.truth import read_truth
from urank.learning.features import Inputs
from urank.log.dataset import Dataset
from urank.log.ragged import list_ids, offsets_of_runs, pad, positions_by_score, where_items
from urank.log.splits import SPLITS, split_by_hash, stable_hash
from urank.ranking.matching import match as best_matching
from urank.ranking.utility import utility


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of a simulation, those of the test queries with their true table."""

    every: pl.DataFrame
    test: pl.DataFrame

    @classmethod
    def read(cls, folder: Path, config: SimulationConfig) -> Candidates:
        every = read_truth(folder)
        rng = np.random.default_rng(config.seed)
        order = np.lexsort((rng.random(every.height), every["query_id"].rle_id().to_numpy()))
        every = every[order]  # a random order within each query, so that ties are broken at random
        hashes = stable_hash(every["query_id"])
        test = split_by_hash(hashes, valid=config.valid, test=config.test) == SPLITS.index("test")
        return cls(every, every.filter(pl.Series(test)))

    @property
    def table(self) -> NDArray[np.float64]:
        return np.array(self.test["table"].to_list(), dtype=np.float64)

    @property
    def offsets(self) -> NDArray[np.int64]:
        return offsets_of_runs(self.test["query_id"].rle_id().to_numpy())

    @property
    def value(self) -> NDArray[np.float32]:
        return self.test["value"].to_numpy() if "value" in self.test.columns else np.ones(self.test.height, np.float32)

    def utility(
        self, *, score: NDArray[np.float64] | None = None, match: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """The true utility of each test query, sorted by score or matched by weights."""
        offsets = self.offsets
        where = where_items(offsets)
        if match is not None:
            positions = best_matching(pad(match, offsets), where=where)
        else:
            assert score is not None  # noqa: S101 - one of both is given
            positions = positions_by_score(pad(score, offsets), where=where)
        return utility(pad(self.table, offsets), positions, value=pad(self.value, offsets), where=where)

    def logged(self, dataset: Dataset) -> NDArray[np.float64]:
        """The true utility of each test query as it was shown, on average over its sessions."""
        rows = self.test.select("item_id", "query_id").with_row_index("row")
        table, value, parts = self.table, self.value, []
        for block in dataset.blocks("test", ["item_id", "position"]):
            shown = pl.DataFrame({"item_id": pl.Series(block.items["item_id"].combine_chunks()).cast(pl.String)})
            row = shown.join(rows, on="item_id", how="left", maintain_order="left")["row"].to_numpy()
            earned = table[row, block.column("position") - 1] * value[row]
            lists = np.bincount(list_ids(block.offsets), earned, len(block.offsets) - 1)
            parts.append(pl.DataFrame({"query_id": block.lists["query_id"].to_numpy(), "earned": lists}))
        means = pl.concat(parts).with_columns(pl.col("query_id").cast(pl.String)).group_by("query_id").mean()
        queries = self.test.select(pl.col("query_id").cast(pl.String)).unique(maintain_order=True)
        return queries.join(means, on="query_id", how="left", maintain_order="left")["earned"].to_numpy()

    def true_table(self, encode: Callable[[pl.DataFrame], Inputs]) -> Callable[[Inputs], NDArray[np.float32]]:
        """What looks the true table of items up by their features."""
        known = _fingerprints(encode(self.every))
        order = np.argsort(known)
        table = np.array(self.every["table"].to_list(), dtype=np.float32)[order]

        def look_up(inputs: Inputs) -> NDArray[np.float32]:
            return table[np.searchsorted(known[order], _fingerprints(inputs))]

        return look_up


def _fingerprints(inputs: Inputs) -> NDArray[np.uint64]:
    bits = np.ascontiguousarray(inputs.numeric).view(np.uint32).astype(np.uint64)
    factors = np.random.default_rng(0).integers(0, 2**63, bits.shape[1], dtype=np.uint64) | np.uint64(1)
    return np.asarray((bits * factors).sum(axis=1, dtype=np.uint64))
