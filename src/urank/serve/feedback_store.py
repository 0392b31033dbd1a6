"""The write-ahead log of rankings and feedback: records, segment files, and the writer.

A worker appends records to a segment, `wal/SEGMENT.wal`, which it holds by a file lock. A record is framed by a magic
number, its length and a checksum. Its payload is a kind, a JSON head, and the arrays of a ranking. The id of a ranking
begins with its segment, its home, so that feedback finds it whichever worker receives it.
`urank.serve.feedback_export` joins closed segments into Parquet.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
import struct
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.columns import MAX_POSITION

SEGMENT = "^[0-9a-f]{12}-[0-9a-f]{6}$"
"""Name of a segment: milliseconds since 1970, and random digits."""
RANKING_ID = "^[0-9a-f]{12}-[0-9a-f]{6}-[0-9a-f]{12}$"
"""Id of a ranking: the segment that contains it, its home, and random digits."""

OWN_COLUMNS = (
    *("query_id", "session_id", "item_id", "position", "click", "conversion", "value", "policy"),
    *("propensity", "ranked_position", "user_id", "arm", "timestamp"),
)
"""Columns of a feedback log that are not features."""

_RANKING_ID = re.compile(RANKING_ID)
_SEGMENT_LENGTH = 12 + 1 + 6
_LAST_TIME = 253_402_300_799_999_999  # the last microsecond of the year 9999
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class FeedbackColumns:
    """The columns of rankings that vary: features, values, and those of exploration.

    >>> FeedbackColumns(("price",), ("brand",), value=False, explored=False).digest
    '738e29717a7b'
    """

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    value: bool
    explored: bool

    def __post_init__(self) -> None:
        names = [*self.numeric, *self.categorical]
        for name in names:
            if name in OWN_COLUMNS:
                raise DataError(f"a feature must not have the name of a column of the feedback log; got '{name}'")
        if len(set(names)) < len(names):
            raise DataError(f"features must have unique names; got {', '.join(names)}")

    @cached_property
    def digest(self) -> str:
        """Id of this set of columns in rankings."""
        return sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        lists = {"numeric": list(self.numeric), "categorical": list(self.categorical)}
        return {**lists, "value": self.value, "explored": self.explored}


@dataclass(frozen=True, slots=True, eq=False)
class RankingRecord:
    """A list as it was shown."""

    ranking_id: str  # its id, which begins with its segment
    query_id: str  # query_id, user_id, arm: those of the request
    user_id: str | None
    arm: str | None
    policy: str  # logging policy
    model: str  # version of the model
    columns: str  # digest of its columns
    time_us: int  # microseconds since 1970
    items: tuple[str, ...]  # the items at positions 1 to m
    numeric: Floats  # `[m, F]`, NaN if missing
    categorical: tuple[tuple[str | None, ...], ...]  # m rows of C texts, None if missing
    value: Floats | None = None  # `[m]`, the value of a click
    propensity: Doubles | None = None  # `[m]`, the probability of the item to be at its position
    ranked_position: tuple[int, ...] | None = None  # m positions before exploration

    def __post_init__(self) -> None:
        _check_origin(self.ranking_id, self.time_us)
        _check_items(self.items)
        count = len(self.items)
        _check_array("numeric", self.numeric, np.float32, (count, self.numeric.shape[-1]))
        if np.isinf(self.numeric).any():
            raise DataError(f"numeric must be finite or missing in ranking {self.ranking_id}; got an infinite number")
        widths = set(map(len, self.categorical))
        if len(self.categorical) != count or len(widths) > 1:
            raise DataError(f"categorical must have a row of one length for each of {count} items")
        if self.value is not None:
            _check_array("value", self.value, np.float32, (count,))
            if not ((self.value >= 0) & (self.value <= _FLOAT32_MAX)).all():
                raise DataError(f"value must be finite and at least 0 in ranking {self.ranking_id}")
        if self.propensity is not None:
            _check_array("propensity", self.propensity, np.float64, (count,))
            if not ((self.propensity > 0) & (self.propensity <= 1)).all():
                raise DataError(f"propensity must be above 0 and at most 1 in ranking {self.ranking_id}")
        ranked = self.ranked_position
        if (ranked is None) != (self.propensity is None) or (ranked is not None and len(ranked) != count):
            raise DataError(f"ranked_position must come with propensity, one for each of {count} items")
        if ranked is not None and not all(1 <= position <= MAX_POSITION for position in ranked):
            raise DataError(f"ranked_position must be from 1 to {MAX_POSITION} in ranking {self.ranking_id}")

    def fits(self, columns: FeedbackColumns) -> bool:
        """Return whether it has exactly these columns."""
        return (
            self.numeric.shape[1] == len(columns.numeric)
            and len(self.categorical[0]) == len(columns.categorical)
            and (self.value is not None) == columns.value
            and (self.propensity is not None) == columns.explored
        )


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """Feedback on an item of a ranking: click, conversion, and actual value."""

    ranking_id: str
    item_id: str
    click: bool
    conversion: bool
    value: float | None
    time_us: int

    def __post_init__(self) -> None:
        _check_origin(self.ranking_id, self.time_us)
        if self.value is not None and not 0 <= self.value <= _FLOAT32_MAX:
            raise DataError(f"value must be a finite number of at least 0; got {self.value} for item {self.item_id}")


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """The order of the shadow model, best first."""

    ranking_id: str
    model: str
    time_us: int
    items: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_origin(self.ranking_id, self.time_us)
        _check_items(self.items)


Record = FeedbackColumns | RankingRecord | FeedbackRecord | ShadowRecord


def new_segment(now_ms: int) -> str:
    """Return the name of a new segment at this time, in milliseconds since 1970."""
    return f"{now_ms:012x}-{secrets.token_hex(3)}"


def new_ranking_id(segment: str) -> str:
    """Return an id for a ranking that is written to this segment."""
    return f"{segment}-{secrets.token_hex(6)}"


def segment_of(ranking_id: str) -> str:
    """Return the home of a ranking: the segment that contains it.

    >>> segment_of("0192f3a4b5c6-3f9a1c-00112233aabb")
    '0192f3a4b5c6-3f9a1c'
    """
    if not _RANKING_ID.fullmatch(ranking_id):
        raise DataError(f"ranking_id must be an id of a server; got '{ranking_id[:60]}'")
    return ranking_id[:_SEGMENT_LENGTH]


def _check_origin(ranking_id: str, time_us: int) -> None:
    segment_of(ranking_id)
    if not 0 <= time_us <= _LAST_TIME:
        raise DataError(f"time_us must be microseconds since 1970, before the year 10000; got {time_us}")


def _check_items(items: Sequence[str]) -> None:
    if not 1 <= len(items) <= MAX_POSITION:
        raise DataError(f"a list must have from 1 to {MAX_POSITION} items; got {len(items)}")
    if len(set(items)) < len(items):
        raise DataError("an item must occur once in a list; got one twice")


def _check_array(name: str, array: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        wanted = f"{np.dtype(dtype).name} of shape {list(shape)}"
        raise DataError(f"{name} must be {wanted}; got {array.dtype.name} of shape {list(array.shape)}")


_HEAD = struct.Struct("<BI")
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class RecordKind(IntEnum):
    """The first byte of a payload."""

    columns = 1
    ranking = 2
    feedback = 3
    shadow = 4


def encode(record: Record) -> bytes:
    """Return the payload of a record.

    Raises:
        DataError: If a text contains a lone surrogate, which UTF-8 cannot encode.
    """
    match record:
        case RankingRecord():
            kind, head, arrays = RecordKind.ranking, _ranking_head(record), _arrays(record)
        case FeedbackRecord():
            kind, arrays = RecordKind.feedback, b""
            head = {"id": record.ranking_id, "item": record.item_id, "click": record.click}
            head |= {"conversion": record.conversion, "value": record.value, "time": record.time_us}
        case ShadowRecord():
            kind, arrays = RecordKind.shadow, b""
            head = {"id": record.ranking_id, "model": record.model, "time": record.time_us, "items": record.items}
        case FeedbackColumns():
            kind, head, arrays = RecordKind.columns, record.to_dict(), b""
    try:
        text = _to_json(head).encode()
    except ValueError as error:
        raise DataError(f"a {kind.name} record must contain valid Unicode and finite numbers: {error}") from error
    return _HEAD.pack(kind, len(text)) + text + arrays


def _ranking_head(record: RankingRecord) -> dict[str, Any]:
    return {
        "id": record.ranking_id,
        "query": record.query_id,
        "user": record.user_id,
        "arm": record.arm,
        "policy": record.policy,
        "model": record.model,
        "columns": record.columns,
        "time": record.time_us,
        "items": record.items,
        "features": record.numeric.shape[1],
        "categorical": record.categorical,
        "value": record.value is not None,
        "ranked": record.ranked_position,
    }


def _arrays(record: RankingRecord) -> bytes:
    parts = [record.numeric.astype("<f4", copy=False).tobytes()]
    if record.value is not None:
        parts.append(record.value.astype("<f4", copy=False).tobytes())
    if record.propensity is not None:
        parts.append(record.propensity.astype("<f8", copy=False).tobytes())
    return b"".join(parts)


def kind_of(payload: bytes) -> int:
    """Return the kind of a payload by its first byte; 0 if it is empty."""
    return payload[0] if payload else 0


def decode(payload: bytes) -> Record:
    """Return the record of a payload.

    Raises:
        DataError: If it is anything but a result of `encode`.
    """
    try:
        return _decode(payload)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise DataError(f"a record must be as a server wrote it; got {type(error).__name__}: {error}") from error


def _decode(payload: bytes) -> Record:
    kind, length = _HEAD.unpack_from(payload)
    start = _HEAD.size + length
    text, arrays = payload[_HEAD.size : start], memoryview(payload)[start:]
    if len(text) < length:
        raise DataError(f"the head of a record must have {length} bytes; got {len(text)}")
    head = json.loads(text.decode())
    if not isinstance(head, dict):
        raise DataError("the head of a record must be a JSON object")
    if b"\\ud" in text.lower():  # perhaps a lone surrogate, written as an escape
        _to_json(head).encode()
    if kind == RecordKind.ranking:
        return _ranking(head, arrays)
    if len(arrays):
        raise DataError(f"a record of kind {kind} must end with its head; got {len(arrays)} bytes more")
    match kind:
        case RecordKind.feedback:
            value = head["value"]
            if value is not None and type(value) not in (int, float):
                raise DataError("value must be a number")
            number = None if value is None else float(value)
            flags = _flag(head, "click"), _flag(head, "conversion")
            return FeedbackRecord(_text(head, "id"), _text(head, "item"), *flags, number, _whole(head["time"]))
        case RecordKind.shadow:
            items = _texts(head["items"], "items")
            return ShadowRecord(_text(head, "id"), _text(head, "model"), _whole(head["time"]), items)
        case RecordKind.columns:
            return columns_from(head)
    raise DataError(f"a record must be of a kind from 1 to {len(RecordKind)}; got {kind}")


def columns_from(head: Mapping[str, Any]) -> FeedbackColumns:
    """Return the columns of a `FeedbackColumns.to_dict`.

    Raises:
        DataError: If it is anything else.
    """
    try:
        names = _texts(head["numeric"], "numeric"), _texts(head["categorical"], "categorical")
        return FeedbackColumns(*names, value=_flag(head, "value"), explored=_flag(head, "explored"))
    except (LookupError, TypeError) as error:
        raise DataError(f"columns must be as a server wrote them; got {str(head)[:100]}") from error


def _ranking(head: Mapping[str, Any], arrays: memoryview) -> RankingRecord:
    items = _texts(head["items"], "items")
    count, features = len(items), _whole(head["features"])
    ranked = head["ranked"]
    taken = 4 * count * features, 4 * count * _flag(head, "value"), 8 * count * (ranked is not None)
    if features < 0 or sum(taken) != len(arrays):
        raise DataError(f"the arrays of a ranking must have {sum(taken)} bytes; got {len(arrays)}")
    numeric, value, propensity = (
        np.frombuffer(arrays[sum(taken[:place]) :][: taken[place]], dtype=dtype)
        for place, dtype in enumerate(("<f4", "<f4", "<f8"))
    )
    return RankingRecord(
        ranking_id=_text(head, "id"),
        query_id=_text(head, "query"),
        user_id=None if head["user"] is None else _text(head, "user"),
        arm=None if head["arm"] is None else _text(head, "arm"),
        policy=_text(head, "policy"),
        model=_text(head, "model"),
        columns=_text(head, "columns"),
        time_us=_whole(head["time"]),
        items=items,
        numeric=numeric.astype(np.float32, copy=False).reshape(count, features),
        categorical=tuple(_texts(row, "categorical", missing=True) for row in head["categorical"]),
        value=value.astype(np.float32, copy=False) if taken[1] else None,
        propensity=propensity.astype(np.float64, copy=False) if taken[2] else None,
        ranked_position=None if ranked is None else tuple(_whole(position) for position in ranked),
    )


def _text(head: Mapping[str, Any], key: str) -> str:
    if type(head[key]) is not str:
        raise DataError(f"{key} must be text; got {head[key]!r}")
    return str(head[key])


def _texts(values: Any, key: str, *, missing: bool = False) -> tuple[Any, ...]:
    allowed = {str, type(None)} if missing else {str}
    if type(values) is not list or not set(map(type, values)) <= allowed:
        raise DataError(f"{key} must be a list of texts")
    return tuple(values)


def _flag(head: Mapping[str, Any], key: str) -> bool:
    if type(head[key]) is not bool:
        raise DataError(f"{key} must be true or false; got {head[key]!r}")
    return bool(head[key])


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise DataError(f"an integer is required; got {value!r}")
    return value


WAL = "wal"
"""Folder of the write-ahead files within that of the log."""
MAX_RECORD = 64 * 2**20

_MAGIC = b"urk1"
_HEADER = struct.Struct("<4sII")
_LOOK = 2**20


def framed(payload: bytes) -> bytes:
    """Return a payload with its frame.

    Raises:
        DataError: If it is empty or too large.
    """
    if not 0 < len(payload) <= MAX_RECORD:
        raise DataError(f"a record must have from 1 to {MAX_RECORD:,} bytes; got {len(payload):,}")
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def segment_path(folder: Path, segment: str) -> Path:
    """Return the file of a segment within the folder of the log."""
    return folder / WAL / f"{segment}.wal"


class SegmentReader:
    """Iterates over the payloads of a write-ahead file, and then knows how many bytes could not be read.

    Attributes:
        torn: Bytes at the end without a record: an interrupted write.
        damaged: Bytes before the last record that belong to none. Reading resumes at the next whole record.
    """

    def __init__(self, path: Path) -> None:
        self.torn = 0
        self.damaged = 0
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        self.torn = self.damaged = 0
        with self._path.open("rb", buffering=_LOOK) as file:
            size = os.fstat(file.fileno()).st_size
            place, end = 0, 0  # of the next attempt, and of the last whole record
            while place < size:
                payload = _record_at(file, place, size)
                if payload is None:
                    place = _next_magic(file, place + 1, size)
                    continue
                self.damaged += place - end
                place = end = place + _HEADER.size + len(payload)
                yield payload
            self.torn = size - end


def read_segment(path: Path) -> tuple[list[bytes], int, int]:
    """Return the payloads of a write-ahead file, the torn bytes at its end, and the damaged bytes before."""
    reader = SegmentReader(path)
    payloads = list(reader)
    return payloads, reader.torn, reader.damaged


def _record_at(file: BinaryIO, place: int, size: int) -> bytes | None:
    """Return the payload of the frame at this offset; None if there is no whole one."""
    if file.tell() != place:
        file.seek(place)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, length, checksum = _HEADER.unpack(header)
    # Garbage may have any length, which must not be allocated.
    if magic != _MAGIC or not 0 < length <= min(MAX_RECORD, size - place - _HEADER.size):
        return None
    payload = file.read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None


def _next_magic(file: BinaryIO, place: int, size: int) -> int:
    """Return the offset of the next magic number from this place on; the end if there is none."""
    while place < size:
        file.seek(place)
        block = file.read(_LOOK)
        found = block.find(_MAGIC)
        if found >= 0:
            return place + found
        if len(block) < len(_MAGIC):
            return size
        place += len(block) - len(_MAGIC) + 1  # it may begin in this block and end in the next
    return size


def open_segment(path: Path) -> int:
    """Create and lock a write-ahead file that survives a power failure; returns its descriptor."""
    while True:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                sync_folder(path.parent)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # `is_closed` saw it before the lock, took it for one that was left empty, and removed it


def is_closed(path: Path) -> bool:
    """Return whether a segment is closed: its owner closed it or died. An empty one is removed."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_size:
            return True  # an owner locks before it writes, so it has released the lock
        path.unlink(missing_ok=True)
        return False
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[bool]:
    """Try to lock a file without waiting; yields whether that succeeded."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


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


_EMPTY_RECORD = encode(FeedbackColumns((), (), value=False, explored=False))  # a record without effect

_sync = getattr(os, "fdatasync", os.fsync)

Waiter = asyncio.Future[None]


@dataclass(frozen=True, eq=False)
class _WriteJob:
    """A job of the writer thread: write to a segment and wake the waiter; without a waiter, close the segment."""

    segment: str
    data: bytes = b""
    waiter: Waiter | None = None
    last: bool = False


@dataclass(frozen=True, eq=False)
class _WriteResult:
    """The result of jobs of one segment, with the reason if they failed."""

    segment: str
    jobs: Sequence[_WriteJob]
    failure: str | None


class WalWriter:
    """Appends records to its own segments with group commit, in the event loop that created it.

    A new segment replaces one that is full or old. That happens at the end of `append` and in `maybe_rotate`, never
    between reading `segment` and calling `append` without an await in between, so that the id of a ranking can contain
    the segment to which it is written.

    If a write fails, everything that waits for it gets a `DataError`, the incomplete part is truncated, and the segment
    is abandoned: nothing is ever written after a failed write. The next append starts a new segment.

    Args:
        folder: Folder of the log; it is created if missing.
        segment_bytes: Largest size of a segment.
        segment_seconds: Largest age of a segment, from its first record on.
        backlog_bytes: Number of bytes that may wait for the disk before `append` is refused.

    Attributes:
        segment: The segment of the next append.
        healthy: Whether the last group was written durably.
        waiting: Bytes that wait for the disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = 64 * 2**20,
        segment_seconds: float = 300.0,
        backlog_bytes: int = 64 * 2**20,
    ) -> None:
        self.segment = ""
        self.healthy = True
        self.waiting = 0
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._segment_seconds = segment_seconds
        self._backlog_bytes = backlog_bytes
        self._loop = asyncio.get_running_loop()
        self._size = 0
        self._since = 0.0
        self._digests: set[str] = set()
        self._closed = False
        self._ended = self._loop.create_future()
        self._queue: SimpleQueue[_WriteJob] = SimpleQueue()
        try:
            durable_folder(folder / WAL)
        except OSError as error:
            raise DataError(f"the feedback log {folder} cannot be written: {error.strerror}") from error
        self._begin()
        self._thread = Thread(target=self._work, name="urank feedback log", daemon=True)
        self._thread.start()

    def append(self, payloads: Iterable[bytes], columns: FeedbackColumns | Iterable[FeedbackColumns] = ()) -> Waiter:
        """Write payloads to the current segment contiguously; they are durable when the result was awaited.

        The place of the payloads is fixed when this returns. Cancelling the result does not cancel the write.

        Args:
            payloads: Results of `encode`.
            columns: The columns of the rankings among them; a segment contains each set once, before its first use.

        Raises:
            DataError: At once if too much is waiting or the log is closed; when awaited, if it cannot be written.
        """
        if self._closed:
            raise DataError(f"the feedback log {self._folder} is closed")
        wanted = {each.digest: each for each in ([columns] if isinstance(columns, FeedbackColumns) else columns)}
        new = {digest: each for digest, each in wanted.items() if digest not in self._digests}
        data = b"".join(framed(payload) for payload in [*map(encode, new.values()), *payloads])
        waiter = self._loop.create_future()
        if not data:
            waiter.set_result(None)
            return waiter
        if self.waiting + len(data) > self._backlog_bytes:
            raise DataError(
                f"the feedback log {self._folder} cannot be written fast enough: {self.waiting:,} bytes wait"
            )
        if not self._size:
            self._since = time.monotonic()
        self._digests.update(new)
        self._size += len(data)
        self.waiting += len(data)
        self._queue.put(_WriteJob(self.segment, data, waiter))
        if self._size >= self._segment_bytes or self._is_old():
            self._rotate()
        return waiter

    def maybe_rotate(self) -> None:
        """Start a new segment if the current one is old; must be called regularly, also without traffic.

        After a failure it also tries to write again: an unhealthy server gets no traffic, and would never recover.
        """
        if self._closed:
            return
        if self._is_old():
            self._rotate()
        if not self.healthy and not self.waiting:
            self.append([_EMPTY_RECORD]).add_done_callback(lambda waiter: waiter.exception())

    async def close(self) -> None:
        """Write everything that waits, close the segment, and stop the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(_WriteJob(self.segment, last=True))
        await asyncio.shield(self._ended)
        self._thread.join()

    def _is_old(self) -> bool:
        return time.monotonic() - self._since >= self._segment_seconds

    def _begin(self) -> None:
        self.segment = new_segment(time.time_ns() // 1_000_000)
        self._since = time.monotonic()
        self._size = 0
        self._digests = set()

    def _rotate(self) -> None:
        if self._size:
            self._queue.put(_WriteJob(self.segment))
        self._begin()

    def _settle(self, outcomes: Sequence[_WriteResult], last: bool) -> None:
        """Wake the waiters, and leave an abandoned segment; runs in the loop."""
        for outcome in outcomes:
            for job in outcome.jobs:
                self.waiting -= len(job.data)
                if job.waiter is None or job.waiter.done():  # its awaiter was cancelled
                    continue
                if outcome.failure is None:
                    job.waiter.set_result(None)
                else:
                    job.waiter.set_exception(DataError(outcome.failure))
            if outcome.failure is not None and outcome.segment == self.segment and not self._closed:
                self._begin()
        written = [outcome.failure is None for outcome in outcomes if any(job.data for job in outcome.jobs)]
        if written:
            self.healthy = all(written)
        if last:
            self._ended.set_result(None)

    def _work(self) -> None:
        """Write group after group; runs in the thread."""
        disk = _SegmentWriter(self._folder)
        last = False
        while not last:
            group = _take_all(self._queue)
            last = group[-1].last
            outcomes = [disk.process(segment, list(jobs)) for segment, jobs in groupby(group, lambda job: job.segment)]
            try:
                self._loop.call_soon_threadsafe(self._settle, outcomes, last)
            except RuntimeError:  # the loop is closed, so nothing waits any more
                break
        disk.close()


def _take_all(queue: SimpleQueue[_WriteJob]) -> list[_WriteJob]:
    """Take all jobs of a queue, waiting for the first."""
    jobs = [queue.get()]
    with suppress(Empty):
        while True:
            jobs.append(queue.get_nowait())
    return jobs


class _SegmentWriter:
    """The open segment file, used by the writer thread alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segment: str | None = None
        self._handle = -1
        self._durable = 0
        self._abandoned = ("", "")

    def process(self, segment: str, jobs: Sequence[_WriteJob]) -> _WriteResult:
        """Write the jobs of one segment durably, and close it if one of them asks for it."""
        failure = self._write(segment, [job.data for job in jobs if job.data])
        if self._segment == segment and any(job.waiter is None for job in jobs):
            self.close()
        return _WriteResult(segment, jobs, failure)

    def _write(self, segment: str, parts: Sequence[bytes]) -> str | None:
        """Write bytes durably; returns the reason if it failed."""
        if not parts:
            return None
        if self._abandoned[0] == segment:  # nothing may follow a failed write
            return self._abandoned[1]
        try:
            data = b"".join(parts)
            if self._segment != segment:
                self.close()
                self._handle, self._segment = open_segment(segment_path(self._folder, segment)), segment
                self._durable = 0
            _write_all(self._handle, data)
            _sync(self._handle)
        except (OSError, MemoryError) as error:
            reason = error.strerror if isinstance(error, OSError) else "out of memory"
            failure = f"the feedback log {self._folder} cannot be written: {reason}"
            self._abandoned = segment, failure
            self._abandon()
            return failure
        self._durable += len(data)
        return None

    def _abandon(self) -> None:
        """Truncate a file to its durable part, if possible, and never write to it again."""
        if self._segment is None:
            return
        with suppress(OSError):
            os.ftruncate(self._handle, self._durable)
        if not self._durable:
            with suppress(OSError):
                segment_path(self._folder, self._segment).unlink()
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._segment is not None:
            with suppress(OSError):  # everything acknowledged is durable already
                os.close(self._handle)
        self._segment, self._handle = None, -1


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def check_log(folder: Path) -> None:
    """Refuse a log that cannot be written, before anything is served."""
    try:
        durable_folder(folder / WAL)
        with tempfile.TemporaryFile(dir=folder / WAL):
            pass
    except OSError as error:
        raise DataError(f"the feedback log {folder} cannot be written: {error.strerror}") from error
