"""Clicks are drawn with the probabilities that the oracle states; tolerances are four standard errors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
from scipy.optimize import linear_sum_assignment

from urank.lab.letor_simulation import Simulation, SimulationConfig, simulate
from urank.lab.user_models import Oracle, User, table_probabilities
from urank.log.ragged import offsets_of_runs, pad, positions_by_score, where_items

USERS: tuple[User, ...] = get_args(User)


@pytest.mark.parametrize("user", USERS)
def test_sampled_clicks_have_the_stated_probabilities(user: User) -> None:
    """One list of five items, two of them without a place, shown to many users."""
    repeats, positions = 40_000, np.array([3, 1, 5, 2, 4])
    oracle = Oracle(user, positions=3, label_max=4, weights=(1.5, -1.5))
    x = np.random.default_rng(0).random((5, 2))
    truth = oracle.truth(x, np.array([0, 2, 4, 3, 1]), np.array([0, 5]))
    expected = oracle.click_probabilities(truth, positions, np.array([0, 5]))
    clicks = oracle.sample_clicks(
        truth,
        np.tile(positions, repeats),
        np.arange(0, 5 * repeats + 1, 5),
        np.random.default_rng(1),
        rows=np.tile(np.arange(5), repeats),
        x=x,
    ).reshape(repeats, 5)
    error = np.abs(clicks.mean(axis=0) - expected)
    assert (error <= 4 * np.sqrt(expected * (1 - expected) / repeats)).all()
    assert (expected[positions > 3] == 0).all()
    assert (expected[positions <= 3] > 0.01).all()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("randomise", [{}, {"randomise": "shuffle", "randomise_share": 0.3}])
def test_click_rates_in_the_log_match_the_truth(user: User, randomise: dict[str, Any]) -> None:
    simulation = simulate(
        SimulationConfig(queries=400, features=8, sessions=20, truth_split="all", user=user, **randomise)
    )
    log = simulation.log.with_columns(expected=pl.Series(_probabilities(simulation)))
    # Clicks of one position are independent across sessions, also those of the cascade.
    for by in (["position"], ["position", "relevance"], ["position", "policy"]):
        groups = log.group_by(by).agg(
            pl.col("click").sum().cast(pl.Float64),
            pl.col("expected").sum(),
            (pl.col("expected") * (1 - pl.col("expected"))).sum().alias("variance"),
        )
        error = (groups["click"] - groups["expected"]).abs().to_numpy()
        # One click of slack: in the smallest groups the normal approximation is coarse.
        assert (error <= 4 * np.sqrt(groups["variance"].to_numpy()) + 1).all()
    assert log["click"].mean() == pytest.approx(log["expected"].mean(), rel=0.05)


def _probabilities(simulation: Simulation) -> np.ndarray:
    """P(click) of each row of the log, from the candidates as they are written."""
    truth = np.array(simulation.candidates[simulation.oracle.truth_name].to_list())
    rows = simulation.log.select("item_id").join(
        simulation.candidates.select("item_id").with_row_index(), on="item_id", how="left", maintain_order="left"
    )
    return simulation.oracle.click_probabilities(
        truth,
        simulation.log["position"].to_numpy().astype(np.int64),
        offsets_of_runs(simulation.log["session_id"].to_numpy()),
        rows=rows["index"].to_numpy().astype(np.int64),
    )


def test_the_default_leaves_room_for_a_better_order() -> None:
    """Expected clicks: random < logged < by relevance < exact matching, with gaps worth learning."""
    simulation = simulate(SimulationConfig(queries=1500, sessions=4, truth_split="all"))
    table = np.array(simulation.candidates["table"].to_list())
    offsets = offsets_of_runs(simulation.candidates["query_id"].to_numpy())
    where = where_items(offsets)

    def clicks_when_sorted_by(score: np.ndarray) -> float:
        positions = positions_by_score(pad(score, offsets), where=where)[where]
        return float(table_probabilities(table, positions).sum() / len(where))

    logged = _probabilities(simulation).sum() / (4 * len(where))
    random = clicks_when_sorted_by(np.random.default_rng(0).random(len(table)))
    by_relevance = clicks_when_sorted_by(table[:, 0])
    matched = 0.0
    for first, last in pairwise(offsets):
        matched += table[first:last][linear_sum_assignment(table[first:last], maximize=True)].sum() / len(where)
    assert random / logged < 0.97
    assert 1.01 < by_relevance / logged < 1.12
    assert 1.06 < matched / logged < 1.25
    assert matched / by_relevance > 1.04
