"""Simulated users: the true click probabilities of a simulation, and clicks drawn from them.

An `Oracle` maps the candidates of a query to their *truth*. For every user model but one that is the table of Fig. 2 of
the paper,

    table[i, k] = P(click | item i shown at position k),          k = 1 … K

where a click depends on the item and its position only. The cascade user has no such table, because its clicks depend
on the items above; its truth is the relevance probability of each item.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from urank.errors import ConfigError
from urank.log.ragged import list_ids, pad, where_items
from urank.log.signed_log import signed_log

Scaling = Literal["minmax", "log", "rank"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def scaling_bounds(features: NDArray[Any], method: Scaling) -> Floats:
    """Return the lowest and highest finite value of each column `[2, F]`, after the logarithm for `log`.

    >>> scaling_bounds(np.array([[1.0, np.nan], [3.0, 5.0]]), "minmax").tolist()
    [[1.0, 5.0], [3.0, 5.0]]
    """
    if method not in get_args(Scaling):
        raise ConfigError(f"scaling must be one of {', '.join(get_args(Scaling))}; got {method!r}")
    # The logarithm is monotone: transform the bounds rather than the data, which may be large.
    finite = np.isfinite(features)
    known = finite.any(axis=0)
    low = np.where(known, np.min(features, axis=0, where=finite, initial=np.inf), 0)
    high = np.where(known, np.max(features, axis=0, where=finite, initial=-np.inf), 0)
    bounds: Floats = np.stack([low, high]).astype(np.float64)
    return signed_log(bounds) if method == "log" else bounds


def scale01(features: NDArray[Any], method: Scaling = "log", *, bounds: Floats | None = None) -> Floats:
    """Scale each column of `[rows, F]` to [0, 1]. Constant columns and NaN become 0.

    Args:
        features: raw features.
        method: `minmax`: (x − low) / (high − low). `log`: the same after `signed_log`. `rank`: the share of rows with a
            smaller value (the empirical distribution function), stretched so that the largest value gets 1.
        bounds: from `scaling_bounds`, to scale new rows like earlier ones; the result is clipped to [0, 1].

    >>> scale01(np.array([[0.0, 7.0], [1.0, 7.0], [3.0, np.nan]])).round(3).tolist()
    [[0.0, 0.0], [0.5, 0.0], [1.0, 0.0]]
    >>> scale01(np.array([[0.0], [0.0], [9.0], [1e9]]), "rank").ravel().round(3).tolist()
    [0.0, 0.0, 0.667, 1.0]
    """
    if method == "rank":
        if bounds is not None:
            raise ConfigError("scaling by rank takes no bounds: it compares the given rows with one another")
        below = np.zeros(features.shape)
        for column, target in zip(np.asarray(features, dtype=np.float64).T, below.T, strict=True):
            known = ~np.isnan(column)
            target[known] = np.searchsorted(np.sort(column[known]), column[known], side="left")
        return np.asarray(below / np.maximum(below.max(axis=0, initial=0), 1))
    low, high = scaling_bounds(features, method) if bounds is None else bounds
    x = signed_log(features) if method == "log" else np.asarray(features, dtype=np.float64)
    width = np.where(high > low, high - low, 1.0)
    scaled = np.clip((x - low) / width, 0, 1)
    return np.where(np.isnan(scaled) | (high <= low), 0.0, scaled)


def query_means(x: NDArray[Any], offsets: Ints) -> Floats:
    """Return the mean feature vector of each row's query `[rows, F]`: the context of CPBM.

    >>> query_means(np.array([[0.0], [1.0], [0.2]]), np.array([0, 2, 3])).ravel().tolist()
    [0.5, 0.5, 0.2]
    """
    sums = np.zeros((len(offsets) - 1, x.shape[1]))
    filled = np.diff(offsets) > 0
    sums[filled] = np.add.reduceat(x.astype(np.float64), offsets[:-1][filled], axis=0) if filled.any() else 0
    return np.asarray((sums / np.maximum(np.diff(offsets), 1)[:, None])[list_ids(offsets)])


User = Literal["item", "query", "pbm", "cascade", "trust"]


def attention_weights(n_features: int, eta: float, rng: np.random.Generator) -> Floats:
    """Draw the weights w `[F]` of the attention bias (Section 5.2): uniform in [−η, η), centred so that they sum to 0.

    Centring can move a weight past η, but never past 2η.

    >>> w = attention_weights(50, 0.5, np.random.default_rng(0))
    >>> w.shape, bool(abs(w.sum()) < 1e-12), bool(abs(w).max() < 2 * 0.5)
    ((50,), True, True)
    """
    w = rng.uniform(-eta, eta, n_features)
    return np.asarray(w - w.mean())


def examination(x: NDArray[Any], w: ArrayLike, K: int) -> Floats:
    """Compute P(o = 1 | k, x) = 1 / k^max(wᵀx + 1, 0) `[rows, K]` (Section 5.2; Fang, Agarwal and Joachims 2019).

    Args:
        x: `[rows, F]` features from 0 to 1: of the item (the paper) or of its query (CPBM).
        w: `[F]` weights; with w = 0 this is the position-based model 1/k.
        K: number of positions.

    >>> bool(np.isclose(examination(np.array([[0.5]]), [1.0], 3)[0, 2], 3**-1.5))
    True
    """
    exponent = np.maximum(np.asarray(x, dtype=np.float64) @ np.asarray(w, dtype=np.float64) + 1, 0)
    return np.asarray(np.exp(-exponent[:, None] * np.log(np.arange(1, K + 1))))


def relevance_denominator(label_max: float) -> float:
    """Return 2^y_max − 1, as in the paper's text; its released code divides by 2⁵ − 1 with labels 0–4.

    >>> relevance_denominator(4)
    15.0
    """
    return float(2.0**label_max) - 1


def relevance_probability(
    label: ArrayLike, *, epsilon: float = 0.1, label_max: float, denominator: float | None = None
) -> Floats:
    """Compute P(r = 1) = ε + (1 − ε) (2^y − 1) / (2^y_max − 1) (Section 5.2; Ai et al. 2018).

    Args:
        label: `[rows]` graded relevance y, from 0 to `label_max`.
        epsilon: ε, the click probability of an irrelevant item that is examined.
        label_max: y_max, the highest grade.
        denominator: replaces `relevance_denominator(label_max)`.

    >>> relevance_probability([0, 4], label_max=4).tolist()
    [0.1, 1.0]
    >>> bool(relevance_probability(4, label_max=4, denominator=2**5 - 1) == 0.1 + 0.9 * 15 / 31)
    True
    """
    y = np.asarray(label, dtype=np.float64)
    if not ((y >= 0) & (y <= label_max)).all():
        raise ValueError(f"label must be from 0 to label_max, {label_max:g}; got {y.min():g} to {y.max():g}")
    gain = 2**y - 1
    return np.asarray(epsilon + (1 - epsilon) * gain / (denominator or relevance_denominator(label_max)))


def trust_curves(K: int, *, gamma: float = 1.0, trust: float = 0.2) -> tuple[Floats, Floats]:
    """Return the default α and β `[K]` of the trust-bias model P(c | i, k) = α_k r_i + β_k (Vardasbi et al. 2020).

    With examination θ_k = 1/k^γ and trust t, α_k = (1 − t) θ_k and β_k = t θ_k / k: an examined item that is not
    relevant is still clicked with probability t/k, because users trust high positions. α_k + β_k ≤ θ_k.

    >>> alpha, beta = trust_curves(2)
    >>> alpha.tolist(), beta.tolist()
    ([0.8, 0.4], [0.2, 0.05])
    """
    k = np.arange(1, K + 1, dtype=np.float64)
    return (1 - trust) / k**gamma, trust / k ** (gamma + 1)


def table_probabilities(table: NDArray[Any], positions: Ints, *, rows: Ints | None = None) -> Floats:
    """Return P(click) of each impression: `table[row, position − 1]`, and 0 for positions past K.

    >>> table_probabilities(np.array([[0.9, 0.5], [0.4, 0.3]]), np.array([2, 3])).tolist()
    [0.5, 0.0]
    """
    K = table.shape[1]
    rows = np.arange(len(positions)) if rows is None else rows
    return np.where(positions <= K, table[rows, np.minimum(positions, K) - 1], 0.0).astype(np.float64)


def cascade_probabilities(relevance: NDArray[Any], positions: Ints, offsets: Ints) -> Floats:
    """Compute P(click) `[rows]` of users who scan from the top and stop at the first click (Craswell et al. 2008).

    P(click at k) = r_k Π_{j above k} (1 − r_j). Items that are not shown must have relevance 0.

    >>> cascade_probabilities(np.array([0.5, 0.25]), np.array([2, 1]), np.array([0, 2])).tolist()
    [0.375, 0.25]
    """
    mask = where_items(offsets)
    order = np.argsort(np.where(mask, pad(positions, offsets), np.iinfo(np.int64).max), axis=1, kind="stable")
    r = np.take_along_axis(pad(relevance.astype(np.float64), offsets), order, axis=1)
    reached = np.ones_like(r)
    np.cumprod(1 - r[:, :-1], axis=1, out=reached[:, 1:])
    probability = np.empty_like(r)
    np.put_along_axis(probability, order, r * reached, axis=1)
    return np.asarray(probability[mask])


def sample_cascade(
    relevance: NDArray[Any], positions: Ints, offsets: Ints, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw clicks `[rows]` of cascade users: each item appeals or not, and the first that appeals is clicked.

    >>> rng = np.random.default_rng(0)
    >>> sample_cascade(np.array([1.0, 1.0]), np.array([2, 1]), np.array([0, 2]), rng).tolist()
    [False, True]
    """
    appeals = rng.random(len(relevance)) < relevance
    lists = list_ids(offsets)
    first = np.full(len(offsets) - 1, np.iinfo(np.int64).max)
    np.minimum.at(first, lists[appeals], positions[appeals])
    return np.asarray(appeals & (positions == first[lists]))


@dataclass(frozen=True)
class Oracle:
    """A user model and its parameters.

    Attributes:
        user: `item`: examination depends on position and item features, as in the paper. `query`: on position and the
            mean features of the query, as in CPBM. `pbm`: 1/k^gamma for all items. `trust`: α_k r + β_k. `cascade`:
            from the top down to the first click.
    """

    user: User
    positions: int  # K
    label_max: float  # the highest grade
    weights: tuple[float, ...] = ()  # w of `item` and `query`
    epsilon: float = 0.1  # the click probability of an irrelevant item that is examined
    denominator: float | None = None  # of the relevance probability; 2^label_max − 1 by default
    gamma: float = 1.0  # the steepness of `pbm`, and of the default curves of `trust`
    alpha: tuple[float, ...] = ()  # α_k of `trust`; from `trust_curves` by default
    beta: tuple[float, ...] = ()  # β_k of `trust`, likewise

    def __post_init__(self) -> None:
        if self.user not in get_args(User):
            raise ConfigError(f"user must be one of {', '.join(get_args(User))}; got {self.user!r}")
        if self.positions < 1:
            raise ConfigError(f"positions must be at least 1; got {self.positions}")
        if self.label_max <= 0:
            raise ConfigError(f"label_max must be above 0; got {self.label_max:g}")
        lowest = relevance_denominator(self.label_max)
        if self.denominator is None:
            object.__setattr__(self, "denominator", lowest)
        elif self.denominator < lowest:
            raise ConfigError(f"denominator must be at least 2^label_max − 1 = {lowest:g}; got {self.denominator:g}")
        if self.user in ("item", "query") and not self.weights:
            raise ConfigError(f"the user {self.user!r} needs weights, one for each feature; got none")
        if self.user == "trust":
            for name, curve in zip(("alpha", "beta"), trust_curves(self.positions, gamma=self.gamma), strict=True):
                object.__setattr__(self, name, tuple(getattr(self, name) or curve.tolist()))
            lengths = len(self.alpha), len(self.beta)
            if lengths != (self.positions, self.positions):
                raise ConfigError(f"alpha and beta need {self.positions} values; got {lengths[0]}, {lengths[1]}")
            if min(self.alpha) < 0 or min(self.beta) < 0 or (np.add(self.alpha, self.beta) > 1 + 1e-12).any():
                raise ConfigError("alpha and beta must be at least 0 and sum to at most 1 at each position")

    def relevance(self, label: ArrayLike) -> Floats:
        """Compute P(r = 1) of each row."""
        return relevance_probability(
            label, epsilon=self.epsilon, label_max=self.label_max, denominator=self.denominator
        )

    def examination(self, x: NDArray[Any], offsets: Ints) -> Floats:
        """Compute P(o = 1) `[rows, K]` of the users `item`, `query` and `pbm`."""
        if self.user == "pbm":
            return np.tile(np.arange(1, self.positions + 1) ** -float(self.gamma), (len(x), 1))
        if self.user == "item":
            return examination(x, self.weights, self.positions)
        if self.user == "query":
            return examination(query_means(x, offsets), self.weights, self.positions)
        raise ConfigError(f"the user {self.user!r} has no examination probability apart from the item's relevance")

    def table(self, x: NDArray[Any], label: ArrayLike, offsets: Ints) -> Floats:
        """Compute the true click table `[rows, K]`: examination · relevance, or α_k r + β_k.

        Args:
            x: `[rows, F]` features from 0 to 1 (see `scale01`).
            label: `[rows]` graded relevance.
            offsets: `[Q + 1]` where each query starts.
        """
        if self.user == "cascade":
            raise ConfigError(
                "the cascade user has no click table: its clicks depend on the items above; use click_probabilities"
            )
        r = self.relevance(label)[:, None]
        return np.asarray(self.alpha) * r + self.beta if self.user == "trust" else self.examination(x, offsets) * r

    def truth(self, x: NDArray[Any], label: ArrayLike, offsets: Ints) -> Floats:
        """Compute the table `[rows, K]`, or for cascade users the relevance probability `[rows]`."""
        return self.relevance(label) if self.user == "cascade" else self.table(x, label, offsets)

    def click_probabilities(
        self, truth: NDArray[Any], positions: Ints, offsets: Ints, *, rows: Ints | None = None
    ) -> Floats:
        """Compute P(click) of each impression; its sum over a list is the expected number of clicks.

        Args:
            truth: of the candidates, from `truth`.
            positions: `[impressions]` from 1; an item past K is not shown and not clicked.
            offsets: where each list starts among the impressions.
            rows: the row of `truth` of each impression, if they are not the same.
        """
        if self.user == "cascade":
            return cascade_probabilities(self._shown(truth, positions, rows), positions, offsets)
        return table_probabilities(truth, positions, rows=rows)

    def sample_clicks(
        self, truth: NDArray[Any], positions: Ints, offsets: Ints, rng: np.random.Generator, *, rows: Ints | None = None
    ) -> NDArray[np.bool_]:
        """Draw the clicks of users who see these lists; arguments as in `click_probabilities`."""
        if self.user == "cascade":
            return sample_cascade(self._shown(truth, positions, rows), positions, offsets, rng)
        return rng.random(len(positions)) < table_probabilities(truth, positions, rows=rows)

    def _shown(self, relevance: NDArray[Any], positions: Ints, rows: Ints | None) -> NDArray[Any]:
        return np.where(positions <= self.positions, relevance if rows is None else relevance[rows], 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
