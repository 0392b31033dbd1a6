"""Paths of files here or elsewhere: a name with a scheme, as `s3://bucket/log`, is opened by fsspec.

What is elsewhere looks like a `pathlib.Path` (universal_pathlib sees to that), so the rest of urank need not know. Only
Parquet files are opened in two ways, since Arrow reads parts of a file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeGuard, cast

import pyarrow.parquet as pq

from urank.errors import ConfigError

__all__ = ["is_path", "is_remote", "is_within", "matching", "open_parquet", "parquet_writer", "to_path", "upload"]

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
