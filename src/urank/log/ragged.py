"""Ragged lists: flat arrays of items with offsets, or padded arrays with a mask.

List `q` has the rows `offsets[q]` to `offsets[q + 1] - 1`. A padded array has shape `[B, n, ...]` and is always passed
together with its mask `where[B, n]`; values in the padding are arbitrary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LONG_LIST = 128


def offsets_of_runs(keys: NDArray[Any]) -> NDArray[np.int64]:
    """Return the offsets of runs of equal neighbours.

    >>> offsets_of_runs(np.array([7, 7, 3, 9, 9, 9])).tolist()
    [0, 2, 3, 6]
    >>> offsets_of_runs(np.array([])).tolist()
    [0]
    """
    if len(keys) == 0:
        return np.zeros(1, dtype=np.int64)
    starts = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    return np.concatenate([[0], starts, [len(keys)]]).astype(np.int64)


def list_ids(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the list number of each row.

    >>> list_ids(np.array([0, 2, 3])).tolist()
    [0, 0, 1]
    """
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def where_items(offsets: NDArray[np.int64], width: int | None = None) -> NDArray[np.bool_]:
    """Return the mask `[B, n]` of a padded batch: true where there is an item.

    >>> where_items(np.array([0, 2, 3])).tolist()
    [[True, True], [True, False]]
    """
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0)) if width is None else width
    if lengths.max(initial=0) > width:
        raise ValueError(f"width must be at least the longest list, {lengths.max()}; got {width}")
    return np.asarray(np.arange(width) < lengths[:, None])


def pad(values: NDArray[Any], offsets: NDArray[np.int64], *, fill: float = 0, width: int | None = None) -> NDArray[Any]:
    """Pad flat rows `[rows, ...]` to a batch `[B, n, ...]`; `padded[where_items(offsets)]` is the inverse.

    >>> pad(np.array([5, 6, 7]), np.array([0, 2, 3])).tolist()
    [[5, 6], [7, 0]]
    """
    mask = where_items(offsets, width)
    padded = np.full((*mask.shape, *values.shape[1:]), fill, dtype=values.dtype)
    padded[mask] = values
    return padded


def order_by_score(scores: NDArray[Any], *, where: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Return the item `[B, n]` at each rank when lists are sorted by decreasing score.

    Ties are broken by input order; masked items come last. This is the only function in urank that sorts by score.

    >>> order_by_score(np.array([[0.1, 0.9, 0.9]])).tolist()
    [[1, 2, 0]]
    >>> order_by_score(np.array([[0.1, -np.inf, 0.9]]), where=np.array([[False, True, True]])).tolist()
    [[2, 1, 0]]
    """
    keys = np.negative(scores, dtype=np.result_type(scores, np.float32))
    if np.isnan(keys if where is None else keys[where]).any():
        raise ValueError("scores must be numbers; got NaN")
    if where is not None:
        keys[~where] = np.nan  # sorts after infinity
    elif keys.shape[-1] >= _LONG_LIST:
        # Without ties the order is unique, and an unstable sort is several times faster.
        order = np.argsort(keys, axis=-1)
        sorted_keys = keys[np.arange(len(keys))[:, None], order]
        if not (sorted_keys[..., 1:] == sorted_keys[..., :-1]).any():
            return order
    return np.argsort(keys, axis=-1, kind="stable")


def positions_by_score(scores: NDArray[Any], *, where: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Return the 1-based position `[B, n]` of each item in the order of `order_by_score`.

    >>> positions_by_score(np.array([[0.1, 0.9, 0.9]])).tolist()
    [[3, 1, 2]]
    """
    order = order_by_score(scores, where=where)
    positions = np.empty_like(order)
    positions[np.arange(len(order))[:, None], order] = np.arange(1, order.shape[-1] + 1)
    return positions


def at_positions(table: NDArray[Any], position: NDArray[np.int64]) -> NDArray[Any]:
    """Return the entry `[rows]` of a table `[rows, K]` at the 1-based position of each row.

    >>> at_positions(np.array([[0.5, 0.4], [0.3, 0.2]]), np.array([2, 1])).tolist()
    [0.4, 0.3]
    """
    return np.asarray(np.take_along_axis(table, position[:, None] - 1, axis=1)[:, 0])
