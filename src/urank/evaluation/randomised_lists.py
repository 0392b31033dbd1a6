"""Off-policy estimates from lists that were shown in random order, and a test of whether the order was random.

Where chance decides which item is at which position, the position curve e(k) is identified up to a factor by these
lists alone, and a policy earns on list l, in expectation,

    v_l = Σ_i c_i b_i e(new slot of i) / mean of e over the slots of l

with clicks c and values b. Under the position-based model, P(click on i at k) = r_i e(k), a randomised item is clicked
with probability r_i · mean e, whatever the list, so E v_l = Σ_i b_i r_i e(new slot of i).

The estimate assumes one curve for all items. If some items lose attention faster than others, it is biased towards the
average item; click models with item-specific curves have no such bias, and larger errors. It further assumes that the
policy depends neither on the logged slots nor on these clicks: shuffle items before ranking, or ties are broken by the
logged order. The order as shown does depend on the slots and is valued by the clicks it had (`positions=None`).

Lists without a click contribute neither to the curve nor to the sum of v_l. A log that stores only lists with a click
therefore multiplies all values per list by the same factor and leaves the ratio of two policies unchanged.

Lists that are marked as random need not be (users can sort a result page by price): see `check_randomisation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import gammaln, ndtr, stdtr, stdtrit

from urank.errors import DataError
from urank.evaluation.intervals import Comparison, Interval, holm, with_p_value
from urank.log.columns import join_names
from urank.log.ragged import list_ids, offsets_of_runs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MOST_STEPS = 1000
_TOLERANCE = 1e-10  # relative change of the curve in one step

FALSE_DISCOVERY_RATE = 0.01
"""The expected share of random lists among those that are left out as ordered by a feature."""

ASSOCIATION_LEVEL = 0.01
"""The p-value, adjusted for the number of tests, below which position is associated with a feature."""

_SHORTEST_LIST = 5  # items; no shorter list can be recognised as ordered


@dataclass(frozen=True, eq=False)
class RandomisedLists:
    """Impressions of lists that were shown in random order.

    Args:
        position: `[rows]`, the slot of each item from 1, distinct within a list. Slots may be empty.
        click: `[rows]`, 0 or 1.
        offsets: `[lists + 1]`, see `urank.log.ragged`; no list is empty.
        query: `[lists]`, the query of each list. Errors are clustered by query.
        value: `[rows]`, the value of a click; None for 1.
    """

    position: NDArray[Any]
    click: NDArray[Any]
    offsets: Ints
    query: NDArray[Any]
    value: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        _check_offsets(self.offsets, len(self.position))
        for name, given, length in (
            ("click", self.click, len(self.position)),
            ("query", self.query, len(self)),
            ("value", self.value, len(self.position)),
        ):
            if given is not None and np.shape(given) != (length,):
                raise ValueError(f"{name} must have shape [{length}]; got shape {list(np.shape(given))}")
        if not np.isin(self.click, (0, 1)).all():
            raise ValueError(f"click must be 0 or 1; got {self.click[~np.isin(self.click, (0, 1))][0]}")
        _check_positions(self.position)
        repeated = np.flatnonzero((np.diff(self.slots) == 0) & (np.diff(self.lists) == 0))
        if len(repeated):
            list_number, position = self.lists[repeated[0]], self.slots[repeated[0]]
            raise ValueError(f"position must be distinct within a list; got {position} twice in list {list_number}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lists(self) -> Ints:
        """The list of each row, `[rows]`."""
        return list_ids(self.offsets)

    @cached_property
    def slots(self) -> Ints:
        """The positions of each list in increasing order, `[rows]`."""
        return np.asarray(self.position)[np.lexsort((self.position, self.lists))].astype(np.int64)

    @cached_property
    def earned(self) -> Floats:
        """The value of the click on each item, 0 without a click, `[rows]`."""
        click = np.asarray(self.click, dtype=np.float64)
        return click if self.value is None else click * self.value

    def select(self, keep: NDArray[np.bool_]) -> RandomisedLists:
        """Return the lists of a mask `[lists]`."""
        rows, sizes = keep[self.lists], np.diff(self.offsets)[keep]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        value = None if self.value is None else self.value[rows]
        return RandomisedLists(self.position[rows], self.click[rows], offsets, self.query[keep], value)


# The position curve


@dataclass(frozen=True, eq=False)
class PositionCurve:
    """The position curve e(k), with what the error of an estimate needs.

    Args:
        attention: `[K]`, on the scale of click rates; NaN where no list with a click has the slot.
        block: `[K]`, the number of the block of equal positions that isotonic regression pooled; −1 where NaN.
        query: `[Q]`, the queries with a click.
        scores: `[Q, blocks]`, the score of each query in log e of each block.
        information: `[blocks, blocks]`, minus the derivative of the total score.
    """

    attention: Floats
    block: Ints
    query: NDArray[Any]
    scores: Floats
    information: Floats


def fit_position_curve(lists: RandomisedLists, *, monotone: bool = True) -> PositionCurve:
    """Estimate the position curve of randomised lists: monotone click rates by position, adjusted for the list.

    Lists differ in length and in how often they are clicked, so that plain click rates by position compare different
    lists at different positions. With a level λ_l for each list and Poisson clicks, E c_lk = λ_l e(k), maximum
    likelihood alternates between

        λ_l = c_l / Σ_{k in l} e(k)      and      e(k) = C_k / E_k,   E_k = Σ_{l with k} λ_l

    where c_l and C_k count clicks by list and by position. The e(k) are made non-increasing by isotonic regression with
    the weights E_k. If all lists have the same slots, e(k) is the click rate, and the weights are proportional to the
    impressions. The estimating equation has expectation 0 for position-based users however often a list is clicked,
    since randomisation makes E c_lk proportional to e(k) within each list.

    Isotonic regression finds some decline in the noise of a flat curve, which favours any policy that moves clicked
    items up: with a truly flat curve, 95 % intervals of a difference covered it in 76 to 84 % of our simulations. Use
    `monotone=False` where attention hardly falls.

    Args:
        lists: impressions of randomised lists.
        monotone: make the curve non-increasing.

    Raises:
        DataError: there is no click.

    >>> position, click = np.array([1, 2, 3, 1, 2, 3]), np.array([1, 0, 0, 1, 0, 1])
    >>> lists = RandomisedLists(position, click, np.array([0, 3, 6]), query=np.array([7, 8]))
    >>> fit_position_curve(lists).attention.round(3).tolist()  # 2/2, then 0/2 and 1/2 pooled
    [1.0, 0.25, 0.25]
    """
    total = np.bincount(lists.lists, lists.click, len(lists))
    if not total.any():
        raise DataError(f"the position curve needs lists with a click; none of {len(lists):,} randomised lists has one")
    clicked = lists.select(total > 0)
    total, home, place = total[total > 0], clicked.lists, np.asarray(clicked.position, dtype=np.int64) - 1
    clicks = np.bincount(place, clicked.click)
    known = np.bincount(place) > 0
    attention = np.ones(len(clicks))
    for _ in range(_MOST_STEPS):
        exposure = np.bincount(place, (total / np.bincount(home, attention[place]))[home])[known]
        fitted = clicks[known] / exposure
        if monotone:
            fitted = isotonic_regression(fitted, weights=exposure, increasing=False).x
        change = np.abs(fitted / fitted.max() - attention[known] / attention[known].max()).max()
        attention[known] = fitted
        if change < _TOLERANCE:
            break
    attention[~known] = np.nan
    block = np.full(len(clicks), -1, dtype=np.int64)
    block[known] = np.concatenate([[0], np.cumsum((np.diff(attention[known]) != 0) | (not monotone))])
    place_shown = np.minimum(np.asarray(lists.position) - 1, len(attention) - 1)
    attention *= total.sum() / np.nansum(attention[place_shown])
    return PositionCurve(attention, block, *_scores(clicked, attention, block))


def _scores(clicked: RandomisedLists, attention: Floats, block: Ints) -> tuple[NDArray[Any], Floats, Floats]:
    """Return the queries `[Q]`, their scores `[Q, blocks]` in log e, and the information `[blocks, blocks]`.

    score of l in block m = clicks of l in m − c_l π_lm,      π_lm = Σ_{k of l in m} e(k) / Σ_{k of l} e(k)
    information = Σ_l c_l (diag π_l − π_l π_l')
    """
    place, blocks = np.asarray(clicked.position, dtype=np.int64) - 1, int(block.max()) + 1
    cell = clicked.lists * blocks + block[place]

    def by_block(rows: NDArray[Any]) -> Floats:
        return _sums(cell, rows, len(clicked) * blocks).reshape(len(clicked), blocks)

    observed, share = by_block(clicked.click), by_block(attention[place])
    share /= share.sum(axis=1, keepdims=True)
    total = observed.sum(axis=1)
    information = np.diag(total @ share) - share.T @ (total[:, None] * share)
    query, home = np.unique(clicked.query, return_inverse=True)
    scores = observed - total[:, None] * share
    return query, np.stack([np.bincount(home, each, len(query)) for each in scores.T], axis=1), information


# Estimates of policies


def list_values(
    lists: RandomisedLists, positions: NDArray[Any] | None, curve: PositionCurve, *, cutoff: int | None = None
) -> Floats:
    """Estimate what each list earns in a new order, `[lists]`.

        v_l = Σ_{i at rank ≤ cutoff} c_i b_i e(new slot of i) / mean of e over the slots of l

    The item at rank r of the new order gets the r-th of the slots that the list had.

    Args:
        lists: impressions of randomised lists.
        positions: `[rows]`, the rank of each item in the new order, 1 to n in each list; None for the order as shown,
            which is valued by its own clicks.
        curve: from `fit_position_curve`.
        cutoff: count only the first slots of each list; None for all.

    >>> curve = PositionCurve(np.array([0.4, 0.3, 0.2]), np.arange(3), np.array([0]), np.zeros((1, 3)), np.eye(3))
    >>> lists = RandomisedLists(np.array([3, 1]), np.array([0, 1]), np.array([0, 2]), query=np.array([0]))
    >>> list_values(lists, np.array([1, 2]), curve).round(3).tolist()  # moves from slot 1 to 3: 0.2 / mean(0.4, 0.2)
    [0.667]
    """
    return _valued(lists, positions, curve, cutoff)[0]


def estimate_policy(
    lists: RandomisedLists,
    positions: NDArray[Any] | None,
    curve: PositionCurve | None = None,
    *,
    cutoff: int | None = None,
    level: float = 0.95,
) -> Interval:
    """Estimate the mean value of a policy per list, with a standard error by query that includes that of the curve.

    With L lists, n_q of query q, the estimate is θ = Σ_l v_l / L, and by the delta method its error is that of a sum of
    independent influences of the queries,

        φ_q = (Σ_{l of q} v_l − θ n_q) / L + g' H⁺ s_q,      error² = Q / (Q − 1) · Σ_q φ_q²

    where s_q is the score of the query in log e by pooled block, H the information of the curve, and g the derivative
    of θ by log e. Interval ends are those of Student's t with Q − 1 degrees of freedom, Q the queries of `lists`. The
    blocks that isotonic regression chose are treated as known.

    Args:
        lists: impressions of randomised lists, of queries on which the policy was not trained.
        positions, cutoff: as for `list_values`.
        curve: from `fit_position_curve` on a log that may include further queries; by default from `lists`.
        level: confidence level.

    Returns:
        The interval of the mean value per list; `n` counts queries.

    >>> rng = np.random.default_rng(0)
    >>> position = rng.permuted(np.tile([1, 2], (100, 1)), axis=1)
    >>> click = rng.random((100, 2)) < np.array([0.8, 0.2]) / position  # the first item is better
    >>> lists = RandomisedLists(position.ravel(), click.ravel(), np.arange(0, 201, 2), query=np.arange(100))
    >>> best = estimate_policy(lists, np.tile([1, 2], 100))  # truth: 0.8 / 1 + 0.2 / 2
    >>> best.low < 0.9 < best.high
    True
    """
    curve = fit_position_curve(lists) if curve is None else curve
    return _interval(lists, *_valued(lists, positions, curve, cutoff), curve, level)


def compare_policies(
    lists: RandomisedLists,
    a: NDArray[Any] | None,
    b: NDArray[Any] | None,
    curve: PositionCurve | None = None,
    *,
    cutoff: int | None = None,
    level: float = 0.95,
) -> Comparison:
    """Estimate the difference a − b of two policies per list, paired by query, with the error of `estimate_policy`.

    Args:
        lists, curve, cutoff, level: as for `estimate_policy`.
        a, b: `[rows]`, the ranks of the items under each policy; None for the order as shown.

    >>> position, click = np.array([1, 2, 2, 1]), np.array([1, 0, 1, 0])
    >>> lists = RandomisedLists(position, click, np.array([0, 2, 4]), query=np.array([0, 1]))
    >>> same = compare_policies(lists, np.array([1, 2, 1, 2]), np.array([1, 2, 1, 2]))
    >>> same.mean, same.error, same.p_value
    (0.0, 0.0, 1.0)
    """
    curve = fit_position_curve(lists) if curve is None else curve
    of_a, of_b = (_valued(lists, positions, curve, cutoff) for positions in (a, b))
    return with_p_value(_interval(lists, of_a[0] - of_b[0], of_a[1] - of_b[1], curve, level))


def _valued(
    lists: RandomisedLists, positions: NDArray[Any] | None, curve: PositionCurve, cutoff: int | None
) -> tuple[Floats, Floats]:
    """Return the value of each list `[lists]`, and the derivative `[blocks]` of their sum by log e."""
    if cutoff is not None and cutoff < 1:
        raise ValueError(f"cutoff must be from 1 up; got {cutoff}")
    blocks = len(curve.information)
    if positions is None:
        rank = _ranks_in_lists(lists.position, lists.lists)
        counted = lists.earned * (rank <= (cutoff or len(rank)))
        return _sums(lists.lists, counted, len(lists)), np.zeros(blocks)
    _check_order(positions, lists)
    # Lists without clicks earn nothing in any order, whatever the curve at their slots.
    clicked = np.bincount(lists.lists, lists.click, len(lists)) > 0
    at_slot = _attention(lists, clicked, curve)
    mean = np.bincount(lists.lists, at_slot, len(lists)) / np.diff(lists.offsets)
    if (mean[clicked] <= 0).any():
        first = np.flatnonzero(clicked & (mean <= 0))[0]
        raise DataError(
            f"the position curve is 0 at all slots of list {first}, which has a click: fit it on more lists"
        )
    new = lists.offsets[lists.lists] + np.asarray(positions, dtype=np.int64) - 1  # row of the new slot
    counted = lists.earned * (np.asarray(positions) <= (cutoff or len(at_slot)))
    per_row = np.zeros(len(at_slot))
    np.divide(counted * at_slot[new], mean[lists.lists], out=per_row, where=clicked[lists.lists])
    value = _sums(lists.lists, per_row, len(lists))
    # d v_l / d log e_m = the part of v_l in block m − v_l · π_lm
    block_of_slot = np.where(clicked[lists.lists], curve.block[np.minimum(lists.slots, len(curve.block)) - 1], 0)
    share = np.zeros(len(at_slot))
    total = (mean * np.diff(lists.offsets))[lists.lists]
    np.divide(value[lists.lists] * at_slot, total, out=share, where=clicked[lists.lists])
    gained, lost = _sums(block_of_slot[new], per_row, blocks), _sums(block_of_slot, share, blocks)
    return value, gained - lost


def _attention(lists: RandomisedLists, clicked: NDArray[np.bool_], curve: PositionCurve) -> Floats:
    """Look up e at the slots of the lists with a click, in increasing order, `[rows]`; 0 elsewhere."""
    K = len(curve.attention)
    at_slot = np.where(lists.slots <= K, curve.attention[np.minimum(lists.slots, K) - 1], np.nan)
    at_slot[~clicked[lists.lists]] = 0.0
    if (unknown := np.isnan(at_slot)).any():
        raise DataError(
            f"the position curve must cover the slots of all lists with a click; it lacks {lists.slots[unknown][0]}"
        )
    return at_slot


def _interval(lists: RandomisedLists, value: Floats, gradient: Floats, curve: PositionCurve, level: float) -> Interval:
    """Compute the interval of the mean value per list; see `estimate_policy`."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level}")
    mean, n = float(value.mean()), len(np.unique(lists.query))
    if n < 2:
        return Interval(mean, nan, nan, nan, n)
    _, home = np.unique(np.concatenate([lists.query, curve.query]), return_inverse=True)
    # Normalise the curve by the pseudo-inverse: e is known up to a factor, on which no value depends.
    effect = np.linalg.pinv(curve.information, hermitian=True) @ (gradient / len(lists))
    influence = np.bincount(home, np.concatenate([(value - mean) / len(lists), curve.scores @ effect]))
    error = float(np.sqrt(n / (n - 1) * np.sum(influence**2)))
    half = float(stdtrit(n - 1, (1 + level) / 2)) * error
    return Interval(mean, error, mean - half, mean + half, n)


# Whether the order is random


@dataclass(frozen=True)
class Association:
    """Association of a feature with position within lists.

    `correlation` is the mean rank correlation, weighted by n − 1, and `z` its value in standard errors. `spread` is the
    variance of the rank correlations over lists relative to that of random orders, and `spread_z` its excess over 1 in
    standard errors. P-values are adjusted for the number of tests (Holm).
    """

    feature: str
    lists: int  # in which the feature varies
    correlation: float
    z: float
    p_value: float
    spread: float
    spread_z: float
    spread_p_value: float


@dataclass(frozen=True)
class OrderedLists:
    """Lists that are ordered by a feature, in part `exactly` sorted by it."""

    feature: str
    increasing: bool
    lists: int
    exactly: int


@dataclass(frozen=True)
class RandomisationCheck:
    """Whether lists marked as random are, with a sentence for the user.

    `random_share` is the share of lists that are not ordered by any feature; `excluded` contains the numbers of those
    that are. `random` is true if position is not associated with any feature in the lists that remain; the
    associations `before` are those of all lists, `after` those of the lists that remain, the strongest first.
    """

    lists: int
    random_share: float
    ordered: tuple[OrderedLists, ...]
    excluded: tuple[int, ...]
    before: tuple[Association, ...]
    after: tuple[Association, ...]
    random: bool
    sentence: str

    @property
    def keep(self) -> NDArray[np.bool_]:
        """Mask of the lists that remain, `[lists]`."""
        mask = np.ones(self.lists, dtype=np.bool_)
        mask[list(self.excluded)] = False
        return mask


def check_randomisation(
    features: Mapping[str, NDArray[Any]], position: NDArray[Any], offsets: Ints, *, exclude: bool = True
) -> RandomisationCheck:
    """Test whether lists were shown in random order, and find those that are ordered by a feature.

    For every feature and list, ρ is the rank correlation (Spearman) of feature and position. In random order, ρ has
    mean 0 and variance 1 / (n − 1), with or without ties. Over lists,

        z = Σ_l (n_l − 1) ρ_l / √Σ_l (n_l − 1)      and      spread_z = Σ_l ((n_l − 1) ρ_l² − 1) / √(2 · lists)

    test whether position is associated with the feature in the same direction in all lists, or in some direction in
    some lists. A list is ordered by a feature if ρ is too large for chance: by Student's t with n − 2 degrees of
    freedom, but at least 2 Π t! / n!, the probability that n items with t of each value are sorted in either direction,
    with the false discovery rate over all features and lists at 1 % (Benjamini & Hochberg, JRSS B 1995). This includes
    exactly sorted lists, if long enough that chance does not sort them.

    Args:
        features: `[rows]` of each numeric feature; NaN is left out. Features that an outcome of the list determines,
            such as clicks, do not belong here.
        position: `[rows]`, from 1, distinct within a list.
        offsets: `[lists + 1]`.
        exclude: leave out ordered lists, and test again without them.

    >>> rng = np.random.default_rng(0)
    >>> price = rng.random((50, 12))
    >>> price[:5].sort(axis=1)
    >>> position = np.tile(np.arange(1, 13), 50)
    >>> check = check_randomisation({"price": price.ravel()}, position, np.arange(0, 601, 12))
    >>> check.sentence
    '90.0 % of the lists marked as random are; 10.0 % are sorted by price and are left out'
    >>> check.excluded, check.random
    ((0, 1, 2, 3, 4), True)
    """
    _check_offsets(offsets, len(position))
    _check_positions(position)
    numbers = {name: np.asarray(values, dtype=np.float64) for name, values in features.items()}
    for name, values in numbers.items():
        if values.shape != np.shape(position):
            raise ValueError(f"feature '{name}' must have shape [{len(position)}]; got shape {list(values.shape)}")
    L, rows = len(offsets) - 1, list_ids(offsets)
    within = [_rank_correlations(values, np.asarray(position), rows, L) for values in numbers.values()]
    everything = np.ones(L, dtype=np.bool_)
    before = _associations(list(numbers), within, everything)
    found = _ordered_lists(within)
    number, feature, increasing, exactly = found if exclude else (each[:0] for each in found)
    keep = everything.copy()
    keep[number] = False
    after = _associations(list(numbers), within, keep) if len(number) else before
    ordered = []
    for column, up in sorted(set(zip(feature.tolist(), increasing.tolist(), strict=True))):
        same = (feature == column) & (increasing == up)
        ordered.append(OrderedLists(list(numbers)[column], up, int(same.sum()), int(exactly[same].sum())))
    ordered.sort(key=lambda each: -each.lists)
    random = not any(min(each.p_value, each.spread_p_value) < ASSOCIATION_LEVEL for each in after)
    share = float(keep.mean()) if L else nan
    sentence = _sentence(L, ordered, after, random=random)
    excluded = tuple(np.flatnonzero(~keep).tolist())
    return RandomisationCheck(L, share, tuple(ordered), excluded, before, after, random, sentence)


@dataclass(frozen=True, eq=False)
class _RankCorrelations:
    """Rank correlations of one feature with position; all `[lists]`."""

    rho: Floats  # NaN where the feature does not vary
    size: Ints  # items with a value
    p_value: Floats
    exactly: NDArray[np.bool_]


def _rank_correlations(values: Floats, position: NDArray[Any], rows: Ints, L: int) -> _RankCorrelations:
    given = ~np.isnan(values)
    x, k, home = values[given], position[given], rows[given]
    size = np.bincount(home, minlength=L)
    centre = (size[home] + 1) / 2
    rank, place = _ranks_in_lists(x, home) - centre, _ranks_in_lists(k, home) - centre
    squares = np.bincount(home, rank**2, L) * np.bincount(home, place**2, L)
    rho = np.full(L, np.nan)
    np.divide(np.bincount(home, rank * place, L), np.sqrt(squares), out=rho, where=squares > 0)
    # Sorted either way, up to ties.
    order = np.lexsort((k, home))
    step, same = np.sign(np.diff(x[order])), np.diff(home[order]) == 0
    falls, rises = (np.bincount(home[order][1:][same & (step == sign)], minlength=L) for sign in (-1, 1))
    exactly = (squares > 0) & ((falls == 0) | (rises == 0))
    # Probabilities that chance would do as much.
    by_value = np.lexsort((x, home))
    start = np.concatenate([[True], (np.diff(x[by_value]) != 0) | (np.diff(home[by_value]) != 0)])[: len(x)]
    first = np.flatnonzero(start)
    ties = np.bincount(home[by_value][first], gammaln(np.diff(np.append(first, len(x))) + 1), L)
    sorted_by_chance = np.exp(np.minimum(np.log(2) + ties - gammaln(size + 1), 0))
    long = (size >= _SHORTEST_LIST) & (squares > 0)
    freedom = np.where(long, size - 2, 1)
    bounded = np.where(long, np.minimum(np.abs(rho), 1 - 1e-15), 0)
    tail = 2 * stdtr(freedom, -bounded * np.sqrt(freedom / (1 - bounded**2)))
    return _RankCorrelations(rho, size, np.where(long, np.maximum(tail, sorted_by_chance), 1.0), exactly)


def _associations(
    names: Sequence[str], within: Sequence[_RankCorrelations], keep: NDArray[np.bool_]
) -> tuple[Association, ...]:
    """Test the rank correlations of the kept lists; features that vary in no list are left out."""
    rows = []
    for name, each in zip(names, within, strict=True):
        tested = keep & ~np.isnan(each.rho)
        lists, rho, weight = int(tested.sum()), each.rho[tested], each.size[tested] - 1.0
        if lists == 0:
            continue
        total, squares = weight.sum(), np.sum(weight * rho**2)
        z, spread_z = np.sum(weight * rho) / np.sqrt(total), (squares - lists) / np.sqrt(2 * lists)
        rows.append((name, lists, float(np.sum(weight * rho) / total), float(z), squares / lists, float(spread_z)))
    p_values = [2 * ndtr(-abs(row[3])) for row in rows] + [ndtr(-row[5]) for row in rows]
    adjusted = holm(p_values).tolist()
    found = [
        Association(name, lists, correlation, z, p_value, float(spread), spread_z, spread_p_value)
        for (name, lists, correlation, z, spread, spread_z), p_value, spread_p_value in zip(
            rows, adjusted[: len(rows)], adjusted[len(rows) :], strict=True
        )
    ]
    return tuple(sorted(found, key=lambda each: min(each.p_value, each.spread_p_value)))


def _ordered_lists(within: Sequence[_RankCorrelations]) -> tuple[Ints, Ints, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the ordered lists, the feature that orders each most clearly, whether it increases, and if exactly."""
    candidates = [np.flatnonzero(each.p_value < FALSE_DISCOVERY_RATE) for each in within]
    number = np.concatenate([*candidates, np.zeros(0, dtype=np.int64)])
    feature = np.repeat(np.arange(len(within)), [len(each) for each in candidates])
    p_value = np.concatenate([*(each.p_value[at] for each, at in zip(within, candidates, strict=True)), np.zeros(0)])
    rho = np.concatenate([*(each.rho[at] for each, at in zip(within, candidates, strict=True)), np.zeros(0)])
    exactly = np.concatenate(
        [*(each.exactly[at] for each, at in zip(within, candidates, strict=True)), np.zeros(0, dtype=np.bool_)]
    )
    tests = sum(int((~np.isnan(each.rho)).sum()) for each in within)
    order = np.argsort(p_value, kind="stable")
    passed = np.flatnonzero(p_value[order] * tests <= FALSE_DISCOVERY_RATE * np.arange(1, len(order) + 1))
    order = order[: passed[-1] + 1] if len(passed) else order[:0]
    number, first = np.unique(number[order], return_index=True)
    chosen = order[first]
    return number, feature[chosen], rho[chosen] > 0, exactly[chosen]


def _sentence(lists: int, ordered: Sequence[OrderedLists], after: Sequence[Association], *, random: bool) -> str:
    totals: dict[str, int] = {}
    for each in ordered:
        totals[each.feature] = totals.get(each.feature, 0) + each.lists
    out = sum(totals.values())
    if out == 0:
        text = "none of the lists marked as random is sorted by a feature"
    else:
        names = sorted(totals, key=lambda name: -totals[name])
        by = "sorted" if all(each.exactly == each.lists for each in ordered) else "ordered"
        share, left_out = _percent(out / lists), f"{by} by {join_names(names, most=3)} and are left out"
        # Without the claim that the others are random, unless there are any, and they are.
        text = f"{share} of the lists marked as random are {left_out}"
        if random and out < lists:
            text = f"{_percent(1 - out / lists)} of the lists marked as random are; {share} are {left_out}"
    if random:
        return text
    worst = after[0]
    remaining = "in the others" if out else "within lists"
    if worst.p_value <= worst.spread_p_value:
        how = f"a mean rank correlation of {worst.correlation:+.2f}, p = {worst.p_value:.1g}"
    else:
        how = f"rank correlations vary {worst.spread:.1f} times as much as by chance, p = {worst.spread_p_value:.1g}"
    return f"{text}; but {remaining} position still depends on {worst.feature} ({how}), so the order is not random"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# Shared helpers


def _sums(group: Ints, rows: NDArray[Any], groups: int) -> Floats:
    """Sum the rows of each group, `[groups]`."""
    return np.asarray(np.bincount(group, rows, groups), dtype=np.float64)


def _ranks_in_lists(values: NDArray[Any], home: Ints) -> Floats:
    """Return the rank of each row among those of its list, from 1, ties at their mean.

    >>> _ranks_in_lists(np.array([5.0, 3.0, 5.0, 9.0]), np.array([0, 0, 0, 1])).tolist()
    [2.5, 1.0, 2.5, 1.0]
    """
    order = np.lexsort((values, home))
    sorted_values, sorted_home = values[order], home[order]
    new_list = np.concatenate([[True], np.diff(sorted_home) != 0])[: len(order)]
    new_run = new_list | np.concatenate([[True], np.diff(sorted_values) != 0])[: len(order)]
    run = offsets_of_runs(np.cumsum(new_run))
    middle = (run[:-1] + run[1:] - 1) / 2
    start = np.flatnonzero(new_list)[np.cumsum(new_list) - 1]
    ranks = np.empty(len(order))
    ranks[order] = np.repeat(middle, np.diff(run)) - start + 1
    return ranks


def _check_offsets(offsets: Ints, rows: int) -> None:
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 1).any():
        raise ValueError(f"offsets must increase from 0 to the number of rows, {rows}; got {list(offsets[:3])} …")


def _check_positions(position: NDArray[Any]) -> None:
    if not np.issubdtype(np.asarray(position).dtype, np.integer):
        raise ValueError(f"position must be whole numbers; got {np.asarray(position).dtype}")
    if len(position) and np.min(position) < 1:
        raise ValueError(f"position must be at least 1; got {np.min(position)}")


def _check_order(positions: NDArray[Any], lists: RandomisedLists) -> None:
    if np.shape(positions) != np.shape(lists.position):
        wanted = list(np.shape(lists.position))
        raise ValueError(f"positions must have shape {wanted}; got shape {list(np.shape(positions))}")
    in_order = np.asarray(positions)[np.lexsort((positions, lists.lists))]
    wrong = in_order != np.arange(len(in_order)) - lists.offsets[lists.lists] + 1
    if wrong.any():
        number = lists.lists[np.flatnonzero(wrong)[0]]
        length = lists.offsets[number + 1] - lists.offsets[number]
        raise ValueError(f"positions must be the ranks 1 to {length} of the items of list {number}, each once")


@dataclass(frozen=True)
class RandomisedEvaluation:
    """What policies earn on lists that were shown in random order.

    Attributes:
        check: whether the lists are in random order; those that are ordered by a feature are left out.
        lists, queries: how many remain.
        utility: the value per list of each policy, by name; `as shown` is the order in which they were shown. Empty if
            no list with a click remains.
        difference: the difference of each other policy to it, paired by query.
    """

    check: RandomisationCheck
    lists: int
    queries: int
    utility: dict[str, Interval]
    difference: dict[str, Comparison]

    @property
    def warning(self) -> str | None:
        """Why nothing is estimated; None if it is."""
        if self.utility:
            return None
        why = "none of the lists that remain has a click" if self.lists else "no list remains"
        return f"nothing is estimated on lists in random order: {self.check.sentence}, and {why}"


def evaluate_randomised(
    lists: RandomisedLists, features: Mapping[str, NDArray[Any]], orders: Mapping[str, NDArray[Any]]
) -> RandomisedEvaluation:
    """Check that lists are in random order, and estimate what policies earn on those that are.

    Args:
        lists: impressions of lists that are marked as random.
        features: numeric features `[rows]` by name.
        orders: the positions `[rows]` that each policy gives, by name.
    """
    check = check_randomisation(features, lists.position, lists.offsets)
    rows = check.keep[lists.lists]
    kept = lists.select(check.keep)
    queries = len(np.unique(kept.query))
    if not np.any(kept.click):
        return RandomisedEvaluation(check, len(kept), queries, {}, {})
    curve = fit_position_curve(kept)
    return RandomisedEvaluation(
        check=check,
        lists=len(kept),
        queries=queries,
        utility={"as shown": estimate_policy(kept, None, curve)}
        | {name: estimate_policy(kept, order[rows], curve) for name, order in orders.items()},
        difference={name: compare_policies(kept, order[rows], None, curve) for name, order in orders.items()},
    )
