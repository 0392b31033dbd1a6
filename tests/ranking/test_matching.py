"""The exact matching of items to positions (Figure 2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from urank.log.ragged import pad, where_items
from urank.ranking import matching
from urank.ranking.matching import match, match_first
from urank.ranking.utility import utility


@dataclass(frozen=True)
class Batch:
    weights: NDArray[Any]
    where: NDArray[np.bool_]

    def lists(self) -> list[NDArray[Any]]:
        return [weights[mask] for weights, mask in zip(self.weights, self.where, strict=True)]


# Few different whole numbers make ties of every kind: between items, between positions, between orders.
WEIGHTS = [st.floats(-100, 100), st.floats(0, 1), st.integers(-1, 1)]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Lists of 0 to 5 items for 1 to 7 positions, in the first columns or scattered over 7, with NaN in the padding."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    offsets = np.cumsum([0, *lengths])
    K = draw(st.integers(1, 7))
    rows = int(offsets[-1])
    values = draw(st.lists(draw(st.sampled_from(WEIGHTS)), min_size=rows * K, max_size=rows * K))
    weights = np.array(values, dtype=np.float64).reshape(rows, K)
    where = where_items(offsets, 7 if draw(st.booleans()) else None)
    if draw(st.booleans()):
        where = where[:, draw(st.permutations(range(where.shape[1])))]
    padded = np.full((*where.shape, K), np.nan)
    padded[where] = weights
    return Batch(weights=padded, where=where)


def sum_of_weights(weights: NDArray[Any], positions: NDArray[Any]) -> float:
    """What the items `[m, K]` of one list earn at their positions `[m]`."""
    K = weights.shape[1]
    return sum(float(weights[i, k - 1]) for i, k in enumerate(positions.tolist()) if k <= K)


def best_by_trying_all(weights: NDArray[Any]) -> float:
    return max(sum_of_weights(weights, np.array(order)) for order in permutations(range(1, len(weights) + 1)))


def best_by_blossom(weights: NDArray[Any]) -> float:
    graph = networkx.Graph()
    for i in range(len(weights)):
        for k in range(min(weights.shape)):
            graph.add_edge(("item", i), ("position", k), weight=float(weights[i, k]))
    pairs = networkx.max_weight_matching(graph, maxcardinality=True)
    return sum(graph.edges[pair]["weight"] for pair in pairs)


def best_by_square_assignment(weights: NDArray[Any]) -> float:
    """With as many positions as items, of which those after K earn nothing."""
    n, K = weights.shape
    square = np.pad(weights, [(0, 0), (0, n - K)])
    return float(square[linear_sum_assignment(square, maximize=True)].sum())


def falling(rng: np.random.Generator, B: int, n: int, K: int) -> NDArray[np.float64]:
    """Weights as click models give them: each item falls with the position, at a pace of its own."""
    pace = rng.uniform(0.2, 1.5, (B, n, 1))
    return rng.lognormal(0, 1, (B, n, 1)) * np.arange(1, K + 1) ** -pace


def independent(rng: np.random.Generator, B: int, n: int, K: int) -> NDArray[np.float64]:
    return rng.normal(size=(B, n, K))


SHAPES_OF_WEIGHTS = [falling, independent]


def test_the_relevant_item_that_hardly_minds_its_position_goes_second() -> None:
    table = np.array([[[0.50, 0.48], [0.45, 0.30]]])
    positions = match(table)
    np.testing.assert_array_equal(positions, [[2, 1]])
    np.testing.assert_allclose(utility(table, positions), [0.48 + 0.45])


def test_value_decides_who_has_a_place() -> None:
    table = np.array([[[0.5, 0.4], [0.4, 0.3], [0.3, 0.1]]])
    value = np.array([[1.0, 1.0, 10.0]])
    positions = match(table * value[..., None])
    np.testing.assert_array_equal(positions, [[2, 3, 1]])
    np.testing.assert_allclose(utility(table, positions, value=value), [0.3 * 10 + 0.4 * 1])


def test_each_list_uses_as_many_positions_as_it_has_items() -> None:
    # The item of the second list would earn most at position 3, but there is nothing to show before it.
    weights = np.array([[[0.1, 0.2, 0.3], [0.1, 0.1, 0.1]], [[0.1, 0.2, 0.9], [0.0, 0.0, 0.0]]])
    where = np.array([[True, True], [True, False]])
    np.testing.assert_array_equal(match(weights, where=where), [[2, 1], [1, 2]])


def test_negative_weights_fill_the_places_all_the_same() -> None:
    np.testing.assert_array_equal(match(np.array([[[-1.0, -5.0], [-3.0, -4.0], [-9.0, -9.0]]])), [[1, 2, 3]])


def test_items_without_a_place_follow_by_weight_at_the_last_position() -> None:
    last = [0.2, 0.9, 0.3, 0.2, 0.3]
    weights = np.array([[[0.0, weight] for weight in last]])
    weights[0, 0, 0] = 5.0
    # Items 0 and 1 have the places; 2 and 4, then 3 by falling weight, ties by input order.
    np.testing.assert_array_equal(match(weights), [[1, 2, 3, 5, 4]])


def test_a_tie_between_different_items_without_a_place_is_broken_by_input_order() -> None:
    # Items 1 and 3 are the same, and 1 gets the place; among the others only the last position counts.
    weights = np.array([[[3.0, 0.5], [2.0, 1.0], [0.0, 1.0], [2.0, 1.0], [0.0, 2.0], [1.0, 1.0]]])
    np.testing.assert_array_equal(match(weights), [[1, 3, 4, 5, 2, 6]])


@given(batches())
def test_earns_as_much_as_the_best_of_all_orders(batch: Batch) -> None:
    positions = match(batch.weights, where=batch.where)
    for weights, mask, row in zip(batch.lists(), batch.where, positions, strict=True):
        np.testing.assert_allclose(
            sum_of_weights(weights, row[mask]), best_by_trying_all(weights), rtol=1e-12, atol=1e-9
        )


@given(batches())
def test_each_row_is_a_permutation_with_the_padding_last(batch: Batch) -> None:
    positions = match(batch.weights, where=batch.where)
    assert positions.dtype == np.int64
    for mask, row in zip(batch.where, positions, strict=True):
        # All of 1 to m, so that no position up to min(m, K) is left empty.
        assert sorted(row[mask].tolist()) == list(range(1, mask.sum() + 1))
        assert row[~mask].tolist() == list(range(mask.sum() + 1, len(mask) + 1))


@given(batches())
def test_the_same_items_keep_their_input_order(batch: Batch) -> None:
    doubled = np.concatenate([batch.weights, batch.weights], axis=1)
    where = np.concatenate([batch.where, batch.where], axis=1)
    for weights, mask, row in zip(doubled, where, match(doubled, where=where), strict=True):
        items, kinds = np.unique(weights[mask], axis=0, return_inverse=True)
        for kind in range(len(items)):
            of_kind = row[mask][kinds == kind]
            assert of_kind.tolist() == sorted(of_kind.tolist())


@given(batches(), st.booleans())
def test_the_first_items_are_those_of_the_matching(batch: Batch, doubled: bool) -> None:
    for weights, mask in zip(batch.weights, batch.where, strict=True):
        one = np.concatenate([weights[mask]] * (1 + doubled))
        first = match_first(one)
        assert len(first) == min(one.shape)
        assert first.tolist() == np.argsort(match(one[None])[0])[: len(first)].tolist()


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="must be finite"):
        match_first(np.array([[np.nan, 1.0]]))


@given(batches())
def test_items_without_a_place_are_sorted(batch: Batch) -> None:
    K = batch.weights.shape[2]
    for weights, mask, row in zip(batch.lists(), batch.where, match(batch.weights, where=batch.where), strict=True):
        without = np.flatnonzero(row[mask] > K)
        by_rule = sorted(without.tolist(), key=lambda i: (-weights[i, K - 1], i))
        assert by_rule == without[np.argsort(row[mask][without])].tolist()


@given(batches(), st.floats(width=64), st.integers(1, 3))
def test_padding_means_nothing(batch: Batch, garbage: float, extra: int) -> None:
    positions = match(batch.weights, where=batch.where)
    filled = np.where(batch.where[..., None], batch.weights, garbage)
    np.testing.assert_array_equal(match(filled, where=batch.where), positions)
    wider = match(
        np.pad(filled, [(0, 0), (0, extra), (0, 0)], constant_values=garbage),
        where=np.pad(batch.where, [(0, 0), (0, extra)]),
    )
    np.testing.assert_array_equal(wider[:, : positions.shape[1]], positions)


@pytest.mark.parametrize("weights_like", SHAPES_OF_WEIGHTS)
def test_a_batch_gives_what_its_lists_give_alone(weights_like: Any) -> None:
    rng = np.random.default_rng(7)
    lengths = [1, 3, 10, 30, matching._LONG - 1, matching._LONG, 700]
    offsets = np.cumsum([0, *lengths])
    # Rounded, so that there are ties, whose outcome must not depend on the company either.
    rows = weights_like(rng, 1, int(offsets[-1]), 10)[0].round(1)
    together = match(pad(rows, offsets, fill=np.nan), where=where_items(offsets))
    for b, length in enumerate(lengths):
        alone = match(rows[None, offsets[b] : offsets[b + 1]])[0]
        np.testing.assert_array_equal(together[b, :length], alone)


@pytest.mark.parametrize("weights_like", SHAPES_OF_WEIGHTS)
@pytest.mark.parametrize("n", [2, 5, 8, 12])
@pytest.mark.parametrize("K", [1, 4, 8])
def test_earns_as_much_as_a_general_matching(weights_like: Any, n: int, K: int) -> None:
    weights = weights_like(np.random.default_rng([n, K]), 5, n, K)
    positions = match(weights)
    for b in range(len(weights)):
        np.testing.assert_allclose(
            sum_of_weights(weights[b], positions[b]), best_by_blossom(weights[b]), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("weights_like", SHAPES_OF_WEIGHTS)
@pytest.mark.parametrize("n", [10, 200, 1000])
def test_earns_as_much_as_the_square_assignment(weights_like: Any, n: int) -> None:
    weights = weights_like(np.random.default_rng(n), 3, n, 10)
    positions = match(weights)
    for b in range(len(weights)):
        np.testing.assert_allclose(
            sum_of_weights(weights[b], positions[b]), best_by_square_assignment(weights[b]), rtol=1e-12
        )


@pytest.mark.parametrize("weights_like", SHAPES_OF_WEIGHTS)
@pytest.mark.parametrize(("n", "K"), [(10, 10), (50, 10), (200, 3), (1000, 1), (1000, 10), (1000, 100)])
def test_leaving_out_items_that_are_not_needed_changes_nothing(
    weights_like: Any, n: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_like(np.random.default_rng([n, K]), 3, n, K)
    where = np.random.default_rng(0).random((3, n)) < np.array([[1.0], [0.8], [0.02]])
    monkeypatch.setattr(matching, "_LONG", 1)
    reduced = match(weights, where=where)
    monkeypatch.setattr(matching, "_LONG", n + 1)
    np.testing.assert_array_equal(reduced, match(weights, where=where))


@given(batches())
def test_leaving_out_items_loses_nothing_when_there_are_ties(batch: Batch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_LONG", 1)
        positions = match(batch.weights, where=batch.where)
    for weights, mask, row in zip(batch.lists(), batch.where, positions, strict=True):
        np.testing.assert_allclose(
            sum_of_weights(weights, row[mask]), best_by_trying_all(weights), rtol=1e-12, atol=1e-9
        )


@pytest.mark.parametrize("n", [3, 10, 1000])
def test_when_all_items_are_the_same_the_input_order_stays(n: int) -> None:
    np.testing.assert_array_equal(match(np.zeros((2, n, 10))), [np.arange(1, n + 1)] * 2)


def test_minus_zero_is_zero() -> None:
    np.testing.assert_array_equal(match(np.array([[[0.0, -0.0], [-0.0, 0.0]]])), [[1, 2]])


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int32, np.float32])
def test_any_type_of_number_holds_weights(dtype: type[np.generic]) -> None:
    np.testing.assert_array_equal(match(np.array([[[0, 0], [1, 0], [1, 1]]], dtype=dtype)), [[3, 1, 2]])


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 0, 1)])
def test_nothing_to_match(shape: tuple[int, int, int]) -> None:
    assert match(np.zeros(shape)).shape == shape[:2]


def test_a_list_without_items() -> None:
    where = np.zeros((2, matching._LONG), dtype=np.bool_)
    positions = match(np.full((*where.shape, 3), np.nan), where=where)
    np.testing.assert_array_equal(positions, [np.arange(1, matching._LONG + 1)] * 2)


def test_leaves_its_input_alone() -> None:
    weights = falling(np.random.default_rng(0), 2, 5, 3)
    before = weights.copy()
    match(weights, where=np.array([[True] * 5, [True] * 3 + [False] * 2]))
    np.testing.assert_array_equal(weights, before)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, 1e300])
def test_refuses_weights_it_cannot_use(weight: float) -> None:
    weights = np.zeros((2, 3, 2))
    weights[1, 2, 1] = weight
    with pytest.raises(ValueError) as error:  # noqa: PT011
        match(weights)
    assert str(error.value) == f"weights must be finite and smaller than 1e+300 in size; got {weight}"
    where = np.array([[True] * 3, [True, True, False]])
    np.testing.assert_array_equal(match(weights, where=where), [[1, 2, 3], [1, 2, 3]])


def test_is_exact_up_to_the_largest_weights() -> None:
    sizes = np.random.default_rng(0).uniform(-0.99, 0.99, (50, 4, 4))
    np.testing.assert_array_equal(match(sizes * 1e300), match(sizes))


@pytest.mark.parametrize("shape", [(3, 2), (1, 2, 3, 4), (2, 3, 0)])
def test_refuses_weights_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        match(np.zeros(shape))
    assert str(error.value) == f"weights must have shape [B, n, K] with K from 1 up; got shape {list(shape)}"


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        (np.array([[True]]), "where must be boolean of shape [1, 2]; got bool of shape [1, 1]"),
        (np.array([[1, 0]]), "where must be boolean of shape [1, 2]; got int64 of shape [1, 2]"),
    ],
)
def test_refuses_what_is_not_a_mask(where: NDArray[Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        match(np.zeros((1, 2, 3)), where=where)
    assert str(error.value) == sentence
