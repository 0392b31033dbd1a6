"""From impressions to queries: one row per list, list columns ordered by position, split into train, valid and test.

Since a query is a row, no row group, shard, batch or fold can ever split one. The log may be larger than memory and
in any order: rows are first scattered by the hash of their query into buckets on disk, then each bucket is sorted on
its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.log.columns import QUERY, ROW, SESSION, LogSchema
from urank.log.ragged import offsets_of_runs
from urank.log.reader import Log
from urank.log.splits import SPLITS, check_shares, split_by_hash, split_by_time, stable_hash
from urank.progress import Report, prefetch, silent
from urank.storage import is_remote, is_within, new_folder, parquet_writer, to_path

__all__ = [
    "BUCKET_BYTES",
    "FILE_BYTES",
    "ROW_GROUP_BYTES",
    "Assign",
    "Buckets",
    "SplitWriter",
    "Summary",
    "assignment",
    "describe",
    "positions_of",
    "prepare",
    "refuse_clicks_beyond",
    "validate_arguments",
    "with_keys",
    "write_bucket",
]

MAX_CATEGORIES = 100_000
"""A feature with more says so (`more_categories`) instead of how many; the rarest are not kept."""


_MOMENTS = pl.Schema(
    {
        "name": pl.String,
        "missing": pl.Int64,
        "known": pl.Int64,
        "sum": pl.Float64,
        "squares": pl.Float64,
        "min": pl.Float64,
        "max": pl.Float64,
    }
)
_COUNTS = pl.Schema({"category": pl.String, "count": pl.Int64})


class Summary:
    """Counts and statistics, gathered a bucket at a time. The statistics of features are those of train alone.

    Attributes:
        last: items below this position were not shown; None when all were.
        positions: K, the last position at which anything was shown; 0 as long as nothing was.
    """

    def __init__(self, schema: LogSchema, last: int | None = None) -> None:
        self.schema = schema
        self.last = last
        self.positions = 0
        counted = ("queries", "lists", "rows", *(() if last is None else ("shown",)), "clicks")
        self.counts = {name: dict.fromkeys(counted, 0) for name in SPLITS}
        self._numeric: list[pl.DataFrame] = []
        self._categories: dict[str, pl.DataFrame] = {}
        self._cut: set[str] = set()

    def add(self, split: str, rows: pl.DataFrame, bounds: NDArray[np.int64]) -> None:
        """Take the rows of one split of a bucket, sorted into the lists that `bounds` delimits."""
        counts = self.counts[split]
        counts["queries"] += len(offsets_of_runs(rows[QUERY].to_numpy())) - 1
        counts["lists"] += len(bounds) - 1
        counts["rows"] += rows.height
        counts["clicks"] += int(rows["click"].cast(pl.Int64).sum())
        shown = rows["position"].to_numpy()
        if self.last is not None:
            shown = shown[shown <= self.last]
            counts["shown"] += len(shown)
        self.positions = max(self.positions, int(shown.max(initial=0)))
        if split == "train":
            self._add_statistics(rows)

    def _add_statistics(self, rows: pl.DataFrame) -> None:
        names = [*self.schema.named("numeric"), *(["value"] if "value" in self.schema.roles else [])]
        if names:
            self._numeric.append(pl.concat([_moments(rows[name]) for name in names]))
        for name in self.schema.named("categorical"):
            self._add_categories(name, rows[name].alias("category").value_counts(name="count").cast(_COUNTS))

    def _add_categories(self, name: str, found: pl.DataFrame) -> None:
        if name in self._categories:
            found = pl.concat([self._categories[name], found]).group_by("category").agg(pl.col("count").sum())
        missing = found.filter(pl.col("category").is_null())
        found = found.drop_nulls().sort(["count", "category"], descending=[True, False])
        if found.height > MAX_CATEGORIES:
            self._cut.add(name)
        self._categories[name] = pl.concat([found.head(MAX_CATEGORIES), missing])

    def to_json(self) -> str:
        """What was gathered so far, to be joined with what others gathered."""
        told = {
            "positions": self.positions,
            "counts": self.counts,
            "numeric": [frame.to_dict(as_series=False) for frame in self._numeric],
            "categories": {name: frame.to_dict(as_series=False) for name, frame in self._categories.items()},
            "cut": sorted(self._cut),
        }
        return json.dumps(told)

    def join(self, other: str) -> None:
        """Add what another gathered, as `to_json` gave it."""
        told = json.loads(other)
        self.positions = max(self.positions, told["positions"])
        for name, counts in told["counts"].items():
            self.counts[name] = {key: self.counts[name][key] + count for key, count in counts.items()}
        self._numeric += [pl.DataFrame(frame, schema=_MOMENTS) for frame in told["numeric"]]
        for name, frame in told["categories"].items():
            self._add_categories(name, pl.DataFrame(frame, schema=_COUNTS))
        self._cut |= set(told["cut"])

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON has it."""
        numeric = _combined(self._numeric)
        features = []
        for feature in self.schema.features:
            entry: dict[str, Any] = {"name": feature.name, "kind": feature.kind}
            if feature.kind == "numeric":
                entry |= numeric.get(feature.name, {})
            elif feature.name in self._categories:
                counts = self._categories[feature.name]
                entry["missing"] = int(counts.filter(pl.col("category").is_null())["count"].sum())
                entry["categories"] = counts.drop_nulls().height
                entry |= {"more_categories": True} if feature.name in self._cut else {}
                top = counts.drop_nulls().head(10)
                entry["most_frequent"] = dict(zip(top["category"].to_list(), top["count"].to_list(), strict=True))
            features.append(entry)
        summary: dict[str, Any] = {
            "positions": self.positions,
            "roles": list(self.schema.roles),
            "counts": self.counts,
            "features": features,
        }
        if "value" in numeric:
            summary["value"] = numeric["value"]
        return summary


def positions_of(name: str) -> int | None:
    """How many positions were shown by a folder that was prepared with `positions`, or by a split of it; None of any
    other log."""
    folder = to_path(name)
    for path in (folder / "schema.json", folder.parent / "schema.json"):  # of a split, that of the folder it is in
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            return int(described["positions"]) if "shown" in described["counts"]["train"] else None
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None


def _moments(values: pl.Series) -> pl.DataFrame:
    x = pl.col("x")
    known = x.drop_nans()
    return (
        pl.DataFrame({"x": values})
        .select(
            pl.lit(values.name).alias("name"),
            x.is_nan().sum().alias("missing"),
            known.count().alias("known"),
            known.cast(pl.Float64).sum().alias("sum"),
            (known.cast(pl.Float64) ** 2).sum().alias("squares"),
            known.min().alias("min"),
            known.max().alias("max"),
        )
        .cast(_MOMENTS)
    )


def _combined(parts: list[pl.DataFrame]) -> dict[str, dict[str, float | int | None]]:
    if not parts:
        return {}
    totals = (
        pl.concat(parts)
        .group_by("name")
        .agg(pl.col("missing", "known", "sum", "squares").sum(), pl.col("min").min(), pl.col("max").max())
    )
    result: dict[str, dict[str, float | int | None]] = {}
    for row in totals.iter_rows(named=True):
        known = row["known"]
        mean = row["sum"] / known if known else 0.0
        spread = max(row["squares"] / known - mean**2, 0.0) ** 0.5 if known else None
        result[row["name"]] = {
            "missing": row["missing"],
            "mean": mean if known else None,
            "std": spread,
            "min": row["min"],
            "max": row["max"],
        }
    return result


ROW_GROUP_BYTES = 64 * 2**20
FILE_BYTES = 2**30


class SplitWriter:
    """Takes the lists of one split, as tables of any size, and writes them while the caller goes on."""

    def __init__(self, folder: Path, background: ThreadPoolExecutor, prefix: str = "part-") -> None:
        self.folder = folder
        self.prefix = prefix
        self._background = background
        self._pending: Future[None] | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._writer: Any = None
        self._file_bytes = 0
        self.files: list[str] = []

    def write(self, table: pa.Table) -> None:
        """Take a table; it is written once a row group is full."""
        rows = max(1, table.num_rows * ROW_GROUP_BYTES // max(table.nbytes, 1))
        for start in range(0, table.num_rows, rows):
            part = table.slice(start, rows)
            self._waiting.append(part)
            self._waiting_bytes += part.nbytes
            if self._waiting_bytes >= ROW_GROUP_BYTES:
                self._flush()

    def close(self) -> None:
        """Write what is still waiting and close the file."""
        if self._waiting:
            self._flush()
        self._wait()
        self._close_file()

    def _flush(self) -> None:
        self._wait()
        table = pa.concat_tables(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        self._pending = self._background.submit(self._write_group, table)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write_group(self, table: pa.Table) -> None:
        if self._writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{self.prefix}{len(self.files):05d}.parquet"
            self.files.append(path.name)
            options = {"compression": "snappy", "use_dictionary": _text_paths(table)}
            self._writer = parquet_writer(path, table.schema, **options)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._file_bytes += table.nbytes
        if self._file_bytes >= FILE_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._file_bytes = None, 0


def _text_paths(table: pa.Table) -> list[str]:
    """The Parquet paths of the columns of text, the only ones where a dictionary pays."""
    paths = []
    for field in table.schema:
        is_list = pa.types.is_list(field.type)
        inner = field.type.value_type if is_list else field.type
        if pa.types.is_string(inner) or pa.types.is_large_string(inner):
            paths.append(f"{field.name}.list.element" if is_list else field.name)
    return paths


_LIST_LEVEL = ("query_id", "session_id")

Assign = Callable[[NDArray[np.uint64], NDArray[np.int64] | None], NDArray[np.uint8]]


def refuse_clicks_beyond(log: Log, frame: pl.DataFrame, last: int) -> None:
    """Refuse a click on an item that nobody is said to have seen."""
    clicked = frame.filter((pl.col("position") > last) & (pl.col("click") == 1)).sort(ROW).head(1)
    if clicked.height:
        raise DataError(
            f"items below position {last}, the last that is said to be shown, must have no clicks; "
            f"got one at position {clicked['position'][0]} at {log.row_name(clicked[ROW][0])}"
        )


def with_keys(frame: pl.DataFrame) -> pl.DataFrame:
    """Add the hash of the query, which decides bucket and split, and of the list."""
    keys = [pl.Series(QUERY, stable_hash(frame["query_id"]))]
    if "session_id" in frame.columns:
        keys.append(pl.Series(SESSION, stable_hash(frame["session_id"])))
    return frame.with_columns(keys)


def assignment(split: str, valid: float, test: float, times: list[pl.DataFrame]) -> tuple[Assign, dict[str, Any]]:
    """The rule that gives each list its split, from the hash of its query and the query's latest time."""
    if split == "hash":
        return (lambda hashes, _: split_by_hash(hashes, valid=valid, test=test)), {}
    latest = pl.concat(times).group_by(QUERY).agg(pl.col("timestamp").max())["timestamp"].to_numpy()
    first, second = split_by_time(latest, valid=valid, test=test)

    def by_time(_: NDArray[np.uint64], time: NDArray[np.int64] | None) -> NDArray[np.uint8]:
        assert time is not None  # noqa: S101 - the timestamp was asked for above
        return (time > first).astype(np.uint8) + (time > second)

    return by_time, {"train_until": first, "valid_until": second}


def write_bucket(
    log: Log, frame: pl.DataFrame, assign: Assign, writers: dict[str, SplitWriter], summary: Summary
) -> None:
    """Sort a bucket into lists, check that no position occurs twice in one, and hand each split its lists."""
    keys = [key for key in (QUERY, SESSION) if key in frame.columns]
    ids = [key for key in ("query_id", "session_id") if key in frame.columns]
    frame = frame.sort([*keys, "position"])
    starts = _starts(frame, keys)
    if (starts != _starts(frame, ids)).any():  # two ids with one hash: the ids themselves must sort
        frame = frame.sort([*ids, "position"])
        starts = _starts(frame, ids)
    _refuse_twice(log, frame, starts)
    offsets = np.append(np.flatnonzero(starts), frame.height).astype(np.int64)
    latest = None
    if "timestamp" in frame.columns:
        time = frame["timestamp"].to_numpy()
        query_starts = offsets_of_runs(frame[QUERY].to_numpy())
        latest = np.repeat(np.maximum.reduceat(time, query_starts[:-1]), np.diff(query_starts))[offsets[:-1]]
    splits = assign(frame[QUERY].to_numpy()[offsets[:-1]], latest)
    n_items = np.diff(offsets)
    for number, name in enumerate(SPLITS):
        chosen = splits == number
        if chosen.any():
            rows = frame if chosen.all() else frame.filter(pl.Series(np.repeat(chosen, n_items)))
            bounds = np.append(0, np.cumsum(n_items[chosen]))
            summary.add(name, rows, bounds)
            writers[name].write(_lists(rows, bounds))


def _starts(frame: pl.DataFrame, columns: Sequence[str]) -> NDArray[np.bool_]:
    """True at each row that differs from the one before it in any of the columns."""
    changed = pl.any_horizontal(pl.col(column) != pl.col(column).shift(1) for column in columns)
    starts: NDArray[np.bool_] = frame.select(changed.fill_null(True).alias("s"))["s"].to_numpy()
    return starts


def _refuse_twice(log: Log, frame: pl.DataFrame, starts: NDArray[np.bool_]) -> None:
    position = frame["position"].to_numpy()
    twice = np.flatnonzero(~starts[1:] & (position[1:] == position[:-1]))
    if len(twice):
        row = int(twice[0])
        session = frame["session_id"][row] if "session_id" in frame.columns else None
        rows = frame[ROW][row : row + 2].to_list()
        raise log.position_twice(frame["query_id"][row], session, int(position[row]), rows)


def _lists(rows: pl.DataFrame, bounds: NDArray[np.int64]) -> pa.Table:
    """One row per list: the ids once, everything else as a list column."""
    table = rows.drop(ROW, QUERY, SESSION, strict=False).to_arrow().combine_chunks()
    offsets = pa.array(bounds, type=pa.int32())
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        values = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        if name == "timestamp":  # that of the latest item, so that the log is split in the same way when prepared again
            columns[name] = pa.array(np.maximum.reduceat(values.to_numpy(), bounds[:-1]))
        elif name in _LIST_LEVEL:
            columns[name] = values.take(offsets[:-1])
        else:
            columns[name] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns)


LEAST, MOST = 64, 512  # a process may often have no more than a thousand files open


class Buckets:
    """All rows of a query land in one bucket, and a bucket is small enough to be sorted in memory.

    As long as all rows fit into one bucket they stay in memory and nothing touches the disk. After that they go to
    64 Arrow files, or more of a large source; neighbouring files are read together as long as they fit, and one that
    has become too large all the same is scattered again.
    """

    def __init__(self, folder: Path, row_bytes: int, bucket_bytes: int, source_bytes: int = 0) -> None:
        """Take no rows yet.

        Args:
            folder: where files go, if there must be any.
            row_bytes: what a row takes.
            bucket_bytes: what a bucket may take.
            source_bytes: the size of what will come, as far as it is known; it may be compressed.
        """
        self.folder = folder
        self._most_rows = max(1, bucket_bytes // row_bytes)
        self._count = min(MOST, max(LEAST, 2 * source_bytes // bucket_bytes))
        self._held: list[pl.DataFrame] = []
        self._held_rows = 0
        self._writers: list[pa.ipc.RecordBatchFileWriter] = []
        self._rows = np.zeros(self._count, dtype=np.int64)

    def __enter__(self) -> Buckets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        for path in self.folder.glob("*.arrow"):
            path.unlink()
        if self.folder.exists():
            self.folder.rmdir()

    def add(self, frame: pl.DataFrame) -> None:
        """Take rows that have the hash of their query in the column `QUERY`."""
        self._held.append(frame)
        self._held_rows += frame.height
        if self._held_rows > self._most_rows:
            for held in self._held:
                self._scatter(held)
            self._held, self._held_rows = [], self._most_rows  # from here on each batch goes straight to disk

    def __len__(self) -> int:
        if not self._writers:
            return 1
        return sum(self._pieces(int(self._rows[group].sum())) for group in self._groups())

    def __iter__(self) -> Iterator[pl.DataFrame]:
        if not self._writers:
            yield pl.concat(self._held)
            return
        self._close()
        for group in self._groups():
            if len(group) == 1 and (pieces := self._pieces(int(self._rows[group[0]]))) > 1:
                yield from self._scattered_again(self._path(group[0]), pieces)
            else:
                yield _read([self._path(number) for number in group])

    def _scatter(self, frame: pl.DataFrame) -> None:
        if not self._writers:
            self.folder.mkdir(parents=True)
            schema = frame.to_arrow().schema
            self._writers = [pa.ipc.new_file(str(self._path(n)), schema) for n in range(self._count)]
        self._rows += _write(frame, frame[QUERY].to_numpy() % np.uint64(self._count), self._writers)

    def _scattered_again(self, path: Path, pieces: int) -> Iterator[pl.DataFrame]:
        """The rows of a file that is too large, some queries at a time; of a single query there is no part."""
        paths = [path.with_name(f"{path.stem}-{piece:04d}.arrow") for piece in range(pieces)]
        with pa.ipc.open_file(str(path)) as file:
            writers = [pa.ipc.new_file(str(each), file.schema) for each in paths]
            for number in range(file.num_record_batches):
                frame = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([file.get_batch(number)])))
                _write(frame, frame[QUERY].to_numpy() // np.uint64(self._count) % np.uint64(pieces), writers)
            for writer in writers:
                writer.close()
        path.unlink()
        for each in paths:
            yield _read([each])
            each.unlink()

    def _pieces(self, rows: int) -> int:
        """Into how many parts so many rows are cut; some are larger than others."""
        return 1 if rows <= self._most_rows else min(MOST, -(-2 * rows // self._most_rows))

    def _groups(self) -> list[list[int]]:
        """Neighbouring files that together fit into memory."""
        groups: list[list[int]] = []
        rows = 0
        for number, count in enumerate(self._rows.tolist()):
            if not groups or rows + count > self._most_rows:
                groups.append([])
                rows = 0
            groups[-1].append(number)
            rows += count
        return groups

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:04d}.arrow"

    def _close(self) -> None:
        for writer in self._writers:
            writer.close()


def _read(paths: Sequence[Path]) -> pl.DataFrame:
    tables = []
    for path in paths:
        with pa.ipc.open_file(str(path)) as file:
            tables.append(file.read_all())
    return pl.DataFrame(pl.from_arrow(pa.concat_tables(tables)))


def _write(
    frame: pl.DataFrame, numbers: NDArray[np.uint64], writers: Sequence[pa.ipc.RecordBatchFileWriter]
) -> NDArray[np.int64]:
    """Give each row to the writer of its number, and return how many each got."""
    bucket = numbers.astype(np.uint16)  # so that it is sorted by radix
    order = np.argsort(bucket, kind="stable")
    table = frame[order].to_arrow()
    counts = np.bincount(bucket, minlength=len(writers))
    start = 0
    for writer, count in zip(writers, counts.tolist(), strict=True):
        if count:
            writer.write_table(table.slice(start, count))
            start += count
    return counts


BUCKET_BYTES = 128 * 2**20
FORMAT_VERSION = 1


def prepare(
    log: Log,
    folder: str | Path,
    *,
    split: Literal["hash", "time"] = "hash",
    valid: float = 0.1,
    test: float = 0.1,
    positions: int | None = None,
    overwrite: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    report: Report = silent,
) -> dict[str, Any]:
    """Write the prepared dataset and return its `schema.json` as a dictionary.

    Args:
        log: what `urank.read` opened.
        folder: where to write; it appears, complete, when all is done.
        split: "hash" of the query id (a query keeps its split when data is added), or "time" (the newest queries, by
            their latest showing, are held out).
        valid, test: shares of the queries to hold out.
        positions: K; items further down are candidates that nobody saw. A ranker learns to order them too, a click
            model does not learn from them. When left out all items were shown or, if the log is a folder that
            `prepare` wrote, those that were shown there.
        overwrite: replace the folder if it exists.
        bucket_bytes: about how much of the log is held in memory at once.
        report: told how far it is.
    """
    last = validate_arguments(log, folder, split, valid, test, positions)
    with new_folder(folder, marker="schema.json", overwrite=overwrite) as target:
        with _scratch(target) as scratch, Buckets(scratch, log.row_bytes, bucket_bytes, log.size) as buckets:
            times: list[pl.DataFrame] = []
            for frame, done in prefetch(log.batches()):
                if last is not None:
                    refuse_clicks_beyond(log, frame, last)
                keyed = with_keys(frame)
                if split == "time":
                    times.append(keyed.group_by(QUERY).agg(pl.col("timestamp").max()))
                buckets.add(keyed)
                report("reading", done, log.size)
            assign, cuts = assignment(split, valid, test, times)
            summary = Summary(log.schema, last)
            with ThreadPoolExecutor(max_workers=1) as background:
                writers = {name: SplitWriter(target / name, background) for name in SPLITS}
                for number, bucket in enumerate(prefetch(buckets)):
                    write_bucket(log, bucket, assign, writers, summary)
                    report("writing", number + 1, len(buckets))
                for writer in writers.values():
                    writer.close()
        return describe(target, log, summary, {"by": split, "valid": valid, "test": test, **cuts})


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder for buckets: within the target, which is where there is room, or here if that is elsewhere."""
    if not is_remote(target):
        yield target / "_buckets"
        return
    with tempfile.TemporaryDirectory(prefix="urank-") as name:
        yield Path(name) / "_buckets"


def validate_arguments(
    log: Log, folder: str | Path, split: str, valid: float, test: float, positions: int | None
) -> int | None:
    """The last position that counts as shown, none when all do; refuses what cannot be asked of a log."""
    check_shares(valid, test)
    if is_within(log.name, folder):
        raise ConfigError(f"{folder} holds the log itself, which would be replaced before it is read; name another one")
    if positions is not None and positions < 1:
        raise ConfigError(f"positions must be a whole number from 1 up; got {positions}")
    last = positions if positions is not None else positions_of(log.name)
    if split not in ("hash", "time"):
        raise ConfigError(f"split must be 'hash' or 'time'; got {split!r}")
    if split == "time" and "timestamp" not in log.schema.roles:
        raise ConfigError(f"split 'time' needs a timestamp; {log.name} has none (name it with --column timestamp=NAME)")
    return last


def describe(target: Path, log: Log, summary: Summary, split: dict[str, Any]) -> dict[str, Any]:
    """Write the `schema.json` of a folder, which makes it a prepared log, and return what it says."""
    if not summary.positions:
        raise DataError(f"positions must be at least the lowest position of {log.name}; got {summary.last}")
    description = {
        "format": "urank prepared log",
        "version": FORMAT_VERSION,
        "source": log.name,
        "split": split,
        **summary.to_dict(),
    }
    text = json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False)
    (target / "schema.json").write_text(text + "\n", encoding="utf-8")
    return description
