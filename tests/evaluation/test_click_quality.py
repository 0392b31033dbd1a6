"""Figures of click models: arithmetic, properties, and agreement with scikit-learn."""

from __future__ import annotations

import json
from math import log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from urank.clicks.families import click_loss
from urank.evaluation.click_quality import (
    Quality,
    auc_metric,
    expected_calibration_error,
    log_loss_metric,
    quality,
    reliability,
    table_error,
)
from urank.log.inspection import wilson_interval

FIGURES = ["log_loss", "auc", "ece", "predicted", "observed"]


def clicks_as_said(seed: int, rows: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities and clicks that happen with just these."""
    rng = np.random.default_rng(seed)
    p = rng.beta(1, 6, rows)
    return p, (rng.random(rows) < p).astype(np.int64)


@st.composite
def scored(draw: st.DrawFn) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Scores with many ties, and clicks."""
    rows = draw(st.integers(1, 30))
    score = draw(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.9]), min_size=rows, max_size=rows))
    click = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    return np.array(score), np.array(click)


# Log loss


def test_log_loss_is_minus_the_log_of_what_happened() -> None:
    found = log_loss_metric(np.log([0.9, 0.9, 0.2]), np.array([1, 0, 0]))
    np.testing.assert_allclose(found, [-log(0.9), -log(1 - 0.9), -log(1 - 0.2)])


def test_log_loss_agrees_with_scikit_learn_and_with_training() -> None:
    p, click = clicks_as_said(0, 2000)
    mean = log_loss_metric(np.log(p), click).mean()
    assert mean == pytest.approx(log_loss(click, p), rel=1e-12)
    assert mean == pytest.approx(click_loss(torch.from_numpy(np.log(p)), torch.from_numpy(click)).item(), rel=1e-9)


def test_log_loss_is_sound_at_both_ends() -> None:
    log_p = np.array([-1e-6, -1e-3, -700.0, -40.0, 0.0, 1e-9, -np.inf, -np.inf])
    click = np.array([0, 0, 1, 0, 1, 1, 0, 1])
    expected = [-log(1e-6), -log(1e-3), 700.0, np.exp(-40), 0.0, 0.0, 0.0, np.inf]
    np.testing.assert_allclose(log_loss_metric(log_p, click), expected, rtol=1e-3, atol=1e-16)
    assert log_loss_metric(np.array([0.0]), np.array([0])).item() == pytest.approx(-log(1e-7))


# AUC


def test_auc_counts_pairs_and_half_of_the_ties() -> None:
    score, click = np.array([0.9, 0.5, 0.5, 0.2, 0.1]), np.array([1, 1, 0, 0, 1])
    assert auc_metric(score, click) == ((2) + (0.5 + 1) + 0) / (3 * 2)


@given(scored())
def test_auc_agrees_with_scikit_learn(rows: tuple[NDArray[np.float64], NDArray[np.int64]]) -> None:
    score, click = rows
    assume(0 < click.sum() < len(click))
    assert auc_metric(score, click) == pytest.approx(roc_auc_score(click, score), abs=1e-12)


@given(scored())
def test_auc_of_a_reversed_score_is_the_rest(rows: tuple[NDArray[np.float64], NDArray[np.int64]]) -> None:
    score, click = rows
    assume(0 < click.sum() < len(click))
    assert auc_metric(-score, click) == pytest.approx(1 - auc_metric(score, click), abs=1e-15)
    assert auc_metric(np.log(score), click) == auc_metric(score, click)
    assert auc_metric(np.full(len(score), 0.3), click) == 0.5


def test_auc_of_rows_that_are_all_alike_is_unknown() -> None:
    assert np.isnan(auc_metric(np.array([0.1, 0.2]), np.array([1, 1])))
    assert np.isnan(auc_metric(np.array([0.1, 0.2]), np.array([0, 0])))
    assert np.isnan(auc_metric(np.zeros(0), np.zeros(0)))


# Calibration


def test_calibration_error_weighs_gaps_by_rows() -> None:
    p = np.array([0.1, 0.2, 0.3, 0.7, 0.8, 0.9])
    click = np.array([0, 0, 1, 1, 1, 1])
    assert expected_calibration_error(p, click, bins=2) == pytest.approx((3 * abs(0.2 - 1 / 3) + 3 * abs(0.8 - 1)) / 6)
    assert expected_calibration_error(p, click, bins=1) == pytest.approx(abs(0.5 - 4 / 6))


def test_reliability_has_bins_of_equally_many_rows_with_wilson_intervals() -> None:
    p, click = clicks_as_said(1, 1005)
    found = reliability(p, click, bins=10)
    assert max(found.count) - min(found.count) <= 1
    in_order = np.argsort(p)
    first = in_order[: found.count[0]]
    assert found.predicted[0] == pytest.approx(p[first].mean())
    assert found.observed[0] == pytest.approx(click[first].mean())
    low, high = wilson_interval(np.array([click[first].sum()]), np.array([found.count[0]]))
    assert (found.low[0], found.high[0]) == (low[0], high[0])
    assert found.predicted == sorted(found.predicted)


@given(scored(), st.integers(1, 20), st.randoms())
def test_reliability_does_not_mind_the_order_of_rows(
    rows: tuple[NDArray[np.float64], NDArray[np.int64]], bins: int, shuffler: Any
) -> None:
    p, click = rows
    order = np.array(shuffler.sample(range(len(p)), len(p)))
    found, shuffled = reliability(p, click, bins), reliability(p[order], click[order], bins)
    assert found.count == shuffled.count
    np.testing.assert_allclose(found.predicted, shuffled.predicted)
    np.testing.assert_allclose(found.observed, shuffled.observed)
    assert len(found.count) <= bins
    assert sum(found.count) == len(p)
    assert 0 <= expected_calibration_error(p, click, bins) <= 1


def test_a_constant_has_one_bin() -> None:
    found = reliability(np.full(100, 0.3), np.arange(100) < 25)
    assert found.count == [100]
    assert expected_calibration_error(np.full(100, 0.3), np.arange(100) < 25) == pytest.approx(0.05)


def test_the_error_of_a_calibrated_model_is_what_chance_gives() -> None:
    rows, bins = 5000, 15
    errors = []
    for seed in range(40):
        p, click = clicks_as_said(seed, rows)
        errors.append(expected_calibration_error(p, click, bins))
    # The rows of a bin are alike to within its width, so each gap is close to normal with variance rate (1 - rate) / n.
    found = reliability(*clicks_as_said(99, 200_000), bins=bins)
    deviations = np.sqrt(np.array(found.predicted) * (1 - np.array(found.predicted)) * bins / rows)
    expected = sqrt(2 / np.pi) * deviations.mean()
    assert np.mean(errors) == pytest.approx(expected, abs=4 * np.std(errors) / sqrt(40) + 0.02 * expected)


# Quality


def test_quality_gathers_the_figures_over_all_and_by_position() -> None:
    p, click = clicks_as_said(2, 3000)
    position = np.random.default_rng(0).choice([1, 2, 4], 3000)
    found = quality(np.log(p), position, click, positions=5)
    assert len(found.by_position) == 5
    for rows, each in [(position > 0, found), *((position == k, found.by_position[k - 1]) for k in (1, 2, 4))]:
        assert (each.rows, each.clicks) == (rows.sum(), click[rows].sum())
        assert each.log_loss == pytest.approx(log_loss(click[rows], p[rows]))
        assert each.auc == pytest.approx(roc_auc_score(click[rows], p[rows]))
        assert each.ece == pytest.approx(expected_calibration_error(p[rows], click[rows]))
        assert each.predicted == pytest.approx(p[rows].mean())
        assert each.observed == pytest.approx(click[rows].mean())
    for k in (3, 5):
        assert found.by_position[k - 1].rows == 0
        assert all(np.isnan(getattr(found.by_position[k - 1], name)) for name in FIGURES)


def test_quality_is_json() -> None:
    found = quality(np.log([0.5, 0.2]), np.array([1, 1], dtype=np.uint8), np.array([0, 0]), positions=2)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["rows"] == 2
    assert plain["auc"] is None
    assert plain["log_loss"] == pytest.approx(-(log(0.5) + log(0.8)) / 2)
    assert [each["rows"] for each in plain["by_position"]] == [2, 0]
    assert "by_position" not in plain["by_position"][0]


def test_quality_of_nothing_is_unknown() -> None:
    found = quality(np.zeros(0), np.zeros(0, dtype=int), np.zeros(0), positions=2)
    assert isinstance(found, Quality)
    assert (found.rows, found.clicks) == (0, 0)
    assert np.isnan(found.log_loss)


# Table error


def test_table_error_is_the_mean_of_columns() -> None:
    table, truth = np.array([[0.5, 0.4], [0.3, 0.1]]), np.array([[0.6, 0.4], [0.1, 0.2]])
    found = table_error(np.log(table).astype(np.float32), truth)
    assert found["by_position"] == pytest.approx([(0.1 + 0.2) / 2, (0.0 + 0.1) / 2], abs=1e-7)
    assert found["mean_absolute_error"] == pytest.approx((0.1 + 0.2 + 0.0 + 0.1) / 4)


# Refusals


def test_bad_input_is_refused() -> None:
    half, one = np.log([0.5, 0.5]), np.array([1, 1])
    with pytest.raises(ValueError, match="click must be 0 or 1; got 2 at row 1"):
        log_loss_metric(half, np.array([0, 2]))
    with pytest.raises(ValueError, match="score must be a number; got nan at row 0"):
        auc_metric(np.array([np.nan, 1.0]), one)
    with pytest.raises(ValueError, match=r"same shape \[rows\]; got shapes \[2\] and \[1\]"):
        reliability(half, np.array([1]))
    with pytest.raises(ValueError, match="bins must be from 1 up; got 0"):
        reliability(np.exp(half), one, bins=0)
    with pytest.raises(ValueError, match="position must be from 1 to 2; got 1 to 3"):
        quality(half, np.array([1, 3]), one, positions=2)
    with pytest.raises(ValueError, match=r"position must have shape \[2\]; got shape \[1\]"):
        quality(half, np.array([1]), one, positions=2)
    with pytest.raises(ValueError, match=r"same shape \[rows, K\]; got shapes \[2, 2\] and \[2\]"):
        table_error(np.zeros((2, 2)), np.zeros(2))
