"""The work of a server without HTTP: rank, log before answering, take feedback, reload, and run the shadow model.

Requests run in the event loop. Only models on many rows run in a thread, so that other requests do not wait for them.
Parsing stays in the loop, since it holds the interpreter's lock wherever it runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from msgspec import json
from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from urank.client.wire_schemas import ItemsStored
from urank.errors import DataError, UrankError
from urank.serve import postgres_sink, sqlite_sink
from urank.serve.feedback_records import FeedbackColumns, FeedbackRecord, ShadowRecord, new_home, new_ranking_id
from urank.serve.feedback_sink import FeedbackSink
from urank.serve.item_store import FileState, file_state, load_items, put_items
from urank.serve.list_ranking import RankedList, explain, log_columns, log_record, rank_lists, shadow_orders
from urank.serve.logs import REQUEST
from urank.serve.models import ActiveModels, ModelSources, load_models, resume_models
from urank.serve.playground import PlaygroundSample, read_samples
from urank.serve.processes import SHARED_FOLDER
from urank.serve.request_arrays import MISSING, CandidateReader, RequestLists
from urank.serve.request_schemas import Event, Problem, RequestTypes, parse, request_types
from urank.serve.server_settings import ServeConfig

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

THREAD_ROWS = 2_000
"""Number of candidates from which a request is ranked in a thread."""
MAX_THREAD_TASKS = 8
"""Number of such requests in the threads and waiting for them, above which they are refused."""
MAX_SHADOW_TASKS = 64
TICK_SECONDS = 1.0
EXPORT_SECONDS, EXPORT_WINDOW = 300.0, 600.0
"""How often the feedback log is exported, and how long a ranking waits for its clicks before that."""

logger = logging.getLogger("urank.serve")


class Metrics:
    """Prometheus metrics of a server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"registry": self.registry}
        timed: dict[str, Any] = {"buckets": _SECONDS, **common}
        self.requests = Counter("urank_requests", "Requests.", ["route", "status"], **common)
        self.seconds = Histogram("urank_request_seconds", "Time from request to answer.", ["route"], **timed)
        self.model_seconds = Histogram("urank_model_seconds", "Time in the models.", **timed)
        self.log_seconds = Histogram("urank_log_seconds", "Time until a ranking was durable.", **timed)
        self.lists = Counter("urank_lists", "Lists ranked.", ["arm", "explored"], **common)
        self.candidates = Counter("urank_candidates", "Candidates ranked.", **common)
        self.utility = Counter("urank_expected_utility", "Expected utility of the lists.", ["arm"], **common)
        self.events = Counter("urank_feedback_events", "Events accepted.", ["kind"], **common)
        self.reloads = Counter("urank_reloads", "Attempts to reload the models.", ["result"], **common)
        self.shadow = Counter("urank_shadow_lists", "Lists ranked by the shadow model as well.", ["result"], **common)
        self.requests_of = cache(self.requests.labels)  # `labels` takes a lock each time
        self.lists_of, self.utility_of = cache(self.lists.labels), cache(self.utility.labels)
        live: dict[str, Any] = {"multiprocess_mode": "livemostrecent", **common}
        self.model = Gauge("urank_model_info", "The models in use.", ["role", "version"], **live)
        self.stale = Gauge(
            "urank_model_stale",
            "1 if the models in use are not those in their folders, which are broken or were not reloaded.",
            multiprocess_mode="livemax",
            **common,
        )
        self.queue_seconds = Histogram("urank_queue_seconds", "Time in the queue after the body arrived.", **timed)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus; with several workers their sum."""
        return bytes(generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics, without models that are no longer in use."""
        shared: Any = MultiProcessCollector(None) if SHARED_FOLDER in os.environ else self.registry  # type: ignore[no-untyped-call]
        for metric in shared.collect():
            if metric.name == "urank_model_info":
                metric.samples = [sample for sample in metric.samples if sample.value]
            yield metric


@dataclass(frozen=True, eq=False)
class RequestContext:
    """The models, the reader and the body types that a request uses from beginning to end."""

    active: ActiveModels
    reader: CandidateReader
    types: RequestTypes


@dataclass(frozen=True, eq=False)
class RankedRequest:
    """The lists of a request, ranked and logged, with the id of each ranking and the time that it took."""

    lists: RequestLists
    rankings: Sequence[RankedList]
    ids: Sequence[str]
    model_seconds: float
    log_seconds: float


class Service:
    """Everything that a server does for requests, and its background tasks; the models are loaded here.

    If it `exports`, it exports the feedback log to Parquet in the background; one of several workers does.
    """

    def __init__(self, config: ServeConfig, *, exports: bool = True) -> None:
        self.config, self.exports = config, exports
        self.metrics = Metrics()
        self._watched = self._watched_files()
        self.contexts = self._load_contexts(resume_models)  # by the names of the models
        self._set_model_info(self.contexts, 1)
        self.samples = self._read_samples()
        if config.log is not None:
            sqlite_sink.check_folder(config.log)
        elif config.sink is not None:
            postgres_sink.connect(config.sink).close()
        self._rng = np.random.default_rng(config.seed)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="urank")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="urank background")
        self._in_threads = 0
        self._sink: FeedbackSink | None = None
        self._log_failed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()

    async def start(self, parent: int | None = None) -> None:
        """Open the log and start the background tasks; the server ends when its supervisor `parent` is gone."""
        if parent is not None:
            self._run_in_background(_end_with_parent(parent))
        config = self.config
        if self._watched:
            self._run_in_background(self._watch_files())
        if config.log is not None:
            self._sink = sqlite_sink.SqliteSink(config.log)
            if self.exports:
                self._run_in_background(_export_regularly(config.log))
        elif config.sink is not None:
            self._sink = postgres_sink.PostgresSink(config.sink)
        if self._sink is not None:
            self._run_in_background(self._probe_sink(self._sink))

    async def stop(self) -> None:
        """Cancel the background tasks and close the log."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sink is not None:
            await self._sink.close()
        for threads in (self._threads, self._background):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def context(self) -> RequestContext:
        """That of the main model."""
        return self.contexts[self.config.name]

    @property
    def ready(self) -> bool:
        """Whether requests can be served: False while the log cannot be written."""
        return self._sink is None or self._sink.healthy

    async def rank(self, context: RequestContext, lists: RequestLists) -> RankedRequest:
        """Rank lists; the rankings are durable when this returns. Raise a `Problem` if the log cannot be written."""
        if len(lists.items) < THREAD_ROWS:
            rankings, seconds = self._rank(context, lists)
        else:
            if self._in_threads >= MAX_THREAD_TASKS:
                raise Problem(503, "the server is overloaded; nothing was done", headers={"Retry-After": "1"})
            self._in_threads += 1
            try:
                loop = asyncio.get_running_loop()
                rankings, seconds = await loop.run_in_executor(self._threads, self._rank, context, lists)
            finally:
                self._in_threads -= 1
        ids, log_seconds = await self._log_rankings(context, lists, rankings)
        self.metrics.model_seconds.observe(seconds)
        self.metrics.candidates.inc(len(lists.items))
        REQUEST.get({})["candidates"] = len(lists.items)
        for each in rankings:
            explored = "yes" if each.policy != each.model.version else "no"
            self.metrics.lists_of(each.arm or "", explored).inc()
            self.metrics.utility_of(each.arm or "").inc(float(each.utility.sum()))
        if context.active.shadow is not None:
            if len(self._tasks) < MAX_SHADOW_TASKS:
                self._run_in_background(self._rank_by_shadow(context, lists, rankings, ids))
            else:
                self.metrics.shadow.labels("dropped").inc(len(rankings))
        return RankedRequest(lists, rankings, ids, seconds, log_seconds)

    async def feedback(self, events: Sequence[Event]) -> int:
        """Log events, which are durable when this returns; returns their number."""
        if self._sink is None:
            raise Problem(409, "this server keeps no feedback log; start it with --log DIR")
        await self._append(self._sink, feedback=[FeedbackRecord(**asdict(each)) for each in events])
        self.metrics.events.labels("click").inc(sum(each.click for each in events))
        self.metrics.events.labels("conversion").inc(sum(each.conversion for each in events))
        return len(events)

    async def reload(self) -> bool:
        """Reload the models, and return whether they changed; the old ones stay if this raises a `UrankError`."""
        async with self._reloading:
            before, self._watched = self.contexts, self._watched_files()
            loop = asyncio.get_running_loop()
            try:
                contexts = await loop.run_in_executor(
                    self._background, self._load_contexts, lambda each: (load_models(each), False)
                )
            except UrankError as error:
                self.metrics.reloads.labels("refused").inc()
                self.metrics.stale.set(1)
                logger.error("the models were not replaced: %s", error)
                raise
            self.contexts = contexts
            if _versions(contexts) == _versions(before):
                self.metrics.reloads.labels("unchanged").inc()
                return False
            self._set_model_info(before, 0)
            self._set_model_info(contexts, 1)
            self.samples = await loop.run_in_executor(self._background, self._read_samples)
            self.metrics.reloads.labels("reloaded").inc()
            logger.info("the model is now %s", self.context.active.main.version)
            return True

    async def put_items(self, items: pl.DataFrame) -> ItemsStored:
        """Add or replace items in the file, which all workers read within seconds; this one before it returns."""
        path, loop = self.config.items, asyncio.get_running_loop()
        if path is None:
            raise Problem(409, "this server holds no items; start it with --items FILE")
        try:
            stored = await loop.run_in_executor(self._background, put_items, path, items, self.config.limits.items)
        except DataError as error:
            raise Problem(422, str(error)) from None
        except (OSError, pl.exceptions.PolarsError) as error:
            logger.error("the items cannot be written: %s", error)
            raise Problem(503, "the items cannot be written, so nothing is acknowledged") from None
        await self._refresh()
        return stored

    async def reload_on_signal(self) -> None:
        """Reload the models; a refusal is only logged."""
        with suppress(UrankError):
            await self.reload()

    def _load_contexts(self, load: Callable[[ModelSources], tuple[ActiveModels, bool]]) -> dict[str, RequestContext]:
        """Load all models by a function that also returns whether they are stale."""
        config = self.config
        loaded = {name: load(each) for name, each in {config.name: config.sources, **config.others}.items()}
        contexts = {name: self._context_of(active) for name, (active, _) in loaded.items()}
        with_items = self._with_items(contexts)
        self.metrics.stale.set(any(stale for _, stale in loaded.values()))
        return with_items

    def _context_of(self, active: ActiveModels) -> RequestContext:
        config, features = self.config, (active.numeric, active.categorical)
        if config.log is not None or config.sink is not None:  # fail fast on features named like columns of the log
            FeedbackColumns(*features, value=True, explored=True)
        lenient = config.ignore_unknown
        reader = CandidateReader(*features, config.limits, ignore_unknown=lenient, rank_unknown=config.rank_unknown)
        return RequestContext(active, reader, request_types(*features, config.limits, ignore_unknown=lenient))

    def _with_items(self, contexts: dict[str, RequestContext]) -> dict[str, RequestContext]:
        """Load the features of items that any model has, and add them to the readers."""
        if self.config.items is None:
            return contexts
        readers = [each.reader for each in contexts.values()]
        numeric = tuple(dict.fromkeys(name for each in readers for name in each.numeric))
        categorical = tuple(dict.fromkeys(name for each in readers for name in each.categorical))
        items = load_items(self.config.items, numeric, categorical, MISSING)
        return {name: replace(each, reader=replace(each.reader, items=items)) for name, each in contexts.items()}

    def _watched_files(self) -> dict[Path, FileState | None]:
        """Return the states of the files that may change while the server runs."""
        test = self.config.sources.test
        paths = (self.config.items, None if test is None else test.share_file)
        return {path: file_state(path) if path.exists() else None for path in paths if path is not None}

    async def _watch_files(self) -> None:
        """Read the items and the share of the test again when their files change."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            with suppress(OSError):  # replaced meanwhile
                if self._watched_files() != self._watched:
                    await self._refresh()

    async def _refresh(self) -> None:
        """Read the items and the share of the test again; if a file is broken, the old content stays."""
        async with self._reloading:
            self._watched = self._watched_files()
            context, loop = self.context, asyncio.get_running_loop()
            try:
                test = context.active.test and context.active.test.current()
                active = context.active if test == context.active.test else replace(context.active, test=test)
                contexts = {**self.contexts, self.config.name: replace(context, active=active)}
                self.contexts = await loop.run_in_executor(self._background, self._with_items, contexts)
            except UrankError as error:
                logger.error("%s; the old content stays", error)

    def _set_model_info(self, contexts: Mapping[str, RequestContext], value: float) -> None:
        for name, context in contexts.items():
            active, role = context.active, "main" if name == self.config.name else name
            for part, model in ((role, active.main), ("shadow", active.shadow), ("test", active.other)):
                if model is not None:
                    self.metrics.model.labels(part, model.version).set(value)

    def _read_samples(self) -> list[PlaygroundSample]:
        """Read the lists of the playground, if the log has the features of the models; those that change most first."""
        if self.config.sample is None or not self.config.playground:
            return []
        active = self.context.active
        try:
            samples = read_samples(self.config.sample, active.numeric, active.categorical, columns=active.columns)
            found = [replace(sample, moved=self._places_moved(sample)) for sample in samples]
            return sorted(found, key=lambda sample: -sample.moved)
        except UrankError as error:
            if not hasattr(self, "samples"):  # at the start, fail instead
                raise
            logger.warning("the playground has no samples any more: %s", error)
            return []

    def _places_moved(self, sample: PlaygroundSample) -> float:
        """Return the mean number of places between an item's position in the log and in the order that is served."""
        context = self.context
        try:
            query = parse(context.types.explain, json.encode({"candidates": sample.candidates}))
            found = explain(context.active, context.reader.lists([query], batch=False), {})
        except Problem:  # the page shows it
            return 0.0
        served = next(order.items for order in found.orders if order.name == found.method)
        logged = {item: place for place, item in enumerate(sample.logged)}
        return float(np.mean([abs(logged[item] - place) for place, item in enumerate(served)]))

    def _rank(self, context: RequestContext, lists: RequestLists) -> tuple[list[RankedList], float]:
        started = time.perf_counter()
        rankings = rank_lists(context.active, lists, exploration=self.config.exploration, rng=self._rng)
        return rankings, time.perf_counter() - started

    async def _log_rankings(
        self, context: RequestContext, lists: RequestLists, rankings: Sequence[RankedList]
    ) -> tuple[list[str], float]:
        """Write rankings to the log; returns their ids, and how long it took."""
        sink, exploration = self._sink, self.config.exploration
        now = time.time_ns() // 1_000
        if sink is None:
            home = new_home(now)
            return [new_ranking_id(home, number) for number in range(1, len(rankings) + 1)], 0.0
        started = time.perf_counter()
        columns = log_columns(context.active, lists, exploration)
        ids = [sink.new_ranking_id() for _ in rankings]  # no await until the append: ids name its home
        records = [
            log_record(each, lists, columns, ranking_id=ranking_id, exploration=exploration, time_us=now)
            for each, ranking_id in zip(rankings, ids, strict=True)
        ]
        await self._append(sink, rankings=records, columns=columns)
        seconds = time.perf_counter() - started
        self.metrics.log_seconds.observe(seconds)
        return ids, seconds

    async def _append(self, sink: FeedbackSink, **records: Any) -> None:
        try:
            await sink.append(**records)
        except DataError as error:
            if not self._log_failed:  # once, since a line per request would fill the disk that is full
                logger.error("%s", error)
            self._log_failed = True
            raise Problem(503, "the feedback log cannot be written, so nothing is acknowledged") from None

    async def _rank_by_shadow(
        self, context: RequestContext, lists: RequestLists, rankings: Sequence[RankedList], ids: Sequence[str]
    ) -> None:
        """Rank the lists by the shadow model as well, in a thread, and log its orders."""
        loop = asyncio.get_running_loop()
        orders = await loop.run_in_executor(self._background, shadow_orders, context.active, lists, rankings)
        assert context.active.shadow is not None  # noqa: S101 - `rank` checks it
        for order, each in zip(orders, rankings, strict=True):
            agrees = order[0] == lists.item_ids[int(each.rows[each.ranks.argmin()])]  # before exploration
            self.metrics.shadow.labels("same first" if agrees else "other first").inc()
        if self._sink is not None:
            version = context.active.shadow.version
            records = [ShadowRecord(ranking_id, version, order) for ranking_id, order in zip(ids, orders, strict=True)]
            with suppress(Problem):  # it is logged, and no request waits for it
                await self._append(self._sink, shadows=records)

    def _run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)

    async def _probe_sink(self, sink: FeedbackSink) -> None:
        """Notice when the log cannot be written, and when it can be again."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            sink.probe()
            self._log_failed = self._log_failed and not sink.healthy


def _versions(contexts: Mapping[str, RequestContext]) -> list[str]:
    return [model.version for each in contexts.values() for model in each.active.models]


async def _end_with_parent(parent: int) -> None:
    """End this process, as after SIGTERM, when its parent is gone."""
    while os.getppid() == parent:
        await asyncio.sleep(TICK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


async def _export_regularly(folder: Path) -> None:
    """Export the feedback log to Parquet, in a separate process that takes no time from requests."""
    command = (sys.executable, "-m", "urank", "feedback", str(folder), "--window", f"{EXPORT_WINDOW:g}", "--quiet")
    while True:
        await asyncio.sleep(EXPORT_SECONDS)
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
        except OSError as error:  # out of memory or processes: the next attempt may succeed
            logger.warning("the feedback log was not exported to Parquet: %s", error.strerror)
            continue
        try:
            if await process.wait():
                logger.warning("the feedback log was not exported to Parquet; see the line above")
        finally:  # it may be interrupted at any time
            if process.returncode is None:
                process.terminate()
                await process.wait()
