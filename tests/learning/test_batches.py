"""Batches: whole lists, each once, no more rows than a batch may have, whatever the lists are like."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import urank
from urank.learning import batches as module
from urank.learning.batches import ListArrays, MemoryStream, Stream, train_and_valid
from urank.learning.features import Inputs, fit_featurizer
from urank.log import prepare
from urank.log.dataset import Dataset


def lists_of(lengths: list[int]) -> ListArrays:
    """Lists of these lengths, whose rows are numbered by their value."""
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
    rows = int(offsets[-1])
    return ListArrays.from_rows(
        Inputs(np.zeros((rows, 1), np.float32), np.zeros((rows, 0), np.int64)),
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


# Repeated lists


def repeated(seed: int = 0, *, values: bool = False) -> ListArrays:
    """Logged lists of few items with NaN and equal items, many of them the same list in another order."""
    rng = np.random.default_rng(seed)
    distinct = [rng.integers(0, 6, rng.integers(1, 5)) for _ in range(5)]
    chosen = [rng.permutation(distinct[number]) for number in rng.integers(0, 5, 40)]
    kind = np.concatenate(chosen)
    n = len(kind)
    features = np.array([[0.5, np.nan], [0.5, 1.0], [-2.0, np.nan], [0.0, 3.0], [7.0, 1.0], [0.25, 0.5]], np.float32)
    return ListArrays.from_rows(
        Inputs(features[kind], (kind[:, None] % 3).astype(np.int64)),
        position=np.concatenate([np.arange(1, len(each) + 1) for each in chosen]),
        click=rng.integers(0, 2, n).astype(np.float32),
        value=rng.integers(1, 3, n).astype(np.float32) if values else np.ones(n, np.float32),
        offsets=np.append(0, np.cumsum([len(each) for each in chosen])).astype(np.int64),
        gain=np.arange(n, dtype=np.float32),
    )


def logged(lists: ListArrays) -> list[tuple[object, ...]]:
    """All that is known of each logged list, in any order of the lists."""
    items = np.column_stack([lists.inputs.numeric, lists.inputs.categorical, lists.value])[lists.item]
    assert lists.gain is not None
    rows = np.column_stack([np.nan_to_num(items, nan=-9), lists.position, lists.click, lists.gain])
    return sorted(tuple(map(tuple, rows[a:b].tolist())) for a, b in pairwise(lists.offsets))


def contents(lists: ListArrays) -> list[list[tuple[float, ...]]]:
    items = np.column_stack([np.nan_to_num(lists.inputs.numeric, nan=-9), lists.inputs.categorical, lists.value])
    return [sorted(map(tuple, items[a:b].tolist())) for a, b in pairwise(lists.item_offsets)]


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_collapsed_lists_are_distinct_and_lose_nothing(seed: int, values: bool) -> None:
    lists = repeated(seed, values=values)
    collapsed = lists.collapsed()
    assert logged(collapsed) == logged(lists)
    kinds = contents(collapsed)
    assert len({tuple(kind) for kind in kinds}) == len(kinds) == len({tuple(kind) for kind in contents(lists)})
    assert len(kinds) < len(lists)
    for number, (first, last) in enumerate(pairwise(collapsed.sessions)):
        for a, b in pairwise(collapsed.offsets[first : last + 1]):
            assert sorted(collapsed.item[a:b]) == list(range(*collapsed.item_offsets[number : number + 2]))


def test_a_collision_of_hashes_merges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mix_bits", np.zeros_like)
    lists = repeated()
    collapsed = lists.collapsed()
    assert logged(collapsed) == logged(lists)


def test_values_need_not_be_equal_where_they_are_not_used() -> None:
    lists = repeated(values=True)
    assert lists.collapsed(by_value=False).distinct == repeated().collapsed().distinct < lists.collapsed().distinct


@given(
    batch_lists=st.integers(1, 7),
    batch_rows=st.integers(1, 30),
    most=st.integers(1, 4),
    shuffle=st.sampled_from([None, (1, 4)]),
)
def test_batches_of_repeated_lists_have_each_logged_list_once(
    batch_lists: int, batch_rows: int, most: int, shuffle: tuple[int, int] | None
) -> None:
    lists = repeated().collapsed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_ROWS", batch_rows)
        patch.setattr(module, "REPEATED_ROWS", most)
        batches = list(MemoryStream(lists, batch_lists=batch_lists).batches(shuffle=shuffle))
    seen: list[float] = []
    for batch in batches:
        assert len(batch.sessions) == len(batch.item_offsets) <= batch_lists + 1
        assert batch.sessions[-1] == batch.lists
        assert batch.sessions.diff().min() > 0
        assert len(batch) == batch.offsets[-1] == len(batch.item)
        assert len(batch.numeric) == batch.item_offsets[-1]
        assert len(batch.numeric) <= batch_rows or len(batch.sessions) == 2
        assert len(batch) <= most * batch_rows or batch.lists == 1
        assert batch.gain is not None
        seen += batch.gain.tolist()
        for number, (first, last) in enumerate(pairwise(batch.sessions)):
            rows = slice(int(batch.offsets[first]), int(batch.offsets[last]))
            assert batch.item_offsets[number] <= batch.item[rows].min()
            assert batch.item[rows].max() < batch.item_offsets[number + 1]
    assert sorted(seen) == list(range(len(lists.item)))


def test_the_sample_decides_whether_lists_are_collapsed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, sessions in (("repeated", 3), ("once", 1)):
        item = np.repeat(rng.normal(size=(60, 4)), sessions, axis=0).ravel()
        rows = len(item)
        frame = pl.DataFrame(
            {
                "query_id": np.arange(rows) // (4 * sessions),
                "session_id": np.arange(rows) // 4,
                "position": np.arange(rows) % 4 + 1,
                "click": rng.integers(0, 2, rows),
                "x": item,
            }
        )
        urank.prepare(urank.read(frame), tmp_path / name, valid=0.2, test=0)
        dataset = Dataset(tmp_path / name)
        train, valid = train_and_valid(dataset, fit_featurizer(dataset))
        assert (train.repeats, valid.repeats) == (sessions, sessions)
        lists = train.lists(0)
        assert len(lists) == sessions * lists.distinct
        assert train.lists(0) is lists  # kept
        assert lists.nbytes < 4 * lists.distinct * (4 + 4 + 8) + len(lists.item) * 20 + 8 * 3 * (len(lists) + 1)


def test_row_groups_are_kept_while_they_fit(tmp_path: Path) -> None:
    rows = 4_000
    x = np.random.default_rng(0).normal(size=rows)
    columns = {"query_id": np.arange(rows) // 4, "position": np.arange(rows) % 4 + 1, "click": np.zeros(rows, int)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ROW_GROUP_BYTES", 8_000)
        urank.prepare(urank.read(pl.DataFrame({**columns, "x": x})), tmp_path / "log", valid=0.1, test=0)
    dataset = Dataset(tmp_path / "log")
    featurizer = fit_featurizer(dataset)
    one = Stream(dataset, "train", featurizer).lists(0).nbytes
    stream = Stream(dataset, "train", featurizer, cache_bytes=int(2.5 * one))
    kept = [stream.lists(group) is stream.lists(group) for group in range(len(stream.groups))]
    assert 0 < sum(kept) < len(kept)
    assert sum(stream.lists(group).nbytes for group, each in enumerate(kept) if each) <= 2.5 * one
