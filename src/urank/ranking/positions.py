"""1-based positions of the items of ragged lists, from scores or click tables, and within a guard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from urank.log.ragged import pad, positions_by_score, where_items
from urank.ranking.guard import Guard
from urank.ranking.matching import match

Method = Literal["score", "match", "ctr1"]
METHODS: tuple[Method, ...] = ("score", "match", "ctr1")
"""By falling score; by the exact matching of the click table; by expected utility at position 1 (CTR-1)."""


def expected_gain(table: NDArray[np.float32], value: NDArray[Any] | None, method: Method) -> NDArray[np.float64]:
    """Return the expected utility of each item at each position `[rows, K]`; at position 1 `[rows]` for CTR-1."""
    chances = table[:, 0] if method == "ctr1" else table
    values = values_or_ones(value, len(table))
    return np.asarray(np.exp(chances.astype(np.float64)) * (values if method == "ctr1" else values[:, None]))


def positions_in_lists(values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the 1-based positions `[rows]` by falling values `[rows]`, or by the matching of values `[rows, K]`."""
    place = positions_by_score if values.ndim == 1 else match
    lengths = np.diff(offsets)
    if len(lengths) and (lengths == lengths[0]).all():  # no padding, no copy
        lists = values.reshape(len(lengths), lengths[0], *values.shape[1:])
        return place(lists).ravel()
    positions = np.empty(len(values), dtype=np.int64)
    for rows, bounds in _groups_of_similar_length(offsets):
        where = where_items(bounds)
        positions[rows] = place(pad(values[rows], bounds), where=where)[where]
    return positions


def guarded_positions(
    positions: NDArray[np.int64], current: NDArray[Any], offsets: NDArray[np.int64], guard: Guard
) -> NDArray[np.int64]:
    """Return the guarded positions `[rows]`."""
    kept = np.empty_like(positions)
    for rows, bounds in _groups_of_similar_length(offsets):
        where = where_items(bounds)
        kept[rows] = guard.apply(pad(positions[rows], bounds), pad(current[rows], bounds), where=where)[where]
    return kept


def _groups_of_similar_length(offsets: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.int64]]]:
    """Yield the rows and offsets of lists to be padded together, whose lengths are within a factor of two.

    A long list among many short ones would otherwise pad all of them to its length.
    """
    lengths = np.diff(offsets)
    sizes = np.frexp(lengths)[1]
    for size in np.unique(sizes):
        chosen = sizes == size
        yield np.repeat(chosen, lengths), np.append(0, np.cumsum(lengths[chosen]))


def values_or_ones(value: NDArray[Any] | None, rows: int) -> NDArray[np.float32]:
    """Return the values `[rows]`, or ones for None."""
    return np.ones(rows, dtype=np.float32) if value is None else np.asarray(value, dtype=np.float32)
