"""Batches: whole lists, each once, no more rows than a batch may have, whatever the lists are like."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from urank.learning import batches as module
from urank.learning.batches import ListArrays, MemoryStream
from urank.learning.features import Inputs


def lists_of(lengths: list[int]) -> ListArrays:
    """Lists of these lengths, whose rows are numbered by their value."""
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
    rows = int(offsets[-1])
    return ListArrays(
        inputs=Inputs(np.zeros((rows, 1), np.float32), np.zeros((rows, 0), np.int64)),
        position=np.concatenate([np.arange(1, n + 1) for n in lengths]),
        click=np.zeros(rows, np.float32),
        value=np.arange(rows, dtype=np.float32),
        offsets=offsets,
    )


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=50),
    batch_lists=st.integers(1, 10),
    most_rows=st.integers(1, 60),
    shuffle=st.sampled_from([None, (0, 0), (1, 4)]),
)
def test_every_list_comes_once_and_batches_are_no_larger_than_they_may_be(
    lengths: list[int], batch_lists: int, most_rows: int, shuffle: tuple[int, int] | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_ROWS", most_rows)
        batches = list(MemoryStream(lists_of(lengths), batch_lists=batch_lists).batches(shuffle=shuffle))
    seen: list[list[float]] = []
    for batch in batches:
        lists = len(batch.offsets) - 1
        assert 1 <= lists <= batch_lists
        assert len(batch) == batch.offsets[-1]
        assert len(batch) <= most_rows or lists == 1
        seen += [
            batch.value[first:last].tolist() for first, last in zip(batch.offsets, batch.offsets[1:], strict=False)
        ]
    offsets = np.append(0, np.cumsum(lengths)).tolist()
    expected = [[float(row) for row in range(a, b)] for a, b in pairwise(offsets)]
    assert sorted(seen) == expected
    if shuffle is None:
        assert seen == expected


def test_lists_of_which_nothing_was_shown_make_no_batch() -> None:
    batches = list(MemoryStream(lists_of([2, 3, 0, 0, 0, 0, 1]), batch_lists=2).batches())
    assert [(len(batch), batch.lists) for batch in batches] == [(5, 2), (1, 1)]


def test_short_lists_are_cut_by_their_number_alone() -> None:
    batches = list(MemoryStream(lists_of([10] * 600), batch_lists=256).batches())
    assert [len(batch.offsets) - 1 for batch in batches] == [256, 256, 600 - 2 * 256]


def test_long_lists_are_cut_by_their_rows() -> None:
    batches = list(MemoryStream(lists_of([1000] * 200), batch_lists=256).batches())
    assert [len(batch.offsets) - 1 for batch in batches] == [65, 65, 65, 5]  # 65 · 1,000 ≤ 2¹⁶ < 66 · 1,000
