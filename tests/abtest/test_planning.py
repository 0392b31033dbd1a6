"""Plans: textbook formulas, consistency of users, days and lifts, and growth as a log shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil, log, log1p
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.ab_visits import simulate_visits
from urank.abtest.always_valid import multiplier
from urank.abtest.effects import compare, moments
from urank.abtest.exposures import Exposures
from urank.abtest.metrics import METRICS, by_user
from urank.abtest.planning import Growth, error_needed, growth_of, lift_found, plan
from urank.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def visits() -> Exposures:
    return simulate_visits(6000, days=14, rng=np.random.default_rng(0))


# From numbers


def test_users_for_one_look_as_textbooks_have_them() -> None:
    """Conversion of 10 % of the users: n = 2 p (1 − p) (z + z)² / (p · lift)², with log(1 + lift) for the lift."""
    p, lift = 0.1, 0.02
    found = plan(lift=lift, mean=p, variance=p * (1 - p), power=0.9, alpha=0.01)
    z = stats.norm.ppf(0.995) + stats.norm.ppf(0.9)
    assert found.once.users == ceil(2 * p * (1 - p) * z**2 / (p * log(1 + lift)) ** 2)
    assert found.once.days is found.daily.days is None


@given(st.floats(0.001, 0.5), st.floats(0.55, 0.99), st.floats(0.001, 0.2))
def test_errors_and_lifts_are_inverse(lift: float, power: float, alpha: float) -> None:
    for tau in (None, 0.05):
        error = error_needed(lift, power=power, alpha=alpha, tau=tau)
        np.testing.assert_allclose(lift_found(error, power=power, alpha=alpha, tau=tau), lift, rtol=1e-6)


@given(
    st.sampled_from([1e-6, -1e-6, 0.05, -1 + 1e-12, 1e3]),
    st.floats(1e-6, 1e3),
    st.floats(0.0, 1.0),
    st.sampled_from([1e-320, 1e-20, 0.05, 0.5, 0.999]),
)
def test_there_is_an_error_for_every_lift(lift: float, expected: float, power: float, alpha: float) -> None:
    power = min(alpha + (1 - alpha) * max(power, 1e-9), 1 - 1e-12)
    once = error_needed(lift, power=power, alpha=alpha)
    daily = error_needed(lift, power=power, alpha=alpha, tau=log1p(expected))
    assert 0 < daily <= once
    found = log1p(lift_found(daily, power=power, alpha=alpha, tau=log1p(expected)))
    np.testing.assert_allclose(found, abs(log1p(lift)), rtol=1e-6)


def test_the_error_for_daily_looks_meets_the_bound() -> None:
    error = error_needed(0.08, power=0.8, tau=0.05)
    reach = float(multiplier(np.array(error), 0.05, 0.05))
    np.testing.assert_allclose(log(1.08) / error - stats.norm.ppf(0.8), reach, rtol=1e-6)
    assert error < error_needed(0.08, power=0.8)


def test_users_days_and_lifts_tell_each_other() -> None:
    numbers: dict[str, Any] = {"mean": 0.5, "variance": 1.0, "daily_users": 400, "expected_lift": 0.1}
    first = plan(lift=0.1, **numbers)
    assert first.once.days == ceil(2 * first.once.users / 400)
    by_users = plan(users=first.once.users, **numbers)
    assert by_users.once.lift == pytest.approx(0.1, rel=1e-3)
    assert by_users.once.days == first.once.days
    by_days = plan(days=first.once.days, **numbers)
    assert by_days.once.users == 200 * (first.once.days or 0)
    assert 0.095 < by_days.once.lift <= 0.1
    assert plan(users=first.daily.users, **numbers).daily.lift == pytest.approx(0.1, rel=1e-3)
    assert first.daily.users > first.once.users


def test_a_smaller_share_takes_longer_but_no_more_users() -> None:
    numbers: dict[str, Any] = {"lift": 0.1, "mean": 0.5, "variance": 1.0, "daily_users": 1000}
    whole, tenth = plan(**numbers), plan(**numbers, share=0.1)
    assert tenth.once.users == whole.once.users
    assert tenth.once.days == ceil(2 * whole.once.users / 100)


def test_a_drop_can_be_planned_for_too() -> None:
    found = plan(lift=-0.1, mean=0.5, variance=1.0)
    assert found.once.users == plan(lift=1 / 0.9 - 1, mean=0.5, variance=1.0).once.users


# From a log


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_growth_is_that_of_the_log(visits: Exposures, metric: Any) -> None:
    """Users and errors by the end of each day, against tests of two halves that end then."""
    growth, rate = growth_of(visits, metric)
    columns = by_user(visits, metric)
    np.testing.assert_allclose(rate, columns[:, 0].sum() / columns[:, 1].sum())
    for day in (3, 14):
        columns = by_user(visits.between(0, day - 1), metric)
        seen = columns[:, 1] > 0
        users, variance = growth.at(day)
        assert users == seen.sum()
        arms = moments(columns[seen], visits.arm[seen], 2)
        _, error = compare(arms[0], arms[1], "log")
        np.testing.assert_allclose(4 * variance / users, error**2, rtol=0.1)


def test_extrapolation_meets_a_longer_log(visits: Exposures) -> None:
    """From the first week of a log to the end of its second, roughly."""
    week, _ = growth_of(Exposures(**{**vars(visits.between(0, 6)), "days": visits.days[:7]}), METRICS[0])
    whole, _ = growth_of(visits, METRICS[0])
    assert 0 < week.users_power < 1
    for day in (10, 14):
        (users, variance), (true_users, true_variance) = week.at(day), whole.at(day)
        np.testing.assert_allclose(users, true_users, rtol=0.15)
        np.testing.assert_allclose(variance / users, true_variance / true_users, rtol=0.15)


def test_a_plan_from_a_log(visits: Exposures) -> None:
    found = plan(visits, lift=0.15, metric="ctr")
    assert found.once.days is not None
    assert found.once.days <= 14
    assert not found.once.extrapolated
    users, variance = growth_of(visits, METRICS[0])[0].at(found.once.days)
    needed = error_needed(0.15) ** 2
    assert 4 * variance / users <= needed
    assert found.once.users == ceil(2 * variance / needed)
    earlier = growth_of(visits, METRICS[0])[0].at(found.once.days - 1)
    assert 4 * earlier[1] / earlier[0] > needed
    small = plan(visits, lift=0.05, metric="ctr")
    assert small.once.extrapolated
    assert small.once.users > found.once.users
    assert plan(visits, lift=1e-5).once.days is None  # in more than ten years, or never


def test_days_and_users_of_a_log_tell_lifts(visits: Exposures) -> None:
    ten = plan(visits, days=10, metric="revenue")
    assert ten.once.lift > plan(visits, days=20, metric="revenue").once.lift
    assert ten.daily.lift > ten.once.lift
    same = plan(visits, users=ten.once.users, metric="revenue")
    assert same.once.days in (10, 11)
    assert same.once.lift == pytest.approx(ten.once.lift, rel=0.05)


def test_the_first_day_is_found_on_either_side_of_the_end() -> None:
    growth = Growth(np.array([10.0, 20.0, 30.0]), np.array([np.nan, 1.0, 1.0]))
    for users, day in ((20, 2), (21, 3), (31, 4), (1000, 100), (1001, 101)):
        assert growth.first_day(lambda seen, v, users=users: seen >= users and v > 0) == day
    assert growth.first_day(lambda seen, v: False) is None


def test_sentence_and_json(visits: Exposures) -> None:
    found = plan(visits, lift=0.15)
    assert f"a lift of 15.0 % takes {found.once.users:,} users in each arm, {found.once.days} days" in found.sentence
    assert json.loads(json.dumps(found.to_dict()))["once"]["users"] == found.once.users


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one of lift, users per arm and days; got None, None and None"),
        ({"lift": 0.1, "users": 5}, "give one of lift, users per arm and days; got 0.1, 5 and None"),
        ({"lift": 0.0}, "lift must be above −1 and not 0; got 0.0"),
        ({"lift": 0.1, "mean": None}, "plan needs a log, or mean and variance; got neither"),
        ({"lift": 0.1, "mean": 0.0}, "mean and variance must be above 0; got 0.0 and 1.0"),
        ({"lift": 0.1, "daily_users": 0}, "daily_users must be above 0 and at most 1,000,000,000,000; got 0"),
        ({"days": 7}, "days needs a log, or daily_users"),
        ({"users": 0}, "users must be a whole number from 1 to 1,000,000,000,000; got 0"),
        ({"lift": 0.1, "share": 0.0}, "share must be above 0 and at most 1; got 0.0"),
        ({"lift": 0.1, "power": 1.0}, "power must be between 0 and 1; got 1.0"),
        ({"lift": 0.1, "power": 0.05}, "power must be above alpha, which is 0.05; got 0.05"),
        ({"lift": 0.1, "power": 0.01}, "power must be above alpha, which is 0.05; got 0.01"),
        ({"lift": float("inf")}, "^lift must be from 1e-06 to 1,000 in size; got inf"),
        ({"lift": 1e-300}, "^lift must be from 1e-06 to 1,000 in size; got 1e-300"),
        ({"lift": float("nan")}, "^lift must be above −1 and not 0; got nan"),
        ({"lift": 0.1, "expected_lift": 1e-15}, "expected_lift must be from 1e-06 to 1,000 in size; got 1e-15"),
        ({"users": 10**5000}, "users must be a whole number from 1 to 1,000,000,000,000; got one beyond 1e.18"),
        ({"days": 10**320, "daily_users": 9}, "days must be a whole number from 1 to 3,660; got one beyond 1e.18"),
        ({"users": 10**400, "lift": 0.1}, "give one of lift, users per arm and days; got 0.1, one beyond 1e.18"),
        ({"lift": 0.1, "mean": 1e-200}, "mean must be from 1e-12 to 1e.12; got 1e-200"),
        ({"lift": 0.1, "mean": float("inf")}, "mean must be from 1e-12 to 1e.12; got inf"),
        ({"lift": 0.1, "variance": 1e300}, "the root of variance must be from 1e-06 to 1e.06 times mean, which is 1"),
        ({"lift": 0.1, "variance": float("inf")}, "the root of variance must be from .*; got inf"),
        ({"lift": 0.1, "daily_users": float("inf")}, "daily_users must be above 0 and at most .*; got inf"),
        ({"lift": 0.1, "metric": "foo"}, "metric must be one of ctr, cvr, revenue; got 'foo'"),
        ({"lift": 0.1, "alpha": 0.0}, "alpha must be between 0 and 1; got 0.0"),
    ],
)
def test_invalid_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**({"mean": 1.0, "variance": 1.0} | settings))


def test_logs_that_cannot_be_planned_from(visits: Exposures) -> None:
    with pytest.raises(ConfigError, match=r"metric must be one of ctr, cvr, revenue .*; got 'clicks'"):
        plan(visits, lift=0.1, metric="clicks")
    with pytest.raises(ConfigError, match="mean, variance and daily_users come from the log"):
        plan(visits, lift=0.1, mean=1.0)
    with pytest.raises(DataError, match="must have at least 50 users, 10 of them with any clicks; it has 31 and 14"):
        plan(simulate_visits(60, days=2, rng=np.random.default_rng(0)), lift=0.1)


def test_a_day_of_which_nothing_is_known_yet_is_refused() -> None:
    few = simulate_visits(150, days=9, rng=np.random.default_rng(0))
    with pytest.raises(
        DataError, match=r"days must be at least (\d), by whose end the log has 50 users .*; got 1"
    ) as refused:
        plan(few, days=1)
    first = int(str(refused.value).split()[5].rstrip(","))
    assert first > 1
    assert plan(few, days=first).once.lift > 0
    with pytest.raises(DataError, match=f"days must be at least {first}"):
        plan(few, days=first - 1)


def test_users_that_do_not_differ_are_refused() -> None:
    same = simulate_visits(600, days=2, rng=np.random.default_rng(0))
    same = same.where(same.day == 0)
    same = replace(same, clicks=np.full(len(same.user), 1.0), impressions=np.full(len(same.user), 2.0))
    for wanted in ({"lift": 0.1}, {"days": 1}, {"users": 100}):
        with pytest.raises(DataError, match="all users of the simulated visits have the same clicks per impression"):
            plan(same, **wanted)  # type: ignore[arg-type]
