"""The variance of the models is added to that of the clicks, with the degrees of freedom that both have together."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from urank.evaluation.intervals import Comparison, Interval, add_model_variance, model_variance, normal_interval, paired

FOUND = normal_interval(np.array([1.0, 2.0, 4.0, 5.0, 8.0]))


def test_disagreement_by_hand() -> None:
    assert model_variance(np.array([[0.5, 0.7]])) == pytest.approx(0.2**2 / 4)
    assert model_variance(np.array([[0.5, 0.7], [0.9, 0.6]])) == pytest.approx((0.2**2 / 4 + 0.3**2 / 4) / 2)
    assert model_variance(np.array([[0.5, 0.5], [0.4, 0.4]])) == 0


def test_disagreement_is_the_variance_of_the_mean_of_two() -> None:
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
    half = t.ppf(0.975, degrees) * sqrt(own + variance)
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
    assert wider.p_value == pytest.approx(2 * t.sf(2 / sqrt(1 / 3 + 0.5), degrees))
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
    assert t.ppf(0.975, n - 1 + cuts) * (1 - 1e-9) <= half <= t.ppf(0.975, min(n - 1, cuts)) * (1 + 1e-9)


def test_what_has_no_interval_stays_without() -> None:
    one = normal_interval(np.array([3.0]))
    assert repr(add_model_variance(one, 0.5, 2)) == repr(one)
    for variance in (nan, inf):
        assert add_model_variance(FOUND, variance, 2) == FOUND
    certain = replace(FOUND, error=0.0, low=FOUND.mean, high=FOUND.mean)
    assert add_model_variance(certain, 0.5, cuts=3).high == pytest.approx(FOUND.mean + t.ppf(0.975, 3) * sqrt(0.5))
