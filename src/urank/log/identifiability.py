"""Which positions can be compared: the graph of positions joined by items that were clicked at both.

What an item earns at position 8 rather than at position 2 can only be learned if items were seen at both, or if the
order was random. Starting from the position with most clicks, the positions are joined one at a time, always the one
with the strongest link to those already joined; where the strongest link left is too weak, the rest is not identified.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import fdtrc

from urank.log.columns import LogSchema, signed_log
from urank.log.ragged import list_ids

__all__ = [
    "MIN_CLICKS",
    "MOST_SHARED",
    "Confounding",
    "Interventions",
    "find_interventions",
    "heavy_tails",
    "id_like",
    "outcomes",
    "predict_position",
    "ranges",
]

MOST_COLUMNS = 500
MOST_WORK = 200_000 * 256**2
BLOCK_CELLS = 4_000_000

_MOST_CATEGORIES = 10
_ID_NAME = re.compile(r"(^|_)(id|code|key)$", re.IGNORECASE)


@dataclass(frozen=True)
class Confounding:
    """How well a linear model of the features tells the position within a list.

    Attributes:
        share: the adjusted R² within lists: 0 when features say nothing of position, 1 when they fix it.
        p_value: of the F test that they say nothing.
        rows: rows used.
        strongest: the features most correlated with position within lists, with the correlation.
    """

    share: float
    p_value: float
    rows: int
    strongest: dict[str, float]

    @property
    def looks_random(self) -> bool:
        """Whether the order could be random: many rows, and the features say nothing of it."""
        return self.rows >= 1_000 and self.p_value > 0.001 and self.share < 0.01


def predict_position(
    rows: pl.DataFrame, offsets: NDArray[np.int64], schema: LogSchema, *, without: Collection[str] = ()
) -> Confounding | None:
    """Regress position on the features, both without their mean in the list; `None` when there is nothing to do so.

    Numbers are compressed by the signed log first; the ten most frequent values of a categorical feature are columns.
    With many columns fewer lists are used, and of more than `MOST_COLUMNS` an even selection.

    Args:
        rows: rows sorted into lists.
        offsets: where the lists begin and end.
        schema: which columns are features.
        without: features to leave out, such as results of the click.
    """
    columns = _columns(rows, schema, without)
    if not columns:
        return None
    enough = max(MOST_WORK // len(columns) ** 2, 20 * len(columns))
    offsets = offsets[: max(2, int(np.searchsorted(offsets, enough, side="right")))]
    gram, with_position, total = _moments(rows, offsets, columns)
    n = int(offsets[-1])
    spread = np.sqrt(np.diag(gram) / n)
    keep = spread > 1e-9
    names = [name for (name, _, _), kept in zip(columns, keep, strict=True) if kept]
    gram = gram[np.ix_(keep, keep)] / np.outer(spread[keep], spread[keep])
    with_position = with_position[keep] / spread[keep]
    # Columns that follow from others, such as the last of the dummies, must not count: the rank does.
    values, vectors = np.linalg.eigh(gram)
    real = values > 1e-9 * max(float(values.max(initial=0)), 1e-9)
    rank = int(real.sum())
    freedom = n - (len(offsets) - 1) - rank
    if rank == 0 or freedom < 10 or total == 0:
        return None
    explained = min(total, float((((vectors.T @ with_position)[real]) ** 2 / values[real]).sum()))
    rest = total - explained
    share = 1 - (rest / freedom) / (total / (freedom + rank))
    ratio = (explained / rank) / (rest / freedom) if rest > 0 else np.inf
    correlation = with_position / np.sqrt(n * total)
    order = np.argsort(-np.abs(correlation))[:5]
    return Confounding(
        share=max(0.0, float(share)),
        p_value=float(fdtrc(rank, freedom, ratio)),
        rows=n,
        strongest={names[i]: round(float(correlation[i]), 3) for i in order},
    )


def _columns(rows: pl.DataFrame, schema: LogSchema, without: Collection[str]) -> list[tuple[str, str, str | None]]:
    """The columns of the design: its name, the feature, and the value it tells of a categorical one."""
    columns: list[tuple[str, str, str | None]] = [
        (name, name, None) for name in schema.named("numeric") if name not in without
    ]
    for name in schema.named("categorical"):
        if name not in without:
            counts = rows[name].alias("value").drop_nulls().value_counts(name="n")
            top = counts.sort(["n", "value"], descending=[True, False])["value"].head(_MOST_CATEGORIES).to_list()
            columns += [(f"{name}={value}", name, value) for value in top]
    if len(columns) > MOST_COLUMNS:
        columns = [columns[i] for i in np.linspace(0, len(columns) - 1, MOST_COLUMNS).astype(int)]
    return columns


def _moments(
    rows: pl.DataFrame, offsets: NDArray[np.int64], columns: Sequence[tuple[str, str, str | None]]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Products within lists of the columns with each other and with the position, and of the position with itself.

    Some lists at a time, so that there is never a copy of all columns of all rows.
    """
    gram, with_position, total = np.zeros((len(columns),) * 2), np.zeros(len(columns)), 0.0
    first = 0
    while first < len(offsets) - 1:
        room = offsets[first] + max(1, BLOCK_CELLS // len(columns))
        last = max(first + 1, int(np.searchsorted(offsets, room, side="right")) - 1)
        part, bounds = rows[offsets[first] : offsets[last]], offsets[first : last + 1] - offsets[first]
        X = np.empty((part.height, len(columns)))
        for place, (_, name, value) in enumerate(columns):
            values = part[name]
            X[:, place] = signed_log(values.to_numpy()) if value is None else (values == value).fill_null(False)
        X = _within(X, bounds)
        y = _within(part["position"].to_numpy().astype(np.float64)[:, None], bounds)[:, 0]
        gram += X.T @ X
        with_position += X.T @ y
        total += float(y @ y)
        first = last
    return gram, with_position, total


def _within(matrix: NDArray[np.float64], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each column less its mean in the list; what is missing counts as that mean."""
    known = ~np.isnan(matrix)
    filled = np.where(known, matrix, 0.0)
    counts = np.maximum(np.add.reduceat(known, offsets[:-1], axis=0, dtype=np.int64), 1)
    means = np.add.reduceat(filled, offsets[:-1], axis=0) / counts
    return np.where(known, filled - means[list_ids(offsets)], 0.0)


def outcomes(rows: pl.DataFrame, schema: LogSchema) -> list[str]:
    """Features that are there, or not zero, hardly ever without a click: results of the click, not reasons for it."""
    click = rows["click"].to_numpy().astype(bool)
    rate = click.mean()
    found = []
    for name in schema.named("numeric"):
        x = rows[name].to_numpy()
        for told in (~np.isnan(x), ~np.isnan(x) & (x != 0)):
            if told.sum() >= 10 and rate < 0.5 and click[told].mean() > 0.98:
                found.append(name)
                break
    return found


def heavy_tails(rows: pl.DataFrame, schema: LogSchema, factor: float = 100.0) -> dict[str, tuple[float, float]]:
    """Numeric features whose largest magnitude is over `factor` times their 99th percentile: (percentile, largest)."""
    found = {}
    for name in schema.named("numeric"):
        x = np.abs(rows[name].drop_nans().to_numpy())
        if len(x):
            high, most = float(np.quantile(x, 0.99)), float(x.max())
            if high > 0 and most > factor * high:
                found[name] = (high, most)
    return found


def id_like(rows: pl.DataFrame, schema: LogSchema) -> list[str]:
    """Numeric features named like ids and holding whole numbers only: their order means nothing."""
    found = []
    for name in schema.named("numeric"):
        if _ID_NAME.search(name):
            x = rows[name].drop_nans().to_numpy()
            if len(x) and (x == np.floor(x)).all():
                found.append(name)
    return found


MOST_SHARED = 200
"""With more positions than this the table of shared items is left out."""

MIN_CLICKS = 10
"""A link needs this many clicks on both of its sides: the ratio of two click rates is then known to some ±45 %."""


@dataclass(frozen=True)
class Interventions:
    """How the positions of a log hang together.

    Attributes:
        shared: `[K, K]`, the number of items seen at both positions; on the diagonal those seen at the position.
            None when K is above `MOST_SHARED`.
        moved: the number of items seen at two positions or more.
        items: the number of items.
        evidence: `[K]`, for each position the clicks on the weaker side of the link that joined it.
        joined: the positions (1-based) that are joined.
        lost: the positions that were shown but are not.
    """

    shared: NDArray[np.int64] | None
    moved: int
    items: int
    evidence: NDArray[np.float64]
    joined: list[int]
    lost: list[int]


def find_interventions(
    item: NDArray[np.int64],
    position: NDArray[np.int64],
    clicks: NDArray[np.int64],
    random_clicks: NDArray[np.int64],
    *,
    shown: NDArray[np.bool_] | None = None,
    share: float = 1.0,
) -> Interventions:
    """Join the positions of a log.

    Args:
        item, position, clicks: one entry for each item and position it was seen at: the item's number, the 1-based
            position, and the clicks it got there.
        random_clicks: `[K]`, the clicks at each position in lists whose order was random; these can be compared
            whatever the items were.
        shown: `[K]`, the positions that were shown at all; those of the items when left out.
        share: the share of all items that these are; counts of items, and their clicks, are scaled up by it.
    """
    K = len(random_clicks)
    shape = (int(item.max(initial=-1)) + 1, K)
    weight = clicks.astype(np.float64) / share
    seen = sparse.csr_array((np.ones(len(item)), (item, position - 1)), shape=shape)
    clicked = sparse.csr_array((weight, (item, position - 1)), shape=shape)
    at = np.bincount(position - 1, weights=weight, minlength=K) if len(item) else random_clicks.astype(np.float64)
    seen_at = np.bincount(position - 1, minlength=K)
    shown = seen_at > 0 if shown is None else shown
    moved = np.bincount(item, minlength=shape[0]) > 1
    seen, clicked = seen[moved], clicked[moved]
    evidence = np.zeros(K)
    joined = np.zeros(K, dtype=bool)
    anchor = best = int(at.argmax())
    touched, earned, random_joined = np.zeros(seen.shape[0]), np.zeros(seen.shape[0]), 0
    while not joined[shown].all():
        joined[best] = True
        touched = np.maximum(touched, _column(seen, best))
        earned = earned + _column(clicked, best)
        random_joined += int(random_clicks[best])
        by_items = np.minimum(np.asarray(clicked.T @ touched), np.asarray(seen.T @ earned))
        strength = np.where(joined | ~shown, -1, by_items + np.minimum(random_clicks, random_joined))
        best = int(strength.argmax())
        if strength[best] < MIN_CLICKS:
            break
        evidence[best] = strength[best]
    evidence[anchor] = at[anchor] if joined.sum() > 1 else 0
    return Interventions(
        shared=_shared(seen, seen_at, share) if K <= MOST_SHARED else None,
        moved=round(int(moved.sum()) / share),
        items=round(shape[0] / share),
        evidence=evidence,
        joined=[int(k) + 1 for k in np.flatnonzero(joined)],
        lost=[int(k) + 1 for k in np.flatnonzero(shown & ~joined)],
    )


def _shared(seen: sparse.csr_array, seen_at: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    shared = (seen.T @ seen).toarray()
    np.fill_diagonal(shared, seen_at)
    return np.asarray((shared / share).round(), dtype=np.int64)


def _column(matrix: sparse.csr_array, k: int) -> NDArray[np.float64]:
    return matrix[:, [k]].toarray().ravel()


def ranges(numbers: list[int]) -> str:
    """Whole numbers in words, runs drawn together.

    >>> ranges([5, 8, 9, 10])
    '5, 8–10'
    """
    runs = np.split(np.array(numbers), np.flatnonzero(np.diff(numbers) != 1) + 1) if numbers else []
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
