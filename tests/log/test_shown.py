"""Candidates that nobody saw: kept for rankers, and out of sight for whatever learns from clicks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import urank
from urank.errors import ConfigError, DataError
from urank.evaluation.cross_fitting import folds
from urank.log.dataset import Dataset, drop_unseen, has_unseen
from urank.log.prepare import positions_of
from urank.log.splits import SPLITS

K = 3


def candidates(queries: int = 60, length: int = 8) -> pl.DataFrame:
    """Lists of so many items, in no order, of which the first three were shown, and some clicked."""
    rng = np.random.default_rng(0)
    row = rng.permutation(queries * length)
    position = row % length + 1
    return pl.DataFrame(
        {
            "query_id": row // length,
            "position": position,
            "click": ((position <= K) & (rng.random(len(row)) < 0.4)).astype(np.int8),
            "price": rng.normal(size=len(row)),
        }
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("shown") / "prepared"
    urank.prepare(urank.read(candidates()), folder, positions=K, valid=0.2, test=0.2)
    return Dataset(folder)


def test_candidates_stay_in_their_lists_and_are_told_apart(prepared: Dataset) -> None:
    assert prepared.positions == K
    assert has_unseen(prepared)
    for split in SPLITS:
        counts = prepared.description["counts"][split]
        assert counts["rows"] == 8 * counts["lists"] == prepared.rows(split)
        assert counts["shown"] == K * counts["lists"]
        (block,) = prepared.blocks(split, ["position"])
        assert block.column("position").tolist() == [*range(1, 9)] * counts["lists"]


def test_a_split_of_a_prepared_folder_knows_it_too(prepared: Dataset) -> None:
    assert positions_of(str(prepared.folder)) == positions_of(str(prepared.folder / "train")) == K
    assert positions_of(str(prepared.folder.parent)) is None


def test_what_was_shown_is_seen_alone(prepared: Dataset) -> None:
    seen = drop_unseen(prepared)
    for split in SPLITS:
        (block,) = seen.blocks(split, ["price"])
        lists = prepared.description["counts"][split]["lists"]
        assert block.column("position").tolist() == [1, 2, 3] * lists
        assert np.diff(block.offsets).tolist() == [K] * lists
        assert seen.rows(split) == K * lists


def test_a_fold_is_seen_in_the_same_way(prepared: Dataset) -> None:
    fold = folds(prepared, ["train"])[0]
    seen = drop_unseen(fold)
    assert seen.rows("test") == fold.rows("test") // 8 * K
    assert [group.lists for group in seen.groups("test")] == [group.lists for group in fold.groups("test")]
    assert all(block.column("position").max() == K for block in seen.blocks("test", ["price"]))


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
    urank.prepare(urank.read(log), tmp_path / "out", positions=K, valid=0, test=0)
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
        "items below position 3, the last that is said to be shown, must have no clicks; "
        f"got one at position 5 at row 13 of {path}"
    )
    with pytest.raises(DataError) as error:
        urank.prepare(urank.read(path), tmp_path / "out", positions=K)
    assert str(error.value) == sentence
    assert not (tmp_path / "out").exists()


def test_positions_that_show_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="positions must be a whole number from 1 up; got 0"):
        urank.prepare(urank.read(candidates()), tmp_path / "out", positions=0)
    log = candidates().filter(pl.col("position") > 2).with_columns(click=pl.lit(0))
    with pytest.raises(DataError, match="positions must be at least the lowest position of the table; got 2"):
        urank.prepare(urank.read(log), tmp_path / "out", positions=2)


def test_what_was_shown_is_known_when_it_is_prepared_or_inspected_again(prepared: Dataset, tmp_path: Path) -> None:
    again = urank.prepare(urank.read(prepared.folder), tmp_path / "again", valid=0.2, test=0.2)
    assert again["positions"] == K
    assert again["counts"] == prepared.description["counts"]
    facts = urank.inspect(urank.read(prepared.folder)).facts
    assert facts.rows == 60 * K
    assert facts.curve.position == [1, 2, 3]
    assert facts.list_length["p100"] == K
    other = urank.prepare(urank.read(prepared.folder), tmp_path / "other", positions=6)
    assert other["positions"] == 6


def test_a_folder_with_another_file_of_that_name_is_a_log_as_any(tmp_path: Path) -> None:
    for number, content in enumerate(["[]", "{", json.dumps({"positions": 1, "counts": {}})]):
        folder = tmp_path / str(number)
        folder.mkdir()
        candidates().write_parquet(folder / "log.parquet")
        (folder / "schema.json").write_text(content)
        described = urank.prepare(urank.read(folder), tmp_path / f"out{number}")
        assert described["positions"] == 8
