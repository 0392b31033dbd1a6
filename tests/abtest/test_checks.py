"""Sizes of arms, and false positives of random halves."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from abtest.made import of, users
from urank.abtest.analysis import sample_ratio, split_check
from urank.abtest.effects import effect
from urank.errors import ConfigError


@pytest.mark.parametrize("shares", [None, {"A": 1, "B": 1, "C": 2}])
def test_the_sample_ratio_is_tested_as_by_scipy(shares: dict[str, float] | None) -> None:
    found = sample_ratio({"A": 1000, "B": 1090, "C": 2010}, shares)
    expected = np.array([1, 1, 1]) / 3 if shares is None else np.array([1, 1, 2]) / 4
    test = stats.chisquare([1000, 1090, 2010], expected * 4100)
    np.testing.assert_allclose([found.chi_square, found.p_value], [test.statistic, test.pvalue])
    assert found.sound == (shares is not None)


def test_arms_of_the_wrong_size_are_suspicious() -> None:
    assert sample_ratio({"A": 5160, "B": 4840}).p_value > 0.001
    assert not sample_ratio({"A": 5170, "B": 4830}).sound
    assert sample_ratio({"A": 5170, "B": 4830}, {"A": 0.52, "B": 0.48}).sound


def test_every_arm_needs_a_share() -> None:
    with pytest.raises(ConfigError, match="shares must give each arm a share above 0; got None for 'B'"):
        sample_ratio({"A": 1, "B": 1}, {"A": 0.5})


@pytest.mark.parametrize("n", [2000, 25_000])
def test_halves_of_ordinary_users_differ_as_often_as_they_should(n: int) -> None:
    """Also in blocks of users, above 10,000 of them."""
    found = split_check(users(np.random.default_rng(0), n), metric="ctr", rng=0)
    assert found.sound
    assert (found.users, found.splits, found.metric) == (n, 1000, "ctr")
    interval = stats.binomtest(round(found.share * 1000), 1000).proportion_ci(0.99, method="exact")
    np.testing.assert_allclose([found.low, found.high], [interval.low, interval.high])


def test_halves_are_tested_as_arms_are() -> None:
    """The same halves, one by one."""
    columns = users(np.random.default_rng(1), 150)
    rng = np.random.default_rng(7)
    drawn = rng.integers(2, size=(100, 150), dtype=np.int8).astype(bool)
    called = [effect(of(columns[~half]), of(columns[half])).p_value < 0.2 for half in drawn]
    assert split_check(columns, metric="ctr", rng=7, alpha=0.2, splits=100).share == np.mean(called)


def test_a_few_users_that_earn_all_put_p_values_off() -> None:
    columns = np.stack([np.full(400, 1e-3), np.ones(400)], axis=1)
    columns[:4, 0] = 1000.0
    found = split_check(columns, metric="revenue", rng=0)
    assert not found.sound
