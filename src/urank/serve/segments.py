"""Write-ahead files: how a record stands in one, how one is read whatever became of it, and who still writes to it.

A file is a row of frames: magic, length, CRC-32, payload. Its owner appends, and holds a lock on it for as long as it
does; the system takes the lock away when the owner dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from urank.errors import DataError

__all__ = [
    "MAX_RECORD",
    "WAL",
    "SegmentReader",
    "alone",
    "durable_folder",
    "framed",
    "is_sealed",
    "open_segment",
    "read_segment",
    "segment_path",
    "sync_folder",
]

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
def alone(path: Path) -> Iterator[bool]:
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
