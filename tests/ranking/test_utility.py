"""The utility of an order (Eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from urank.log.ragged import pad, where_items
from urank.ranking.utility import (
    check_cutoff,
    check_order,
    delta_utility,
    earned,
    has_place,
    inverse_logged,
    item_gains,
    utility,
    utility_of_items,
)

TABLE = np.array(
    [
        [[0.5, 0.4, 0.3], [0.9, 0.2, 0.1], [0.6, 0.5, 0.4]],
        [[0.8, 0.7, 0.6], [0.3, 0.2, 0.1], [0.0, 0.0, 0.0]],
    ]
)
VALUE = np.array([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]])


@dataclass(frozen=True)
class Batch:
    table: NDArray[Any]
    positions: NDArray[Any]
    value: NDArray[Any]
    where: NDArray[np.bool_]
    cutoff: int | None

    def utility(self) -> NDArray[np.float64]:
        return utility(self.table, self.positions, value=self.value, where=self.where, cutoff=self.cutoff)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Lists of 0 to 6 items with gaps between positions, at most 4 places and some items without one."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    offsets = np.cumsum([0, *lengths])
    K = draw(st.integers(1, 4))
    rows = int(offsets[-1])
    positions = [p for n in lengths for p in draw(st.permutations(range(1, 9)))[:n]]
    probabilities = draw(st.lists(st.floats(0, 1), min_size=rows * K, max_size=rows * K))
    values = draw(st.lists(st.floats(-100, 100), min_size=rows, max_size=rows))
    return Batch(
        table=pad(np.array(probabilities).reshape(rows, K), offsets, fill=np.nan),
        positions=pad(np.array(positions, dtype=np.int64), offsets, fill=-1),
        value=pad(np.array(values), offsets, fill=np.inf),
        where=where_items(offsets),
        cutoff=draw(st.none() | st.integers(1, 9)),
    )


def utility_by_loop(batch: Batch) -> list[float]:
    K = batch.table.shape[2]
    totals = []
    for b in range(len(batch.positions)):
        total = 0.0
        for i in range(batch.positions.shape[1]):
            if not batch.where[b, i]:
                continue
            k = int(batch.positions[b, i])
            if k <= K and (batch.cutoff is None or k <= batch.cutoff):
                total += float(batch.table[b, i, k - 1]) * float(batch.value[b, i])
        totals.append(total)
    return totals


def test_sums_click_probability_times_value() -> None:
    positions = np.array([[3, 1, 2], [1, 2, 3]])
    expected = [0.3 * 2 + 0.9 * 3 + 0.5 * 5, 0.8 * 7 + 0.2 * 11 + 0.0 * 13]
    np.testing.assert_allclose(utility(TABLE, positions, value=VALUE), expected)


def test_without_value_counts_clicks() -> None:
    positions = np.array([[3, 1, 2], [1, 2, 3]])
    np.testing.assert_allclose(utility(TABLE, positions), [0.3 + 0.9 + 0.5, 0.8 + 0.2 + 0.0])


def test_cutoff_counts_the_first_positions_only() -> None:
    positions = np.array([[3, 1, 2], [1, 2, 3]])
    np.testing.assert_allclose(utility(TABLE, positions, value=VALUE, cutoff=1), [0.9 * 3, 0.8 * 7])
    np.testing.assert_array_equal(utility(TABLE, positions, cutoff=99), utility(TABLE, positions))


def test_items_without_a_place_earn_nothing() -> None:
    positions = np.array([[3, 1, 2], [1, 2, 7]])
    table = TABLE[:, :, :2]
    np.testing.assert_array_equal(has_place(table, positions), [[False, True, True], [True, True, False]])
    np.testing.assert_allclose(
        utility_of_items(table, positions, value=VALUE), [[0, 0.9 * 3, 0.5 * 5], [0.8 * 7, 0.2 * 11, 0]]
    )


def test_a_cutoff_above_the_number_of_positions_gives_no_further_place() -> None:
    positions = np.array([[3, 1, 2], [1, 2, 7]])
    table = TABLE[:, :, :2]
    for cutoff in (2, 3, 7, 99):
        np.testing.assert_array_equal(
            has_place(table, positions, cutoff=cutoff), [[False, True, True], [True, True, False]]
        )


def test_gaps_between_positions_are_empty_slots() -> None:
    np.testing.assert_allclose(utility(TABLE[:1, :2], np.array([[3, 1]])), [0.3 + 0.9])


def test_padding_means_nothing() -> None:
    where = np.array([[True, True, False]])
    table = np.where(where[..., None], TABLE[:1], np.nan)
    value = np.where(where, VALUE[:1], np.inf)
    positions = np.array([[2, 1, 1]])
    np.testing.assert_allclose(utility(table, positions, value=value, where=where), [0.4 * 2 + 0.9 * 3])


def test_sums_in_double_precision() -> None:
    table = np.full((1, 1000, 1000), 0.1, dtype=np.float32)
    total = utility(table, np.arange(1, 1001)[None, :])
    assert total.dtype == np.float64
    np.testing.assert_allclose(total, [1000 * float(np.float32(0.1))], rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_any_integer_type_holds_positions(dtype: type[np.integer[Any]]) -> None:
    np.testing.assert_allclose(utility(TABLE[:1], np.array([[3, 1, 2]], dtype=dtype)), [0.3 + 0.9 + 0.5])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_earns_nothing(shape: tuple[int, int]) -> None:
    total = utility(np.zeros((*shape, 2)), np.zeros(shape, dtype=np.int64))
    np.testing.assert_array_equal(total, np.zeros(shape[0]))


@given(batches())
def test_equals_a_plain_loop(batch: Batch) -> None:
    np.testing.assert_allclose(batch.utility(), utility_by_loop(batch), rtol=1e-12, atol=1e-9)


@given(batches(), st.randoms(use_true_random=False))
def test_order_of_the_input_does_not_matter(batch: Batch, random: Any) -> None:
    columns = list(range(batch.positions.shape[1]))
    random.shuffle(columns)
    shuffled = replace(
        batch,
        table=batch.table[:, columns],
        positions=batch.positions[:, columns],
        value=batch.value[:, columns],
        where=batch.where[:, columns],
    )
    np.testing.assert_allclose(shuffled.utility(), batch.utility(), rtol=1e-12, atol=1e-9)


@given(batches(), st.integers(1, 3))
def test_more_padding_changes_nothing(batch: Batch, extra: int) -> None:
    def wider(array: NDArray[Any], fill: float) -> NDArray[Any]:
        width = [(0, 0), (0, extra)] + [(0, 0)] * (array.ndim - 2)
        return np.pad(array, width, constant_values=fill)

    padded = replace(
        batch,
        table=wider(batch.table, np.nan),
        positions=wider(batch.positions, 1),
        value=wider(batch.value, np.nan),
        where=wider(batch.where, False),
    )
    np.testing.assert_allclose(padded.utility(), batch.utility(), rtol=1e-12, atol=1e-9)


@given(batches())
def test_is_the_sum_over_items_and_linear_in_value(batch: Batch) -> None:
    items = utility_of_items(batch.table, batch.positions, value=batch.value, where=batch.where, cutoff=batch.cutoff)
    np.testing.assert_array_equal(items.sum(axis=1), batch.utility())
    doubled = replace(batch, value=batch.value * 2)
    np.testing.assert_allclose(doubled.utility(), 2 * batch.utility(), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    ("positions", "where", "sentence"),
    [
        (np.array([1, 2]), None, "positions must have shape [B, n]; got shape [2]"),
        (np.array([[1.0, 2.0]]), None, "positions must be whole numbers; got float64"),
        (np.array([[0, 1]]), None, "positions must be whole numbers from 1 up; got 0"),
        (np.array([[1, 2], [4, 4]]), None, "positions must be distinct within a list; got 4 more than once in list 1"),
        (np.array([[1, 2]]), np.array([[True]]), "where must be boolean of shape [1, 2]; got bool of shape [1, 1]"),
        (np.array([[1, 2]]), np.array([[1, 0]]), "where must be boolean of shape [1, 2]; got int64 of shape [1, 2]"),
    ],
)
def test_refuses_what_is_not_an_order(positions: NDArray[Any], where: NDArray[Any] | None, sentence: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check_order(positions, where)
    assert str(error.value) == sentence


def test_repeated_positions_in_padding_are_allowed() -> None:
    where = np.array([[True, False, False, False]])
    np.testing.assert_array_equal(check_order(np.array([[1, 1, -3, -3]]), where), where)


@pytest.mark.parametrize("cutoff", [0, -1, 2.5])
def test_refuses_what_is_not_a_cutoff(cutoff: Any) -> None:
    with pytest.raises(ValueError, match=r"cutoff must be a whole number from 1 up, or None; got"):
        check_cutoff(cutoff)
    with pytest.raises(ValueError, match=r"cutoff must be"):
        utility(TABLE, np.array([[1, 2, 3], [1, 2, 3]]), cutoff=cutoff)


@pytest.mark.parametrize("table", [TABLE[0], TABLE[:1], TABLE[:, :2], TABLE[:, :, :0]])
def test_refuses_a_table_of_another_shape(table: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"table must have shape \[B, n, K\] with \[B, n\] = \[2, 3\] and K from 1 up"):
        utility(table, np.array([[1, 2, 3], [1, 2, 3]]))


@pytest.mark.parametrize("probability", [-0.1, 1.5, np.nan])
def test_refuses_what_is_not_a_probability(probability: float) -> None:
    with pytest.raises(ValueError, match=f"table must contain probabilities from 0 to 1; got {probability}"):
        utility(np.full((1, 1, 1), probability), np.array([[1]]))


def test_refuses_values_it_cannot_use() -> None:
    positions = np.array([[1, 2, 3], [1, 2, 3]])
    with pytest.raises(ValueError, match=r"value must have shape \[2, 3\]; got shape \[2, 2\]"):
        utility(TABLE, positions, value=VALUE[:, :2])
    with pytest.raises(ValueError, match=r"value must be finite; got nan"):
        utility(TABLE, positions, value=np.where(VALUE == 13, np.nan, VALUE))


def test_delta_utility_is_what_a_swap_gains() -> None:
    """Eq. 6, by hand, with a swap across the cut: the third item has no place."""
    positions = np.array([[1, 2, 4]])
    table = TABLE[:1]
    delta = delta_utility(table, positions)[0]
    assert delta[0, 1] == pytest.approx(0.4 + 0.9 - 0.5 - 0.2)
    assert delta[0, 2] == pytest.approx(0.6 + 0.0 - 0.5 - 0.0)
    assert delta[1, 2] == pytest.approx(0.5 + 0.0 - 0.2 - 0.0)
    np.testing.assert_array_equal(delta, delta.T)


@given(batches())
def test_delta_utility_is_the_difference_of_two_utilities(batch: Batch) -> None:
    where = batch.where
    gains = item_gains(np.where(where[..., None], batch.table, 0), value=np.where(where, batch.value, 0), where=where)
    delta = delta_utility(gains, batch.positions)
    before = utility(batch.table, batch.positions, value=batch.value, where=where)
    for b, i in np.argwhere(where):
        for j in np.flatnonzero(where[b]):
            swapped = batch.positions.copy()
            swapped[b, [i, j]] = swapped[b, [j, i]]
            after = utility(batch.table, swapped, value=batch.value, where=where)
            assert delta[b, i, j] == pytest.approx(after[b] - before[b], abs=1e-9)


@given(batches())
def test_what_a_list_earns_is_its_utility(batch: Batch) -> None:
    gains = item_gains(batch.table, value=batch.value, where=batch.where)
    expected = utility(batch.table, batch.positions, value=batch.value, where=batch.where)
    np.testing.assert_allclose(earned(gains, batch.positions), expected, atol=1e-9)


def test_gains_blend_the_model_with_the_clicks() -> None:
    table, click, logged = TABLE[:1], np.array([[0, 1, 1]]), np.array([[1, 3, 2]])
    blended = item_gains(table, value=VALUE[:1], click=click, logged=logged, blend=0.25)[0]
    assert blended[0].tolist() == pytest.approx([0.5 * 2 * 0.75, 0.4 * 2 * 0.75, 0.3 * 2 * 0.75])
    assert blended[1, 0] == pytest.approx(0.9 * 3 * (0.75 + 0.25 / 0.1))
    assert blended[2, 2] == pytest.approx(0.4 * 5 * (0.75 + 0.25 / 0.5))


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_gains_are_unbiased_whatever_the_blend(seed: int, blend: float) -> None:
    """The mean over all clicks, each with its probability, is table · value: Eq. 3, exactly."""
    rng = np.random.default_rng(seed)
    table, value = 0.02 + 0.97 * rng.random((1, 3, 4)), rng.random((1, 3))
    logged = rng.permutation(4)[None, :3] + 1
    shown = np.take_along_axis(table, logged[..., None] - 1, axis=2)[0, :, 0]
    expected = np.zeros_like(table)
    for number in range(8):
        click = (number >> np.arange(3) & 1)[None]
        chance = np.prod(np.where(click[0] == 1, shown, 1 - shown))
        expected += chance * item_gains(table, value=value, click=click, logged=logged, blend=blend)
    np.testing.assert_allclose(expected, table * value[..., None], rtol=1e-9)


def test_floored_probabilities_are_told() -> None:
    weight, floored = inverse_logged(TABLE[:1], np.array([[1, 3, 2]]), floor=0.2)
    assert weight[0].tolist() == pytest.approx([1 / 0.5, 1 / 0.2, 1 / 0.5])
    assert floored.tolist() == [[False, True, False]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: inverse_logged(TABLE, np.full((2, 3), 0)), "logged positions must be from 1 up; got 0"),
        (lambda: inverse_logged(TABLE, np.full((2, 3), 1), floor=0), "above 0 at the logged positions"),
        (lambda: inverse_logged(TABLE, np.full((2, 3), 1), floor=2), "floor must be from 0 to 1; got 2"),
        (lambda: item_gains(TABLE, blend=1.5), "blend must be from 0 to 1; got 1.5"),
        (lambda: item_gains(TABLE, blend=1.0), "click and logged must be given"),
    ],
)
def test_what_cannot_be_weighed_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_what_was_not_shown_has_no_click_to_weigh() -> None:
    """Three items, two positions: the third was logged below them, so Eq. 3 says nothing of it, and the model does."""
    table = np.array([[[0.5, 0.4], [0.4, 0.2], [0.3, 0.1]]])
    logged, click = np.array([[1, 2, 7]]), np.array([[1, 1, 0]])
    weight, floored = inverse_logged(table, logged, floor=0.25)
    np.testing.assert_allclose(weight, [[1 / 0.5, 1 / 0.25, 0.0]])
    assert floored.tolist() == [[False, True, False]]
    for share in (0.0, 0.3, 1.0):
        gains = item_gains(table, click=click, logged=logged, blend=share, floor=0.25)
        worth = np.array([(1 - share) + share / 0.5, (1 - share) + share / 0.25, 1 - share])
        np.testing.assert_allclose(gains[0], table[0] * worth[:, None])
