"""Simulated users: the true click probabilities of a simulation, and clicks drawn from them.

An `Oracle` maps the candidates of a query to their *truth*. For most user models that is the table of Figure 2 of the
paper,

    table[i, k] = P(click | item i shown at position k),          k = 1 … K

where a click depends on the item and its position only. The users `cascade` and `neighbour` have no such table, because
their clicks depend on the items above: the truth of the cascade is the relevance probability of each item, that of
`neighbour` the table of items with nothing above them.

With s = max(wᵀx + 1, 0) of the item's features x, the paper's users (`item`) examine position k with probability 1/kˢ.
That is the formula of the click family `monotone`. These users have other curves. `monotone` and `pbm` contain none of
them; A1, A2 and `factorised` have a free curve for each item, but no family can represent `neighbour`, nor that the
clicks of one session depend on its patience:

    grid        0.6^[k is even] / rowˢ            two columns: position 2 is beside position 1, and 3 below it
    carousel    1 / (shelf · tileˢ)               shelves of 5 tiles: attention rises at the start of a shelf
    fold        1 / screenˢ                       steps; a screen has 3 or 6 positions, depending on the query
    neighbour   1 / kˢ · (1 − r/2)                r is the relevance of the item above, which holds the attention
    patience    1 / k^(m s)                       m is ¼, ½, 1, 2 or 4, drawn for each session
"""

from __future__ import annotations

from collections.abc import Mapping
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


User = Literal["item", "query", "pbm", "cascade", "trust", "grid", "carousel", "fold", "neighbour", "patience"]
UNWEIGHTED: tuple[User, ...] = ("pbm", "cascade", "trust")
"""Users whose attention does not depend on features."""
WITHOUT_TABLE: dict[User, str] = {"cascade": "relevance_probability", "neighbour": "table_alone"}
"""Users whose clicks depend on the items above, and the name of their truth."""

COLUMNS, RIGHT_COLUMN = 2, 0.6
SHELF = 5
SCREENS = (3, 6)
HELD = 0.5
PATIENCE = (0.25, 0.5, 1.0, 2.0, 4.0)


def attention_weights(n_features: int, eta: float, rng: np.random.Generator, *, selected: int | None = None) -> Floats:
    """Draw the weights w `[F]` of the attention bias (Section 5.2): uniform in [−η, η), centred so that they sum to 0.

    Centring can move a weight past η, but never past 2η. With `selected`, as many features chosen at random have a
    weight, and the others 0.

    >>> w = attention_weights(50, 0.5, np.random.default_rng(0))
    >>> w.shape, bool(abs(w.sum()) < 1e-12), bool(abs(w).max() < 2 * 0.5)
    ((50,), True, True)
    >>> int(np.count_nonzero(attention_weights(50, 0.5, np.random.default_rng(0), selected=10)))
    10
    """
    if selected is not None and not 1 <= selected <= n_features:
        raise ConfigError(f"attention_features must be from 1 to the number of features, {n_features}; got {selected}")
    w = rng.uniform(-eta, eta, n_features if selected is None else selected)
    w -= w.mean()
    if selected is None:
        return np.asarray(w)
    every = np.zeros(n_features)
    every[rng.choice(n_features, selected, replace=False)] = w
    return every


def steepness(x: NDArray[Any], w: ArrayLike) -> Floats:
    """Compute s = max(wᵀx + 1, 0) `[rows, 1]`, the exponent of the examination, of features `[rows, F]`."""
    return np.maximum(np.asarray(x, dtype=np.float64) @ np.asarray(w, dtype=np.float64) + 1, 0)[:, None]


def examination(x: NDArray[Any], w: ArrayLike, K: int) -> Floats:
    """Compute P(o = 1 | k, x) = 1 / k^max(wᵀx + 1, 0) `[rows, K]` (Section 5.2; Fang, Agarwal and Joachims 2019).

    Args:
        x: `[rows, F]` features from 0 to 1: of the item (the paper) or of its query (CPBM).
        w: `[F]` weights; with w = 0 this is the position-based model 1/k.
        K: number of positions.

    >>> bool(np.isclose(examination(np.array([[0.5]]), [1.0], 3)[0, 2], 3**-1.5))
    True
    """
    return np.asarray(np.exp(-steepness(x, w) * np.log(np.arange(1, K + 1))))


def grid_examination(x: NDArray[Any], w: ArrayLike, K: int) -> Floats:
    """Compute the examination `[rows, K]` of a grid with two columns, of which the right one gets less attention.

    >>> grid_examination(np.array([[0.0]]), [1.0], 4).round(2).tolist()  # s = 1
    [[1.0, 0.6, 0.5, 0.3]]
    """
    place = np.arange(K)
    side = np.where(place % COLUMNS == 0, 1.0, RIGHT_COLUMN)
    return np.asarray(side * (1.0 + place // COLUMNS) ** -steepness(x, w))


def carousel_examination(x: NDArray[Any], w: ArrayLike, K: int) -> Floats:
    """Compute the examination `[rows, K]` of shelves of 5 tiles: 1 / (shelf · tileˢ).

    >>> carousel_examination(np.array([[0.0]]), [1.0], 6).round(2).tolist()  # s = 1
    [[1.0, 0.5, 0.33, 0.25, 0.2, 0.5]]
    """
    place = np.arange(K)
    return np.asarray((1.0 + place % SHELF) ** -steepness(x, w) / (1 + place // SHELF))


def fold_examination(x: NDArray[Any], w: ArrayLike, K: int, offsets: Ints) -> Floats:
    """Compute the examination `[rows, K]` of screens, 1 / screenˢ: items on one screen get the same attention.

    A screen has 3 positions for queries whose documents have a mean s of at least 1, and 6 for others.

    >>> fold_examination(np.array([[0.0]]), [1.0], 6, np.array([0, 1])).tolist()
    [[1.0, 1.0, 1.0, 0.5, 0.5, 0.5]]
    """
    s = steepness(x, w)
    size = np.where(query_means(s, offsets) >= 1, *SCREENS)
    return np.asarray((1.0 + np.arange(K) // size) ** -s)


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


def neighbour_probabilities(table: NDArray[Any], relevance: NDArray[Any], positions: Ints, offsets: Ints) -> Floats:
    """Compute P(click) `[rows]` of users whose attention the item above holds with half its relevance.

    P(click at k) = p_k (1 − r_above / 2). Items past the last position must have `table` and relevance 0.

    Args:
        table: `[rows]`, p of each item at its position with nothing above it.
        relevance, positions: `[rows]`.
        offsets: `[lists + 1]`.

    >>> neighbour_probabilities(np.array([0.4, 0.8]), np.array([0.5, 0.8]), np.array([2, 1]), np.array([0, 2])).round(2)
    array([0.24, 0.8 ])
    """
    mask = where_items(offsets)
    order = np.argsort(np.where(mask, pad(positions, offsets), np.iinfo(np.int64).max), axis=1, kind="stable")
    r = np.take_along_axis(pad(relevance.astype(np.float64), offsets), order, axis=1)
    kept, above = np.ones_like(r), np.ones_like(r)
    above[:, 1:] -= HELD * r[:, :-1]
    np.put_along_axis(kept, order, above, axis=1)
    return np.asarray(table * kept[mask])


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
            from the top down to the first click. `grid`, `carousel`, `fold`, `neighbour` and `patience`: item-specific
            like `item`, with the curves above.
    """

    user: User
    positions: int  # K
    label_max: float  # the highest grade
    weights: tuple[float, ...] = ()  # w of users whose attention depends on features
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
        if self.user not in UNWEIGHTED and not self.weights:
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

    @property
    def truth_name(self) -> str:
        """The name of the truth: `table`, or another for users whose clicks depend on the items above."""
        return WITHOUT_TABLE.get(self.user, "table")

    def examination(self, x: NDArray[Any], offsets: Ints) -> Floats:
        """Compute P(o = 1) `[rows, K]` of users who examine a position and then click if the item is relevant.

        That of `neighbour` is of items with nothing above them, that of `patience` the mean over sessions.
        """
        w, K = self.weights, self.positions
        match self.user:
            case "pbm":
                return np.tile(np.arange(1, K + 1) ** -float(self.gamma), (len(x), 1))
            case "item" | "neighbour":
                return examination(x, w, K)
            case "query":
                return examination(query_means(x, offsets), w, K)
            case "grid":
                return grid_examination(x, w, K)
            case "carousel":
                return carousel_examination(x, w, K)
            case "fold":
                return fold_examination(x, w, K, offsets)
            case "patience":
                return np.asarray(np.mean([examination(x, w, K) ** m for m in PATIENCE], axis=0))
        raise ConfigError(f"the user {self.user!r} has no examination probability apart from the item's relevance")

    def table(self, x: NDArray[Any], label: ArrayLike, offsets: Ints) -> Floats:
        """Compute the true click table `[rows, K]`: examination · relevance, or α_k r + β_k.

        Args:
            x: `[rows, F]` features from 0 to 1 (see `scale01`).
            label: `[rows]` graded relevance.
            offsets: `[Q + 1]` where each query starts.
        """
        if self.user in WITHOUT_TABLE:
            raise ConfigError(
                f"the {self.user} user has no click table: its clicks depend on the items above; "
                "use click_probabilities"
            )
        r = self.relevance(label)[:, None]
        return np.asarray(self.alpha) * r + self.beta if self.user == "trust" else self.examination(x, offsets) * r

    def truth(self, x: NDArray[Any], label: ArrayLike, offsets: Ints) -> Floats:
        """Compute the table `[rows, K]`; for `cascade` the relevance `[rows]`, for `neighbour` the table if alone."""
        if self.user == "cascade":
            return self.relevance(label)
        if self.user == "neighbour":
            return self.examination(x, offsets) * self.relevance(label)[:, None]
        return self.table(x, label, offsets)

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
        alone = table_probabilities(truth, positions, rows=rows)
        if self.user == "neighbour":  # everyone examines position 1, so that its column is the relevance
            return neighbour_probabilities(alone, self._shown(truth[:, 0], positions, rows), positions, offsets)
        return alone

    def sample_clicks(
        self,
        truth: NDArray[Any],
        positions: Ints,
        offsets: Ints,
        rng: np.random.Generator,
        *,
        rows: Ints | None = None,
        x: NDArray[Any] | None = None,
    ) -> NDArray[np.bool_]:
        """Draw the clicks of users who see these lists.

        Args:
            truth, positions, offsets, rows: as in `click_probabilities`.
            rng: random generator.
            x: `[candidates, F]` features from 0 to 1, which the user `patience` needs.
        """
        if self.user == "cascade":
            return sample_cascade(self._shown(truth, positions, rows), positions, offsets, rng)
        if self.user == "patience":
            assert x is not None  # noqa: S101 - the simulation has them
            s = steepness(x, self.weights)[:, 0]
            m = rng.choice(PATIENCE, len(offsets) - 1)[list_ids(offsets)]
            shown, of_row = positions <= self.positions, np.arange(len(positions)) if rows is None else rows
            examined = positions.astype(np.float64) ** -(m * s[of_row])
            return rng.random(len(positions)) < np.where(shown, truth[of_row, 0] * examined, 0.0)
        return rng.random(len(positions)) < self.click_probabilities(truth, positions, offsets, rows=rows)

    def _shown(self, relevance: NDArray[Any], positions: Ints, rows: Ints | None) -> NDArray[Any]:
        return np.where(positions <= self.positions, relevance if rows is None else relevance[rows], 0.0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Oracle:
        """Restore an oracle from `to_dict`."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
