"""Logging policies of a simulation: weak rankers, and randomisation of a share of their traffic.

As in Fang, Agarwal and Joachims (2019), a logger is a weak ranker trained on 1 % of the labels. Two loggers that
disagree already show items at several positions, from which intervention harvesting and click models learn.
Randomisation adds to that with a known probability: `placement_probability`.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from urank.errors import ConfigError
from urank.log.ragged import list_ids, pad, positions_by_score, where_items
from urank.log.signed_log import signed_log

Randomisation = Literal["none", "swap", "adjacent", "shuffle"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_QUERIES, MIN_DOCUMENTS = 2, 30
FEATURE_SHARE = 0.25
"""Share of the features that a logger uses."""
PENALTY = 0.1
"""Of the ridge regression of a logger."""


def logger_positions(
    features: NDArray[Any],
    label: NDArray[Any],
    offsets: Ints,
    *,
    loggers: int,
    label_share: float = 0.01,
    rng: np.random.Generator,
) -> Ints:
    """Train the loggers and return the position `[loggers, rows]` of each document within its query.

    A logger regresses the gain 2^y − 1 on a sample of the standardised features, in a sample of the queries.

    Args:
        features: `[rows, F]` raw features.
        label: `[rows]` graded relevance.
        offsets: `[Q + 1]` where each query starts.
        loggers: number of loggers.
        label_share: share of the queries whose labels a logger sees.
        rng: draws the samples.
    """
    x = standardised(features)
    gain = 2.0 ** np.asarray(label, dtype=np.float64) - 1
    query, where = list_ids(offsets), where_items(offsets)
    positions = np.empty((loggers, len(x)), dtype=np.int64)
    for logger in range(loggers):
        seen = sample_queries(offsets, label_share, rng)[query]
        known = np.sort(rng.permutation(x.shape[1])[: max(1, round(FEATURE_SHARE * x.shape[1]))])
        score = x[:, known] @ ridge_weights(x[np.ix_(seen, known)], gain[seen], PENALTY)
        positions[logger] = positions_by_score(pad(score, offsets), where=where)[where]
    return positions


def standardised(features: NDArray[Any]) -> Floats:
    """Apply `signed_log`, then scale each column to mean 0 and deviation 1; NaN and constant columns become 0.

    >>> standardised(np.array([[0.0], [np.e - 1], [np.nan]])).ravel().tolist()
    [-1.0, 1.0, 0.0]
    """
    x = signed_log(features)
    known = ~np.isnan(x)
    counts = np.maximum(known.sum(axis=0), 1)
    x = np.where(known, x - np.sum(x, axis=0, where=known) / counts, 0.0)
    deviation = np.sqrt(np.sum(x**2, axis=0) / counts)
    return np.asarray(x / np.where(deviation > 1e-9, deviation, np.inf))


def sample_queries(offsets: Ints, share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw a mask `[Q]` of a share of the queries: at least 2 queries and 30 documents, or all if there are fewer.

    >>> sample_queries(np.arange(0, 2001, 10), 0.01, np.random.default_rng(0)).sum()
    np.int64(3)
    """
    lengths = np.diff(offsets)
    order = rng.permutation(len(lengths))
    documents = np.cumsum(lengths[order])
    enough = int(np.searchsorted(documents, MIN_DOCUMENTS)) + 1
    sample = np.zeros(len(lengths), dtype=np.bool_)
    sample[order[: max(MIN_QUERIES, enough, round(share * len(lengths)))]] = True
    return sample


def ridge_weights(x: Floats, target: Floats, penalty: float) -> Floats:
    """Compute w = (XᵀX + λ n I)⁻¹ Xᵀ(t − t̄) `[F]`, with X centred; the intercept does not affect the order.

    >>> ridge_weights(np.array([[-1.0], [1.0]]), np.array([2.0, 6.0]), penalty=1.0).tolist()
    [1.0]
    """
    centred = x - x.mean(axis=0)
    gram = centred.T @ centred + penalty * len(x) * np.eye(x.shape[1])
    return np.asarray(np.linalg.solve(gram, centred.T @ (target - target.mean())))


def draw_placements(kind: Randomisation, shown: Ints, width: int, rng: np.random.Generator) -> Ints:
    """Draw the new position `[S, width]` of the item at each base rank 1 … width, for each session.

    Args:
        kind: `swap`: the items at 1 and k are swapped, k uniform in 1 … n. `adjacent`: a uniformly chosen pair of
            neighbours is swapped with probability ½. `shuffle`: a uniformly random permutation. `none`: no change.
        shown: `[S]` n, the number of items shown; ranks past it do not move.
        width: the highest base rank.
        rng: draws.
    """
    sessions = len(shown)
    ranks = np.arange(1, width + 1)
    placements = np.tile(ranks, (sessions, 1))
    if kind == "swap":
        _exchange(placements, np.zeros(sessions, dtype=np.int64), rng.integers(0, shown))
    elif kind == "adjacent":
        upper = rng.integers(0, np.maximum(shown - 1, 1))
        moved = (rng.random(sessions) < 0.5) & (shown > 1)
        _exchange(placements, upper, upper + moved)
    elif kind == "shuffle":
        inside = ranks <= shown[:, None]
        placements = np.where(inside, positions_by_score(rng.random(placements.shape), where=inside), placements)
    elif kind != "none":
        raise ConfigError(f"randomise must be one of {', '.join(get_args(Randomisation))}; got {kind!r}")
    return placements


def _exchange(placements: Ints, first: Ints, second: Ints) -> None:
    """Swap two columns of each row, in place."""
    rows = np.arange(len(placements))
    placements[rows, first], placements[rows, second] = placements[rows, second], placements[rows, first]


def placement_probability(kind: Randomisation, shown: ArrayLike, base_rank: ArrayLike, k: ArrayLike) -> Floats:
    """Compute P(item at position k | its base rank) exactly, when `shown` items are randomised; 0 past those.

    With n shown items and base rank b:

        swap      1/n when b = 1 or k = 1;  1 − 1/n when b = k ≠ 1
        adjacent  1/(2(n − 1)) when |b − k| = 1;  the rest of the probability when b = k
        shuffle   1/n
        none      1 when b = k

    Arguments are broadcast.

    >>> placement_probability("swap", 4, [1, 2, 2, 2], [3, 1, 2, 3]).tolist()
    [0.25, 0.25, 0.75, 0.0]
    >>> placement_probability("adjacent", 4, 2, [1, 2, 3, 4]).round(3).tolist()
    [0.167, 0.667, 0.167, 0.0]
    """
    n, b, k = np.broadcast_arrays(*(np.asarray(a, dtype=np.int64) for a in (shown, base_rank, k)))
    inside = (b >= 1) & (b <= n) & (k >= 1) & (k <= n)
    one_in_n = 1 / np.maximum(n, 1)
    if kind == "none":
        probability = (b == k).astype(np.float64)
    elif kind == "swap":
        probability = np.where((b == 1) | (k == 1), one_in_n, np.where(b == k, 1 - one_in_n, 0.0))
    elif kind == "adjacent":
        move = 0.5 / np.maximum(n - 1, 1)
        neighbours = (b > 1).astype(np.int64) + (b < n)
        probability = np.where(b == k, 1 - move * neighbours, np.where(abs(b - k) == 1, move, 0.0))
    elif kind == "shuffle":
        probability = one_in_n
    else:
        raise ConfigError(f"randomise must be one of {', '.join(get_args(Randomisation))}; got {kind!r}")
    return np.where(inside, probability, 0.0)


def logging_probability(
    positions: Ints, shown: Ints, traffic: ArrayLike, *, kind: Randomisation = "none", share: float = 0.0, K: int
) -> Floats:
    """Compute P(item at position k | query) `[rows, K]` under the whole traffic: the propensity of an impression.

        Σ_l t_l [(1 − ρ) 1[k_l = k] + ρ P_kind(k | k_l)]      over loggers l with traffic t_l, ρ randomised

    Args:
        positions: `[loggers, rows]` k_l, the position of each item by logger.
        shown: `[rows]` number of items that its query shows.
        traffic: `[loggers]` share of the sessions of each logger; sums to 1.
        kind: of randomisation.
        share: ρ, the share of randomised sessions.
        K: number of positions.

    >>> logging_probability(np.array([[1, 2], [2, 1]]), np.array([2, 2]), [0.75, 0.25], K=2).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    k = np.arange(1, K + 1)
    n = shown[:, None]
    total = np.zeros((positions.shape[1], K))
    for weight, base in zip(np.asarray(traffic, dtype=np.float64), positions[:, :, None], strict=True):
        total += weight * (1 - share) * placement_probability("none", n, base, k)
        if share > 0:
            total += weight * share * placement_probability(kind, n, base, k)
    return np.minimum(total, 1.0)
