"""Intervals and comparisons: arithmetic, agreement with scipy, and how often an interval covers the truth."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf, nan, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from urank.evaluation import intervals as module
from urank.evaluation.intervals import (
    Comparison,
    Interval,
    add_model_variance,
    bootstrap_interval,
    holm,
    model_variance,
    normal_interval,
    paired,
)

LEVELS = [0.5, 0.9, 0.95, 0.99]

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

values_of_queries = st.lists(st.floats(-100, 100), min_size=2, max_size=30).map(np.array)


def normal(rng: np.random.Generator, Q: int) -> NDArray[np.float64]:
    return rng.normal(1.0, 2.0, size=Q)


def exponential(rng: np.random.Generator, Q: int) -> NDArray[np.float64]:
    return rng.exponential(1.0, size=Q)


def coverage_and_error(interval: Callable[[NDArray[np.float64]], Interval], draw: Draw, Q: int, trials: int) -> float:
    """How many standard errors the coverage of a 95 % interval of a mean of 1 is off."""
    rng = np.random.default_rng(20)
    found = [interval(draw(rng, Q)) for _ in range(trials)]
    covered = np.mean([each.low <= 1 <= each.high for each in found])
    return float((covered - 0.95) / sqrt(0.95 * 0.05 / trials))


# Student's t


def test_normal_interval_by_hand() -> None:
    found = normal_interval(np.array([0.0, 1.0, 2.0, 5.0]))
    error = sqrt(((0 - 2) ** 2 + (1 - 2) ** 2 + (2 - 2) ** 2 + (5 - 2) ** 2) / 3) / sqrt(4)
    t = 3.182446  # the 97.5 % quantile with 3 degrees of freedom, as tables have it
    assert found.mean == 2.0
    assert found.n == 4
    np.testing.assert_allclose(found.error, error)
    np.testing.assert_allclose([found.low, found.high], [2 - t * error, 2 + t * error], rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_normal_interval_is_that_of_scipy(level: float) -> None:
    values = normal(np.random.default_rng(0), 17)
    found = normal_interval(values, level)
    expected = stats.t.interval(level, df=16, loc=values.mean(), scale=stats.sem(values))
    np.testing.assert_allclose([found.low, found.high], expected)
    np.testing.assert_allclose(found.error, stats.sem(values))


@pytest.mark.parametrize("Q", [5, 40])
def test_normal_intervals_cover_normal_means_as_often_as_they_say(Q: int) -> None:
    assert abs(coverage_and_error(normal_interval, normal, Q, trials=4000)) < 3


# The bootstrap


def test_bootstrap_and_normal_intervals_agree_on_well_behaved_values() -> None:
    values = normal(np.random.default_rng(1), 400)
    by_t, by_bootstrap = normal_interval(values), bootstrap_interval(values, rng=0)
    assert (by_bootstrap.mean, by_bootstrap.error, by_bootstrap.n) == (by_t.mean, by_t.error, by_t.n)
    # The ends move by about 6 % of the standard error from seed to seed.
    np.testing.assert_allclose([by_bootstrap.low, by_bootstrap.high], [by_t.low, by_t.high], atol=0.2 * by_t.error)


@pytest.mark.parametrize("draw", [normal, exponential])
@pytest.mark.parametrize("Q", [25, 100])
def test_bootstrap_intervals_cover_the_mean_as_often_as_they_say(draw: Draw, Q: int) -> None:
    rng = np.random.default_rng(2)
    off = coverage_and_error(lambda values: bootstrap_interval(values, rng=rng, resamples=999), draw, Q, trials=800)
    assert abs(off) < 3


def test_bootstrap_covers_skewed_means_more_often_than_student_does() -> None:
    rng = np.random.default_rng(3)
    student = coverage_and_error(normal_interval, exponential, 15, trials=1000)
    bootstrap = coverage_and_error(lambda values: bootstrap_interval(values, rng=rng), exponential, 15, trials=1000)
    assert student < -3
    assert bootstrap > student + 2


def test_bootstrap_leans_as_the_percentiles_of_student_t_do() -> None:
    """Against scipy's resamples of t: an independent way to the same quantiles."""
    values = exponential(np.random.default_rng(4), 60)

    def t_of(resample: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        error = resample.std(axis=axis, ddof=1) / sqrt(60)
        return np.asarray((resample.mean(axis=axis) - values.mean()) / error)

    t = stats.bootstrap((values,), t_of, n_resamples=9999, rng=np.random.default_rng(5)).bootstrap_distribution
    error = stats.sem(values)
    found = bootstrap_interval(values, rng=6, resamples=9999)
    expected = values.mean() - np.quantile(t, [0.975, 0.025]) * error
    np.testing.assert_allclose([found.low, found.high], expected, atol=0.15 * error)
    assert found.high - found.mean > found.mean - found.low


def test_bootstrap_of_three_queries_is_that_of_all_27_resamples() -> None:
    values = np.array([0.0, 1.0, 5.0])
    resamples = values[list(product(range(3), repeat=3))]
    error = resamples.std(axis=1, ddof=1) / sqrt(3)
    deviation = resamples.mean(axis=1) - values.mean()
    t = np.sort(np.where(error > 0, deviation / np.where(error > 0, error, 1), np.copysign(inf, deviation)))
    found = bootstrap_interval(values, level=0.6, rng=0, resamples=20_000)
    # The tails hold 0.2 · 27 = 5.4 resamples each: the sixth from either end.
    expected = [values.mean() - t[-6] * stats.sem(values), values.mean() - t[5] * stats.sem(values)]
    np.testing.assert_allclose([found.low, found.high], expected)


def test_bootstrap_is_the_same_for_the_same_seed_and_moves_with_another() -> None:
    values = exponential(np.random.default_rng(6), 50)
    assert bootstrap_interval(values, rng=1) == bootstrap_interval(values, rng=np.random.default_rng(1))
    assert bootstrap_interval(values, rng=1) != bootstrap_interval(values, rng=2)


def test_bootstrap_is_unbounded_when_the_queries_do_not_bound_the_mean() -> None:
    one_click = np.eye(1, 20)[0]  # (19/20)^20 = 36 % of the resamples have no click at all
    found = bootstrap_interval(one_click, rng=0)
    assert found.high == inf
    assert found.low < found.mean == 1 / 20


def test_bootstrap_of_a_million_queries_is_quick_small_and_close_to_student() -> None:
    values = exponential(np.random.default_rng(7), 1_000_000)
    tracemalloc.start()
    found = bootstrap_interval(values, rng=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    expected = normal_interval(values)
    np.testing.assert_allclose([found.low, found.high], [expected.low, expected.high], atol=0.25 * expected.error)
    assert peak < 10 * values.nbytes


def test_blocks_leave_the_interval_of_skewed_values_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(8).lognormal(0, 1.2, size=1000)
    whole = bootstrap_interval(values, rng=0, resamples=20_000)
    monkeypatch.setattr(module, "_BLOCKS", 130)  # 1000 is no multiple of it
    blocks = bootstrap_interval(values, rng=0, resamples=20_000)
    assert (blocks.mean, blocks.error) == (whole.mean, whole.error)
    np.testing.assert_allclose([blocks.low, blocks.high], [whole.low, whole.high], atol=0.15 * whole.error)
    assert whole.high - whole.mean > 1.15 * (whole.mean - whole.low)


# Comparisons


def test_paired_by_hand() -> None:
    found = paired(np.array([3.0, 5.0, 4.0]), np.array([2.0, 3.0, 1.0]))
    error = 1 / sqrt(3)
    t = 2 / error
    np.testing.assert_allclose([found.mean, found.error], [2, error])
    np.testing.assert_allclose(found.p_value, 1 - t / sqrt(2 + t**2))  # two degrees of freedom have a closed form


@settings(deadline=None)
@given(values_of_queries, st.integers(0, 2**32 - 1))
def test_paired_is_that_of_scipy(a: NDArray[np.float64], seed: int) -> None:
    b = np.random.default_rng(seed).normal(size=len(a))
    found, expected = paired(a, b, level=0.9), stats.ttest_rel(a, b)
    np.testing.assert_allclose(found.p_value, expected.pvalue, rtol=1e-7, atol=1e-12)
    interval = expected.confidence_interval(0.9)
    np.testing.assert_allclose([found.low, found.high], [interval.low, interval.high], rtol=1e-7, atol=1e-9)


@settings(deadline=None)
@given(values_of_queries)
def test_policies_that_never_differ(a: NDArray[np.float64]) -> None:
    found = paired(a, a)
    assert (found.mean, found.error, found.low, found.high, found.p_value) == (0, 0, 0, 0, 1)


def test_a_difference_that_never_varies_is_no_chance() -> None:
    found = paired(np.array([3.0, 4.0, 5.0]), np.array([1.0, 2.0, 3.0]))
    assert (found.low, found.high, found.p_value) == (2, 2, 0)
    by_a_tenth = paired(np.array([0.1, 0.2, 0.3]) + 0.1, np.array([0.1, 0.2, 0.3]))  # not the same to the last bit
    assert (by_a_tenth.error, by_a_tenth.p_value) == (0, 0)


def test_rounding_is_no_difference() -> None:
    a = np.random.default_rng(10).normal(size=30)
    found = paired(a * 3 / 3 + 1e-15, a)
    assert (found.mean, found.error, found.p_value) == (0, 0, 1)


def test_pairing_tells_apart_what_the_intervals_do_not() -> None:
    rng = np.random.default_rng(9)
    richness = rng.normal(0, 10, size=200)
    a, b = richness + 1.5 + rng.normal(size=200), richness + 1.0 + rng.normal(size=200)
    assert paired(a, b).low > 0
    assert normal_interval(a).low < normal_interval(b).high


# Queries without a value, and too few


@pytest.mark.parametrize("interval", [normal_interval, lambda values: bootstrap_interval(values, rng=0)])
def test_queries_without_a_value_are_left_out(interval: Callable[[NDArray[np.float64]], Interval]) -> None:
    assert interval(np.array([1.0, nan, 2.0, 4.0, nan])) == interval(np.array([1.0, 2.0, 4.0]))


def test_pairs_without_a_value_are_left_out() -> None:
    a, b = np.array([1.0, nan, 2.0, 4.0]), np.array([0.5, 1.0, nan, 1.0])
    assert paired(a, b) == paired(a[[0, 3]], b[[0, 3]])


@pytest.mark.parametrize("interval", [normal_interval, lambda values: bootstrap_interval(values, rng=0)])
def test_one_query_has_a_mean_and_no_interval(interval: Callable[[NDArray[np.float64]], Interval]) -> None:
    one, none = interval(np.array([3.0])), interval(np.array([]))
    assert (one.mean, one.n, none.n) == (3.0, 1, 0)
    assert np.isnan([one.error, one.low, one.high, none.mean, none.error, none.low, none.high]).all()


def test_one_pair_has_no_p_value() -> None:
    found = paired(np.array([3.0]), np.array([2.0]))
    assert found.mean == 1.0
    assert np.isnan(found.p_value)


@settings(deadline=None)
@given(st.floats(-100, 100), st.integers(2, 9))
def test_values_that_are_all_the_same_have_no_width(value: float, Q: int) -> None:
    values = np.full(Q, value)
    for found in (normal_interval(values), bootstrap_interval(values, rng=0, resamples=50)):
        np.testing.assert_allclose([found.mean, found.low, found.high], value, rtol=1e-12)


# The variance of the models


FOUND = normal_interval(np.array([1.0, 2.0, 4.0, 5.0, 8.0]))


def test_model_variance_by_hand() -> None:
    assert model_variance(np.array([[0.5, 0.7]])) == pytest.approx(0.2**2 / 4)
    assert model_variance(np.array([[0.5, 0.7], [0.9, 0.6]])) == pytest.approx((0.2**2 / 4 + 0.3**2 / 4) / 2)
    assert model_variance(np.array([[0.5, 0.5], [0.4, 0.4]])) == 0


def test_model_variance_is_the_variance_of_the_mean_of_two() -> None:
    """In expectation, over models whose estimates have a variance of σ²: σ² / 2."""
    estimates = np.random.default_rng(0).normal(3.0, 0.2, (40_000, 2))
    spread = ((estimates[:, 0] - estimates[:, 1]) ** 2 / 4).std() / sqrt(len(estimates))
    assert abs(model_variance(estimates) - 0.2**2 / 2) < 4 * spread


def test_models_that_agree_change_nothing() -> None:
    assert add_model_variance(FOUND, 0.0, cuts=2) == FOUND
    comparison = paired(np.array([1.0, 3.0, 2.0]), np.array([0.0, 1.0, 2.5]))
    assert add_model_variance(comparison, 0.0, cuts=2) == comparison


@pytest.mark.parametrize("cuts", [1, 2, 10])
def test_satterthwaite_by_hand(cuts: int) -> None:
    own, variance = FOUND.error**2, 0.7
    degrees = (own + variance) ** 2 / (own**2 / 4 + variance**2 / cuts)
    half = stats.t.ppf(0.975, degrees) * sqrt(own + variance)
    wider = add_model_variance(FOUND, variance, cuts)
    assert type(wider) is Interval
    assert (wider.mean, wider.n) == (FOUND.mean, 5)
    assert wider.error == pytest.approx(sqrt(own + variance))
    assert (wider.low, wider.high) == (pytest.approx(FOUND.mean - half), pytest.approx(FOUND.mean + half))


def test_the_p_value_follows() -> None:
    found = paired(np.array([3.0, 5.0, 4.0]), np.array([2.0, 3.0, 1.0]))  # mean 2, error 1/√3
    wider = add_model_variance(found, 0.5, cuts=2)
    degrees = (1 / 3 + 0.5) ** 2 / ((1 / 3) ** 2 / 2 + 0.5**2 / 2)
    assert isinstance(wider, Comparison)
    assert wider.p_value == pytest.approx(2 * stats.t.sf(2 / sqrt(1 / 3 + 0.5), degrees))
    assert wider.p_value > found.p_value


def test_another_level() -> None:
    narrow, wide = (add_model_variance(FOUND, 0.7, 2, level) for level in (0.5, 0.99))
    assert FOUND.mean - narrow.low < FOUND.mean - wide.low
    assert narrow.error == wide.error


@given(st.floats(1e-6, 100), st.integers(1, 20), st.integers(2, 500), st.integers(0, 2**32 - 1))
def test_always_wider(variance: float, cuts: int, n: int, seed: int) -> None:
    found = normal_interval(np.random.default_rng(seed).normal(size=n))
    wider = add_model_variance(found, variance, cuts)
    assert wider.error > found.error
    assert wider.low <= wider.mean <= wider.high
    # Never fewer degrees of freedom than the smaller of both has, never more than the sum.
    half = (wider.high - wider.mean) / wider.error
    assert stats.t.ppf(0.975, n - 1 + cuts) * (1 - 1e-9) <= half <= stats.t.ppf(0.975, min(n - 1, cuts)) * (1 + 1e-9)


def test_what_has_no_interval_stays_without() -> None:
    one = normal_interval(np.array([3.0]))
    assert repr(add_model_variance(one, 0.5, 2)) == repr(one)
    for variance in (nan, inf):
        assert add_model_variance(FOUND, variance, 2) == FOUND
    certain = replace(FOUND, error=0.0, low=FOUND.mean, high=FOUND.mean)
    assert add_model_variance(certain, 0.5, cuts=3).high == pytest.approx(
        FOUND.mean + stats.t.ppf(0.975, 3) * sqrt(0.5)
    )


# Several comparisons


def test_holm_by_hand() -> None:
    np.testing.assert_allclose(
        holm([0.04, 0.01, 0.02, 0.5]), [max(3 * 0.02, 2 * 0.04), 4 * 0.01, 3 * 0.02, 0.5], rtol=1e-12
    )
    np.testing.assert_allclose(holm([0.02, nan, 0.6, 0.7]), [3 * 0.02, nan, 1.0, 1.0])
    assert holm([]).tolist() == []


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_stands_between_the_p_values_and_bonferroni_and_keeps_their_order(p: list[float]) -> None:
    adjusted, given_p = holm(p), np.array(p)
    assert (adjusted >= given_p).all()
    assert (adjusted <= np.minimum(1, len(p) * given_p)).all()
    assert (np.diff(adjusted[np.argsort(given_p, kind="stable")]) >= 0).all()
    # Stepping down, as Holm states it: reject while the j-th smallest is within its share of the level.
    for level in (0.01, 0.05, 0.3):
        steps = [q * (len(p) - j) <= level for j, q in enumerate(sorted(p))]
        assert (adjusted <= level).sum() == (steps.index(False) if False in steps else len(steps))


# Refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normal_interval(np.ones((2, 2))), r"values must have shape \[Q\]; got shape \[2, 2\]"),
        (lambda: normal_interval(np.array([1.0, inf])), "values must be finite, or NaN for a query .*; got inf"),
        (lambda: normal_interval(np.ones(2), level=1.0), "level must be between 0 and 1; got 1.0"),
        (lambda: bootstrap_interval(np.ones(2), level=0.0, rng=0), "level must be between 0 and 1; got 0.0"),
        (lambda: bootstrap_interval(np.ones(2), rng=0, resamples=0), "resamples must be .* from 1 up; got 0"),
        (lambda: paired(np.ones(2), np.ones(3)), r"a and b must cover the same queries; got shapes \[2\] and \[3\]"),
        (lambda: paired(np.array([1.0, inf]), np.array([1.0, inf])), "a must be finite.*; got inf"),
        (lambda: paired(np.ones(2), np.array([1.0, -inf])), "b must be finite.*; got -inf"),
        (lambda: holm([0.1, 1.5]), "p_values must be from 0 to 1; got 1.5"),
        (lambda: holm(np.ones((1, 2))), r"p_values must have shape \[m\]; got shape \[1, 2\]"),
    ],
)
def test_refusals_name_argument_requirement_and_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
