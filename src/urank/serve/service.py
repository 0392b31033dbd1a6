"""What a server does, without HTTP: rank, log before answering, reload, and let a silent model follow.

Requests are worked on in the event loop, but for the models on many rows: these run in a thread, so that nobody waits
for them. Parsing is not handed to a thread, since it holds the interpreter's lock wherever it runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from urank.errors import DataError, UrankError
from urank.serve.feedback_store import (
    Columns,
    CompactionTask,
    FeedbackRecord,
    ShadowRecord,
    WalWriter,
    check_log,
    encode,
    live_with,
    new_ranking_id,
    new_segment,
)
from urank.serve.models import ActiveModels, load
from urank.serve.playground import Sample, read_samples
from urank.serve.ranking import RankedList, columns_of, rank_lists, record_of, shadow_orders
from urank.serve.request_arrays import Reader, RequestLists
from urank.serve.schemas import Event, Problem
from urank.serve.settings import ServeConfig

__all__ = ["METRICS_TYPE", "Metrics", "Ranked", "RequestContext", "Service"]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """The counters of a server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("urank_requests", "Requests.", ["route", "status"], **made)
        self.seconds = Histogram(
            "urank_request_seconds", "Time from request to answer.", ["route"], buckets=_SECONDS, **made
        )
        self.model_seconds = Histogram("urank_model_seconds", "Time in the models.", buckets=_SECONDS, **made)
        self.log_seconds = Histogram(
            "urank_log_seconds", "Time until a ranking or a click was durable.", buckets=_SECONDS, **made
        )
        self.lists = Counter("urank_lists", "Lists ranked.", ["arm", "explored"], **made)
        self.candidates = Counter("urank_candidates", "Candidates ranked.", **made)
        self.utility = Counter("urank_expected_utility", "Utility that is expected of the lists.", ["arm"], **made)
        self.events = Counter("urank_feedback_events", "Events that were accepted.", ["kind"], **made)
        self.reloads = Counter("urank_reloads", "Attempts to load models anew.", ["result"], **made)
        self.shadow = Counter("urank_shadow_lists", "Lists that the silent model ranked too.", ["result"], **made)
        self.model = Gauge(
            "urank_model_info", "The models in use.", ["role", "version"], multiprocess_mode="livemostrecent", **made
        )

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        if SHARED_FOLDER not in os.environ:
            return bytes(generate_latest(self.registry))
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return bytes(generate_latest(registry))


MANY_ROWS = 2_000
MOST_SHADOWS = 64
TICK_SECONDS = 1.0

logger = logging.getLogger("urank.serve")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RequestContext:
    """What a request works with, from its begin to its end."""

    served: ActiveModels
    reader: Reader

    @cached_property
    def mixed(self) -> bool:
        """Whether there are categorical features."""
        return bool(self.served.categorical)


@dataclass(frozen=True, eq=False)
class Ranked:
    """The lists of a request, ranked and logged.

    Attributes:
        lists, shown, ids: what was asked, what is shown, and the id of each ranking.
        model_seconds, log_seconds: how long the models took, and how long the log.
    """

    lists: RequestLists
    shown: Sequence[RankedList]
    ids: Sequence[str]
    model_seconds: float
    log_seconds: float

    def answers(self) -> list[dict[str, Any]]:
        """As `bodies.RankAnswer` has them."""
        pairs = zip(self.shown, self.ids, strict=True)
        return [shown.answer(self.lists, ranking_id) for shown, ranking_id in pairs]


class Service:
    """A server's work.

    Args:
        config: how it runs.
        compacts: whether it also turns the feedback log into Parquet; one worker of several does.
    """

    def __init__(self, config: ServeConfig, *, compacts: bool = True) -> None:
        self.config = config
        self.compacts = compacts
        self.metrics = Metrics()
        self.state = self._made(load(config.sources))
        self._tell_models(self.state.served, 1)
        self.samples = self._read_samples()
        if config.log is not None:
            check_log(config.log)
        self._rng = np.random.default_rng(config.seed)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="urank")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="urank aside")  # for what no request waits for
        self._writer: WalWriter | None = None
        self._troubled = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()
        self._compaction: CompactionTask | None = None

    async def start(self, parent: int | None = None) -> None:
        """Open the log and begin what goes on beside the requests; end when the parent, if there is one, has ended."""
        if parent is not None:
            self._later(live_with(parent))
        if self.config.log is not None:
            self._writer = WalWriter(
                self.config.log,
                segment_bytes=self.config.segment_bytes,
                segment_seconds=self.config.segment_seconds,
            )
            self._later(self._tick(self._writer))
            if self.compacts:
                self._compaction = CompactionTask(self.config.log, self.config.join_seconds)
                self._later(self._compaction.run())

    async def stop(self) -> None:
        """End what goes on, and seal the log."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._compaction is not None:
            await self._compaction.stop()
        if self._writer is not None:
            await self._writer.close()
        for threads in (self._threads, self._aside):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        """Whether requests can be served: a log that cannot be written makes it false."""
        return self._writer is None or self._writer.healthy

    async def rank(self, state: RequestContext, lists: RequestLists) -> Ranked:
        """Rank lists; they are durable when this returns.

        Raises:
            Problem: when the request is refused, or the log cannot be written.
        """
        shown, seconds = await self._in_time(len(lists.items), self._rank, state, lists)
        ids, log_seconds = await self._log_rankings(state, lists, shown)
        self.metrics.model_seconds.observe(seconds)
        self.metrics.candidates.inc(len(lists.items))
        for each in shown:
            explored = "yes" if each.policy != each.model.version else "no"
            self.metrics.lists.labels(each.arm or "", explored).inc()
            self.metrics.utility.labels(each.arm or "").inc(float(each.utility.sum()))
        if state.served.shadow is not None:
            self._shadow(state, lists, shown, ids)
        return Ranked(lists, shown, ids, seconds, log_seconds)

    async def feedback(self, events: Sequence[Event]) -> int:
        """Log what happened; it is durable when this returns."""
        writer = self._writer
        if writer is None:
            raise Problem(409, "this server keeps no feedback log; start it with --log DIR")
        now = time.time_ns() // 1_000
        records = [
            FeedbackRecord(each.ranking_id, each.item_id, each.click, each.conversion, each.value, now)
            for each in events
        ]
        await self._append(writer, [encode(record) for record in records], None)
        self.metrics.events.labels("click").inc(sum(each.click for each in events))
        self.metrics.events.labels("conversion").inc(sum(each.conversion for each in events))
        return len(events)

    async def reload(self) -> bool:
        """Load the models anew; tells whether they changed. What is broken is refused, and the old ones stay.

        Raises:
            UrankError: when a model is broken.
        """
        async with self._reloading:
            before = self.state.served
            try:
                served = await asyncio.get_running_loop().run_in_executor(self._aside, load, self.config.sources)
                state = self._made(served)
            except UrankError as error:
                self.metrics.reloads.labels("refused").inc()
                logger.error("the models stay as they are: %s", error)
                raise
            if [model.version for model in served.models] == [model.version for model in before.models]:
                self.metrics.reloads.labels("unchanged").inc()
                return False
            self._tell_models(before, 0)
            self._tell_models(served, 1)
            self.state = state
            self.samples = self._read_samples()
            self.metrics.reloads.labels("reloaded").inc()
            logger.info("the model is now %s", served.main.version)
            return True

    async def reload_quietly(self) -> None:
        """Reload for a signal, which nobody waits for."""
        with suppress(UrankError):  # it is logged
            await self.reload()

    def _made(self, served: ActiveModels) -> RequestContext:
        config = self.config
        if config.log is not None:  # a feature with the name of a column of the log is refused now, not at a request
            Columns(served.numeric, served.categorical, value=True, explored=True)
        reader = Reader(served.numeric, served.categorical, config.limits, ignore_unknown=config.ignore_unknown)
        return RequestContext(served, reader)

    def _tell_models(self, served: ActiveModels, value: float) -> None:
        for role, model in (("main", served.main), ("shadow", served.shadow), ("test", served.other)):
            if model is not None:
                self.metrics.model.labels(role, model.version).set(value)

    def _read_samples(self) -> list[Sample]:
        """The lists of the playground, as far as the log has the features of the models."""
        if self.config.sample is None or not self.config.playground:
            return []
        try:
            return read_samples(self.config.sample, self.state.served.numeric, self.state.served.categorical)
        except UrankError as error:
            if not hasattr(self, "samples"):  # at the start somebody is there to mend it
                raise
            logger.warning("the playground has no samples any more: %s", error)
            return []

    async def _in_time(self, rows: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function, in a thread when it works on many rows."""
        if rows < MANY_ROWS:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _rank(self, state: RequestContext, lists: RequestLists) -> tuple[list[RankedList], float]:
        started = time.perf_counter()
        shown = rank_lists(state.served, lists, exploration=self.config.exploration, rng=self._rng)
        return shown, time.perf_counter() - started

    async def _log_rankings(
        self, state: RequestContext, lists: RequestLists, shown: Sequence[RankedList]
    ) -> tuple[list[str], float]:
        """The ids of rankings, which are in the log when this returns, and how long that took."""
        writer, exploration = self._writer, self.config.exploration
        now = time.time_ns() // 1_000
        if writer is None:
            segment = new_segment(now // 1_000)
            return [new_ranking_id(segment) for _ in shown], 0.0
        started = time.perf_counter()
        columns = columns_of(state.served, lists, exploration)
        ids = [new_ranking_id(writer.segment) for _ in shown]  # no await from here to the append: it is their home
        records = [
            record_of(each, lists, columns, ranking_id=ranking_id, exploration=exploration, time_us=now)
            for each, ranking_id in zip(shown, ids, strict=True)
        ]
        await self._append(writer, [encode(record) for record in records], columns)
        seconds = time.perf_counter() - started
        self.metrics.log_seconds.observe(seconds)
        return ids, seconds

    async def _append(self, writer: WalWriter, records: Sequence[bytes], columns: Columns | None) -> None:
        try:
            await writer.append(records, () if columns is None else columns)
        except DataError as error:
            if not self._troubled:  # once: a line for each request would fill the disk that is full
                logger.error("%s", error)
            self._troubled = True
            raise Problem(503, "the feedback log cannot be written, so nothing is acknowledged") from None

    def _shadow(
        self, state: RequestContext, lists: RequestLists, shown: Sequence[RankedList], ids: Sequence[str]
    ) -> None:
        if len(self._tasks) >= MOST_SHADOWS:
            self.metrics.shadow.labels("dropped").inc(len(shown))
            return
        self._later(self._follow(state, lists, shown, ids))

    async def _follow(
        self, state: RequestContext, lists: RequestLists, shown: Sequence[RankedList], ids: Sequence[str]
    ) -> None:
        """Let the silent model rank the lists too, in a thread, and log its orders."""
        loop = asyncio.get_running_loop()
        orders = await loop.run_in_executor(self._aside, shadow_orders, state.served, lists, shown)
        assert state.served.shadow is not None  # noqa: S101 - it is not called otherwise
        for order, each in zip(orders, shown, strict=True):
            agrees = order[0] == lists.item_ids[int(each.rows[each.ranks.argmin()])]  # before chance was asked
            self.metrics.shadow.labels("same first" if agrees else "other first").inc()
        if self._writer is not None:
            now, version = time.time_ns() // 1_000, state.served.shadow.version
            records = [
                ShadowRecord(ranking_id, version, now, tuple(order))
                for ranking_id, order in zip(ids, orders, strict=True)
            ]
            with suppress(Problem):  # it is logged, and nobody waits for it
                await self._append(self._writer, [encode(record) for record in records], None)

    def _later(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("what goes on beside the requests failed", exc_info=error)

    async def _tick(self, writer: WalWriter) -> None:
        """Seal write-ahead files that are old."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            writer.maybe_rotate()
            self._troubled = self._troubled and not writer.healthy
