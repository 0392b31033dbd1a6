"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from urank.errors import ConfigError
from urank.paths import is_remote, to_path, upload

__all__ = ["new_file", "new_folder", "refuse_taken", "remove_folder"]

_FORMATS = {"schema.json": "urank prepared log", "manifest.json": "urank model", "ranked.json": "urank ranked"}
_KEYS = {
    "simulation.toml": {"candidates", "loggers", "positions", "sessions", "user"},
    "appstore.toml": {"apps", "attention", "random_days", "users"},
    "abtest.toml": {"after", "before", "during", "market"},
}


@contextmanager
def new_folder(folder: str | Path, *, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends well, and vanishes when it fails.

    Args:
        folder: the name it takes; missing parents are made.
        marker: a file that every folder of this kind holds. Only a folder that holds it, with content of ours, is ever
            replaced.
        overwrite: replace an earlier folder of this kind.
    """
    if is_remote(folder):
        with _written_elsewhere(to_path(folder), marker, overwrite) as remote:
            yield remote
        return
    refuse_taken(folder, marker=marker, overwrite=overwrite)
    target = Path(folder).absolute()
    target = target.resolve() if target.is_symlink() else target
    made = _missing_parents(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        _remove_empty(made)
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    replaced = working.with_name(working.name + ".old")
    try:
        yield working
        working.chmod(0o755)
        if target.exists():
            target.rename(replaced)
        working.rename(target)
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        shutil.rmtree(working, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
        _remove_empty(made)


def refuse_taken(folder: str | Path, *, marker: str, overwrite: bool) -> None:
    """Refuse what `new_folder` would: better before long work than after it."""
    target = to_path(folder)
    if not target.exists():
        return
    inside = (path for path in target.rglob("*") if path.is_file()) if is_remote(target) else target.iterdir()
    if target.is_dir() and not any(inside):
        return
    if target.is_file() and is_remote(target):
        raise ConfigError(f"{folder} is a file; the name of a folder is needed")
    if not overwrite and (not is_remote(target) or (target / marker).is_file()):
        raise ConfigError(f"{folder} exists already; choose another name or pass --overwrite")
    if not (target / marker).is_file():
        killed = "; if that is what a killed run left, remove it" if is_remote(target) else ""
        raise ConfigError(f"{folder} holds something else (it has no {marker}), so it is not replaced{killed}")
    if not _is_ours(target / marker):
        raise ConfigError(f"{folder} holds something else (its {marker} is not urank's), so it is not replaced")


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its name when the block ends well, and vanishes when it fails."""
    if is_remote(path):
        with _uploaded(to_path(path)) as local:
            yield local
        return
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"{path} is a folder; a file name is needed")
    made = _missing_parents(target.absolute())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        _remove_empty(made)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    os.close(handle)
    working = Path(name)
    try:
        yield working
        working.chmod(0o644)
        working.replace(target)
    finally:
        working.unlink(missing_ok=True)
        _remove_empty(made)


@contextmanager
def _written_elsewhere(target: Path, marker: str, overwrite: bool) -> Iterator[Path]:
    """A folder where nothing can be renamed; its marker is written last, and without it the folder is not there."""
    refuse_taken(target, marker=marker, overwrite=overwrite)
    remove_folder(target)
    try:
        yield target
    except BaseException:
        remove_folder(target)
        raise


@contextmanager
def _uploaded(target: Path) -> Iterator[Path]:
    """A file here that is put where it belongs when the block ends well; elsewhere a file appears when it is whole."""
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; a file name is needed")
    with tempfile.TemporaryDirectory(prefix="urank-") as name:
        local = Path(name) / "file"
        yield local
        target.parent.mkdir(parents=True, exist_ok=True)
        upload(local, target)


def remove_folder(folder: Path) -> None:
    """Remove a folder and all in it, here or elsewhere; one that is not there is no matter."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.unlink()
        elif path.is_dir():  # real ones only: where folders are parts of names, they went with their last file
            path.rmdir()


def _is_ours(marker: Path) -> bool:
    """Whether a marker holds what urank writes into a file of its name."""
    try:
        if marker.name in _FORMATS:
            content = json.loads(marker.read_text(encoding="utf-8"))
            return isinstance(content, dict) and content.get("format") == _FORMATS[marker.name]
        if marker.name in _KEYS:
            return _KEYS[marker.name] <= set(tomllib.loads(marker.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
    return True


def _missing_parents(target: Path) -> list[Path]:
    """The folders above that do not exist yet, the deepest first."""
    return [parent for parent in target.parents if not parent.exists()]


def _remove_empty(folders: list[Path]) -> None:
    """Take back folders that were made for a result that never came; one that holds anything stays."""
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
