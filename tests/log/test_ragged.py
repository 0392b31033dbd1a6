"""Padding loses nothing, and scores become positions in one way only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from urank.log.ragged import list_ids, offsets_of_runs, pad, positions_by_score, where_items

lengths = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@given(lengths, st.integers(0, 3))
def test_pad_and_back(sizes: list[int], extra: int) -> None:
    offsets = np.append(0, np.cumsum(sizes))
    values = np.arange(offsets[-1] * 2, dtype=np.float32).reshape(-1, 2)
    width = max(sizes) + extra
    padded = pad(values, offsets, fill=-1, width=width)
    where = where_items(offsets, width)
    assert padded.shape == (len(sizes), width, 2)
    assert (padded[where] == values).all()
    assert (padded[~where] == -1).all()
    assert list_ids(offsets).tolist() == [i for i, size in enumerate(sizes) for _ in range(size)]
    assert offsets_of_runs(list_ids(offsets)).tolist() == offsets.tolist()


def test_a_width_that_would_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="width must be at least the longest list, 3; got 2"):
        pad(np.arange(3), np.array([0, 3]), width=2)


@given(st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=1, max_size=5), st.data())
def test_positions_by_score(scores: list[list[int]], data: st.DataObject) -> None:
    array = np.array(scores, dtype=float)
    mask = st.lists(st.booleans(), min_size=3, max_size=3)
    where = np.array(data.draw(st.lists(mask, min_size=len(scores), max_size=len(scores))))
    positions = positions_by_score(np.where(where, array, np.nan), where=where)
    for row, keep, got in zip(scores, where, positions, strict=True):
        order = sorted((i for i in range(3) if keep[i]), key=lambda i: (-row[i], i))
        assert [int(got[i]) for i in order] == list(range(1, len(order) + 1))
        assert sorted(got.tolist()) == [1, 2, 3]


def test_nan_is_not_a_score() -> None:
    with pytest.raises(ValueError, match="scores must be numbers; got NaN"):
        positions_by_score(np.array([[0.0, np.nan]]))
