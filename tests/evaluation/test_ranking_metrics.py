"""Metrics: arithmetic, properties, and agreement with scikit-learn on random and on real lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.datasets import load_svmlight_file
from sklearn.metrics import average_precision_score, label_ranking_average_precision_score, ndcg_score

from urank.evaluation.ranking_metrics import (
    Empty,
    GainKind,
    average_precision_metric,
    clicks_metric,
    ctr_metric,
    ndcg_metric,
)
from urank.log.ragged import offsets_of_runs, pad, positions_by_score, where_items

RELEVANCE_METRICS: list[Callable[..., NDArray[np.float64]]] = [
    average_precision_metric,
    ndcg_metric,
]
GAINS: list[GainKind] = ["exponential", "linear"]
CUTOFFS = [None, 1, 3, 10]

cutoffs = st.none() | st.integers(1, 12)


@dataclass(frozen=True)
class Lists:
    positions: NDArray[np.int64]
    relevance: NDArray[np.int64]
    where: NDArray[np.bool_]


@st.composite
def lists(draw: st.DrawFn, *, min_items: int = 0) -> Lists:
    """Lists of up to 6 items with labels 0 to 4, gaps between positions, and padding that would be refused as items."""
    lengths = draw(st.lists(st.integers(min_items, 6), min_size=1, max_size=4))
    offsets = np.cumsum([0, *lengths])
    rows = int(offsets[-1])
    positions = [p for n in lengths for p in draw(st.permutations(range(1, 11)))[:n]]
    labels = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    return Lists(
        positions=pad(np.array(positions, dtype=np.int64), offsets, fill=-1),
        relevance=pad(np.array(labels, dtype=np.int64), offsets, fill=-9),
        where=where_items(offsets),
    )


def random_lists(rng: np.random.Generator, B: int, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions 1 … n in random order, and labels that are mostly 0 so that some lists have nothing relevant."""
    positions = positions_by_score(rng.random((B, n)))
    relevance = rng.choice(5, size=(B, n), p=[0.75, 0.1, 0.08, 0.05, 0.02])
    return positions, relevance


# Arithmetic


def test_average_precision_is_the_mean_precision_at_relevant_positions() -> None:
    positions = np.array([[1, 2, 3, 4, 5]])
    relevance = np.array([[0, 1, 2, 0, 1]])
    np.testing.assert_allclose(average_precision_metric(positions, relevance), [(1 / 2 + 2 / 3 + 3 / 5) / 3])
    np.testing.assert_allclose(average_precision_metric(positions, relevance, threshold=2), [1 / 3])


def test_average_precision_at_a_cutoff_divides_by_what_could_be_reached() -> None:
    positions = np.array([[1, 2, 3, 4, 5]])
    relevance = np.array([[0, 1, 1, 0, 1]])
    np.testing.assert_allclose(average_precision_metric(positions, relevance, cutoff=2), [(1 / 2) / 2])
    np.testing.assert_allclose(average_precision_metric(positions, relevance, cutoff=4), [(1 / 2 + 2 / 3) / 3])


def test_ndcg_discounts_gains_by_the_log_of_the_position() -> None:
    positions = np.array([[2, 1, 3]])
    relevance = np.array([[2, 0, 1]])
    exponential = ((2**2 - 1) / log2(3) + (2**1 - 1) / log2(4)) / ((2**2 - 1) / log2(2) + (2**1 - 1) / log2(3))
    linear = (2 / log2(3) + 1 / log2(4)) / (2 / log2(2) + 1 / log2(3))
    np.testing.assert_allclose(ndcg_metric(positions, relevance), [exponential])
    np.testing.assert_allclose(ndcg_metric(positions, relevance, gain="linear"), [linear])


def test_ndcg_cuts_the_ideal_order_too() -> None:
    positions = np.array([[2, 1, 3]])
    relevance = np.array([[2, 1, 1]])
    np.testing.assert_allclose(ndcg_metric(positions, relevance, cutoff=1), [(2**1 - 1) / (2**2 - 1)])


def test_ndcg_default_is_at_ten() -> None:
    positions = np.arange(1, 13)[None, :]
    eleventh = (positions == 11).astype(np.int64)
    np.testing.assert_array_equal(ndcg_metric(positions, eleventh), [0.0])
    np.testing.assert_allclose(ndcg_metric(positions, eleventh, cutoff=None), [1 / log2(12)])


def test_ndcg_measures_against_all_items_when_some_have_no_place() -> None:
    positions = np.array([[1, 4]])
    relevance = np.array([[1, 2]])
    np.testing.assert_allclose(
        ndcg_metric(positions, relevance, cutoff=3), [(2**1 - 1) / ((2**2 - 1) + (2**1 - 1) / log2(3))]
    )


def test_ndcg_never_passes_1_by_rounding() -> None:
    relevance = np.array([[1.0, 1.0, np.nextafter(1.0, 2.0), 1.0]])
    assert ndcg_metric(np.array([[1, 2, 4, 3]]), relevance).tolist() == [1.0]


def test_empty_slots_push_items_down() -> None:
    positions, relevance = np.array([[2, 4]]), np.array([[1, 1]])
    np.testing.assert_allclose(average_precision_metric(positions, relevance), [(1 / 2 + 2 / 4) / 2])
    np.testing.assert_allclose(
        ndcg_metric(positions, relevance), [(1 / log2(3) + 1 / log2(5)) / (1 / log2(2) + 1 / log2(3))]
    )


def test_clicks_and_ctr_read_the_table() -> None:
    table = np.array([[[0.5, 0.4], [0.3, 0.1], [0.9, 0.8]], [[0.2, 0.1], [0.6, 0.3], [np.nan, np.nan]]])
    positions = np.array([[2, 1, 3], [2, 1, 1]])
    where = np.array([[True, True, True], [True, True, False]])
    np.testing.assert_allclose(clicks_metric(positions, table, where=where), [0.4 + 0.3, 0.1 + 0.6])
    np.testing.assert_allclose(ctr_metric(positions, table, where=where), [(0.4 + 0.3) / 2, (0.1 + 0.6) / 2])
    np.testing.assert_allclose(clicks_metric(positions, table, where=where, cutoff=1), [0.3, 0.6])
    np.testing.assert_allclose(ctr_metric(positions, table, where=where, cutoff=1), [0.3 / 1, 0.6 / 1])


def test_ctr_divides_by_the_items_with_a_place() -> None:
    table = np.full((2, 4, 3), 0.5)
    positions = np.array([[1, 3, 4, 9], [4, 5, 6, 7]])
    np.testing.assert_array_equal(ctr_metric(positions, table), [(0.5 + 0.5) / 2, np.nan])


@pytest.mark.parametrize("metric", RELEVANCE_METRICS)
@pytest.mark.parametrize(("empty", "value"), [("skip", np.nan), ("zero", 0.0), ("one", 1.0)])
def test_empty_says_what_a_query_without_relevant_items_counts_as(
    metric: Callable[..., NDArray[np.float64]], empty: Empty, value: float
) -> None:
    positions = np.array([[1, 2], [1, 2], [1, 2]])
    relevance = np.array([[0, 0], [1, 0], [3, 3]])
    where = np.array([[True, True], [True, True], [False, False]])
    values = metric(positions, relevance, where=where, empty=empty)
    np.testing.assert_array_equal(values, [value, 1.0, value])


def test_a_relevant_item_below_the_cutoff_is_not_an_empty_query() -> None:
    positions, relevance = np.array([[1, 2, 3]]), np.array([[0, 0, 1]])
    for metric in RELEVANCE_METRICS:
        np.testing.assert_array_equal(metric(positions, relevance, cutoff=2), [0.0])


@pytest.mark.parametrize("metric", RELEVANCE_METRICS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_lists_and_no_items(metric: Callable[..., NDArray[np.float64]], shape: tuple[int, int]) -> None:
    nothing = np.zeros(shape, dtype=np.int64)
    np.testing.assert_array_equal(metric(nothing, nothing), np.full(shape[0], np.nan))


# Properties


@given(lists(), cutoffs)
def test_values_are_from_0_to_1(given_lists: Lists, cutoff: int | None) -> None:
    for metric in RELEVANCE_METRICS:
        values = metric(
            given_lists.positions, given_lists.relevance, where=given_lists.where, cutoff=cutoff, empty="zero"
        )
        assert ((values >= 0) & (values <= 1)).all()


@given(lists(), cutoffs, st.sampled_from(GAINS))
def test_the_ideal_order_has_1(given_lists: Lists, cutoff: int | None, gain: GainKind) -> None:
    relevance, where = given_lists.relevance, given_lists.where
    ideal = positions_by_score(relevance, where=where)
    values = ndcg_metric(ideal, relevance, where=where, cutoff=cutoff, gain=gain, empty="one")
    np.testing.assert_array_equal(values, np.ones(len(ideal)))
    for metric in (average_precision_metric,):
        values = metric(ideal, relevance, where=where, cutoff=cutoff, empty="one")
        np.testing.assert_allclose(values, np.ones(len(ideal)), rtol=1e-12)


@given(lists(), cutoffs, st.randoms(use_true_random=False))
def test_order_of_the_input_does_not_matter(given_lists: Lists, cutoff: int | None, random: Any) -> None:
    columns = list(range(given_lists.positions.shape[1]))
    random.shuffle(columns)
    for metric in RELEVANCE_METRICS:
        shuffled = metric(
            given_lists.positions[:, columns],
            given_lists.relevance[:, columns],
            where=given_lists.where[:, columns],
            cutoff=cutoff,
        )
        values = metric(given_lists.positions, given_lists.relevance, where=given_lists.where, cutoff=cutoff)
        np.testing.assert_array_equal(shuffled, values)


@given(lists(), cutoffs, st.integers(1, 3), st.integers(-2, 12), st.sampled_from([np.nan, -1.0, 4.0, np.inf]))
def test_more_padding_changes_nothing(
    given_lists: Lists, cutoff: int | None, extra: int, position: int, label: float
) -> None:
    width = ((0, 0), (0, extra))
    positions = np.pad(given_lists.positions, width, constant_values=position)
    relevance = np.pad(given_lists.relevance.astype(np.float64), width, constant_values=label)
    where = np.pad(given_lists.where, width)
    for metric in RELEVANCE_METRICS:
        padded = metric(positions, relevance, where=where, cutoff=cutoff)
        values = metric(given_lists.positions, given_lists.relevance, where=given_lists.where, cutoff=cutoff)
        np.testing.assert_allclose(padded, values, rtol=1e-12)


@given(lists(), cutoffs)
def test_each_list_is_measured_alone(given_lists: Lists, cutoff: int | None) -> None:
    for metric in RELEVANCE_METRICS:
        together = metric(given_lists.positions, given_lists.relevance, where=given_lists.where, cutoff=cutoff)
        alone = [
            metric(positions[where][None, :], relevance[where][None, :], cutoff=cutoff)[0]
            for positions, relevance, where in zip(
                given_lists.positions, given_lists.relevance, given_lists.where, strict=True
            )
        ]
        np.testing.assert_allclose(together, alone, rtol=1e-12)


@given(lists(min_items=2), cutoffs, st.sampled_from(GAINS), st.data())
def test_swapping_a_better_item_upwards_never_lowers_a_metric(
    given_lists: Lists, cutoff: int | None, gain: GainKind, data: st.DataObject
) -> None:
    positions, relevance, where = given_lists.positions[:1], given_lists.relevance[:1], given_lists.where[:1]
    lower, upper = data.draw(st.permutations(np.flatnonzero(where[0]).tolist()))[:2]
    if positions[0, lower] < positions[0, upper]:
        lower, upper = upper, lower
    assume(relevance[0, lower] > relevance[0, upper])
    swapped = positions.copy()
    swapped[0, [lower, upper]] = positions[0, [upper, lower]]

    before = ndcg_metric(positions, relevance, where=where, cutoff=cutoff, gain=gain)
    after = ndcg_metric(swapped, relevance, where=where, cutoff=cutoff, gain=gain)
    assert after[0] >= before[0] - 1e-12
    for metric in (average_precision_metric,):
        before = metric(positions, relevance, where=where, cutoff=cutoff, empty="zero")
        after = metric(swapped, relevance, where=where, cutoff=cutoff, empty="zero")
        assert after[0] >= before[0] - 1e-12


# Agreement with scikit-learn


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("cutoff", CUTOFFS)
@pytest.mark.parametrize("n", [2, 7, 30])
def test_ndcg_agrees_with_scikit_learn_on_random_lists(n: int, cutoff: int | None, gain: GainKind) -> None:
    positions, relevance = random_lists(np.random.default_rng(n), 300, n)
    gains = 2.0**relevance - 1 if gain == "exponential" else relevance
    ours = ndcg_metric(positions, relevance, cutoff=cutoff, gain=gain, empty="zero")
    theirs = [ndcg_score(gains[[b]], -positions[[b]], k=cutoff) for b in range(len(positions))]
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    np.testing.assert_allclose(ours.mean(), ndcg_score(gains, -positions, k=cutoff), rtol=1e-12)


@pytest.mark.parametrize("threshold", [1, 3])
@pytest.mark.parametrize("n", [2, 7, 30])
def test_average_precision_agrees_with_scikit_learn_on_random_lists(n: int, threshold: int) -> None:
    positions, relevance = random_lists(np.random.default_rng(n), 300, n)
    relevant = relevance >= threshold
    ours = average_precision_metric(positions, relevance, threshold=threshold)
    np.testing.assert_array_equal(np.isnan(ours), ~relevant.any(axis=1))
    has_any = np.flatnonzero(relevant.any(axis=1))
    theirs = [average_precision_score(relevant[b], -positions[b]) for b in has_any]
    np.testing.assert_allclose(ours[has_any], theirs, rtol=1e-12)
    as_one = average_precision_metric(positions, relevance, threshold=threshold, empty="one")
    np.testing.assert_allclose(as_one.mean(), label_ranking_average_precision_score(relevant, -positions), rtol=1e-12)


@pytest.fixture(scope="module")
def mq2008(data_dir: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    """Features, labels and offsets of one fifth of MQ2008: real lists, of 5 to over 100 documents, many tied."""
    features, labels, query_ids = load_svmlight_file(data_dir / "mq2008" / "S1.txt", query_id=True)
    return features.toarray(), labels, offsets_of_runs(query_ids)


@pytest.mark.parametrize("feature", [0, 24, 39])
@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_agrees_with_scikit_learn_on_mq2008(
    mq2008: tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]], feature: int, cutoff: int | None
) -> None:
    features, labels, offsets = mq2008
    where = where_items(offsets)
    relevance = pad(labels, offsets, fill=np.nan)
    positions = positions_by_score(pad(features[:, feature], offsets, fill=np.nan), where=where)
    ndcg = ndcg_metric(positions, relevance, where=where, cutoff=cutoff, empty="zero")
    precision = average_precision_metric(positions, relevance, where=where)

    assert len(ndcg) == 157
    for q in range(len(ndcg)):
        scores, y = -positions[q][where[q]], relevance[q][where[q]]
        np.testing.assert_allclose(ndcg[q], ndcg_score([2**y - 1], [scores], k=cutoff), rtol=1e-12)
        if (y >= 1).any():
            np.testing.assert_allclose(precision[q], average_precision_score(y >= 1, scores), rtol=1e-12)
        else:
            assert np.isnan(precision[q])


# Refusals


@pytest.mark.parametrize("metric", RELEVANCE_METRICS)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"positions": np.array([1, 2])}, "positions must have shape [B, n]; got shape [2]"),
        ({"positions": np.array([[0, 1]])}, "positions must be whole numbers from 1 up; got 0"),
        ({"positions": np.array([[3, 3]])}, "positions must be distinct within a list; got 3 more than once in list 0"),
        ({"relevance": np.array([[1]])}, "relevance must have shape [1, 2]; got shape [1, 1]"),
        ({"relevance": np.array([[1, -1]])}, "relevance must be finite and from 0 up; got -1.0"),
        ({"relevance": np.array([[1, np.nan]])}, "relevance must be finite and from 0 up; got nan"),
        ({"where": np.array([True, True])}, "where must be boolean of shape [1, 2]; got bool of shape [2]"),
        ({"cutoff": 0}, "cutoff must be a whole number from 1 up, or None; got 0"),
        ({"empty": "half"}, "empty must be 'skip', 'zero' or 'one'; got 'half'"),
    ],
)
def test_refuses_in_one_sentence(
    metric: Callable[..., NDArray[np.float64]], arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        metric(**{"positions": np.array([[1, 2]]), "relevance": np.array([[1, 0]]), **arguments})
    assert str(error.value) == sentence


def test_ndcg_refuses_an_unknown_gain_and_a_gain_beyond_float64() -> None:
    positions, price = np.array([[1, 2]]), np.array([[1999.0, 5.0]])
    with pytest.raises(ValueError, match=r"gain must be 'exponential' or 'linear'; got 'cubic'"):
        ndcg_metric(positions, price, gain="cubic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"relevance must be at most 1000 for the exponential gain; got 1999\.0"):
        ndcg_metric(positions, price)
    np.testing.assert_array_equal(ndcg_metric(positions, price, gain="linear"), [1.0])
