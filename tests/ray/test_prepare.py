"""A log prepared by workers holds the lists that one process writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import urank
from simulated import Small
from urank.errors import DataError
from urank.log.splits import SPLITS
from urank.ray.cluster import Cluster
from urank.ray.jobs import prepare_on_ray


def lists_of(folder: Path, split: str) -> pl.DataFrame:
    return pl.read_parquet(folder / split / "*.parquet").sort("query_id", "session_id")


def written(small: Small, folder: Path, files: int) -> Path:
    """The log in random order, in several files."""
    folder.mkdir()
    rows = small.simulation.log.sample(fraction=1, shuffle=True, seed=1)
    size = -(-rows.height // files)
    for number in range(files):
        rows.slice(number * size, size).write_parquet(folder / f"{number}.parquet")
    return folder


@pytest.mark.parametrize("settings", [{"split_by": "hash"}, {"split_by": "time", "positions": 5}])
def test_the_same_lists_as_one_process_writes(
    small: Small, cluster: Cluster, tmp_path: Path, settings: dict[str, Any]
) -> None:
    log = small.simulation.log.with_columns(timestamp=pl.col("query_id").hash(seed=1) % 1000)
    if "positions" in settings:
        log = log.with_columns(click=pl.when(pl.col("position") <= 5).then("click").otherwise(0))
    log = log.with_columns(dwell=pl.col("click") * 2.5)
    log.sample(fraction=1, shuffle=True, seed=1).write_parquet(tmp_path / "a.parquet")
    source = urank.read(tmp_path / "a.parquet")
    here = urank.prepare(source, tmp_path / "here", **settings)
    there = prepare_on_ray(source, tmp_path / "there", cluster, **settings)
    assert there["counts"] == here["counts"]
    assert there["split"] == here["split"]
    assert there["left_out"] == here["left_out"] == ["dwell"]
    assert there["positions"] == here["positions"]
    for split in SPLITS:
        assert_frame_equal(lists_of(tmp_path / "there", split), lists_of(tmp_path / "here", split))
    for one, other in zip(there["features"], here["features"], strict=True):
        assert one.keys() == other.keys()
        numbers = {name: value for name, value in one.items() if isinstance(value, float)}
        assert numbers == pytest.approx({name: other[name] for name in numbers}, rel=1e-6)


def test_a_refusal_names_the_file_and_the_row_and_leaves_nothing(
    small: Small, cluster: Cluster, tmp_path: Path
) -> None:
    folder = written(small, tmp_path / "log", files=3)
    wrong = pl.read_parquet(folder / "1.parquet").with_row_index()
    wrong = wrong.with_columns(position=pl.when(pl.col("index") == 6).then(0).otherwise("position")).drop("index")
    wrong.write_parquet(folder / "1.parquet")
    with pytest.raises(DataError, match=r"position .* got 0 at row 7 of .*1\.parquet"):
        prepare_on_ray(urank.read(str(folder)), tmp_path / "out", cluster)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]
