"""Refitted networks: derivatives against differences, items that do not move, and estimates against the truth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from known_judges import QUICK_JUDGES
from simulated import Small
from urank.evaluation import refit as module
from urank.evaluation.cross_fitting import CrossfitConfig, fit_judges
from urank.evaluation.policy_evaluation import evaluate_policies
from urank.evaluation.refit import HeldOut, _fisher_scoring, _gains, _likelihood, _Parameters, _Rows, refit
from urank.lab.truth import true_utilities
from urank.learning.features import Inputs
from urank.ranking.guard import Guard
from urank.ranking.policies import Guarded, LoggedOrder, Random

K, ROWS, WIDTH = 4, 60, 3


@pytest.fixture
def rows() -> _Rows:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    features[:, 0] = 1
    logged = rng.integers(0, K + 1, ROWS)  # 0: not shown
    click = (rng.random(ROWS) < 0.3) * (logged > 0)
    return _Rows(features, rng.normal(-0.5, 1, ROWS), rng.normal(0.5, 1, ROWS), logged, click.astype(np.float64))


@pytest.fixture
def parameters() -> _Parameters:
    rng = np.random.default_rng(1)
    return _Parameters(0.2 * rng.standard_normal(WIDTH), 0.2 * rng.standard_normal(WIDTH), rng.normal(-0.5, 0.3, K - 1))


def held_out(rows: _Rows) -> HeldOut:
    """The rows as lists of ten, with two policies."""
    rng = np.random.default_rng(2)
    query = np.repeat(np.arange(ROWS // 10, dtype=np.uint64), 10)
    orders = [rng.integers(1, K + 3, ROWS) for _ in range(2)]
    nothing = Inputs(np.zeros((ROWS, 0), np.float32), np.zeros((ROWS, 0), np.int64))
    position = np.where(rows.logged > 0, rows.logged, K + 1)
    value, home = rng.uniform(0.5, 2, ROWS), np.zeros((1, ROWS), np.int64)
    return HeldOut(nothing, position, rows.click, value, query, query[::10], home, orders)


def test_probability_by_hand(rows: _Rows, parameters: _Parameters) -> None:
    point = module._Point.of(rows, slice(0, ROWS), parameters)
    for row in range(5):
        f = rows.features[row].astype(np.float64)
        relevance = rows.relevance[row] + f @ parameters.alpha
        slope = np.log1p(np.exp(rows.slope[row] + f @ parameters.gamma))
        g = np.append(0, np.cumsum(np.log1p(np.exp(parameters.steps))))
        expected = np.exp(-slope * g) / (1 + np.exp(-relevance))
        np.testing.assert_allclose(point.table[row], expected, rtol=1e-6)
        np.testing.assert_allclose(point.q(np.full(ROWS, 3))[row], expected[2], rtol=1e-6)


def test_score_and_information_of_the_likelihood(rows: _Rows, parameters: _Parameters) -> None:
    _, score, fisher = _likelihood(rows, parameters)
    size = 2 * WIDTH + K - 1
    numeric = np.array([
        (_likelihood(rows, parameters.moved(step))[0] - _likelihood(rows, parameters.moved(-step))[0]) / 2e-5
        for step in 1e-5 * np.eye(size)
    ])  # fmt: skip
    np.testing.assert_allclose(score, numeric, rtol=1e-4, atol=1e-5)
    # The information is the variance of the score under the model: Σ q (1 − q) (∂ log q / (1 − q))².
    point = module._Point.of(rows, slice(0, ROWS), parameters)
    q, shown = point.q(rows.logged), rows.logged > 0
    by_relevance, by_slope, by_step = point.derivatives(rows.logged)
    derivative = np.concatenate(
        [rows.features * by_relevance[:, None], rows.features * by_slope[:, None], by_step], axis=1
    )[shown]
    weight = (q / (1 - q))[shown]
    np.testing.assert_allclose(fisher, derivative.T @ (weight[:, None] * derivative), rtol=1e-4, atol=1e-5)


def test_gradient_of_a_gain(rows: _Rows, parameters: _Parameters) -> None:
    lists, chosen, home = held_out(rows), np.arange(ROWS), np.repeat(np.arange(ROWS // 10), 10)

    def total(found: _Parameters) -> Any:
        return _gains(rows, found, lists, chosen, [2, K], home, ROWS // 10)[0].sum(axis=0)

    gains, gradient = _gains(rows, parameters, lists, chosen, [2, K], home, ROWS // 10)
    assert gains.shape == (ROWS // 10, 4)  # two policies, two cutoffs
    numeric = np.array([
        (total(parameters.moved(step)) - total(parameters.moved(-step))) / 2e-5
        for step in 1e-5 * np.eye(2 * WIDTH + K - 1)
    ])  # fmt: skip
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5)


def test_scoring_finds_the_maximum(rows: _Rows, parameters: _Parameters) -> None:
    start = replace(parameters, alpha=np.zeros(WIDTH), gamma=np.zeros(WIDTH))
    found, solve, degrees = _fisher_scoring(rows, start)
    penalty = np.concatenate([[1e-3, 10, 10] * 2, np.ones(K - 1)])
    moved = np.concatenate([found.alpha, found.gamma, found.steps - start.steps])
    _, score, fisher = _likelihood(rows, found)
    promised = (score - penalty * moved) @ solve(score - penalty * moved)
    assert promised / 2 < module.CONVERGED
    information = fisher + np.diag(penalty)
    np.testing.assert_allclose(information @ solve(score), score, rtol=1e-6, atol=1e-9)
    assert 0 < degrees < len(penalty)


def test_what_does_not_move_gains_nothing(small: Small) -> None:
    guarded = Guarded(Random(), Guard("shift", 0))
    found = evaluate_policies([guarded, Random()], small.dataset, config=QUICK_JUDGES)
    assert found[guarded.name].difference is not None
    assert found[guarded.name].difference.mean == pytest.approx(0, abs=1e-12)
    assert found[guarded.name].difference.error == pytest.approx(0, abs=1e-12)
    assert found["random"].difference.error > 0.001  # type: ignore[union-attr]


def test_values_scale_gains_and_errors(small: Small) -> None:
    """Refitting does not depend on values, and gains are linear in them."""
    judges = fit_judges(small.dataset, ["train"], QUICK_JUDGES)
    plain = evaluate_policies([Random()], small.dataset, judges=judges, cutoffs=())
    rows: dict[str, HeldOut] = {}

    def doubled(cuts: Any, lists: HeldOut, *rest: Any) -> Any:
        rows["doubled"] = replace(lists, value=2 * lists.value)
        return refit(cuts, rows["doubled"], *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urank.evaluation.policy_evaluation.refit", doubled)
        twice = evaluate_policies([Random()], small.dataset, judges=judges, cutoffs=())
    gain, more = plain["random"].difference, twice["random"].difference
    assert gain is not None
    assert more is not None
    assert (more.mean, more.error) == (pytest.approx(2 * gain.mean), pytest.approx(2 * gain.error))


@pytest.mark.parametrize("saved", [True, False])
def test_estimates_are_near_the_truth(small: Small, saved: bool) -> None:
    """With judges of the train split, and with judges of halves of the evaluated one."""
    config = CrossfitConfig(seed=1)
    judges = fit_judges(small.dataset, ["train"], config) if saved else ()
    policies = [Random()]
    found = evaluate_policies(policies, small.dataset, judges=judges, config=config)
    assert len(found.clicks) == (2 if saved else 4)
    true = true_utilities(found, policies, small.dataset, small.folder, seed=config.seed)
    difference, truth = found["random"].difference, true["random"].difference
    assert difference is not None
    assert truth is not None
    assert abs(difference.mean - truth.mean) < 3 * difference.error
    for cutoff, utility in found["random"].utility.items():
        assert abs(utility.mean - true["random"].by_cutoff[cutoff]) < 4 * utility.error
    logged = LoggedOrder()
    assert found[logged.name].difference is None
