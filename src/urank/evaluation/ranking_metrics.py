"""Ranking metrics: by relevance (average precision, nDCG) and by expected clicks (#Click, CTR).

Every metric is a pure function of an order, `positions[B, n]`: the 1-based position that a policy gave each item of a
padded list, distinct within a list, gaps allowed. It returns one value per query, `[B]`, in float64. A gap counts as an
empty slot: an item at position 3 is discounted as third even if nothing is above it. Positions beyond the cutoff do not
count.

A query without any relevant item has no nDCG or average precision; `empty` decides what it counts as: "skip" (NaN),
"zero" or "one". Toolkits differ in this, so report it beside every figure.

scikit-learn has nDCG and average precision, but without mask, cutoff for the latter or values per query; the tests
compare with it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from urank.ranking.utility import Array, Mask, check_cutoff, check_order, has_place, utility

Empty = Literal["skip", "zero", "one"]
GainKind = Literal["exponential", "linear"]

_VALUE_OF_EMPTY = {"skip": np.nan, "zero": 0.0, "one": 1.0}

# 2^1000 is near the largest float64; only a price or an id mistaken for a relevance label exceeds it.
_MOST_RELEVANT = 1000


def average_precision_metric(
    positions: Array,
    relevance: Array,
    *,
    where: Mask | None = None,
    threshold: float = 1,
    cutoff: int | None = None,
    empty: Empty = "skip",
) -> NDArray[np.float64]:
    """Compute average precision, the mean over the relevant items of the precision at their position; its mean is MAP.

        AP = 1 / min(R, cutoff) · Σ_{i relevant, k_i ≤ cutoff} |{j relevant : k_j ≤ k_i}| / k_i

    with R the number of relevant items of the list. With a cutoff, the sum is divided by its largest possible value, as
    in nDCG, so that the ideal order always has 1; `map_cut` of trec_eval divides by R. Section 5.4 reports MAP without
    naming a cutoff or a threshold.

    Args:
        positions: `[B, n]`, the 1-based position k_i of each item.
        relevance: `[B, n]`, the label of each item, from 0 up.
        where: `[B, n]`, true where there is an item; all by default.
        threshold: an item is relevant when its label is at least this.
        cutoff: count only this many first positions; all by default.
        empty: the value of a query without any relevant item: "skip" (NaN), "zero" or "one".

    >>> average_precision_metric(np.array([[1, 2, 4]]), np.array([[1, 0, 2]])).tolist()  # (1/1 + 2/4) / 2
    [0.75]
    """
    mask = check_order(positions, where)
    relevant = mask & (_check_relevance(relevance, mask) >= threshold)
    places = _places(positions, mask, cutoff)
    # The j-th relevant item from the top is at sorted_places[j - 1], with j relevant items down to its place.
    sorted_places = np.sort(np.where(relevant, places, np.inf), axis=-1)
    precision = np.arange(1, sorted_places.shape[1] + 1) / sorted_places
    most = relevant.sum(axis=-1) if cutoff is None else np.minimum(relevant.sum(axis=-1), cutoff)
    return _share(precision.sum(axis=-1), most, empty)


def ndcg_metric(
    positions: Array,
    relevance: Array,
    *,
    where: Mask | None = None,
    cutoff: int | None = 10,
    gain: GainKind = "exponential",
    empty: Empty = "skip",
) -> NDArray[np.float64]:
    """Compute normalised discounted cumulative gain; nDCG in Section 5.4 is nDCG@10.

        nDCG = DCG / ideal DCG,      DCG = Σ_{k_i ≤ cutoff} gain(y_i) / log₂(1 + k_i)

    with gain(y) = 2^y − 1 ("exponential") or y ("linear"). The ideal DCG sorts all items of the list by
    label and applies the same cutoff, even if the order leaves some of them without a place.

    A query without any label above 0 has the value of `empty`. Other arguments as for `average_precision_metric`.

    >>> ndcg_metric(np.array([[1, 3, 2]]), np.array([[2, 0, 1]])).tolist()
    [1.0]
    >>> ndcg_metric(np.array([[3]]), np.array([[1]])).tolist()  # 1/log₂(1 + 3)
    [0.5]
    """
    mask = check_order(positions, where)
    gains = _gains(_check_relevance(relevance, mask), gain)
    discounts = 1 / np.log2(1 + _places(positions, mask, cutoff))
    ideal_gains = _descending(gains)[:, :cutoff]
    ideal_discounts = 1 / np.log2(1 + np.arange(1, ideal_gains.shape[1] + 1))
    # Summed in falling order like the ideal terms, those of an ideal order give exactly 1; the minimum removes rounding
    # for an order that is almost ideal.
    dcg = _descending(gains * discounts)[:, :cutoff].sum(axis=-1)
    ideal_dcg = (ideal_gains * ideal_discounts).sum(axis=-1)
    return _share(np.minimum(dcg, ideal_dcg), ideal_dcg, empty)


def clicks_metric(
    positions: Array, table: Array, *, where: Mask | None = None, cutoff: int | None = None
) -> NDArray[np.float64]:
    """Compute expected clicks: #Click of Section 5.4, #click@k of Section 6.1; Eq. 1 with every value 1.

        #Click = Σ_i table[i, k_i]      over the items with k_i ≤ min(K, cutoff)

    Args:
        positions: `[B, n]`, the 1-based position k_i of each item.
        table: `[B, n, K]`, the click probability of each item at each position, usually that of an oracle.
        where: `[B, n]`, true where there is an item; all by default.
        cutoff: count only this many first positions; all K by default.

    >>> clicks_metric(np.array([[2, 1]]), np.array([[[0.5, 0.25], [0.5, 0.125]]])).tolist()
    [0.75]
    """
    return utility(table, positions, where=where, cutoff=cutoff)


def ctr_metric(
    positions: Array, table: Array, *, where: Mask | None = None, cutoff: int | None = None
) -> NDArray[np.float64]:
    """Compute expected clicks per item with a place: CTR of Section 5.4.

        CTR = #Click / |{i : k_i ≤ min(K, cutoff)}|

    Items without a place count in neither sum; a query in which no item has a place has NaN. The mean of these values
    weights queries, not items, equally; the two agree when all lists are equally long.

    Arguments as for `clicks_metric`.

    >>> ctr_metric(np.array([[2, 1, 3]]), np.array([[[0.5, 0.25], [0.5, 0.125], [0.9, 0.9]]])).tolist()
    [0.375]
    """
    shown = has_place(table, positions, where=where, cutoff=cutoff).sum(axis=-1)
    return _share(clicks_metric(positions, table, where=where, cutoff=cutoff), shown, "skip")


def _places(positions: Array, mask: Mask, cutoff: int | None) -> NDArray[np.float64]:
    """Return the position of each item that counts, and infinity, where all discounts are 0, for the others."""
    check_cutoff(cutoff)
    counts = mask if cutoff is None else mask & (positions <= cutoff)
    return np.where(counts, positions, np.inf)


def _check_relevance(relevance: Array, mask: Mask) -> NDArray[np.float64]:
    """Return the labels, with 0 in the padding."""
    if np.shape(relevance) != mask.shape:
        raise ValueError(f"relevance must have shape {list(mask.shape)}; got shape {list(np.shape(relevance))}")
    labels = np.where(mask, relevance, 0).astype(np.float64)
    unusable = ~(np.isfinite(labels) & (labels >= 0))
    if unusable.any():
        raise ValueError(f"relevance must be finite and from 0 up; got {labels[unusable][0]}")
    return labels


def _gains(labels: NDArray[np.float64], gain: GainKind) -> NDArray[np.float64]:
    if gain == "linear":
        return labels
    if gain != "exponential":
        raise ValueError(f"gain must be 'exponential' or 'linear'; got {gain!r}")
    if labels.max(initial=0) > _MOST_RELEVANT:
        raise ValueError(f"relevance must be at most {_MOST_RELEVANT} for the exponential gain; got {labels.max()}")
    return np.exp2(labels) - 1


def _descending(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sort(terms, axis=-1)[:, ::-1]


def _share(reached: Array, most: Array, empty: Empty) -> NDArray[np.float64]:
    """Return reached / most, and the value of an empty query where most is 0."""
    if empty not in _VALUE_OF_EMPTY:
        raise ValueError(f"empty must be 'skip', 'zero' or 'one'; got {empty!r}")
    share = np.full(reached.shape, _VALUE_OF_EMPTY[empty], dtype=np.float64)
    np.divide(reached, most, out=share, where=most > 0)
    return share
