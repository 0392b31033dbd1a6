"""Simulated users: the rates that are stated, the lift where it should be, and the same log in both forms."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from benchmarks.ab_visits import CLICKS, SHOWN, VISITS, impressions_of, simulate_visits
from urank.abtest.exposures import read_exposures


def test_rates_are_those_stated() -> None:
    users, days = 20_000, 10
    found = simulate_visits(users, days=days, rng=np.random.default_rng(0))
    a, b = CLICKS
    impressions, rate = users * days * VISITS * (1 + SHOWN), a / (a + b)
    assert found.impressions.sum() == pytest.approx(impressions, rel=4 * sqrt(1.25 / users))  # Var λ / (E λ)² = 1/0.8
    assert found.clicks.sum() / found.impressions.sum() == pytest.approx(rate, rel=0.05)
    assert found.revenue is not None
    assert found.revenue.sum() / found.clicks.sum() == pytest.approx(np.exp(0.8**2 / 2), rel=0.02)
    assert (np.bincount(found.user, minlength=found.users) > 0).all()
    assert (np.diff(found.user * days + found.day) > 0).all()


def test_the_lift_is_in_one_arm_and_in_the_test_alone() -> None:
    found = simulate_visits(40_000, days=5, before=5, lift=0.5, share=0.3, rng=np.random.default_rng(1))
    assert found.arm.mean() == pytest.approx(0.3, abs=4 * sqrt(0.21 / found.users))
    for first, last, expected in ((0, 4, 1.0), (5, 9, 1.5)):
        part = found.between(first, last)
        treated = found.arm[part.user] == 1
        rates = [part.clicks[which].sum() / part.impressions[which].sum() for which in (~treated, treated)]
        assert rates[1] / rates[0] == pytest.approx(expected, rel=0.06)


def test_impressions_are_the_same_log() -> None:
    visits = simulate_visits(500, days=4, before=1, lift=0.1, rng=np.random.default_rng(2))
    found = read_exposures(impressions_of(visits, np.random.default_rng(3)))
    assert (found.arms, found.days) == (visits.arms, visits.days)
    for name in ("arm", "user", "day", "impressions", "clicks", "conversions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(visits, name))
    assert found.revenue is not None
    assert visits.revenue is not None
    # Values are read as whole millionths, so each conversion may be off by half of one.
    assert (np.abs(found.revenue - visits.revenue) <= 0.5e-6 * visits.conversions + 1e-9).all()


def test_the_same_seed_gives_the_same() -> None:
    one, other = (simulate_visits(100, rng=np.random.default_rng(4)) for _ in range(2))
    np.testing.assert_array_equal(one.revenue, other.revenue)  # type: ignore[arg-type]
