"""The writer of the write-ahead log: whoever waits for it knows that the records are on the disk.

One thread writes. It takes all that has come in since the last time, writes it at once, waits for the disk once, and
then wakes all who wait for it (group commit). So a slow disk makes the groups larger, not the queue longer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from urank.errors import DataError
from urank.serve.records import Columns, encode, new_segment
from urank.serve.segments import WAL, durable_folder, framed, open_segment, read_segment, segment_path

__all__ = ["Writer", "read_segment"]

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


class Writer:
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
