"""Intervention harvesting with all pairs of positions (Agarwal et al. 2019): one curve, without randomisation.

An item that some lists showed at k and others at k' has the same relevance at both, so its clicks compare the two
positions. This needs lists of the same query that differ because of the ranker, not because of the user.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse.csgraph import connected_components
from scipy.special import expit, log_expit, logit

from urank.errors import DataError
from urank.learning.features import Featurizer, Inputs
from urank.log.dataset import Block, Dataset, drop_unseen
from urank.log.identifiability import ranges
from urank.log.ragged import list_ids, offsets_of_runs
from urank.propensity.examination import ExaminationCurve

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class QueryItems:
    """Shows and clicks of every query and item, a row for each pair of them.

    Attributes:
        shows: `[pairs, K]`, w(q, i, k), the shows of the item at each position: Σ_l n_l 1[f_l puts i at k] counted in
            the log, so the rankers f_l need no names.
        clicks: `[pairs, K]`.
        offsets: `[queries + 1]`, where each query starts.
        inputs: the features of the pairs when first shown; None unless requested.
    """

    shows: NDArray[np.int64]
    clicks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    inputs: Inputs | None = None

    @property
    def rates(self) -> Floats:
        """Click rates `[pairs, K]`; NaN where an item was not shown."""
        rates = np.full(self.shows.shape, np.nan)
        np.divide(self.clicks, self.shows, out=rates, where=self.shows > 0)
        return rates


def count_query_items(dataset: Dataset, split: str, featurizer: Featurizer | None = None) -> QueryItems:
    """Count the shows and clicks of every query and item of a split, in memory; with a featurizer, add their inputs."""
    if not dataset.has("item_id"):
        raise DataError(f"{dataset.folder} must have item_id, to recognise an item at two positions")
    columns = ["item_id", "position", "click", *(featurizer.names if featurizer is not None else [])]
    counted, firsts, parts, pairs_before = [], [], [], 0
    for block in drop_unseen(dataset).blocks(split, columns):
        cells, first = _count(block)
        counted.append(cells)
        firsts.append(first.with_columns(place=pl.int_range(pl.len()) + pairs_before))
        pairs_before += first.height
        if featurizer is not None:
            parts.append(featurizer.encode(block.items, block.offsets)[first["row"].to_numpy()])
    if not counted:
        raise DataError(f"the {split} split of {dataset.folder} must have impressions; it has none")
    # A query may continue in the next block.
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
    return QueryItems(shows, clicks, offsets_of_runs(pairs["query"].to_numpy()), inputs)


def _count(block: Block) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Count shows and clicks by query, item and position; find the first row of each query and item."""
    item = pl.Series(block.items["item_id"].combine_chunks()).cast(pl.String)
    numbers = {name: block.column(name).astype(np.int64) for name in ("position", "click")}
    query = block.query_hash[list_ids(block.offsets)]
    frame = pl.DataFrame({"query": query, "item": item, **numbers}).with_row_index("row")
    cells = frame.group_by("query", "item", "position").agg(shows=pl.len().cast(pl.Int64), clicks=pl.col("click").sum())
    first = frame.group_by("query", "item").agg(pl.col("row").min().cast(pl.Int64)).sort("row")
    return cells, first


def weighted_clicks(pairs: QueryItems) -> tuple[Floats, Floats]:
    """Compute ĉ and ¬ĉ `[K, K]` of the interventional sets (Agarwal et al. 2019, Section 4).

        ĉ[k, k'] = Σ_{(q,i) in S_kk'} clicks(q, i, k) / w(q, i, k),      S_kk': pairs shown at k and at k'

    and ¬ĉ likewise with the shows that were not clicked. The diagonal is 0: a position is not compared with itself.

    >>> shows, clicks = np.array([[2, 4, 0], [1, 0, 0]]), np.array([[1, 1, 0], [1, 0, 0]])
    >>> weighted_clicks(QueryItems(shows, clicks, np.array([0, 2])))[0].tolist()  # the first pair: 1/2 at 1, 1/4 at 2
    [[0.0, 0.5, 0.0], [0.25, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    seen = (pairs.shows > 0).astype(np.float64)
    rates = np.nan_to_num(pairs.rates)
    clicked, total = rates.T @ seen, seen.T @ seen
    off_diagonal = 1 - np.eye(seen.shape[1])
    return clicked * off_diagonal, (total - clicked) * off_diagonal


def check_connected(clicked: Floats, source: str) -> None:
    """Check that ĉ `[K, K]` connects every position to position 1; raise a DataError that names the others."""
    _, component = connected_components(clicked + clicked.T > 0, directed=False)
    lost = [int(k) + 1 for k in np.flatnonzero(component != component[0])]
    if lost:
        raise DataError(
            "every position must be connected to position 1 by clicked items shown at both, directly or through "
            f"other positions; in {source} positions {ranges(lost)} are not"
        )


def pair_numbers(K: int) -> NDArray[np.int64]:
    """Number the unordered pairs of positions, `[K, K]`: equal for (k, k') and (k', k), 0 on the diagonal.

    >>> pair_numbers(3).tolist()
    [[0, 0, 1], [0, 0, 2], [1, 2, 0]]
    """
    numbers = np.zeros((K, K), dtype=np.int64)
    upper = np.triu_indices(K, 1)
    numbers[upper] = np.arange(len(upper[0]))
    return numbers + numbers.T


def harvest_loss(parameters: Floats, clicked: Floats, not_clicked: Floats) -> tuple[float, Floats]:
    """Compute the negative log likelihood per weighted show and its gradient (Agarwal et al. 2019, Eq. 9).

        − Σ_{k≠k'} [ĉ[k, k'] log(p_k r_kk') + ¬ĉ[k, k'] log(1 − p_k r_kk')] / Σ (ĉ + ¬ĉ)

    Args:
        parameters: `[K + K(K − 1)/2]`, the logits of p_k, then those of r_kk' in the order of `pair_numbers`.
        clicked, not_clicked: ĉ and ¬ĉ `[K, K]`, 0 on the diagonal.
    """
    K = len(clicked)
    pair = pair_numbers(K)
    of_position, of_pair = parameters[:K], parameters[K:]
    log_rate = log_expit(of_position)[:, None] + log_expit(of_pair)[pair]
    unclicked = -np.expm1(log_rate)
    total = clicked.sum() + not_clicked.sum()
    loss = -(clicked * log_rate + not_clicked * np.log(np.maximum(unclicked, 1e-300))).sum() / total
    by_log_rate = -(clicked - not_clicked * np.exp(log_rate) / np.maximum(unclicked, 1e-300)) / total
    by_pair = np.bincount(pair.ravel(), weights=by_log_rate.ravel(), minlength=len(of_pair))
    gradient = np.concatenate([by_log_rate.sum(axis=1) * expit(-of_position), by_pair * expit(-of_pair)])
    return float(loss), gradient


def harvest_curve(clicked: Floats, not_clicked: Floats) -> Floats:
    """Estimate p(k) / p(1) `[K]` by maximum likelihood of the weighted clicks.

    Args:
        clicked, not_clicked: ĉ and ¬ĉ `[K, K]`, 0 on the diagonal.

    >>> p, shown = np.array([1, 0.5]), np.array([[0, 100], [100, 0]])  # 100 items of relevance 0.3, seen at both
    >>> harvest_curve(shown * 0.3 * p[:, None], shown * (1 - 0.3 * p[:, None])).round(4).tolist()
    [1.0, 0.5]
    """
    K = len(clicked)
    if K == 1:
        return np.ones(1)
    upper = np.triu_indices(K, 1)
    both = clicked + clicked.T
    rate = both / np.maximum(both + not_clicked + not_clicked.T, 1e-12)
    # p starts at ½, the middle of its range, and r where it explains the clicks of its pair.
    start = np.concatenate([np.zeros(K), logit(np.clip(2 * rate[upper], 1e-3, 0.9))])
    options: Any = {"maxiter": 20_000, "maxfun": 40_000, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-10}
    data = (clicked, not_clicked)
    found = minimize(harvest_loss, start, args=data, jac=True, method="L-BFGS-B", options=options)
    log_p = log_expit(found.x[:K])
    return np.asarray(np.exp(log_p - log_p[0]))


def fit_harvest(dataset: Dataset) -> ExaminationCurve:
    """Estimate one curve from items that the train lists of a query, which must recur, showed at different positions.

    Raises:
        DataError: the log has no item_id, or a position is not connected to position 1 by any items.
    """
    clicked, not_clicked = weighted_clicks(count_query_items(dataset, "train"))
    check_connected(clicked, f"the train split of {dataset.folder}")
    return ExaminationCurve("harvest", tuple(harvest_curve(clicked, not_clicked).tolist()))
