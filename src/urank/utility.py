"""The utility of an order: what the items earn, in expectation, at the positions they were given.

Everything here reads the click table, `table[b, i, k - 1] = P(click | item i of list b shown at position k)`, on padded
lists `[B, n]` with a mask. An order is `positions[B, n]`, the 1-based position of each item: distinct within a list,
gaps allowed. An item has a place when its position is at most `K` and at most the cutoff; without a place it earns 0.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_cutoff", "check_order", "has_place", "utility", "utility_of_items"]


def utility(
    table: NDArray[Any],
    positions: NDArray[Any],
    *,
    value: NDArray[Any] | None = None,
    where: NDArray[np.bool_] | None = None,
    cutoff: int | None = None,
) -> NDArray[np.float64]:
    """The expected utility of each list (Section 3, Eq. 1).

        U = Σ_i table[i, k_i] · b_i      over the items with k_i ≤ min(K, cutoff)

    Args:
        table: `[B, n, K]`, the click probability of each item at each position.
        positions: `[B, n]`, the 1-based position k_i of each item.
        value: `[B, n]`, the value b_i of a click on each item; 1 when not given, so that the utility counts clicks.
        where: `[B, n]`, true where there is an item; all true when not given.
        cutoff: count only this many first positions; all K when not given.

    Returns:
        `[B]`, in float64.

    The apps of the paper's introduction in miniature: the first is more relevant, but hardly minds its position.

    >>> table = np.array([[[0.50, 0.48], [0.45, 0.30]]])
    >>> utility(table, np.array([[1, 2]])).round(2).tolist()
    [0.8]
    >>> utility(table, np.array([[2, 1]])).round(2).tolist()
    [0.93]
    >>> utility(table, np.array([[2, 1]]), value=np.array([[10, 1]]), cutoff=1).round(2).tolist()
    [0.45]
    """
    items = utility_of_items(table, positions, value=value, where=where, cutoff=cutoff)
    return np.asarray(items.sum(axis=-1))


def utility_of_items(
    table: NDArray[Any],
    positions: NDArray[Any],
    *,
    value: NDArray[Any] | None = None,
    where: NDArray[np.bool_] | None = None,
    cutoff: int | None = None,
) -> NDArray[np.float64]:
    """What each item adds to the utility of its list: the terms of Eq. 1, `[B, n]`. Arguments as for `utility`.

    >>> table = np.array([[[0.50, 0.48], [0.45, 0.30], [0.40, 0.20]]])
    >>> utility_of_items(table, np.array([[2, 1, 3]])).tolist()
    [[0.48, 0.45, 0.0]]
    """
    mask = check_order(positions, where)
    placed = has_place(table, positions, where=mask, cutoff=cutoff)
    clicks = np.where(placed, _click_probability(table, positions[..., None])[..., 0], 0.0)
    outside = ~((clicks >= 0) & (clicks <= 1))
    if outside.any():
        raise ValueError(f"table must hold probabilities from 0 to 1; got {clicks[outside][0]}")
    if value is None:
        return clicks
    # Zero before the product: what stands in the padding of `value` means nothing and may be infinite.
    return clicks * np.where(placed, _check_value(value, mask), 0.0)


def has_place(
    table: NDArray[Any],
    positions: NDArray[Any],
    *,
    where: NDArray[np.bool_] | None = None,
    cutoff: int | None = None,
) -> NDArray[np.bool_]:
    """The items that have a place, `[B, n]`: those at positions up to min(K, cutoff). Arguments as for `utility`.

    >>> has_place(np.zeros((1, 3, 2)), np.array([[3, 1, 2]])).tolist()
    [[False, True, True]]
    """
    mask = check_order(positions, where)
    if np.ndim(table) != 3 or table.shape[:2] != positions.shape or table.shape[2] < 1:
        raise ValueError(
            f"table must have shape [B, n, K] with [B, n] = {list(positions.shape)} and K from 1 up; "
            f"got shape {list(np.shape(table))}"
        )
    check_cutoff(cutoff)
    last = table.shape[2] if cutoff is None else min(table.shape[2], cutoff)
    placed: NDArray[np.bool_] = mask & (positions <= last)
    return placed


def check_order(positions: NDArray[Any], where: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """The mask `[B, n]` of an order, all true when `where` is not given; refuses what is not an order.

    An order gives each item of a list a position of its own, a whole number from 1 up.

    >>> check_order(np.array([[3, 1]])).tolist()
    [[True, True]]
    >>> check_order(np.array([[2, 2]]))
    Traceback (most recent call last):
    ValueError: positions must be distinct within a list; got 2 more than once in list 0
    """
    if np.ndim(positions) != 2:
        raise ValueError(f"positions must have shape [B, n]; got shape {list(np.shape(positions))}")
    if not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(f"positions must be whole numbers; got {positions.dtype}")
    mask = np.ones(positions.shape, dtype=np.bool_) if where is None else where
    if np.shape(mask) != positions.shape or mask.dtype != np.bool_:
        raise ValueError(
            f"where must be boolean of shape {list(positions.shape)}; got {mask.dtype} of shape {list(np.shape(mask))}"
        )
    if (too_low := mask & (positions < 1)).any():
        raise ValueError(f"positions must be whole numbers from 1 up; got {positions[too_low][0]}")
    # Padding gets the keys 0, -1, -2, …, which no item has and of which no two are the same.
    keys = np.sort(np.where(mask, positions.astype(np.int64), -np.arange(positions.shape[1])), axis=-1)
    repeated = np.argwhere(keys[:, 1:] == keys[:, :-1])
    if len(repeated) > 0:
        b, i = repeated[0]
        raise ValueError(f"positions must be distinct within a list; got {keys[b, i]} more than once in list {b}")
    return mask


def check_cutoff(cutoff: int | None) -> None:
    """Refuse a cutoff that is not a number of positions.

    >>> check_cutoff(0)
    Traceback (most recent call last):
    ValueError: cutoff must be a whole number from 1 up, or None; got 0
    """
    if cutoff is not None and (not isinstance(cutoff, Integral) or cutoff < 1):
        raise ValueError(f"cutoff must be a whole number from 1 up, or None; got {cutoff}")


def _check_value(value: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[Any]:
    if np.shape(value) != mask.shape:
        raise ValueError(f"value must have shape {list(mask.shape)}; got shape {list(np.shape(value))}")
    if (unusable := mask & ~np.isfinite(value)).any():
        raise ValueError(f"value must be finite; got {value[unusable][0]}")
    return value


def _click_probability(table: NDArray[Any], positions: NDArray[Any]) -> NDArray[np.float64]:
    """table[b, i, k - 1] for the positions `[B, n or 1, m]` to look up, `[B, n, m]`; 0 where there is no such place."""
    exists = (positions >= 1) & (positions <= table.shape[2])
    found = np.take_along_axis(table, np.where(exists, positions, 1) - 1, axis=2)
    return np.where(exists, found, 0).astype(np.float64)
