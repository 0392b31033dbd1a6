"""Load for a server, from a process of its own: requests that are bytes already, over connections that stay open.

    python -m benchmarks.serve_load PORT CONNECTIONS SECONDS RATE REQUESTS...     prints one line of JSON

Each connection is a thread that sends a request, reads the answer by its `Content-Length`, and sends the next. What the
answers say is taken apart after the last one, so that the load generator takes little from the cores that the server
needs too. With one connection nothing waits for anything but the server: that is for latency. With several the server
never waits: that is for throughput. With a rate above 0, requests are sent at random times at that rate, however long
the answers take, as long as a connection is free: that is for overload.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from threading import Lock, Thread

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TIMING = re.compile(rb"(total|model|log);dur=([\d.]+)")
_MODEL = re.compile(rb'"model":"([^"]+)"')
_END = b"\r\n\r\n"
WAIT_SECONDS = 60.0


class Connection:
    """A connection that stays open."""

    def __init__(self, port: int, seconds: float = WAIT_SECONDS) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=seconds)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)  # one call for most requests

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Send a request; the status, head and body of its answer.

        Raises:
            OSError: when the connection broke before the answer was whole.
        """
        self.socket.sendall(request)
        return self.answer()

    def answer(self, *, bodyless: bool = False) -> tuple[int, bytes, bytes]:
        """The next answer that comes; that to HEAD tells the length of a body which does not follow."""
        data = self._more(b"")
        while (end := data.find(_END)) < 0:
            data = self._more(data)
        head, body = data[: end + 2], data[end + 4 :]
        found = _LENGTH.search(head)
        missing = (int(found[1]) if found and not bodyless else 0) - len(body)
        parts = [body]
        while missing > 0:
            parts.append(self._more(b""))
            missing -= len(parts[-1])
        return int(head[9:12]), head, b"".join(parts)

    def _more(self, data: bytes) -> bytes:
        part = self.socket.recv(262_144)
        if not part:
            raise ConnectionResetError("the server closed the connection")
        return data + part


@dataclass(frozen=True)
class Load:
    """What came of it, in milliseconds, a value for each answer of status 200.

    Attributes:
        seconds: how long it took.
        statuses: how many answers had each status.
        broken: connections that broke, with what they said.
        number: which of the requests it was.
        latency: as the client saw it.
        total, model, log: as the server says in `Server-Timing`; nothing where it says nothing.
        models: how many answers came from each version of the model, as far as they are JSON.
    """

    seconds: float
    statuses: dict[str, int]
    broken: list[str]
    number: list[int]
    latency: list[float]
    total: list[float]
    model: list[float]
    log: list[float]
    models: dict[str, int]

    @property
    def rate(self) -> float:
        """Answers a second."""
        if set(self.statuses) != {"200"} or self.broken:
            raise RuntimeError(f"not every request was answered: {self.statuses}, {self.broken}")
        return len(self.latency) / self.seconds

    def p99(self, *, of: str = "total", every: int = 1, at: int = 0) -> float:
        """The 99th percentile of a time, of those requests alone whose number leaves `at` when divided by `every`."""
        return self.quantile(0.99, of=of, every=every, at=at)

    def quantile(self, q: float, *, of: str = "total", every: int = 1, at: int = 0) -> float:
        """The same for any quantile."""
        import numpy as np  # not needed where the load is made

        chosen = np.array(self.number) % every == at
        return float(np.quantile(np.array(getattr(self, of))[chosen], q))


def load(port: int, requests: Sequence[bytes], *, connections: int, seconds: float, rate: float = 0.0) -> Load:
    """Run this module as a process."""
    with tempfile.TemporaryDirectory(prefix="urank-load-") as folder:
        files = [Path(folder) / f"{number}.http" for number in range(len(requests))]
        for file, request in zip(files, requests, strict=True):
            file.write_bytes(request)
        command = [sys.executable, "-m", "benchmarks.serve_load", port, connections, seconds, rate, *files]
        done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    return Load(**json.loads(done.stdout))


def _arrivals(begun: float, rate: float, rng: Random) -> Iterator[float]:
    """Times of a Poisson process; a generator that threads share needs a lock."""
    lock, when = Lock(), begun

    class Times(Iterator[float]):
        def __next__(self) -> float:
            nonlocal when
            with lock:
                when += rng.expovariate(rate)
                return when

    return Times()


class _Asker:
    """One connection and what it saw."""

    def __init__(
        self, port: int, requests: Sequence[bytes], first: int, until: float, due: Iterator[float] | None
    ) -> None:
        self.port, self.requests, self.first, self.until, self.due = port, requests, first, until, due
        self.seen: list[tuple[int, float, int, bytes, bytes]] = []
        self.broken: str | None = None

    def run(self) -> None:
        clock, number, count = time.perf_counter, self.first, len(self.requests)
        try:
            with Connection(self.port) as connection:
                while clock() < self.until:
                    if self.due is not None:
                        time.sleep(max(0.0, next(self.due) - clock()))
                    begun = clock()
                    status, head, body = connection.ask(self.requests[number % count])
                    self.seen.append((number % count, clock() - begun, status, head, body[:300]))
                    number += 1
        except OSError as error:
            self.broken = f"{type(error).__name__}: {error}"


def measure(port: int, requests: Sequence[bytes], *, connections: int, seconds: float, rate: float = 0.0) -> Load:
    """Ask for some seconds, from this process."""
    begun = time.perf_counter()
    due = _arrivals(begun, rate, Random(0)) if rate else None  # noqa: S311 - a load is no secret
    askers = [_Asker(port, requests, number, begun + seconds, due) for number in range(connections)]
    threads = [Thread(target=asker.run) for asker in askers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    seen = [each for asker in askers for each in asker.seen]
    good = [each for each in seen if each[2] == 200]
    timings = [{key: float(value) for key, value in _TIMING.findall(head)} for *_, head, _ in good]
    return Load(
        seconds=took,
        statuses={str(status): count for status, count in Counter(each[2] for each in seen).items()},
        broken=[asker.broken for asker in askers if asker.broken is not None],
        number=[number for number, *_ in good],
        latency=[1e3 * latency for _, latency, *_ in good],
        total=[each[b"total"] for each in timings if b"total" in each],
        model=[each[b"model"] for each in timings if b"model" in each],
        log=[each[b"log"] for each in timings if b"log" in each],
        models=dict(Counter(version[1].decode() for *_, body in good if (version := _MODEL.search(body)))),
    )


if __name__ == "__main__":
    port, connections, seconds, rate, *files = sys.argv[1:]
    asked = [Path(file).read_bytes() for file in files]
    found = measure(int(port), asked, connections=int(connections), seconds=float(seconds), rate=float(rate))
    print(json.dumps(asdict(found)))
