"""Atomic writes, and local and remote paths."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pytest

import urank
from urank.errors import ConfigError, DataError
from urank.log.columns import ROW
from urank.log.dataset import Dataset, is_prepared
from urank.log.splits import SPLITS
from urank.storage import (
    glob_files,
    is_remote,
    is_within,
    new_file,
    new_folder,
    open_parquet,
    parquet_writer,
    remove_folder,
    to_path,
)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The name of a folder in fsspec's memory, gone afterwards."""
    yield "memory://elsewhere"
    files = fsspec.filesystem("memory")
    if files.exists("/elsewhere"):
        files.rm("/elsewhere", recursive=True)


def contents(folder: str) -> dict[str, str]:
    """The files of a folder elsewhere and what they hold."""
    path = to_path(folder)
    found = (each for each in path.rglob("*") if each.is_file())
    return {each.relative_to(path).as_posix(): each.read_text() for each in found}


def write(folder: str, **files: str) -> None:
    for name, content in files.items():
        to_path(f"{folder}/{name}").write_text(content)


def test_a_folder_appears_at_the_end(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "out", marker="m") as working:
        (working / "m").write_text("1")
        assert not (tmp_path / "a" / "out").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]
    assert (tmp_path / "a" / "out").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_fails_vanishes_and_the_old_one_stays(tmp_path: Path) -> None:
    old = tmp_path / "out"
    old.mkdir()
    (old / "m").write_text("old")
    with pytest.raises(RuntimeError), new_folder(old, marker="m", overwrite=True) as working:
        (working / "m").write_text("new")
        raise RuntimeError
    assert (old / "m").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_folder(tmp_path / "link", marker="m") as working:
        (working / "m").write_text("1")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "m").read_text() == "1"


def test_a_file_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ConfigError), new_folder(tmp_path / "out", marker="m", overwrite=overwrite):
            pass
    assert (tmp_path / "out").read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be written"), new_folder(tmp_path / "out" / "deeper", marker="m"):
        pass


def test_a_file_is_replaced_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(RuntimeError), new_file(path) as working:
        working.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    with new_file(path) as working:
        working.write_text("new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(ConfigError, match="is a folder; a file name is needed"), new_file(tmp_path):
        pass


@pytest.mark.parametrize(
    ("marker", "ours", "theirs"),
    [
        ("schema.json", '{"format": "urank prepared log", "version": 1}', ['{"format": "other"}', "[]", "not json"]),
        ("manifest.json", '{"format": "urank model"}', ['{"name": "my web page"}', '"urank model"']),
        (
            "simulation.toml",
            'candidates = 1\nloggers = 2\npositions = 3\nsessions = 4\nuser = "item"\n',
            ["steps = 10\n", "= broken"],
        ),
    ],
)
def test_only_a_folder_of_ours_is_replaced(tmp_path: Path, marker: str, ours: str, theirs: list[str]) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for content in theirs:
        (folder / marker).write_text(content)
        with pytest.raises(ConfigError, match="is not urank's"), new_folder(folder, marker=marker, overwrite=True):
            pass
        assert (folder / marker).read_text() == content
    (folder / marker).write_text(ours)
    with new_folder(folder, marker=marker, overwrite=True) as working:
        (working / "new").write_text("1")
    assert [path.name for path in folder.iterdir()] == ["new"]


def test_folders_made_on_the_way_vanish_with_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_folder(tmp_path / "a" / "b" / "c", marker="m"):
        raise RuntimeError
    with pytest.raises(RuntimeError), new_file(tmp_path / "a" / "b" / "page.html"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    with pytest.raises(RuntimeError), new_folder(tmp_path / "kept" / "c", marker="m"):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_folder_elsewhere_appears_with_its_marker(elsewhere: str) -> None:
    with new_folder(f"{elsewhere}/a/out", marker="m") as working:
        assert str(working) == f"{elsewhere}/a/out"
        (working / "part").mkdir()
        (working / "part" / "x").write_text("1")
        (working / "m").write_text("2")
    assert contents(elsewhere) == {"a/out/part/x": "1", "a/out/m": "2"}


def test_a_folder_elsewhere_is_replaced_only_when_asked(elsewhere: str) -> None:
    write(elsewhere, m="old", x="old")
    refused = pytest.raises(ConfigError, match=f"^{elsewhere} exists already; choose another name or pass --overwrite")
    with refused, new_folder(elsewhere, marker="m"):
        pytest.fail("the block must not begin")
    assert contents(elsewhere) == {"m": "old", "x": "old"}
    with new_folder(elsewhere, marker="m", overwrite=True) as working:
        assert contents(elsewhere) == {}  # nothing of the old one is taken for a part of the new one
        (working / "m").write_text("new")
    assert contents(elsewhere) == {"m": "new"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_something_else_elsewhere_is_not_replaced(elsewhere: str, overwrite: bool) -> None:
    write(elsewhere, precious="1")
    to_path(f"{elsewhere}/deep").mkdir()
    write(f"{elsewhere}/deep", m="2")
    refused = pytest.raises(ConfigError, match=r"holds something else \(it has no m\), so it is not replaced")
    with refused, new_folder(elsewhere, marker="m", overwrite=overwrite):
        pytest.fail("the block must not begin")
    assert contents(elsewhere) == {"precious": "1", "deep/m": "2"}


def test_only_a_folder_of_ours_is_replaced_elsewhere(elsewhere: str) -> None:
    write(elsewhere, **{"schema.json": '{"format": "other"}'})
    refused = pytest.raises(ConfigError, match="is not urank's")
    with refused, new_folder(elsewhere, marker="schema.json", overwrite=True):
        pytest.fail("the block must not begin")
    assert contents(elsewhere) == {"schema.json": '{"format": "other"}'}


def test_what_is_in_the_way_elsewhere_is_told(elsewhere: str) -> None:
    write(elsewhere, taken="precious")
    with pytest.raises(ConfigError), new_folder(f"{elsewhere}/taken", marker="m", overwrite=True) as working:
        (working / "m").write_text("1")
    with pytest.raises(ConfigError, match="is a folder; a file name is needed"), new_file(elsewhere) as local:
        local.write_text("1")
    assert contents(elsewhere) == {"taken": "precious"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_folder_elsewhere_that_fails_vanishes(elsewhere: str, error: type[BaseException]) -> None:
    with pytest.raises(error), new_folder(f"{elsewhere}/out", marker="m") as working:
        (working / "part").mkdir()
        (working / "part" / "x").write_text("half")
        (working / "m").write_text("half")
        raise error
    assert contents(elsewhere) == {}


def test_what_failed_elsewhere_can_be_tried_again(elsewhere: str) -> None:
    with pytest.raises(RuntimeError), new_folder(elsewhere, marker="m") as working:
        (working / "part").mkdir(parents=True)
        (working / "part" / "x").write_text("half")
        raise RuntimeError
    with new_folder(elsewhere, marker="m") as working:
        (working / "m").write_text("whole")
    assert contents(elsewhere) == {"m": "whole"}


def test_a_file_elsewhere_is_replaced_at_the_end_or_not_at_all(elsewhere: str) -> None:
    path = f"{elsewhere}/a/page.html"
    with pytest.raises(RuntimeError), new_file(path) as working:
        working.write_text("half")
        raise RuntimeError
    assert not to_path(path).exists()
    with new_file(path) as working:
        working.write_text("old")
        assert not to_path(path).exists()
    with pytest.raises(RuntimeError), new_file(path) as working:
        working.write_text("half")
        raise RuntimeError
    assert contents(elsewhere) == {"a/page.html": "old"}
    with new_file(path) as working:
        working.write_text("new")
    assert contents(elsewhere) == {"a/page.html": "new"}
    assert not working.parent.exists()  # what was written here is gone


def test_a_folder_is_removed_here_and_elsewhere(elsewhere: str, tmp_path: Path) -> None:
    for root in (to_path(elsewhere), tmp_path):
        for name in ("out/x", "out/deep/er/y", "other/z"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("1")
        remove_folder(root / "out")
        remove_folder(root / "nothing")  # no matter
        assert [path for path in root.rglob("*") if path.is_file()] == [root / "other" / "z"]


def made_log(queries: int = 300) -> pl.DataFrame:
    """Lists of five items, the last of which is never clicked; each query is shown twice."""
    rng = np.random.default_rng(4)
    rows = queries * 10
    position = np.tile(np.arange(1, 6), 2 * queries)
    return pl.DataFrame(
        {
            "query_id": np.repeat([f"q{number}" for number in range(queries)], 10),
            "session_id": np.tile(np.repeat([1, 2], 5), queries),
            "position": position,
            "click": rng.integers(0, 2, rows) * (position < 5),
            "x": rng.random(rows, dtype=np.float32),
            "brand": rng.choice(["a", "b", "c"], rows),
        }
    )


def write_log(frame: pl.DataFrame, folder: str) -> None:
    """A log in two files."""
    to_path(folder).mkdir(parents=True, exist_ok=True)
    half = frame.height // 20 * 10
    for name, part in (("a", frame[:half]), ("b", frame[half:])):
        table = part.to_arrow()
        with parquet_writer(to_path(f"{folder}/{name}.parquet"), table.schema) as writer:
            writer.write_table(table)


def lists_of(folder: str | Path, split: str) -> pl.DataFrame:
    """The lists of a split, as they are read, in the order in which they were written."""
    dataset = Dataset(folder)
    frames = []
    for block in dataset.blocks(split, ["position", "click", *dataset.features]):
        items = pl.DataFrame(block.items)
        lists = pl.DataFrame(block.lists)[np.repeat(np.arange(len(block.offsets) - 1), np.diff(block.offsets))]
        frames.append(lists.hstack(items))
    return pl.concat(frames)


@pytest.mark.parametrize(
    ("source", "remote"),
    [
        ("s3://bucket/log", True),
        ("memory://log", True),
        ("abfs+x://log", True),
        ("file:///tmp/log", True),
        ("logs/june", False),
        ("/logs/s3://june", False),
        ("C:\\logs", False),
        ("C://logs", False),  # a drive, since no scheme has one letter
        ("s3:/bucket", False),
        (Path("s3://bucket/log"), False),
    ],
)
def test_a_scheme_makes_a_name_remote(source: str | Path, remote: bool) -> None:
    assert is_remote(source) is remote
    if not remote:
        assert to_path(source) == Path(source)


def test_a_path_stays_what_it_is(elsewhere: str) -> None:
    here, there = Path("logs"), to_path(elsewhere)
    assert to_path(here) is here
    assert to_path(there) is there
    assert (is_remote(there), is_remote(there / "log"), str(there / "log")) == (True, True, f"{elsewhere}/log")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere://log has a scheme that fsspec does not know: .*nowhere"):
        to_path("nowhere://log")


def test_without_the_extra_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "upath", None)
    wanted = "memory://log needs packages that are not installed (upath); run pip install 'urank[remote]'"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        to_path("memory://log")
    assert to_path("logs") == Path("logs")  # which needs no such package


def test_without_the_package_of_a_scheme_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"^s3://bucket/log needs packages that are not installed \(.*s3fs"):
        to_path("s3://bucket/log").exists()


@pytest.mark.parametrize("remote", [False, True])
def test_glob_files_is_in_order(remote: bool, elsewhere: str, tmp_path: Path) -> None:
    folder = to_path(elsewhere) if remote else tmp_path
    for name in ("b/2.parquet", "a/2.parquet", "a/10.parquet", "a/1.csv", "c.parquet"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    expected = [folder / name for name in ("a/10.parquet", "a/2.parquet", "b/2.parquet")]
    assert glob_files(folder / "*" / "*.parquet") == expected
    assert glob_files(folder / "a" / "?.*") == [folder / "a" / "1.csv", folder / "a" / "2.parquet"]
    assert glob_files(folder / "*.csv") == []
    assert all(is_remote(path) is remote for path in glob_files(folder / "*" / "*"))


@pytest.mark.parametrize(
    "remote",
    [False, True],
)
def test_glob_files_gives_files_alone(remote: bool, elsewhere: str, tmp_path: Path) -> None:
    folder = to_path(elsewhere) if remote else tmp_path
    (folder / "day=1").mkdir(parents=True)
    (folder / "day=1" / "a.parquet").write_text("x")
    (folder / "day.parquet").write_text("x")
    assert glob_files(folder / "day*") == [folder / "day.parquet"]


@pytest.mark.parametrize("remote", [False, True])
def test_parquet_round_trip(remote: bool, elsewhere: str, tmp_path: Path) -> None:
    folder = to_path(elsewhere) if remote else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    table = made_log(20).to_arrow()
    with parquet_writer(folder / "log.parquet", table.schema, compression="snappy") as writer:
        for start in range(0, table.num_rows, 60):
            writer.write_table(table.slice(start, 60), row_group_size=60)
    with open_parquet(folder / "log.parquet") as file:
        assert file.metadata.num_row_groups == -(-table.num_rows // 60)
        assert file.metadata.row_group(0).column(0).compression == "SNAPPY"
        assert file.read().equals(table)
        assert file.read_row_group(1, columns=["x"]).equals(table.select(["x"]).slice(60, 60))


def test_a_file_that_is_not_there_or_not_parquet(elsewhere: str) -> None:
    with pytest.raises(FileNotFoundError):
        open_parquet(to_path(f"{elsewhere}/nothing.parquet"))
    for source, reason in (("nothing", "does not exist"), ("no*.parquet", "no file matches")):
        with pytest.raises(DataError, match=reason):
            urank.read(f"{elsewhere}/{source}")
    for name in ("log.csv", "log.parquet"):
        to_path(f"{elsewhere}/{name}").write_text("query_id,position,click\n1,1,0\n")
    with pytest.raises(DataError, match=r"log\.csv is not a Parquet file, the only format that is read from a URL"):
        urank.read(f"{elsewhere}/log.csv")
    with pytest.raises(DataError, match=r"^memory://elsewhere/log\.parquet is not a readable Parquet file"):
        urank.read(f"{elsewhere}/log.parquet")


@pytest.mark.parametrize("source", ["log", "log/", "log/*.parquet", "log/[ab].parquet"])
def test_a_log_elsewhere_is_read_as_one_here(source: str, elsewhere: str, tmp_path: Path) -> None:
    for root in (elsewhere, str(tmp_path)):
        write_log(made_log(), f"{root}/log")
    there, here = (urank.read(f"{root}/{source}") for root in (elsewhere, tmp_path))
    assert there.frame().equals(here.frame())
    assert (there.files, there.size, there.row_bytes) == (2, here.size, here.row_bytes)
    assert there.row_name(there.frame()[ROW][0]) == f"row 1 of {elsewhere}/log/a.parquet"


def test_partitions_elsewhere_become_columns(elsewhere: str) -> None:
    log = made_log(20)
    for day, half in ((3, log[:100]), (4, log[100:])):
        write_log(half, f"{elsewhere}/log/day={day}")
    for source in ("log", "log/*/*.parquet"):
        frame = urank.read(f"{elsewhere}/{source}").frame()
        assert frame["day"].to_list() == [3] * 100 + [4] * 100
        assert frame["x"].equals(log["x"])


@pytest.mark.parametrize("split", SPLITS)
def test_prepared_elsewhere_is_prepared_here(split: str, elsewhere: str, tmp_path: Path) -> None:
    write_log(made_log(), f"{elsewhere}/log")
    write_log(made_log(), str(tmp_path / "log"))
    there = urank.prepare(urank.read(f"{elsewhere}/log"), f"{elsewhere}/prepared", valid=0.2, test=0.2)
    here = urank.prepare(urank.read(tmp_path / "log"), tmp_path / "prepared", valid=0.2, test=0.2)
    assert there | {"source": None} == here | {"source": None}
    assert Dataset(f"{elsewhere}/prepared").description == there
    assert is_prepared(f"{elsewhere}/prepared")
    assert not is_prepared(f"{elsewhere}/log")
    lists = lists_of(f"{elsewhere}/prepared", split)
    assert lists.height == here["counts"][split]["rows"] > 0
    assert lists.equals(lists_of(tmp_path / "prepared", split))


def test_prepared_elsewhere_is_a_log_again(elsewhere: str, tmp_path: Path) -> None:
    urank.prepare(urank.read(made_log()), f"{elsewhere}/prepared", positions=4, valid=0, test=0)
    urank.prepare(urank.read(made_log()), tmp_path / "prepared", positions=4, valid=0, test=0)
    again = urank.read(f"{elsewhere}/prepared")
    assert again.frame().equals(urank.read(tmp_path / "prepared").frame())
    assert urank.prepare(again, tmp_path / "again")["positions"] == 4  # what was shown is remembered


def test_a_log_larger_than_a_bucket_is_prepared_elsewhere(elsewhere: str, tmp_path: Path) -> None:
    log = urank.read(made_log())
    for folder in (f"{elsewhere}/prepared", tmp_path / "prepared"):
        urank.prepare(log, folder, valid=0, test=0, bucket_bytes=log.row_bytes * 500)
    assert lists_of(f"{elsewhere}/prepared", "train").equals(lists_of(tmp_path / "prepared", "train"))
    assert not list(to_path(f"{elsewhere}/prepared").rglob("*.arrow"))


def test_a_path_elsewhere_is_read_as_its_name(elsewhere: str) -> None:
    write_log(made_log(20), f"{elsewhere}/log")
    assert urank.read(to_path(f"{elsewhere}/log")).frame().height == 200


def test_a_prepared_log_is_prepared_anew_in_its_place(tmp_path: Path) -> None:
    folder = str(tmp_path / "prepared")
    urank.prepare(urank.read(made_log()), folder, valid=0.1, test=0.1)
    counts = urank.prepare(urank.read(folder), folder, valid=0, test=0, overwrite=True)["counts"]
    assert counts["train"]["rows"] == made_log().height


def test_what_lies_within_a_folder_elsewhere(elsewhere: str) -> None:
    for name in (f"{elsewhere}/log", f"{elsewhere}/log/", f"{elsewhere}/log/train", f"{elsewhere}/log/*.parquet"):
        assert is_within(name, f"{elsewhere}/log"), name
        assert is_within(name, f"{elsewhere}/log/"), name
    assert not is_within(f"{elsewhere}/log-2", f"{elsewhere}/log")
    assert not is_within(f"{elsewhere}/log", "/log")


def test_elsewhere_a_log_is_not_replaced_before_it_is_read(elsewhere: str) -> None:
    folder = f"{elsewhere}/prepared"
    urank.prepare(urank.read(made_log()), folder)
    for source in (folder, f"{folder}/train"):
        with pytest.raises(ConfigError, match="holds the log itself"):
            urank.prepare(urank.read(source), folder, overwrite=True)
    assert urank.read(folder).frame().height == made_log().height
