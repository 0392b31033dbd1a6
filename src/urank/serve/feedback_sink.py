"""The sink of the feedback log: what a request appends is durable when the append was awaited.

A thread commits everything that concurrent requests appended in one transaction; `sqlite_sink` and `postgres_sink`
implement the transactions.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

from urank.errors import DataError
from urank.serve import feedback_records as records
from urank.serve.feedback_records import FeedbackColumns, FeedbackRecord, RankingRecord, RankingRow, Row, ShadowRecord

HOME_BYTES = 2**30
"""Size of a home from which the next one is begun, so that its disk space can be freed before the day is over."""
WAITING_BYTES = 64 * 2**20
"""Bytes that may wait for a commit before `append` is refused."""
STALL_SECONDS = 5.0
_DAY_US = 86_400_000_000
_ROW_BYTES = 200  # of a row without its arrays


class Batch(NamedTuple):
    """Rows for one home, and the future of who waits for them; without rows, a probe of the sink."""

    home: str
    columns: FeedbackColumns | None = None  # of the rankings, if the home does not have them yet
    rankings: Sequence[RankingRow] = ()
    feedback: Sequence[Row] = ()
    shadows: Sequence[Row] = ()
    size: int = 0
    waiter: asyncio.Future[None] | None = None
    last: bool = False


class FeedbackSink(ABC):
    """Appends records with group commit, in the event loop that created it.

    A new home replaces one that is large or of another day, but never between `new_ranking_id` and an `append` without
    an await in between, so that the id of a ranking contains its home. If a commit fails, everything that waits for it
    gets a `DataError`, and nothing is written to that home again.

    Args:
        place: The sink in messages.
        arrival: Arrival times of new feedback are later than this, in microseconds since 1970.
    """

    def __init__(self, place: str, arrival: int = 0) -> None:
        self._place, self._arrival = place, arrival
        self._loop = asyncio.get_running_loop()
        self._written, self._progress = True, time.monotonic()  # the last result, and when it came
        self._waiting, self._closed = 0, False
        self._begin()
        self._ended = self._loop.create_future()
        self._queue: SimpleQueue[Batch] = SimpleQueue()
        self._opened: str | None = None  # this and the next are of the thread
        self._failed = ("", "")
        self._thread = Thread(target=self._work, name="urank feedback", daemon=True)
        self._thread.start()
        self.probe()

    @property
    def healthy(self) -> bool:
        """Whether the last commit or probe succeeded, and none has been waiting for long."""
        return self._written and not (self._waiting and time.monotonic() - self._progress > STALL_SECONDS)

    def new_ranking_id(self) -> str:
        """Return an id for a ranking that is appended before anything is awaited."""
        return records.new_ranking_id(self._home, self._next())

    def append(
        self,
        *,
        rankings: Sequence[RankingRecord] = (),
        columns: FeedbackColumns | None = None,
        feedback: Sequence[FeedbackRecord] = (),
        shadows: Sequence[ShadowRecord] = (),
    ) -> asyncio.Future[None]:
        """Append rankings with their columns, feedback on any rankings, and orders of the shadow model.

        They are durable when the result was awaited; cancelling it does not undo them.

        Raises:
            DataError: At once if too much is waiting or the sink is closed; when awaited, if the commit failed.
        """
        if self._closed:
            raise DataError(f"the feedback log {self._place} is closed")
        ranked = [records.ranking_row(each) for each in rankings]
        reports = [(self._next(), *each, self._now()) for each in feedback]
        orders = [records.shadow_row(self._next(), each) for each in shadows]
        size = sum(len(row.numeric) + len(row.items) for row in ranked)
        size += _ROW_BYTES * (len(ranked) + len(reports) + len(orders))
        if self._waiting and self._waiting + size > WAITING_BYTES:
            raise DataError(f"the feedback log {self._place} is too slow: {self._waiting:,} bytes wait")
        if columns is not None and columns.digest in self._digests:
            columns = None
        elif columns is not None:
            self._digests.add(columns.digest)
        if not self._waiting:
            self._progress = time.monotonic()
        self._waiting += size
        self._size += size
        waiter = self._loop.create_future()
        self._queue.put(Batch(self._home, columns, ranked, reports, orders, size, waiter))
        self._maybe_begin()
        return waiter

    def probe(self) -> None:
        """Check in the thread that the sink can be written; must be called regularly.

        So a failure is noticed without traffic, and its end: an unhealthy server gets none, and would never recover.
        """
        if not self._closed and not self._waiting:
            self._maybe_begin()
            self._queue.put(Batch(self._home))

    async def close(self) -> None:
        """Commit everything that waits, and stop the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(Batch(self._home, last=True))
        await asyncio.shield(self._ended)
        self._thread.join()

    @abstractmethod
    def _open(self, home: str) -> None:
        """Begin a home, or raise any exception; then nothing of it is left."""

    @abstractmethod
    def _write(self, home: str, batches: Sequence[Batch]) -> None:
        """Write batches durably in one transaction, or raise any exception."""

    @abstractmethod
    def _check(self) -> None:
        """Raise any exception if the home cannot be written any more."""

    @abstractmethod
    def _release(self) -> None:
        """Close the home, if it is open."""

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _now(self) -> int:
        """Return an arrival time, which never goes back as the clock may."""
        self._arrival = max(time.time_ns() // 1_000, self._arrival + 1)
        return self._arrival

    def _begin(self) -> None:
        self._home = records.new_home(self._now())
        self._day, self._number, self._size = self._arrival // _DAY_US, 0, 0
        self._digests: set[str] = set()

    def _maybe_begin(self) -> None:
        full = self._size >= HOME_BYTES or self._number > records.MAX_NUMBER // 2
        if full or self._now() // _DAY_US != self._day:
            self._begin()

    def _settle(self, home: str, batches: Sequence[Batch], failure: str | None) -> None:
        """Wake the waiters, and leave a home that failed; runs in the loop."""
        self._written, self._progress = failure is None, time.monotonic()
        for batch in batches:
            self._waiting -= batch.size
            if batch.waiter is None or batch.waiter.done():  # its awaiter was cancelled
                continue
            if failure is None:
                batch.waiter.set_result(None)
            else:
                batch.waiter.set_exception(DataError(failure))
        if failure is not None and home == self._home:
            self._begin()
        if batches[-1].last:
            self._ended.set_result(None)

    def _work(self) -> None:
        """Commit group after group; runs in the thread."""
        last = False
        while not last:
            group = [self._queue.get()]
            with suppress(Empty):
                while True:
                    group.append(self._queue.get_nowait())
            last = group[-1].last
            for home, some in groupby(group, lambda batch: batch.home):
                batches = list(some)
                failure = self._commit(home, batches)
                if batches[-1].last:
                    self._leave()
                try:
                    self._loop.call_soon_threadsafe(self._settle, home, batches, failure)
                except RuntimeError:  # the loop is closed, so nothing waits any more
                    last = True
        self._leave()

    def _commit(self, home: str, batches: Sequence[Batch]) -> str | None:
        """Commit the batches of a home; return the reason if it failed."""
        if self._failed[0] == home:
            return self._failed[1]
        if self._opened != home and all(batch.last for batch in batches):
            return None
        try:
            if self._opened != home:
                self._leave()
                self._open(home)
                self._opened = home
            if any(batch.size for batch in batches):
                self._write(home, batches)
            else:
                self._check()
        except Exception as error:  # whatever it is, nothing may be acknowledged
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            self._failed = home, f"the feedback log {self._place} cannot be written: {reason}"
            self._leave()
            return self._failed[1]
        return None

    def _leave(self) -> None:
        with suppress(Exception):  # everything acknowledged is durable already
            self._release()
        self._opened = None
