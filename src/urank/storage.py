"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard, cast

import pyarrow.parquet as pq

from urank.errors import ConfigError

__all__ = [
    "absolute",
    "is_path",
    "is_remote",
    "is_within",
    "matching",
    "new_file",
    "new_folder",
    "open_parquet",
    "parquet_writer",
    "refuse_taken",
    "remove_folder",
    "to_path",
    "upload",
]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_remote(source: object) -> bool:
    """Whether a name or a path is that of something elsewhere.

    >>> is_remote("s3://bucket/log"), is_remote("logs/june"), is_remote(Path("logs"))
    (True, False, False)
    """
    return bool(_SCHEME.match(source)) if isinstance(source, str) else not isinstance(source, Path)


def is_path(source: object) -> TypeGuard[str | Path]:
    """Whether it is a name or a path, here or elsewhere, and not a table."""
    return isinstance(source, (str, Path)) or hasattr(source, "storage_options")


def to_path(source: str | Path) -> Path:
    """The path that a name stands for.

    >>> to_path("logs/june")
    PosixPath('logs/june')
    """
    if not isinstance(source, str):
        return source
    if not is_remote(source):
        return Path(source)
    try:
        from upath import UPath  # an extra

        path = UPath(source)
        path.fs  # noqa: B018 - loads what fsspec needs for this scheme
        return cast(Path, path)
    except ImportError as error:
        reason = f"{source} is read by packages that are not installed ({error.name or error})"
        raise ConfigError(f"{reason}; run pip install 'urank[scale]' and what fsspec needs for it") from error
    except ValueError as error:
        raise ConfigError(f"{source} names a scheme that fsspec does not know: {error}") from error


def absolute(path: str | Path) -> Path:
    """Return the absolute path, for processes with another working directory; URLs stay as they are."""
    found = to_path(path)
    return found if is_remote(found) else found.absolute()


def matching(pattern: Path) -> list[Path]:
    """The files that match a pattern, in order."""
    if is_remote(pattern):
        from upath import UPath

        files, options = _filesystem(pattern), pattern.storage_options  # type: ignore[attr-defined]
        names = [name for name, facts in files.glob(_name(pattern), detail=True).items() if facts["type"] == "file"]
        return sorted(cast(Path, UPath(files.unstrip_protocol(name), **options)) for name in names)
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
    return sorted(path for path in found if path.is_file())


def open_parquet(path: Path, *, pre_buffer: bool = False) -> pq.ParquetFile:
    """A Parquet file, of which parts can be read. Pre-buffering holds all that will be read, and pays from afar."""
    if not is_remote(path):
        return pq.ParquetFile(path, pre_buffer=pre_buffer)
    return pq.ParquetFile(_name(path), filesystem=_filesystem(path), pre_buffer=True)


def parquet_writer(path: Path, schema: Any, **options: Any) -> pq.ParquetWriter:
    """Writes a Parquet file, here or elsewhere."""
    if not is_remote(path):
        return pq.ParquetWriter(path, schema, **options)
    return pq.ParquetWriter(_name(path), schema, filesystem=_filesystem(path), **options)


def upload(local: Path, target: Path) -> None:
    """Put a file of this machine elsewhere, whole or not at all."""
    _filesystem(target).put_file(str(local), _name(target))


def is_within(name: str, folder: str | Path) -> bool:
    """Whether a name, which may be a glob, lies in a folder elsewhere; of two names for one place, rather yes.

    >>> is_within("logs/june", "logs")
    False
    """
    if not (is_remote(name) and is_remote(folder)):
        return False
    one, other = to_path(name), to_path(folder)
    if type(_filesystem(one)) is not type(_filesystem(other)):
        return False
    return f"{_name(one).rstrip('/')}/".startswith(f"{_name(other).rstrip('/')}/")


def _filesystem(path: Any) -> Any:
    return path.fs


def _name(path: Any) -> str:
    return str(path.path)


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
