"""Atomic file and folder writes, and paths that may be URLs.

A name with a scheme (`s3://bucket/log`) is opened through fsspec, an optional dependency; every other name is a local
path. Local results are written beside their target and renamed when complete.
"""

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

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

# How urank recognises its own folders: by the format or the keys of their marker file.
_FORMATS = {"schema.json": "urank prepared log", "manifest.json": "urank model", "ranked.json": "urank ranked"}
_KEYS = {
    "simulation.toml": {"candidates", "loggers", "positions", "sessions", "user"},
    "appstore.toml": {"apps", "attention", "random_days", "users"},
    "abtest.toml": {"after", "before", "during", "market"},
}


def is_remote(source: object) -> bool:
    """Return whether a name or path is a URL.

    >>> is_remote("s3://bucket/log"), is_remote("logs/june"), is_remote(Path("logs"))
    (True, False, False)
    """
    return bool(_SCHEME.match(source)) if isinstance(source, str) else not isinstance(source, Path)


def is_path(source: object) -> TypeGuard[str | Path]:
    """Return whether the source is a name or a path, local or remote, rather than a table."""
    return isinstance(source, (str, Path)) or hasattr(source, "storage_options")


def to_path(source: str | Path) -> Path:
    """Convert a name or URL to a path.

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
        path.fs  # noqa: B018 - imports the fsspec backend of this scheme
        return cast("Path", path)
    except ImportError as error:
        raise ConfigError(
            f"{source} needs packages that are not installed ({error.name or error}); "
            "run pip install 'urank[remote]' and install the fsspec backend of its scheme"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{source} has a scheme that fsspec does not know: {error}") from error


def absolute(path: str | Path) -> Path:
    """Return the absolute path, for processes with another working directory; URLs stay as they are."""
    found = to_path(path)
    return found if is_remote(found) else found.absolute()


def glob_files(pattern: Path) -> list[Path]:
    """Return the files that match a pattern, sorted."""
    if is_remote(pattern):
        from upath import UPath

        files, options = _filesystem(pattern), pattern.storage_options  # type: ignore[attr-defined]
        names = [name for name, info in files.glob(_name(pattern), detail=True).items() if info["type"] == "file"]
        return sorted(cast("Path", UPath(files.unstrip_protocol(name), **options)) for name in names)
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
    return sorted(path for path in found if path.is_file())


def is_within(name: str, folder: str | Path) -> bool:
    """Return whether a URL, possibly a glob, lies in a remote folder; in doubt, return True.

    >>> is_within("logs/june", "logs")
    False
    """
    if not (is_remote(name) and is_remote(folder)):
        return False
    inner, outer = to_path(name), to_path(folder)
    if type(_filesystem(inner)) is not type(_filesystem(outer)):
        return False
    return f"{_name(inner).rstrip('/')}/".startswith(f"{_name(outer).rstrip('/')}/")


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file; of a remote one, everything that is read is kept in memory (pre-buffering)."""
    if not is_remote(path):
        return pq.ParquetFile(path)
    return pq.ParquetFile(_name(path), filesystem=_filesystem(path), pre_buffer=True)


def parquet_writer(path: Path, schema: Any, **options: Any) -> pq.ParquetWriter:
    """Open a Parquet file for writing."""
    if not is_remote(path):
        return pq.ParquetWriter(path, schema, **options)
    return pq.ParquetWriter(_name(path), schema, filesystem=_filesystem(path), **options)


def _filesystem(path: Any) -> Any:
    return path.fs


def _name(path: Any) -> str:
    return str(path.path)


def check_target(folder: str | Path, *, marker: str, overwrite: bool) -> None:
    """Raise the `ConfigError` that `new_folder` would, so that a command can fail before long work."""
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
        killed = "; if it is the remainder of a killed run, remove it" if is_remote(target) else ""
        raise ConfigError(f"{folder} holds something else (it has no {marker}), so it is not replaced{killed}")
    if not _is_ours(target / marker):
        raise ConfigError(f"{folder} holds something else (its {marker} is not urank's), so it is not replaced")


def _is_ours(marker: Path) -> bool:
    """Return whether a marker has the content that urank writes into a file of its name."""
    try:
        if marker.name in _FORMATS:
            content = json.loads(marker.read_text(encoding="utf-8"))
            return isinstance(content, dict) and content.get("format") == _FORMATS[marker.name]
        if marker.name in _KEYS:
            return _KEYS[marker.name] <= set(tomllib.loads(marker.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def new_folder(folder: str | Path, *, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """Write a folder atomically: yield a temporary folder, renamed on success and removed on failure.

    Remote folders cannot be renamed and are written in place; the marker must be written last.

    Args:
        folder: Target; missing parents are created.
        marker: A file that every folder of this kind contains. Only folders with a valid marker are ever replaced.
        overwrite: Replace an existing folder of this kind.
    """
    check_target(folder, marker=marker, overwrite=overwrite)
    if is_remote(folder):
        remote = to_path(folder)
        remove_folder(remote)
        try:
            yield remote
        except BaseException:
            remove_folder(remote)
            raise
        return
    target = Path(folder).absolute()
    target = target.resolve() if target.is_symlink() else target
    with _beside(target, folder, folder=True) as working:
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


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, renamed (or uploaded) on success and removed on failure."""
    target = to_path(path)
    if target.is_dir():
        raise ConfigError(f"{path} is a folder; a file name is needed")
    if is_remote(target):
        with tempfile.TemporaryDirectory(prefix="urank-") as name:
            local = Path(name) / "file"
            yield local
            upload(local, target)
        return
    with _beside(target.absolute(), path, folder=False) as working:
        try:
            yield working
            working.chmod(0o644)
            working.replace(target)
        finally:
            working.unlink(missing_ok=True)


def upload(path: Path, target: str | Path) -> None:
    """Copy a local file to a URL."""
    remote = to_path(target)
    remote.parent.mkdir(parents=True, exist_ok=True)
    _filesystem(remote).put_file(str(path), _name(remote))


def sync_folder(folder: Path) -> None:
    """Make creations, renames and removals in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def durable_folder(folder: Path) -> None:
    """Create a folder and its parents so that they survive a power failure."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


@contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that durably replaces `path` when the block succeeds; missing folders are created.

    Its name is always the same, so that the file of an interrupted write is overwritten. Readers of logs skip it.
    """
    durable_folder(path.parent)
    working = path.with_name(f".{path.name}")
    try:
        yield working
        with working.open("rb") as file:
            os.fsync(file.fileno())
        working.replace(path)
    finally:
        working.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove a local or remote folder with its content. Missing folders are ignored."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.unlink()
        elif path.is_dir():  # object stores have no folders: these vanish with their last file
            path.rmdir()


@contextmanager
def _beside(target: Path, name: str | Path, *, folder: bool) -> Iterator[Path]:
    """Create a temporary file or folder beside a target, with its missing parents; remove those that stay empty."""
    missing = [parent for parent in target.parents if not parent.exists()]  # the deepest first
    prefix, parent = f".{target.name}.", target.parent
    try:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            if folder:
                working = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            else:
                handle, temporary = tempfile.mkstemp(prefix=prefix, dir=parent)
                os.close(handle)
                working = Path(temporary)
        except OSError as error:
            raise ConfigError(f"{name} cannot be written: {error.strerror}") from error
        yield working
    finally:
        for each in missing:
            if each.is_dir() and not any(each.iterdir()):
                each.rmdir()
