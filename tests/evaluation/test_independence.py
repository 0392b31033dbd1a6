"""The test of independence: level, power, and robustness to miscalibrated predictions, on simulated users."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, sqrt
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from scipy.special import expit, logit

from urank.evaluation.independence import IndependenceTest, independence_test
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.log.ragged import offsets_of_runs

Floats = NDArray[np.float64]
Clicks = NDArray[np.bool_]

TRIALS = 300
K = 6
EXAMINATION = 1 / np.arange(1, K + 1) ** 0.7


def relevance(rng: np.random.Generator, queries: int = 300) -> Floats:
    """Two lists of each query, in nearly the order of relevance, `[lists, K]`."""
    of_query = np.sort(rng.beta(1.2, 3, size=(queries, K)), axis=1)[:, ::-1]
    return np.repeat(of_query, 2, axis=0) * rng.uniform(0.7, 1, size=(2 * queries, K))


def outcome(p: Floats, click: Clicks, **options: Any) -> IndependenceTest:
    lists, size = p.shape
    rows = (np.tile(np.arange(1, size + 1), lists), np.arange(0, lists * size + 1, size), np.arange(lists) // 2)
    return independence_test(p.ravel(), click.ravel(), *rows, **options)


def first_only(click: Clicks) -> Clicks:
    return click & (click.cumsum(axis=1) == 1)


@pytest.mark.parametrize(
    "predict",
    [
        pytest.param(lambda p: p, id="exact"),
        pytest.param(lambda p: expit(0.8 * logit(p) + 0.3), id="too flat and too high"),
        pytest.param(lambda p: p * np.array([1, 1.2, 0.8, 1, 1.1, 0.9]), id="off by position"),
    ],
)
def test_independent_clicks_pass_as_often_as_the_level_says(predict: Callable[[Floats], Floats]) -> None:
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(TRIALS):
        p = relevance(rng) * EXAMINATION
        alarms += not outcome(predict(p), rng.random(p.shape) < p).independent
    assert alarms / TRIALS < 0.05 + 3 * sqrt(0.05 * 0.95 / TRIALS)


def test_statistics_are_standard_normal_for_independent_clicks() -> None:
    rng = np.random.default_rng(1)
    z = []
    for _ in range(TRIALS):
        p = relevance(rng) * EXAMINATION
        found = outcome(p, rng.random(p.shape) < p)
        z.append((found.clicks_above.z, found.item_above.z))
    assert (np.abs(np.mean(z, axis=0)) < 4 / sqrt(TRIALS)).all()
    assert (np.abs(np.std(z, axis=0) - 1) < 4 / sqrt(2 * TRIALS)).all()


def test_cascade_users_are_found() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        r = relevance(rng, queries=100)
        examined = np.cumprod(1 - np.pad(r, ((0, 0), (1, 0)))[:, :-1], axis=1).mean(axis=0)
        found = outcome(r * examined, first_only(rng.random(r.shape) < r))
        assert not found.independent
        assert found.clicks_above.z < 0
        assert found.observed_below == 0 < found.predicted_below


def test_users_who_compare_with_the_item_above_are_found() -> None:
    rng = np.random.default_rng(3)
    r = rng.beta(1.2, 3, size=(3000, K))
    p = r * EXAMINATION
    click = rng.random(p.shape) < p * (1 - (np.pad(r, ((0, 0), (1, 0)), constant_values=0.3)[:, :-1] - 0.3))
    found = outcome(p, click)
    assert not found.independent
    assert found.item_above.z < 0
    assert found.item_above.adjusted_p < found.clicks_above.adjusted_p


def test_users_who_differ_in_activity_are_not_called_a_cascade() -> None:
    rng = np.random.default_rng(4)
    p = relevance(rng, queries=1000) * EXAMINATION * 0.6
    found = outcome(p, rng.random(p.shape) < p * rng.choice([0.5, 1.5], size=(len(p), 1)))
    assert not found.independent
    assert found.clicks_above.z > 0
    assert "together" in found.sentence


def test_logs_of_clicked_lists_are_not_called_a_cascade() -> None:
    rng = np.random.default_rng(8)
    p = relevance(rng, queries=1000) * EXAMINATION * 0.3
    click = rng.random(p.shape) < p
    kept = click.any(axis=1)
    share = click[kept].mean(axis=0) / p[kept].mean(axis=0)  # a click model of the stored lists
    found = outcome(np.minimum(p[kept] * share, 0.99), click[kept])
    assert found.only_clicked
    assert isnan(found.clicks_above.z)
    assert "cannot be tested" in found.sentence
    assert not outcome(p, click).only_clicked


def test_rows_may_come_in_any_order_within_a_list() -> None:
    rng = np.random.default_rng(5)
    p = relevance(rng, queries=50) * EXAMINATION
    click = rng.random(p.shape) < p
    order = rng.permuted(np.tile(np.arange(K), (len(p), 1)), axis=1)
    shuffled = [np.take_along_axis(each, order, axis=1).ravel() for each in (p, click)]
    rest = (np.arange(0, p.size + 1, K), np.arange(len(p)) // 2)
    found, expected = independence_test(shuffled[0], shuffled[1], (order + 1).ravel(), *rest), outcome(p, click)
    assert found.clicks_above.z == pytest.approx(expected.clicks_above.z)
    assert found.item_above.z == pytest.approx(expected.item_above.z)


def test_repeated_lists_of_a_query_are_no_further_evidence() -> None:
    rng = np.random.default_rng(6)
    p = relevance(rng, queries=50) * EXAMINATION
    click = rng.random(p.shape) < p
    rows = (
        np.tile(np.arange(1, K + 1), 2 * len(p)),
        np.arange(0, 2 * p.size + 1, K),
        np.tile(np.arange(len(p)) // 2, 2),
    )
    twice = independence_test(np.tile(p.ravel(), 2), np.tile(click.ravel(), 2), *rows)
    assert twice.clicks_above.z == pytest.approx(outcome(p, click).clicks_above.z)


def test_nothing_to_test_is_reported() -> None:
    found = independence_test(np.array([0.5, 0.4]), np.array([1, 0]), np.array([1, 1]), np.arange(3), np.arange(2))
    assert found.independent
    assert isnan(found.clicks_above.z)
    assert isnan(found.item_above.adjusted_p)
    assert "cannot be tested" in found.sentence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"p": np.array([0.5, 1.5])}, "p must be probabilities"),
        ({"click": np.array([0, 2])}, "click must be 0 or 1"),
        ({"position": np.array([0, 1])}, "position must be at least 1"),
        ({"offsets": np.array([0, 1])}, "offsets must increase"),
        ({"query": np.array([0, 1])}, "query must have shape"),
        ({"level": 0.0}, "level must be between"),
    ],
)
def test_invalid_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    valid: dict[str, Any] = {
        "p": np.array([0.5, 0.5]),
        "click": np.array([0, 1]),
        "position": np.array([1, 2]),
        "offsets": np.array([0, 2]),
        "query": np.array([0]),
    }
    with pytest.raises(ValueError, match=message):
        independence_test(**valid | changes)


# The simulator's users


@pytest.mark.parametrize("user", ["item", "query", "pbm", "trust", "cascade"])
def test_only_cascade_users_of_the_simulator_are_found(user: Any) -> None:
    config = SimulationConfig(queries=150, sessions=6, features=5, truth_split="all", user=user, seed=3)
    simulation = simulate(config)
    column = "relevance_probability" if user == "cascade" else "table"
    truth = simulation.candidates.select("item_id", column)
    log = simulation.log.join(truth, on="item_id", how="left", maintain_order="left")
    position, click = log["position"].to_numpy(), log["click"].to_numpy()
    if user == "cascade":  # the best table of items and positions: the mean examination of each position
        p = log[column].to_numpy()
        p = p * (np.bincount(position, click) / np.maximum(np.bincount(position, p), 1e-9))[position]
    else:
        p = log.select(pl.col(column).list.get(pl.col("position") - 1))[column].to_numpy()
    offsets = offsets_of_runs(log["session_id"].to_numpy())
    found = independence_test(p, click, position, offsets, log["query_id"].to_numpy()[offsets[:-1]], level=0.01)
    assert found.independent == (user != "cascade"), found.sentence
