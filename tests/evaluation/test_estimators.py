"""Off-policy estimates: arithmetic, expectations by enumeration, and linearised errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import permutations, product
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from logged_lists import batch, policy
from urank.errors import ConfigError
from urank.evaluation.estimators import (
    ESTIMATORS,
    LoggedBatch,
    Terms,
    Weighted,
    list_terms,
    logged_values,
    needs_propensity,
    query_values,
)
from urank.evaluation.intervals import normal_interval
from urank.ranking.utility import utility

seeds = st.integers(0, 2**32 - 1)
cutoffs = st.none() | st.integers(1, 5)

Positions = NDArray[np.int64]


def flat(terms: Terms) -> dict[str, NDArray[np.float64]]:
    """All sums by name, those of the weights too."""
    found: dict[str, Any] = {}
    for field in fields(terms):
        each = getattr(terms, field.name)
        if isinstance(each, Weighted):
            found |= {f"{field.name}.{inner.name}": getattr(each, inner.name) for inner in fields(each)}
        elif each is not None:
            found[field.name] = each
    return found


def assert_same(found: Terms, expected: Terms) -> None:
    assert flat(found).keys() == flat(expected).keys()
    for name, sums in flat(found).items():
        np.testing.assert_allclose(sums, flat(expected)[name], rtol=1e-12, atol=1e-12, err_msg=name)


def estimate(terms: Terms, estimator: str) -> float:
    return float(query_values(terms, estimator).mean())


def pick(logged: LoggedBatch, index: Any) -> LoggedBatch:
    arrays: dict[str, Any] = {field.name: getattr(logged, field.name) for field in fields(LoggedBatch)}
    return LoggedBatch(**{name: None if each is None else each[index] for name, each in arrays.items()})


def all_clicks(logged: LoggedBatch, true: NDArray[np.float64]) -> tuple[LoggedBatch, NDArray[np.float64]]:
    """The one list of `logged` with every possible click vector, and how likely each is under the true table."""
    n = logged.position.shape[1]
    clicks = np.array(list(product([0, 1], repeat=n)))
    chance = true[0, np.arange(n), logged.position[0] - 1]
    likely = np.where(clicks == 1, chance, 1 - chance).prod(axis=1)
    return replace(pick(logged, np.zeros(len(clicks), dtype=int)), click=clicks), likely


def one_list(seed: int, n: int = 3, K: int = 4) -> tuple[LoggedBatch, Positions]:
    rng = np.random.default_rng(seed)
    logged = LoggedBatch(
        table=rng.uniform(0.02, 1, size=(1, n, K)),
        position=1 + rng.permutation(K)[None, :n],
        click=np.zeros((1, n)),
        value=rng.uniform(0, 10, size=(1, n)),
        where=np.ones((1, n), dtype=bool),
    )
    return logged, 1 + rng.permutation(K + 1)[None, :n]


def all_logs(seed: int) -> tuple[LoggedBatch, NDArray[np.float64], NDArray[np.float64]]:
    """Every log that a random logging policy and clicks under a true table can bring about, for one list of 3 items.

    The table of the result is a wrong one, its propensities are right: what either order has, added up.

    Returns:
        the logs, how likely each is, and the true table `[1, 3, 3]`.
    """
    rng = np.random.default_rng(seed)
    true, wrong = rng.uniform(0.05, 1, size=(2, 1, 3, 3))
    value = rng.uniform(0, 10, size=(1, 3))
    orders = np.array(list(permutations([1, 2, 3])))
    chosen = rng.dirichlet(np.ones(6)) * 0.9 + 0.1 / 6
    at = (orders[:, :, None] == np.arange(1, 4)) * chosen[:, None, None]  # [order, item, position]
    marginal = at.sum(axis=0)
    logs, likely = [], []
    for order, probability in zip(orders, chosen, strict=True):
        logged = LoggedBatch(
            table=wrong,
            position=order[None, :],
            click=np.zeros((1, 3)),
            value=value,
            where=np.ones((1, 3), dtype=bool),
            propensity=marginal[np.arange(3), order - 1][None, :],
        )
        clicked, chance = all_clicks(logged, true)
        logs.append(clicked)
        likely.append(probability * chance)
    together = LoggedBatch(
        **{f.name: np.concatenate([getattr(log, f.name) for log in logs]) for f in fields(LoggedBatch)}
    )
    return together, np.concatenate(likely), true


# Arithmetic


def test_terms_by_hand() -> None:
    logged = LoggedBatch(
        table=np.array([[[0.50, 0.48, 0.40], [0.45, 0.30, 0.001], [0.20, 0.10, 0.05]]]),
        position=np.array([[1, 3, 2]]),
        click=np.array([[1, 1, 0]]),
        value=np.array([[2.0, 1.0, 4.0]]),
        where=np.array([[True, True, True]]),
        propensity=np.array([[0.5, 0.25, 0.8]]),
    )
    terms = list_terms(logged, np.array([[3, 1, 2]]), cutoff=2, floor=0.01)  # the first item has no place
    w = [0, 0.45 / 0.01, 0.10 / 0.10]
    expected = {
        "lists": 1,
        "logged_value": 1 * 2.0,  # the second item was logged below the cutoff
        "placed": 2,
        "as_logged": 1,
        "floored": 1,
        "unseen": 0,
        "direct": 0.45 * 1.0 + 0.10 * 4.0,
        "ratio.clicked": w[1] * 1.0,
        "ratio.modelled": 0.001 * w[1] * 1.0 + 0.10 * w[2] * 4.0,
        "ratio.weight": w[1] + w[2],
        "ratio.weight_squared": w[1] ** 2 + w[2] ** 2,
        "ips.clicked": 0,
        "ips.modelled": 1 / 0.8 * 0.10 * 4.0,
        "ips.weight": 1 / 0.8,
        "ips.weight_squared": 1 / 0.8**2,
    }
    assert flat(terms).keys() == expected.keys()
    for name, sums in flat(terms).items():
        np.testing.assert_allclose(sums, [expected[name]], err_msg=name)
        assert sums.dtype == np.float64
    assert query_values(terms, "direct")[0] == terms.direct[0]
    np.testing.assert_allclose(
        estimate(terms, "self_normalised"), expected["direct"] * expected["ratio.clicked"] / expected["ratio.modelled"]
    )
    np.testing.assert_allclose(estimate(terms, "doubly_robust"), expected["direct"] - expected["ips.modelled"])
    assert estimate(terms, "snips") == 0


def test_items_that_were_not_shown_by_hand() -> None:
    """Four candidates, two positions: the policy shows the third, which the log has at 5, and keeps the first."""
    logged = LoggedBatch(
        table=np.array([[[0.5, 0.4], [0.3, 0.2], [0.6, 0.1], [0.7, 0.6]]]),
        position=np.array([[1, 2, 5, 9]]),
        click=np.array([[1, 1, 0, 0]]),
        value=np.array([[2.0, 3.0, 4.0, 5.0]]),
        where=np.ones((1, 4), dtype=bool),
        propensity=np.array([[0.5, 0.25, np.nan, 0.0]]),
    )
    assert logged.shown.tolist() == [[True, True, False, False]]
    terms = list_terms(logged, np.array([[1, 3, 2, 4]]))
    expected = {
        "lists": 1,
        "logged_value": 2.0 + 3.0,
        "placed": 2,
        "as_logged": 1,
        "floored": 0,
        "unseen": 1,
        "direct": 0.5 * 2.0 + 0.1 * 4.0,
        "ratio.clicked": 0.5 / 0.5 * 2.0,
        "ratio.modelled": 0.5 * 0.5 / 0.5 * 2.0,
        "ratio.weight": 0.5 / 0.5,
        "ratio.weight_squared": (0.5 / 0.5) ** 2,
        "ips.clicked": 2.0 / 0.5,
        "ips.modelled": 0.5 * 2.0 / 0.5,
        "ips.weight": 1 / 0.5,
        "ips.weight_squared": 1 / 0.5**2,
    }
    assert flat(terms).keys() == expected.keys()
    for name, sums in flat(terms).items():
        np.testing.assert_allclose(sums, [expected[name]], err_msg=name)
    assert estimate(terms, "ratio") == 2.0
    np.testing.assert_allclose(estimate(terms, "doubly_robust"), 1.0 + 0.4 + (1 - 0.5) * 2.0 / 0.5)
    by_model = list_terms(replace(logged, propensity=None), np.array([[1, 3, 2, 4]]))
    np.testing.assert_allclose(estimate(by_model, "doubly_robust"), 1.0 + 0.4 + (1 - 0.5) * 2.0)
    np.testing.assert_allclose(estimate(by_model, "self_normalised"), (1.0 + 0.4) * 2.0 / 1.0)
    logged_order = list_terms(logged, logged.position)
    assert logged_order.unseen.tolist() == [0.0]
    np.testing.assert_allclose(logged_order.direct, [0.5 * 2.0 + 0.2 * 3.0])
    np.testing.assert_allclose(logged_order.ratio.clicked, [2.0 + 3.0])


def test_an_item_without_a_place_counts_nowhere() -> None:
    logged = LoggedBatch(
        table=np.array([[[0.5, 0.4], [0.2, 0.001]]]),
        position=np.array([[1, 2]]),
        click=np.array([[1, 1]]),
        value=np.array([[1.0, 1.0]]),
        where=np.array([[True, True]]),
        propensity=np.array([[0.5, 0.5]]),
    )
    alone = replace(logged, where=np.array([[True, False]]))
    first_only = np.array([[1, 3]])
    expected = replace(list_terms(alone, first_only), logged_value=np.array([2.0]))
    assert_same(list_terms(logged, first_only), expected)


def test_values_of_queries_by_hand() -> None:
    """Three lists of two queries: 1 of the first, 2 of the second."""
    logged = LoggedBatch(
        table=np.array([[[0.5]], [[0.4]], [[0.2]]]),
        position=np.ones((3, 1), dtype=int),
        click=np.array([[1], [0], [1]]),
        value=np.ones((3, 1)),
        where=np.ones((3, 1), dtype=bool),
        propensity=np.array([[0.5], [0.25], [0.2]]),
    )
    terms = list_terms(logged, logged.position).by(np.array([1, 0, 1]), 2)
    n, S = np.array([1.0, 2.0]), np.array([0.4, 0.5 + 0.2])
    mu = (0.4 + 0.5 + 0.2) / 3
    np.testing.assert_allclose(query_values(terms, "direct"), mu + (S - mu * n) / 1.5)
    np.testing.assert_allclose(estimate(terms, "ips"), (1 / 0.5 + 1 / 0.2) / 3)
    np.testing.assert_allclose(estimate(terms, "snips"), (1 / 0.5 + 1 / 0.2) / (1 / 0.5 + 1 / 0.25 + 1 / 0.2))
    np.testing.assert_allclose(logged_values(terms), 2 / 3 + (np.array([0, 2]) - 2 / 3 * n) / 1.5)


@settings(deadline=None)
@given(seeds)
def test_direct_is_the_utility(seed: int) -> None:
    logged = batch(seed, 5)
    positions = policy(seed, logged)
    expected = utility(logged.table, positions, value=logged.value, where=logged.where)
    np.testing.assert_array_equal(list_terms(logged, positions).direct, expected)


# Expectations, by enumeration


@settings(deadline=None)
@given(seeds, cutoffs)
def test_ratio_is_unbiased_when_the_table_is_true(seed: int, cutoff: int | None) -> None:
    logged, positions = one_list(seed)
    logs, likely = all_clicks(logged, logged.table)
    terms = list_terms(logs, positions.repeat(len(likely), axis=0), cutoff=cutoff, floor=0.001)
    expected = utility(logged.table, positions, value=logged.value, cutoff=cutoff)
    np.testing.assert_allclose(likely @ terms.ratio.clicked, expected[0])


@settings(deadline=None)
@given(seeds)
def test_the_floor_makes_the_ratio_too_low_and_no_other(seed: int) -> None:
    logged, positions = one_list(seed)
    logs, likely = all_clicks(logged, logged.table)
    terms = list_terms(logs, positions.repeat(len(likely), axis=0), floor=0.5)
    direct = utility(logged.table, positions, value=logged.value)[0]
    ratio = likely @ terms.ratio.clicked
    assert ratio <= direct * (1 + 1e-12)
    # Over many lists, a mean of products is the product of means: A · E[B] / C.
    np.testing.assert_allclose(terms.direct * ratio / terms.ratio.modelled, direct)
    np.testing.assert_allclose(likely @ (terms.direct + terms.ratio.clicked - terms.ratio.modelled), direct)


@settings(deadline=None)
@given(seeds, st.floats(0.1, 0.99), st.floats(0.001, 0.5))
def test_self_normalisation_takes_out_a_constant_factor(seed: int, factor: float, floor: float) -> None:
    true, positions = one_list(seed)
    logs, likely = all_clicks(replace(true, table=factor * true.table), true.table)
    terms = list_terms(logs, positions.repeat(len(likely), axis=0), floor=floor)
    expected = utility(true.table, positions, value=true.value)[0]
    np.testing.assert_allclose(terms.direct * (likely @ terms.ratio.clicked) / terms.ratio.modelled, expected)


@settings(deadline=None)
@given(seeds, st.permutations([1, 2, 3]), st.none() | st.integers(1, 3))
def test_propensities_make_ips_and_doubly_robust_unbiased_whatever_the_table(
    seed: int, order: list[int], cutoff: int | None
) -> None:
    logs, likely, true = all_logs(seed)
    positions = np.array([order]).repeat(len(likely), axis=0)
    terms = list_terms(logs, positions, cutoff=cutoff)
    expected = utility(true, positions[:1], value=logs.value[:1], cutoff=cutoff)[0]
    assert terms.ips is not None
    np.testing.assert_allclose(likely.sum(), 1)
    np.testing.assert_allclose(likely @ terms.ips.clicked, expected)
    np.testing.assert_allclose(likely @ (terms.direct + terms.ips.clicked - terms.ips.modelled), expected)
    np.testing.assert_allclose(likely @ terms.ips.weight, terms.placed[0])  # coverage is 1


@settings(deadline=None)
@given(seeds, st.permutations([1, 2, 3]))
def test_doubly_robust_is_unbiased_with_wrong_propensities_when_the_table_is_true(seed: int, order: list[int]) -> None:
    logs, likely, true = all_logs(seed)
    positions = np.array([order]).repeat(len(likely), axis=0)
    wrong = np.random.default_rng(seed).uniform(0.1, 1, size=logs.position.shape)
    # Wrong by placement, not by click: what the logger did cannot depend on what was clicked later.
    wrong = wrong[np.unique(logs.position, axis=0, return_inverse=True)[1].ravel()]
    terms = list_terms(replace(logs, table=true.repeat(len(likely), axis=0), propensity=wrong), positions)
    assert terms.ips is not None
    expected = utility(true, positions[:1], value=logs.value[:1])[0]
    np.testing.assert_allclose(likely @ (terms.direct + terms.ips.clicked - terms.ips.modelled), expected)


# Relations between estimators


@settings(deadline=None)
@given(seeds, cutoffs)
def test_three_estimators_are_one_when_nothing_is_floored(seed: int, cutoff: int | None) -> None:
    logged = batch(seed, 6)
    terms = list_terms(logged, policy(seed, logged), cutoff=cutoff, floor=0.01)
    assert not terms.floored.any()
    ratio = query_values(terms, "ratio")
    np.testing.assert_allclose(query_values(terms, "self_normalised"), ratio, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(query_values(terms, "doubly_robust"), ratio, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(seeds, cutoffs)
def test_the_logged_order_earns_what_was_clicked(seed: int, cutoff: int | None) -> None:
    logged = batch(seed, 6)
    shown = logged.where & (logged.position <= (cutoff or 5))
    earned = np.where(shown, logged.click * np.where(logged.where, logged.value, 0), 0).sum(axis=1)
    terms = list_terms(logged, logged.position, cutoff=cutoff)
    np.testing.assert_allclose(terms.ratio.clicked, earned, rtol=1e-14)
    np.testing.assert_allclose(query_values(terms, "ratio"), earned, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(terms.logged_value, earned)
    np.testing.assert_array_equal(terms.as_logged, terms.placed)
    # The log of a logger that never varies: its propensities are all 1.
    always = list_terms(replace(logged, propensity=np.ones(logged.position.shape)), logged.position, cutoff=cutoff)
    for estimator in ("ips", "snips", "doubly_robust"):
        np.testing.assert_allclose(query_values(always, estimator), earned, rtol=1e-9, atol=1e-9)


# Structure


@settings(deadline=None)
@given(seeds, st.booleans())
def test_padding_means_nothing(seed: int, known: bool) -> None:
    logged = batch(seed, 5, known=known)
    positions = policy(seed, logged)
    clean = LoggedBatch(
        table=np.where(logged.where[..., None], logged.table, 0.5),
        position=np.where(logged.where, logged.position, 99),
        click=np.where(logged.where, logged.click, 1),
        value=np.where(logged.where, logged.value, 1.0),
        where=logged.where,
        propensity=np.where(logged.where, logged.propensity, 1.0) if logged.propensity is not None else None,
    )
    assert_same(list_terms(logged, np.where(logged.where, positions, -7)), list_terms(clean, positions))


@settings(deadline=None)
@given(seeds, st.booleans())
def test_the_order_of_items_and_lists_means_nothing(seed: int, known: bool) -> None:
    logged = batch(seed, 5, known=known)
    positions = policy(seed, logged)
    rng = np.random.default_rng(seed)
    lists, items = rng.permutation(5), rng.permutation(4)
    index = (lists[:, None], items[None, :])
    moved = list_terms(pick(logged, index), positions[index])
    assert_same(moved.by(lists, 5), list_terms(logged, positions))


@settings(deadline=None)
@given(seeds, st.booleans())
def test_parts_of_a_log_add_up(seed: int, known: bool) -> None:
    logged = batch(seed, 7, known=known)
    positions = policy(seed, logged)
    group = np.random.default_rng(seed).integers(0, 3, size=7)
    whole = list_terms(logged, positions).by(group, 3)
    first, rest = (list_terms(pick(logged, part), positions[part]) for part in (slice(3), slice(3, 7)))
    assert_same(Terms.concatenate([first, rest]).by(group, 3), whole)
    assert_same(first.by(group[:3], 3) + rest.by(group[3:], 3), whole)
    assert whole.lists.tolist() == [(group == q).sum() for q in range(3)]


def test_a_query_without_lists_moves_no_estimate() -> None:
    logged = batch(0, 8, known=True)
    terms = list_terms(logged, policy(0, logged))
    for estimator in ESTIMATORS:
        spaced = query_values(terms.by(np.arange(0, 16, 2), 16), estimator)
        np.testing.assert_allclose(spaced.mean(), estimate(terms, estimator))


def test_tables_may_be_float32() -> None:
    logged = batch(0, 8)
    single = list_terms(replace(logged, table=logged.table.astype(np.float32)), policy(0, logged))
    np.testing.assert_allclose(single.ratio.clicked, list_terms(logged, policy(0, logged)).ratio.clicked, rtol=1e-5)
    assert all(sums.dtype == np.float64 for sums in flat(single).values())


# Standard errors


def without(terms: Terms, q: int) -> Terms:
    """The terms of all queries but one."""
    keep = np.delete(np.arange(len(terms.lists)), q)

    def kept(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        return sums[keep]

    inner: dict[str, Any] = {
        name: Weighted(**{f.name: kept(getattr(each, f.name)) for f in fields(Weighted)})
        for name, each in (("ratio", terms.ratio), ("ips", terms.ips))
        if each is not None
    }
    outer: dict[str, Any] = {
        f.name: kept(getattr(terms, f.name)) for f in fields(Terms) if f.name not in ("ratio", "ips")
    }
    return Terms(**outer, **inner)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_the_error_is_that_of_the_jackknife(many: Terms, estimator: str) -> None:
    Q = len(many.lists)
    left_out = np.array([estimate(without(many, q), estimator) for q in range(Q)])
    jackknife = sqrt((Q - 1) / Q * ((left_out - left_out.mean()) ** 2).sum())
    found = normal_interval(query_values(many, estimator))
    assert many.floored.sum() > 0
    np.testing.assert_allclose(found.error, jackknife, rtol=0.01)
    # Value by value: a query's value is by how much the estimate hangs on it.
    influence = (Q - 1) * (found.mean - left_out)
    np.testing.assert_allclose(query_values(many, estimator) - found.mean, influence, atol=0.05 * influence.std())


def test_the_mean_of_the_values_is_the_estimate(many: Terms) -> None:
    lists, ips = many.lists.sum(), many.ips
    assert ips is not None
    expected = {
        "direct": many.direct.sum() / lists,
        "ratio": many.ratio.clicked.sum() / lists,
        "self_normalised": many.direct.sum() * many.ratio.clicked.sum() / many.ratio.modelled.sum() / lists,
        "doubly_robust": (many.direct.sum() + ips.clicked.sum() - ips.modelled.sum()) / lists,
        "ips": ips.clicked.sum() / lists,
        "snips": ips.clicked.sum() * many.placed.sum() / ips.weight.sum() / lists,
    }
    assert set(expected) == set(ESTIMATORS)
    for estimator, value in expected.items():
        np.testing.assert_allclose(estimate(many, estimator), value, rtol=1e-13, err_msg=estimator)


def test_all_estimators_agree_within_their_errors(many: Terms) -> None:
    truth = estimate(many, "direct")  # clicks were drawn from this very table
    for estimator in ("self_normalised", "doubly_robust", "ips", "snips"):
        found = normal_interval(query_values(many, estimator))
        assert abs(found.mean - truth) < 4 * found.error, estimator


def test_a_log_that_cannot_say_says_nan() -> None:
    logged = replace(batch(1, 6, known=True), click=np.zeros((6, 4), dtype=int))
    elsewhere = np.where(logged.position % 5 == 0, 1, logged.position + 1)  # never as logged
    assert np.isnan(query_values(list_terms(logged, elsewhere), "snips")).all()
    assert estimate(list_terms(logged, elsewhere), "ratio") == 0
    ruled_out = np.array([[[0.0, 0.5]]])
    one = LoggedBatch(ruled_out, np.array([[1]]), np.array([[0]]), np.ones((1, 1)), np.ones((1, 1), dtype=bool))
    assert np.isnan(query_values(list_terms(one, np.array([[2]])), "self_normalised")).all()


def test_a_policy_that_places_nothing_earns_nothing() -> None:
    logged = batch(2, 6, known=True)
    terms = list_terms(logged, policy(2, logged) + 100)
    for estimator in ESTIMATORS:
        assert query_values(terms, estimator).tolist() == [0.0] * 6


# Refusals


def test_unknown_estimators_are_refused() -> None:
    logged = batch(0, 2)
    terms = list_terms(logged, policy(0, logged))
    message = "estimator must be one of direct, ratio, self_normalised, doubly_robust, ips, snips; got 'magic'"
    with pytest.raises(ConfigError, match=message):
        query_values(terms, "magic")
    with pytest.raises(ConfigError, match=message):
        needs_propensity("magic")


@pytest.mark.parametrize("estimator", ["ips", "snips"])
def test_estimators_that_need_propensities_are_refused_without(estimator: str) -> None:
    logged = batch(0, 2)
    with pytest.raises(ConfigError, match=f"estimator '{estimator}' needs the propensity of each logged position"):
        query_values(list_terms(logged, policy(0, logged)), estimator)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"position": np.array([[1, 6]]), "click": np.array([[0, 1]])},
            "position must be at most K = 5 where there is a click; got 6",
        ),
        ({"position": np.array([[2, 2]])}, "positions must be distinct within a list; got 2"),
        ({"click": np.array([[0, 2]])}, "click must be 0 or 1; got 2"),
        ({"click": np.zeros((1, 3))}, r"click must have shape \[1, 2\]; got shape \[1, 3\]"),
        ({"value": np.array([[1.0, np.nan]])}, "value must be finite; got nan"),
        ({"propensity": np.array([[0.5, 0.0]])}, "propensity must be above 0 and at most 1; got 0.0"),
        ({"propensity": np.array([[0.5, 1.5]])}, "propensity must be above 0 and at most 1; got 1.5"),
        ({"propensity": np.array([[0.5, np.nan]])}, "propensity must be above 0 and at most 1; got nan"),
        ({"table": np.zeros((1, 3, 5))}, r"table must have shape \[B, n, K\]"),
    ],
)
def test_what_is_no_log_is_refused(change: dict[str, NDArray[Any]], message: str) -> None:
    logged, _ = one_list(0, n=2, K=5)
    with pytest.raises(ValueError, match=message):
        replace(logged, **change)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda log, order: list_terms(log, order[:, :1]), r"positions must have shape \[1, 2\]; got shape \[1, 1\]"),
        (lambda log, order: list_terms(log, order * 0), "positions must be whole numbers from 1 up; got 0"),
        (lambda log, order: list_terms(log, order, floor=-1), "floor must be from 0 to 1; got -1"),
        (lambda log, order: list_terms(log, order, cutoff=0), "cutoff must be a whole number from 1 up"),
        (lambda log, order: list_terms(replace(log, table=log.table + 1), order), "table must contain probabilities"),
        (
            lambda log, order: list_terms(log, order).by(np.array([0, 1]), 2),
            r"group must be whole numbers of shape \[1\]",
        ),
        (
            lambda log, order: list_terms(log, order).by(np.array([0.0]), 1),
            "group must be whole numbers .*; got float64",
        ),
        (lambda log, order: list_terms(log, order).by(np.array([2]), 2), "group must be from 0 to 1; got 2"),
        (lambda log, order: Terms.concatenate([]), "parts must contain at least one Terms; got none"),
        (
            lambda log, order: list_terms(log, order) + list_terms(replace(log, propensity=np.ones((1, 2))), order),
            "terms must all have propensities or none; got them in 1 of 2",
        ),
        (
            lambda log, order: query_values(list_terms(pick(log, slice(0)), order[:0]), "ratio"),
            "terms must contain at least one query; got none",
        ),
    ],
)
def test_what_is_no_policy_is_refused(call: Callable[[LoggedBatch, Positions], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*one_list(0, n=2))
