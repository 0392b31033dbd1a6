"""`kill -9` under load, again and again, with one feedback log: what was acknowledged must be there in the end."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import polars as pl

from benchmarks.harness import Bar
from benchmarks.serve_load import Connection
from benchmarks.serve_setup import post, rank_requests, urank_server
from urank.serve.feedback_export import LOCK

CONNECTIONS = 4
CANDIDATES = 20


@dataclass
class Promises:
    """What the server acknowledged, by any connection.

    Attributes:
        rankings: the items of each, from the top.
        clicks: ranking and item.
        refused: statuses that are neither 200 nor 202.
    """

    rankings: dict[str, list[str]] = field(default_factory=dict)
    clicks: set[tuple[str, str]] = field(default_factory=set)
    refused: list[int] = field(default_factory=list)


def crash(folder: Path, quick: bool) -> Iterator[Bar]:
    """Kill a server, and often an export beside it, after a random time; the next one goes on with the same log."""
    rounds = 3 if quick else 100
    rng = random.Random(0)  # noqa: S311 - it decides when to kill
    log, promises = folder / "killed", Promises()
    requests = rank_requests(CANDIDATES)
    begun, starts, interrupted = time.perf_counter(), 0.0, 0
    for number in range(rounds):
        with urank_server(folder / "model", folder / "errors.txt", "--log", log) as server:
            starts += server.start_seconds
            threads = [
                Thread(target=_ask, args=(server.port, requests, promises, random.Random(rng.random())))  # noqa: S311
                for _ in range(CONNECTIONS)
            ]
            for thread in threads:
                thread.start()
            time.sleep(rng.uniform(0.2, 1.5))
            beside = _export(log) if rng.random() < 0.5 else None
            if beside is not None:
                _wait_for_work(beside, log)
                time.sleep(rng.uniform(0.0, 0.2))
            server.kill()
            if beside is not None:
                interrupted += beside.poll() is None
                os.killpg(beside.pid, signal.SIGKILL)
                beside.wait()
            for thread in threads:
                thread.join()
        if number % 10 == 9:  # now and then one comes to its end
            _export(log).wait()
    if _export(log).wait():
        raise RuntimeError("urank feedback failed")
    yield _bar(f"kill -9, {rounds} times: mean start", starts / rounds, "s")
    yield _bar(f"kill -9, {rounds} times: all of it", time.perf_counter() - begun, "s")
    yield _bar(f"kill -9, {rounds} times: exports killed at work", interrupted, "")
    yield from _kept(log, promises, rounds)


def _kept(log: Path, promises: Promises, rounds: int) -> Iterator[Bar]:
    """Hold what was acknowledged against what the log has."""
    rows = pl.concat([pl.read_parquet(path, columns=["session_id", "item_id", "position", "click"])
                      for path in log.glob("log*/[!.]*.parquet")])  # fmt: skip
    lists = rows.sort("session_id", "position").group_by("session_id", maintain_order=True)
    found = {
        ranking: (items, positions)
        for ranking, items, positions in lists.agg("item_id", "position").iter_rows()
    }  # fmt: skip
    clicked = set(rows.filter(pl.col("click") == 1).select("session_id", "item_id").iter_rows())
    expected = {ranking: (items, list(range(1, len(items) + 1))) for ranking, items in promises.rankings.items()}
    lost = [ranking for ranking in expected if ranking not in found]
    other = [ranking for ranking, told in expected.items() if ranking in found and found[ranking] != told]
    doubled = [ranking for ranking, (items, _) in found.items() if len(set(items)) != len(items)]
    name = f"kill -9, {rounds} times"
    yield _bar(f"{name}: rankings acknowledged", len(expected), "")
    yield _bar(f"{name}: clicks acknowledged", len(promises.clicks), "")
    yield _bar(f"{name}: requests refused", len(promises.refused), "", at_most=0)
    yield _bar(f"{name}: rankings lost", len(lost), "", at_most=0)
    yield _bar(f"{name}: rankings with other items or positions", len(other), "", at_most=0)
    yield _bar(f"{name}: rankings twice", len(doubled), "", at_most=0)
    yield _bar(f"{name}: clicks lost", len(promises.clicks - clicked), "", at_most=0)
    yield _bar(f"{name}: databases left over", len(list(log.glob("records/*"))), "", at_most=0)


def _ask(port: int, requests: list[bytes], promises: Promises, rng: random.Random) -> None:
    """Rank and click until the server is gone; some clicks are on rankings of earlier servers."""
    earlier = list(promises.rankings)
    try:
        with Connection(port) as connection:
            while True:
                status, _, body = connection.ask(rng.choice(requests))
                if status != 200:
                    promises.refused.append(status)
                    continue
                answer = json.loads(body)
                ranking, items = answer["ranking_id"], [each["item_id"] for each in answer["items"]]
                promises.rankings[ranking] = items
                if earlier and rng.random() < 0.1:
                    ranking = rng.choice(earlier)
                if rng.random() < 0.5:
                    _click(connection, ranking, rng.sample(promises.rankings[ranking], rng.randint(1, 3)), promises)
    except OSError:
        return


def _click(connection: Connection, ranking: str, items: list[str], promises: Promises) -> None:
    events = [{"ranking_id": ranking, "item_id": item} for item in items]
    status, _, _ = connection.ask(post("/v1/feedback", json.dumps({"events": events}).encode()))
    if status == 202:
        promises.clicks.update((ranking, item) for item in items)
    else:
        promises.refused.append(status)


def _export(log: Path) -> subprocess.Popen[bytes]:
    """Turn a log into Parquet, in a process group of its own."""
    command = [sys.executable, "-m", "urank", "feedback", str(log), "--quiet"]
    return subprocess.Popen(command, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _wait_for_work(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until an export holds its lock, or has ended; before that it only loads its modules."""
    until = time.perf_counter() + 30
    while process.poll() is None and time.perf_counter() < until:
        with (log / LOCK).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        time.sleep(0.02)


def _bar(name: str, value: float, unit: str, *, at_most: float | None = None) -> Bar:
    return Bar(name, value, unit, at_most=at_most, part="crash")
