"""Examination by category of items, Q(o = 1 | category, k), from randomised lists (Section 6.1 of the paper).

    p(k | c) = (C_ck / S_ck) / (C_c1 / S_c1)      clicks C and shows S of the items of category c at k and at 1

is compared as `randomised` compares all items: where chance decides who stands where, the items of c at k are, on
average, those of c at 1. A category is drawn towards the curve of all items, the more the fewer clicks it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.log.dataset import Block, Dataset
from urank.log.lists import list_ids, offsets_of_runs
from urank.log.schema import some_of
from urank.propensity.model import Curve
from urank.propensity.randomised import (
    Counts,
    curve_of_queries,
    group_rates,
    joined,
    list_counts,
    randomised_lists,
    summed,
)

__all__ = ["MIN_CLICKS", "ByCategory", "category_curves", "credibility", "fit_by_category"]

MIN_CLICKS = 10
"""Clicks at position 1, those of one query counted once, without which a category has no curve of its own."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ByCategory:
    """A curve for every category of items.

    Attributes:
        name: how it was estimated.
        column: the column of the items that names their category.
        overall: the curve of all items, which stands for the categories that have none and for missing ones.
        curves: that of each category, by its name.
    """

    name: str
    column: str
    overall: Curve
    curves: Mapping[str, Curve]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def examination(self, block: Block) -> Floats:
        """p(k | c) / p(1 | c) `[rows, K]`."""
        table = np.array([curve.values for curve in (*self.curves.values(), self.overall)], dtype=np.float64)
        return table[_codes(_text(block, self.column), list(self.curves))]  # −1 is the last


def credibility(ratio: Floats, sums: NDArray[Any], overall: Floats, usable: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """The weight w `[G, K]` that each category's own ratio deserves, and the spread τ² `[K]` of the categories.

        p̂(k | c) = R_k + w_ck (R_ck − R_k),      w_ck = τ_k² / (τ_k² + v_ck)
        v_ck = 1 / (S_ck · C_c1 / S_c1 · R_k) + 1 / C_c1

    R_k is the overall curve, R_ck a category's own, and v the relative variance that R_ck would have if the category's
    curve were the overall one: so w does not depend on the clicks that came at k. τ_k² is by how much, relative to R_k,
    curves differ beyond v (DerSimonian and Laird 1986): at k alone, or, when that is more, as curves R_k^a do whose
    steepness a differs as all positions together say. A few categories at one position may look alike by chance.

    Args:
        ratio: R_ck `[G, K]`.
        sums: `[G, 4, K]`, shows and clicks at k and at 1, as `list_counts` has them.
        overall: R_k `[K]`.
        usable: `[G, K]`, where R_ck can be used; elsewhere w is 0.

    >>> sums = np.array([[[400, 400], [100, clicks], [400, 400], [100, 100]] for clicks in (40, 80)])
    >>> ratio = np.array([[1.0, 0.4], [1.0, 0.8]])
    >>> weight, spread = credibility(ratio, sums, np.array([1.0, 0.6]), np.full((2, 2), True))
    >>> weight.round(3).tolist(), spread.round(3).tolist()  # v = 1 / (400 · 0.25 · 0.6) + 1 / 100 at position 2
    ([[0.0, 0.88], [0.0, 0.88]], [0.0, 0.196])
    """
    usable = usable & (overall > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shows, _, top_shows, top_clicks = np.moveaxis(sums, 1, 0)
        noise = np.where(usable, 1 / (shows * top_clicks / top_shows * overall) + 1 / top_clicks, np.inf)
        deviation = np.where(usable, ratio / overall - 1, 0.0)
        several = (usable.sum(axis=0) > 1) & (np.arange(len(overall)) > 0)  # at position 1 nothing can differ
        precision, steep = 1 / noise, np.where(several, np.log(overall) ** 2, 0.0)
        left = np.where(several, (precision * deviation**2).sum(axis=0) - (usable.sum(axis=0) - 1), 0.0)
        scale = np.where(several, precision.sum(axis=0) - (precision**2).sum(axis=0) / precision.sum(axis=0), 0.0)
    at_k = np.divide(left, scale, out=np.zeros_like(left), where=scale > 0)
    of_all = left.sum() / max((scale * steep).sum(), 1e-12)
    spread = np.maximum(0.0, np.maximum(at_k, of_all * steep))
    return spread / (spread + noise), spread


def category_curves(
    counts: Counts, offsets: NDArray[np.int64], overall: Curve, *, min_clicks: int
) -> list[Curve | None]:
    """The curve of each of G categories; none for those with too few clicks.

        error² = w² Var R_ck + (1 − w)² (τ_k² R_k² + Var R_k)

    The error of a category without clicks at some k is thus the spread of the categories around the overall curve. That
    τ² is itself an estimate is not counted: with three categories the errors of the rarest are some 10 % too small.

    Args:
        counts: `[rows, 4, K]`, a row for each query in which a category was shown, one category after the other.
        offsets: `[G + 1]`, where the rows of each category begin.
        overall: the curve of all items, with its errors.
        min_clicks: as for `fit_by_category`.
    """
    ratio, error = group_rates(counts, offsets)
    sums = np.add.reduceat(counts, offsets[:-1], dtype=np.int64)
    clicked = np.add.reduceat(counts[:, 3] > 0, offsets[:-1], dtype=np.int64)
    usable = (clicked >= min_clicks) & (sums[:, 0] > 0)
    R, R_error = np.array(overall.values), np.array(overall.errors)
    weight, spread = credibility(ratio, sums, R, usable)
    values = R + weight * np.where(usable, ratio - R, 0.0)
    variance = weight**2 * np.where(usable, error, 0.0) ** 2 + (1 - weight) ** 2 * (spread * R**2 + R_error**2)
    return [
        Curve(overall.name, tuple(own.tolist()), tuple(errors.tolist())) if enough else None
        for own, errors, enough in zip(values, np.sqrt(variance), clicked[:, 0] >= min_clicks, strict=True)
    ]


def fit_by_category(
    dataset: Dataset,
    split: str = "train",
    *,
    column: str = "category",
    policies: Sequence[str] | None = None,
    min_clicks: int = MIN_CLICKS,
) -> ByCategory:
    """A curve for every category, from the randomised lists of a log, with standard errors.

    Counts are held in memory, 16 bytes for each position of each pair of a query and a category.

    Args:
        dataset: a prepared log. With `ranked_position` the items ranked first are compared, else all items.
        split: the part of it that is looked at.
        column: the role `category`, or a categorical feature.
        policies: as for `fit_randomised`.
        min_clicks: a category needs so many clicks at position 1, those of one query counted once, to have a curve of
            its own, and so many in lists that show something at k to tell of k. Elsewhere the overall curve holds.

    Raises:
        DataError: when nothing was randomised, or a position cannot be compared with position 1.
    """
    if column not in dataset.categorical:
        has = some_of(dataset.categorical) or "none"
        raise ConfigError(f"column must name a categorical column of {dataset.folder}, which has {has}; got '{column}'")
    if min_clicks < 1:
        raise ConfigError(f"min_clicks must be a whole number from 1 up; got {min_clicks}")
    names: dict[str, None] = {}  # in the order in which they are first seen
    parts = []
    for block, where in randomised_lists(dataset, split, policies, [column]):
        text = _text(block, column)
        names.update(dict.fromkeys(text.drop_nulls().unique(maintain_order=True)))
        code = _codes(text, list(names))
        parts.append(_counted(block, where, code, dataset.positions))
    (code, queries), counts = joined(parts)
    overall = curve_of_queries(queries, counts, f"the {split} split of {dataset.folder}")
    named = code >= 0
    code, counts = code[named], counts[named]
    found = category_curves(counts, offsets_of_runs(code), overall, min_clicks=min_clicks) if len(code) else []
    curves = {name: curve for name, curve in zip(names, found, strict=True) if curve is not None}
    return ByCategory(f"randomised by {column}", column, overall, dict(sorted(curves.items())))


def _counted(
    block: Block, where: NDArray[np.bool_], code: NDArray[np.int64], K: int
) -> tuple[list[NDArray[Any]], Counts]:
    """The counts of each category and query of a block, and which these are."""
    lists = list_ids(block.offsets)
    codes = code.max() + 2  # from −1 on
    pairs, part = np.unique(lists * codes + code + 1, return_inverse=True)
    position, click = block.column("position").astype(np.int64), block.column("click")
    counts = list_counts(position, click, block.offsets, K, where=where, part=part)
    return summed([pairs % codes - 1, block.query_hash[pairs // codes]], counts)


def _text(block: Block, column: str) -> pl.Series:
    return pl.Series(block.items[column].combine_chunks()).cast(pl.String)


def _codes(text: pl.Series, names: Sequence[str]) -> NDArray[np.int64]:
    """The place of each text among the names; −1 for any other and for a missing one."""
    return text.cast(pl.Enum(names), strict=False).to_physical().cast(pl.Int64).fill_null(-1).to_numpy()
