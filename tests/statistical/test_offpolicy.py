"""Estimates of simulated logs are right on average; tolerances are four standard errors.

Clicks of a list depend on nothing but its items and positions, so what an estimate is off by is independent from list
to list, and its mean over all lists has the standard error that these show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from urank.evaluation.estimators import LoggedBatch, Terms, list_terms
from urank.lab.letor_simulation import SimulationConfig, simulate
from urank.log.ragged import offsets_of_runs, pad, positions_by_score, where_items
from urank.ranking.matching import match
from urank.ranking.utility import utility

Positions = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class World:
    """A log with its true table, and a number for each item that has nothing to do with either."""

    logged: LoggedBatch
    chance: NDArray[np.float64]

    @property
    def weights(self) -> NDArray[np.float64]:
        """What each item earns at each position."""
        return self.logged.table * self.logged.value[..., None]


def world(**settings: Any) -> World:
    simulation = simulate(SimulationConfig(features=6, truth_split="all", values=(1, 10), **settings))
    items = simulation.candidates.select("item_id", "table").with_columns(
        chance=pl.Series(np.random.default_rng(1).random(simulation.candidates.height))
    )
    log = simulation.log.join(items, on="item_id", how="left", maintain_order="left")
    offsets = offsets_of_runs(log["session_id"].to_numpy())

    def padded(name: str) -> NDArray[Any]:
        return pad(log[name].to_numpy(), offsets)

    logged = LoggedBatch(
        table=pad(np.array(log["table"].to_list(), dtype=np.float64), offsets),
        position=padded("position").astype(np.int64),
        click=padded("click"),
        value=padded("value").astype(np.float64),
        where=where_items(offsets),
        propensity=padded("propensity").astype(np.float64),
    )
    return World(logged, padded("chance"))


POLICIES: dict[str, Callable[[World], Positions]] = {
    "logged": lambda w: w.logged.position,
    "reversed": lambda w: w.logged.where.sum(axis=1, keepdims=True) + 1 - w.logged.position,
    "random": lambda w: positions_by_score(w.chance, where=w.logged.where),
    "by the first column": lambda w: positions_by_score(w.weights[:, :, 0], where=w.logged.where),
    "matching": lambda w: match(w.weights, where=w.logged.where),
}

ESTIMATES: dict[str, Callable[[Terms], NDArray[np.float64]]] = {
    "ratio": lambda terms: terms.ratio.clicked,
    "doubly robust without propensities": lambda terms: terms.direct + terms.ratio.clicked - terms.ratio.modelled,
    "ips": lambda terms: terms.ips.clicked,  # type: ignore[union-attr]
    "doubly robust": lambda terms: terms.direct + terms.ips.clicked - terms.ips.modelled,  # type: ignore[union-attr]
}


def off_by(estimate: str, w: World, policy: str, *, cutoff: int | None = None, **settings: Any) -> tuple[float, float]:
    """What the mean estimate of all lists is off by, and its standard error; other settings go into the log."""
    positions, floor = POLICIES[policy](w), settings.pop("floor", 0.0)
    judged = replace(w.logged, **settings)
    found = ESTIMATES[estimate](list_terms(judged, positions, cutoff=cutoff, floor=floor))
    value = utility(w.logged.table, positions, value=w.logged.value, where=w.logged.where, cutoff=cutoff)
    off = found - value
    return float(off.mean()), float(off.std(ddof=1) / np.sqrt(len(off)))


@pytest.fixture(scope="module")
def fixed() -> World:
    """Two loggers that always show the same: what was never tried, only the table knows."""
    return world(queries=200, sessions=40, positions=6, candidates=6)


@pytest.fixture(scope="module")
def shuffled() -> World:
    """All lists are shuffled, so every item has been everywhere."""
    return world(queries=150, sessions=100, positions=5, candidates=5, randomise="shuffle", randomise_share=1.0)


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("cutoff", [None, 2])
def test_eq_3_is_unbiased(fixed: World, policy: str, cutoff: int | None) -> None:
    """Σ c q(k) / q(k_log) b with the true table, from a log without any randomisation."""
    off, error = off_by("ratio", fixed, policy, cutoff=cutoff)
    assert abs(off) < 4 * error
    assert error < 0.15  # of some 3 that a list earns: the log is large enough for the test to mean something


@pytest.mark.parametrize("user", ["pbm", "query", "trust"])
def test_eq_3_is_unbiased_whoever_clicks(user: Any) -> None:
    w = world(queries=100, sessions=20, positions=5, candidates=5, user=user, seed=3)
    for policy in POLICIES:
        off, error = off_by("ratio", w, policy)
        assert abs(off) < 4 * error


def test_a_floor_makes_it_too_low_and_the_model_takes_that_out(fixed: World) -> None:
    for policy in ("reversed", "matching"):
        off, error = off_by("ratio", fixed, policy, floor=0.1)
        assert off < -4 * error
        off, error = off_by("doubly robust without propensities", fixed, policy, floor=0.1)
        assert abs(off) < 4 * error


@pytest.mark.parametrize("policy", ["random", "by the first column", "matching"])
@pytest.mark.parametrize("estimate", ["ips", "doubly robust"])
def test_propensities_need_no_right_table(shuffled: World, estimate: str, policy: str) -> None:
    wrong = shuffled.logged.table * np.arange(1, 6) / 5  # hardly falls where it should
    off, error = off_by(estimate, shuffled, policy, table=wrong)
    assert abs(off) < 4 * error
    if policy != "random":  # of which no table is very wrong
        off, error = off_by("ratio", shuffled, policy, table=wrong)
        assert off < -4 * error


def test_a_right_table_makes_doubly_robust_tighter(shuffled: World) -> None:
    right = off_by("doubly robust", shuffled, "matching")[1]
    assert right < off_by("ips", shuffled, "matching")[1]
