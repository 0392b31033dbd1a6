"""What goes on beside the requests: the log becomes Parquet, and a worker ends with its parent."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import secrets
import signal
import struct
import sys
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

__all__ = [
    "MAX_RECORD",
    "OWN_COLUMNS",
    "RANKING_ID",
    "SEGMENT",
    "WAL",
    "Columns",
    "CompactionTask",
    "FeedbackRecord",
    "RankingRecord",
    "Record",
    "RecordKind",
    "SegmentReader",
    "ShadowRecord",
    "WalWriter",
    "check_log",
    "columns_from",
    "decode",
    "durable_folder",
    "encode",
    "exclusive_lock",
    "framed",
    "is_sealed",
    "kind_of",
    "live_with",
    "new_ranking_id",
    "new_segment",
    "open_segment",
    "read_segment",
    "segment_of",
    "segment_path",
    "sync_folder",
]

SEGMENT = "^[0-9a-f]{12}-[0-9a-f]{6}$"
"""The name of a segment: milliseconds since 1970 and chance."""
RANKING_ID = "^[0-9a-f]{12}-[0-9a-f]{6}-[0-9a-f]{12}$"
"""The id of a ranking: the segment that it is written to, its home, and chance."""

OWN_COLUMNS = (
    *("query_id", "session_id", "item_id", "position", "click", "conversion", "value", "policy"),
    *("propensity", "ranked_position", "user_id", "arm", "timestamp"),
)
"""The columns of a feedback log that are not features."""

_RANKING_ID = re.compile(RANKING_ID)
_SEGMENT_LENGTH = 12 + 1 + 6
_LAST_TIME = 253_402_300_799_999_999  # the last microsecond of the year 9999
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """The columns that some rankings have beyond those of all: features, values, and those of exploration.

    >>> Columns(("price",), ("brand",), value=False, explored=False).digest
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
                raise DataError(f"a feature must not be called as a column of the feedback log is; got '{name}'")
        if len(set(names)) < len(names):
            raise DataError(f"features must have a name of their own; got {', '.join(names)}")

    @cached_property
    def digest(self) -> str:
        """What rankings call this set of columns."""
        return sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        lists = {"numeric": list(self.numeric), "categorical": list(self.categorical)}
        return {**lists, "value": self.value, "explored": self.explored}


@dataclass(frozen=True, slots=True, eq=False)
class RankingRecord:
    """A list as it was shown.

    Attributes:
        ranking_id: its id, the segment first.
        query_id, user_id, arm: of the request.
        policy: what made the order.
        model: the version of the model.
        columns: the digest of its columns.
        time_us: microseconds since 1970.
        items: the items at positions 1 to m.
        numeric: `[m, F]`, NaN where missing.
        categorical: m rows of C texts, none where missing.
        value: `[m]`, what a click is worth.
        propensity: `[m]`, the probability with which the item came to its position.
        ranked_position: m positions, before exploration.
    """

    ranking_id: str
    query_id: str
    user_id: str | None
    arm: str | None
    policy: str
    model: str
    columns: str
    time_us: int
    items: tuple[str, ...]
    numeric: Floats
    categorical: tuple[tuple[str | None, ...], ...]
    value: Floats | None = None
    propensity: Doubles | None = None
    ranked_position: tuple[int, ...] | None = None

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
                raise DataError(f"value must be finite numbers from 0 up in ranking {self.ranking_id}")
        if self.propensity is not None:
            _check_array("propensity", self.propensity, np.float64, (count,))
            if not ((self.propensity > 0) & (self.propensity <= 1)).all():
                raise DataError(f"propensity must be above 0 and at most 1 in ranking {self.ranking_id}")
        ranked = self.ranked_position
        if (ranked is None) != (self.propensity is None) or (ranked is not None and len(ranked) != count):
            raise DataError(f"ranked_position must come with propensity, one for each of {count} items")
        if ranked is not None and not all(1 <= position <= MAX_POSITION for position in ranked):
            raise DataError(f"ranked_position must be from 1 to {MAX_POSITION} in ranking {self.ranking_id}")

    def fits(self, columns: Columns) -> bool:
        """Whether it has what these columns hold, and nothing else."""
        return (
            self.numeric.shape[1] == len(columns.numeric)
            and len(self.categorical[0]) == len(columns.categorical)
            and (self.value is not None) == columns.value
            and (self.propensity is not None) == columns.explored
        )


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """What became of an item of a ranking: whether it was clicked, led to what counts, and what that was worth."""

    ranking_id: str
    item_id: str
    click: bool
    conversion: bool
    value: float | None
    time_us: int

    def __post_init__(self) -> None:
        _check_origin(self.ranking_id, self.time_us)
        if self.value is not None and not 0 <= self.value <= _FLOAT32_MAX:
            raise DataError(f"value must be a finite number from 0 up; got {self.value} for item {self.item_id}")


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """The order that a silent model would have shown, the items at positions 1 and below."""

    ranking_id: str
    model: str
    time_us: int
    items: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_origin(self.ranking_id, self.time_us)
        _check_items(self.items)


Record = Columns | RankingRecord | FeedbackRecord | ShadowRecord


def new_segment(now_ms: int) -> str:
    """A name for a new segment at this time, in milliseconds since 1970."""
    return f"{now_ms:012x}-{secrets.token_hex(3)}"


def new_ranking_id(segment: str) -> str:
    """A new id for a ranking that is written to this segment."""
    return f"{segment}-{secrets.token_hex(6)}"


def segment_of(ranking_id: str) -> str:
    """The home of a ranking: the segment that it was written to.

    >>> segment_of("0192f3a4b5c6-3f9a1c-00112233aabb")
    '0192f3a4b5c6-3f9a1c'
    """
    if not _RANKING_ID.fullmatch(ranking_id):
        raise DataError(f"a ranking id must be as the server made it; got '{ranking_id[:60]}'")
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
    """The payload of a record.

    Raises:
        DataError: when a text holds half a character (a lone surrogate), which no file can hold.
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
        case Columns():
            kind, head, arrays = RecordKind.columns, record.to_dict(), b""
    try:
        text = _to_json(head).encode()
    except ValueError as error:
        raise DataError(f"a {kind.name} record must hold whole characters and finite numbers: {error}") from error
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
    """The kind of a payload by its first byte alone; 0 for none."""
    return payload[0] if payload else 0


def decode(payload: bytes) -> Record:
    """The record of a payload.

    Raises:
        DataError: when it is not what `encode` makes, whatever it is.
    """
    try:
        return _decode(payload)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise DataError(f"a record must be as the server wrote it; got {type(error).__name__}: {error}") from error


def _decode(payload: bytes) -> Record:
    kind, length = _HEAD.unpack_from(payload)
    start = _HEAD.size + length
    text, arrays = payload[_HEAD.size : start], memoryview(payload)[start:]
    if len(text) < length:
        raise DataError(f"the head of a record must have {length} bytes; got {len(text)}")
    head = json.loads(text.decode())
    if not isinstance(head, dict):
        raise DataError("the head of a record must be an object of JSON")
    if b"\\ud" in text.lower():  # perhaps half a character, written as an escape
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


def columns_from(head: Mapping[str, Any]) -> Columns:
    """The columns that a `Columns.to_dict` told.

    Raises:
        DataError: when it tells something else.
    """
    try:
        names = _texts(head["numeric"], "numeric"), _texts(head["categorical"], "categorical")
        return Columns(*names, value=_flag(head, "value"), explored=_flag(head, "explored"))
    except (LookupError, TypeError) as error:
        raise DataError(f"columns must be as the server told them; got {str(head)[:100]}") from error


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
        raise DataError(f"a whole number is needed; got {value!r}")
    return value


WAL = "wal"
"""The folder of the write-ahead files within that of the log."""
MAX_RECORD = 64 * 2**20

_MAGIC = b"urk1"
_HEADER = struct.Struct("<4sII")
_LOOK = 2**20


def framed(payload: bytes) -> bytes:
    """A payload as it stands in a file.

    Raises:
        DataError: when it is empty or larger than a record may be.
    """
    if not 0 < len(payload) <= MAX_RECORD:
        raise DataError(f"a record must have from 1 to {MAX_RECORD:,} bytes; got {len(payload):,}")
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def segment_path(folder: Path, segment: str) -> Path:
    """The file of a segment within the folder of the log."""
    return folder / WAL / f"{segment}.wal"


class SegmentReader:
    """The payloads of a write-ahead file, one at a time; after the last one it is known how many bytes were none.

    Attributes:
        torn: bytes at the end that are no record: a write that was cut off.
        damaged: bytes before the last record that belong to none. They are skipped, up to the next whole record.
    """

    def __init__(self, path: Path) -> None:
        self.torn = 0
        self.damaged = 0
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        self.torn = self.damaged = 0
        with self._path.open("rb", buffering=_LOOK) as file:
            size = os.fstat(file.fileno()).st_size
            place, end = 0, 0  # where to look, and where the last whole record ended
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
    """The payloads of a write-ahead file, the bytes of its torn end, and the damaged bytes before that."""
    reader = SegmentReader(path)
    payloads = list(reader)
    return payloads, reader.torn, reader.damaged


def _record_at(file: BinaryIO, place: int, size: int) -> bytes | None:
    """The payload of the frame that begins here; none when there is no whole one."""
    if file.tell() != place:
        file.seek(place)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, length, checksum = _HEADER.unpack(header)
    # The length is believed only within limits: in garbage it may be anything, and memory is taken by it.
    if magic != _MAGIC or not 0 < length <= min(MAX_RECORD, size - place - _HEADER.size):
        return None
    payload = file.read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None


def _next_magic(file: BinaryIO, place: int, size: int) -> int:
    """Where the next frame could begin, from this place on; the end when nowhere."""
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
    """A new write-ahead file, locked, that is still there after a loss of power; returns its descriptor."""
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
        os.close(handle)  # `is_sealed` came between, took it for one that was left empty, and removed it


def is_sealed(path: Path) -> bool:
    """Whether nobody will write to a file any more: its owner closed it or died. One that was left empty is removed."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_size:
            return True  # an owner locks before it writes, so this one has let go
        path.unlink(missing_ok=True)
        return False
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[bool]:
    """Whether nobody else is within such a block, by a lock on this file; it is never waited for."""
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
    """Make what was created, renamed or removed in a folder outlast a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def durable_folder(folder: Path) -> None:
    """Make a folder, with those above it, that outlasts a loss of power."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


_NOTHING = encode(Columns((), (), value=False, explored=False))  # a record that no ranking needs

_sync = getattr(os, "fdatasync", os.fsync)

Waiter = asyncio.Future[None]


@dataclass(frozen=True, eq=False)
class _Job:
    """What the thread is asked to do: write to a segment and tell the waiter; or, without one, seal the segment."""

    segment: str
    data: bytes = b""
    waiter: Waiter | None = None
    last: bool = False


@dataclass(frozen=True, eq=False)
class _Outcome:
    """What became of jobs of one segment: nothing to tell, or why they failed."""

    segment: str
    jobs: Sequence[_Job]
    failure: str | None


class WalWriter:
    """Appends records to segments of its own, in the loop in which it was made.

    A segment gives way to a new one when it is full or old. That happens at the end of `append` and in `maybe_rotate`,
    never between reading `segment` and calling `append` without an await in between, so a ranking can be given an id
    that names the segment that it is written to.

    When a write fails, all that waits for it gets a `DataError`, what it left behind is cut off, and the segment is
    given up: nothing is ever written after a write that failed. The next append tries a new segment.

    Args:
        folder: of the log; missing folders are made.
        segment_bytes: how large a segment may grow.
        segment_seconds: how old it may grow, from its first record on.
        backlog_bytes: how much may wait for the disk before appending is refused.

    Attributes:
        segment: where the next append goes.
        healthy: whether the last group that was written is on the disk.
        waiting: bytes that wait for the disk.
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
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        try:
            durable_folder(folder / WAL)
        except OSError as error:
            raise DataError(f"the feedback log {folder} cannot be written: {error.strerror}") from error
        self._begin()
        self._thread = Thread(target=self._work, name="urank feedback log", daemon=True)
        self._thread.start()

    def append(self, payloads: Iterable[bytes], columns: Columns | Iterable[Columns] = ()) -> Waiter:
        """Write payloads to the current segment, in one piece; await the result to know that they are on the disk.

        What is to be written is settled when this returns, before anything is awaited. Who stops waiting does not stop
        the write.

        Args:
            payloads: what `encode` made of records.
            columns: the columns of the rankings among them; a segment holds each set once, before it is needed.

        Raises:
            DataError: at once when too much waits already or the log is closed; when awaited, if it cannot be written.
        """
        if self._closed:
            raise DataError(f"the feedback log {self._folder} is closed")
        wanted = {each.digest: each for each in ([columns] if isinstance(columns, Columns) else columns)}
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
        self._queue.put(_Job(self.segment, data, waiter))
        if self._size >= self._segment_bytes or self._is_old():
            self._rotate()
        return waiter

    def maybe_rotate(self) -> None:
        """Give way to a new segment if the current one is old; to be called now and then, also when nothing happens.

        After a failure it also tries whether the disk can be written again. A server that is taken out of traffic for
        not being healthy has nothing else to write, and would never hear of it.
        """
        if self._closed:
            return
        if self._is_old():
            self._rotate()
        if not self.healthy and not self.waiting:
            self.append([_NOTHING]).add_done_callback(lambda waiter: waiter.exception())

    async def close(self) -> None:
        """Write what waits, seal the segment, and end."""
        if not self._closed:
            self._closed = True
            self._queue.put(_Job(self.segment, last=True))
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
            self._queue.put(_Job(self.segment))
        self._begin()

    def _settle(self, outcomes: Sequence[_Outcome], last: bool) -> None:
        """In the loop: wake those who wait, and leave a segment that was given up."""
        for outcome in outcomes:
            for job in outcome.jobs:
                self.waiting -= len(job.data)
                if job.waiter is None or job.waiter.done():  # done when its awaiter was cancelled
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
        """In the thread: write group after group."""
        disk = _Disk(self._folder)
        last = False
        while not last:
            group = _taken(self._queue)
            last = group[-1].last
            outcomes = [
                disk.carry_out(segment, list(jobs)) for segment, jobs in groupby(group, lambda job: job.segment)
            ]
            try:
                self._loop.call_soon_threadsafe(self._settle, outcomes, last)
            except RuntimeError:  # the loop is closed, so nobody waits any more, and nobody can append
                break
        disk.close()


def _taken(queue: SimpleQueue[_Job]) -> list[_Job]:
    """All that is in a queue; waits for the first."""
    jobs = [queue.get()]
    with suppress(Empty):
        while True:
            jobs.append(queue.get_nowait())
    return jobs


class _Disk:
    """The file that is being written; only the thread knows it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segment: str | None = None
        self._handle = -1
        self._durable = 0
        self._given_up = ("", "")

    def carry_out(self, segment: str, jobs: Sequence[_Job]) -> _Outcome:
        """Write what jobs of one segment hold, wait for the disk, and seal the segment if that is asked for."""
        failure = self._write(segment, [job.data for job in jobs if job.data])
        if self._segment == segment and any(job.waiter is None for job in jobs):
            self.close()
        return _Outcome(segment, jobs, failure)

    def _write(self, segment: str, parts: Sequence[bytes]) -> str | None:
        """Make bytes durable; returns why that failed."""
        if not parts:
            return None
        if self._given_up[0] == segment:  # these came before the loop knew; after what failed nothing may stand
            return self._given_up[1]
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
            self._given_up = segment, failure
            self._give_up()
            return failure
        self._durable += len(data)
        return None

    def _give_up(self) -> None:
        """Leave a file with what is known to be durable, as far as that can still be done, and never touch it again."""
        if self._segment is None:
            return
        with suppress(OSError):
            os.ftruncate(self._handle, self._durable)
        if not self._durable:
            with suppress(OSError):
                segment_path(self._folder, self._segment).unlink()
        self.close()

    def close(self) -> None:
        """Seal the file."""
        if self._segment is not None:
            with suppress(OSError):  # all that was acknowledged is durable already
                os.close(self._handle)
        self._segment, self._handle = None, -1


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


COMPACT_SECONDS = 30.0
LOOK_SECONDS = 1.0

logger = logging.getLogger("urank.serve")


def check_log(folder: Path) -> None:
    """Refuse a log that cannot be written, before anything is served."""
    try:
        durable_folder(folder / WAL)
        with tempfile.TemporaryFile(dir=folder / WAL):
            pass
    except OSError as error:
        raise DataError(f"the feedback log {folder} cannot be written: {error.strerror}") from error


async def live_with(parent: int) -> None:
    """End as after SIGTERM when the process that watches over this one is gone."""
    while os.getppid() == parent:
        await asyncio.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class CompactionTask:
    """Turns what is due into Parquet now and then, in a process of its own, which takes no time from requests.

    Args:
        folder: of the feedback log.
        join_seconds: how long a write-ahead file waits for clicks.
    """

    def __init__(self, folder: Path, join_seconds: float) -> None:
        self.folder = folder
        self.join_seconds = join_seconds
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Go on until cancelled."""
        window = f"{self.join_seconds:g}"
        command = (sys.executable, "-m", "urank", "feedback", str(self.folder), "--window", window, "--quiet")
        while True:
            await asyncio.sleep(COMPACT_SECONDS)
            if not self.is_due():
                continue
            try:
                self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
                if await self._process.wait():
                    logger.warning("the feedback log was not turned into Parquet this time; the line above says why")
            except OSError as error:  # no memory, or too many processes; next time perhaps
                logger.warning("the feedback log was not turned into Parquet this time: %s", error.strerror)

    async def stop(self) -> None:
        """End the process, which may be ended at any time."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()

    def is_due(self) -> bool:
        """Whether nothing was written to some write-ahead file for as long as it waits for clicks."""
        before = time.time() - self.join_seconds
        with suppress(FileNotFoundError):  # another compaction has just removed it
            return any(path.stat().st_mtime <= before for path in (self.folder / WAL).glob("*.*"))
        return True
