"""Identifiability of position effects: the position graph, position confounding and feature leakage.

The difference of an item's click rate between positions 8 and 2 can only be learned if items were seen at both, or if
the order was random. Starting from the position with the most clicks, positions are joined one at a time, always the
one with the strongest link to those already joined; where the strongest remaining link is too weak, the rest is not
identified.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.log.columns import LogSchema
from urank.log.ragged import list_ids
from urank.log.signed_log import signed_log

MAX_SHARED = 200
"""With more positions than this the table of shared items is left out."""
MIN_CLICKS = 10
"""A link needs this many clicks on both of its sides: the ratio of two click rates is then known to about ±45 %."""

MAX_COLUMNS = 500
MAX_WORK = 200_000 * 256**2
BLOCK_CELLS = 4_000_000

FIRST_UNCLICKED, FIRST_ROWS = 1_000, 100_000
"""The usual value of a feature is determined by this many rows without a click, or fewer if that takes more rows."""
MIN_UNCLICKED = 50
MAX_UNCLICKED = 0.02
"""A feature is an outcome of the click if rows with an unusual value of it would lack a click `MIN_UNCLICKED` times or
more at the overall click rate, but do so at most this share of that."""

_MAX_CATEGORIES = 10
_ID_NAME = re.compile(r"(^|_)(id|code|key)$", re.IGNORECASE)
_TIME = r"^\s*\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?$"


@dataclass(frozen=True)
class PositionGraph:
    """The positions of a log, linked by items that were clicked at both.

    Attributes:
        shared: `[K, K]`, the number of items seen at both positions; on the diagonal those seen at the position.
            None if K is above `MAX_SHARED`.
        moved, items: The number of items seen at two positions or more, and of all.
        evidence: `[K]`, the clicks on the weaker side of the link that joined each position.
        joined, lost: The positions (1-based) that are joined, and those that were shown but are not.
    """

    shared: NDArray[np.int64] | None
    moved: int
    items: int
    evidence: NDArray[np.float64]
    joined: list[int]
    lost: list[int]


def position_graph(
    item: NDArray[np.int64],
    position: NDArray[np.int64],
    clicks: NDArray[np.int64],
    random_clicks: NDArray[np.int64],
    *,
    shown: NDArray[np.bool_] | None = None,
    share: float = 1.0,
) -> PositionGraph:
    """Join the positions of a log.

    Args:
        item, position, clicks: One entry per item and position it was seen at: the item's number, the 1-based
            position, and its clicks there.
        random_clicks: `[K]`, the clicks at each position in lists of random order, which are comparable whatever the
            items.
        shown: `[K]`, the positions that were shown at all; those of the items if None.
        share: The share of all items that these are; counts of items and clicks are scaled up by it.
    """
    from scipy import sparse  # slow to import

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
    shared: NDArray[np.int64] | None = None
    if K <= MAX_SHARED:
        counts = (seen.T @ seen).toarray()
        np.fill_diagonal(counts, seen_at)
        shared = (counts / share).round().astype(np.int64)
    places = [(np.flatnonzero(mask) + 1).tolist() for mask in (joined, shown & ~joined)]
    return PositionGraph(shared, round(int(moved.sum()) / share), round(shape[0] / share), evidence, *places)


def _column(matrix: Any, k: int) -> NDArray[np.float64]:
    return np.asarray(matrix[:, [k]].toarray().ravel())


@dataclass(frozen=True)
class Confounding:
    """How well a linear model of the features predicts the position within a list."""

    share: float  # the adjusted R² within lists: 0 if features are unrelated to the position, 1 if they determine it
    p_value: float  # p-value of the F test that they are unrelated
    rows: int  # rows used
    strongest: dict[str, float]  # the features most correlated with the position within lists, with the correlation

    @property
    def looks_random(self) -> bool:
        """Whether the order could be random: many rows, and no relation to the features."""
        return self.rows >= 1_000 and self.p_value > 0.001 and self.share < 0.01


def position_confounding(
    rows: pl.DataFrame, offsets: NDArray[np.int64], schema: LogSchema, *, without: Collection[str] = ()
) -> Confounding | None:
    """Regress the position on the features, both centred within lists; None if there is too little data.

    Numbers are compressed by the signed log; the ten most frequent values of a categorical feature are dummies. With
    many columns fewer lists are used, and of more than `MAX_COLUMNS` an even selection.

    Args:
        rows, offsets: Rows sorted into lists, and the bounds of the lists.
        schema: The features.
        without: Features to leave out, such as outcomes of the click.
    """
    from scipy.special import fdtrc  # slow to import

    columns = _columns(rows, schema, without)
    if not columns:
        return None
    enough = max(MAX_WORK // len(columns) ** 2, 20 * len(columns))
    offsets = offsets[: max(2, int(np.searchsorted(offsets, enough, side="right")))]
    gram, with_position, total = _moments(rows, offsets, columns)
    n = int(offsets[-1])
    spread = np.sqrt(np.diag(gram) / n)
    keep = spread > 1e-9
    names = [name for (name, _, _), kept in zip(columns, keep, strict=True) if kept]
    gram = gram[np.ix_(keep, keep)] / np.outer(spread[keep], spread[keep])
    with_position = with_position[keep] / spread[keep]
    # Linearly dependent columns, such as the last of the dummies, must not count: the rank does.
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
    strongest = {names[i]: round(float(correlation[i]), 3) for i in np.argsort(-np.abs(correlation))[:5]}
    return Confounding(max(0.0, float(share)), float(fdtrc(rank, freedom, ratio)), n, strongest)


def _columns(rows: pl.DataFrame, schema: LogSchema, without: Collection[str]) -> list[tuple[str, str, str | None]]:
    """Return the columns of the design matrix: name, feature, and the value of a categorical one."""
    numeric = [name for name in schema.named("numeric") if name not in without]
    columns: list[tuple[str, str, str | None]] = [(name, name, None) for name in numeric]
    for name in schema.named("categorical"):
        if name not in without:
            counts = rows[name].alias("value").drop_nulls().value_counts(name="n")
            top = counts.sort(["n", "value"], descending=[True, False])["value"].head(_MAX_CATEGORIES).to_list()
            columns += [(f"{name}={value}", name, value) for value in top]
    if len(columns) > MAX_COLUMNS:
        columns = [columns[i] for i in np.linspace(0, len(columns) - 1, MAX_COLUMNS).astype(int)]
    return columns


def _moments(
    rows: pl.DataFrame, offsets: NDArray[np.int64], columns: Sequence[tuple[str, str, str | None]]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return the centred products of the columns with each other, with the position, and of the position with itself.

    Computed some lists at a time, so that there is never a copy of all columns of all rows.
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
    """Centre each column within lists; missing values are replaced by the mean of the list."""
    known = ~np.isnan(matrix)
    filled = np.where(known, matrix, 0.0)
    counts = np.maximum(np.add.reduceat(known, offsets[:-1], axis=0, dtype=np.int64), 1)
    means = np.add.reduceat(filled, offsets[:-1], axis=0) / counts
    return np.where(known, filled - means[list_ids(offsets)], 0.0)


class ClickOutcomes:
    """Find the features that are outcomes of the click, in one pass over a log.

    Without a click, an outcome practically always has its usual value, such as missing, 0 or false. A cause of clicks,
    however strong, also has unusual values where nobody clicked. The usual value is determined by the first rows.
    Elements of fixed-size lists, and columns that also play a role, are not considered.
    """

    def __init__(self, schema: LogSchema) -> None:
        roles = set(schema.roles.values())
        named = [each for each in schema.features if each.place is None and each.column not in roles]
        self._kinds = {feature.name: feature.kind for feature in named}
        self._first: list[pl.DataFrame] = []
        self._unusual: dict[str, pl.Expr] | None = None  # None until there are enough rows
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._rows = np.zeros(2, dtype=np.int64)  # all rows and those without a click, as in the counts

    def add(self, frame: pl.DataFrame) -> None:
        """Add a batch in canonical form."""
        if self._unusual is not None:
            self._count(frame)
            return
        full = sum(part.height for part in self._first) >= FIRST_ROWS
        if full and frame["click"].min() == 1:  # clicks come first: there is no more to learn from them
            return
        self._first.append(frame.select("click", *self._kinds))
        if full or sum((part["click"] == 0).sum() for part in self._first) >= FIRST_UNCLICKED:
            self._look()

    def names(self) -> list[str]:
        """Return the outcomes among the features of the rows so far."""
        if self._unusual is None and self._first:
            self._look()
        return [
            name
            for name, (_, unclicked) in self._counts.items()
            if self._expected(name) >= max(MIN_UNCLICKED, unclicked / MAX_UNCLICKED)
        ]

    def _look(self) -> None:
        """Determine the usual values by the first rows, and count these."""
        rows, self._first = pl.concat(self._first), []
        unclicked = rows.filter(pl.col("click") == 0)
        self._unusual = {}
        for name, kind in self._kinds.items():
            known = pl.col(name).is_not_null() if kind == "categorical" else pl.col(name).is_not_nan()
            values = unclicked.filter(known)[name]
            if len(values) > MAX_UNCLICKED * unclicked.height:
                # The median of numbers is as good as the mode, which takes longer: an outcome hardly has another value.
                usual = values.mode().min() if kind == "categorical" else values.quantile(0.5, "lower")
                known &= pl.col(name) != usual
            self._unusual[name] = known
        self._counts = {name: np.zeros(2, dtype=np.int64) for name in self._unusual}
        self._count(rows)

    def _count(self, frame: pl.DataFrame) -> None:
        """Count unusual values; features that often have them without a click need no more counting."""
        parts = frame, frame.filter(pl.col("click") == 0)
        self._rows += [part.height for part in parts]
        if not self._unusual:
            return
        sums = [expr.sum().alias(name) for name, expr in self._unusual.items()]
        counts = np.array([part.select(sums).row(0) for part in parts]).T
        for name, found in zip(self._unusual, counts, strict=True):
            self._counts[name] += found
            if self._counts[name][1] > self._expected(name) / 2 >= MIN_UNCLICKED / 2:
                del self._counts[name]
        self._unusual = {name: expr for name, expr in self._unusual.items() if name in self._counts}

    def _expected(self, name: str) -> float:
        """Return how many of the unusual values would be without a click if the two were unrelated."""
        return float(self._counts[name][0] * self._rows[1] / self._rows[0])


def heavy_tails(rows: pl.DataFrame, schema: LogSchema) -> dict[str, tuple[float, float]]:
    """Return (99th percentile, maximum) of numeric features whose maximum magnitude exceeds 100 such percentiles."""
    found = {}
    for name in schema.named("numeric"):
        x = np.abs(rows[name].drop_nans().to_numpy())
        if len(x):
            high, most = float(np.quantile(x, 0.99)), float(x.max())
            if high > 0 and most > 100 * high:
                found[name] = (high, most)
    return found


def id_like(rows: pl.DataFrame, schema: LogSchema) -> list[str]:
    """Return numeric features that are named like ids and contain only whole numbers; their order is arbitrary."""
    found = []
    for name in schema.named("numeric"):
        if _ID_NAME.search(name):
            x = rows[name].drop_nans().to_numpy()
            if len(x) and (x == np.floor(x)).all():
                found.append(name)
    return found


def time_like(rows: pl.DataFrame, schema: LogSchema) -> list[str]:
    """Return categorical features whose values are all ISO dates or times; those of new lists were never seen."""
    found = []
    for name in schema.named("categorical"):
        text = rows[name].drop_nulls() if name in rows.columns else pl.Series(dtype=pl.String)
        if text.dtype == pl.String and len(text) and text.str.contains(_TIME).all():
            found.append(name)
    return found


def ranges(numbers: list[int]) -> str:
    """Format whole numbers, with runs as ranges.

    >>> ranges([5, 8, 9, 10])
    '5, 8–10'
    """
    runs = np.split(np.array(numbers), np.flatnonzero(np.diff(numbers) != 1) + 1) if numbers else []
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
