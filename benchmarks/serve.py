"""The server under load, on the machine's own loopback and with one worker.

    python -m benchmarks serve                     all of it, about 20 minutes
    python -m benchmarks serve --only cpu          CPU time of a request: of 20, 100 and 1,000 candidates against a
                                                   minimal application of FastAPI and ONNX Runtime, and by item id
                                                   against a bare call of ONNX Runtime
    python -m benchmarks serve --only latency      lists of 100: server time against a bare call of ONNX Runtime and
                                                   the decoding of JSON
    python -m benchmarks serve --only arrow        lists of 1,000: the model's share, Arrow against JSON
    python -m benchmarks serve --only sizes        requests a second, memory and start, for whoever sizes a machine
    python -m benchmarks serve --only crash        kill -9 again and again: nothing acknowledged may be lost
    python -m benchmarks serve --only hostile      bodies that are wrong in every way: no 5xx, no crash, no growth
    python -m benchmarks serve --only reload       models replaced under load: no request may fail
    python -m benchmarks serve --only overload     5 times the capacity: how fast are those answered, and `/healthz`
    python -m benchmarks serve --only start        from the command to the first answer; memory of the parent process

Lists have 136 features unless said, and models are of the default kind: networks and trees on the features and their
within-list columns, for ten positions, ranking by the exact matching. The load generator
(`serve_load`) is a process of its own and shares the cores with the server. What is compared takes turns, round by
round, and the ratio of a bar is the median of those of the rounds. Server time is what `Server-Timing` says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness import Bar
from benchmarks.serve_crash import crash
from benchmarks.serve_load import Load, load
from benchmarks.serve_overload import overload, start
from benchmarks.serve_peers import bare
from benchmarks.serve_setup import (
    ARROW,
    JSON,
    Running,
    by_id_requests,
    columnar,
    json_body,
    post,
    rank_requests,
    started,
    urank_server,
    write_items,
    write_served_model,
)
from benchmarks.serve_trials import hostile, reload

BUSY = 8
"""Connections that keep a server busy."""

Part = Callable[[Path, bool], Iterator[Bar]]


def run(*, quick: bool, only: Sequence[str] = ()) -> Iterator[Bar]:
    parts: dict[str, Part] = {
        "cpu": _cpu,
        "latency": _latency,
        "arrow": _arrow,
        "sizes": _sizes,
        "crash": crash,
        "hostile": hostile,
        "reload": reload,
        "overload": overload,
        "start": start,
    }
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        folder = Path(name)
        write_served_model(folder / "model")
        for part, measured in parts.items():
            if not only or part in only:
                yield from measured(folder, quick)


def _cpu(folder: Path, quick: bool) -> Iterator[Bar]:
    """CPU time of requests, over two connections."""
    rounds, seconds = (3, 1.0) if quick else (7, 3.0)
    for candidates in (20, 100, 1_000):
        requests = rank_requests(candidates, count=4)
        with _servers(folder, "fastapi") as servers:
            ways = {name: partial(_cpu_of, server, requests, seconds) for name, server in servers.items()}
            times = _in_turns(ways, rounds)
        name = f"{candidates:,} candidates, CPU time / FastAPI and ONNX Runtime"
        yield _bar(name, _ratio(times, "plain", "fastapi"), "times", at_most=0.6, part="cpu")
        logged = _ratio(times, "logged", "fastapi")
        yield _bar(f"{name}, with the feedback log", logged, "times", at_most=0.9, part="cpu")
        for kind, found in times.items():
            yield _bar(f"{candidates:,} candidates, CPU time: {kind}", 1e3 * median(found), "ms", part="cpu")
    yield from _by_id(folder, rounds, seconds)


def _by_id(folder: Path, rounds: int, seconds: float) -> Iterator[Bar]:
    """Lists of 1,000 items with 30 features, which the server holds."""
    items, features = 100_000, 30
    model, errors = write_served_model(folder / "model-30", features=features), folder / "errors.txt"
    path = write_items(folder / "items.parquet", items, features)
    ids = by_id_requests(1_000, items)
    bodies = [json_body(1_000, seed, features=features) for seed in range(4)]
    columns = [post("/v1/rank", columnar(body)) for body in bodies]
    with urank_server(model, errors, "--items", path) as server:
        ways: dict[str, Callable[[], float]] = {
            "item ids": partial(_cpu_of, server, ids, seconds),
            "columns": partial(_cpu_of, server, columns, seconds),
            "candidates": partial(_cpu_of, server, [post("/v1/rank", body) for body in bodies], seconds),
            "a bare call": lambda: 1e-3 * bare(model, bodies, 100)["graph, CPU time"][0],
        }
        times = _in_turns(ways, rounds)
    name = f"1,000 candidates, {features} features"
    ratio = _ratio(times, "item ids", "a bare call")
    yield _bar(f"{name}, CPU time by item id / a bare call of ONNX Runtime", ratio, "times", at_most=3, part="cpu")
    for kind, found in times.items():
        yield _bar(f"{name}, CPU time: {kind}", 1e3 * median(found), "ms", part="cpu")


def _cpu_of(server: Running, requests: Sequence[bytes], seconds: float) -> float:
    """CPU seconds of a request."""
    load(server.port, requests, connections=2, seconds=seconds / 5)
    before = server.cpu_seconds
    found = load(server.port, requests, connections=2, seconds=seconds)
    return (server.cpu_seconds - before) / (found.rate * found.seconds)


def _latency(folder: Path, quick: bool) -> Iterator[Bar]:
    """Lists of 100, one connection."""
    rounds, seconds = (2, 1.5) if quick else (5, 6.0)
    requests, bodies = rank_requests(100), [json_body(100, seed) for seed in range(8)]
    found: dict[str, list[Load]] = {"plain": [], "logged": []}
    times: list[dict[str, list[float]]] = []
    with _servers(folder) as servers:
        for _ in range(rounds):
            for kind, loads in found.items():
                loads.append(load(servers[kind].port, requests, connections=1, seconds=seconds))
            times.append(bare(folder / "model", bodies, len(found["plain"][-1].number)))

    def ratio(kind: str, base: str, q: float = 0.99) -> float:
        pairs = zip(found[kind], times, strict=True)
        return median(each.quantile(q) / float(np.quantile(time[base], q)) for each, time in pairs)

    name = "100 candidates, server time / bare call and decoding"
    yield _bar(f"{name}: p99, with the feedback log", ratio("logged", "decoded"), "times", at_most=2)
    yield _bar(f"{name}: p99", ratio("plain", "decoded"), "times")
    yield _bar(f"{name}: median, with the feedback log", ratio("logged", "decoded", 0.5), "times")
    yield _bar(f"{name}: p99, json module, with the feedback log", ratio("logged", "json"), "times")
    for kind, words in (("plain", "server time"), ("logged", "server time with the feedback log")):
        for q, told in ((0.5, "median"), (0.99, "p99")):
            value = median(each.quantile(q) for each in found[kind])
            yield _bar(f"100 candidates, {words}: {told}", value, "ms")
    for base, words in (("decoded", "bare call and decoding"), ("graph", "bare call alone")):
        for q, told in ((0.5, "median"), (0.99, "p99")):
            value = median(float(np.quantile(each[base], q)) for each in times)
            yield _bar(f"100 candidates, {words}: {told}", value, "ms")


def _arrow(folder: Path, quick: bool) -> Iterator[Bar]:
    """Lists of 1,000."""
    rounds, seconds = (2, 2.0) if quick else (5, 6.0)
    bodies = {JSON: rank_requests(1_000, count=4), ARROW: rank_requests(1_000, kind=ARROW, count=4)}
    words = {JSON: "JSON", ARROW: "Arrow"}
    shares: dict[str, list[float]] = {kind: [] for kind in bodies}
    totals: dict[str, list[float]] = {kind: [] for kind in bodies}
    with urank_server(folder / "model", folder / "errors.txt") as server:
        for _ in range(rounds):
            for kind, requests in bodies.items():
                found = load(server.port, requests, connections=1, seconds=seconds)
                shares[kind].append(sum(found.model) / sum(found.total))
                totals[kind].append(found.quantile(0.5))
        ways = {words[kind]: partial(_rate, server, requests, seconds) for kind, requests in bodies.items()}
        rates = _in_turns(ways, rounds)
    for kind in (ARROW, JSON):
        share = median(shares[kind])
        yield _bar(f"1,000 candidates, {words[kind]}: the model's share", share, "", part="arrow")
        yield _bar(f"1,000 candidates, {words[kind]}: server time", median(totals[kind]), "ms", part="arrow")
    ratio = _ratio(rates, "Arrow", "JSON")
    yield _bar("1,000 candidates, throughput: Arrow / JSON", ratio, "times", part="arrow")


def _sizes(folder: Path, quick: bool) -> Iterator[Bar]:
    """What whoever sizes a machine wants to know."""
    seconds = 1.0 if quick else 6.0
    with _servers(folder) as servers:
        for kind, words in (("plain", ""), ("logged", ", with the feedback log")):
            server = servers[kind]
            yield _bar(f"start{words}", server.start_seconds, "s", part="sizes")
            yield _bar(f"memory at start{words}", server.megabytes, "MB", part="sizes")
            for candidates in (10, 100, 1_000):
                for body, name in ((JSON, "JSON"), (ARROW, "Arrow")):
                    requests = rank_requests(candidates, kind=body, count=4)
                    rate = _rate(server, requests, seconds)
                    yield _bar(f"{candidates:,} candidates, {name}{words}", rate, "requests/s", part="sizes")
            yield _bar(f"memory after it{words}", server.megabytes, "MB", part="sizes")


@contextmanager
def _servers(folder: Path, *peers: str) -> Iterator[dict[str, Running]]:
    """A server without a log, one with it, and the peers that are named, by name; all idle until asked."""
    model, errors = folder / "model", folder / "errors.txt"
    with ExitStack() as stack:
        servers: dict[str, Running] = {
            "plain": stack.enter_context(urank_server(model, errors)),
            "logged": stack.enter_context(urank_server(model, errors, "--log", folder / "feedback")),
        }
        for kind in peers:
            servers[kind] = stack.enter_context(started("benchmarks.serve_peers", kind, model, errors=errors))
        yield servers


def _rate(server: Running, requests: Sequence[bytes], seconds: float) -> float:
    """Answers a second of a server that never waits."""
    return load(server.port, requests, connections=BUSY, seconds=seconds).rate


def _in_turns(actions: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each action gave, round by round."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            found[name].append(action())
    return found


def _ratio(rates: dict[str, list[float]], one: str, other: str) -> float:
    return median(a / b for a, b in zip(rates[one], rates[other], strict=True))


def _bar(
    name: str,
    value: float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    part: str = "latency",
) -> Bar:
    return Bar(name, value, unit, at_least=at_least, at_most=at_most, part=part)
