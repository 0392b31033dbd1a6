"""Harvested interventions: counts, weights, the likelihood and what it cannot know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.optimize import check_grad

from propensity.logs import prepared, swapped
from urank.errors import DataError
from urank.learning.features import Featurizer
from urank.propensity.harvest import (
    check_connected,
    count_query_items,
    fit_harvest,
    harvest_curve,
    harvest_loss,
    pair_numbers,
    weighted_clicks,
)


def expected(curve: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The weighted clicks of pairs of known relevance, as they are on average."""
    rng, K = np.random.default_rng(seed), len(curve)
    shown = rng.uniform(50, 500, (K, K))
    shown, relevance = (shown + shown.T) / 2, rng.uniform(0.1, 0.8, (K, K))
    relevance = (relevance + relevance.T) / 2
    rate = curve[:, None] * relevance
    off_diagonal = 1 - np.eye(K)
    return shown * rate * off_diagonal, shown * (1 - rate) * off_diagonal


def test_pairs_have_numbers_of_their_own() -> None:
    numbers = pair_numbers(6)
    assert (numbers == numbers.T).all()
    assert sorted(numbers[np.triu_indices(6, 1)]) == list(range(6 * 5 // 2))


@pytest.mark.parametrize("K", [2, 5, 10])
def test_exact_expectations_give_the_curve_exactly(K: int) -> None:
    curve = 1 / np.arange(1, K + 1) ** 0.8
    np.testing.assert_allclose(harvest_curve(*expected(curve)), curve, rtol=1e-4)


def test_a_curve_may_rise() -> None:
    curve = np.array([1.0, 1.25, 0.5])
    np.testing.assert_allclose(harvest_curve(*expected(curve)), curve, rtol=1e-4)


def test_one_position_needs_no_clicks() -> None:
    assert harvest_curve(np.zeros((1, 1)), np.zeros((1, 1))).tolist() == [1.0]


def test_gradient() -> None:
    rng = np.random.default_rng(1)
    clicked, not_clicked = expected(1 / np.arange(1, 5))
    for _ in range(3):
        point = rng.normal(size=4 + 6)
        error = check_grad(
            lambda x: harvest_loss(x, clicked, not_clicked)[0],
            lambda x: harvest_loss(x, clicked, not_clicked)[1],
            point,
        )
        assert error < 1e-6


def test_counts_by_query_and_item(tmp_path: Path) -> None:
    log = pl.DataFrame(
        {
            "query_id": ["a", "a", "a", "a", "b", "b"],
            "session_id": ["1", "1", "2", "2", "3", "3"],
            "item_id": ["x", "y", "y", "x", "x", "z"],
            "position": [1, 2, 1, 2, 1, 3],
            "click": [1, 0, 1, 1, 0, 1],
            "f1": [1.0, 2.0, 2.0, 1.0, 5.0, 7.0],
        }
    )
    dataset = prepared(tmp_path, log)
    featurizer = Featurizer.fit(dataset.blocks("train", ["f1"]), ["f1"], [])
    pairs = count_query_items(dataset, "train", featurizer)
    assert np.diff(pairs.offsets).tolist() == [2, 2]
    assert pairs.inputs is not None
    by_feature = dict(zip(pairs.inputs.numeric[:, 0].tolist(), range(4), strict=True))
    assert pairs.shows[[by_feature[f] for f in (1.0, 2.0, 5.0, 7.0)]].tolist() == [
        [1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 1],
    ]  # fmt: skip
    assert pairs.clicks[[by_feature[f] for f in (1.0, 2.0, 5.0, 7.0)]].tolist() == [
        [1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1],
    ]  # fmt: skip
    assert np.isnan(pairs.rates[pairs.shows == 0]).all()
    clicked, not_clicked = weighted_clicks(pairs)
    assert clicked[0, 1] == 1 + 1
    assert clicked[1, 0] == 1 + 0
    assert not_clicked[1, 0] == 0 + 1
    with pytest.raises(DataError, match="positions 3 are not"):
        fit_harvest(dataset)


def test_swapped_items_are_interventions(tmp_path: Path) -> None:
    # Each query was shown once in either order; of the ten items ranked first 8 were clicked at 1 and 2 at 2.
    curve = fit_harvest(prepared(tmp_path, swapped(8, 2)))
    assert curve.values == pytest.approx((1.0, 2 / 8), rel=1e-3)


def test_positions_that_nothing_joins_are_named() -> None:
    clicked = np.zeros((5, 5))
    clicked[0, 1] = clicked[3, 4] = 1.0
    with pytest.raises(DataError, match="in here positions 3–5 are not"):
        check_connected(clicked, "here")
    clicked[1, 2] = clicked[4, 2] = 1.0
    check_connected(clicked, "here")


def test_items_must_have_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must have item_id"):
        fit_harvest(prepared(tmp_path, swapped(8, 2).drop("item_id")))
