"""A/B tests of simulated users, whose lift is known; tolerances are four standard errors.

What counts is how a standard error relates to what estimates vary by: the squares of (estimate − truth) / error have a
mean of 1, which the tests of all worlds together tell more sharply than the share of them that is called a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log1p, sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.ab_visits import simulate_visits
from urank.abtest.analysis import Result, analyse

pytestmark = pytest.mark.slow

TESTS, USERS, BEFORE, DAYS = 300, 1500, 5, 8
METRICS = ("ctr", "cvr", "revenue")


@dataclass(frozen=True)
class Worlds:
    """The results of many tests of one lift."""

    lift: float
    results: dict[str, list[Result]]

    def z(self, metric: str, *, cuped: bool = False) -> NDArray[np.float64]:
        """How many errors each log lift is off by."""
        found = []
        for result in self.results[metric]:
            effect = result.cuped.effect if cuped and result.cuped else result.effect
            found.append((log1p(effect.lift.value) - log1p(self.lift)) / (effect.lift.error / (1 + effect.lift.value)))
        return np.array(found)

    def share(self, flags: list[bool]) -> tuple[float, float]:
        """How many are true, and how many standard errors of a share of 5 % that is above it."""
        found = float(np.mean(flags))
        return found, (found - 0.05) / sqrt(0.05 * 0.95 / len(flags))


def worlds(lift: float) -> Worlds:
    results: dict[str, list[Result]] = {}
    for seed in range(TESTS):
        visits = simulate_visits(USERS, days=DAYS, before=BEFORE, lift=lift, rng=np.random.default_rng([seed, 1]))
        for result in analyse(visits, control="A", start=visits.days[BEFORE], splits=0).results:
            results.setdefault(result.metric.name, []).append(result)
    return Worlds(lift, results)


@pytest.fixture(scope="module")
def alike() -> Worlds:
    return worlds(0.0)


@pytest.fixture(scope="module")
def lifted() -> Worlds:
    return worlds(0.2)


@pytest.mark.parametrize("cuped", [False, True], ids=["delta", "cuped"])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("which", ["alike", "lifted"])
def test_estimates_vary_by_their_errors(which: str, metric: str, cuped: bool, request: pytest.FixtureRequest) -> None:
    z = request.getfixturevalue(which).z(metric, cuped=cuped)
    assert abs(z.mean()) < 4 / sqrt(TESTS)
    assert abs((z**2).mean() - 1) < 4 * sqrt(2 / TESTS)


@pytest.mark.parametrize("metric", METRICS)
def test_nothing_is_taken_for_something_one_time_in_twenty(alike: Worlds, metric: str) -> None:
    found = alike.results[metric]
    assert abs(alike.share([result.effect.p_value < 0.05 for result in found])[1]) < 4
    assert abs(alike.share([result.cuped.effect.p_value < 0.05 for result in found if result.cuped])[1]) < 4


@pytest.mark.parametrize("metric", METRICS)
def test_who_looks_daily_is_wrong_often_unless_intervals_are_always_valid(alike: Worlds, metric: str) -> None:
    found = alike.results[metric]
    assert alike.share([any(look.p_value < 0.05 for look in result.looks) for result in found])[1] > 4
    assert alike.share([result.decided is not None for result in found])[0] <= 0.02


@pytest.mark.parametrize("metric", METRICS)
def test_intervals_cover_the_true_lift(lifted: Worlds, metric: str) -> None:
    once = [not r.effect.lift.low <= 0.2 <= r.effect.lift.high for r in lifted.results[metric]]
    always = [any(not k.always_low <= 0.2 <= k.always_high for k in r.looks) for r in lifted.results[metric]]
    assert abs(lifted.share(once)[1]) < 4
    assert lifted.share(always)[1] < 4


@pytest.mark.parametrize("metric", METRICS)
def test_the_time_before_makes_estimates_tighter(lifted: Worlds, metric: str) -> None:
    reductions = [result.cuped.variance_reduction for result in lifted.results[metric] if result.cuped]
    assert 0.1 < np.mean(reductions) < 0.6
    plain, cuped = (lifted.z(metric, cuped=which) for which in (False, True))
    assert np.corrcoef(plain, cuped)[0, 1] > 0.5


def test_impressions_are_not_the_sample(alike: Worlds) -> None:
    """Taken for independent, they make of nothing something far too often."""
    wrong = []
    for seed in range(TESTS):
        visits = simulate_visits(USERS, days=DAYS, rng=np.random.default_rng([seed, 2]))
        arm = visits.arm[visits.user]
        clicks, shown = (np.bincount(arm, sums, 2) for sums in (visits.clicks, visits.impressions))
        rate = clicks / shown
        error = sqrt(((1 - rate) / clicks).sum())
        wrong.append(abs(np.log(rate[1] / rate[0])) > 1.96 * error)
    assert alike.share(wrong)[1] > 4
