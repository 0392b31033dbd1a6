"""Samples: whole queries, about as many impressions as asked for, always the same, and little of the log is read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import urank
from urank.errors import DataError
from urank.evaluation.cross_fitting import folds
from urank.log import prepare
from urank.log.dataset import Block, Dataset, Group, sampled
from urank.log.splits import SPLITS
from urank.memory import Memory


def prepared(folder: Path, queries: int, row_group_bytes: int) -> Dataset:
    """Queries of 1 to 5 sessions of 1 to 7 items, in row groups of so many bytes."""
    rng = np.random.default_rng(0)
    sessions = rng.integers(1, 6, queries)
    query = np.repeat(np.arange(queries), sessions)
    lengths = rng.integers(1, 8, len(query))
    rows = lengths.sum()
    log = pl.DataFrame(
        {
            "query_id": np.repeat(query, lengths),
            "session_id": np.repeat(np.arange(len(query)), lengths),
            "position": np.concatenate([np.arange(1, n + 1) for n in lengths]),
            "click": rng.integers(0, 2, rows),
            "f1": rng.normal(size=rows),
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ROW_GROUP_BYTES", row_group_bytes)
        urank.prepare(urank.read(log), folder, valid=0.3, test=0.3)
    return Dataset(folder, memory=Memory(12345))


@pytest.fixture(scope="module", params=[(300, 1_000), (150, 1)], ids=["many lists a row group", "one list a row group"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """In both, queries go on from one row group to the next."""
    found = prepared(tmp_path_factory.mktemp("sample") / "log", *request.param)
    ends = [block.lists["query_id"].to_pylist() for block in found.blocks("train", ["position"])]
    assert any(one[-1] == other[0] for one, other in pairwise(ends))
    assert len(ends) > 10
    return found


def lists(dataset: Dataset, split: str) -> pl.DataFrame:
    """A row for each list: its query and session, and how many items it has."""
    frames = [
        pl.DataFrame(block.lists).with_columns(items=pl.Series(np.diff(block.offsets)))
        for block in dataset.blocks(split, ["position"])
    ]
    return pl.concat(frames)


@given(most=st.integers(0, 2500) | st.integers(0, 100), seed=st.integers(0, 20), split=st.sampled_from(SPLITS))
@settings(max_examples=40)
def test_whole_queries_and_about_so_many(dataset: Dataset, most: int, seed: int, split: str) -> None:
    found = sampled(dataset, {split: most}, seed=seed)
    whole, part = lists(dataset, split), lists(found, split)
    kept = whole.filter(pl.col("query_id").is_in(part["query_id"].unique().to_list()))
    assert part.equals(kept)  # all lists of its queries, in the order of the log, and no others
    assert found.rows(split) == part["items"].sum()
    assert sum(group.lists for group in found.groups(split)) == part.height
    longest = whole.group_by("query_id").agg(pl.col("items").sum())["items"].max()
    assert isinstance(longest, int)
    if most >= dataset.rows(split):
        assert found is dataset
    else:
        assert 1 <= found.rows(split) <= max(most, 0) + longest
        assert found.rows(split) >= min(most, dataset.rows(split) - longest) - longest
    for other in SPLITS:
        if other != split:
            assert found.rows(other) == dataset.rows(other)
            assert len(found.groups(other)) == len(dataset.groups(other))


def test_seeds_take_other_queries_and_repeat(dataset: Dataset) -> None:
    queries = [set(lists(sampled(dataset, {"train": 50}, seed=seed), "train")["query_id"]) for seed in (0, *range(9))]
    assert queries[0] == queries[1]
    assert len({frozenset(each) for each in queries}) > 4


def test_several_splits_at_once_and_of_a_view(dataset: Dataset) -> None:
    found = sampled(dataset, {"train": 200, "valid": 50})
    again = sampled(found, {"train": 100})
    assert dataset.rows("train") > found.rows("train") > again.rows("train") > 0
    assert found.rows("valid") == again.rows("valid") < dataset.rows("valid")
    inside = lists(again, "train").join(lists(found, "train"), on=["query_id", "session_id"], how="semi")
    assert inside.height == lists(again, "train").height
    fold = folds(found, ["train"])[0]
    assert sum(fold.rows(split) for split in SPLITS) == found.rows("train")
    of_fold = sampled(fold, {"train": 50})
    assert 0 < of_fold.rows("train") == lists(of_fold, "train")["items"].sum() < fold.rows("train")


def test_it_is_the_same_log_otherwise(dataset: Dataset) -> None:
    hidden = sampled(dataset, {"test": 10})
    assert hidden.description == dataset.description
    assert (hidden.positions, hidden.features, hidden.memory) == (dataset.positions, ["f1"], Memory(12345))


def test_little_is_read(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[str]]] = []
    read = Dataset.read

    def watched(self: Dataset, group: Group, columns: list[str]) -> Block:
        seen.append((group.number, list(columns)))
        return read(self, group, columns)

    monkeypatch.setattr(Dataset, "read", watched)
    found: Any = sampled(dataset, {"train": dataset.rows("train") // 2})
    assert 0 < len(found.groups("train")) < len(dataset.groups("train"))
    assert all(columns == ["position"] for _, columns in seen)
    assert len(seen) < len(dataset.groups("train")) / 3


def test_a_file_that_is_none(tmp_path: Path) -> None:
    broken = prepared(tmp_path / "log", 40, 1_000)
    groups = broken.groups("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dataset, "groups", lambda *_: groups)
        groups[0].path.write_bytes(b"PAR1 is not enough")
        with pytest.raises(DataError, match=r"part-00000\.parquet is not a readable Parquet file"):
            sampled(broken, {"train": 10})
