"""What rankers maximise: the discounted gain of LambdaRank, and what clicks and labels count."""

from __future__ import annotations

from math import log2
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulated import Small, make
from urank.errors import DataError
from urank.learning.batches import Batch, ListArrays
from urank.learning.features import Inputs
from urank.log.dataset import Block
from urank.log.ragged import positions_by_score
from urank.propensity.examination import ExaminationCurve
from urank.ranking.objectives import ClickGain, DiscountedGain, LabelGain, PaddedLists, by_length, gain_of
from urank.ranking.ranking_settings import BaselineConfig
from urank.ranking.utility import delta_utility, earned

OFFSETS = np.array([0, 2, 3])


def lists(gain: list[float]) -> ListArrays:
    n = len(gain)
    return ListArrays.from_rows(
        Inputs(np.zeros((n, 1), np.float32), np.zeros((n, 0), np.int64)),
        position=np.arange(1, n + 1),
        click=np.zeros(n, np.float32),
        value=np.ones(n, np.float32),
        offsets=OFFSETS,
        gain=np.array(gain, np.float32),
    )


def block(**columns: list[float]) -> Block:
    return Block(pa.table({"query_id": ["a", "b"]}), pa.table(columns), OFFSETS)


def padded(gain: np.ndarray, where: np.ndarray | None = None) -> PaddedLists:
    zero = np.zeros(gain.shape)
    return PaddedLists(zero, zero, zero, None, gain, where)


def test_gain_over_the_logarithm_of_the_position() -> None:
    found = DiscountedGain(3)(padded(np.array([[4.0, 0.0]])))
    np.testing.assert_allclose(found, [[[4.0, 4 / log2(3), 4 / log2(4)], [0.0, 0.0, 0.0]]])


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 7))
def test_swaps_change_dcg_by_delta_utility(seed: int, n: int, K: int) -> None:
    """LambdaRank's |Δ|: (g_i − g_j)(1/log₂(1 + k_j) − 1/log₂(1 + k_i)), and 0 for a discount past K."""
    rng = np.random.default_rng(seed)
    gain, positions = rng.random((1, n)) * 5, rng.permutation(n)[None] + 1
    delta = delta_utility(DiscountedGain(K)(padded(gain)), positions)[0]
    discount = np.where(positions[0] <= K, 1 / np.log2(1 + positions[0]), 0.0)
    expected = (gain[0][:, None] - gain[0][None]) * (discount[None] - discount[:, None])
    np.testing.assert_allclose(delta, expected, atol=1e-12)


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_normalised_by_the_best_order(seed: int, n: int) -> None:
    """The order by falling gain then earns 1, as an ideal nDCG does; a list without gains earns nothing."""
    rng = np.random.default_rng(seed)
    gain = np.stack([rng.random(n) + 0.1, np.zeros(n)])
    best = positions_by_score(gain)
    np.testing.assert_allclose(earned(DiscountedGain(4, normalised=True)(padded(gain)), best), [1.0, 0.0])


def test_padding_gains_nothing_whatever_stands_there() -> None:
    where = np.array([[True, True], [True, False]])
    gain = np.array([[1.0, 2.0], [3.0, np.nan]])
    found = DiscountedGain(2, normalised=True)(padded(gain, where))
    assert np.isfinite(found).all()
    assert found[1, 1].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(found[1, 0], [1.0, 1 / log2(3)])


def test_batches_and_rows_are_the_same_lists() -> None:
    given = lists([5.0, 6.0, 7.0])
    batch = given.batch(0, 2)
    ((numbers, whole),) = by_length(batch)
    assert numbers[whole.where].tolist() == [0, 1, 2]
    assert whole.gain is not None
    assert whole.where is not None
    assert (whole.gain.tolist(), whole.where.tolist()) == ([[5.0, 6.0], [7.0, 0.0]], [[True, True], [True, False]])
    rows = PaddedLists.of_rows(given, np.array([[1, 0]]))
    assert rows.gain is not None
    assert (rows.gain.tolist(), rows.table, rows.where) == ([[6.0, 5.0]], None, None)


def test_lists_keep_their_gains_when_they_are_permuted() -> None:
    moved = lists([5.0, 6.0, 7.0]).select(np.array([1, 0]))
    assert moved.gain is not None
    assert (moved.gain.tolist(), moved.offsets.tolist()) == ([7.0, 5.0, 6.0], [0, 1, 3])


def test_clicks_over_propensities_times_values() -> None:
    """c · b / p at the logged position, and never more than the clip."""
    given = block(click=[1, 1, 1], position=[1, 2, 3], value=[2.0, 3.0, 5.0])
    curve = ExaminationCurve("mine", (1.0, 0.5, 0.01))
    assert ClickGain()(given).tolist() == [1.0, 1.0, 1.0]
    assert ClickGain(curve, clip=10)(given).tolist() == [1.0, 1 / 0.5, 10.0]
    assert ClickGain(curve, clip=200, takes_value=True)(given).tolist() == pytest.approx([2.0, 3 / 0.5, 5 / 0.01])
    unclicked = block(click=[0, 0, 1], position=[3, 3, 3])
    assert ClickGain(curve, clip=10)(unclicked).tolist() == [0.0, 0.0, 10.0]


def test_labels() -> None:
    assert LabelGain()(block(relevance=[0.0, 3.0, float("nan")])).tolist() == [0.0, 2**3 - 1, 0.0]


def test_what_is_asked_for(small: Small, tmp_path: Path) -> None:
    config = BaselineConfig(clip=7)
    found = gain_of(small.dataset, config, None)
    assert isinstance(found, ClickGain)
    assert (found.clip, found.takes_value, list(found.columns)) == (7, True, [])
    assert isinstance(gain_of(small.dataset, BaselineConfig(learn_from="relevance"), None), LabelGain)
    without = make(tmp_path, queries=30, sessions=2, features=3)
    without.dataset.description["roles"] = [
        role for role in without.dataset.description["roles"] if role != "relevance"
    ]
    with pytest.raises(DataError, match=r"learning from relevance needs the column relevance, which .* does not have"):
        gain_of(without.dataset, BaselineConfig(learn_from="relevance"), None)


def test_a_propensity_that_knows_too_few_positions() -> None:
    given = block(click=[1, 1, 1], position=[1, 2, 3])
    with pytest.raises(DataError, match="'mine' must cover all positions of the log, up to 3; it covers 2"):
        ClickGain(ExaminationCurve("mine", (1.0, 0.5)))(given)


# Chunks by length


def batch_of(lengths: list[int], K: int = 3, seed: int = 0) -> Batch:
    """Random lists of these lengths."""
    rng = np.random.default_rng(seed)
    offsets = np.append(0, np.cumsum(lengths))
    rows = int(offsets[-1])
    whole = ListArrays.from_rows(
        Inputs(np.zeros((rows, 1), np.float32), np.zeros((rows, 0), np.int64)),
        position=np.concatenate([rng.permutation(n) + 1 for n in lengths]),
        click=rng.integers(0, 2, rows).astype(np.float32),
        value=rng.uniform(1, 9, rows).astype(np.float32),
        offsets=offsets,
        table=rng.uniform(0.1, 0.9, (rows, K)).astype(np.float32),
    )
    return whole.batch(0, len(lengths))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    most_rows=st.integers(1, 200),
    most_padding=st.integers(0, 50),
)
def test_every_list_is_in_one_chunk_of_lists_of_about_its_length(
    lengths: list[int], most_rows: int, most_padding: int
) -> None:
    batch = batch_of(lengths)
    seen: list[int] = []
    for rows, lists in by_length(batch, most_rows, most_padding):
        where = np.ones(rows.shape, dtype=bool) if lists.where is None else lists.where
        assert rows.size <= most_rows or len(rows) == 1
        assert (~where).sum() <= most_padding
        assert (lists.where is None) == where.all()
        seen += rows[where].tolist()
        for padded, tensor in (
            (lists.value, batch.value),
            (lists.position, batch.position),
            (lists.table, batch.table),
        ):
            assert padded is not None
            assert tensor is not None
            np.testing.assert_array_equal(padded[where], tensor.numpy()[rows[where]])
            assert (padded[~where] == 0).all()
        assert rows.max() < len(batch)
    assert sorted(seen) == list(range(len(batch)))


def test_lists_of_one_length_keep_their_order() -> None:
    chunks = list(by_length(batch_of([4] * 10), most_rows=12))
    assert [rows.tolist() for rows, _ in chunks] == [
        [[4 * number + item for item in range(4)] for number in range(first, min(first + 3, 10))]
        for first in range(0, 10, 3)
    ]
    assert all(lists.where is None for _, lists in chunks)


def test_empty_lists_are_left_out() -> None:
    ((rows, lists),) = by_length(batch_of([0, 2, 0, 1]))
    assert rows.shape == (2, 2)
    assert lists.where is not None
    assert lists.where.tolist() == [[True, True], [True, False]]
    assert list(by_length(batch_of([0, 0]))) == []
