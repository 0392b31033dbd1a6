"""Calibration: arithmetic, scikit-learn, properties, fresh simulated data, JSON."""

from __future__ import annotations

import json
from math import exp, log
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import expit, logit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from urank.clicks.calibration import (
    FLOOR,
    KNOT_CLICKS,
    KNOTS,
    LEAST_SLOPE,
    PRIOR_CLICKS,
    Calibration,
    Isotonic,
    Temperature,
    calibrate,
    fit_calibration,
    log_sigmoid,
    logit_of_log,
    prior_weight,
    running_minimum,
)
from urank.clicks.click_settings import CalibrationKind
from urank.evaluation.click_quality import expected_calibration_error, log_loss_metric

KINDS: list[CalibrationKind] = list(get_args(CalibrationKind))
CURVES: list[CalibrationKind] = ["temperature", "isotonic"]
K = 4

Rows = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]


def overconfident(seed: int, rows: int) -> Rows:
    """log P, position and click, of a model that is too sure of itself, differently at each position."""
    rng = np.random.default_rng(seed)
    position = rng.integers(1, K + 1, rows)
    truth = logit(expit(rng.normal(-1, 1, rows)) / position)
    said = expit(1.5 * truth + 0.3 * position)
    return np.log(said), position, (rng.random(rows) < expit(truth)).astype(float)


def at(calibration: Calibration, log_ctr: NDArray[np.float64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """The calibrated log P at the logged positions."""
    table = calibrate(calibration, np.repeat(log_ctr[:, None], calibration.positions, axis=1))
    return np.take_along_axis(table, position[:, None] - 1, axis=1)[:, 0]


def of_position(rows: Rows, k: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    log_ctr, position, click = rows
    return log_ctr[position == k], click[position == k]


@st.composite
def small_logs(draw: st.DrawFn) -> Rows:
    rows = draw(st.integers(0, 40))
    p = draw(st.lists(st.floats(1e-12, 1.0), min_size=rows, max_size=rows))
    position = draw(st.lists(st.integers(1, K), min_size=rows, max_size=rows))
    click = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    return np.log(np.array(p, dtype=float)), np.array(position, dtype=np.int64), np.array(click, dtype=float)


# Arithmetic


def test_temperature_scales_and_shifts_the_logit() -> None:
    calibration = Temperature(2, [2.0, 0.5], [0.0, -1.0])
    p = np.array([[0.2, 0.3]])
    expected = [[2 * log(0.2 / 0.8), 0.5 * log(0.3 / 0.7) - 1]]
    np.testing.assert_allclose(logit(np.exp(calibrate(calibration, np.log(p)))), expected)


def test_isotonic_interpolates_between_knots_and_stays_off_0_and_1() -> None:
    calibration = Isotonic(1, [[0.0, 0.4]], [[0.4, 0.6]], [[0.1, 0.9]])
    p = np.array([[0.2], [0.4], [0.7], [0.0], [1.0]])
    with np.errstate(divide="ignore"):
        found = np.exp(calibrate(calibration, np.log(p)))[:, 0]
    np.testing.assert_allclose(found, [0.1 / 2, 0.1, 0.1 + 0.9 / 2, FLOOR, 1 - FLOOR], rtol=1e-6)


def test_none_is_the_identity_even_where_a_row_rises() -> None:
    table = np.log(np.array([[0.2, 0.3]], dtype=np.float32))
    calibration = fit_calibration("none", *overconfident(0, 100), positions=K)
    assert calibrate(Calibration(2, monotone=True), table).tolist() == table.tolist()
    assert calibration.kind == "none"


def test_temperature_of_1_and_0_is_the_identity() -> None:
    p = np.concatenate([np.logspace(-30, -1, 50), 1 - np.logspace(-1, -6, 50)])[:, None]
    np.testing.assert_allclose(calibrate(Temperature(1, [1.0], [0.0]), np.log(p)), np.log(p), rtol=1e-9)
    np.testing.assert_allclose(
        calibrate(Temperature(1, [1.0], [0.0]), np.log(p).astype(np.float32)), np.log(p), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("kind", CURVES)
def test_a_position_without_rows_keeps_its_probabilities(kind: CalibrationKind) -> None:
    rng = np.random.default_rng(0)
    said = rng.random(1000)
    click = rng.random(1000) < said / 2
    calibration = fit_calibration(kind, np.log(said), np.full(1000, 2), click, positions=3)
    p = np.array([0.01, 0.3, 0.9])
    found = np.exp(calibrate(calibration, np.log(np.tile(p[:, None], 3))))
    np.testing.assert_allclose(found[:, [0, 2]], np.tile(p[:, None], 2), rtol=1e-6)
    assert np.abs(found[:, 1] - p).max() > 0.1


@pytest.mark.parametrize("kind", CURVES)
def test_a_few_rows_move_little(kind: CalibrationKind) -> None:
    click = np.array([1.0, 1.0, 0.0])
    calibration = fit_calibration(kind, np.full(3, log(0.1)), np.ones(3, dtype=int), click, positions=1)
    found = exp(calibrate(calibration, np.array([[log(0.1)]])).item())
    weight = float(prior_weight(PRIOR_CLICKS if kind == "temperature" else KNOT_CLICKS, 3, 0.1, 2 / 3))
    assert found == pytest.approx((2 / 3 + weight * 0.1) / (1 + weight), rel=1e-5)
    assert 0.1 < found < 0.5


def test_monotone_takes_the_minimum_so_far() -> None:
    calibration = Temperature(3, [1.0, 1.0, 1.0], [-2.0, 0.0, -1.0], monotone=True)
    p = np.array([[0.5, 0.4, 0.3]])
    first, third = expit(logit(0.5) - 2), expit(logit(0.3) - 1)
    expected = [[first, first, min(first, third)]]
    np.testing.assert_allclose(np.exp(calibrate(calibration, np.log(p))), expected, rtol=1e-6)


# Against scikit-learn


def test_temperature_is_logistic_regression_when_there_is_plenty_of_data() -> None:
    rows = overconfident(1, 40_000)
    calibration = fit_calibration("temperature", *rows, positions=K)
    assert isinstance(calibration, Temperature)
    for k in range(1, K + 1):
        log_ctr, click = of_position(rows, k)
        z = logit(np.exp(log_ctr))
        p = np.exp(log_ctr)
        # The prior as further rows, clicked and not, weighted: the same objective, solved by other means.
        weight = float(prior_weight(PRIOR_CLICKS, len(p), p.mean(), click.mean()))
        peer = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(
            np.tile(z, 2)[:, None],
            np.repeat([0, 1], len(z)),
            sample_weight=np.concatenate([1 - click + weight * (1 - p), click + weight * p]),
        )
        assert calibration.slope[k - 1].item() == pytest.approx(peer.coef_.item(), rel=1e-3)
        assert calibration.intercept[k - 1].item() == pytest.approx(peer.intercept_.item(), rel=1e-3, abs=1e-3)


def test_isotonic_follows_isotonic_regression() -> None:
    rows = overconfident(2, 400_000)
    calibration = fit_calibration("isotonic", *rows, positions=K)
    for k in range(1, K + 1):
        log_ctr, click = of_position(rows, k)
        peer = IsotonicRegression().fit(np.exp(log_ctr), click)
        p = np.quantile(np.exp(log_ctr), np.linspace(0.02, 0.98, 50))
        found = np.exp(at(calibration, np.log(p), np.full(50, k)))
        # A knot holds a thirtieth of the rows or more: that is how finely the stair is seen.
        error = np.sqrt(found * (1 - found) / (len(click) / KNOTS))
        assert (np.abs(found - peer.predict(p)) < 4 * error).all()


def test_isotonic_treads_far_apart_become_knots() -> None:
    said, rate, n = np.array([0.1, 0.2, 0.4]), np.array([0.05, 0.25, 0.3]), 2000
    click = np.concatenate([np.repeat([1.0, 0.0], [round(n * r), n - round(n * r)]) for r in rate])
    log_ctr = np.log(np.repeat(said, n))
    calibration = fit_calibration("isotonic", log_ctr, np.ones(3 * n, dtype=int), click, positions=1)
    weight = prior_weight(KNOT_CLICKS, n, said, rate)
    expected = (rate + weight * said) / (1 + weight)
    np.testing.assert_allclose(np.exp(calibrate(calibration, np.log(said[:, None])))[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(IsotonicRegression().fit_transform(np.repeat(said, n), click)[::n], rate)


# Properties


@settings(deadline=None, max_examples=40)
@given(small_logs(), st.sampled_from(KINDS), st.booleans())
def test_calibration_rises_within_a_position(rows: Rows, kind: CalibrationKind, monotone: bool) -> None:
    calibration = fit_calibration(kind, *rows, positions=K, monotone=monotone)
    p = np.concatenate([np.logspace(-12, -2, 60), np.linspace(0.01, 1, 200)])
    for kind_of_float in (np.float32, np.float64):
        table = calibrate(calibration, np.log(np.tile(p[:, None], K)).astype(kind_of_float))
        assert table.dtype == kind_of_float
        assert np.isfinite(table).all()
        assert (table <= 0).all()
        # tanh and softplus are not rising to the last bit.
        assert (np.diff(table, axis=0) >= -1e-6 * np.abs(table[1:])).all()
        if monotone:
            assert (np.diff(table, axis=1) <= 0).all()


@settings(deadline=None, max_examples=40)
@given(small_logs())
def test_isotonic_curves_have_few_knots_and_rise_from_0_to_1(rows: Rows) -> None:
    calibration = fit_calibration("isotonic", *rows, positions=K)
    assert isinstance(calibration, Isotonic)
    assert calibration.rise.shape[1] <= KNOTS - 1
    assert (calibration.rise >= 0).all()
    assert (calibration.width > 0).all()
    np.testing.assert_allclose(calibration.rise.sum(dim=1), 1, rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(small_logs())
def test_slopes_are_positive_however_wrong_the_model_is(rows: Rows) -> None:
    calibration = fit_calibration("temperature", *rows, positions=K)
    assert isinstance(calibration, Temperature)
    assert (calibration.slope >= LEAST_SLOPE - 1e-6).all()
    assert torch.isfinite(calibration.intercept).all()


def test_a_model_that_orders_items_backwards_is_not_turned_round() -> None:
    log_ctr, position, click = overconfident(3, 20_000)
    backwards = np.log(-np.expm1(log_ctr))
    calibration = fit_calibration("temperature", backwards, position, click, positions=K)
    assert isinstance(calibration, Temperature)
    np.testing.assert_allclose(calibration.slope, LEAST_SLOPE, rtol=1e-5)


@pytest.mark.parametrize("said", [1e-6, 0.001, 0.9, 1 - 1e-6])
@pytest.mark.parametrize("kind", CURVES)
def test_a_model_that_is_far_off_is_brought_back(kind: CalibrationKind, said: float) -> None:
    click = np.zeros(10_000)
    click[::10] = 1
    calibration = fit_calibration(kind, np.full(10_000, log(said)), np.ones(10_000, dtype=int), click, positions=1)
    assert exp(calibrate(calibration, np.array([[log(said)]])).item()) == pytest.approx(0.1, rel=0.25)


@given(st.lists(st.lists(st.floats(-50, 0), min_size=3, max_size=3), min_size=1))
def test_running_minimum_is_numpy_s(table: list[list[float]]) -> None:
    np.testing.assert_array_equal(
        running_minimum(torch.tensor(table, dtype=torch.float64)), np.minimum.accumulate(table, axis=1)
    )


@given(st.floats(-30, 15))
def test_logit_and_log_sigmoid_are_inverse(z: float) -> None:
    back = logit_of_log(log_sigmoid(torch.tensor(z, dtype=torch.float64))).item()
    assert back == pytest.approx(z, rel=1e-9, abs=1e-9)


# On data


@pytest.mark.parametrize("seed", [0, 1])
def test_temperature_meets_the_observed_rate_of_each_position(seed: int) -> None:
    rows = overconfident(seed, 50_000)
    log_ctr, position, _ = rows
    calibrated = np.exp(at(fit_calibration("temperature", *rows, positions=K), log_ctr, position))
    for k in range(1, K + 1):
        x, click = of_position(rows, k)
        said, observed = np.exp(x).mean(), click.mean()
        weight = float(prior_weight(PRIOR_CLICKS, len(click), said, observed))
        assert calibrated[position == k].mean() == pytest.approx((observed + weight * said) / (1 + weight), rel=1e-4)
        assert weight < 0.03


@pytest.mark.parametrize("kind", CURVES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_calibration_holds_on_fresh_data(kind: CalibrationKind, seed: int) -> None:
    calibration = fit_calibration(kind, *overconfident(seed, 40_000), positions=K)
    fresh = overconfident(seed + 100, 40_000)
    log_ctr, position, click = fresh
    calibrated = at(calibration, log_ctr, position)
    gain = log_loss_metric(log_ctr, click) - log_loss_metric(calibrated, click)
    assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))
    for k in range(1, K + 1):
        here = position == k
        before, after = (expected_calibration_error(np.exp(x[here]), click[here]) for x in (log_ctr, calibrated))
        rate = click[here].mean()
        # What chance gives 15 bins, once for the rows fitted to and once for the fresh ones.
        chance = 2 * np.sqrt(rate * (1 - rate) * 15 / here.sum())
        assert after < chance
        assert after < before


# JSON, arrays, refusals


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("monotone", [False, True])
def test_json_round_trip_is_identical(kind: CalibrationKind, monotone: bool) -> None:
    calibration = fit_calibration(kind, *overconfident(4, 3000), positions=K, monotone=monotone)
    text = json.dumps(calibration.to_dict(), allow_nan=False)
    again = Calibration.from_dict(json.loads(text))
    assert type(again) is type(calibration)
    assert json.dumps(again.to_dict()) == text
    table = np.log(np.random.default_rng(0).random((50, K)).astype(np.float32))
    assert calibrate(again, table).tobytes() == calibrate(calibration, table).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_fitting_twice_is_the_same_and_batches_equal_single_rows(kind: CalibrationKind) -> None:
    rows = overconfident(5, 3000)
    first, second = (fit_calibration(kind, *rows, positions=K) for _ in range(2))
    assert first.to_dict() == second.to_dict()
    table = np.log(np.random.default_rng(0).random((3000, K)))
    table.setflags(write=False)
    whole = calibrate(first, table)
    single = np.concatenate([calibrate(first, table[i : i + 1]) for i in range(0, 3000, 300)])
    np.testing.assert_allclose(whole[::300], single, rtol=1e-12)
    assert calibrate(first, table[:0]).shape == (0, K)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "platt"}, "kind must be one of none, temperature, isotonic; got 'platt'"),
        ({"log_ctr": np.array([0.5, -1.0])}, "log_ctr must be the log of a probability; got 0.5 at row 0"),
        ({"log_ctr": np.array([-1.0, np.nan])}, "log_ctr must be the log of a probability; got nan at row 1"),
        ({"position": np.array([1, 3])}, "position must be from 1 to 2; got 3 at row 1"),
        ({"click": np.array([0, 2])}, "click must be 0 or 1; got 2 at row 1"),
        ({"click": np.array([0])}, r"same shape \[rows\]; got shapes \[2\], \[2\] and \[1\]"),
        ({"positions": 0}, "positions must be from 1 up; got 0"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    sound: dict[str, Any] = {
        "kind": "temperature",
        "log_ctr": np.array([-1.0, -2.0]),
        "position": np.array([1, 2]),
        "click": np.array([0, 1]),
        "positions": 2,
    }
    with pytest.raises(ValueError, match=message):
        fit_calibration(**(sound | arguments))


def test_a_table_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"log_ctr must have shape \[rows, 2\]; got shape \[5, 3\]"):
        calibrate(Calibration(2), np.zeros((5, 3)))
