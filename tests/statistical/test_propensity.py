"""Estimates of examination against the truth of simulations; tolerances come from standard errors.

Users of the kind `pbm` examine position k with probability 1/k^γ, whatever is shown there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import urank
from simulated import Small, make
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.lab.truth import read_truth, true_table
from urank.log.dataset import Dataset
from urank.propensity.cpbm import CpbmConfig, fit_cpbm
from urank.propensity.em import EmConfig, fit_em
from urank.propensity.examination import ExaminationCurve, Propensity
from urank.propensity.harvest import fit_harvest
from urank.propensity.randomised import fit_randomised

K = 5
PLACES = np.arange(1, K + 1)
RANDOMISED_SEEDS = 16
EM_SEEDS = 8


def simulated(folder: Path, *, drop: str | None = None, **settings: Any) -> Dataset:
    """A log of users of the kind `pbm`, prepared; what is `drop`ped the learner does not get to see."""
    common = {"user": "pbm", "positions": K, "candidates": K, "queries": 800, "features": 8}
    log = simulate(SimulationConfig(**{**common, **settings})).log
    urank.prepare(urank.read(log.drop(drop) if drop else log), folder, valid=0.1, test=0)
    return Dataset(folder)


def values_and_errors(curves: list[ExaminationCurve]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of all positions but the first, `[curves, K − 1]`."""
    assert all(curve.values[0] == 1 for curve in curves)
    errors = [curve.errors[1:] for curve in curves if curve.errors is not None]
    return np.array([curve.values[1:] for curve in curves]), np.array(errors)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize(
    ("kind", "drop"), [("swap", None), ("shuffle", None), ("shuffle", "ranked_position")], ids=["swap", "ranked", "all"]
)
def test_randomised_lists_tell_the_curve_and_its_error(
    tmp_path: Path, kind: str, drop: str | None, gamma: float
) -> None:
    policies = [f"logger-{n}+{kind}" for n in (1, 2)] if drop else None
    settings = {"randomise": kind, "randomise_share": 0.5, "epsilon": 0.3, "gamma": gamma}
    curves = [
        fit_randomised(simulated(tmp_path / str(seed), drop=drop, seed=seed, **settings), policies=policies)
        for seed in range(200, 200 + RANDOMISED_SEEDS)
    ]
    values, errors = values_and_errors(curves)
    truth = PLACES[1:] ** -gamma
    z = (values - truth) / errors
    assert (np.abs(z[0]) < 3).all()  # any one log
    assert (np.abs(z.mean(axis=0)) * RANDOMISED_SEEDS**0.5 < 3).all()  # and all together
    # A deviation estimated from n values has a relative error of about 1/√(2n); positions share the one they are
    # compared with, so they count as one.
    assert values.std(axis=0, ddof=1) == pytest.approx(errors.mean(axis=0), rel=3 / (2 * RANDOMISED_SEEDS) ** 0.5)


@pytest.mark.parametrize("loggers", [2, 3])
def test_harvested_clicks_tell_the_curve(tmp_path: Path, loggers: int) -> None:
    # At this size the standard error is about 1 to 2 %.
    settings = {"loggers": loggers, "queries": 3000, "sessions": 40, "features": 6, "epsilon": 0.3}
    for seed in (1, 2, 3):
        dataset = simulated(tmp_path / str(seed), seed=seed, **settings)
        np.testing.assert_allclose(fit_harvest(dataset).values, 1 / PLACES, rtol=0.05)


def test_regression_em_tells_the_curve(tmp_path: Path) -> None:
    # All lists are shuffled: otherwise, at this size, what the trees do not yet know of relevance makes it too steep.
    settings = {"randomise": "shuffle", "randomise_share": 1.0}
    logs = [simulated(tmp_path / str(seed), seed=seed, **settings) for seed in range(100, 100 + EM_SEEDS)]
    values, _ = values_and_errors([fit_em(log, EmConfig(threads=1)) for log in logs])
    error = values.std(axis=0, ddof=1)
    assert (np.abs(values - 1 / PLACES[1:]) < 3 * error).all()
    assert (np.abs(values.mean(axis=0) - 1 / PLACES[1:]) < 3 * error / EM_SEEDS**0.5).all()
    assert (error * PLACES[1:] < 0.2).all()  # so that this says something


@pytest.fixture(scope="module")
def by_context(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Users whose attention depends on the query."""
    settings = {"queries": 4000, "sessions": 10, "features": 12, "eta": 3.0, "positions": K, "candidates": 6}
    folder = tmp_path_factory.mktemp("context")
    return make(folder, user="query", randomise="swap", randomise_share=0.3, seed=3, **settings)


def log_error(small: Small, propensity: Propensity) -> float:
    """The mean absolute error of log examination over the items of test."""
    table = true_table(read_truth(small.folder))
    total = []
    for block in small.dataset.blocks("test", ["item_id", *propensity.columns]):
        truth = table(block)
        total.append(np.abs(np.log(propensity.examination(block)) - np.log(truth / truth[:, :1])))
    return float(np.concatenate(total).mean())


def test_context_is_learned_where_it_matters(by_context: Small) -> None:
    contextual = log_error(by_context, fit_cpbm(by_context.dataset, CpbmConfig()))
    one_curve = log_error(by_context, fit_randomised(by_context.dataset))
    assert contextual < 0.8 * one_curve
