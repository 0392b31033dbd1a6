"""Prepare a log: one row per list, with list columns ordered by position, split into train, valid and test.

Since a query is a row, no row group, shard, batch or fold can ever split one. The log may be larger than memory and in
any order: rows are first scattered into buckets on disk by the hash of their query, then each bucket is sorted.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.log.columns import QUERY, ROW, SESSION, LogSchema, join_names
from urank.log.dataset import PREPARED_VERSION, one_array, shown_positions
from urank.log.identifiability import ClickOutcomes
from urank.log.ragged import offsets_of_runs
from urank.log.reader import Log
from urank.log.splits import SPLITS, check_shares, split_by_hash, split_by_time, stable_hash
from urank.progress import Report, prefetch, silent
from urank.storage import is_remote, is_within, new_folder, parquet_writer

BUCKET_BYTES = 128 * 2**20
MIN_BUCKETS, MAX_BUCKETS = 64, 512  # a process can often open no more than a thousand files
ROW_GROUP_BYTES = 64 * 2**20
FILE_BYTES = 2**30
MAX_CATEGORIES = 100_000
"""Of a feature with more categories the rarest are dropped, and `more_categories` is set."""

_LIST_LEVEL = ("query_id", "session_id")
_COUNTED, _SUMMED = ("missing", "known"), ("sum", "squares", "min", "max")
_MOMENTS = pl.Schema({"name": pl.String} | dict.fromkeys(_COUNTED, pl.Int64) | dict.fromkeys(_SUMMED, pl.Float64))
_COUNTS = pl.Schema({"category": pl.String, "count": pl.Int64})

PREPARE_STEPS: Mapping[str, float] = {"reading": 3, "writing": 1}
"""The steps that `prepare` reports, with their typical times, for an overall progress."""

SplitRule = Callable[[NDArray[np.uint64], NDArray[np.int64] | None], NDArray[np.uint8]]
"""The index in `SPLITS` of each list, given the hash of its query and the query's latest time."""


def prepare(
    log: Log,
    folder: str | Path,
    *,
    split_by: Literal["hash", "time"] = "hash",
    valid: float = 0.1,
    test: float = 0.1,
    positions: int | None = None,
    keep: Collection[str] = (),
    overwrite: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    report: Report = silent,
) -> dict[str, Any]:
    """Write the prepared dataset and return its `schema.json` as a dictionary.

    Features that are outcomes of the click (see `ClickOutcomes`) are left out and named in `left_out`.

    Args:
        log: The log, opened by `urank.read`.
        folder: Target; it appears when it is complete.
        split_by: "hash" of the query id (a query keeps its split when data is added), or "time" (the newest queries, by
            their latest showing, are held out).
        valid: Share of the queries that stop training and choose.
        test: Share of the queries that training never sees.
        positions: K; items further down are candidates that nobody saw. A ranker learns to order them, too; a click
            model does not learn from them. If None, all items were shown or, if the log is a folder written by
            `prepare`, those that were shown there.
        keep: Features to keep even if they look like outcomes of the click.
        overwrite: Replace the folder if it exists.
        bucket_bytes: Approximate bytes of the log held in memory at once.
        report: Progress callback.
    """
    last = validate_arguments(log, folder, split_by, valid, test, positions, keep)
    with new_folder(folder, marker="schema.json", overwrite=overwrite) as target:
        # Buckets go into the target, which has room, or to a local folder if the target is remote.
        scratch = tempfile.TemporaryDirectory(prefix="urank-") if is_remote(target) else nullcontext(target)
        with scratch as place, Buckets(Path(place) / "_buckets", log.row_bytes, bucket_bytes, log.size) as buckets:
            times: list[pl.DataFrame] = []
            outcomes = ClickOutcomes(log.schema.without(keep))
            for frame, done in prefetch(log.batches()):
                if last is not None:
                    refuse_unseen_clicks(log, frame, last)
                hashed = add_hashes(frame)
                if split_by == "time":
                    times.append(hashed.group_by(QUERY).agg(pl.col("timestamp").max()))
                buckets.add(hashed)
                outcomes.add(hashed)
                report("reading", done, log.size)
            rule, cuts = split_rule(split_by, valid, test, times)
            left_out = outcomes.names()
            summary = DatasetSummary(log.schema.without(left_out), last)
            with ThreadPoolExecutor(max_workers=1) as background:
                writers = {name: SplitWriter(target / name, background) for name in SPLITS}
                for number, bucket in enumerate(prefetch(buckets)):
                    write_bucket(log, bucket.drop(left_out), rule, writers, summary)
                    report("writing", number + 1, len(buckets))
                for writer in writers.values():
                    writer.close()
        return write_schema(target, log, summary, {"by": split_by, "valid": valid, "test": test, **cuts}, left_out)


def validate_arguments(
    log: Log,
    folder: str | Path,
    split_by: str,
    valid: float,
    test: float,
    positions: int | None,
    keep: Collection[str],
) -> int | None:
    """Refuse invalid arguments of `prepare`; return the last position that was shown, None if all were."""
    check_shares(valid, test)
    if is_within(log.name, folder):
        raise ConfigError(f"{folder} holds the log itself, which would be replaced before it is read; name another one")
    if positions is not None and positions < 1:
        raise ConfigError(f"positions must be a whole number from 1 up; got {positions}")
    if split_by not in ("hash", "time"):
        raise ConfigError(f"split_by must be 'hash' or 'time'; got {split_by!r}")
    if split_by == "time" and "timestamp" not in log.schema.roles:
        raise ConfigError(
            f"split_by 'time' needs a timestamp; {log.name} has none (name it with --column timestamp=NAME)"
        )
    features = [feature.name for feature in log.schema.features]
    for name in keep:
        if name not in features:
            raise ConfigError(f"keep must name features; got '{name}', but {log.name} has {join_names(features)}")
    return positions if positions is not None else shown_positions(log.name)


def refuse_unseen_clicks(log: Log, frame: pl.DataFrame, last: int) -> None:
    """Refuse a click on an item below the last position that was shown."""
    clicked = frame.filter((pl.col("position") > last) & (pl.col("click") == 1)).sort(ROW).head(1)
    if clicked.height:
        raise DataError(
            f"items below position {last}, the last that was shown, must have no clicks; "
            f"got one at position {clicked['position'][0]} at {log.row_name(clicked[ROW][0])}"
        )


def add_hashes(frame: pl.DataFrame) -> pl.DataFrame:
    """Add the hash of the query, which determines bucket and split, and that of the session."""
    hashes = [pl.Series(QUERY, stable_hash(frame["query_id"]))]
    if "session_id" in frame.columns:
        hashes.append(pl.Series(SESSION, stable_hash(frame["session_id"])))
    return frame.with_columns(hashes)


def split_rule(split_by: str, valid: float, test: float, times: list[pl.DataFrame]) -> tuple[SplitRule, dict[str, Any]]:
    """Return the rule that assigns each list to a split, and its cuts in time; `times` has those of all queries."""
    if split_by == "hash":
        return (lambda hashes, _: split_by_hash(hashes, valid=valid, test=test)), {}
    latest = pl.concat(times).group_by(QUERY).agg(pl.col("timestamp").max())["timestamp"].to_numpy()
    first, second = split_by_time(latest, valid=valid, test=test)

    def by_time(_: NDArray[np.uint64], time: NDArray[np.int64] | None) -> NDArray[np.uint8]:
        assert time is not None  # noqa: S101 - validate_arguments requires a timestamp
        return (time > first).astype(np.uint8) + (time > second)

    return by_time, {"train_until": first, "valid_until": second}


class Buckets:
    """Partition rows by query into buckets that are small enough to be sorted in memory.

    As long as all rows fit into one bucket they stay in memory. After that they go to 64 Arrow files, or more for a
    large source; neighbouring files are read together if they fit, and a file that has become too large is scattered
    again.
    """

    def __init__(self, folder: Path, row_bytes: int, bucket_bytes: int, source_bytes: int = 0) -> None:
        """Create an empty set of buckets of at most `bucket_bytes`; the source, of a known size, may be compressed."""
        self.folder = folder
        self._max_rows = max(1, bucket_bytes // row_bytes)
        self._count = min(MAX_BUCKETS, max(MIN_BUCKETS, 2 * source_bytes // bucket_bytes))
        self._held: list[pl.DataFrame] = []
        self._held_rows = 0
        self._writers: list[pa.ipc.RecordBatchFileWriter] = []
        self._rows = np.zeros(self._count, dtype=np.int64)

    def __enter__(self) -> Buckets:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def add(self, frame: pl.DataFrame) -> None:
        """Add rows that have the hash of their query in the column `QUERY`."""
        self._held.append(frame)
        self._held_rows += frame.height
        if self._held_rows > self._max_rows:
            for held in self._held:
                self._scatter(held)
            self._held, self._held_rows = [], self._max_rows  # from here on each batch goes straight to disk

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
                yield _read_arrow([self._path(number) for number in group])

    def _scatter(self, frame: pl.DataFrame) -> None:
        if not self._writers:
            self.folder.mkdir(parents=True)
            schema = frame.to_arrow().schema
            self._writers = [pa.ipc.new_file(str(self._path(n)), schema) for n in range(self._count)]
        self._rows += _distribute(frame, frame[QUERY].to_numpy() % np.uint64(self._count), self._writers)

    def _scattered_again(self, path: Path, pieces: int) -> Iterator[pl.DataFrame]:
        """Yield the rows of a file that is too large, some queries at a time; a single query is never divided."""
        paths = [path.with_name(f"{path.stem}-{piece:04d}.arrow") for piece in range(pieces)]
        with pa.ipc.open_file(str(path)) as file:
            writers = [pa.ipc.new_file(str(each), file.schema) for each in paths]
            for number in range(file.num_record_batches):
                frame = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([file.get_batch(number)])))
                _distribute(frame, frame[QUERY].to_numpy() // np.uint64(self._count) % np.uint64(pieces), writers)
            for writer in writers:
                writer.close()
        path.unlink()
        for each in paths:
            yield _read_arrow([each])
            each.unlink()

    def _pieces(self, rows: int) -> int:
        """Return the number of pieces of a file with so many rows; twice the least, as their sizes vary."""
        return 1 if rows <= self._max_rows else min(MAX_BUCKETS, -(-2 * rows // self._max_rows))

    def _groups(self) -> list[list[int]]:
        """Group neighbouring files that together fit into memory."""
        groups: list[list[int]] = []
        rows = 0
        for number, count in enumerate(self._rows.tolist()):
            if not groups or rows + count > self._max_rows:
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


def _read_arrow(paths: Sequence[Path]) -> pl.DataFrame:
    tables = []
    for path in paths:
        with pa.ipc.open_file(str(path)) as file:
            tables.append(file.read_all())
    return pl.DataFrame(pl.from_arrow(pa.concat_tables(tables)))


def _distribute(
    frame: pl.DataFrame, numbers: NDArray[np.uint64], writers: Sequence[pa.ipc.RecordBatchFileWriter]
) -> NDArray[np.int64]:
    """Write each row to the writer of its number; return the rows of each writer."""
    bucket = numbers.astype(np.uint16)  # 16 bits are sorted by radix
    order = np.argsort(bucket, kind="stable")
    table = frame[order].to_arrow()
    counts = np.bincount(bucket, minlength=len(writers))
    start = 0
    for writer, count in zip(writers, counts.tolist(), strict=True):
        if count:
            writer.write_table(table.slice(start, count))
            start += count
    return counts


def write_bucket(
    log: Log, frame: pl.DataFrame, rule: SplitRule, writers: dict[str, SplitWriter], summary: DatasetSummary
) -> None:
    """Sort a bucket into lists, refuse duplicate positions, and write the lists of each split."""
    keys = [key for key in (QUERY, SESSION) if key in frame.columns]
    ids = [key for key in _LIST_LEVEL if key in frame.columns]
    frame = frame.sort([*keys, "position"])
    starts = _starts(frame, keys)
    if (starts != _starts(frame, ids)).any():  # two ids share a hash: sort by the ids themselves
        frame = frame.sort([*ids, "position"])
        starts = _starts(frame, ids)
    position = frame["position"].to_numpy()
    again = np.flatnonzero(~starts[1:] & (position[1:] == position[:-1]))
    if len(again):
        raise log.duplicate_position_error(frame[again[0] : again[0] + 2])
    offsets = np.append(np.flatnonzero(starts), frame.height).astype(np.int64)
    latest = None
    if "timestamp" in frame.columns:
        time = frame["timestamp"].to_numpy()
        query_starts = offsets_of_runs(frame[QUERY].to_numpy())
        latest = np.repeat(np.maximum.reduceat(time, query_starts[:-1]), np.diff(query_starts))[offsets[:-1]]
    splits = rule(frame[QUERY].to_numpy()[offsets[:-1]], latest)
    n_items = np.diff(offsets)
    for number, name in enumerate(SPLITS):
        chosen = splits == number
        if chosen.any():
            rows = frame if chosen.all() else frame.filter(pl.Series(np.repeat(chosen, n_items)))
            bounds = np.append(0, np.cumsum(n_items[chosen]))
            summary.add(name, rows, bounds)
            writers[name].write(_list_table(rows, bounds))


def _starts(frame: pl.DataFrame, columns: Sequence[str]) -> NDArray[np.bool_]:
    """Return true for each row that differs from the one before it in any of the columns."""
    changed = pl.any_horizontal(pl.col(column) != pl.col(column).shift(1) for column in columns)
    return np.asarray(frame.select(changed.fill_null(True)).to_series().to_numpy())


def _list_table(rows: pl.DataFrame, bounds: NDArray[np.int64]) -> pa.Table:
    """Return one row per list: the ids once, everything else as a list column."""
    table = rows.drop(ROW, QUERY, SESSION, strict=False).to_arrow().combine_chunks()
    offsets = pa.array(bounds, type=pa.int32())
    columns: dict[str, Any] = {}
    for name in table.column_names:
        values = one_array(table.column(name))
        if name == "timestamp":  # that of the latest item, so that preparing the result again gives the same split
            columns[name] = pa.array(np.maximum.reduceat(values.to_numpy(), bounds[:-1]))
        elif name in _LIST_LEVEL:
            columns[name] = values.take(offsets[:-1])
        else:
            columns[name] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns)


class SplitWriter:
    """Write the lists of one split in a background thread, as row groups and files of even size."""

    def __init__(self, folder: Path, background: ThreadPoolExecutor, prefix: str = "part-") -> None:
        self.folder, self.prefix, self._background = folder, prefix, background
        self.files: list[str] = []
        self._pending: Future[None] | None = None
        self._waiting: list[pa.Table] = []
        self._writer: Any = None
        self._waiting_bytes = self._file_bytes = 0

    def write(self, table: pa.Table) -> None:
        """Add a table of any size; it is written once a row group is full."""
        rows = max(1, table.num_rows * ROW_GROUP_BYTES // max(table.nbytes, 1))
        for start in range(0, table.num_rows, rows):
            part = table.slice(start, rows)
            self._waiting.append(part)
            self._waiting_bytes += part.nbytes
            if self._waiting_bytes >= ROW_GROUP_BYTES:
                self._flush()

    def close(self) -> None:
        """Write the remaining rows and close the file."""
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
    """Return the Parquet paths of the text columns, the only ones for which a dictionary pays."""
    paths = []
    for field in table.schema:
        is_list = pa.types.is_list(field.type)
        inner = field.type.value_type if is_list else field.type
        if pa.types.is_string(inner) or pa.types.is_large_string(inner):
            paths.append(f"{field.name}.list.element" if is_list else field.name)
    return paths


class DatasetSummary:
    """Counts and statistics of a prepared log, gathered a bucket at a time. Feature statistics are those of train.

    Items below position `last` were not shown, None if all were; `positions` is K, the last at which anything was.
    """

    def __init__(self, schema: LogSchema, last: int | None = None) -> None:
        self.schema, self.last, self.positions = schema, last, 0
        counted = ("queries", "lists", "rows", *(() if last is None else ("shown",)), "clicks")
        self.counts = {name: dict.fromkeys(counted, 0) for name in SPLITS}
        self._numeric: list[pl.DataFrame] = []
        self._categories: dict[str, pl.DataFrame] = {}
        self._cut: set[str] = set()

    def add(self, split: str, rows: pl.DataFrame, bounds: NDArray[np.int64]) -> None:
        """Add the rows of one split of a bucket, sorted into the lists that `bounds` delimits."""
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
        """Serialise what was gathered so far, for `join`."""
        numeric = [frame.to_dict(as_series=False) for frame in self._numeric]
        categories = {name: frame.to_dict(as_series=False) for name, frame in self._categories.items()}
        features = {"numeric": numeric, "categories": categories, "cut": sorted(self._cut)}
        return json.dumps({"positions": self.positions, "counts": self.counts, **features})

    def join(self, other: str) -> None:
        """Add what another summary gathered, as returned by `to_json`."""
        state = json.loads(other)
        self.positions = max(self.positions, state["positions"])
        for name, counts in state["counts"].items():
            self.counts[name] = {key: self.counts[name][key] + count for key, count in counts.items()}
        self._numeric += [pl.DataFrame(frame, schema=_MOMENTS) for frame in state["numeric"]]
        for name, frame in state["categories"].items():
            self._add_categories(name, pl.DataFrame(frame, schema=_COUNTS))
        self._cut |= set(state["cut"])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        numeric = _combine_moments(self._numeric)
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
                entry["most_frequent"] = dict(counts.drop_nulls().head(10).iter_rows())
            features.append(entry)
        summary = {"positions": self.positions, "roles": list(self.schema.roles), "counts": self.counts}
        return {**summary, "features": features, **({"value": numeric["value"]} if "value" in numeric else {})}


def _moments(values: pl.Series) -> pl.DataFrame:
    known = values.drop_nans()
    wide = known.cast(pl.Float64)
    counts = {"missing": len(values) - len(known), "known": len(known)}
    sums = {"sum": wide.sum(), "squares": (wide**2).sum(), "min": known.min(), "max": known.max()}
    return pl.DataFrame([{"name": values.name} | counts | sums], schema=_MOMENTS)


def _combine_moments(parts: list[pl.DataFrame]) -> dict[str, dict[str, float | int | None]]:
    """Return count of missing values, mean, standard deviation, minimum and maximum of each feature."""
    if not parts:
        return {}
    sums = pl.col("missing", "known", "sum", "squares").sum()
    totals = pl.concat(parts).group_by("name").agg(sums, pl.col("min").min(), pl.col("max").max())
    result: dict[str, dict[str, float | int | None]] = {}
    for row in totals.iter_rows(named=True):
        mean = std = None
        if known := row["known"]:
            mean = row["sum"] / known
            std = max(row["squares"] / known - mean**2, 0.0) ** 0.5
        result[row["name"]] = {
            "missing": row["missing"],
            "mean": mean,
            "std": std,
            "min": row["min"],
            "max": row["max"],
        }
    return result


def write_schema(
    target: Path, log: Log, summary: DatasetSummary, split: dict[str, Any], left_out: Sequence[str]
) -> dict[str, Any]:
    """Write `schema.json`, which makes a folder a prepared log, and return its content."""
    if not summary.positions:
        raise DataError(f"positions must be at least the lowest position of {log.name}; got {summary.last}")
    kind = {"format": "urank prepared log", "version": PREPARED_VERSION}
    description = {**kind, "source": log.name, "split": split, **summary.to_dict()}
    description |= {"left_out": list(left_out)} if left_out else {}
    description |= {"columns": log.schema.renamed} if log.schema.renamed else {}
    text = json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False)
    (target / "schema.json").write_text(text + "\n", encoding="utf-8")
    return description
