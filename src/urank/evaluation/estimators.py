"""Off-policy estimators of the mean utility per list of a policy, from a log of another policy.

A policy gives each item of a logged list a new position k_i; the log has the item at k_i^log, clicked or not. Like
Eq. 1, all estimators assume that a click depends on the item and its position, not on the items around it. With q the
click table, b the values, c the clicks, and sums over the items that have a place under the policy:

| estimator         | per list                                      | unbiased if                                  |
|-------------------|-----------------------------------------------|----------------------------------------------|
| `direct`          | Σ q(k) b                                      | the table is right                           |
| `ratio`           | Σ c w b,  w = q(k) / max(q(k_log), floor)     | q(k) / q(k_log) is, no weight is floored     |
| `self_normalised` | direct · Σ c w b / Σ q(k_log) w b             | the table is, up to a constant factor        |
| `doubly_robust`   | direct + Σ w' (c − q(k_log)) b                | the table is, or the propensities are        |
| `ips`             | Σ w' c b,  w' = 1[k = k_log] / propensity     | the propensities are                         |
| `snips`           | Σ w' c b · placed / Σ w'                      | the propensities are, and queries are many   |

`ratio` is Eq. 3 of the paper. Floored weights bias it downwards; `self_normalised` divides it by its expectation under
the model, which removes this bias. Items that the policy shows and the log did not also bias it downwards: they have no
click, w = 0 and q(k_log) = 0, and only the estimators with the term `direct` count them, by the table alone. Without
propensities, `doubly_robust` uses the floored w for w' and is `ratio` without the bias of the floor, but not robust to
a wrong table.

All estimators are functions of per-list sums (`list_terms`). Lists of one query are not independent, so their terms are
summed (`Terms.by`), and `query_values` returns one value per query for `urank.evaluation.intervals`. Whether the log
contains enough evidence is checked by `urank.evaluation.policy_evaluation.support`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from urank.errors import ConfigError
from urank.ranking.utility import FLOOR, Array, Mask, check_order, has_place, inverse_logged, utility, utility_of_items

REFIT = "refit"
ESTIMATORS = ("direct", "ratio", "self_normalised", "doubly_robust", "ips", "snips")
"""Estimators by a click table; `refit` (`urank.evaluation.refit`) is the default of an evaluation."""

Sums = NDArray[np.float64]
TermsT = TypeVar("TermsT", "Terms", "Weighted")


@dataclass(frozen=True, eq=False)
class LoggedBatch:
    """A batch of logged lists with the click table of the evaluation.

    Args:
        table: `[B, n, K]`, P(click | item, k) by the click model of the evaluation.
        position: `[B, n]`, the logged position of each item, from 1 up. Below position K it was not shown.
        click: `[B, n]`, 0 or 1; 0 for items that were not shown.
        value: `[B, n]`, the value b_i of a click on each item.
        where: `[B, n]`, true where there is an item.
        propensity: `[B, n]`, P(item at its logged position | query), known by the design of the logging; None if
            absent. Ignored for items that were not shown.
    """

    table: Array
    position: Array
    click: Array
    value: Array
    where: Mask
    propensity: Array | None = None

    def __post_init__(self) -> None:
        mask = check_order(self.position, self.where)
        shown = has_place(self.table, self.position, where=mask)
        _check_items(self.click, mask, "click", "0 or 1", lambda click: (click == 0) | (click == 1))
        if (below := mask & ~shown & (self.click == 1)).any():
            K, given = self.table.shape[2], self.position[below][0]
            raise ValueError(f"position must be at most K = {K} where there is a click; got {given}")
        _check_items(self.value, mask, "value", "finite", np.isfinite)
        if self.propensity is not None:
            _check_items(self.propensity, shown, "propensity", "above 0 and at most 1", lambda p: (p > 0) & (p <= 1))

    @property
    def shown(self) -> Mask:
        """The items that were shown, `[B, n]`: those at positions up to K."""
        return np.asarray(self.where & (self.position <= self.table.shape[2]))


@dataclass(frozen=True, eq=False)
class Weighted:
    """Sums over the items that have a place, with weights w; all `[B]`."""

    clicked: Sums  # Σ c w b
    modelled: Sums  # Σ q(k_log) w b, the expectation of `clicked` under the model
    weight: Sums  # Σ w
    weight_squared: Sums  # Σ w²


@dataclass(frozen=True, eq=False)
class Terms:
    """Sums over the items of each list or, after `by`, of each query; all `[B]` and additive."""

    lists: Sums  # how many lists
    logged_value: Sums  # Σ c b as logged, down to the cutoff
    placed: Sums  # how many items have a place under the policy; all further sums are over these items
    as_logged: Sums  # how many have the place they were logged at
    floored: Sums  # how many have a logged click probability below the floor
    unseen: Sums  # how many the logged list did not show
    direct: Sums  # Σ q(k) b
    ratio: Weighted  # with the weights q(k) / max(q(k_log), floor)
    ips: Weighted | None  # with the weights 1[k = k_log] / propensity; None without propensities

    def by(self, group: Array, groups: int) -> Terms:
        """Sum over the lists of each group, `[groups]`; one without lists does not affect any estimate.

        `group` `[B]` is the index of each list's query, 0 … groups − 1.
        """
        if np.shape(group) != self.lists.shape or not np.issubdtype(group.dtype, np.integer):
            given = f"{group.dtype} of shape {list(np.shape(group))}"
            raise ValueError(f"group must be whole numbers of shape {list(self.lists.shape)}; got {given}")
        if (outside := (group < 0) | (group >= groups)).any():
            raise ValueError(f"group must be from 0 to {groups - 1}; got {group[outside][0]}")
        return _combine([self], lambda sums: np.bincount(group.astype(np.int64), sums[0], minlength=groups))

    def __add__(self, other: Terms) -> Terms:
        """Add elementwise: the terms of the same queries from two parts of a log."""
        return _combine([self, other], lambda sums: sums[0] + sums[1])

    @staticmethod
    def concatenate(parts: Sequence[Terms]) -> Terms:
        """Concatenate the terms of all parts, in order."""
        if len(parts) == 0:
            raise ValueError("parts must contain at least one Terms; got none")
        return _combine(parts, np.concatenate)

    def to_array(self) -> NDArray[np.float64]:
        """Return all sums, a row for each, `[sums, B]`."""
        rows: list[Sums] = []
        _combine([self], lambda sums: rows.append(sums[0]))
        return np.stack(rows)

    @staticmethod
    def from_array(array: NDArray[np.float64]) -> Terms:
        """Invert `to_array`.

        >>> terms = Terms(*np.eye(7), Weighted(*np.ones((4, 7))), None)
        >>> bool((Terms.from_array(terms.to_array()).direct == terms.direct).all())
        True
        """
        names = [field.name for field in fields(Terms)][:7]
        ratio, ips = Weighted(*array[7:11]), Weighted(*array[11:]) if len(array) > 11 else None
        return Terms(**dict(zip(names, array[:7], strict=True)), ratio=ratio, ips=ips)


def list_terms(logged: LoggedBatch, positions: Array, *, cutoff: int | None = None, floor: float = FLOOR) -> Terms:
    """Compute the terms of each list for a policy.

    Args:
        logged: B lists.
        positions: `[B, n]`, the 1-based position that the policy gives each item; no place when above min(K, cutoff).
        cutoff: count only this many first positions; all K by default.
        floor: lower bound of a logged click probability in the ratio weights.

    The two apps of the introduction, logged in order, the second clicked; the policy swaps them.

    >>> table = np.array([[[0.50, 0.48], [0.45, 0.30]]])
    >>> order, click = np.array([[1, 2]]), np.array([[0, 1]])
    >>> logged = LoggedBatch(table, order, click, value=np.ones((1, 2)), where=np.ones((1, 2), dtype=bool))
    >>> terms = list_terms(logged, np.array([[2, 1]]))
    >>> terms.direct.round(2).tolist(), terms.ratio.clicked.round(2).tolist()  # 0.48 + 0.45, 1 · 0.45 / 0.30
    ([0.93], [1.5])
    """
    table, where = logged.table, logged.where
    if np.shape(positions) != where.shape:
        raise ValueError(f"positions must have shape {list(where.shape)}; got shape {list(np.shape(positions))}")
    placed = has_place(table, positions, where=where, cutoff=cutoff)
    as_logged = placed & (positions == logged.position)
    earned = np.where(where, logged.click, 0) * np.where(where, logged.value, 0.0)
    expected = utility_of_items(table, logged.position, value=logged.value, where=where)
    inverse, floored = inverse_logged(table, logged.position, where=where, floor=floor)
    ratio = utility_of_items(table, positions, where=where, cutoff=cutoff) * inverse
    # 1 before the division: the padding of `propensity` is arbitrary and may be 0.
    ips = None if logged.propensity is None else as_logged / np.where(as_logged, logged.propensity, 1.0)
    return Terms(
        lists=np.ones(len(where)),
        logged_value=_sum(earned * has_place(table, logged.position, where=where, cutoff=cutoff)),
        placed=_sum(placed),
        as_logged=_sum(as_logged),
        floored=_sum(placed & floored),
        unseen=_sum(placed & ~logged.shown),
        direct=utility(table, positions, value=logged.value, where=where, cutoff=cutoff),
        ratio=_weighted(ratio, earned, expected),
        ips=None if ips is None else _weighted(ips, earned, expected),
    )


def needs_propensity(estimator: str) -> bool:
    """Return whether an estimator needs the propensity of each logged position.

    >>> [name for name in ESTIMATORS if needs_propensity(name)]
    ['ips', 'snips']
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator must be one of {', '.join(ESTIMATORS)}; got {estimator!r}")
    return estimator in ("ips", "snips")


def query_values(terms: Terms, estimator: str) -> NDArray[np.float64]:
    """Return one value per query whose mean is the estimate of the mean utility per list.

    With S_q the sum over the n_q lists of query q, the mean per list is μ = Σ S / Σ n, and the values are

        ψ_q = μ + (S_q − μ n_q) / mean(n)

    Their mean is μ, and their variance over Q is its cluster-robust variance (the delta method). Estimators with
    several sums in numerator and denominator are linearised in the same way.

    Args:
        terms: one entry for each query.
        estimator: one of `ESTIMATORS`.

    Returns:
        `[Q]`; all NaN if the estimate is undefined: `snips` if no placement is the logged one, `self_normalised` if the
        table excludes clicks on all placed items where they were logged.

    >>> table, mask = np.array([[[0.5]], [[0.2]], [[0.3]]]), np.ones((3, 1), dtype=bool)
    >>> logged = LoggedBatch(table, np.array([[1], [1], [1]]), np.zeros((3, 1)), np.ones((3, 1)), mask)
    >>> terms = list_terms(logged, logged.position).by(np.array([0, 1, 1]), 2)  # two queries, the second with two lists
    >>> query_values(terms, "direct").round(3).tolist()  # μ = 1/3:  μ + (0.5 − μ) / 1.5,  μ + (0.5 − 2 μ) / 1.5
    [0.444, 0.222]
    """
    if needs_propensity(estimator) and terms.ips is None:
        raise ConfigError(f"estimator '{estimator}' needs the propensity of each logged position; the log has none")
    weighted = terms.ratio if terms.ips is None else terms.ips
    above, below = {
        "direct": ([terms.direct], []),
        "ratio": ([terms.ratio.clicked], []),
        "self_normalised": ([terms.direct, terms.ratio.clicked], [terms.ratio.modelled]),
        "doubly_robust": ([terms.direct + (weighted.clicked - weighted.modelled)], []),
        "ips": ([weighted.clicked], []),
        "snips": ([weighted.clicked, terms.placed], [weighted.weight]),
    }[estimator]
    return linearised(above, [*below, terms.lists])


def logged_values(terms: Terms) -> NDArray[np.float64]:
    """Return the observed values of the logged order, in the form of `query_values`: the baseline of all policies."""
    return linearised([terms.logged_value], [terms.lists])


def linearised(above: Sequence[Sums], below: Sequence[Sums]) -> NDArray[np.float64]:
    """Return values `[Q]` with mean θ = Π mean(a) / Π mean(b) and, over √Q, its standard error by the delta method.

        ψ_q = θ + Σ_a ∂θ/∂mean(a) · (a_q − mean(a)) − Σ_b θ / mean(b) · (b_q − mean(b))

    If the denominator is 0, they are 0 if the numerator is 0 too, and NaN otherwise.

    The factors a of the numerator and b of the denominator are sums by query `[Q]`.

    >>> linearised([np.array([3.0, 1.0])], [np.array([1.0, 3.0])]).tolist()  # 4/4:  1 + (3 − 1) / 2,  1 + (1 − 3) / 2
    [2.0, 0.0]
    """
    if len(below[-1]) == 0:
        raise ValueError("terms must contain at least one query; got none")
    tops, bottoms = np.array([a.mean() for a in above]), np.array([b.mean() for b in below])
    if (bottoms == 0).any():
        return np.full(len(below[-1]), nan if tops.any() else 0.0)
    estimate = tops.prod() / bottoms.prod()
    values = np.full(len(below[-1]), estimate)
    for j, a in enumerate(above):
        # The product of the others, not θ / mean(a): a log without a click has a mean of 0.
        values += np.delete(tops, j).prod() / bottoms.prod() * (a - tops[j])
    for j, b in enumerate(below):
        values -= estimate / bottoms[j] * (b - bottoms[j])
    return values


def _combine(parts: Sequence[TermsT], together: Callable[[list[Sums]], Any]) -> TermsT:
    """Combine terms field by field, recursively."""
    combined: dict[str, Any] = {}
    for field in fields(parts[0]):
        each = [found for part in parts if (found := getattr(part, field.name)) is not None]
        if len(each) not in (0, len(parts)):
            raise ValueError(f"terms must all have propensities or none; got them in {len(each)} of {len(parts)}")
        nested = len(each) > 0 and isinstance(each[0], Weighted)
        combined[field.name] = (_combine(each, together) if nested else together(each)) if each else None
    return type(parts[0])(**combined)


def _check_items(values: Array, mask: Mask, name: str, requirement: str, allowed: Callable[[Array], Mask]) -> None:
    if np.shape(values) != mask.shape:
        raise ValueError(f"{name} must have shape {list(mask.shape)}; got shape {list(np.shape(values))}")
    if (refused := mask & ~allowed(values)).any():
        raise ValueError(f"{name} must be {requirement}; got {values[refused][0]}")


def _weighted(weight: NDArray[np.float64], earned: NDArray[np.float64], expected: NDArray[np.float64]) -> Weighted:
    return Weighted(_sum(earned * weight), _sum(expected * weight), _sum(weight), _sum(weight**2))


def _sum(items: Array) -> Sums:
    return np.asarray(items.sum(axis=1), dtype=np.float64)
