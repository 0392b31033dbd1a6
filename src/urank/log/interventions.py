"""Which positions can be compared: the graph of positions joined by items that were clicked at both.

What an item earns at position 8 rather than at position 2 can only be learned if items were seen at both, or if the
order was random. Starting from the position with most clicks, the positions are joined one at a time, always the one
with the strongest link to those already joined; where the strongest link left is too weak, the rest is not identified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

__all__ = ["MIN_CLICKS", "MOST_SHARED", "Interventions", "find_interventions", "ranges"]

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
