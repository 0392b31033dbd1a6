"""Expected utility of an order (Eq. 1), its counterfactual estimate (Eq. 3), and the gain of a swap (Eq. 6).

All functions read the click table, `table[b, i, k - 1] = P(click | item i of list b shown at position k)`, on padded
lists `[B, n]` with a mask. An order is `positions[B, n]`, the 1-based position of each item: distinct within a list,
gaps allowed. An item has a place if its position is at most `K` and the cutoff; without one it earns 0.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Mask = NDArray[np.bool_]

FLOOR = 0.01
"""Default lower bound of a logged click probability when a click is divided by it."""


def utility(
    table: Array, positions: Array, *, value: Array | None = None, where: Mask | None = None, cutoff: int | None = None
) -> NDArray[np.float64]:
    """Compute the expected utility `[B]` of each list (Section 3, Eq. 1).

        U = Σ_i table[i, k_i] · b_i      over the items with k_i ≤ min(K, cutoff)

    Args:
        table: `[B, n, K]`, the click probability of each item at each position.
        positions: `[B, n]`, the 1-based position k_i of each item.
        value: `[B, n]`, the value b_i of a click on each item; 1 by default, so that the utility counts clicks.
        where: `[B, n]`, true where there is an item; all by default.
        cutoff: count only this many first positions; all K by default.

    The apps of the paper's introduction in miniature: the first is more relevant, but depends little on its position.

    >>> table = np.array([[[0.50, 0.48], [0.45, 0.30]]])
    >>> utility(table, np.array([[1, 2]])).round(2).tolist()
    [0.8]
    >>> utility(table, np.array([[2, 1]])).round(2).tolist()
    [0.93]
    >>> utility(table, np.array([[2, 1]]), value=np.array([[10, 1]]), cutoff=1).round(2).tolist()
    [0.45]
    """
    return np.asarray(utility_of_items(table, positions, value=value, where=where, cutoff=cutoff).sum(axis=-1))


def utility_of_items(
    table: Array, positions: Array, *, value: Array | None = None, where: Mask | None = None, cutoff: int | None = None
) -> NDArray[np.float64]:
    """Compute the terms of Eq. 1, the utility of each item, `[B, n]`. Arguments as for `utility`.

    >>> table = np.array([[[0.50, 0.48], [0.45, 0.30], [0.40, 0.20]]])
    >>> utility_of_items(table, np.array([[2, 1, 3]])).tolist()
    [[0.48, 0.45, 0.0]]
    """
    mask = check_order(positions, where)
    placed = has_place(table, positions, where=mask, cutoff=cutoff)
    clicks = np.where(placed, _look_up(table, positions[..., None])[..., 0], 0.0)
    outside = ~((clicks >= 0) & (clicks <= 1))
    if outside.any():
        raise ValueError(f"table must contain probabilities from 0 to 1; got {clicks[outside][0]}")
    if value is None:
        return clicks
    if np.shape(value) != mask.shape:
        raise ValueError(f"value must have shape {list(mask.shape)}; got shape {list(np.shape(value))}")
    if (unusable := mask & ~np.isfinite(value)).any():
        raise ValueError(f"value must be finite; got {value[unusable][0]}")
    # Zero before the product: the padding of `value` is arbitrary and may be infinite.
    return clicks * np.where(placed, value, 0.0)


def inverse_logged(
    table: Array, logged: Array, *, where: Mask | None = None, floor: float = FLOOR
) -> tuple[NDArray[np.float64], Mask]:
    """Compute the click weight of Eq. 3, 1 / P(c_{i, k_i^h} = 1), and where it is floored, both `[B, n]`.

    Args:
        table: `[B, n, K]`.
        logged: `[B, n]`, the position k_i^h at which each item was shown, from 1 up. An item below position K was not
            shown and has no click to be multiplied: its weight is 0.
        where: `[B, n]`, true where there is an item; 0 is returned elsewhere.
        floor: lower bound of the probability. Without it, a click on an item that the model predicts to be never
            clicked outweighs a whole log; with it, such clicks count less than they should.

    >>> weight, floored = inverse_logged(np.array([[[0.5, 0.25], [0.1, 0.004]]]), np.array([[1, 2]]), floor=0.01)
    >>> weight.tolist(), floored.tolist()
    ([[2.0, 100.0]], [[False, True]])
    """
    mask = check_mask(where, logged.shape)
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must be from 0 to 1; got {floor}")
    if (outside := mask & (logged < 1)).any():
        raise ValueError(f"logged positions must be from 1 up; got {logged[outside][0]}")
    mask = mask & (logged <= table.shape[2])
    probability = np.where(mask, _look_up(table, logged[..., None])[..., 0], 1.0)
    floored = mask & (probability < floor)
    if (mask & (probability <= 0) & (floor == 0)).any():
        raise ValueError("table must be above 0 at the logged positions if floor is 0; got 0.0")
    return np.where(mask, 1 / np.maximum(probability, floor), 0.0), floored


def item_gains(
    table: Array,
    *,
    value: Array | None = None,
    click: Array | None = None,
    logged: Array | None = None,
    where: Mask | None = None,
    blend: float = 0.0,
    floor: float = FLOOR,
) -> NDArray[np.float64]:
    """Compute u(i, k), the gain of each item at each position, `[B, n, K]`, from which U-rank's loss is built.

        u(i, k) = table[i, k] · b_i · ((1 − λ) + λ · c_i / table[i, k_i^h])

    With λ = 1 these are the paper's, the terms of Eq. 3: unbiased, but zero for every item that was not clicked. With
    λ = 0 they are the click model's expectation: far less noisy, and as biased as the model.

    Args:
        table: `[B, n, K]`, the click probability of each item at each position.
        value: `[B, n]`, the value b_i; 1 by default.
        click: `[B, n]`, the logged clicks c_i; needed when λ > 0.
        logged: `[B, n]`, the logged positions k_i^h; needed when λ > 0. An item below position K was not shown, and
            gets the share (1 − λ) alone.
        where: `[B, n]`, true where there is an item; all by default.
        blend: λ, from 0 to 1.
        floor: lower bound of the logged probability.

    >>> table = np.array([[[0.5, 0.4], [0.4, 0.2]]])
    >>> item_gains(table, click=np.array([[0, 1]]), logged=np.array([[1, 2]]), blend=1.0).tolist()
    [[[0.0, 0.0], [2.0, 1.0]]]
    """
    if not 0 <= blend <= 1:
        raise ValueError(f"blend must be from 0 to 1; got {blend}")
    mask = check_mask(where, table.shape[:2])
    each = np.where(mask, 1.0 if value is None else value, 0.0)
    if blend > 0:
        if click is None or logged is None:
            raise ValueError("click and logged must be given when blend is above 0; got None")
        weight, _ = inverse_logged(table, logged, where=mask, floor=floor)
        each = each * ((1 - blend) + blend * np.where(mask, click, 0) * weight)
    return np.where(mask[..., None], table, 0.0) * each[..., None]


def earned(gains: Array, positions: Array) -> NDArray[np.float64]:
    """Compute the gain of each list in this order, `[B]`: Σ u(i, k_i); padding has no gains and counts nothing.

    >>> earned(np.array([[[0.50, 0.48], [0.45, 0.30]]]), np.array([[2, 1]])).round(2).tolist()
    [0.93]
    """
    return np.asarray(_look_up(gains, positions[..., None])[..., 0].sum(axis=-1))


def delta_utility(gains: Array, positions: Array) -> NDArray[np.float64]:
    """Compute the gain of swapping two items of a list (Eq. 6), for all pairs at once.

        ΔUtil(i, j) = u(i, k_j) + u(j, k_i) − u(i, k_i) − u(j, k_j)

    A swap across the cut counts: without a place an item earns 0.

    Args:
        gains: `[B, n, K]`, u(i, k).
        positions: `[B, n]`, the 1-based position of each item.

    Returns:
        `[B, n, n]`, in float64.

    >>> table = np.array([[[0.50, 0.48], [0.45, 0.30], [0.60, 0.10]]])
    >>> delta_utility(table, np.array([[1, 2, 3]]))[0].round(2).tolist()
    [[0.0, 0.13, 0.1], [0.13, 0.0, -0.2], [0.1, -0.2, 0.0]]
    """
    own = _look_up(gains, positions[..., None])[..., 0]
    swapped = _look_up(gains, positions[:, None, :])
    return swapped + swapped.transpose(0, 2, 1) - own[:, :, None] - own[:, None, :]


def has_place(table: Array, positions: Array, *, where: Mask | None = None, cutoff: int | None = None) -> Mask:
    """Return which items have a place, `[B, n]`: those up to position min(K, cutoff). Arguments as for `utility`.

    >>> has_place(np.zeros((1, 3, 2)), np.array([[3, 1, 2]])).tolist()
    [[False, True, True]]
    """
    mask = check_order(positions, where)
    if np.ndim(table) != 3 or table.shape[:2] != positions.shape or table.shape[2] < 1:
        required = f"[B, n, K] with [B, n] = {list(positions.shape)} and K from 1 up"
        raise ValueError(f"table must have shape {required}; got shape {list(np.shape(table))}")
    check_cutoff(cutoff)
    last = table.shape[2] if cutoff is None else min(table.shape[2], cutoff)
    return np.asarray(mask & (positions <= last))


def check_order(positions: Array, where: Mask | None = None) -> Mask:
    """Validate an order and return its mask `[B, n]`: positions are integers from 1 up, distinct within a list.

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
    mask = check_mask(where, positions.shape)
    if (too_low := mask & (positions < 1)).any():
        raise ValueError(f"positions must be whole numbers from 1 up; got {positions[too_low][0]}")
    # Padding gets the distinct keys 0, -1, -2, …, which no item has.
    keys = np.sort(np.where(mask, positions.astype(np.int64), -np.arange(positions.shape[1])), axis=-1)
    repeated = np.argwhere(keys[:, 1:] == keys[:, :-1])
    if len(repeated) > 0:
        b, i = repeated[0]
        raise ValueError(f"positions must be distinct within a list; got {keys[b, i]} more than once in list {b}")
    return mask


def check_mask(where: Mask | None, shape: tuple[int, ...]) -> Mask:
    """Validate a mask `[B, n]` and return it; all true for None."""
    mask = np.ones(shape, dtype=np.bool_) if where is None else where
    if np.shape(mask) != shape or mask.dtype != np.bool_:
        given = f"{mask.dtype} of shape {list(np.shape(mask))}"
        raise ValueError(f"where must be boolean of shape {list(shape)}; got {given}")
    return mask


def check_cutoff(cutoff: int | None) -> None:
    """Validate a cutoff.

    >>> check_cutoff(0)
    Traceback (most recent call last):
    ValueError: cutoff must be a whole number from 1 up, or None; got 0
    """
    if cutoff is not None and (not isinstance(cutoff, Integral) or cutoff < 1):
        raise ValueError(f"cutoff must be a whole number from 1 up, or None; got {cutoff}")


def _look_up(gains: Array, positions: Array) -> NDArray[np.float64]:
    """Return gains[b, i, k - 1] at the positions `[B, n or 1, m]`, `[B, n, m]`; 0 where there is no such place."""
    exists = (positions >= 1) & (positions <= gains.shape[2])
    found = np.take_along_axis(gains, np.where(exists, positions, 1) - 1, axis=2)
    return np.where(exists, found, 0).astype(np.float64)
