"""Export the feedback log to Parquet, one row for each item shown, joined with all feedback on it.

Rankings become *parts*, `log/HOME-NUMBER.parquet`, named by the first ranking of each. `export.sqlite` has the numbers
up to which the records of each home were taken, and the feedback that no part has yet. An export may be killed at any
time: a part gets its name when it is complete, feedback is deleted only after the parts with it are durable, and
joining it again changes nothing.
"""

from __future__ import annotations

import fcntl
import json
import re
import sqlite3
import sys
import time
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.progress import Report, silent
from urank.serve import postgres_sink
from urank.serve.feedback_records import (
    TABLES,
    FeedbackColumns,
    RankingRow,
    RecordReader,
    Row,
    home_of,
    number_of,
)
from urank.serve.postgres_sink import PostgresSource, is_postgres
from urank.serve.sqlite_sink import CATALOGUE, RECORDS, SqliteSource, connect
from urank.storage import durable_file, durable_folder, upload

LOCK = "export.lock"
SHADOW = "shadow"
COLUMNS = "columns.json"
PART_BYTES = 32 * 2**20
"""Size of the features of a part."""

KEYS = ["session_id", "item_id"]
"""Columns that identify an impression."""

_PLACES = ("position", "ranked_position", "shadow_position")
_SHADOW = ("query_id", *KEYS, *_PLACES, "click", "model", "shadow_model", "timestamp")
_FORMAT = "urank feedback log"
_LOG = re.compile(r"log(?:-([1-9]\d*))?")
_ARRIVALS = b"urank.value_arrivals"
_END = "g"  # after all digits of an id
_SCHEMA = """
CREATE TABLE IF NOT EXISTS homes (
    home TEXT PRIMARY KEY, rankings INTEGER NOT NULL DEFAULT 0, feedback INTEGER NOT NULL DEFAULT 0,
    shadows INTEGER NOT NULL DEFAULT 0, arrival INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS feedback (
    ranking_id TEXT, item_id TEXT, click INTEGER, conversion INTEGER, value REAL, arrival INTEGER,
    unmatched INTEGER DEFAULT 0
);
CREATE INDEX IF NOT EXISTS feedback_by_ranking ON feedback (unmatched, ranking_id);
CREATE TABLE IF NOT EXISTS shadows (ranking_id TEXT, model TEXT, items TEXT);
CREATE INDEX IF NOT EXISTS shadows_by_ranking ON shadows (ranking_id);
CREATE TABLE IF NOT EXISTS uploads (url TEXT, path TEXT, version TEXT, PRIMARY KEY (url, path));
CREATE TEMP TABLE remote (
    ranking_id TEXT, item_id TEXT, click INTEGER, conversion INTEGER, value REAL, arrival INTEGER,
    UNIQUE (ranking_id, item_id, arrival)
);
"""

_REPORTS: dict[str, Any] = dict.fromkeys(KEYS, pl.String) | {"reported_click": pl.Int8, "reported_conversion": pl.Int8}
_REPORTS |= {"reported_value": pl.Float32, "arrival": pl.Int64, "own": pl.Int8}

_ORDERS: dict[str, Any] = {"session_id": pl.String, "shadow_model": pl.String, "item_id": pl.List(pl.String)}

Ints = NDArray[np.int64]
Source = SqliteSource | PostgresSource


@dataclass(frozen=True)
class ExportStats:
    """Counts of an export."""

    rankings: int = 0  # this and the next three: contents of the new parts
    impressions: int = 0
    clicks: int = 0
    conversions: int = 0
    amended: int = 0  # impressions of earlier parts that feedback changed
    unmatched: int = 0  # reports without a ranking or item in this log, which are kept
    waiting: int = 0  # reports on rankings that are not exported yet
    valueless: int = 0  # values dropped because their rankings were logged without values
    parts: int = 0  # files written
    uploaded: int = 0  # files uploaded


def export_feedback(
    log: str | Path,
    *,
    output: str | Path | None = None,
    also: Sequence[str | Path] = (),
    window_seconds: float = 0.0,
    upload_to: str | None = None,
    now: float | None = None,
    report: Report = silent,
) -> ExportStats | None:
    """Export a feedback log to Parquet, one row for each impression; later feedback is joined to the existing files.

    The rows do not depend on when this is called and how often it is interrupted. It may run while servers write.

    Args:
        log: The folder of a server, or the URL of a PostgreSQL database.
        output: Folder for the Parquet files of a database; those of a server are written to its folder.
        also: Folders of other servers, which are only read: their feedback on rankings of this log is joined, and so
            is this log's unmatched feedback whose rankings have appeared.
        window_seconds: How long a ranking waits for clicks; 0 exports all rankings.
        upload_to: URL of a folder to which new and changed files are copied.
        now: Seconds since 1970; the current time by default.
        report: Progress callback.

    Returns:
        The counts; None if another export to this folder is running. If a file cannot be read, raise a `DataError`
        after exporting all others.
    """
    database = isinstance(log, str) and is_postgres(log)
    if database == (output is None):
        raise ConfigError("an export from PostgreSQL needs a folder for its files, and one of a folder writes there")
    root = Path(log if output is None else output)
    for each in map(Path, also if database else [root, *also]):
        if not ((each / RECORDS).is_dir() or (each / CATALOGUE).is_file()):
            raise ConfigError(f"{each} is not a feedback log of `urank serve --log`: it has no folder {RECORDS}")
    if database and (root / RECORDS).is_dir():
        raise ConfigError(f"{root} is the feedback log of a server; an export from PostgreSQL needs its own folder")
    if not window_seconds >= 0:
        raise ConfigError(f"the window must be at least 0 seconds; got {window_seconds}")
    with ExitStack() as stack:
        source: Source = SqliteSource(root)
        if database:  # before the folder is made, so that a refusal leaves nothing behind
            source = PostgresSource(stack.enter_context(closing(postgres_sink.connect(str(log)))))
        durable_folder(root)
        if not stack.enter_context(_exclusive_lock(root / LOCK)):
            return None
        due = (time.time() if now is None else now) - window_seconds
        due_us = int(due * 1e6) if window_seconds else sys.maxsize
        try:
            catalogue = stack.enter_context(closing(connect(root / CATALOGUE, "rwc")))
            return _ExportRun(root, source, catalogue, report).run([Path(each) for each in also], due_us, upload_to)
        except (OSError, sqlite3.Error) as error:
            raise DataError(f"the export to {root} was not completed: {error}; run it again") from error


@contextmanager
def _exclusive_lock(path: Path) -> Iterator[bool]:
    """Try to lock a file without waiting; yields whether that succeeded."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


class _ExportRun:
    """One export, which counts the fields of `ExportStats`."""

    def __init__(self, root: Path, source: Source, catalogue: sqlite3.Connection, report: Report) -> None:
        self._root, self._source, self._sql, self._report = root, source, catalogue, report
        self._counts: Counter[str] = Counter()
        self._failures: list[DataError] = []
        catalogue.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; {_SCHEMA}")
        self._folders = LogFolders(root)
        self._parts = self._folders.parts()

    def run(self, also: Sequence[Path], due_us: int, upload_to: str | None) -> ExportStats:
        """Take new records, write parts, join late feedback, and remove files that are not needed any more."""
        self._each_home(self._take_feedback)
        if also:
            self._sql.execute("UPDATE feedback SET unmatched = 0")
            self._read_remote(also)
        # Homes are listed again: what has feedback has been committed before that.
        self._each_home(lambda home, reader: self._make_parts(home, reader, due_us))
        self._amend_parts()
        self._each_home(self._maybe_remove)
        counted = "SELECT count(*) FROM feedback WHERE unmatched = ?"
        waiting, unmatched = (self._sql.execute(counted, [each]).fetchone()[0] for each in (0, 1))
        uploaded = 0 if upload_to is None else _upload(self._root, upload_to, self._sql)
        if self._failures:
            raise self._failures[0]
        return ExportStats(**self._counts, waiting=waiting, unmatched=unmatched, uploaded=uploaded)

    def _each_home(self, process: Any) -> None:
        for home in self._source.homes():
            try:
                with self._source.open(home) as reader:
                    process(home, reader)
            except DataError as error:
                self._failures.append(error)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._sql.execute("ROLLBACK")
            raise
        self._sql.execute("COMMIT")

    def _taken(self, home: str) -> tuple[int, int, int]:
        """Return the numbers up to which rankings, feedback and shadow orders of a home were taken."""
        query = "SELECT rankings, feedback, shadows FROM homes WHERE home = ?"
        return self._sql.execute(query, [home]).fetchone() or (0, 0, 0)

    def _set_taken(self, home: str, **numbers: int) -> None:
        self._sql.execute("INSERT OR IGNORE INTO homes (home) VALUES (?)", [home])
        for table, number in numbers.items():
            self._sql.execute(f"UPDATE homes SET {table} = ? WHERE home = ?", [number, home])  # noqa: S608

    def _take_feedback(self, home: str, reader: RecordReader) -> None:
        """Copy new feedback and shadow orders to the catalogue."""
        _, feedback, shadows = self._taken(home)
        ends = reader.last("feedback"), reader.last("shadows")
        if ends == (feedback, shadows):
            return
        with self._transaction():
            values = (row[1:] for row in reader.rows("feedback", feedback, ends[0]))
            self._sql.executemany("INSERT INTO feedback VALUES (?, ?, ?, ?, ?, ?, 0)", values)
            orders = (row[1:] for row in reader.rows("shadows", shadows, ends[1]))
            self._sql.executemany("INSERT INTO shadows VALUES (?, ?, ?)", orders)
            arrival = self._sql.execute("SELECT max(arrival) FROM feedback").fetchone()[0] or 0
            self._set_taken(home, feedback=ends[0], shadows=ends[1], arrival=arrival)

    def _read_remote(self, also: Sequence[Path]) -> None:
        """Read the feedback of other logs on rankings of this one."""
        known = {*map(home_of, self._parts), *self._source.homes()}

        def add(rows: Iterable[Row]) -> None:
            own = (row for row in rows if home_of(row[0]) in known)
            self._sql.executemany("INSERT OR IGNORE INTO remote VALUES (?, ?, ?, ?, ?, ?)", own)

        for folder in {each.resolve() for each in also} - {self._root.resolve()}:
            # Files first, so that feedback which moves to the catalogue meanwhile is read at least once.
            source = SqliteSource(folder, "ro")
            for home in source.homes():
                try:
                    with source.open(home) as reader:
                        add(row[1:] for row in reader.rows("feedback", 0, sys.maxsize))
                except DataError as error:
                    if home in source.homes():  # not just removed
                        self._failures.append(error)
            if (folder / CATALOGUE).is_file():
                with closing(connect(folder / CATALOGUE, "ro")) as other:
                    add(other.execute("SELECT ranking_id, item_id, click, conversion, value, arrival FROM feedback"))

    def _make_parts(self, home: str, reader: RecordReader, due_us: int) -> None:
        """Write the rankings of a home that are due, each with all feedback on it so far."""
        after, _, _ = self._taken(home)
        last = reader.last("rankings", f"number > {after} AND time_us <= {due_us}")
        if not last:
            return
        columns = reader.columns()
        for rows in _portions(map(RankingRow._make, reader.rows("rankings", after, last))):
            part, end = f"{home}-{rows[0].number:06x}", f"{home}-{rows[-1].number + 1:06x}"
            if any(part < each < f"{home}-{_END}" for each in self._parts):  # an interrupted export leaves one at most
                raise DataError(
                    f"{self._root / CATALOGUE} is older than the log beside it; restore it, or move both away"
                )
            logs: dict[Path, Impressions] = {}
            for digest in dict.fromkeys(row.columns for row in rows):
                if digest not in columns:
                    raise DataError(f"the columns {digest} of {len(rows)} rankings of home {home} are missing")
                frame = log_frame([row for row in rows if row.columns == digest], columns[digest])
                logs[self._folders.folder(columns[digest])] = Impressions(frame, np.zeros(len(frame), np.int64))
            self._join(part, end, logs, taken=rows[-1].number)
            for folder in self._folders.paths:  # of an interrupted export with more rankings in this part
                if folder not in logs:
                    (folder / f"{part}.parquet").unlink(missing_ok=True)
            self._parts.insert(bisect_right(self._parts, part), part)
            self._counts["rankings"] += len(rows)
            self._report("exporting", self._counts["rankings"], None)

    def _amend_parts(self) -> None:
        """Join feedback on rankings that were exported before, and mark that without a ranking."""
        homes = set(self._source.homes())
        first = """SELECT min(id) FROM (
            SELECT min(ranking_id) AS id FROM feedback WHERE unmatched = 0 AND ranking_id >= ?1
            UNION ALL SELECT min(ranking_id) FROM shadows WHERE ranking_id >= ?1
            UNION ALL SELECT min(ranking_id) FROM remote WHERE ranking_id >= ?1)"""
        end = ""
        while (found := self._sql.execute(first, [end]).fetchone()[0]) is not None:
            home = home_of(found)
            place = bisect_right(self._parts, found)
            part = self._parts[place - 1] if place and home_of(self._parts[place - 1]) == home else None
            following = self._parts[place] if place < len(self._parts) else ""
            end = following if home_of(following) == home else f"{home}-{_END}"
            if home in homes and number_of(found) > (taken := self._taken(home)[0]):
                end = f"{home}-{_END}"  # waits for the rankings to be due
                continue
            if home in homes:
                end = min(end, f"{home}-{taken + 1:06x}")
            paths = [] if part is None else self._folders.of(part)
            try:
                self._join(part or found, end, {path.parent: Impressions.read(path) for path in paths})
            except DataError as error:
                self._failures.append(error)

    def _join(self, part: str, end: str, logs: dict[Path, Impressions], taken: int | None = None) -> None:
        """Join feedback on the rankings from a part to an end, write the part, and then change the catalogue.

        Args:
            part: Name of the part; the first ranking if there is none.
            end: The first ranking after it.
            logs: Its impressions by folder.
            taken: The last ranking of a new part; None if it exists already.
        """
        within, new = "WHERE ranking_id >= ?1 AND ranking_id < ?2", taken is not None
        # With a single max(), SQLite takes the value from the row of the latest arrival.
        reports = self._sql.execute(f"""SELECT ranking_id, item_id, sum(click) > 0, sum(conversion) > 0, value,
            max(iif(value IS NULL, NULL, arrival)), sum(own) > 0 FROM (
                SELECT ranking_id, item_id, click, conversion, value, arrival, 1 AS own FROM feedback
                {within} AND unmatched = 0 UNION ALL SELECT *, 0 FROM remote {within})
            GROUP BY ranking_id, item_id""", [part, end]).fetchall()  # noqa: S608  # fmt: skip
        table = pl.DataFrame(reports, schema=_REPORTS, orient="row")
        changes = {folder: log.join(table) for folder, log in logs.items()}
        frames = [log.frame for log in logs.values()]
        if frames:  # before the log, since feedback that this has is not new any more
            orders = self._sql.execute(f"SELECT ranking_id, model, items FROM shadows {within}", [part, end]).fetchall()  # noqa: S608
            self._write_shadow(self._root / SHADOW / f"{part}.parquet", frames, orders, new, any(changes.values()))
        for folder, log in logs.items():
            if new or changes[folder]:
                self._write(folder / f"{part}.parquet", log.frame, log.value_arrivals)
            self._counts["valueless"] += log.valueless
            self._counts["amended"] += 0 if new else changes[folder]
            if new:
                self._counts["impressions"] += len(log.frame)
                self._counts["clicks"] += int(log.frame["click"].sum())
                self._counts["conversions"] += int(log.frame["conversion"].sum())
        own = table.filter(pl.col("own") == 1)
        for frame in frames:
            own = own.join(frame.select(KEYS), on=KEYS, how="anti")
        with self._transaction():
            unmatched = "UPDATE feedback SET unmatched = 1 WHERE unmatched = 0 AND ranking_id = ? AND item_id = ?"
            self._sql.executemany(unmatched, own.select(KEYS).rows())
            self._sql.execute(f"DELETE FROM feedback {within} AND unmatched = 0", [part, end])  # noqa: S608
            self._sql.execute(f"DELETE FROM shadows {within}", [part, end])  # noqa: S608
            if taken is not None:
                self._set_taken(home_of(part), rankings=taken)

    def _write_shadow(
        self, path: Path, frames: Sequence[pl.DataFrame], orders: Sequence[Row], new: bool, clicked: bool
    ) -> None:
        """Write the orders of the shadow model beside what was shown, or update their clicks."""
        added = pl.DataFrame(
            [(ranking, model, json.loads(items)) for ranking, model, items in orders], _ORDERS, orient="row"
        )
        if not new and path.is_file():
            placed = read_part(path).drop_nulls("shadow_position").sort("session_id", "shadow_position")
            known = placed.group_by("session_id", maintain_order=True).agg(pl.first("shadow_model"), "item_id")
            added = pl.concat([known, added]) if len(added) or clicked else added
        if len(added):
            self._write(path, shadow_frame(frames, added))
        elif new:
            path.unlink(missing_ok=True)  # of an interrupted export

    def _write(self, path: Path, frame: pl.DataFrame, arrivals: Ints | None = None) -> None:
        write_part(path, frame, arrivals)
        self._counts["parts"] += 1

    def _maybe_remove(self, home: str, reader: RecordReader) -> None:
        """Remove a home that nobody writes to, and whose records were all taken."""

        def is_taken() -> bool:
            return tuple(map(reader.last, TABLES)) == self._taken(home)

        if is_taken() and reader.close_for_good() and is_taken():
            reader.remove()


def _portions(rows: Iterable[RankingRow]) -> Iterator[list[RankingRow]]:
    """Yield rankings of `PART_BYTES` at a time."""
    portion: list[RankingRow] = []
    size = 0
    for row in rows:
        portion.append(row)
        size += len(row.numeric) + len(row.items) + len(row.categorical or "")
        if size >= PART_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


class LogFolders:
    """The folders log, log-2, … of an export, each with the parts of one set of columns."""

    def __init__(self, root: Path) -> None:
        self._root = root
        found = {int(match[1] or 1): path for path in root.iterdir() if (match := _LOG.fullmatch(path.name))}
        ordered = [found[number] for number in sorted(found)]
        self._folders = {_read_columns(path): path for path in ordered if (path / COLUMNS).is_file()}

    @property
    def paths(self) -> list[Path]:
        """The folders, the first one first."""
        return list(self._folders.values())

    def parts(self) -> list[str]:
        """Return the names of all parts, sorted."""
        return sorted({path.stem for folder in self.paths for path in folder.glob("[!.]*.parquet")})

    def of(self, part: str) -> list[Path]:
        """Return the files of a part."""
        paths = [folder / f"{part}.parquet" for folder in self.paths]
        return [path for path in paths if path.is_file()]

    def folder(self, columns: FeedbackColumns) -> Path:
        """Return the folder for these columns, which is created if needed."""
        if columns not in self._folders:
            names = chain(["log"], (f"log-{number}" for number in count(2)))
            folder = next(self._root / name for name in names if not any((self._root / name).glob("[!.]*")))
            with durable_file(folder / COLUMNS) as working:
                working.write_text(json.dumps({"format": _FORMAT, **columns.to_dict()}, indent=2) + "\n", "utf-8")
            self._folders[columns] = folder
        return self._folders[columns]


def _read_columns(folder: Path) -> FeedbackColumns:
    path = folder / COLUMNS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == _FORMAT:
            return FeedbackColumns.from_dict(content)
    except (ValueError, LookupError, TypeError, DataError):
        pass
    raise DataError(f"{path} must contain the columns of its folder, as urank wrote them; it does not")


def log_frame(rows: Sequence[RankingRow], columns: FeedbackColumns) -> pl.DataFrame:
    """Return one row for each item shown, without clicks; all rankings must have these columns."""
    items: list[list[str]] = json.loads(f"[{','.join(row.items for row in rows)}]")
    counts = np.array([len(each) for each in items])
    of = np.repeat(np.arange(len(rows)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)

    def each(values: Iterable[str | None]) -> pl.Series:
        return pl.Series(list(values), dtype=pl.String).gather(of)

    def arrays(blobs: Iterable[bytes | None], dtype: str) -> NDArray[Any]:
        return np.frombuffer(b"".join(blob for blob in blobs if blob is not None), dtype)

    found = {
        "query_id": each(row.query_id for row in rows),
        "session_id": each(row.ranking_id for row in rows),
        "item_id": pl.Series(list(chain.from_iterable(items)), dtype=pl.String),
        "position": pl.Series((np.arange(len(of)) - firsts + 1).astype(np.int32)),
        "click": pl.Series(np.zeros(len(of), dtype=np.int8)),
        "conversion": pl.Series(np.zeros(len(of), dtype=np.int8)),
    }
    if columns.value:
        found["value"] = pl.Series(arrays((row.value for row in rows), "<f4"))
    found["policy"] = each(row.policy for row in rows)
    if columns.explored:
        found["propensity"] = pl.Series(arrays((row.propensity for row in rows), "<f8"))
        found["ranked_position"] = pl.Series(arrays((row.ranked_position for row in rows), "<i4"))
    found["user_id"] = each(row.user_id for row in rows)
    found["arm"] = each(row.arm for row in rows)
    times = np.array([row.time_us for row in rows], dtype=np.int64)
    found["timestamp"] = pl.Series(times[of]).cast(pl.Datetime("us", "UTC"))
    numbers = arrays((row.numeric for row in rows), "<f4").reshape(len(of), len(columns.numeric))
    for name, column in zip(columns.numeric, np.ascontiguousarray(numbers.T), strict=True):
        found[name] = pl.Series(column).fill_nan(None)
    if columns.categorical:
        texts = json.loads(f"[{','.join(row.categorical or '[]' for row in rows)}]")
        for name, values in zip(columns.categorical, zip(*chain.from_iterable(texts), strict=True), strict=True):
            found[name] = pl.Series(values, dtype=pl.String)
    return pl.DataFrame(found)


@dataclass
class Impressions:
    """Impressions, to which feedback is joined."""

    frame: pl.DataFrame
    value_arrivals: Ints  # `[rows]`, the arrival of the report that set the value; 0 for the value of the ranking
    valueless: int = 0  # values that were dropped, since the log has none

    @classmethod
    def read(cls, path: Path) -> Impressions:
        """Read a part."""
        frame = read_part(path)
        packed = (pq.read_schema(path).metadata or {}).get(_ARRIVALS)
        if packed is None:
            return cls(frame, np.zeros(len(frame), np.int64))
        return cls(frame, np.frombuffer(zlib.decompress(bytes.fromhex(packed.decode())), "<i8").copy())

    def join(self, reports: pl.DataFrame) -> int:
        """Join reports, each on another impression; return the number of impressions that changed.

        A reported click or conversion stays. Of several values, the one that arrived last counts.
        """
        keys = self.frame.select(KEYS)
        found = keys.join(reports, on=KEYS, how="left", maintain_order="left")
        columns = {}
        for name in ("click", "conversion"):
            columns[name] = pl.Series(np.maximum(self.frame[name], found[f"reported_{name}"].fill_null(0)))
        changed = np.any([(self.frame[name] != column).to_numpy() for name, column in columns.items()], axis=0)
        arrival = found["arrival"].fill_null(0).to_numpy()
        if "value" in self.frame.columns:
            later = arrival > self.value_arrivals
            reported = found["reported_value"].fill_null(0).to_numpy()
            columns["value"] = pl.Series(np.where(later, reported, self.frame["value"].to_numpy()))
            self.value_arrivals = np.maximum(arrival, self.value_arrivals)
            changed |= later
        else:
            self.valueless += int((arrival > 0).sum())
        self.frame = self.frame.with_columns(column.alias(name) for name, column in columns.items())
        return int(changed.sum())


def shadow_frame(logs: Sequence[pl.DataFrame], orders: pl.DataFrame) -> pl.DataFrame:
    """Compare what was shown with orders of the shadow model: a row for each item that either placed.

    Args:
        logs: The impressions.
        orders: The columns `_ORDERS`; of two orders for one ranking the first counts.
    """
    orders = orders.unique("session_id", keep="first", maintain_order=True)
    model = pl.col("policy").str.replace(r"\+(swap|shuffle)$", "").alias("model")
    heads = ("query_id", "timestamp", "model", "shadow_model")
    shown = pl.concat(
        log.with_columns(
            model, ranked_position=pl.col("ranked_position" if "ranked_position" in log.columns else "position")
        ).select(*KEYS, "click", *_PLACES[:2], *heads[:3])
        for log in logs
    ).join(orders.drop("item_id"), on="session_id")  # fmt: skip
    places = pl.int_ranges(1, pl.col("item_id").list.len() + 1, dtype=pl.Int32).alias("shadow_position")
    placed = orders.with_columns(places).explode("item_id", "shadow_position").drop("shadow_model")
    both = shown.drop(heads).join(placed, on=KEYS, how="full", coalesce=True)
    found = both.join(shown.select("session_id", *heads).unique("session_id"), on="session_id")
    return found.sort("session_id", "position", "shadow_position", nulls_last=True).select(_SHADOW)


def shadow_agreement(root: Path) -> tuple[int, int]:
    """Return the number of rankings of the shadow model, and of those with the same first item before exploration."""
    paths = sorted((root / SHADOW).glob("[!.]*.parquet"))
    if not paths:
        return 0, 0
    first = pl.scan_parquet(paths, glob=False, hive_partitioning=False).filter(pl.col("ranked_position") == 1)
    counts = first.select(pl.len(), (pl.col("shadow_position") == 1).sum()).collect(engine="streaming").row(0)
    return int(counts[0]), int(counts[1])


def write_part(path: Path, frame: pl.DataFrame, value_arrivals: Ints | None = None) -> None:
    """Write or replace a part."""
    fields = {}
    if value_arrivals is not None and value_arrivals.any():
        fields[_ARRIVALS] = zlib.compress(value_arrivals.astype("<i8").tobytes(), 1).hex()
    texts = [name for name, dtype in frame.schema.items() if dtype == pl.String]  # numbers rarely repeat
    table = frame.to_arrow().replace_schema_metadata(fields)
    with durable_file(path) as working:
        pq.write_table(table, working, compression="zstd", use_dictionary=texts)


def read_part(path: Path) -> pl.DataFrame:
    """Read the rows of a part."""
    try:
        with pq.ParquetFile(path) as file:
            return pl.DataFrame(pl.from_arrow(file.read()))
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not a readable Parquet file; move it away, and feedback on its rankings will be unmatched"
        ) from error


def _upload(root: Path, url: str, catalogue: sqlite3.Connection) -> int:
    """Copy files that are new or have changed since the last upload to a URL; return their number."""
    count = 0
    paths = chain(root.glob(f"log*/{COLUMNS}"), root.glob("log*/[!.]*.parquet"), root.glob(f"{SHADOW}/[!.]*.parquet"))
    for path in sorted(paths):
        name, status = path.relative_to(root).as_posix(), path.stat()
        version = f"{status.st_mtime_ns} {status.st_size}"
        query = "SELECT version FROM uploads WHERE url = ? AND path = ?"
        if catalogue.execute(query, [url, name]).fetchone() == (version,):
            continue
        try:
            upload(path, f"{url.rstrip('/')}/{name}")
        except OSError as error:
            raise DataError(f"{path} cannot be uploaded to {url}: {error}") from error
        catalogue.execute("INSERT OR REPLACE INTO uploads VALUES (?, ?, ?)", [url, name, version])
        count += 1
    return count
