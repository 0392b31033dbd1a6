"""Regression EM: its steps by arithmetic, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from propensity.logs import prepared, swapped
from simulated import make
from urank.errors import DataError
from urank.propensity.em import EmConfig, ObservedClicks, e_step, fit_em, update_examination


def test_e_step() -> None:
    examined, relevant = e_step(np.array([1, 0, 0]), np.array([0.5, 0.5, 1.0]), np.array([0.4, 0.4, 0.4]))
    assert examined == pytest.approx([1, 0.5 * (1 - 0.4) / (1 - 0.5 * 0.4), 1])
    assert relevant == pytest.approx([1, 0.4 * (1 - 0.5) / (1 - 0.5 * 0.4), 0])


def test_gradient_is_that_of_the_clicks() -> None:
    # By the scores s of relevance, r − P(relevant) is the derivative of −log P(click), too: what makes EM rise.
    rng = np.random.default_rng(0)
    score, examined, click = rng.normal(size=50), rng.uniform(0.1, 0.9, 50), rng.integers(0, 2, 50)

    def loss(s: np.ndarray) -> np.ndarray:
        rate = examined / (1 + np.exp(-s))
        return -np.where(click == 1, np.log(rate), np.log1p(-rate))

    relevant = 1 / (1 + np.exp(-score))
    numeric = (loss(score + 1e-6) - loss(score - 1e-6)) / 2e-6
    np.testing.assert_allclose(relevant - e_step(click, examined, relevant)[1], numeric, atol=1e-8)


def test_steps_of_the_curve_raise_the_likelihood_to_its_maximum() -> None:
    rng = np.random.default_rng(1)
    position, relevant = rng.integers(1, 4, 5000), rng.uniform(0.1, 0.9, 5000)
    click = (rng.random(5000) < relevant / position).astype(np.float64)
    observed = ObservedClicks(position, click)
    curve, losses = np.full(3, 0.5), []
    for _ in range(10):
        losses.append(observed.log_loss(curve, relevant))
        curve = update_examination(observed, relevant, curve, 20)
    assert (np.diff(losses) <= 1e-12).all()
    for k in (1, 2):  # at the maximum the derivative by p(k) is 0
        at = position == k + 1
        score = np.where(click[at] == 1, 1 / curve[k], -relevant[at] / (1 - curve[k] * relevant[at])).mean()
        assert abs(score) < 1e-3


def test_loss_is_the_mean_over_rows() -> None:
    observed = ObservedClicks(np.array([1, 2]), np.array([1.0, 0.0]))
    expected = -(np.log(0.9 * 0.5) + np.log(1 - 0.4 * 0.25)) / 2
    assert observed.log_loss(np.array([0.9, 0.4]), np.array([0.5, 0.25])) == pytest.approx(expected)


def test_same_seed_same_curve(tmp_path: Path) -> None:
    small = make(tmp_path, categories=True, queries=150, sessions=5, features=4, positions=4, user="pbm")
    config = EmConfig(trees=10, threads=1, min_data_in_leaf=20)
    curve = fit_em(small.dataset, config, seed=2)
    assert curve.name == "em"
    assert curve.values[0] == 1
    assert all(0 < value < 2 for value in curve.values)
    assert curve == fit_em(small.dataset, config, seed=2)
    assert curve != fit_em(small.dataset, config, seed=3)


def test_what_it_cannot_learn_from_is_refused(tmp_path: Path) -> None:
    log = swapped(8, 2, lists=200)
    with pytest.raises(DataError, match="has no valid queries"):
        fit_em(prepared(tmp_path / "a", log))
    with pytest.raises(DataError, match="has no features"):
        fit_em(prepared(tmp_path / "b", log.drop("f1"), valid=0.3))
    gap = log.with_columns(position=pl.col("position") * 2 - 1)
    with pytest.raises(DataError, match=r"every position must be shown .*; 2 is not"):
        fit_em(prepared(tmp_path / "c", gap, valid=0.3))
