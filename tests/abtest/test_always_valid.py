"""Always-valid intervals: the formula, paths of which the truth is known, and looks against whole tests."""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from abtest.helpers import log_of
from benchmarks.ab_visits import simulate_visits
from urank.abtest.always_valid import ENOUGH_USERS, always_p, looks, mixture_tau, multiplier, running_totals
from urank.abtest.effects import effect, moments
from urank.abtest.exposures import Exposures
from urank.abtest.metrics import METRICS, Metric, by_user
from urank.errors import ConfigError


@pytest.fixture(scope="module")
def visits() -> Exposures:
    return simulate_visits(1500, days=6, before=2, lift=0.3, rng=np.random.default_rng(0))


# The bound


def test_the_p_value_is_one_over_the_mixture() -> None:
    """Λ = ∫ N(d; δ, s²) N(δ; 0, τ²) dδ / N(d; 0, s²), integrated numerically."""
    d, s, tau = 0.11, 0.04, 0.05

    def joint(delta: float) -> float:
        return float(stats.norm.pdf(d, delta, s) * stats.norm.pdf(delta, 0, tau))

    mixture = integrate.quad(joint, -1, 1, points=[0.0, d])[0] / stats.norm.pdf(d, 0, s)
    np.testing.assert_allclose(always_p(np.array([d]), np.array([s]), tau), [1 / mixture], rtol=1e-6)


@given(st.floats(1e-3, 1.0), st.floats(1e-3, 1.0), st.floats(0.001, 0.5))
def test_an_interval_leaves_out_0_when_the_p_value_is_below_alpha(error: float, tau: float, alpha: float) -> None:
    edge = float(multiplier(np.array([error]), tau, alpha)[0]) * error
    inside, outside = (float(always_p(np.array([edge * f]), np.array([error]), tau)[0]) for f in (0.999, 1.001))
    assert inside > alpha > outside


@given(st.floats(1e-3, 1.0), st.floats(1e-3, 1.0))
def test_it_is_wider_than_for_one_look(error: float, tau: float) -> None:
    assert multiplier(np.array(error), tau, 0.05) > 1.96


def test_twenty_looks_are_safe_whatever_their_dependence() -> None:
    least = multiplier(np.geomspace(1e-3, 1e3, 10_000), 1.0, 0.05).min()
    assert least > 3.03
    assert 20 * 2 * stats.norm.sf(least) < 0.05


def test_p_values_never_rise() -> None:
    found = always_p(np.array([0.0, 0.3, 0.0, 0.5]), np.array([0.1, 0.1, 0.08, 0.08]), 0.1)
    assert found[0] == 1
    assert (np.diff(found) <= 0).all()
    assert found[2] == found[1]


def test_a_path_without_a_lift_passes_the_bound_less_often_than_alpha() -> None:
    """Sums of independent normal steps, 300 looks from few data to much: the case that the bound is made for."""
    rng, paths, alpha = np.random.default_rng(1), 4000, 0.1
    information = np.geomspace(10, 100_000, 300)
    steps = np.sqrt(np.diff(information, prepend=0.0))
    value = np.cumsum(rng.normal(size=(paths, 300)) * steps, axis=1) / information
    error = 1 / np.sqrt(information)
    passed = (np.abs(value) > multiplier(error, 0.05, alpha) * error).any(axis=1).mean()
    naive = (np.abs(value) > 1.645 * error).any(axis=1).mean()
    assert passed < alpha + 4 * sqrt(alpha * (1 - alpha) / paths)
    assert passed > alpha / 3  # it is not wide for nothing
    assert naive > 0.6


def test_tau_is_the_log_of_the_ratio() -> None:
    assert mixture_tau(0.05) == pytest.approx(log(1.05))
    assert mixture_tau(-0.05) == pytest.approx(-log(0.95))
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="expected_lift must be above −1 and not 0"):
            mixture_tau(wrong)


# Looks


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_look_is_what_a_test_that_ended_then_would_say(visits: Exposures, metric: Metric) -> None:
    test = visits.between(2, 7)
    found = {look.day: look for look in looks(running_totals(test, metric), test.days, 0, 1, first=2, last=6)}
    assert list(found) == list(visits.days[2:7])
    for day in range(2, 7):
        columns = by_user(visits.between(2, day), metric)
        seen = columns[:, 1] > 0
        arms = moments(columns[seen], visits.arm[seen], 2)
        alone, look = effect(arms[0], arms[1]), found[visits.days[day]]
        assert (look.control_users, look.treatment_users) == (alone.control_users, alone.treatment_users)
        np.testing.assert_allclose([look.lift.value, look.lift.low], [alone.lift.value, alone.lift.low])
        np.testing.assert_allclose(look.p_value, alone.p_value, rtol=1e-6)
        s = alone.lift.error / (1 + alone.lift.value)
        reach = s * sqrt((1 + s**2 / log(1.05) ** 2) * log((1 + log(1.05) ** 2 / s**2) / 0.05**2))
        ends = [(1 + alone.lift.value) * exp(sign * reach) - 1 for sign in (-1, 1)]
        np.testing.assert_allclose([look.always_low, look.always_high], ends)


def test_looks_wait_until_there_are_users_enough() -> None:
    """One user of each arm comes each day, and clicks on it and on every day after."""
    rows = [
        (2 * user + arm, "AB"[arm], day, int((user + day) % 2 == 0), 1.0)
        for user in range(60)
        for arm in (0, 1)
        for day in (user, user + 1)
    ]
    found = running_totals(log_of(rows), METRICS[0])
    daily = looks(found, tuple(map(str, range(61))), 0, 1)
    assert daily[0].control_users == daily[0].treatment_users == ENOUGH_USERS
    assert looks(found, tuple(map(str, range(61))), 0, 1, last=48) == []
    few = [(user, "AB"[user % 2], 0, int(user < 19), 1.0) for user in range(200)]
    assert looks(running_totals(log_of(few), METRICS[0]), ("0",), 0, 1) == []  # nine users of B clicked
    more = [(user, "AB"[user % 2], 0, int(user < 20), 1.0) for user in range(200)]
    assert len(looks(running_totals(log_of(more), METRICS[0]), ("0",), 0, 1)) == 1
