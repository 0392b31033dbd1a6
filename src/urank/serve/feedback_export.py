"""Turn write-ahead files into a log: each sealed segment into a part, with the feedback on it from all segments.

It keeps no state but the files, and may be killed at any instant: a file goes only when all that it holds is on the
disk elsewhere, and joining the same feedback again changes nothing. A segment goes through three states:

    wal/SEGMENT.wal       its rankings are nowhere else
    wal/SEGMENT.joined    its rankings are parts; kept for feedback on rankings of segments that are no parts yet
    gone                  all that it held is in parts, or in unmatched/SEGMENT.wal when its ranking is not here
"""

from __future__ import annotations

import base64
import json
import os
import re
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

from urank.errors import ConfigError, DataError
from urank.progress import Report, silent
from urank.serve.feedback_store import (
    SEGMENT,
    WAL,
    Columns,
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
    is_sealed,
    kind_of,
    segment_of,
    segment_path,
    sync_folder,
)

__all__ = [
    "JOINED",
    "KEYS",
    "UNMATCHED",
    "About",
    "ClosedSegment",
    "CompactionStats",
    "Joined",
    "PartMetadata",
    "Parts",
    "are_shown",
    "compact",
    "durable_file",
    "heard_elsewhere",
    "join_feedback",
    "keep_unmatched",
    "log_frame",
    "read_notes",
    "read_part",
    "sealed_segments",
    "segment_files",
    "shadow_agreement",
    "shadow_clicks",
    "shadow_frame",
    "write_part",
]

JOINED = ".joined"
"""How the file of a segment ends whose rankings are parts."""

_SEGMENT = re.compile(SEGMENT)
_OWN = (RecordKind.columns, RecordKind.ranking)

About = FeedbackRecord | ShadowRecord


@dataclass
class ClosedSegment:
    """A segment that nobody writes to.

    Attributes:
        due: whether its rankings become parts now.
        joined: whether they are parts.
        homes: segment -> how many records here are about rankings of that segment.
        checksum: of these records, in their order.
        torn: bytes at the end that are no record.
        damaged: bytes before that, of no record or of one that says nothing.
    """

    name: str
    path: Path
    due: bool
    joined: bool
    homes: Counter[str] = field(default_factory=Counter)
    checksum: int = 0
    torn: int = 0
    damaged: int = 0

    def about(self) -> Iterator[About]:
        """Feedback and the orders of a silent model."""
        for payload in SegmentReader(self.path):
            if kind_of(payload) not in _OWN:
                try:
                    record = decode(payload)
                except DataError:
                    continue
                if isinstance(record, FeedbackRecord | ShadowRecord):
                    yield record

    def own(self) -> Iterator[Columns | RankingRecord]:
        """Its rankings, each after its columns; what says nothing counts as damaged."""
        for payload in SegmentReader(self.path):
            if kind_of(payload) in _OWN:
                try:
                    record = decode(payload)
                except DataError:
                    self.damaged += len(payload)
                    continue
                if isinstance(record, Columns | RankingRecord):
                    yield record

    def rankings(self, known: Callable[[str], Columns | None]) -> tuple[list[RankingRecord], dict[str, Columns]]:
        """Its rankings, each once, and the columns of each set; what does not belong here counts as damaged.

        Args:
            known: the columns of a digest, if they are told elsewhere too.
        """
        rankings: dict[str, RankingRecord] = {}
        columns: dict[str, Columns] = {}
        for record in self.own():
            if isinstance(record, Columns):
                columns[record.digest] = record
                continue
            if record.columns not in columns and (told := known(record.columns)) is not None:
                columns[record.columns] = told  # what told them here is damaged
            fits = record.columns in columns and record.fits(columns[record.columns])
            if fits and segment_of(record.ranking_id) == self.name:
                rankings.setdefault(record.ranking_id, record)
            else:
                self.damaged += len(encode(record))
        return list(rankings.values()), columns

    def survey(self) -> None:
        """Read it once, to learn of whom it holds feedback and what of it cannot be read."""
        reader = SegmentReader(self.path)
        for payload in reader:
            if kind_of(payload) in _OWN:  # rankings take time, and are not needed before they are due
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
    """The files of a folder that are segments, written to or not, oldest first."""
    paths = [path for path in wal.iterdir() if path.suffix in (".wal", JOINED)]
    return sorted(path for path in paths if _SEGMENT.fullmatch(path.stem))


def sealed_segments(wal: Path, window: float, now: float) -> Iterator[ClosedSegment]:
    """The segments of a folder that nobody writes to, oldest first; due are those that were sealed a window ago."""
    for path in segment_files(wal):
        joined = path.suffix == JOINED
        if not (joined or is_sealed(path)):
            continue
        due = not joined and (window == 0 or now - path.stat().st_mtime >= window)
        segment = ClosedSegment(path.stem, path, due, joined)
        segment.survey()
        yield segment


KEYS = ["session_id", "item_id"]
"""The columns that tell an impression from the others."""

_SHADOW = ("query_id", *KEYS, "position", "shadow_position", "click", "model", "shadow_model", "timestamp")
_TIME = pl.Datetime("us", "UTC")

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def log_frame(rankings: Sequence[RankingRecord], columns: Columns) -> pl.DataFrame:
    """One row for each item shown, none of them clicked; all rankings must fit the columns."""
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
class Joined:
    """Impressions with feedback joined to them.

    Attributes:
        frame: the impressions.
        value_times: row -> when its value was told by feedback, in microseconds; other rows have that of the ranking.
        found: `[events]`, whether there is an impression that the event is of.
        new: `[events]`, whether it said anything that was not known before.
        valueless: how many told a value where the log has none, which is left out.
    """

    frame: pl.DataFrame
    value_times: Mapping[int, int]
    found: Bools
    new: Bools
    valueless: int


def join_feedback(frame: pl.DataFrame, value_times: Mapping[int, int], events: Sequence[FeedbackRecord]) -> Joined:
    """Join feedback to impressions, which may have had some before.

    A click or a conversion that was told stays. Of the values told, the one of the latest time counts; of one time, the
    largest. So the result is the same in whatever order events come, and however often.

    Args:
        frame: impressions, as `log_frame` makes them.
        value_times: of feedback that was joined before.
        events: what became of them; also of others.
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
        told = np.float32(event.value)
        if row not in times or (event.time_us, told) >= (times[row], value[row]):
            new[place] |= told != value[row]
            value[row], times[row] = told, event.time_us
    changed = [pl.Series("click", click), pl.Series("conversion", conversion)]
    valueless = 0
    if value is None:
        valueless = sum(events[place].value is not None for place in matched)
    else:
        changed.append(pl.Series("value", value))
    return Joined(frame.with_columns(changed), times, rows >= 0, new, valueless)


def are_shown(frame: pl.DataFrame, events: Sequence[FeedbackRecord]) -> Bools:
    """Whether there is an impression that each event is of; the frame needs no columns but `KEYS`."""
    return _rows_of(frame, events) >= 0


def _rows_of(frame: pl.DataFrame, events: Sequence[FeedbackRecord]) -> Ints:
    """The row of the impression that each event is of; −1 for none."""
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
    """What was shown beside what a silent model would have shown: a row for each item that either placed.

    Args:
        logs: the impressions.
        rankings: those that they are of.
        shadows: orders of the silent model; of two for one ranking the first counts, and those of others are left out.
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
    silent = pl.DataFrame(
        {
            "session_id": pl.Series(list(orders), dtype=pl.String).gather(np.repeat(np.arange(len(orders)), counts)),
            "item_id": list(chain.from_iterable(shadow.items for shadow in orders.values())),
            "shadow_position": pl.Series([k for count in counts for k in range(1, count + 1)], dtype=pl.Int32),
        }
    )
    shown = pl.concat(log.select(*KEYS, "position", "click") for log in logs)
    both = shown.join(heads, on="session_id", how="semi").join(silent, on=KEYS, how="full", coalesce=True)
    return (
        both.join(heads, on="session_id").sort("order", "position", "shadow_position", nulls_last=True).select(_SHADOW)
    )


def shadow_clicks(shadow: pl.DataFrame, logs: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The same with the clicks of the impressions as they are now; an item that was not shown has none."""
    clicks = pl.concat(log.select(*KEYS, "click") for log in logs)
    return shadow.drop("click").join(clicks, on=KEYS, how="left", maintain_order="left").select(_SHADOW)


COLUMNS = "columns.json"
SHADOW = "shadow"

_FORMAT = "urank feedback log"
_LOG = re.compile(r"log(?:-([1-9]\d*))?")
_SOURCES, _TIMES = b"urank.sources", b"urank.value_times"


@dataclass(frozen=True)
class PartMetadata:
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


def write_part(path: Path, frame: pl.DataFrame, notes: PartMetadata) -> None:
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


def read_notes(path: Path) -> PartMetadata:
    """The notes of a part."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        pairs = np.frombuffer(base64.b64decode(metadata.get(_TIMES, b"")), dtype="<i8").reshape(-1, 2)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path) from error
    sources = metadata.get(_SOURCES, b"").decode("ascii", "replace").split()
    return PartMetadata(frozenset(sources), dict(pairs.tolist()))


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


UNMATCHED = "unmatched"
"""The folder of feedback on rankings that are not in this log."""


class _Elsewhere(ClosedSegment):
    """A file that is only read. Its owner may remove it at any time, and then has put what counts somewhere else."""

    def about(self) -> Iterator[About]:
        """Feedback; what a silent model would have shown is no concern of others."""
        with suppress(FileNotFoundError):
            for record in super().about():
                if isinstance(record, FeedbackRecord):
                    yield record


def heard_elsewhere(root: Path, also: Collection[Path]) -> dict[str, ClosedSegment]:
    """What may hold feedback on rankings of a log beside its own write-ahead files: those of others, and unmatched.

    Without others there is nothing: what the log itself did not match is not read each time.

    Args:
        root: the folder of the log.
        also: those of others; it may be among them.

    Returns:
        the files by what parts remember them by: segment and checksum of the feedback, so that one which has grown, as
        the copy of a file that was still written to does, is looked at again.
    """
    if not also:
        return {}
    # Write-ahead files first: what moves from there to `unmatched` meanwhile is seen at least once.
    others = sorted({folder.resolve() for folder in also} - {root.resolve()})
    folders = [*(other / WAL for other in others), *(other / UNMATCHED for other in [*others, root])]
    found: dict[str, ClosedSegment] = {}
    for path in chain.from_iterable(segment_files(folder) for folder in folders if folder.is_dir()):
        source = _Elsewhere(path.stem, path, due=False, joined=False)
        with suppress(FileNotFoundError):
            source.survey()
            if source.homes:
                found[f"{source.name}:{source.checksum:08x}"] = source
    return found


def keep_unmatched(root: Path, segment: ClosedSegment, homes: Collection[str], parts: Parts, at_once: int) -> bool:
    """Write down the feedback of a segment that is on no impression of the log; whether there was any.

    Args:
        root: the folder of the log.
        segment: all of whose feedback that can be joined is joined.
        homes: the segments of the rankings that it may be on; on those of others, all is known to be joined.
        parts: of the log.
        at_once: how many events may be held in memory.
    """
    events = _unmatched(segment, homes, parts, at_once) if homes else iter(())
    first = next(events, None)
    if first is None:
        return False
    durable_folder(root / UNMATCHED)
    with durable_file(root / UNMATCHED / f"{segment.name}.wal") as working, working.open("wb") as file:
        file.writelines(framed(encode(event)) for event in chain([first], events))
    return True


def _unmatched(segment: ClosedSegment, homes: Collection[str], parts: Parts, at_once: int) -> Iterator[FeedbackRecord]:
    paths = {home: parts.of(home) for home in homes}
    held: dict[str, list[FeedbackRecord]] = {home: [] for home in homes}
    count = 0
    for record in segment.about():
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
    """The events that are on no impression of the parts of their home."""
    for home in (home for home, some in events.items() if some):
        shown = np.any([are_shown(read_part(path, KEYS), events[home]) for path in paths[home]], axis=0)
        yield from (event for event, found in zip(events[home], shown, strict=True) if not found)


LOCK = "compact.lock"
EVENTS_AT_ONCE = 250_000


@dataclass(frozen=True)
class CompactionStats:
    """What a compaction found and did.

    Attributes:
        segments: that became parts.
        rankings, impressions, clicks, conversions: in these parts.
        late: events that told something new of rankings whose part was there before.
        repeated: events that told nothing new.
        unmatched: events of which there is no such ranking or item here, which are kept, and orders of a silent model
            that came too late, which are not. Counted where they were heard of.
        valueless: values that were told of rankings without values, and left out.
        torn: bytes of writes that were cut off.
        damaged: bytes within segments that were unreadable.
        parts: files written.
        waiting: segments that are left: still written to, within the window, or with feedback on such.
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
        """As JSON has it."""
        return asdict(self)


def compact(
    folder: str | Path,
    *,
    also: Sequence[str | Path] = (),
    window_seconds: float = 600.0,
    now: float | None = None,
    report: Report = silent,
) -> CompactionStats | None:
    """Turn the sealed segments of a feedback log into Parquet, one row for each impression.

    A segment becomes parts when it has been sealed for as long as the window, so that most clicks on its rankings are
    there. Feedback that comes later is joined to the parts that are there. Rows are the same whenever this is called,
    and however often it is interrupted. It needs memory for one segment and its feedback. Feedback on rankings that are
    not here is kept in the folder `unmatched`, for that of the server which has them.

    Args:
        folder: that a server logs to.
        also: folders of other servers, which are only read: what they heard of rankings of this one is joined, and so
            is what this one kept as unmatched, if its ranking is here now.
        window_seconds: how long a sealed segment waits for clicks; 0 takes all that is sealed.
        now: seconds since 1970; the current time when left out.
        report: told after each step that lasts.

    Returns:
        what was found; none when another compaction of this folder is under way.

    Raises:
        ConfigError: when the folder, or one of the others, is no feedback log.
        DataError: when a part, or what tells its columns, cannot be read.
    """
    root = Path(folder)
    if not (root / WAL).is_dir():
        raise ConfigError(f"{folder} is not a feedback log, as `urank serve --log` keeps it: it has no folder {WAL}")
    others = [Path(each) for each in also]
    for other in others:
        if not ((other / WAL).is_dir() or (other / UNMATCHED).is_dir()):
            raise ConfigError(f"{other} is not a feedback log: it has neither a folder {WAL} nor {UNMATCHED}")
    if not window_seconds >= 0:
        raise ConfigError(f"the window must be seconds from 0 up; got {window_seconds}")
    with exclusive_lock(root / LOCK) as nobody_else:
        if not nobody_else:
            return None
        sealed = sealed_segments(root / WAL, window_seconds, time.time() if now is None else now)
        return _Compacting(root, sealed, heard_elsewhere(root, others), report).run()


class _Compacting:
    """One compaction; its counts are those of `Compaction`.

    Args:
        root: the folder.
        sealed: its segments that nobody writes to.
        elsewhere: files of feedback that are only read, by the names that parts remember them by.
        report: told after each step.
    """

    def __init__(
        self, root: Path, sealed: Iterable[ClosedSegment], elsewhere: Mapping[str, ClosedSegment], report: Report
    ) -> None:
        self._root = root
        self._parts = Parts(root)
        self._report = report
        self._counts: Counter[str] = Counter()
        self._done = self._total = 0
        self._segments = {segment.name: segment for segment in sealed}
        self._sources = {**self._segments, **elsewhere}  # what is heard elsewhere comes last
        self._settled: set[tuple[str, str]] = set()  # (source, home) of which no event is unmatched

    def run(self) -> CompactionStats:
        """Make parts, join late feedback, remove what is not needed any more."""
        tasks = self._tasks()
        self._total = len(tasks)
        for homes in _portions({home: self._events_of(home, sources) for home, sources in tasks.items()}):
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
        """The segments whose parts are to be written, each with the segments that hold feedback on it; oldest first."""
        sources: dict[str, list[str]] = {name: [] for name in self._segments if self._is_due(name)}
        for name, source in self._sources.items():
            for home in filter(self._is_ready, source.homes):
                if home in sources or self._parts.of(home):
                    sources.setdefault(home, []).append(name)
        for home in [home for home in sources if not self._is_due(home)]:
            # What all parts of a home have joined before was counted then.
            notes = [read_notes(path).sources for path in self._parts.of(home)]
            sources[home] = [name for name in sources[home] if not all(name in each for each in notes)]
        return {home: sources[home] for home in sorted(sources) if sources[home] or self._is_due(home)}

    def _events_of(self, home: str, sources: Sequence[str]) -> int:
        return sum(self._sources[source].homes[home] for source in sources)

    def _is_due(self, home: str) -> bool:
        return home in self._segments and self._segments[home].due

    def _is_ready(self, home: str) -> bool:
        """Whether the rankings of a segment are parts, become parts now, or are nowhere."""
        if self._is_due(home):
            return True
        # The folder was listed before feedback was read, so a file that is not in that list may be there all the same.
        return not segment_path(self._root, home).exists()

    def _stays(self, segment: ClosedSegment) -> bool:
        """Whether a segment is needed after this compaction."""
        return not (segment.due or segment.joined) or not all(map(self._is_ready, segment.homes))

    def _gathered(self, wanted: Mapping[str, Collection[str]]) -> dict[str, list[About]]:
        """The records about rankings of these segments, from the sources that are wanted for each."""
        found: dict[str, list[About]] = {home: [] for home in wanted}
        needed = {source for sources in wanted.values() for source in sources}
        for name, source in self._sources.items():
            if name not in needed:
                continue
            homes = {home for home, sources in wanted.items() if name in sources}
            for record in source.about():
                home = segment_of(record.ranking_id)
                if home in homes:
                    found[home].append(record)
        return found

    def _make(self, segment: ClosedSegment, about: Sequence[About], sources: Collection[str]) -> None:
        """Turn a segment into its parts."""
        rankings, columns = segment.rankings(self._parts.columns)
        events, shadows = _by_kind(about)
        joined: list[Joined] = []
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

    def _amend(self, home: str, about: Sequence[About], sources: Collection[str]) -> None:
        """Join feedback to the parts that a segment has."""
        events, shadows = _by_kind(about)
        paths = self._parts.of(home)
        notes = [read_notes(path) for path in paths]
        joined = [
            join_feedback(read_part(path), note.value_times, events) for path, note in zip(paths, notes, strict=True)
        ]
        shadow = self._parts.shadow(home)
        if shadow.is_file() and any(each.new.any() for each in joined):
            # Before the others, for what these have joined is not looked at again.
            self._write(shadow, shadow_clicks(read_part(shadow), [each.frame for each in joined]), PartMetadata())
        must_note = any(source not in self._segments or self._stays(self._segments[source]) for source in sources)
        for path, note, each in zip(paths, notes, joined, strict=True):
            if must_note or each.new.any() or each.value_times != note.value_times:
                self._write(path, each.frame, PartMetadata(note.sources.union(sources), each.value_times))
        self._counts["late"] += self._count_events(home, joined, sources, len(shadows))
        self._counts["unmatched"] += len(shadows)

    def _count_events(self, home: str, joined: Sequence[Joined], sources: Collection[str], shadows: int) -> int:
        """Count the events of a home, each of which is found in one of its parts or in none; returns the new ones."""
        if not joined:  # without parts they are counted when their segment goes
            return 0
        found = np.any([each.found for each in joined], axis=0)
        told = np.any([each.new for each in joined], axis=0)
        self._counts["repeated"] += int((found & ~told).sum())
        self._counts["valueless"] += sum(each.valueless for each in joined)
        own = [source for source in sources if source in self._segments]
        lost = ~found[: self._events_of(home, own) - shadows]  # those of others come last, and were counted there
        self._counts["unmatched"] += int(lost.sum())
        if not lost.any():
            self._settled.update((source, home) for source in own)
        return int(told.sum())

    def _write(self, path: Path, frame: pl.DataFrame, notes: PartMetadata) -> None:
        write_part(path, frame, notes)
        self._counts["parts"] += 1
        self._step(0)

    def _step(self, homes: int) -> None:
        self._done += homes
        self._report("joining", self._done, self._total)

    def _remove(self) -> None:
        """Remove the segments of which all is elsewhere, and keep what was not joined."""
        sync_folder(self._root / WAL)  # that it is joined must be known to last before what was joined goes
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


def _by_kind(about: Sequence[About]) -> tuple[list[FeedbackRecord], list[ShadowRecord]]:
    feedback = [record for record in about if isinstance(record, FeedbackRecord)]
    return feedback, [record for record in about if isinstance(record, ShadowRecord)]


def _portions(events: Mapping[str, int]) -> Iterator[list[str]]:
    """Homes in portions, each with as many events as are held at once, or a single home."""
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
