"""Export the feedback log: each closed segment becomes Parquet parts, joined with the feedback of all segments.

The files are the only state, and a compaction may be killed at any time: a file is removed only after its whole content
is durable elsewhere, and joining the same feedback again changes nothing. A segment passes through three states:

    wal/SEGMENT.wal       its rankings are nowhere else
    wal/SEGMENT.joined    its rankings are in parts; kept for feedback on rankings of segments without parts yet
    removed               its content is in parts, or in unmatched/SEGMENT.wal if the ranking is not in this log

`python -m urank.serve.feedback_export DIR SECONDS` runs one compaction; a server does so in the background.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError, UrankError
from urank.progress import Report, silent
from urank.serve.feedback_store import (
    SEGMENT,
    WAL,
    FeedbackColumns,
    FeedbackRecord,
    RankingRecord,
    RecordKind,
    SegmentReader,
    ShadowRecord,
    columns_from,
    decode,
    durable_folder,
    encode,
    exclusive_lock,
    framed,
    is_closed,
    kind_of,
    segment_of,
    segment_path,
    sync_folder,
)

JOINED = ".joined"
"""Suffix of a segment whose rankings are in parts."""

_SEGMENT = re.compile(SEGMENT)
_RANKING_KINDS = (RecordKind.columns, RecordKind.ranking)

FeedbackOrShadow = FeedbackRecord | ShadowRecord


@dataclass
class ClosedSegment:
    """A segment without a writer."""

    name: str
    path: Path
    due: bool  # whether its rankings become parts now
    joined: bool  # whether they are in parts already
    homes: Counter[str] = field(default_factory=Counter)  # segment -> number of records here that refer to its rankings
    checksum: int = 0  # checksum of these records
    torn: int = 0  # bytes at the end without a record
    damaged: int = 0  # bytes before that without a record, or with an invalid one

    def feedback(self) -> Iterator[FeedbackOrShadow]:
        """Yield feedback and orders of the shadow model."""
        for payload in SegmentReader(self.path):
            if kind_of(payload) not in _RANKING_KINDS:
                try:
                    record = decode(payload)
                except DataError:
                    continue
                if isinstance(record, FeedbackRecord | ShadowRecord):
                    yield record

    def columns_and_rankings(self) -> Iterator[FeedbackColumns | RankingRecord]:
        """Yield its rankings, each after its columns; invalid records count as damaged."""
        for payload in SegmentReader(self.path):
            if kind_of(payload) in _RANKING_KINDS:
                try:
                    record = decode(payload)
                except DataError:
                    self.damaged += len(payload)
                    continue
                if isinstance(record, FeedbackColumns | RankingRecord):
                    yield record

    def rankings(
        self, known: Callable[[str], FeedbackColumns | None]
    ) -> tuple[list[RankingRecord], dict[str, FeedbackColumns]]:
        """Return its rankings, each once, and their sets of columns; foreign records count as damaged.

        Args:
            known: Returns the columns of a digest, if they are known elsewhere.
        """
        rankings: dict[str, RankingRecord] = {}
        columns: dict[str, FeedbackColumns] = {}
        for record in self.columns_and_rankings():
            if isinstance(record, FeedbackColumns):
                columns[record.digest] = record
                continue
            if record.columns not in columns and (found := known(record.columns)) is not None:
                columns[record.columns] = found  # their record here is damaged
            fits = record.columns in columns and record.fits(columns[record.columns])
            if fits and segment_of(record.ranking_id) == self.name:
                rankings.setdefault(record.ranking_id, record)
            else:
                self.damaged += len(encode(record))
        return list(rankings.values()), columns

    def survey(self) -> None:
        """Count the feedback by home, and the bytes that cannot be read."""
        reader = SegmentReader(self.path)
        for payload in reader:
            if kind_of(payload) in _RANKING_KINDS:  # slow to decode, and not needed before they are due
                continue
            try:
                record = decode(payload)
            except DataError:
                self.damaged += len(payload)
                continue
            if isinstance(record, FeedbackRecord | ShadowRecord):
                self.homes[segment_of(record.ranking_id)] += 1
                self.checksum = zlib.crc32(payload, self.checksum)
        self.torn = reader.torn
        self.damaged += reader.damaged


def segment_files(wal: Path) -> list[Path]:
    """Return the segment files of a folder, open or closed, oldest first."""
    paths = [path for path in wal.iterdir() if path.suffix in (".wal", JOINED)]
    return sorted(path for path in paths if _SEGMENT.fullmatch(path.stem))


def closed_segments(wal: Path, window: float, now: float) -> Iterator[ClosedSegment]:
    """Yield the closed segments of a folder, oldest first; due are those closed for at least the window."""
    for path in segment_files(wal):
        joined = path.suffix == JOINED
        if not (joined or is_closed(path)):
            continue
        due = not joined and (window == 0 or now - path.stat().st_mtime >= window)
        segment = ClosedSegment(path.stem, path, due, joined)
        segment.survey()
        yield segment


KEYS = ["session_id", "item_id"]
"""Columns that identify an impression."""

_SHADOW = ("query_id", *KEYS, "position", "shadow_position", "click", "model", "shadow_model", "timestamp")
_TIME = pl.Datetime("us", "UTC")

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def log_frame(rankings: Sequence[RankingRecord], columns: FeedbackColumns) -> pl.DataFrame:
    """Return one row for each item shown, without clicks; all rankings must fit the columns."""
    counts = np.array([len(ranking.items) for ranking in rankings])
    of = np.repeat(np.arange(len(rankings)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)

    def each(values: Iterable[str | None]) -> pl.Series:
        return pl.Series(list(values), dtype=pl.String).gather(of)

    found = {
        "query_id": each(ranking.query_id for ranking in rankings),
        "session_id": each(ranking.ranking_id for ranking in rankings),
        "item_id": pl.Series(list(chain.from_iterable(ranking.items for ranking in rankings)), dtype=pl.String),
        "position": pl.Series((np.arange(len(of)) - firsts + 1).astype(np.int32)),
        "click": pl.Series(np.zeros(len(of), dtype=np.int8)),
        "conversion": pl.Series(np.zeros(len(of), dtype=np.int8)),
    }
    if columns.value:
        found["value"] = pl.Series(np.concatenate([ranking.value for ranking in rankings if ranking.value is not None]))
    found["policy"] = each(ranking.policy for ranking in rankings)
    if columns.explored:
        chances = [ranking.propensity for ranking in rankings if ranking.propensity is not None]
        found["propensity"] = pl.Series(np.concatenate(chances))
        ranked = chain.from_iterable(ranking.ranked_position or () for ranking in rankings)
        found["ranked_position"] = pl.Series(list(ranked), dtype=pl.Int32)
    found["user_id"] = each(ranking.user_id for ranking in rankings)
    found["arm"] = each(ranking.arm for ranking in rankings)
    times = np.array([ranking.time_us for ranking in rankings], dtype=np.int64)
    found["timestamp"] = pl.Series(times[of]).cast(_TIME)
    features = np.ascontiguousarray(np.concatenate([ranking.numeric for ranking in rankings]).T)
    for name, numbers in zip(columns.numeric, features, strict=True):
        found[name] = pl.Series(numbers).fill_nan(None)
    texts = zip(*chain.from_iterable(ranking.categorical for ranking in rankings), strict=True)
    for name, column in zip(columns.categorical, texts, strict=True):
        found[name] = pl.Series(column, dtype=pl.String)
    return pl.DataFrame(found)


@dataclass(frozen=True, eq=False)
class JoinedImpressions:
    """Impressions with feedback joined to them.

    Attributes:
        frame: The impressions.
        value_times: Row -> time of the feedback that set its value, in microseconds; other rows have the value of the
            ranking.
        found: `[events]`, whether the event belongs to an impression.
        new: `[events]`, whether it changed anything.
        valueless: Number of values that were dropped, since the log has no values.
    """

    frame: pl.DataFrame
    value_times: Mapping[int, int]
    found: Bools
    new: Bools
    valueless: int


def join_feedback(
    frame: pl.DataFrame, value_times: Mapping[int, int], events: Sequence[FeedbackRecord]
) -> JoinedImpressions:
    """Join feedback to impressions, which may have feedback already.

    A reported click or conversion stays. Of several values the latest counts; of those with the same time the largest.
    So the result does not depend on the order or the repetition of events.

    Args:
        frame: Impressions, as from `log_frame`.
        value_times: Of feedback that was joined before.
        events: Feedback, also on other impressions.
    """
    rows = _rows_of(frame, events)
    click, conversion = frame["click"].to_numpy().copy(), frame["conversion"].to_numpy().copy()
    value = frame["value"].to_numpy().copy() if "value" in frame.columns else None
    times = dict(value_times)
    new = np.zeros(len(events), dtype=np.bool_)
    matched: list[int] = np.flatnonzero(rows >= 0).tolist()
    for place in matched:
        event, row = events[place], int(rows[place])
        new[place] = (event.click and not click[row]) or (event.conversion and not conversion[row])
        click[row] |= event.click
        conversion[row] |= event.conversion
        if event.value is None or value is None:
            continue
        reported = np.float32(event.value)
        if row not in times or (event.time_us, reported) >= (times[row], value[row]):
            new[place] |= reported != value[row]
            value[row], times[row] = reported, event.time_us
    changed = [pl.Series("click", click), pl.Series("conversion", conversion)]
    valueless = 0
    if value is None:
        valueless = sum(events[place].value is not None for place in matched)
    else:
        changed.append(pl.Series("value", value))
    return JoinedImpressions(frame.with_columns(changed), times, rows >= 0, new, valueless)


def has_impression(frame: pl.DataFrame, events: Sequence[FeedbackRecord]) -> Bools:
    """Return whether each event belongs to an impression; the frame needs only the columns `KEYS`."""
    return _rows_of(frame, events) >= 0


def _rows_of(frame: pl.DataFrame, events: Sequence[FeedbackRecord]) -> Ints:
    """Return the row of the impression of each event; −1 if there is none."""
    asked = pl.DataFrame(
        {"session_id": [event.ranking_id for event in events], "item_id": [event.item_id for event in events]},
        schema=dict.fromkeys(KEYS, pl.String),
    )
    known = frame.select(KEYS).with_row_index("row")
    found = asked.join(known, on=KEYS, how="left", maintain_order="left")["row"]
    return found.cast(pl.Int64).fill_null(-1).to_numpy()


def shadow_frame(
    logs: Sequence[pl.DataFrame], rankings: Sequence[RankingRecord], shadows: Sequence[ShadowRecord]
) -> pl.DataFrame:
    """Compare what was shown with the orders of the shadow model: a row for each item that either placed.

    Args:
        logs: The impressions.
        rankings: Their rankings.
        shadows: Orders of the shadow model; of two for one ranking the first counts, and those of others are ignored.
    """
    models = {ranking.ranking_id: ranking for ranking in rankings}
    orders: dict[str, ShadowRecord] = {}
    for shadow in shadows:
        if shadow.ranking_id in models:
            orders.setdefault(shadow.ranking_id, shadow)
    heads = pl.DataFrame(
        {
            "session_id": list(orders),
            "query_id": [models[each].query_id for each in orders],
            "model": [models[each].model for each in orders],
            "shadow_model": [shadow.model for shadow in orders.values()],
            "timestamp": pl.Series([models[each].time_us for each in orders], dtype=pl.Int64).cast(_TIME),
        }
    ).with_row_index("order")
    counts = [len(shadow.items) for shadow in orders.values()]
    shadow_items = pl.DataFrame(
        {
            "session_id": pl.Series(list(orders), dtype=pl.String).gather(np.repeat(np.arange(len(orders)), counts)),
            "item_id": list(chain.from_iterable(shadow.items for shadow in orders.values())),
            "shadow_position": pl.Series([k for count in counts for k in range(1, count + 1)], dtype=pl.Int32),
        }
    )
    shown = pl.concat(log.select(*KEYS, "position", "click") for log in logs)
    both = shown.join(heads, on="session_id", how="semi").join(shadow_items, on=KEYS, how="full", coalesce=True)
    return (
        both.join(heads, on="session_id").sort("order", "position", "shadow_position", nulls_last=True).select(_SHADOW)
    )


def shadow_clicks(shadow: pl.DataFrame, logs: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Update the clicks of a `shadow_frame`; an item that was not shown has none."""
    clicks = pl.concat(log.select(*KEYS, "click") for log in logs)
    return shadow.drop("click").join(clicks, on=KEYS, how="left", maintain_order="left").select(_SHADOW)


COLUMNS = "columns.json"
SHADOW = "shadow"

_FORMAT = "urank feedback log"
_LOG = re.compile(r"log(?:-([1-9]\d*))?")
_SOURCES, _TIMES = b"urank.sources", b"urank.value_times"


@dataclass(frozen=True)
class PartMetadata:
    """Metadata of a part.

    Attributes:
        sources: Segments whose feedback was joined completely.
        value_times: Row -> time of the feedback that set its value, in microseconds.
    """

    sources: frozenset[str] = frozenset()
    value_times: Mapping[int, int] = field(default_factory=dict)


class LogParts:
    """The Parquet folders and parts of a feedback log."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, tuple[Path, FeedbackColumns]] = {}
        for folder in _log_folders(root):
            if (folder / COLUMNS).is_file():
                columns = _read_columns(folder / COLUMNS)
                self._folders[columns.digest] = folder, columns

    @property
    def folders(self) -> list[Path]:
        """The folders with rankings, the first one first."""
        return [folder for folder, _ in self._folders.values()]

    def columns(self, digest: str) -> FeedbackColumns | None:
        """Return the columns with this digest; None if no folder has them."""
        return self._folders[digest][1] if digest in self._folders else None

    def of(self, segment: str) -> list[Path]:
        """Return the parts of a segment."""
        paths = [folder / f"{segment}.parquet" for folder in self.folders]
        return [path for path in paths if path.is_file()]

    def path(self, segment: str, columns: FeedbackColumns) -> Path:
        """Return the part for the rankings of a segment with these columns; creates its folder if needed."""
        if columns.digest not in self._folders:
            folder = self._free_folder()
            durable_folder(folder)
            with durable_file(folder / COLUMNS) as working:
                working.write_text(json.dumps({"format": _FORMAT, **columns.to_dict()}, indent=2) + "\n", "utf-8")
            self._folders[columns.digest] = folder, columns
        return self._folders[columns.digest][0] / f"{segment}.parquet"

    def shadow(self, segment: str) -> Path:
        """Return the part for the orders of the shadow model."""
        return self._root / SHADOW / f"{segment}.parquet"

    def _free_folder(self) -> Path:
        """Return the first of log, log-2, … that does not exist or contains only files of an interrupted write."""
        number = 1
        while True:
            folder = self._root / ("log" if number == 1 else f"log-{number}")
            if not folder.exists() or (folder.is_dir() and not any(folder.glob("[!.]*"))):
                return folder
            number += 1


def _log_folders(root: Path) -> list[Path]:
    found = {int(match[1] or 1): path for path in root.iterdir() if (match := _LOG.fullmatch(path.name))}
    return [found[number] for number in sorted(found) if found[number].is_dir()]


def _read_columns(path: Path) -> FeedbackColumns:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == _FORMAT:
            return columns_from(content)
    except (ValueError, LookupError, TypeError, DataError):
        pass
    raise DataError(f"{path} must contain the columns of its folder, as urank wrote them; it does not")


@contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that durably replaces `path` when the block succeeds.

    Its name is always the same, so that the file of an interrupted write is overwritten. Readers of logs skip it.
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


def write_part(path: Path, frame: pl.DataFrame, metadata: PartMetadata) -> None:
    """Write or replace a part."""
    fields = {_SOURCES: " ".join(sorted(metadata.sources)).encode()}
    if metadata.value_times:
        pairs = np.array(sorted(metadata.value_times.items()), dtype="<i8")
        fields[_TIMES] = base64.b64encode(pairs.tobytes())
    texts = [name for name, dtype in frame.schema.items() if dtype == pl.String]  # numbers rarely repeat
    table = frame.to_arrow().replace_schema_metadata(fields)
    durable_folder(path.parent)
    with durable_file(path) as working:
        pq.write_table(table, working, compression="zstd", use_dictionary=texts)


def read_part_metadata(path: Path) -> PartMetadata:
    """Read the metadata of a part."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        pairs = np.frombuffer(base64.b64decode(metadata.get(_TIMES, b"")), dtype="<i8").reshape(-1, 2)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path) from error
    sources = metadata.get(_SOURCES, b"").decode("ascii", "replace").split()
    return PartMetadata(frozenset(sources), dict(pairs.tolist()))


def read_part(path: Path, columns: list[str] | None = None) -> pl.DataFrame:
    """Read the rows of a part, with all columns or these."""
    try:
        with pq.ParquetFile(path) as file:
            return pl.DataFrame(pl.from_arrow(file.read(columns)))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path) from error


def _unreadable(path: Path) -> DataError:
    return DataError(
        f"{path} is not a readable Parquet file; move it away, and feedback on its rankings will be unmatched"
    )


def shadow_agreement(root: Path) -> tuple[int, int]:
    """Return the number of rankings of the shadow model, and of those with the same first item as shown."""
    paths = sorted((root / SHADOW).glob("[!.]*.parquet"))
    if not paths:
        return 0, 0
    first = pl.scan_parquet(paths, glob=False, hive_partitioning=False).filter(pl.col("position") == 1)
    counts = first.select(pl.len(), (pl.col("shadow_position") == 1).sum()).collect(engine="streaming").row(0)
    return int(counts[0]), int(counts[1])


UNMATCHED = "unmatched"
"""Folder of feedback on rankings that are not in this log."""


class _RemoteSegment(ClosedSegment):
    """A read-only segment. Its owner may remove it at any time, after its content is durable elsewhere."""

    def feedback(self) -> Iterator[FeedbackOrShadow]:
        """Yield feedback, without the orders of the shadow model of another server."""
        with suppress(FileNotFoundError):
            for record in super().feedback():
                if isinstance(record, FeedbackRecord):
                    yield record


def remote_feedback(root: Path, also: Collection[Path]) -> dict[str, ClosedSegment]:
    """Return files that may contain feedback on a log besides its own segments: those of other logs, and unmatched.

    Without other logs there are none: the log's own unmatched feedback is not read each time.

    Args:
        root: The folder of the log.
        also: Folders of other logs; it may be among them.

    Returns:
        The files by their name in the metadata of parts: segment and checksum of the feedback, so that a file which
        has grown, as the copy of an open segment does, is read again.
    """
    if not also:
        return {}
    # Write-ahead files first, so that feedback which moves to `unmatched` meanwhile is read at least once.
    others = sorted({folder.resolve() for folder in also} - {root.resolve()})
    folders = [*(other / WAL for other in others), *(other / UNMATCHED for other in [*others, root])]
    found: dict[str, ClosedSegment] = {}
    for path in chain.from_iterable(segment_files(folder) for folder in folders if folder.is_dir()):
        source = _RemoteSegment(path.stem, path, due=False, joined=False)
        with suppress(FileNotFoundError):
            source.survey()
            if source.homes:
                found[f"{source.name}:{source.checksum:08x}"] = source
    return found


def keep_unmatched(root: Path, segment: ClosedSegment, homes: Collection[str], parts: LogParts, at_once: int) -> bool:
    """Keep the feedback of a segment that belongs to no impression of the log; returns whether there was any.

    Args:
        root: The folder of the log.
        segment: A segment whose other feedback has been joined.
        homes: Homes that may have unmatched feedback; that on all others has been joined.
        parts: The parts of the log.
        at_once: Largest number of events in memory.
    """
    events = _unmatched(segment, homes, parts, at_once) if homes else iter(())
    first = next(events, None)
    if first is None:
        return False
    durable_folder(root / UNMATCHED)
    with durable_file(root / UNMATCHED / f"{segment.name}.wal") as working, working.open("wb") as file:
        file.writelines(framed(encode(event)) for event in chain([first], events))
    return True


def _unmatched(
    segment: ClosedSegment, homes: Collection[str], parts: LogParts, at_once: int
) -> Iterator[FeedbackRecord]:
    paths = {home: parts.of(home) for home in homes}
    held: dict[str, list[FeedbackRecord]] = {home: [] for home in homes}
    count = 0
    for record in segment.feedback():
        home = segment_of(record.ranking_id)
        if home not in held or not isinstance(record, FeedbackRecord):
            continue
        if not paths[home]:
            yield record
            continue
        held[home].append(record)
        count += 1
        if count == at_once:
            yield from _not_shown(held, paths)
            held, count = {home: [] for home in homes}, 0
    yield from _not_shown(held, paths)


def _not_shown(
    events: Mapping[str, Sequence[FeedbackRecord]], paths: Mapping[str, Sequence[Path]]
) -> Iterator[FeedbackRecord]:
    """Yield the events without an impression in the parts of their home."""
    for home in (home for home, some in events.items() if some):
        shown = np.any([has_impression(read_part(path, KEYS), events[home]) for path in paths[home]], axis=0)
        yield from (event for event, found in zip(events[home], shown, strict=True) if not found)


LOCK = "compact.lock"
EVENTS_AT_ONCE = 250_000
COMPACT_SECONDS = 30.0

logger = logging.getLogger("urank.serve")


@dataclass(frozen=True)
class CompactionStats:
    """Counts of a compaction.

    Attributes:
        segments: Segments that became parts.
        rankings, impressions, clicks, conversions: Contents of these parts.
        late: Events that changed an earlier part.
        repeated: Events that changed nothing.
        unmatched: Events without a ranking or item in this log, which are kept, and orders of the shadow model that
            came too late, which are not. Counted in the log that received them.
        valueless: Values dropped because their rankings were logged without values.
        torn: Bytes of interrupted writes.
        damaged: Unreadable bytes within segments.
        parts: Files written.
        waiting: Remaining segments: open, within the window, or with feedback on such.
    """

    segments: int = 0
    rankings: int = 0
    impressions: int = 0
    clicks: int = 0
    conversions: int = 0
    late: int = 0
    repeated: int = 0
    unmatched: int = 0
    valueless: int = 0
    torn: int = 0
    damaged: int = 0
    parts: int = 0
    waiting: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return asdict(self)


def compact(
    folder: str | Path,
    *,
    also: Sequence[str | Path] = (),
    window_seconds: float = 600.0,
    now: float | None = None,
    report: Report = silent,
) -> CompactionStats | None:
    """Export the closed segments of a feedback log to Parquet, one row for each impression.

    A segment becomes parts when it has been closed for the window, so that most clicks on its rankings have arrived.
    Later feedback is joined to the existing parts. The rows do not depend on when this is called and how often it is
    interrupted. It needs memory for one segment and its feedback. Feedback on rankings of other logs is kept in the
    folder `unmatched`.

    Args:
        folder: The feedback log of a server.
        also: Feedback logs of other servers, which are only read: their feedback on rankings of this log is joined, and
            so is this log's unmatched feedback whose rankings have appeared.
        window_seconds: How long a closed segment waits for clicks; 0 exports all closed segments.
        now: Seconds since 1970; the current time by default.
        report: Progress callback.

    Returns:
        The counts; None if another compaction of this folder is running.

    Raises:
        ConfigError: If a folder is not a feedback log.
        DataError: If a part or its columns cannot be read.
    """
    root = Path(folder)
    if not (root / WAL).is_dir():
        raise ConfigError(f"{folder} is not a feedback log of `urank serve --log`: it has no folder {WAL}")
    others = [Path(each) for each in also]
    for other in others:
        if not ((other / WAL).is_dir() or (other / UNMATCHED).is_dir()):
            raise ConfigError(f"{other} is not a feedback log: it has neither a folder {WAL} nor {UNMATCHED}")
    if not window_seconds >= 0:
        raise ConfigError(f"the window must be at least 0 seconds; got {window_seconds}")
    with exclusive_lock(root / LOCK) as locked:
        if not locked:
            return None
        closed = closed_segments(root / WAL, window_seconds, time.time() if now is None else now)
        return _CompactionRun(root, closed, remote_feedback(root, others), report).run()


class _CompactionRun:
    """One compaction, which counts the fields of `CompactionStats`.

    Args:
        root: The folder.
        closed: Its closed segments.
        remote: Read-only files with feedback, by their name in the metadata of parts.
        report: Progress callback.
    """

    def __init__(
        self, root: Path, closed: Iterable[ClosedSegment], remote: Mapping[str, ClosedSegment], report: Report
    ) -> None:
        self._root = root
        self._parts = LogParts(root)
        self._report = report
        self._counts: Counter[str] = Counter()
        self._done = self._total = 0
        self._segments = {segment.name: segment for segment in closed}
        self._sources = {**self._segments, **remote}  # remote sources last
        self._settled: set[tuple[str, str]] = set()  # (source, home) without unmatched events

    def run(self) -> CompactionStats:
        """Write parts, join late feedback, and remove segments that are not needed any more."""
        tasks = self._tasks()
        self._total = len(tasks)
        for homes in _batches_of_homes({home: self._events_of(home, sources) for home, sources in tasks.items()}):
            about = self._gathered({home: tasks[home] for home in homes})
            for home in homes:
                if self._is_due(home):
                    self._make(self._segments[home], about.pop(home), tasks[home])
                else:
                    self._amend(home, about.pop(home), tasks[home])
                self._step(1)
        self._remove()
        return CompactionStats(**self._counts, waiting=len(segment_files(self._root / WAL)))

    def _tasks(self) -> dict[str, list[str]]:
        """Return the segments whose parts are to be written, oldest first, each with the sources of feedback on it."""
        sources: dict[str, list[str]] = {name: [] for name in self._segments if self._is_due(name)}
        for name, source in self._sources.items():
            for home in filter(self._is_ready, source.homes):
                if home in sources or self._parts.of(home):
                    sources.setdefault(home, []).append(name)
        for home in [home for home in sources if not self._is_due(home)]:
            # Sources that all parts of a home have joined were counted before.
            notes = [read_part_metadata(path).sources for path in self._parts.of(home)]
            sources[home] = [name for name in sources[home] if not all(name in each for each in notes)]
        return {home: sources[home] for home in sorted(sources) if sources[home] or self._is_due(home)}

    def _events_of(self, home: str, sources: Sequence[str]) -> int:
        return sum(self._sources[source].homes[home] for source in sources)

    def _is_due(self, home: str) -> bool:
        return home in self._segments and self._segments[home].due

    def _is_ready(self, home: str) -> bool:
        """Return whether the rankings of a segment are in parts, become parts now, or do not exist."""
        if self._is_due(home):
            return True
        # The folder was listed before feedback was read, so a file may exist without being in that list.
        return not segment_path(self._root, home).exists()

    def _stays(self, segment: ClosedSegment) -> bool:
        """Return whether a segment is needed after this compaction."""
        return not (segment.due or segment.joined) or not all(map(self._is_ready, segment.homes))

    def _gathered(self, wanted: Mapping[str, Collection[str]]) -> dict[str, list[FeedbackOrShadow]]:
        """Return the records that refer to these segments, from the given sources of each."""
        found: dict[str, list[FeedbackOrShadow]] = {home: [] for home in wanted}
        needed = {source for sources in wanted.values() for source in sources}
        for name, source in self._sources.items():
            if name not in needed:
                continue
            homes = {home for home, sources in wanted.items() if name in sources}
            for record in source.feedback():
                home = segment_of(record.ranking_id)
                if home in homes:
                    found[home].append(record)
        return found

    def _make(self, segment: ClosedSegment, about: Sequence[FeedbackOrShadow], sources: Collection[str]) -> None:
        """Write the parts of a segment."""
        rankings, columns = segment.rankings(self._parts.columns)
        events, shadows = _by_kind(about)
        joined: list[JoinedImpressions] = []
        for digest in dict.fromkeys(ranking.columns for ranking in rankings):
            some = [ranking for ranking in rankings if ranking.columns == digest]
            each = join_feedback(log_frame(some, columns[digest]), {}, events)
            path = self._parts.path(segment.name, columns[digest])
            self._write(path, each.frame, PartMetadata(frozenset(sources), each.value_times))
            joined.append(each)
        ids = {ranking.ranking_id for ranking in rankings}
        placed = [shadow for shadow in shadows if shadow.ranking_id in ids]
        logs = [each.frame for each in joined]
        if placed:
            self._write(self._parts.shadow(segment.name), shadow_frame(logs, rankings, placed), PartMetadata())
        self._count_events(segment.name, joined, sources, len(shadows))
        self._counts["unmatched"] += len(shadows) - len(placed) if joined else 0
        self._counts["segments"] += 1
        self._counts["rankings"] += len(rankings)
        self._counts["impressions"] += sum(log.height for log in logs)
        self._counts["clicks"] += sum(int(log["click"].sum()) for log in logs)
        self._counts["conversions"] += sum(int(log["conversion"].sum()) for log in logs)
        self._counts["torn"] += segment.torn
        self._counts["damaged"] += segment.damaged
        segment.path = segment.path.rename(segment.path.with_suffix(JOINED))

    def _amend(self, home: str, about: Sequence[FeedbackOrShadow], sources: Collection[str]) -> None:
        """Join feedback to existing parts of a segment."""
        events, shadows = _by_kind(about)
        paths = self._parts.of(home)
        notes = [read_part_metadata(path) for path in paths]
        joined = [
            join_feedback(read_part(path), note.value_times, events) for path, note in zip(paths, notes, strict=True)
        ]
        shadow = self._parts.shadow(home)
        if shadow.is_file() and any(each.new.any() for each in joined):
            # Before the parts, since what these have joined is not read again.
            self._write(shadow, shadow_clicks(read_part(shadow), [each.frame for each in joined]), PartMetadata())
        must_note = any(source not in self._segments or self._stays(self._segments[source]) for source in sources)
        for path, note, each in zip(paths, notes, joined, strict=True):
            if must_note or each.new.any() or each.value_times != note.value_times:
                self._write(path, each.frame, PartMetadata(note.sources.union(sources), each.value_times))
        self._counts["late"] += self._count_events(home, joined, sources, len(shadows))
        self._counts["unmatched"] += len(shadows)

    def _count_events(
        self, home: str, joined: Sequence[JoinedImpressions], sources: Collection[str], shadows: int
    ) -> int:
        """Count the events of a home, each of which belongs to one of its parts or to none; returns the new ones."""
        if not joined:  # without parts they are counted when their segment is removed
            return 0
        found = np.any([each.found for each in joined], axis=0)
        changed = np.any([each.new for each in joined], axis=0)
        self._counts["repeated"] += int((found & ~changed).sum())
        self._counts["valueless"] += sum(each.valueless for each in joined)
        own = [source for source in sources if source in self._segments]
        lost = ~found[: self._events_of(home, own) - shadows]  # remote ones come last, and are counted there
        self._counts["unmatched"] += int(lost.sum())
        if not lost.any():
            self._settled.update((source, home) for source in own)
        return int(changed.sum())

    def _write(self, path: Path, frame: pl.DataFrame, metadata: PartMetadata) -> None:
        write_part(path, frame, metadata)
        self._counts["parts"] += 1
        self._step(0)

    def _step(self, homes: int) -> None:
        self._done += homes
        self._report("joining", self._done, self._total)

    def _remove(self) -> None:
        """Remove segments whose content is durable elsewhere, and keep unmatched feedback."""
        sync_folder(self._root / WAL)  # renames to .joined must be durable before feedback is removed
        gone = [segment for segment in self._segments.values() if not self._stays(segment)]
        for number, segment in enumerate(gone):
            nowhere = [count for home, count in segment.homes.items() if not self._parts.of(home)]
            self._counts["unmatched"] += sum(nowhere)
            open_homes = {home for home in segment.homes if (segment.name, home) not in self._settled}
            if keep_unmatched(self._root, segment, open_homes, self._parts, EVENTS_AT_ONCE):
                self._report("removing", number, len(gone))
            segment.path.unlink()
            self._report("removing", number + 1, len(gone))
        sync_folder(self._root / WAL)


def _by_kind(about: Sequence[FeedbackOrShadow]) -> tuple[list[FeedbackRecord], list[ShadowRecord]]:
    feedback = [record for record in about if isinstance(record, FeedbackRecord)]
    return feedback, [record for record in about if isinstance(record, ShadowRecord)]


def _batches_of_homes(events: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield groups of homes, each with at most `EVENTS_AT_ONCE` events or a single home."""
    portion: list[str] = []
    held = 0
    for home, count in events.items():
        if portion and held + count > EVENTS_AT_ONCE:
            yield portion
            portion, held = [], 0
        portion.append(home)
        held += count
    if portion:
        yield portion


class CompactionTask:
    """Runs a compaction regularly, in a separate process that takes no time from requests.

    Args:
        folder: The feedback log.
        join_seconds: How long a closed segment waits for clicks.
    """

    def __init__(self, folder: Path, join_seconds: float) -> None:
        self.folder = folder
        self.join_seconds = join_seconds
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Run until cancelled."""
        command = (sys.executable, "-m", __name__, str(self.folder), f"{self.join_seconds:g}")
        while True:
            await asyncio.sleep(COMPACT_SECONDS)
            if not self.is_due():
                continue
            try:
                self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
                if await self._process.wait():
                    logger.warning("the feedback log was not exported to Parquet; see the line above")
            except OSError as error:  # out of memory or processes: the next attempt may succeed
                logger.warning("the feedback log was not exported to Parquet: %s", error.strerror)

    async def stop(self) -> None:
        """Terminate a running compaction, which is safe at any time."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()

    def is_due(self) -> bool:
        """Return whether a segment has not been written to for `join_seconds`."""
        before = time.time() - self.join_seconds
        with suppress(FileNotFoundError):  # another compaction has just removed it
            return any(path.stat().st_mtime <= before for path in (self.folder / WAL).glob("*.*"))
        return True


def _main(folder: str, seconds: str) -> None:
    try:
        if compact(folder, window_seconds=float(seconds)) is None:
            raise ConfigError(f"{folder} is being exported by another process")
    except UrankError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    _main(*sys.argv[1:])
