"""More requests than a server can rank: some are refused early, the others and probes are answered."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serve.cases import example, saved
from serve.server import running
from urank.client import Client
from urank.serve.admission import (
    ARRIVAL_SECONDS,
    BURST_SECONDS,
    SHORT_QUEUE,
    STAND_SECONDS,
    WINDOW_SECONDS,
    Admission,
    Ticket,
)


class Clock:
    """The time, as the test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("urank.serve.admission.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def work(queue: Admission, ticket: Ticket, clock: Clock, seconds: float) -> None:
    """A request that keeps the loop busy in its turn."""
    await queue.turn(ticket)
    clock.now += seconds


def admitted(queue: Admission, count: int) -> list[Ticket]:
    return [ticket for _ in range(count) if (ticket := queue.admit()) is not None]


def test_a_burst_is_admitted_and_a_standing_queue_is_not(clock: Clock) -> None:
    service = 0.01

    async def serve() -> tuple[int, int, int]:
        queue = Admission()
        tickets = admitted(queue, 30)
        await asyncio.gather(*(work(queue, each, clock, service) for each in tickets))  # it learns how long one takes
        tickets = admitted(queue, 1_000)
        burst = len(tickets)
        again = len(admitted(queue, 1_000))
        await asyncio.gather(*(work(queue, each, clock, service) for each in tickets))
        short = len(admitted(queue, 1_000))
        clock.now += WINDOW_SECONDS + 1e-3  # a window in which more than a fifth was refused
        return burst, again, short

    burst, again, short = asyncio.run(serve())
    assert burst == pytest.approx(BURST_SECONDS / service, rel=0.2)
    assert again == 0
    assert short == SHORT_QUEUE + 1


def test_a_queue_that_stands_is_overload_however_short(clock: Clock) -> None:
    """Twenty requests of 2 ms wait much less than a burst may; they are admitted, but not for long."""
    queue = Admission()
    queue._turn_seconds = 0.002
    admitted(queue, 20)
    clock.now += STAND_SECONDS / 2
    tickets = admitted(queue, 1)
    clock.now += STAND_SECONDS
    queue._arriving = dict.fromkeys([*tickets, *(Ticket() for _ in range(20))], clock.now)
    assert queue.admit() is None
    queue._arriving = {}
    assert queue.admit() is not None


def test_after_a_quiet_time_bursts_are_admitted_again(clock: Clock) -> None:
    queue = Admission()
    first = len(admitted(queue, 1_000))
    assert first < 1_000
    for _ in range(3):
        clock.now += WINDOW_SECONDS + ARRIVAL_SECONDS
        assert len(admitted(queue, 2)) == 2
    clock.now += WINDOW_SECONDS + ARRIVAL_SECONDS
    assert len(admitted(queue, 1_000)) == first


def test_bodies_that_do_not_arrive_keep_nobody_out(clock: Clock) -> None:
    queue = Admission()
    assert len(admitted(queue, 10_000)) < 10_000
    assert queue.admit() is None
    clock.now += ARRIVAL_SECONDS + 1e-3
    assert queue.admit() is not None


def test_other_work_of_the_loop_goes_on_between_turns() -> None:
    """Requests whose bodies arrive at the same time do not follow each other without a break."""
    order: list[str] = []

    async def request(queue: Admission, ticket: Ticket) -> None:
        await queue.turn(ticket)
        order.append("turn")

    async def others() -> None:
        for _ in range(50):
            order.append("other")
            await asyncio.sleep(0)

    async def serve() -> None:
        queue = Admission()
        tickets = [queue.admit() for _ in range(10)]
        requests = [request(queue, ticket) for ticket in tickets if ticket is not None]
        await asyncio.gather(*requests, others())

    asyncio.run(serve())
    assert order.count("turn") == 10
    assert "turn turn turn" not in " ".join(order)


def test_cancelled_requests_lose_their_turn() -> None:
    async def serve() -> list[int]:
        queue, done = Admission(), []

        async def request(number: int) -> None:
            ticket = queue.admit()
            assert ticket is not None
            await queue.turn(ticket)
            done.append(number)

        tasks = [asyncio.create_task(request(number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    assert asyncio.run(serve()) == [0, 1, 3, 4]


def crowd(url: str, body: bytes, connections: int, requests: int) -> tuple[Counter[int], list[httpx.Response]]:
    """Many connections that ask again at once, whatever the answer."""
    refusals: list[httpx.Response] = []

    def ask(_: int) -> Counter[int]:
        found: Counter[int] = Counter()
        headers = {"content-type": "application/json"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            for _ in range(requests):
                answer = http.post("/v1/rank", content=body)
                found[answer.status_code] += 1
                if answer.status_code != 200:
                    refusals.append(answer)
        return found

    with ThreadPoolExecutor(connections) as pool:
        return sum(pool.map(ask, range(connections)), Counter()), refusals


@pytest.mark.slow
@pytest.mark.parametrize(("candidates", "padding"), [(1_000, 0), (1_000, 2_000_000), (2_000, 0)])
def test_a_crowd_is_answered_or_refused_with_503(candidates: int, padding: int) -> None:
    """Small bodies, bodies that are still arriving when they are refused, and lists that are ranked in a thread."""
    body = json.dumps(example("trees", candidates)).encode() + b" " * padding
    with running(saved("trees")) as (url, _):
        probes: list[int] = []
        ended = threading.Event()

        def probe() -> None:
            while not ended.is_set():
                probes.extend(httpx.get(f"{url}{path}").status_code for path in ("/healthz", "/readyz", "/metrics"))

        thread = threading.Thread(target=probe)
        thread.start()
        statuses, refusals = crowd(url, body, connections=100, requests=5)
        ended.set()
        thread.join()
        assert set(statuses) == {200, 503}
        assert statuses.total() == 500
        assert set(probes) == {200}
        for refusal in refusals:
            assert refusal.headers["retry-after"] == "1"
            assert refusal.headers["content-type"] == "application/problem+json"
            assert refusal.headers["x-content-type-options"] == "nosniff"
            assert refusal.json()["status"] == 503
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        shed = [line for line in lines if line.startswith("urank_requests_total") and 'status="503"' in line]
        assert sum(float(line.split()[-1]) for line in shed) == statuses[503]
        assert any('route="shed"' in line for line in shed)
        assert any(line.startswith("urank_queue_seconds_count ") and not line.endswith(" 0.0") for line in lines)
        after = [httpx.post(f"{url}/v1/rank", content=body, headers={"content-type": "application/json"})]
        assert [each.status_code for each in after] == [200]


@pytest.mark.slow
def test_a_refused_client_that_waits_for_leave_to_send_is_not_waited_for() -> None:
    """It asked with `Expect: 100-continue`, as curl does, and will not send the body after a refusal."""
    start = (
        b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"
    )
    with running(saved("trees")) as (url, _):
        address = httpx.URL(url)
        connections = [socket.create_connection((address.host, address.port), timeout=30) for _ in range(1_000)]
        for connection in connections:
            connection.sendall(start)
        heads = [connection.recv(4_096) for connection in connections]
        refused = [number for number, head in enumerate(heads) if head.startswith(b"HTTP/1.1 503 ")]
        assert refused
        for number in refused:
            assert b"\r\nconnection: close\r\n" in heads[number]
            assert connections[number].recv(4_096) == b""
        for connection in connections:
            connection.close()


@pytest.mark.slow
def test_slow_clients_keep_nobody_out() -> None:
    """Bodies that arrive drop by drop hold no place in the queue."""
    start = b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with running(saved("trees")) as (url, _):
        address = httpx.URL(url)
        slow = [socket.create_connection((address.host, address.port), timeout=30) for _ in range(300)]
        for connection in slow:
            connection.sendall(start)
        answer: Any = None
        while answer is None or answer.status_code == 503:
            answer = httpx.post(f"{url}/v1/rank", json=example("trees"))
        assert answer.status_code == 200
        for connection in slow:
            connection.close()


@pytest.mark.slow
def test_the_client_waits_as_long_as_it_is_asked_to() -> None:
    """A ranking that was refused for lack of room is asked for again."""
    query = example("trees")
    body = json.dumps(query).encode()
    with running(saved("trees"), "--max-requests", 1) as (url, _), Client(url, retries=20) as client:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port), timeout=30) as slow:
            slow.sendall(
                b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body[:-1])
            )
            while httpx.get(f"{url}/v1/model").status_code == 200:
                pass  # the request above has not been looked at yet
            with ThreadPoolExecutor(1) as pool:
                ranking = pool.submit(client.rank, query["candidates"], query_id="q")
                while 'route="refused",status="503"} 2.0' not in httpx.get(f"{url}/metrics").text:
                    pass  # its first attempt has not been refused yet
                slow.sendall(body[-1:])
                assert ranking.result().query_id == "q"
