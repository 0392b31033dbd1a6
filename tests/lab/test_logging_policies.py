"""Weak loggers, and randomisation with a known probability."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from urank.errors import ConfigError
from urank.lab.letor_simulation import generate_letor
from urank.lab.logging_policies import (
    Randomisation,
    draw_placements,
    logger_positions,
    logging_probability,
    placement_probability,
    ridge_weights,
    sample_queries,
    standardised,
)
from urank.log.ragged import list_ids, pad, positions_by_score, where_items
from urank.log.svmlight import Letor

KINDS: list[Randomisation] = ["none", "swap", "adjacent", "shuffle"]


@pytest.fixture(scope="module")
def data() -> Letor:
    return generate_letor(1000, rng=np.random.default_rng(0))


def ndcg(positions: np.ndarray, label: np.ndarray, offsets: np.ndarray) -> float:
    """Mean nDCG@10 over the queries with a relevant document."""
    where = where_items(offsets)
    ideal = positions_by_score(pad(label, offsets), where=where)[where]
    gains = [
        np.bincount(list_ids(offsets), np.where(p <= 10, (2.0**label - 1) / np.log2(1 + p), 0))
        for p in (positions, ideal)
    ]
    return float((gains[0][gains[1] > 0] / gains[1][gains[1] > 0]).mean())


def test_loggers_differ_and_beat_random_but_are_weak(data: Letor) -> None:
    ranks = logger_positions(data.features, data.label, data.offsets, loggers=3, rng=np.random.default_rng(0))
    where = where_items(data.offsets)
    random = positions_by_score(np.random.default_rng(1).random(where.shape), where=where)[where]
    chance = ndcg(random, data.label, data.offsets)
    for logger in ranks:
        assert chance + 0.1 < ndcg(logger, data.label, data.offsets) < 0.95
    assert (ranks[0] != ranks[1]).mean() > 0.2
    assert (ranks[1] != ranks[2]).mean() > 0.2


def test_each_logger_gives_every_position_once(data: Letor) -> None:
    ranks = logger_positions(data.features, data.label, data.offsets, loggers=2, rng=np.random.default_rng(0))
    for logger in ranks:
        order = np.lexsort((logger, list_ids(data.offsets)))
        assert_array_equal(logger[order], np.arange(len(logger)) - data.offsets[list_ids(data.offsets)] + 1)


def test_ties_are_broken_by_input_order() -> None:
    ranks = logger_positions(
        np.ones((6, 2)), np.array([0, 1, 2, 0, 1, 2]), np.array([0, 3, 6]), loggers=1, rng=np.random.default_rng(0)
    )
    assert ranks.tolist() == [[1, 2, 3, 1, 2, 3]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.floats(0.001, 1), st.integers(0, 1000))
def test_sample_is_large_enough(lengths: list[int], share: float, seed: int) -> None:
    sample = sample_queries(np.concatenate([[0], np.cumsum(lengths)]), share, np.random.default_rng(seed))
    assert sample.sum() >= min(2, len(lengths))
    assert np.array(lengths)[sample].sum() >= min(30, sum(lengths))
    assert sample.sum() >= round(share * len(lengths))


def test_sample_of_one_percent_is_no_larger_than_asked() -> None:
    assert sample_queries(np.arange(0, 50_001, 10), 0.01, np.random.default_rng(0)).sum() == 50


def test_ridge_solves_its_own_equation() -> None:
    rng = np.random.default_rng(0)
    x, target, penalty = rng.standard_normal((40, 3)), rng.standard_normal(40), 0.3
    w = ridge_weights(x, target, penalty)
    centred = x - x.mean(axis=0)
    gradient = centred.T @ (centred @ w - (target - target.mean())) + penalty * 40 * w
    assert_allclose(gradient, 0, atol=1e-10)


def test_standardised_columns() -> None:
    x = np.random.default_rng(0).lognormal(2, 2, (500, 3))
    x[:, 2] = 4.0
    z = standardised(x)
    assert_allclose(z.mean(axis=0), 0, atol=1e-12)
    assert_allclose(z.std(axis=0), [1, 1, 0], atol=1e-12)


def outcomes(kind: Randomisation, n: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every way to randomise n items: its probability, and the new position of each base rank."""
    stay = tuple(range(1, n + 1))

    def exchanged(a: int, b: int) -> tuple[int, ...]:
        places = list(stay)
        places[a], places[b] = places[b], places[a]
        return tuple(places)

    if kind == "swap":
        return [(1 / n, exchanged(0, k)) for k in range(n)]
    if kind == "adjacent" and n > 1:
        return [(0.5, stay), *((0.5 / (n - 1), exchanged(a, a + 1)) for a in range(n - 1))]
    if kind == "shuffle":
        ways = list(permutations(stay))
        return [(1 / len(ways), way) for way in ways]
    return [(1.0, stay)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_placement_probability_against_enumeration(kind: Randomisation, n: int) -> None:
    expected = np.zeros((n, n))
    for probability, places in outcomes(kind, n):
        expected[np.arange(n), np.array(places) - 1] += probability
    k = np.arange(1, n + 1)
    got = placement_probability(kind, n, k[:, None], k)
    assert_allclose(got, expected, atol=1e-12)
    assert_allclose(got.sum(axis=0), 1)
    assert_allclose(got.sum(axis=1), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_placement_probability_is_zero_past_the_shown(kind: Randomisation) -> None:
    assert_array_equal(placement_probability(kind, 3, [4, 1, 4], [4, 4, 1]), 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_drawn_placements_have_the_exact_distribution(kind: Randomisation, n: int) -> None:
    sessions = 20_000
    drawn = draw_placements(kind, np.full(sessions, n), 6, np.random.default_rng(5))
    assert_array_equal(drawn[:, n:], np.tile(np.arange(n + 1, 7), (sessions, 1)))
    counts = Counter(map(tuple, drawn[:, :n].tolist()))
    expected: Counter[tuple[int, ...]] = Counter()
    for probability, places in outcomes(kind, n):
        expected[places] += probability  # type: ignore[assignment]
    assert set(counts) == set(expected)
    for places, p in expected.items():
        assert abs(counts[places] / sessions - p) <= 4 * np.sqrt(p * (1 - p) / sessions) + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_empirical_frequencies_match_the_marginal(kind: Randomisation) -> None:
    sessions, n = 20_000, 5
    shown = np.where(np.arange(sessions) % 2, 3, n)
    base = np.tile([4, 1, 5, 3, 2], (sessions, 1))
    placements = draw_placements(kind, shown, n, np.random.default_rng(9))
    moved = np.take_along_axis(placements, base - 1, axis=1)
    for length in (3, n):
        part = moved[shown == length]
        for column, rank in enumerate(base[0]):
            for k in range(1, n + 1):
                p = placement_probability(kind, length, rank, k) if rank <= length else float(rank == k)
                assert abs((part[:, column] == k).mean() - p) <= 4 * np.sqrt(p * (1 - p) / len(part)) + 1e-12


def test_logging_probability_is_the_mixture() -> None:
    ranks = np.array([[1, 2, 3], [3, 2, 1]])
    got = logging_probability(ranks, np.full(3, 3), [0.25, 0.75], kind="shuffle", share=0.3, K=3)
    assert_allclose(got[0], [0.25 * 0.7 + 0.1, 0.1, 0.75 * 0.7 + 0.1])
    assert_allclose(got[1], [0.1, 0.7 + 0.1, 0.1])


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="randomise must be one of none, swap, adjacent, shuffle; got 'flip'"):
        placement_probability("flip", 3, 1, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got 'flip'"):
        draw_placements("flip", np.array([3]), 3, np.random.default_rng(0))  # type: ignore[arg-type]
