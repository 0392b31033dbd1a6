"""Sums of users: against numpy, and how they add up."""

from __future__ import annotations

import numpy as np

from urank.abtest.effects import BLOCKS, moments, random_blocks


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
    found = moments(now, np.array([0, 1, 2, 1]), 3, before).over_days()
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
