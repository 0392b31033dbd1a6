"""Test of the assumption that a click depends on the item and its position, not on the items around it.

Click tables, and every estimate that reads them, take P(click) of an item at a position to be the same whatever else
the list contains. Users who stop after a click (the cascade model) or compare neighbours violate this.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit, ndtr

from urank.evaluation.intervals import holm
from urank.log.ragged import list_ids

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVEL = 0.05
_EXPECTED_WITHOUT_CLICK = 10  # lists; if none of these is in the log, it does not store them
_LEAST = 1e-7  # predictions are kept this far from 0 and 1, as in training


@dataclass(frozen=True)
class ScoreTest:
    """A score test of one covariate: z, its two-sided p-value, and that adjusted for both tests (Holm).

    All are NaN if the log cannot be tested.
    """

    z: float
    p_value: float
    adjusted_p: float


@dataclass(frozen=True)
class IndependenceTest:
    """Whether clicks depend on what is above, given item and position, with a sentence for the user.

    `clicks_above` tests the number of clicks above, `item_above` the predicted attractiveness of the item directly
    above. `independent` is false if either adjusted p-value is below the level, and true if the log has nothing to
    test. `only_clicked` is true if the log stores only lists with a click, so that clicks above cannot be tested.
    `predicted_below` and `observed_below` are click rates of the `rows_below` items below a click.
    """

    clicks_above: ScoreTest
    item_above: ScoreTest
    independent: bool
    only_clicked: bool
    rows_below: int
    predicted_below: float
    observed_below: float
    sentence: str


def independence_test(
    p: NDArray[Any],
    click: NDArray[Any],
    position: NDArray[Any],
    offsets: Ints,
    query: NDArray[Any],
    *,
    level: float = LEVEL,
) -> IndependenceTest:
    """Test whether the click on an item depends on what is above it, given item and position.

    For a covariate x of what is above and the residual c − p of each item that has one above,

        z = Σ x̃ (c − p) / √Σ_q (Σ_{rows of q} x̃ (c − p))²

    where x̃ is the residual of a regression of x, with weights p (1 − p), on position, logit p and its square, and the
    mean attractiveness of the list: the score test of a logistic regression with the offset logit p and these as
    nuisances, clustered by query. Errors of p that are linear in the nuisances (positions, or predictions too extreme)
    therefore do not count as dependence. The two covariates are

    1. the number of clicks above in the same list, with their expected number as a further nuisance: z < 0 if users
       stop after a click. z > 0 has another usual cause: some users, or some queries, click more than p predicts, and
       then clicks occur together without depending on each other;
    2. the attractiveness of the item directly above, log p less the mean of log p at its position.

    The test requires predictions for queries on which the click model was not trained. In a log that stores only lists
    with a click, a click makes others of the list less likely, whatever the users do. If every list has a click where
    at least ten without one are expected, Σ_l Π (1 − p) ≥ 10, the first test is therefore left out.

    Args:
        p: `[rows]`, P(click) of each item at its logged position by a click model.
        click: `[rows]`, 0 or 1.
        position: `[rows]`, from 1, distinct within a list.
        offsets: `[lists + 1]`, see `urank.log.ragged`.
        query: `[lists]`, the query of each list.
        level: of the two tests together.

    >>> rng = np.random.default_rng(0)
    >>> p = rng.uniform(0.1, 0.6, size=(400, 5))
    >>> click = rng.random((400, 5)) < p
    >>> first_only = click & (click.cumsum(axis=1) == 1)  # users stop after a click
    >>> rows = (np.tile(np.arange(1, 6), 400), np.arange(0, 2001, 5), np.arange(400))
    >>> independence_test(p.ravel(), click.ravel(), *rows).independent
    True
    >>> found = independence_test(p.ravel(), first_only.ravel(), *rows)
    >>> found.independent, found.clicks_above.z < -5
    (False, True)
    """
    _check(p, click, position, offsets, query, level)
    order = np.lexsort((position, list_ids(offsets)))
    lists, place = list_ids(offsets), np.asarray(position)[order].astype(np.int64) - 1
    chance = np.clip(np.asarray(p, dtype=np.float64)[order], _LEAST, 1 - _LEAST)
    clicked = np.asarray(click, dtype=np.float64)[order]
    rows = np.bincount(place)
    attraction = np.log(chance) - (np.bincount(place, np.log(chance)) / np.maximum(rows, 1))[place]
    below = np.flatnonzero(np.arange(len(lists)) > offsets[:-1][lists])  # rows with an item above
    clicks, expected = (_sums_above(each, offsets, lists)[below] for each in (clicked, chance))
    own = logit(chance)
    mean_attraction = (np.bincount(lists, attraction) / np.diff(offsets))[lists]
    nuisances = np.stack([own, own**2, mean_attraction])[:, below]
    _, home = np.unique(query, return_inverse=True)
    rest = (clicked[below], chance[below], place[below], home[lists[below]])
    without_click = np.exp(np.bincount(lists, np.log1p(-chance))).sum()
    only_clicked = bool(np.bincount(lists, clicked).all() and without_click >= _EXPECTED_WITHOUT_CLICK)
    z = (
        nan if only_clicked else _score_z(clicks, np.concatenate([nuisances, expected[None]]), *rest),
        _score_z(attraction[below - 1], nuisances, *rest),
    )
    p_values = [float(2 * ndtr(-abs(each))) for each in z]
    adjusted = holm(p_values).tolist()
    of_clicks, of_item = (ScoreTest(z[j], p_values[j], adjusted[j]) for j in range(2))
    after = below[clicks > 0]
    predicted, observed = (float(each[after].mean()) if len(after) else nan for each in (chance, clicked))
    independent = not any(each < level for each in adjusted)
    sentence = _sentence(of_clicks, of_item, predicted, observed, level)
    if only_clicked:
        sentence += "; whether users stop after a click cannot be tested, because every list of the log has a click"
    return IndependenceTest(of_clicks, of_item, independent, only_clicked, len(after), predicted, observed, sentence)


def _sums_above(values: Floats, offsets: Ints, lists: Ints) -> Floats:
    """Return the sum of the values above each row in its list.

    >>> _sums_above(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 3, 4]), np.array([0, 0, 0, 1])).tolist()
    [0.0, 1.0, 3.0, 0.0]
    """
    before = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(before[:-1] - before[offsets[:-1]][lists])


def _score_z(x: Floats, nuisances: Floats, click: Floats, p: Floats, place: Ints, home: Ints) -> float:
    """Compute z of a covariate; see `independence_test`. NaN if it does not vary given the nuisances."""
    weight = p * (1 - p)
    total = np.bincount(place, weight)

    def within(values: Floats) -> Floats:
        """Subtract the weighted mean of the position."""
        return np.asarray(values - (np.bincount(place, weight * values) / np.where(total > 0, total, 1))[place])

    target, columns = within(x), np.stack([within(each) for each in nuisances])
    fitted = np.linalg.pinv((columns * weight) @ columns.T, hermitian=True) @ ((columns * weight) @ target)
    rest = target - fitted @ columns
    if np.sum(weight * rest**2) <= 1e-12 * max(np.sum(weight * x**2), 1e-300):
        return nan
    by_query = np.bincount(home, rest * (click - p))
    error = float(np.sqrt(np.sum(by_query**2)))
    return float(by_query.sum()) / error if error > 0 else nan


def _sentence(clicks: ScoreTest, item: ScoreTest, predicted: float, observed: float, level: float) -> str:
    if np.isnan(clicks.z) and np.isnan(item.z):
        return "whether clicks depend on the items above cannot be tested: no list has a click or an item above another"
    rates = f"below a click, {observed:.2%} of the items were clicked where {predicted:.2%} were predicted"
    if clicks.adjusted_p < level:
        evidence = f"{rates}, p = {clicks.adjusted_p:.1g}"
        if clicks.z < 0:
            return f"clicks depend on the items above: users click less after a click ({evidence})"
        return f"clicks occur together: some users or queries click more than the click model predicts ({evidence})"
    if item.adjusted_p < level:
        change = "less" if item.z < 0 else "more"
        return (
            f"clicks depend on the items above: items directly below an attractive one are clicked {change} often "
            f"than predicted (z = {item.z:.1f}, p = {item.adjusted_p:.1g})"
        )
    lowest = np.nanmin([clicks.adjusted_p, item.adjusted_p])
    return f"there is no sign that clicks depend on the items above, given item and position (p = {lowest:.2g})"


def _check(
    p: NDArray[Any], click: NDArray[Any], position: NDArray[Any], offsets: Ints, query: NDArray[Any], level: float
) -> None:
    rows = len(p)
    for name, given, length in (
        ("click", click, rows),
        ("position", position, rows),
        ("query", query, len(offsets) - 1),
    ):
        if np.shape(given) != (length,):
            raise ValueError(f"{name} must have shape [{length}]; got shape {list(np.shape(given))}")
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 1).any():
        raise ValueError(f"offsets must increase from 0 to the number of rows, {rows}; got {list(offsets[:3])} …")
    if not ((np.asarray(p) >= 0) & (np.asarray(p) <= 1)).all():
        raise ValueError("p must be probabilities from 0 to 1, without NaN")
    if not np.isin(click, (0, 1)).all():
        raise ValueError("click must be 0 or 1")
    if np.min(position) < 1:
        raise ValueError(f"position must be at least 1; got {np.min(position)}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level}")
