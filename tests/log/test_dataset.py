"""A prepared log comes back as it was, and is refused when it is not one."""

from __future__ import annotations

import json
from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import urank
from urank.errors import DataError
from urank.log.dataset import Dataset, Group, is_prepared

LOG = pl.DataFrame(
    {
        "query_id": ["a", "a", "b", "b", "b"],
        "session_id": [1, 1, 1, 2, 2],
        "position": [2, 1, 1, 1, 3],
        "click": [0, 1, 0, 1, 0],
        "x": [0.5, 1.5, 2.5, 3.5, 4.5],
        "brand": ["u", "v", None, "u", "u"],
    }
)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    urank.prepare(urank.read(LOG), tmp_path / "prepared", valid=0, test=0)
    return Dataset(tmp_path / "prepared")


def test_blocks(dataset: Dataset) -> None:
    assert (dataset.positions, dataset.numeric, dataset.categorical) == (3, ["x"], ["brand"])
    assert (dataset.rows("train"), dataset.rows("test")) == (5, 0)
    (block,) = dataset.blocks("train", ["x", "position", "brand"])
    assert len(block.offsets) == 4
    lists = {}
    names = zip(block.lists["query_id"].to_pylist(), block.lists["session_id"].to_pylist(), strict=True)
    for number, name in enumerate(names):
        rows = slice(int(block.offsets[number]), int(block.offsets[number + 1]))
        lists[name] = (block.column("position")[rows].tolist(), block.column("x")[rows].tolist())
    assert lists == {("a", "1"): ([1, 2], [1.5, 0.5]), ("b", "1"): ([1], [2.5]), ("b", "2"): ([1, 3], [3.5, 4.5])}
    assert len(set(block.query.tolist())) == 2
    assert list(dataset.blocks("test", ["x"])) == []


def test_shuffled_items_stay_in_their_lists(dataset: Dataset) -> None:
    (block,) = dataset.blocks("train", ["x", "position", "brand"])
    mixed = [block.shuffled(np.random.default_rng(seed)) for seed in range(20)]
    for each in mixed:
        assert each.lists.equals(block.lists)
        assert each.offsets.tolist() == block.offsets.tolist()
        for first, last in pairwise(block.offsets):
            length = int(last - first)
            rows = [each.items.slice(int(first), length).to_pylist(), block.items.slice(int(first), length).to_pylist()]
            assert sorted(rows[0], key=lambda row: row["position"]) == rows[1]
    lists = [permutations(block.column("position")[a:b]) for a, b in pairwise(block.offsets)]
    every_order = {tuple(np.concatenate(orders)) for orders in product(*lists)}
    assert {tuple(each.column("position")) for each in mixed} == every_order
    again = block.shuffled(np.random.default_rng(3))
    assert again.items.equals(mixed[3].items)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 100])
def test_parts_are_the_lists_some_at_a_time(dataset: Dataset, most: int) -> None:
    (block,) = dataset.blocks("train", ["x", "position"])
    parts = list(block.parts(most))
    for part in parts:
        assert part.offsets[0] == 0
        assert part.items.num_rows == part.offsets[-1]
        padded = part.lists.num_rows * int(np.diff(part.offsets).max())
        assert padded <= most or part.lists.num_rows == 1  # a longer list comes by itself
    assert pa.concat_tables(part.items for part in parts).equals(block.items)
    assert pa.concat_tables(part.lists for part in parts).equals(block.lists)
    assert np.concatenate([np.diff(part.offsets) for part in parts]).tolist() == np.diff(block.offsets).tolist()


def test_columns_that_are_not_there(dataset: Dataset) -> None:
    with pytest.raises(DataError, match=r"prepared has no column 'colour'"):
        next(dataset.blocks("train", ["x", "colour"]))


def test_some_lists_of_a_row_group(dataset: Dataset) -> None:
    (group,) = dataset.groups("train")
    whole = dataset.read(group, ["x"])
    some = dataset.read(Group(group.path, group.number, 2, np.array([0, 2])), ["x"])
    lists = [whole.column("x")[a:b].tolist() for a, b in pairwise(whole.offsets)]
    assert [some.column("x")[a:b].tolist() for a, b in pairwise(some.offsets)] == [lists[0], lists[2]]
    assert some.lists["session_id"].to_pylist() == [whole.lists["session_id"][i].as_py() for i in (0, 2)]


def test_what_is_no_prepared_log_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    assert is_prepared(dataset.folder)
    assert not is_prepared(tmp_path)
    with pytest.raises(DataError, match=r"is not a folder that urank prepare wrote"):
        Dataset(tmp_path)
    path = dataset.folder / "schema.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(DataError, match="was prepared by a newer version of urank"):
        Dataset(dataset.folder)


def test_a_damaged_part_is_named(dataset: Dataset) -> None:
    part = next((dataset.folder / "train").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:50])
    with pytest.raises(DataError, match=r"part-00000\.parquet is not a readable Parquet file"):
        dataset.groups("train")
