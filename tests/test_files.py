"""What is written appears complete or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from urank.errors import ConfigError
from urank.storage import new_file, new_folder, remove_folder, to_path


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
