"""A prepared log: reading it back, samples of its queries, and items that nobody saw."""

from __future__ import annotations

import json
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import urank
from urank.errors import ConfigError, DataError
from urank.log import prepare
from urank.log.dataset import (
    Block,
    Dataset,
    RowGroup,
    drop_unseen,
    has_unseen,
    is_prepared,
    sample_queries,
    shown_positions,
)
from urank.log.folds import folds
from urank.log.splits import SPLITS
from urank.memory import Memory

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
    some = dataset.read(RowGroup(group.path, group.number, 2, np.array([0, 2])), ["x"])
    lists = [whole.column("x")[a:b].tolist() for a, b in pairwise(whole.offsets)]
    assert [some.column("x")[a:b].tolist() for a, b in pairwise(some.offsets)] == [lists[0], lists[2]]
    assert some.lists["session_id"].to_pylist() == [whole.lists["session_id"][i].as_py() for i in (0, 2)]


def test_what_is_no_prepared_log_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    assert is_prepared(dataset.folder)
    assert not is_prepared(tmp_path)
    with pytest.raises(DataError, match=r"was not written by urank prepare"):
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


def prepared_log(folder: Path, queries: int, row_group_bytes: int) -> Dataset:
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
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """In both, queries go on from one row group to the next."""
    found = prepared_log(tmp_path_factory.mktemp("sample") / "log", *request.param)
    ends = [block.lists["query_id"].to_pylist() for block in found.blocks("train", ["position"])]
    assert any(one[-1] == other[0] for one, other in pairwise(ends))
    assert len(ends) > 10
    return found


def lists(large: Dataset, split: str) -> pl.DataFrame:
    """A row for each list: its query and session, and how many items it has."""
    frames = [
        pl.DataFrame(block.lists).with_columns(items=pl.Series(np.diff(block.offsets)))
        for block in large.blocks(split, ["position"])
    ]
    return pl.concat(frames)


@given(most=st.integers(0, 2500) | st.integers(0, 100), seed=st.integers(0, 20), split=st.sampled_from(SPLITS))
@settings(max_examples=20)
def test_whole_queries_and_about_so_many(large: Dataset, most: int, seed: int, split: str) -> None:
    found = sample_queries(large, {split: most}, seed=seed)
    whole, part = lists(large, split), lists(found, split)
    kept = whole.filter(pl.col("query_id").is_in(part["query_id"].unique().to_list()))
    assert part.equals(kept)  # all lists of its queries, in the order of the log, and no others
    assert found.rows(split) == part["items"].sum()
    assert sum(group.lists for group in found.groups(split)) == part.height
    longest = whole.group_by("query_id").agg(pl.col("items").sum())["items"].max()
    assert isinstance(longest, int)
    if most >= large.rows(split):
        assert found is large
    else:
        assert 1 <= found.rows(split) <= max(most, 0) + longest
        assert found.rows(split) >= min(most, large.rows(split) - longest) - longest
    for other in SPLITS:
        if other != split:
            assert found.rows(other) == large.rows(other)
            assert len(found.groups(other)) == len(large.groups(other))


def test_seeds_take_other_queries_and_repeat(large: Dataset) -> None:
    queries = [
        set(lists(sample_queries(large, {"train": 50}, seed=seed), "train")["query_id"]) for seed in (0, *range(9))
    ]
    assert queries[0] == queries[1]
    assert len({frozenset(each) for each in queries}) > 4


def test_several_splits_at_once_and_of_a_view(large: Dataset) -> None:
    found = sample_queries(large, {"train": 200, "valid": 50})
    again = sample_queries(found, {"train": 100})
    assert large.rows("train") > found.rows("train") > again.rows("train") > 0
    assert found.rows("valid") == again.rows("valid") < large.rows("valid")
    inside = lists(again, "train").join(lists(found, "train"), on=["query_id", "session_id"], how="semi")
    assert inside.height == lists(again, "train").height
    fold = folds(found, ["train"])[0]
    assert sum(fold.rows(split) for split in SPLITS) == found.rows("train")
    of_fold = sample_queries(fold, {"train": 50})
    assert 0 < of_fold.rows("train") == lists(of_fold, "train")["items"].sum() < fold.rows("train")


def test_it_is_the_same_log_otherwise(large: Dataset) -> None:
    hidden = sample_queries(large, {"test": 10})
    assert hidden.description == large.description
    assert (hidden.positions, hidden.features, hidden.memory) == (large.positions, ["f1"], Memory(12345))


def test_little_is_read(large: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[str]]] = []
    read = Dataset.read

    def watched(self: Dataset, group: RowGroup, columns: list[str]) -> Block:
        seen.append((group.number, list(columns)))
        return read(self, group, columns)

    monkeypatch.setattr(Dataset, "read", watched)
    found: Any = sample_queries(large, {"train": large.rows("train") // 2})
    assert 0 < len(found.groups("train")) < len(large.groups("train"))
    assert all(columns == ["position"] for _, columns in seen)
    assert len(seen) < len(large.groups("train")) / 3


def test_a_file_that_is_none(tmp_path: Path) -> None:
    broken = prepared_log(tmp_path / "log", 40, 1_000)
    groups = broken.groups("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dataset, "groups", lambda *_: groups)
        groups[0].path.write_bytes(b"PAR1 is not enough")
        with pytest.raises(DataError, match=r"part-00000\.parquet is not a readable Parquet file"):
            sample_queries(broken, {"train": 10})


SHOWN = 3


def candidates(queries: int = 60, length: int = 8) -> pl.DataFrame:
    """Lists of so many items, in no order, of which the first three were shown, and some clicked."""
    rng = np.random.default_rng(0)
    row = rng.permutation(queries * length)
    position = row % length + 1
    return pl.DataFrame(
        {
            "query_id": row // length,
            "position": position,
            "click": ((position <= SHOWN) & (rng.random(len(row)) < 0.4)).astype(np.int8),
            "price": rng.normal(size=len(row)),
        }
    )


@pytest.fixture(scope="module")
def with_unseen(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("shown") / "with_unseen"
    urank.prepare(urank.read(candidates()), folder, positions=SHOWN, valid=0.2, test=0.2)
    return Dataset(folder)


def test_candidates_stay_in_their_lists_and_are_told_apart(with_unseen: Dataset) -> None:
    assert with_unseen.positions == SHOWN
    assert has_unseen(with_unseen)
    for split in SPLITS:
        counts = with_unseen.description["counts"][split]
        assert counts["rows"] == 8 * counts["lists"] == with_unseen.rows(split)
        assert counts["shown"] == SHOWN * counts["lists"]
        (block,) = with_unseen.blocks(split, ["position"])
        assert block.column("position").tolist() == [*range(1, 9)] * counts["lists"]


def test_a_split_of_a_prepared_folder_knows_it_too(with_unseen: Dataset) -> None:
    assert shown_positions(str(with_unseen.folder)) == shown_positions(str(with_unseen.folder / "train")) == SHOWN
    assert shown_positions(str(with_unseen.folder.parent)) is None


def test_what_was_shown_is_seen_alone(with_unseen: Dataset) -> None:
    seen = drop_unseen(with_unseen)
    for split in SPLITS:
        (block,) = seen.blocks(split, ["price"])
        lists = with_unseen.description["counts"][split]["lists"]
        assert block.column("position").tolist() == [1, 2, 3] * lists
        assert np.diff(block.offsets).tolist() == [SHOWN] * lists
        assert seen.rows(split) == SHOWN * lists


def test_a_fold_is_seen_in_the_same_way(with_unseen: Dataset) -> None:
    fold = folds(with_unseen, ["train"])[0]
    seen = drop_unseen(fold)
    assert seen.rows("test") == fold.rows("test") // 8 * SHOWN
    assert [group.lists for group in seen.groups("test")] == [group.lists for group in fold.groups("test")]
    assert all(block.column("position").max() == SHOWN for block in seen.blocks("test", ["price"]))


def test_a_log_of_which_all_was_shown_is_itself(tmp_path: Path) -> None:
    described = urank.prepare(urank.read(candidates()), tmp_path / "all")
    assert described["positions"] == 8
    assert list(described["counts"]["train"]) == ["queries", "lists", "rows", "clicks"]
    dataset = Dataset(tmp_path / "all")
    assert not has_unseen(dataset)
    assert drop_unseen(dataset) is dataset


def test_more_positions_than_there_are_change_nothing_else(tmp_path: Path) -> None:
    plain = urank.prepare(urank.read(candidates()), tmp_path / "plain")
    described = urank.prepare(urank.read(candidates()), tmp_path / "more", positions=99)
    assert described["positions"] == 8
    for counts in described["counts"].values():
        assert counts.pop("shown") == counts["rows"]
    assert described == plain


def test_a_list_of_which_nothing_was_shown_is_empty(tmp_path: Path) -> None:
    below = pl.DataFrame({"query_id": ["z", "z"], "position": [4, 6], "click": [0, 0], "price": [1.0, 2.0]})
    log = pl.concat([candidates(3).with_columns(pl.col("query_id").cast(pl.String)), below], how="vertical_relaxed")
    urank.prepare(urank.read(log), tmp_path / "out", positions=SHOWN, valid=0, test=0)
    dataset = Dataset(tmp_path / "out")
    (block,) = drop_unseen(dataset).blocks("train", ["price"])
    assert sorted(np.diff(block.offsets).tolist()) == [0, 3, 3, 3]
    assert dataset.rows("train") == 3 * 8 + 2


def test_a_click_below_the_last_position_is_refused_with_its_row(tmp_path: Path) -> None:
    log = candidates().sort("query_id", "position")
    clicked = log.with_columns(click=pl.when(pl.int_range(pl.len()) == 12).then(1).otherwise("click"))
    path = tmp_path / "log.parquet"
    clicked.write_parquet(path)
    sentence = (
        "items below position 3, the last that was shown, must have no clicks; "
        f"got one at position 5 at row 13 of {path}"
    )
    with pytest.raises(DataError) as error:
        urank.prepare(urank.read(path), tmp_path / "out", positions=SHOWN)
    assert str(error.value) == sentence
    assert not (tmp_path / "out").exists()


def test_positions_that_show_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="positions must be a whole number from 1 up; got 0"):
        urank.prepare(urank.read(candidates()), tmp_path / "out", positions=0)
    log = candidates().filter(pl.col("position") > 2).with_columns(click=pl.lit(0))
    with pytest.raises(DataError, match="positions must be at least the lowest position of the table; got 2"):
        urank.prepare(urank.read(log), tmp_path / "out", positions=2)


def test_what_was_shown_is_known_when_it_is_prepared_or_inspected_again(with_unseen: Dataset, tmp_path: Path) -> None:
    again = urank.prepare(urank.read(with_unseen.folder), tmp_path / "again", valid=0.2, test=0.2)
    assert again["positions"] == SHOWN
    assert again["counts"] == with_unseen.description["counts"]
    facts = urank.inspect(urank.read(with_unseen.folder)).facts
    assert facts.rows == 60 * SHOWN
    assert facts.curve.position == [1, 2, 3]
    assert facts.list_length["p100"] == SHOWN
    other = urank.prepare(urank.read(with_unseen.folder), tmp_path / "other", positions=6)
    assert other["positions"] == 6


def test_a_folder_with_another_file_of_that_name_is_a_log_as_any(tmp_path: Path) -> None:
    for number, content in enumerate(["[]", "{", json.dumps({"positions": 1, "counts": {}})]):
        folder = tmp_path / str(number)
        folder.mkdir()
        candidates().write_parquet(folder / "log.parquet")
        (folder / "schema.json").write_text(content)
        described = urank.prepare(urank.read(folder), tmp_path / f"out{number}")
        assert described["positions"] == 8
