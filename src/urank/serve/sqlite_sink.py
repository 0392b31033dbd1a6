"""The feedback log in SQLite files: one for each worker and day, `records/HOME.sqlite` in the folder of the log.

A file has one writer, and is never written to again once that is gone. It can be read meanwhile (WAL mode). A commit is
on the disk when it returns (`synchronous=FULL`). The folder must be on a local disk, as WAL mode requires.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from json import dumps
from pathlib import Path

from urank.errors import DataError
from urank.serve.feedback_records import HOME, TABLES, RecordReader
from urank.serve.feedback_sink import Batch, FeedbackSink
from urank.storage import durable_folder, sync_folder

RECORDS = "records"
"""Folder of the files."""
CATALOGUE = "export.sqlite"
"""What `feedback_export` has taken from them."""

_SCHEMA = """
CREATE TABLE columns (digest TEXT PRIMARY KEY, definition TEXT NOT NULL);
CREATE TABLE rankings (
    number INTEGER PRIMARY KEY, ranking_id TEXT NOT NULL, time_us INTEGER NOT NULL, columns TEXT NOT NULL,
    query_id TEXT NOT NULL, user_id TEXT, arm TEXT, policy TEXT NOT NULL, model TEXT NOT NULL, items TEXT NOT NULL,
    categorical TEXT, ranked_position BLOB, value BLOB, propensity BLOB, numeric BLOB NOT NULL
);
CREATE TABLE feedback (
    number INTEGER PRIMARY KEY, ranking_id TEXT NOT NULL, item_id TEXT NOT NULL, click INTEGER NOT NULL,
    conversion INTEGER NOT NULL, value REAL, arrival INTEGER NOT NULL
);
CREATE TABLE shadows (number INTEGER PRIMARY KEY, ranking_id TEXT NOT NULL, model TEXT NOT NULL, items TEXT NOT NULL);
"""
# Too large for the cache, so it leaves a WAL of 4 MB: syncing what overwrites it is cheaper than what makes it grow.
_GROW_WAL = "INSERT INTO columns VALUES ('', zeroblob(6000000))"
_ABANDONED_SECONDS = 3_600.0


def connect(path: Path, mode: str, timeout: float = 5.0) -> sqlite3.Connection:
    """Open a database without implicit transactions; `mode` is ro, rw, or rwc to create it."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None, cached_statements=32)


_INSERT = {table: f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})" for table, names in TABLES.items()}  # noqa: S608


class SqliteSink(FeedbackSink):
    """Appends to files in a folder, which is created if missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / RECORDS
        self._database: sqlite3.Connection | None = None
        self._identity: list[tuple[Path, int]] = []
        super().__init__(str(folder), last_arrival(folder))

    def _open(self, home: str) -> None:
        durable_folder(self._folder)
        path = self._folder / f"{home}.sqlite"
        try:
            self._database = connect(path, "rwc")
            if self._database.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
                raise OSError("its file system does not support the WAL mode of SQLite, as network drives do not")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(f"BEGIN; {_SCHEMA} COMMIT")
            with suppress(sqlite3.OperationalError):  # without the space for it, commits are only slower
                self._database.executescript(f"BEGIN; {_GROW_WAL}; ROLLBACK")
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            sync_folder(self._folder)
            self._identity = [(each, each.stat().st_ino) for each in _files(path)]
        except BaseException:
            self._release()
            for each in _files(path):
                each.unlink(missing_ok=True)
            raise

    def _write(self, home: str, batches: Sequence[Batch]) -> None:
        assert self._database is not None  # noqa: S101 - `_open` was called
        self._database.execute("BEGIN IMMEDIATE")
        for batch in batches:
            if batch.columns is not None:
                definition = batch.columns.digest, dumps(batch.columns.to_dict())
                self._database.execute("INSERT OR IGNORE INTO columns VALUES (?, ?)", definition)
            for table, statement in _INSERT.items():
                if rows := getattr(batch, table):
                    self._database.executemany(statement, rows)
        self._database.execute("COMMIT")
        self._check()

    def _check(self) -> None:
        """Raise an error if a file was removed or replaced: what is written to it is lost when it is closed."""
        for path, inode in self._identity:
            if path.stat().st_ino != inode:
                raise OSError(f"{path} was replaced")

    def _release(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = None


def _files(path: Path) -> list[Path]:
    return [path, *(path.with_name(f"{path.name}{suffix}") for suffix in ("-wal", "-shm"))]


def check_folder(folder: Path) -> None:
    """Refuse a log that cannot be written, before anything is served."""
    try:
        durable_folder(folder / RECORDS)
        probe = folder / RECORDS / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DataError(f"the feedback log {folder} cannot be written: {error.strerror}") from error


def last_arrival(folder: Path) -> int:
    """Return the latest arrival time of feedback in a log; 0 if there is none."""
    found = 0
    if (folder / CATALOGUE).is_file():
        with closing(connect(folder / CATALOGUE, "ro")) as database, suppress(sqlite3.Error):
            found = database.execute("SELECT coalesce(max(arrival), 0) FROM homes").fetchone()[0]
    source = SqliteSource(folder)
    for home in source.homes():
        with suppress(DataError), source.open(home) as reader:
            last = reader.last("feedback")
            found = max([found, *(row[-1] for row in reader.rows("feedback", last - 1, last))])
    return found


class SqliteReader(RecordReader):
    """Reads a file."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        super().__init__(database.execute)
        self._path, self._database = path, database

    def close_for_good(self) -> bool:
        """Return whether nobody has the file open, and so will ever write to it: only then can it leave WAL mode."""
        self._database.execute("PRAGMA busy_timeout = 0")
        try:
            return bool(self._database.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",))
        except sqlite3.OperationalError:  # locked
            return False

    def remove(self) -> None:
        """Remove the file."""
        self._database.close()
        for each in _files(self._path):
            each.unlink(missing_ok=True)


class SqliteSource:
    """The files of a log; the mode `ro` leaves those of another server as they are."""

    def __init__(self, folder: Path, mode: str = "rw") -> None:
        self._folder, self._mode = folder / RECORDS, mode

    def homes(self) -> list[str]:
        """Return the homes, oldest first, without files whose creation is not complete."""
        paths = [path for path in self._folder.glob("*.sqlite") if HOME.fullmatch(path.stem)]
        return sorted(path.stem for path in paths if self._is_complete(path))

    @contextmanager
    def open(self, home: str) -> Iterator[SqliteReader]:
        """Open a home; raise a `DataError` if it is damaged."""
        path = self._folder / f"{home}.sqlite"
        try:
            with closing(connect(path, self._mode)) as database:
                yield SqliteReader(path, database)
        except sqlite3.Error as error:
            raise DataError(
                f"{path} cannot be read: {error}; recover it with the command .recover of sqlite3, or move it away"
            ) from error

    def _is_complete(self, path: Path) -> bool:
        try:
            with closing(connect(path, self._mode)) as database:
                if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'shadows'").fetchone():
                    return True
            if self._mode == "rw" and time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()
        except (sqlite3.OperationalError, FileNotFoundError):  # being created, or just removed
            return False
        except sqlite3.DatabaseError:  # damaged, which `open` reports
            return True
        return False
