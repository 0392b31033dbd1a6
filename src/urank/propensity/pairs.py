"""Natural interventions: the items of a query that several lists showed at different positions.

Nobody needs to randomise for that: loggers that disagree, or one that was updated, move items by themselves (Agarwal
et al. 2019). What is kept of a log is, for each query and item, how often it was shown and clicked at each position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from urank.errors import DataError
from urank.features import Featurizer, Inputs
from urank.log.dataset import Block, Dataset
from urank.log.interventions import ranges
from urank.log.lists import list_ids, offsets_of_runs
from urank.log.shown import shown

__all__ = ["Pairs", "check_joined", "harvested", "weighted_clicks"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pairs:
    """A row for each pair of a query and one of its items.

    Attributes:
        shows: `[pairs, K]`, w(q, i, k): how often the item was shown at each position. It is Σ_l n_l 1[f_l puts i at k]
            counted in the log, so that loggers need no names.
        clicks: `[pairs, K]`.
        offsets: `[queries + 1]`, where each query starts.
        inputs: the features of the pairs at their first showing; none unless asked for.
    """

    shows: NDArray[np.int64]
    clicks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    inputs: Inputs | None = None

    @property
    def rates(self) -> Floats:
        """Clicks over shows `[pairs, K]`; NaN where an item was not shown."""
        rates = np.full(self.shows.shape, np.nan)
        np.divide(self.clicks, self.shows, out=rates, where=self.shows > 0)
        return rates


def harvested(dataset: Dataset, split: str, featurizer: Featurizer | None = None) -> Pairs:
    """Count the shows and clicks of every query and item, in memory.

    Args:
        dataset: a prepared log that names its items.
        split: the part of it that is looked at.
        featurizer: to keep the features of the pairs too.
    """
    if not dataset.has("item_id"):
        raise DataError(f"{dataset.folder} must name its items (item_id), so that one is known at two positions")
    columns = ["item_id", "position", "click", *(featurizer.names if featurizer is not None else [])]
    counted, firsts, parts = [], [], []
    pairs_before = 0
    for block in shown(dataset).blocks(split, columns):
        cells, first = _count(block)
        counted.append(cells)
        firsts.append(first.with_columns(place=pl.int_range(pl.len()) + pairs_before))
        pairs_before += first.height
        if featurizer is not None:
            parts.append(featurizer.encode(block.items)[first["row"].to_numpy()])
    if not counted:
        raise DataError(f"the {split} split of {dataset.folder} must have impressions; it has none")
    # A query may go on in the next block: what was counted apart is counted together.
    cells = pl.concat(counted).group_by("query", "item", "position").agg(pl.col("shows", "clicks").sum())
    pairs = pl.concat(firsts).group_by("query", "item").agg(pl.col("place").min()).sort("query", "place")
    cells = cells.join(pairs.with_row_index("pair"), on=["query", "item"], how="left")
    pair, k = cells["pair"].to_numpy(), cells["position"].to_numpy() - 1
    shows = np.zeros((pairs.height, dataset.positions), dtype=np.int64)
    clicks = np.zeros_like(shows)
    shows[pair, k], clicks[pair, k] = cells["shows"].to_numpy(), cells["clicks"].to_numpy()
    inputs = None
    if featurizer is not None:
        inputs = Inputs(np.concatenate([p.numeric for p in parts]), np.concatenate([p.categorical for p in parts]))
        inputs = inputs[pairs["place"].to_numpy()]
    return Pairs(shows, clicks, offsets_of_runs(pairs["query"].to_numpy()), inputs)


def _count(block: Block) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Shows and clicks by query, item and position, and the row at which each query and item is first seen."""
    frame = pl.DataFrame(
        {
            "query": block.query_hash[list_ids(block.offsets)],
            "item": pl.Series(block.items["item_id"].combine_chunks()).cast(pl.String),
            "position": block.column("position").astype(np.int64),
            "click": block.column("click").astype(np.int64),
        }
    ).with_row_index("row")
    cells = frame.group_by("query", "item", "position").agg(shows=pl.len().cast(pl.Int64), clicks=pl.col("click").sum())
    first = frame.group_by("query", "item").agg(pl.col("row").min().cast(pl.Int64)).sort("row")
    return cells, first


def weighted_clicks(pairs: Pairs) -> tuple[Floats, Floats]:
    """ĉ and ¬ĉ `[K, K]` of the interventional sets (Agarwal et al. 2019, Section 4).

        ĉ[k, k'] = Σ_{(q,i) in S_kk'} clicks(q, i, k) / w(q, i, k),      S_kk': pairs shown at k and at k'

    and ¬ĉ likewise with the showings that were not clicked. The diagonal is 0: a position tells nothing of itself.

    >>> shows, clicks = np.array([[2, 4, 0], [1, 0, 0]]), np.array([[1, 1, 0], [1, 0, 0]])
    >>> weighted_clicks(Pairs(shows, clicks, np.array([0, 2])))[0].tolist()  # the first pair alone: 1/2 at 1, 1/4 at 2
    [[0.0, 0.5, 0.0], [0.25, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    seen = (pairs.shows > 0).astype(np.float64)
    rates = np.nan_to_num(pairs.rates)
    clicked, total = rates.T @ seen, seen.T @ seen
    off_diagonal = 1 - np.eye(seen.shape[1])
    return clicked * off_diagonal, (total - clicked) * off_diagonal


def check_joined(clicked: Floats, source: str) -> None:
    """Refuse ĉ `[K, K]` in which items clicked at one of two positions do not join every position to position 1.

    Raises:
        DataError: naming the positions about which nothing can be said.
    """
    _, component = connected_components(clicked + clicked.T > 0, directed=False)
    lost = [int(k) + 1 for k in np.flatnonzero(component != component[0])]
    if lost:
        raise DataError(
            "every position must be joined to position 1 by clicked items shown at both, or at others between "
            f"them; in {source} positions {ranges(lost)} are not"
        )
