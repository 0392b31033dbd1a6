"""What features give away: the position (the old ranker's hand), the click (an outcome), or odd values."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.special import fdtrc

from urank.log.lists import list_ids
from urank.log.schema import LogSchema

__all__ = ["Confounding", "heavy_tails", "id_like", "outcomes", "predict_position"]

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


def predict_position(rows: pl.DataFrame, offsets: NDArray[np.int64], schema: LogSchema) -> Confounding | None:
    """Regress position on the features, both without their mean in the list; `None` when there is nothing to do so.

    Numbers are compressed by the signed log first; the ten most frequent values of a categorical feature are columns.
    """
    names, matrix = _design(rows, schema)
    X = _within(matrix, offsets)
    y = _within(rows["position"].to_numpy().astype(np.float64)[:, None], offsets)[:, 0]
    spread = X.std(axis=0)
    keep = spread > 1e-9
    X, names = X[:, keep] / spread[keep], [name for name, kept in zip(names, keep, strict=True) if kept]
    freedom = len(y) - (len(offsets) - 1) - len(names)
    total = float(y @ y)
    if not names or freedom < 10 or total == 0:
        return None
    gram = X.T @ X + 1e-6 * len(y) * np.eye(len(names))
    explained = min(total, max(0.0, float((X.T @ y) @ np.linalg.solve(gram, X.T @ y))))
    rest = total - explained
    share = 1 - (rest / freedom) / (total / (freedom + len(names)))
    ratio = (explained / len(names)) / (rest / freedom) if rest > 0 else np.inf
    correlation = (X.T @ y) / (len(y) * y.std())
    order = np.argsort(-np.abs(correlation))[:5]
    return Confounding(
        share=max(0.0, float(share)),
        p_value=float(fdtrc(len(names), freedom, ratio)),
        rows=len(y),
        strongest={names[i]: round(float(correlation[i]), 3) for i in order},
    )


def _design(rows: pl.DataFrame, schema: LogSchema) -> tuple[list[str], NDArray[np.float64]]:
    names: list[str] = []
    columns: list[NDArray[np.float64]] = []
    for name in schema.named("numeric"):
        x = rows[name].to_numpy().astype(np.float64)
        names.append(name)
        columns.append(np.sign(x) * np.log1p(np.abs(x)))
    for name in schema.named("categorical"):
        counts = rows[name].drop_nulls().value_counts(sort=True)[name].to_list()
        for value in counts[:_MOST_CATEGORIES]:
            names.append(f"{name}={value}")
            columns.append((rows[name] == value).fill_null(False).to_numpy().astype(np.float64))
    return names, np.stack(columns, axis=1) if columns else np.zeros((rows.height, 0))


def _within(matrix: NDArray[np.float64], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each column less its mean in the list; what is missing counts as that mean."""
    known = ~np.isnan(matrix)
    filled = np.where(known, matrix, 0.0)
    counts = np.maximum(np.add.reduceat(known, offsets[:-1], axis=0), 1)
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
