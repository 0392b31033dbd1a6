"""The Parquet files of a feedback log: which folder rankings go to, and files that are whole or not there.

A folder holds one set of columns, since the files of a log must agree on them: `log` the first, `log-2` the next. Each
has a file `columns.json` that says which. A part is the file of one segment. Beside its rows it keeps notes, in the
metadata of the file: which segments its feedback came from, and when the values were told that feedback told.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from urank.errors import DataError
from urank.serve.records import Columns, columns_from
from urank.serve.segments import durable_folder, sync_folder

__all__ = ["Notes", "Parts", "durable_file", "read_notes", "read_part", "shadow_agreement", "write_part"]

COLUMNS = "columns.json"
SHADOW = "shadow"

_FORMAT = "urank feedback log"
_LOG = re.compile(r"log(?:-([1-9]\d*))?")
_SOURCES, _TIMES = b"urank.sources", b"urank.value_times"


@dataclass(frozen=True)
class Notes:
    """What a part keeps beside its rows.

    Attributes:
        sources: the segments whose feedback was joined, all of it.
        value_times: row -> when the value was told that feedback told, in microseconds.
    """

    sources: frozenset[str] = frozenset()
    value_times: Mapping[int, int] = field(default_factory=dict)


class Parts:
    """The folders and parts of a feedback log."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, tuple[Path, Columns]] = {}
        for folder in _log_folders(root):
            if (folder / COLUMNS).is_file():
                columns = _read_columns(folder / COLUMNS)
                self._folders[columns.digest] = folder, columns

    @property
    def folders(self) -> list[Path]:
        """Those that hold rankings, the first first."""
        return [folder for folder, _ in self._folders.values()]

    def columns(self, digest: str) -> Columns | None:
        """The columns of this digest, if a folder has them."""
        return self._folders[digest][1] if digest in self._folders else None

    def of(self, segment: str) -> list[Path]:
        """The parts that a segment has."""
        paths = [folder / f"{segment}.parquet" for folder in self.folders]
        return [path for path in paths if path.is_file()]

    def path(self, segment: str, columns: Columns) -> Path:
        """Where the rankings of a segment go that have these columns; the folder is made when it is the first time."""
        if columns.digest not in self._folders:
            folder = self._free_folder()
            durable_folder(folder)
            with durable_file(folder / COLUMNS) as working:
                working.write_text(json.dumps({"format": _FORMAT, **columns.to_dict()}, indent=2) + "\n", "utf-8")
            self._folders[columns.digest] = folder, columns
        return self._folders[columns.digest][0] / f"{segment}.parquet"

    def shadow(self, segment: str) -> Path:
        """Where the orders of a silent model go."""
        return self._root / SHADOW / f"{segment}.parquet"

    def _free_folder(self) -> Path:
        """The first of log, log-2, … that does not exist or is empty but for what a kill left behind."""
        number = 1
        while True:
            folder = self._root / ("log" if number == 1 else f"log-{number}")
            if not folder.exists() or (folder.is_dir() and not any(folder.glob("[!.]*"))):
                return folder
            number += 1


def _log_folders(root: Path) -> list[Path]:
    found = {int(match[1] or 1): path for path in root.iterdir() if (match := _LOG.fullmatch(path.name))}
    return [found[number] for number in sorted(found) if found[number].is_dir()]


def _read_columns(path: Path) -> Columns:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == _FORMAT:
            return columns_from(content)
    except (ValueError, LookupError, TypeError, DataError):
        pass
    raise DataError(f"{path} must tell the columns of its folder, as urank wrote it; it does not")


@contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its name when the block ends well and the content is on the disk.

    The temporary name is always the same, so what a kill left behind is used again. Logs are read without such names.
    """
    working = path.with_name(f".{path.name}")
    try:
        yield working
        handle = os.open(working, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        working.replace(path)
    finally:
        working.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_part(path: Path, frame: pl.DataFrame, notes: Notes) -> None:
    """Write a part, or replace it."""
    metadata = {_SOURCES: " ".join(sorted(notes.sources)).encode()}
    if notes.value_times:
        pairs = np.array(sorted(notes.value_times.items()), dtype="<i8")
        metadata[_TIMES] = base64.b64encode(pairs.tobytes())
    texts = [name for name, dtype in frame.schema.items() if dtype == pl.String]  # of numbers, few are alike
    table = frame.to_arrow().replace_schema_metadata(metadata)
    durable_folder(path.parent)
    with durable_file(path) as working:
        pq.write_table(table, working, compression="zstd", use_dictionary=texts)


def read_notes(path: Path) -> Notes:
    """The notes of a part."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        pairs = np.frombuffer(base64.b64decode(metadata.get(_TIMES, b"")), dtype="<i8").reshape(-1, 2)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path) from error
    sources = metadata.get(_SOURCES, b"").decode("ascii", "replace").split()
    return Notes(frozenset(sources), dict(pairs.tolist()))


def read_part(path: Path, columns: list[str] | None = None) -> pl.DataFrame:
    """The rows of a part, with all columns or these."""
    try:
        with pq.ParquetFile(path) as file:
            return pl.DataFrame(pl.from_arrow(file.read(columns)))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path) from error


def _unreadable(path: Path) -> DataError:
    return DataError(f"{path} is not a readable Parquet file; move it away, and feedback on its rankings is left out")


def shadow_agreement(root: Path) -> tuple[int, int]:
    """Rankings that a silent model ranked too, and in how many of them it had the same item first."""
    paths = sorted((root / SHADOW).glob("[!.]*.parquet"))
    if not paths:
        return 0, 0
    first = pl.scan_parquet(paths, glob=False, hive_partitioning=False).filter(pl.col("position") == 1)
    counts = first.select(pl.len(), (pl.col("shadow_position") == 1).sum()).collect(engine="streaming").row(0)
    return int(counts[0]), int(counts[1])
