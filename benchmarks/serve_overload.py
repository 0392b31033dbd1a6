"""More requests than the server can rank: half its capacity, then five times as many, and what probes notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import numpy as np
import psutil

from benchmarks.harness import Bar
from benchmarks.serve_load import Connection, Load, load
from benchmarks.serve_setup import get, rank_requests, urank_server

CONNECTIONS = 64
CROWD = 300
"""Connections that ask again at once, whatever the answer."""
PROBE_SECONDS = 0.02


class _Probe:
    """Asks for the health of a server all the while, each time on a new connection; milliseconds of each answer."""

    def __init__(self, port: int) -> None:
        self.port, self.times, self._ended = port, list[float](), Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> list[float]:
        self._thread.start()
        return self.times

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(PROBE_SECONDS):
            begun = time.perf_counter()
            with Connection(self.port) as connection:
                connection.ask(get("/healthz"))
            self.times.append(1e3 * (time.perf_counter() - begun))


def overload(folder: Path, quick: bool) -> Iterator[Bar]:
    """Lists of 100 at half the capacity and at five times; lists of 1,000 from a crowd that never waits."""
    seconds = 4.0 if quick else 15.0
    requests, long = rank_requests(100), rank_requests(1_000, count=4)
    with urank_server(folder / "model", folder / "errors.txt") as server:
        load(server.port, requests, connections=4, seconds=1.0)
        capacity = load(server.port, requests, connections=4, seconds=seconds).rate
        found: dict[str, tuple[Load, list[float]]] = {}
        for name, rate in (("half", capacity / 2), ("five", 5 * capacity)):
            load(server.port, requests, connections=CONNECTIONS, seconds=1.0, rate=rate)  # to a steady state
            with _Probe(server.port) as times:
                asked = load(server.port, requests, connections=CONNECTIONS, seconds=seconds, rate=rate)
            found[name] = asked, times
        with _Probe(server.port) as times:
            asked = load(server.port, long, connections=CROWD, seconds=seconds)
        found["crowd"] = asked, times
    words = {"half": "half the capacity", "five": "5 times the capacity", "crowd": "1,000 candidates, 300 connections"}
    yield _bar("capacity", capacity, "requests/s")
    for name, (asked, times) in found.items():
        sent = sum(asked.statuses.values())
        yield _bar(f"{words[name]}: offered", sent / asked.seconds, "requests/s")
        yield _bar(f"{words[name]}: answered", len(asked.latency) / asked.seconds, "requests/s")
        yield _bar(f"{words[name]}: p50 of those answered", asked.quantile(0.5, of="latency"), "ms")
        yield _bar(f"{words[name]}: p99 of those answered", asked.p99(of="latency"), "ms")
        yield _bar(f"{words[name]}: /healthz p99", float(np.quantile(times, 0.99)), "ms", at_most=100)
        broken = sent - asked.statuses.get("200", 0) - asked.statuses.get("503", 0) + len(asked.broken)
        yield _bar(f"{words[name]}: neither answered nor refused with 503", broken, "", at_most=0)
    ratio = found["five"][0].p99(of="latency") / found["half"][0].p99(of="latency")
    yield _bar("p99 at 5 times the capacity / at half of it", ratio, "times", at_most=3)


def start(folder: Path, quick: bool) -> Iterator[Bar]:
    """From the command to the first answer, and the memory of the process that watches the workers."""
    times = []
    for _ in range(2 if quick else 5):
        with urank_server(folder / "model", folder / "errors.txt", "--workers", 2) as server:
            times.append(server.start_seconds)
            parent = server.megabytes
            workers = [each.memory_info().rss / 2**20 for each in psutil.Process(server.process.pid).children()]
    yield _bar("start to the first answer, two workers", float(np.median(times)), "s", at_most=2.5, part="start")
    yield _bar("memory of the parent process", parent, "MB", at_most=60, part="start")
    yield _bar("memory of a worker", max(workers), "MB", part="start")


def _bar(name: str, value: float, unit: str, *, at_most: float | None = None, part: str = "overload") -> Bar:
    return Bar(name, value, unit, at_most=at_most, part=part)
