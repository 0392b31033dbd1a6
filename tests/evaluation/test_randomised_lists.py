"""Randomised lists: arithmetic, unbiasedness and coverage against position-based users, and the test of randomness."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from urank.errors import DataError
from urank.evaluation.intervals import normal_interval, paired
from urank.evaluation.randomised_lists import (
    PositionCurve,
    RandomisedLists,
    check_randomisation,
    compare_policies,
    estimate_policy,
    evaluate_randomised,
    fit_position_curve,
    list_values,
)
from urank.log.ragged import list_ids, offsets_of_runs

SLOTS = np.array([1, 2, 3, 4, 6, 7, 8, 9])  # slot 5 is empty
TRIALS = 400


def curve_of(attention: list[float]) -> PositionCurve:
    K = len(attention)
    return PositionCurve(np.array(attention), np.arange(K), np.array([0]), np.zeros((1, K)), np.eye(K))


def positions_by(score: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rank of each row in its list by decreasing score."""
    lists = list_ids(offsets)
    positions = np.empty(len(score), dtype=np.int64)
    positions[np.lexsort((-score, lists))] = np.arange(len(score)) - offsets[lists] + 1
    return positions


class Users:
    """Position-based users: clicks with probability r e(slot) on lists in random order.

    Short lists are more attractive, so that plain click rates by position fall faster than e. The lists of a query
    share a level of attractiveness.
    """

    def __init__(self, rng: np.random.Generator, queries: int = 150, *, decay: float = 0.7) -> None:
        query = np.repeat(np.arange(queries), rng.integers(1, 4, size=queries))
        size = rng.choice([3, 5, 8], size=len(query))
        self.offsets = np.concatenate([[0], np.cumsum(size)])
        self.rows = list_ids(self.offsets)
        level = rng.uniform(0.3, 1.0, size=queries)[query] * np.where(size == 3, 1.0, 0.5)
        self.r = level[self.rows] * rng.uniform(0.1, 1.0, size=len(self.rows))
        self.value = rng.uniform(0.5, 2.0, size=len(self.rows))
        self.attention = 0.9 / np.arange(1, 10) ** decay
        self.slots = SLOTS[np.arange(len(self.rows)) - self.offsets[self.rows]]
        shown = self.slots[np.lexsort((rng.random(len(self.rows)), self.rows))]
        click = rng.random(len(self.rows)) < self.r * self.attention[shown - 1]
        self.lists = RandomisedLists(shown, click, self.offsets, query, self.value)
        self.noisy = positions_by(self.r * np.exp(rng.normal(size=len(self.r))), self.offsets)
        self.best = positions_by(self.r * self.value, self.offsets)

    def truth(self, positions: NDArray[np.int64], cutoff: int | None = None) -> NDArray[np.float64]:
        """The expected value of each list."""
        slot = self.slots[self.offsets[self.rows] + positions - 1]
        expected = self.r * self.value * self.attention[slot - 1] * (positions <= (cutoff or 99))
        return np.bincount(self.rows, expected)

    def truth_in_random_order(self, cutoff: int) -> NDArray[np.float64]:
        counted = np.bincount(self.rows, self.attention[self.slots - 1] * (self.slots <= SLOTS[cutoff - 1]))
        return np.bincount(self.rows, self.r * self.value) * counted / np.diff(self.offsets)


# Arithmetic


def test_curve_of_equal_lists_is_the_isotonic_click_rate() -> None:
    click = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0]])
    lists = RandomisedLists(np.tile([1, 2, 3], 4), click.ravel(), np.arange(0, 13, 3), np.arange(4))
    curve = fit_position_curve(lists)
    np.testing.assert_allclose(curve.attention, [2 / 4, 1 / 4, 1 / 4])
    assert curve.block.tolist() == [0, 1, 1]


def test_curve_compares_positions_within_lists() -> None:
    """Both kinds of lists are clicked twice as often at 1 as at any other position; short ones more often."""
    short, long = np.repeat([1, 2], [20, 10]), np.repeat([1, 2, 3], [4, 2, 2])
    clicked = [(2, place) for place in short] + [(3, place) for place in long]
    position = np.concatenate([np.arange(1, size + 1) for size, _ in clicked])
    click = np.concatenate([np.arange(1, size + 1) == place for size, place in clicked])
    offsets = np.concatenate([[0], np.cumsum([size for size, _ in clicked])])
    attention = fit_position_curve(RandomisedLists(position, click, offsets, np.arange(len(clicked)))).attention
    np.testing.assert_allclose(attention / attention[0], [1, 1 / 2, 1 / 2])


def test_positions_without_evidence_have_no_attention() -> None:
    position, click = np.array([1, 3, 1, 4]), np.array([1, 0, 0, 0])
    lists = RandomisedLists(position, click, np.array([0, 2, 4]), np.array([0, 1]))
    curve = fit_position_curve(lists)
    assert np.isnan(curve.attention).tolist() == [False, True, False]
    assert list_values(lists, np.array([2, 1, 1, 2]), curve).tolist() == [0.0, 0.0]


def test_values_use_the_slots_that_the_list_had() -> None:
    lists = RandomisedLists(
        np.array([6, 1, 3]), np.array([1, 0, 1]), np.array([0, 3]), np.array([0]), np.array([2, 1, 3])
    )
    curve = curve_of([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    order = np.array([1, 2, 3])
    mean = (0.6 + 0.4 + 0.1) / 3
    np.testing.assert_allclose(list_values(lists, order, curve), [(2 * 0.6 + 3 * 0.1) / mean])
    np.testing.assert_allclose(list_values(lists, order, curve, cutoff=2), [2 * 0.6 / mean])
    np.testing.assert_allclose(list_values(lists, None, curve), [2 + 3])
    np.testing.assert_allclose(list_values(lists, None, curve, cutoff=2), [3])


def test_derivative_by_the_curve_is_numerical() -> None:
    """The influence of the curve, by finite differences: a known curve that is fitted on a single other query."""
    users = Users(np.random.default_rng(3), queries=20)
    fitted = fit_position_curve(users.lists)
    blocks = len(fitted.information)
    for m in range(blocks):
        score = np.zeros((1, blocks))
        score[0, m] = 1.0
        known = replace(fitted, query=np.array([-1]), scores=score, information=np.eye(blocks))
        alone = replace(known, scores=np.zeros((1, blocks)))
        n = 20
        squares = (estimate_policy(users.lists, users.best, each, cutoff=4).error ** 2 for each in (known, alone))
        derivative = sqrt((next(squares) - next(squares)) * (n - 1) / n)
        step = 1e-5 * (fitted.block == m)
        up, down = (
            list_values(users.lists, users.best, replace(fitted, attention=fitted.attention * np.exp(s)), cutoff=4)
            for s in (step, -step)
        )
        np.testing.assert_allclose(derivative, abs(up.mean() - down.mean()) / 2e-5, rtol=1e-5)


def test_order_as_shown_is_valued_by_its_clicks() -> None:
    users = Users(np.random.default_rng(0))
    one_each = replace(users.lists, query=np.arange(len(users.lists)))
    earned = list_values(one_each, None, fit_position_curve(one_each))
    assert estimate_policy(one_each, None) == pytest.approx(normal_interval(earned))
    assert compare_policies(one_each, None, None) == paired(earned, earned)


def test_lists_without_clicks_change_values_by_a_factor() -> None:
    users = Users(np.random.default_rng(8))
    clicked = np.bincount(users.rows, users.lists.click) > 0
    every = [estimate_policy(users.lists, order).mean for order in (users.best, users.noisy, None)]
    rows, stored = clicked[users.rows], users.lists.select(clicked)
    only = [estimate_policy(stored, order).mean for order in (users.best[rows], users.noisy[rows], None)]
    np.testing.assert_allclose(np.array(only) * clicked.mean(), every)


# Unbiasedness and coverage


def test_estimates_are_unbiased_and_intervals_cover_the_truth() -> None:
    """Estimates are right on average within four standard errors, and 95 % intervals cover the expected value."""
    rng = np.random.default_rng(7)
    names = ("best", "best at 3", "best − noisy", "best − shown", "best − shown at 3")
    found: dict[str, list[Any]] = {name: [] for name in names}
    truths: dict[str, list[float]] = {name: [] for name in names}
    lists = 0
    for _ in range(TRIALS):
        users = Users(rng)
        curve = fit_position_curve(users.lists)
        shown, shown3 = users.truth_in_random_order(8), users.truth_in_random_order(3)
        best, best3 = users.truth(users.best), users.truth(users.best, 3)
        results = (
            estimate_policy(users.lists, users.best, curve),
            estimate_policy(users.lists, users.best, curve, cutoff=3),
            compare_policies(users.lists, users.best, users.noisy, curve),
            compare_policies(users.lists, users.best, None, curve),
            compare_policies(users.lists, users.best, None, curve, cutoff=3),
        )
        expected = (best, best3, best - users.truth(users.noisy), best - shown, best3 - shown3)
        lists += len(users.lists)
        for name, result, truth in zip(names, results, expected, strict=True):
            found[name].append(result)
            truths[name].append(float(truth.sum()))
    for name in names:
        truth = sum(truths[name]) / lists
        mean = np.array([each.mean for each in found[name]])
        coverage = np.mean([each.low <= truth <= each.high for each in found[name]])
        spread = mean.std(ddof=1)
        assert abs(mean.mean() - truth) < 4 * spread / sqrt(TRIALS), name
        assert abs(coverage - 0.95) < 3 * sqrt(0.95 * 0.05 / TRIALS), name


def test_plain_click_rates_are_biased_where_short_lists_are_more_attractive() -> None:
    """The reason for the adjustment: both curves on one large log, whose true curve is known."""
    users = Users(np.random.default_rng(2), queries=20_000)
    position, click = users.lists.position, users.lists.click
    slots = SLOTS - 1
    rates = (np.bincount(position, click)[1:][slots]) / np.bincount(position)[1:][slots]
    true = users.attention[slots] / users.attention[0]
    fitted = fit_position_curve(users.lists).attention[slots]
    tolerance = 0.02  # about four standard errors
    np.testing.assert_allclose(fitted / fitted[0], true, atol=tolerance)
    assert (rates / rates[0] - true).min() < -tolerance


def test_curve_of_further_queries_is_part_of_the_error() -> None:
    """A curve from four times as many queries: estimates vary less, and intervals cover."""
    rng = np.random.default_rng(5)
    alone, helped, truth, lists = [], [], 0.0, 0
    for _ in range(200):
        users = Users(rng, queries=400)
        judged = users.lists.query < 100
        own, best = users.lists.select(judged), users.best[judged[users.rows]]
        alone.append(compare_policies(own, best, None).mean)
        helped.append(compare_policies(own, best, None, fit_position_curve(users.lists)))
        truth += float((users.truth(users.best) - users.truth_in_random_order(8)).sum())
        lists += len(users.lists)
    covered = [each.low <= truth / lists <= each.high for each in helped]
    assert {each.n for each in helped} == {100}
    assert np.std([each.mean for each in helped]) < np.std(alone)
    assert abs(np.mean(covered) - 0.95) < 3 * sqrt(0.95 * 0.05 / 200)


def test_without_monotonicity_a_flat_curve_is_covered() -> None:
    rng = np.random.default_rng(6)
    found = []
    for _ in range(TRIALS):
        users = Users(rng, decay=0.0)
        found.append(compare_policies(users.lists, users.best, None, fit_position_curve(users.lists, monotone=False)))
    mean = np.array([each.mean for each in found])
    assert abs(mean.mean()) < 4 * mean.std(ddof=1) / sqrt(TRIALS)
    assert abs(np.mean([each.low <= 0 <= each.high for each in found]) - 0.95) < 3 * sqrt(0.95 * 0.05 / TRIALS)


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": np.array([1, 0])}, "position must be at least 1"),
        ({"position": np.array([2, 2])}, "position must be distinct within a list"),
        ({"position": np.array([1.0, 2.0])}, "position must be whole numbers"),
        ({"click": np.array([0, 2])}, "click must be 0 or 1"),
        ({"query": np.array([0, 1])}, "query must have shape"),
        ({"offsets": np.array([0, 3])}, "offsets must increase"),
    ],
)
def test_invalid_lists_are_refused(changes: dict[str, Any], message: str) -> None:
    valid = RandomisedLists(np.array([1, 2]), np.array([0, 1]), np.array([0, 2]), np.array([0]))
    with pytest.raises(ValueError, match=message):
        replace(valid, **changes)


def test_invalid_orders_and_curves_are_refused() -> None:
    lists = RandomisedLists(np.array([1, 2]), np.array([0, 1]), np.array([0, 2]), np.array([0]))
    with pytest.raises(ValueError, match="ranks 1 to 2"):
        list_values(lists, np.array([1, 3]), curve_of([0.2, 0.1]))
    with pytest.raises(DataError, match="lacks 2"):
        list_values(lists, np.array([1, 2]), curve_of([0.2]))
    with pytest.raises(DataError, match="0 at all slots"):
        list_values(lists, np.array([1, 2]), curve_of([0.0, 0.0]))
    with pytest.raises(DataError, match="lists with a click"):
        fit_position_curve(replace(lists, click=np.array([0, 0])))


# Whether the order is random


def random_features(rng: np.random.Generator, lists: int, size: int) -> dict[str, NDArray[np.float64]]:
    """A continuous feature, one with ties, a rare flag, a feature with missing values and one of the query."""
    missing = np.where(rng.random((lists, size)) < 0.3, np.nan, rng.random((lists, size)))
    return {
        "price": rng.lognormal(size=(lists, size)),
        "stars": rng.integers(1, 6, size=(lists, size)).astype(float),
        "flag": (rng.random((lists, size)) < 0.1).astype(float),
        "review": missing,
        "day": np.repeat(rng.random((lists, 1)), size, axis=1),
    }


def checked(features: dict[str, NDArray[np.float64]], **options: Any) -> Any:
    lists, size = next(iter(features.values())).shape
    position = np.tile(np.arange(1, size + 1), lists)
    flat = {name: values.ravel() for name, values in features.items()}
    return check_randomisation(flat, position, np.arange(0, lists * size + 1, size), **options)


def test_random_orders_pass() -> None:
    """No more false alarms than the level, and no list left out in (nearly) all logs, of short and long lists."""
    rng = np.random.default_rng(0)
    found = [checked(random_features(rng, 60, size)) for size in (5, 8, 12, 30) for _ in range(100)]
    assert sum(not each.random for each in found) <= 400 * 0.01 + 3 * sqrt(400 * 0.01)
    assert sum(len(each.excluded) > 0 for each in found) <= 400 * 0.01 + 3 * sqrt(400 * 0.01)
    assert {each.feature for each in found[0].before} == {"price", "stars", "flag", "review"}


def test_sorted_lists_are_found_and_left_out() -> None:
    features = random_features(np.random.default_rng(1), 100, 15)
    features["price"][:6].sort(axis=1)
    features["price"][6:8] = -np.sort(-features["price"][6:8], axis=1)
    features["price"][8].sort()
    features["price"][8, [3, 4]] = features["price"][8, [4, 3]]  # nearly
    found = checked(features)
    assert found.excluded == tuple(range(9))
    assert [(each.feature, each.increasing, each.lists, each.exactly) for each in found.ordered] == [
        ("price", True, 7, 6),
        ("price", False, 2, 2),
    ]
    assert found.keep.sum() == 91
    assert found.random
    assert found.random_share == 0.91
    assert "9.0 %" in found.sentence
    kept = checked(features, exclude=False)
    assert kept.excluded == ()
    assert not kept.random


def test_sorted_lists_that_chance_explains_are_kept() -> None:
    features = {"price": np.random.default_rng(2).random((100, 5))}
    features["price"][0].sort()  # 2 / 5! of random lists are
    assert checked(features).excluded == ()


def test_weak_dependence_in_all_lists_is_found() -> None:
    features = random_features(np.random.default_rng(3), 200, 10)
    features["review"] += 0.02 * np.arange(10)
    found = checked(features)
    assert not found.random
    assert found.after[0].feature == "review"
    assert found.after[0].correlation > 0


def test_dependence_in_both_directions_is_found() -> None:
    """Mean correlations miss a feature that rises in half of the lists and falls in the others."""
    features = random_features(np.random.default_rng(4), 200, 10)
    features["price"] = np.random.default_rng(5).random((200, 10))
    features["price"] += np.where(np.arange(200) % 2, 0.06, -0.06)[:, None] * np.arange(10)
    found = checked(features)
    assert not found.random
    worst = found.after[0]
    assert worst.feature == "price"
    assert worst.spread_p_value < 0.01 < worst.p_value


def test_correlations_are_those_of_scipy() -> None:
    from scipy.stats import spearmanr

    values = np.random.default_rng(6).integers(0, 4, size=(1, 9)).astype(float)
    (found,) = checked({"stars": values}).before
    np.testing.assert_allclose(found.correlation, spearmanr(values[0], np.arange(9)).statistic)
    np.testing.assert_allclose(found.z, found.correlation * sqrt(8))


def test_lists_without_a_click_are_checked_but_not_estimated() -> None:
    position, offsets = np.tile(np.arange(1, 7), 3), np.arange(0, 19, 6)
    values = np.random.default_rng(0).random(18)
    lists = RandomisedLists(position, np.zeros(18, dtype=int), offsets, np.arange(3))
    found = evaluate_randomised(lists, {"price": values}, {"given": position})
    assert (found.lists, found.queries, found.utility) == (3, 3, {})
    assert found.warning is not None
    assert found.warning.endswith("none of the lists that remain has a click")


# Hotel logs


def hotel_lists(frame: pl.DataFrame, features: list[str]) -> tuple[RandomisedLists, dict[str, NDArray[np.float64]]]:
    query = frame["query_id"].to_numpy()
    offsets = offsets_of_runs(query)
    lists = RandomisedLists(frame["position"].to_numpy(), frame["click"].to_numpy(), offsets, query[offsets[:-1]])
    return lists, {name: frame[name].cast(pl.Float64).to_numpy() for name in features}


def test_hotel_lists_are_random_but_for_some_that_are_sorted(data_dir: Path) -> None:
    path = data_dir / "hotel-random" / "lists.parquet"
    if not path.is_file():
        pytest.skip(f"no hotel log at {path}")
    frame = pl.read_parquet(path).sort("query_id", "position")
    lists, features = hotel_lists(frame, [f"x{j}" for j in range(6)])
    found = check_randomisation(features, lists.position, lists.offsets)
    assert found.random
    assert 0.05 < 1 - found.random_share < 0.08
    assert found.ordered[0].feature == "x4"  # the price
    kept, price = lists.select(found.keep), features["x4"][found.keep[lists.lists]]
    shuffled = positions_by(np.random.default_rng(0).random(len(price)), kept.offsets)
    assert compare_policies(kept, shuffled, None).p_value > 0.01
    assert compare_policies(kept, positions_by(price, kept.offsets), None).high < 0


def test_expedia_lists_marked_as_random_are_not(data_dir: Path) -> None:
    path = data_dir / "expedia" / "searches.csv.gz"
    if not path.is_file():
        pytest.skip(f"no hotel log at {path}")
    names = ["price_usd", "prop_starrating", "prop_location_score1"]
    frame = pl.read_csv(path, infer_schema_length=None).filter(pl.col("random_bool") == 1)
    frame = frame.rename({"srch_id": "query_id", "click_bool": "click"}).sort("query_id", "position")
    lists, features = hotel_lists(frame, names)
    found = check_randomisation(features, lists.position, lists.offsets)
    assert found.ordered[0].feature == "price_usd"
    assert found.ordered[0].exactly > 0.03 * len(lists)
    assert not found.random
