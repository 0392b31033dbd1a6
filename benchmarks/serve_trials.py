"""Two trials of the server: bodies that are wrong in every way, and models that are replaced under load."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from threading import Thread

import numpy as np

from benchmarks.harness import Bar
from benchmarks.serve_load import Connection, Load, load
from benchmarks.serve_setup import KEY, get, post, rank_requests, urank_server, write_served_model

CONNECTIONS = 4
GROWTH_MB = 20.0
SAMPLES = 200


def hostile(folder: Path, quick: bool) -> Iterator[Bar]:
    """Malformed, huge and wrong-typed requests over raw sockets; memory is looked at all the while."""
    from tests.serve.hostile import hostile_requests

    count = 600 if quick else 10_000
    statuses: Counter[int] = Counter()
    memory: list[float] = []
    good = rank_requests(20, count=1)[0]
    with urank_server(folder / "model", folder / "errors.txt", "--log", folder / "hostile", "--timeout", 2) as server:
        with Connection(server.port) as connection:
            facts = json.loads(connection.ask(get("/v1/model"))[2])
        requests = iter(hostile_requests(facts, 0, count))
        while batch := list(islice(requests, max(1, count // SAMPLES))):
            statuses.update(_send_all(server.port, batch))
            memory.append(server.megabytes)
        with Connection(server.port) as connection:
            lives = server.process.poll() is None and connection.ask(good)[0] == 200
    half = len(memory) // 2
    settled, end = np.median(memory[half : half + max(1, half // 10)]), np.median(memory[-max(1, half // 10) :])
    name = f"{sum(statuses.values()):,} hostile requests"
    for status, number in sorted(statuses.items()):
        words = "closed without an answer" if status == 0 else f"status {status}"
        yield _bar(f"{name}: {words}", number, "", part="hostile")
    wrong = sum(number for status, number in statuses.items() if status >= 500)
    yield _bar(f"{name}: 5xx", wrong, "", at_most=0, part="hostile")
    yield _bar(f"{name}: the server still ranks", float(lives), "", at_least=1, part="hostile")
    yield _bar(f"{name}: memory at the end", memory[-1], "MB", part="hostile")
    yield _bar(f"{name}: highest memory", max(memory), "MB", part="hostile")
    growth = float(end - settled)
    yield _bar(f"{name}: growth over the second half", growth, "MB", at_most=GROWTH_MB, part="hostile")


Request = tuple[str, str, Mapping[str, str] | Iterable[tuple[str, str]], bytes]


def _send_all(port: int, requests: list[Request]) -> Counter[int]:
    """Send requests over some connections; how often each status came, 0 where nothing did."""
    found: list[int] = []

    def work(mine: list[Request]) -> None:
        connection = None
        for request in mine:
            connection = connection or Connection(port)
            status, stays = _send(connection, request)
            found.append(status)
            if not stays:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    threads = [Thread(target=work, args=(requests[number::CONNECTIONS],)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(found)


def _send(connection: Connection, request: Request) -> tuple[int, bool]:
    """The status of an answer, and whether the connection stays open. A server may answer before it has read all."""
    method, path, headers, body = request
    pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
    names = {name.lower() for name, _ in pairs}
    if "host" not in names:
        pairs.append(("Host", "127.0.0.1"))
    if not names & {"content-length", "transfer-encoding"}:
        pairs.append(("Content-Length", str(len(body))))
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in pairs), "", ""])
    sent = True
    try:
        connection.socket.sendall(head.encode("utf-8", "surrogateescape") + body)
    except OSError:
        sent = False
    try:
        status, head_back, _ = connection.answer(bodyless=method == "HEAD")
    except OSError:
        return 0, False
    plain = "content-length" not in names and "transfer-encoding" not in names  # the lengths agree
    return status, sent and plain and b"connection: close" not in head_back.lower()


def reload(folder: Path, quick: bool) -> Iterator[Bar]:
    """Two models in turn, and now and then a broken one, by signal and by request, while others ask for rankings."""
    seconds = 5.0 if quick else 20.0
    models = [folder / "model", write_served_model(folder / "another", seed=1), _broken(folder)]
    served, key = shutil.copytree(models[0], folder / "served"), folder / "key"
    key.write_text(KEY, encoding="ascii")
    header = f"Authorization: Bearer {KEY}"
    requests = [
        post("/v1/rank", each.partition(b"\r\n\r\n")[2], "application/json", header) for each in rank_requests(100)
    ]
    answers: list[Load] = []
    reloads: Counter[str] = Counter()
    with urank_server(served, folder / "errors.txt", "--key-file", key) as server:
        asking = Thread(target=lambda: answers.append(load(server.port, requests, connections=4, seconds=seconds)))
        asking.start()
        time.sleep(0.5)
        number = 0
        with Connection(server.port) as connection:
            while asking.is_alive():
                number += 1
                broken = number % 5 == 0
                _replace(served, models[2] if broken else models[number % 2])
                if number % 2 and not broken:
                    os.kill(server.process.pid, signal.SIGHUP)
                    time.sleep(0.3)
                else:
                    status = connection.ask(post("/v1/reload", b"", "application/json", header))[0]
                    reloads[f"{'broken' if broken else 'whole'} {status}"] += 1
        asking.join()
    found = answers[0]
    asked = sum(found.statuses.values())
    failed = asked - found.statuses.get("200", 0) + len(found.broken)
    name = f"reload under load, {asked:,} requests"
    yield _bar(f"{name}: models put in place", number, "", part="reload")
    yield _bar(f"{name}: failed requests", failed, "", at_most=0, part="reload")
    yield _bar(f"{name}: versions that answered", len(found.models), "", at_least=2, part="reload")
    yield _bar(f"{name}: least answers of a version", min(found.models.values()), "", part="reload")
    taken = sum(count for kind, count in reloads.items() if kind.startswith("broken") and kind != "broken 409")
    yield _bar(f"{name}: broken models not refused", taken, "", at_most=0, part="reload")
    yield _bar(f"{name}: broken models refused", reloads["broken 409"], "", at_least=1, part="reload")
    refused = sum(count for kind, count in reloads.items() if kind.startswith("whole") and kind != "whole 200")
    yield _bar(f"{name}: whole models refused", refused, "", at_most=0, part="reload")
    yield _bar(f"{name}: p99 of the server time", found.p99(), "ms", part="reload")


def _broken(folder: Path) -> Path:
    """A model whose graph is cut off."""
    target = shutil.copytree(folder / "model", folder / "broken")
    graph = target / "clicks.onnx"
    graph.write_bytes(graph.read_bytes()[:-1000])
    return Path(target)


def _replace(served: Path, model: Path) -> None:
    """Put a copy of a model in the place of another by rename, as `urank train --overwrite` does."""
    fresh, old = served.with_name("fresh"), served.with_name("old")
    shutil.copytree(model, fresh)
    served.rename(old)
    fresh.rename(served)
    shutil.rmtree(old)


def _bar(
    name: str, value: float, unit: str, *, part: str, at_least: float | None = None, at_most: float | None = None
) -> Bar:
    return Bar(name, value, unit, at_least=at_least, at_most=at_most, part=part)
