"""What is written appears complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from urank.errors import ConfigError
from urank.files import new_file, new_folder


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
