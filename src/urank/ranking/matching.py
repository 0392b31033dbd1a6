"""From scores or a click table to positions: sorting, and the exact maximum-weight matching (Section 3, Figure 2).

In the matching, the weight between item i and position k is table[i, k] · b_i, its expected utility there. The order of
highest utility (Eq. 1) is the matching with the largest sum of weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from urank.log.ragged import pad, positions_by_score, where_items
from urank.ranking.guard import Guard
from urank.ranking.utility import Array, Mask, check_mask

Method = Literal["score", "match", "ctr1"]
METHODS: tuple[Method, ...] = ("score", "match", "ctr1")
"""By falling score; by the exact matching of the click table; by expected utility at position 1 (CTR-1)."""


def expected_gain(table: NDArray[np.float32], value: Array | None, method: Method) -> NDArray[np.float64]:
    """Return the expected utility of each item at each position `[rows, K]`; at position 1 `[rows]` for CTR-1."""
    chances = table[:, 0] if method == "ctr1" else table
    values = values_or_ones(value, len(table))
    return np.asarray(np.exp(chances.astype(np.float64)) * (values if method == "ctr1" else values[:, None]))


def positions_in_lists(values: Array, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the 1-based positions `[rows]` by falling values `[rows]`, or by the matching of values `[rows, K]`."""
    place = positions_by_score if values.ndim == 1 else match
    lengths = np.diff(offsets)
    if len(lengths) and (lengths == lengths[0]).all():  # no padding, no copy
        return place(values.reshape(len(lengths), lengths[0], *values.shape[1:])).ravel()
    positions = np.empty(len(values), dtype=np.int64)
    for rows, bounds in _groups_of_similar_length(offsets):
        where = where_items(bounds)
        positions[rows] = place(pad(values[rows], bounds), where=where)[where]
    return positions


def guarded_positions(
    positions: NDArray[np.int64], current: Array, offsets: NDArray[np.int64], guard: Guard
) -> NDArray[np.int64]:
    """Return the guarded positions `[rows]`."""
    kept = np.empty_like(positions)
    for rows, bounds in _groups_of_similar_length(offsets):
        where = where_items(bounds)
        kept[rows] = guard.apply(pad(positions[rows], bounds), pad(current[rows], bounds), where=where)[where]
    return kept


def _groups_of_similar_length(offsets: NDArray[np.int64]) -> Iterator[tuple[Mask, NDArray[np.int64]]]:
    """Yield the rows and offsets of lists to be padded together, whose lengths are within a factor of two.

    A long list among many short ones would otherwise pad all of them to its length.
    """
    lengths = np.diff(offsets)
    sizes = np.frexp(lengths)[1]
    for size in np.unique(sizes):
        chosen = sizes == size
        yield np.repeat(chosen, lengths), np.append(0, np.cumsum(lengths[chosen]))


def values_or_ones(value: Array | None, rows: int) -> NDArray[np.float32]:
    """Return the values `[rows]`, or ones for None."""
    return np.ones(rows, dtype=np.float32) if value is None else np.asarray(value, dtype=np.float32)


# From this many items on, filtering those that cannot be chosen pays off. Measured with 10 positions and weights that
# fall with the position, as clicks do: 25 µs either way at 300 items, 33 instead of 75 at 1,000, 90 instead of 400 at
# 5,000.
_LONG = 512

# Sums and differences of larger weights overflow inside scipy's assignment routine, which then returns wrong results.
_LIMIT = 1e300


def match(weights: Array, *, where: Mask | None = None) -> NDArray[np.int64]:
    """Return the 1-based position `[B, n]` of each item in an order of highest utility (Section 3, Eq. 1).

        argmax over orders of  Σ_i weights[i, k_i]      over the items with k_i ≤ min(m, K)

    A list of m items fills all of its positions 1 to min(m, K), whatever the sign of the weights. Items without a place
    follow by falling weight at position K, ties by input order; items that are masked out come last. Items with the
    same weights at all positions keep their input order. Padding after a list has no influence on its order.

    Args:
        weights: `[B, n, K]`, finite: click probability times value of each item at each position.
        where: `[B, n]`, true where there is an item; all by default.

    Returns:
        `[B, n]`, each row a permutation of 1 to n.

    The apps of the paper's introduction in miniature: the first is more relevant, but depends little on its position.

    >>> match(np.array([[[0.50, 0.48], [0.45, 0.30], [0.40, 0.20]]])).tolist()
    [[2, 1, 3]]
    """
    if np.ndim(weights) != 3 or weights.shape[2] < 1:
        raise ValueError(f"weights must have shape [B, n, K] with K from 1 up; got shape {list(np.shape(weights))}")
    mask = check_mask(where, weights.shape[:2])
    costs = _costs(weights, mask)
    places = np.minimum(mask.sum(axis=-1), weights.shape[2])
    filled = np.arange(min(weights.shape[1:])) < places[:, None]
    chosen = _keep_input_order(costs, _choose(costs, mask, places), filled)
    rows, columns = np.nonzero(filled)
    placed_at = np.zeros(mask.shape, dtype=np.int64)
    placed_at[rows, chosen[rows, columns]] = columns + 1
    # Placed items come before all others, at positions known already. Their scores are distinct, since ties take longer
    # to sort.
    scores = np.where(placed_at > 0, _LIMIT * (2 + placed_at), -costs[:, -1])
    return np.where(placed_at > 0, placed_at, positions_by_score(scores, where=None if mask.all() else mask))


def match_first(weights: Array) -> NDArray[np.int64]:
    """Return the items at positions 1 to min(n, K) of one list `[n, K]`, as `match` places them.

    >>> match_first(np.array([[0.50, 0.48], [0.45, 0.30], [0.40, 0.20]])).tolist()
    [1, 0]
    """
    costs = np.ascontiguousarray(-weights.T, dtype=np.float64)
    if not np.isfinite(costs).all():
        raise ValueError("weights must be finite numbers")
    chosen = _choose_in_list(costs[: len(weights)])
    first = costs[0]
    if np.count_nonzero(first[chosen, None] == first) > len(chosen):  # there may be items with the same weights
        filled = np.ones((1, len(chosen)), dtype=np.bool_)
        chosen = _keep_input_order(costs[None], chosen[None], filled)[0]
    return chosen


def _costs(weights: Array, mask: Mask) -> NDArray[np.float64]:
    """Return the negated weights, `[B, K, n]`, infinite in the padding.

    The layout is that of the assignment routine, which would otherwise copy each list to negate and transpose it.
    """
    B, n, K = weights.shape
    costs = np.empty((B, K, n))
    costs[...] = weights.transpose(0, 2, 1)
    np.negative(costs, out=costs)
    usable = np.abs(costs) < _LIMIT  # false for NaN
    if not usable.all() and (unusable := ~usable & mask[:, None, :]).any():
        raise ValueError(f"weights must be finite and smaller than {_LIMIT:g} in size; got {-costs[unusable][0]}")
    if not mask.all():
        np.copyto(costs, np.inf, where=~mask[:, None, :])
    return costs


def _choose(costs: NDArray[np.float64], mask: Mask, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the item at each position, `[B, min(n, K)]`; 0 at positions that a list does not have."""
    B, K, n = costs.shape
    chosen = np.zeros((B, min(n, K)), dtype=np.int64)
    # Padding after the last item is cut off, so that short lists among long ones cost no extra time.
    ends = (mask * np.arange(1, n + 1)).max(axis=-1, initial=0)
    # The routine takes one list at a time; with 10 items and 10 positions it takes 2 to 4 µs per list.
    for b, (count, end) in enumerate(zip(places.tolist(), ends.tolist(), strict=True)):
        chosen[b, :count] = _choose_in_list(costs[b, :count, :end])
    return chosen


def _choose_in_list(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the item at each position, `[places]`, for the costs `[places, items]` of one list."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and a server may never match

    places, items = costs.shape
    if items < _LONG:
        return linear_sum_assignment(costs)[1]
    # Only items among the best `places` of some position are needed: if another is placed there, one of that position's
    # best is unplaced, since the other positions cannot hold them all, and can replace it at no loss. The best items of
    # a few groups give a bound: at least `places` items are as good as the `places`-th of these.
    groups = min(4 * places, items)
    best_of_group = costs[:, : items // groups * groups].reshape(places, -1, groups).min(axis=1)
    bound = np.partition(best_of_group, places - 1, axis=-1)[:, places - 1 : places]
    needed = np.flatnonzero((costs <= bound).any(axis=0))
    return needed[linear_sum_assignment(costs[:, needed])[1]]


def _keep_input_order(costs: NDArray[np.float64], chosen: NDArray[np.int64], filled: Mask) -> NDArray[np.int64]:
    """Place items with the same weights at all positions in input order.

    same[b, k, i] is whether item i has the weights of the item at position k. If that item is the r-th of its kind by
    position, it is replaced by the r-th of the kind in input order.
    """
    same = _same_weight(costs[:, 0], chosen, filled)
    for k in range(1, costs.shape[1]):
        # Each placed item equals itself; usually the first position already shows that no two items are equal.
        if np.count_nonzero(same) == np.count_nonzero(filled):
            return chosen
        same &= _same_weight(costs[:, k], chosen, filled)
    lists = np.flatnonzero((np.count_nonzero(same, axis=-1) > 1).any(axis=-1))
    if len(lists) == 0:
        return chosen
    same = same[lists]
    same_placed = np.take_along_axis(same, chosen[lists, None, :], axis=-1)
    r = np.tril(same_placed).sum(axis=-1)
    ordered = chosen.copy()
    ordered[lists] = np.argmax(same.cumsum(axis=-1, dtype=np.int32) == r[..., None], axis=-1)
    return ordered


def _same_weight(cost: NDArray[np.float64], chosen: NDArray[np.int64], filled: Mask) -> Mask:
    """Return whether each item costs as much as each chosen one, `[B, min(n, K), n]`, at one position."""
    of_chosen = np.where(filled, cost[np.arange(len(cost))[:, None], chosen], np.nan)
    return np.asarray(of_chosen[..., None] == cost[:, None, :])
