"""Exploration: what the log says of its chances is how it happens."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from urank.errors import ConfigError
from urank.serve.list_ranking import Exploration, ExplorationKind

kinds = st.sampled_from(get_args(ExplorationKind))
shares = st.floats(1e-6, 1)
KINDS = get_args(ExplorationKind)


def table(exploration: Exploration, places: int) -> np.ndarray:
    """P(item ranked r at place k) `[r, k]`: what `propensities` says of every pair."""
    found = np.full((places, places), np.nan)
    for r in range(1, places + 1):
        for k in range(1, places + 1):
            ranks = np.arange(1, places + 1)
            ranks[k - 1], ranks[r - 1] = ranks[r - 1], ranks[k - 1]  # an order with r at k
            found[r - 1, k - 1] = exploration.propensities(ranks)[k - 1]
    return found


def possible(kind: str, places: int) -> np.ndarray:
    """The pairs that can happen: all when shuffled; by a swap an item stays, or changes places with the first."""
    if kind == "shuffle":
        return np.ones((places, places), dtype=bool)
    pairs = np.eye(places, dtype=bool)
    pairs[0] = pairs[:, 0] = True
    return pairs


@given(kinds, shares, st.integers(1, 12))
def test_chances_sum_to_one(kind: ExplorationKind, share: float, places: int) -> None:
    """Over places for each rank, and over ranks for each place."""
    chances = np.where(possible(kind, places), table(Exploration(kind, share), places), 0)
    np.testing.assert_allclose(chances.sum(axis=0), 1)
    np.testing.assert_allclose(chances.sum(axis=1), 1)
    assert (chances[possible(kind, places)] > 0).all()


@given(kinds, shares, st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_orders_are_orders(kind: ExplorationKind, share: float, places: int, seed: int) -> None:
    exploration = Exploration(kind, share)
    ranks, explored = exploration.order(places, np.random.default_rng(seed))
    assert sorted(ranks.tolist()) == list(range(1, places + 1))
    chances = exploration.propensities(ranks)
    assert ((chances > 0) & (chances <= 1)).all()
    if not explored:
        assert ranks.tolist() == list(range(1, places + 1))
    if kind == "swap":
        moved = np.flatnonzero(ranks != np.arange(1, places + 1))
        assert len(moved) in (0, 2)
        assert len(moved) == 0 or 0 in moved


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("share", "places"), [(1.0, 4), (0.3, 5), (0.05, 2), (0.5, 1)])
def test_chances_are_how_often_it_happens(kind: ExplorationKind, share: float, places: int) -> None:
    """Each pair of rank and place within 4.5 standard errors; and the share of lists that are explored."""
    exploration, rng, draws = Exploration(kind, share), np.random.default_rng(7), 40_000
    seen, explored = np.zeros((places, places)), 0
    for _ in range(draws):
        ranks, was = exploration.order(places, rng)
        seen[ranks - 1, np.arange(places)] += 1
        explored += was
    chances = np.where(possible(kind, places), table(exploration, places), 0)
    error = np.sqrt(chances * (1 - chances) / draws)
    assert (np.abs(seen / draws - chances) <= 4.5 * error + 1e-12).all()
    assert abs(explored / draws - share) <= 4.5 * np.sqrt(share * (1 - share) / draws) + 1e-12


def test_one_place_leaves_nothing_to_chance() -> None:
    for kind in KINDS:
        exploration = Exploration(kind, 1.0)
        ranks, _ = exploration.order(1, np.random.default_rng(0))
        assert (ranks.tolist(), exploration.propensities(ranks).tolist()) == ([1], [1.0])


@given(kinds, shares)
def test_written_and_read(kind: ExplorationKind, share: float) -> None:
    exploration = Exploration(kind, share)
    assert Exploration.parse(str(exploration)) == exploration


@pytest.mark.parametrize("text", ["", "swap", "swap:", ":0.1", "swap:x", "turn:0.1", "SWAP:0.1", "swap:0.1:2", "0.1"])
def test_what_is_no_exploration(text: str) -> None:
    with pytest.raises(ConfigError, match=r"exploration must be swap:SHARE, as swap:0\.05, or shuffle:SHARE; got"):
        Exploration.parse(text)


@pytest.mark.parametrize("share", ["0", "-0.1", "1.01", "5", "nan", "inf", "-inf"])
def test_shares_that_are_none(share: str) -> None:
    with pytest.raises(ConfigError, match="must be above 0 and at most 1; got"):
        Exploration.parse(f"shuffle:{share}")
