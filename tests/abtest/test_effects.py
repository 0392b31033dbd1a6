"""Lifts and their standard errors: by hand, against other methods, invariances, and degenerate data."""

from __future__ import annotations

from math import exp, log, nan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from abtest.helpers import Floats, of, users
from urank.abtest import effects as module
from urank.abtest.effects import (
    BLOCKS,
    Moments,
    bootstrap_lift,
    compare,
    critical_value,
    effect,
    effects,
    moments,
    p_values,
    random_blocks,
    rates,
    relative_variance,
)
from urank.errors import ConfigError

Z = 1.959963984540054


def ols(y: Floats, columns: list[Floats], weights: Floats | None = None) -> tuple[float, float]:
    """The coefficient of the first column by least squares with an intercept, and the sum of squared residuals."""
    X = np.stack([np.ones(len(y)), *columns], axis=1)
    root = np.ones(len(y)) if weights is None else np.sqrt(weights)
    beta, *_ = np.linalg.lstsq(X * root[:, None], y * root, rcond=None)
    return float(beta[1]), float(((y - X @ beta) ** 2).sum())


# Moments


def test_mean_and_covariance_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    columns, group = rng.normal(3, 2, size=(200, 3)), rng.integers(4, size=200)
    found = moments(columns, group, 4)
    for g in range(4):
        np.testing.assert_allclose(found.mean[g], columns[group == g].mean(axis=0))
        np.testing.assert_allclose(found.covariance[g], np.cov(columns[group == g].T))
    assert found.n.sum() == 200


def test_changes_add_up_to_what_users_have_at_last() -> None:
    """A user that comes on three days, another on one: each day changes what is known."""
    now = np.array([[1.0, 2.0], [4.0, 3.0], [6.0, 9.0], [5.0, 5.0]])
    before = np.array([[0.0, 0.0], [1.0, 2.0], [4.0, 3.0], [0.0, 0.0]])
    found = moments(now, np.array([0, 1, 2, 1]), 3, before).cumsum()
    assert found.n.tolist() == [1, 2, 2]
    for day, known in enumerate(([[1, 2]], [[4, 3], [5, 5]], [[6, 9], [5, 5]])):
        whole = moments(np.array(known, dtype=np.float64), np.zeros(len(known), np.int64), 1)[0]
        np.testing.assert_allclose(found.sums[day], whole.sums)
        np.testing.assert_allclose(found.products[day], whole.products)


def test_a_part_can_be_taken_away() -> None:
    columns = np.random.default_rng(1).normal(size=(50, 2))
    whole, part = (moments(columns[:n], np.zeros(n, np.int64), 1) for n in (50, 20))
    rest = moments(columns[20:], np.zeros(30, np.int64), 1)
    np.testing.assert_allclose((whole - part).covariance, rest.covariance)


def test_fewer_than_two_users_have_no_covariance() -> None:
    found = moments(np.ones((1, 2)), np.zeros(1, np.int64), 2)
    assert np.isnan(found.covariance).all()
    assert np.isnan(found.mean[1]).all()


def test_blocks_are_users_when_these_are_few_and_of_one_size_otherwise() -> None:
    rng = np.random.default_rng(0)
    assert random_blocks(5, rng).tolist() == [0, 1, 2, 3, 4]
    sizes = np.bincount(random_blocks(25_000, rng))
    assert len(sizes) == BLOCKS
    assert set(sizes.tolist()) == {2, 3}


# By hand


def test_four_users_by_hand() -> None:
    a, b = np.array([[1.0, 2.0], [0.0, 2.0]]), np.array([[2.0, 2.0], [1.0, 4.0]])
    found = effect(of(a), of(b))
    # Rates 1/4 and 3/6; what users are off by: ±1/2 in A, 1 and −1 in B; ȳ is 2 and 3.
    error_a, error_b = sqrt(2 * 0.25 / 1 / 2) / 2, sqrt(2 * 1.0 / 1 / 2) / 3
    error = sqrt(error_a**2 + error_b**2)
    assert (found.control, found.treatment, found.control_users, found.treatment_users) == (0.25, 0.5, 2, 2)
    np.testing.assert_allclose(found.difference.value, 0.25)
    np.testing.assert_allclose(found.difference.error, error)
    np.testing.assert_allclose([found.difference.low, found.difference.high], [0.25 - Z * error, 0.25 + Z * error])
    log_error = sqrt((error_a / 0.25) ** 2 + (error_b / 0.5) ** 2)
    np.testing.assert_allclose(found.lift.value, 1.0)
    np.testing.assert_allclose(found.lift.error, 2 * log_error)
    ends = [2 * exp(-Z * log_error) - 1, 2 * exp(Z * log_error) - 1]
    np.testing.assert_allclose([found.lift.low, found.lift.high], ends)
    np.testing.assert_allclose(found.p_value, 2 * stats.norm.sf(log(2) / log_error))


# Other ways to the same


def test_the_delta_method_against_the_formula_for_a_ratio() -> None:
    """Var(x̄/ȳ) ≈ (s_xx/ȳ² − 2 x̄ s_xy/ȳ³ + x̄² s_yy/ȳ⁴) / n, as textbooks have it."""
    rng = np.random.default_rng(0)
    variance = []
    a, b = users(rng, 400), users(rng, 300, rate=0.25)
    for arm in (a, b):
        (s_xx, s_xy), (_, s_yy) = np.cov(arm.T)
        x, y = arm.mean(axis=0)
        variance.append((s_xx / y**2 - 2 * x * s_xy / y**3 + x**2 * s_yy / y**4) / len(arm))
    value, error = compare(of(a), of(b), "difference")
    np.testing.assert_allclose(error, sqrt(sum(variance)))
    np.testing.assert_allclose(value, b[:, 0].sum() / b[:, 1].sum() - a[:, 0].sum() / a[:, 1].sum())


def test_a_mean_per_user_has_the_error_of_a_mean() -> None:
    """With a denominator of 1 the difference is that of two means: Welch's test."""
    rng = np.random.default_rng(1)
    a, b = rng.exponential(2.0, size=200), rng.exponential(2.2, size=150)
    found = effect(of(np.stack([a, np.ones(200)], axis=1)), of(np.stack([b, np.ones(150)], axis=1)))
    expected = stats.ttest_ind(b, a, equal_var=False)
    np.testing.assert_allclose(found.difference.value / found.difference.error, expected.statistic)


def test_the_error_is_what_samples_vary_by() -> None:
    """Two thousand tests at once: moments have leading dimensions."""
    rng = np.random.default_rng(2)
    arms = [[of(users(rng, 250)) for _ in range(1000)] for _ in range(2)]
    a, b = (Moments(*(np.stack([getattr(m, part) for m in arm]) for part in ("n", "sums", "products"))) for arm in arms)
    for scale in ("log", "difference"):
        value, error = compare(a, b, scale)  # type: ignore[arg-type]
        # A deviation of 1000 values is known up to 1/√2000, 2.2 %.
        np.testing.assert_allclose(value.std(), sqrt((error**2).mean()), rtol=4 / sqrt(2000))


def test_covariates_are_taken_out_as_by_regression() -> None:
    """The coefficient of the treatment in a regression of the linearised metric on treatment and covariates.

    The users of an arm of n weigh 1 / (n (n − 1)), so that the arms count by the variance of their means.
    """
    rng = np.random.default_rng(3)
    a, b = users(rng, 300), users(rng, 500, rate=0.22)
    arms = [np.concatenate([arm, arm[:, :1] + rng.normal(size=(len(arm), 2))], axis=1) for arm in (a, b)]
    value, error = compare(of(arms[0]), of(arms[1]), "log")
    parts = []
    for arm in arms:
        x, y = arm[:, :2].mean(axis=0)
        parts.append(log(x / y) + arm[:, 0] / x - arm[:, 1] / y)
    treated = np.repeat([0.0, 1.0], [300, 500])
    covariates = np.concatenate(arms)[:, 2:]
    weights = np.repeat([1 / (300 * 299), 1 / (500 * 499)], [300, 500])
    expected, left = ols(np.concatenate(parts), [treated, *covariates.T], weights)
    np.testing.assert_allclose(value, expected)
    pooled = sqrt(left / (800 - 4) * (1 / 300 + 1 / 500))  # with one variance for both arms
    np.testing.assert_allclose(error, pooled, rtol=0.1)
    assert error < compare(of(a), of(b), "log")[1]


@given(st.integers(0, 2**32 - 1), st.integers(5, 40), st.integers(400, 2000))
def test_covariates_never_make_the_variance_larger(seed: int, few: int, many: int) -> None:
    """Also when one arm is small and its covariates tell something else than those of the other."""
    rng = np.random.default_rng(seed)
    a, b = users(rng, few, rate=0.5), users(rng, many, rate=0.5)
    noise = [rng.normal(scale=0.3, size=(len(arm), 1)) for arm in (a, b)]
    one, other = (
        np.concatenate([arm, sign * arm[:, :1] + off], axis=1)
        for arm, sign, off in zip((a, b), (-1, 1), noise, strict=True)
    )
    for scale in ("log", "difference"):
        plain = compare(of(a), of(b), scale)[1]  # type: ignore[arg-type]
        for pair in ((one, other), (other, one)):
            _, error = compare(of(pair[0]), of(pair[1]), scale)  # type: ignore[arg-type]
            assert error <= plain * (1 + 1e-9)


def test_covariates_that_tell_nothing_change_nothing() -> None:
    rng = np.random.default_rng(4)
    a, b = users(rng, 300), users(rng, 300)
    plain = compare(of(a), of(b), "log")
    for constant in (0.0, 1.0, 0.1):  # nobody was seen before, or everybody; a constant that is not one to the last bit
        one, other = (of(np.concatenate([arm, np.full((300, 2), constant)], axis=1)) for arm in (a, b))
        np.testing.assert_allclose(compare(one, other, "log"), plain)


def test_covariates_may_be_of_any_unit() -> None:
    rng = np.random.default_rng(4)
    arms = [users(rng, 300) for _ in range(2)]
    arms = [np.concatenate([arm, arm[:, :1] + rng.normal(size=(300, 2))], axis=1) for arm in arms]
    plain, scaled = (compare(of(arms[0] * s), of(arms[1] * s), "log") for s in (np.ones(4), [1, 1, 1e9, 1e-9]))
    np.testing.assert_allclose(scaled, plain)


@pytest.mark.parametrize("n", [300, 12_000])
def test_the_bootstrap_agrees_with_the_delta_method(n: int) -> None:
    """Also in blocks of users, above 10,000 of them."""
    rng = np.random.default_rng(5)
    a, b = users(rng, n), users(rng, n + 100)
    low, high = bootstrap_lift(a, b, rng=0, resamples=4000)
    found = effect(of(a), of(b)).lift
    # The quantiles of 4000 resamples move by some 4 % of the error, by blocks another 1 %.
    np.testing.assert_allclose([low, high], [found.low, found.high], atol=0.2 * found.error)


def test_the_bootstrap_is_the_same_for_the_same_seed_whatever_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    a, b = users(rng, 200), users(rng, 200)
    assert bootstrap_lift(a, b, rng=1) == bootstrap_lift(a, b, rng=np.random.default_rng(1))
    assert bootstrap_lift(a, b, rng=1) != bootstrap_lift(a, b, rng=2)
    whole = bootstrap_lift(a, b, rng=1)
    monkeypatch.setattr(module, "_DRAWS_AT_ONCE", 1000)
    assert bootstrap_lift(a, b, rng=1) == whole
    assert whole[0] < whole[1]


def test_the_bootstrap_knows_nothing_where_nobody_clicks() -> None:
    rng = np.random.default_rng(7)
    a, b = users(rng, 50), users(rng, 50)
    a[:, 0] = b[:, 0] = 0
    assert np.isnan(bootstrap_lift(a, b, rng=0)).all()
    b = users(rng, 50)
    b[1:, 0] = 0
    b[0, 0] = 1
    assert bootstrap_lift(users(rng, 50), b, rng=0)[0] == -1  # a third of the resamples has no click


def test_relative_variance_is_that_of_the_log() -> None:
    a = users(np.random.default_rng(8), 100)
    x, y = a.mean(axis=0)
    np.testing.assert_allclose(relative_variance(of(a)), np.var(a[:, 0] / x - a[:, 1] / y, ddof=1))


# What must not change a lift


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_units_do_not_matter(seed: int, of_x: float, of_y: float) -> None:
    rng = np.random.default_rng(seed)
    a, b = users(rng, 60), users(rng, 60)
    plain, scaled = (effect(of(a * s), of(b * s)) for s in (np.ones(2), np.array([of_x, of_y])))
    np.testing.assert_allclose(scaled.lift.low, plain.lift.low, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(scaled.lift.error, plain.lift.error, rtol=1e-7)
    np.testing.assert_allclose(scaled.p_value, plain.p_value, rtol=1e-6, atol=1e-12)


@given(st.integers(0, 2**32 - 1))
def test_the_order_of_users_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = users(rng, 60), users(rng, 60)
    plain, shuffled = effect(of(a), of(b)), effect(of(rng.permutation(a)), of(rng.permutation(b)))
    np.testing.assert_allclose(shuffled.lift.high, plain.lift.high)
    np.testing.assert_allclose(shuffled.p_value, plain.p_value, rtol=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_swapping_the_arms_inverts_the_interval(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = users(rng, 60), users(rng, 60)
    there, back = effect(of(a), of(b)), effect(of(b), of(a))
    np.testing.assert_allclose(1 + back.lift.low, 1 / (1 + there.lift.high))
    np.testing.assert_allclose(back.p_value, there.p_value)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.05, 0.2]))
def test_the_interval_leaves_out_0_when_p_is_below_alpha(seed: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    found = effect(of(users(rng, 60)), of(users(rng, 60, rate=0.3)), alpha=alpha)
    assert (found.lift.low > 0 or found.lift.high < 0) == (found.p_value < alpha)
    assert found.lift.low >= -1


def test_groups_are_judged_as_they_would_be_alone() -> None:
    rng = np.random.default_rng(9)
    columns, group = users(rng, 400), rng.integers(4, size=400)
    found = moments(columns, group, 4)
    both = effects(found[:2], found[2:])
    alone = [effect(of(columns[group == g]), of(columns[group == g + 2])) for g in (0, 1)]
    for one, other in zip(both, alone, strict=True):
        np.testing.assert_allclose(one.lift.low, other.lift.low)


# Nothing to measure


def test_without_clicks_in_the_treatment_the_lift_is_minus_one() -> None:
    rng = np.random.default_rng(10)
    a, b = users(rng, 200), users(rng, 200)
    b[:, 0] = 0
    found = effect(of(a), of(b))
    half = Z * found.difference.error / found.control
    np.testing.assert_allclose([found.lift.value, found.lift.low, found.lift.high], [-1, -1, -1 + half])
    assert found.p_value < 1e-6


def test_without_clicks_in_the_control_there_is_no_lift() -> None:
    rng = np.random.default_rng(11)
    a, b = users(rng, 200), users(rng, 200)
    a[:, 0] = 0
    found = effect(of(a), of(b))
    assert np.isnan([found.lift.value, found.lift.low, found.lift.high]).all()
    assert found.difference.low > 0
    assert found.p_value < 1e-6


def test_arms_that_never_differ() -> None:
    same = np.full((30, 2), [0.1, 0.3])
    found = effect(of(same), of(same))
    assert (found.lift.value, found.lift.error, found.p_value) == (0, 0, 1)
    assert effect(of(same), of(same * [2, 1])).p_value == 0


def test_too_few_users_have_no_interval() -> None:
    found = effect(of(np.array([[1.0, 2.0]])), of(np.array([[1.0, 2.0], [0.0, 3.0]])))
    assert np.isnan([found.lift.error, found.lift.low, found.p_value]).all()
    assert np.isnan(rates(moments(np.zeros((0, 2)), np.zeros(0, np.int64), 1))).all()
    assert np.isnan(p_values(np.array([0.0]), np.array([nan]))).all()


def test_an_alpha_near_0_has_a_finite_interval() -> None:
    np.testing.assert_allclose(critical_value(1e-20), stats.norm.isf(5e-21))
    assert critical_value(5e-324) < 40
    rng = np.random.default_rng(12)
    found = effect(of(users(rng, 200)), of(users(rng, 200)), alpha=1e-20)
    assert -1 < found.lift.low < found.lift.high < np.inf


@pytest.mark.parametrize("alpha", [0.0, 1.0, nan])
def test_alpha_must_be_a_share(alpha: float) -> None:
    a = of(users(np.random.default_rng(0), 10))
    with pytest.raises(ConfigError, match=f"alpha must be between 0 and 1; got {alpha}"):
        effect(a, a, alpha=alpha)
