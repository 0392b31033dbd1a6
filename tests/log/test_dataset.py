"""A prepared log comes back as it was, and is refused when it is not one."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import urank
from urank.errors import DataError
from urank.log.dataset import Dataset, is_prepared

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
