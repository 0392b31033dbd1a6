"""Requests that are wrong in every way: each is answered or refused, nothing fails, and nothing is left behind."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.parameters import ParameterLocation

from serve.cases import example, saved
from serve.hostile import JSON, Request, changed_bodies, hostile_requests, valid_bodies, valid_stream
from serve.server import running

pytestmark = pytest.mark.slow

COUNT = 1_200
WARM = 300
GROWTH = 48 * 2**20
"""Bytes that may be added after a warm-up: what allocators keep for bodies of a few megabytes, and no more."""

TOLD_TO_NOBODY = ("Traceback", 'File "', "/tmp", "site-packages", ".py", "Error(")  # noqa: S108 - no file is made
UVICORN = b"Invalid HTTP request received."
"""What is no HTTP is refused before the application sees it."""

KEY = "a-key-of-the-tests-0123"
OPEN = (("/healthz", "GET"), ("/readyz", "GET"))
POSTED = (("/v1/rank", "POST"), ("/v1/explain", "POST"), ("/v1/feedback", "POST"))
OTHERS = (
    *(("/v1/reload", "POST"), ("/v1/items", "PUT"), ("/v1/models", "GET"), ("/v1/models/{name}", "GET")),
    *(("/v1/models/{name}/rank", "POST"), ("/v1/models/{name}/explain", "POST")),
    *((path, "GET") for path in ("/v1/model", "/v1/samples", "/v1/samples/{number}", "/metrics")),
)
SOME = settings(
    max_examples=30,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
load_all_checks()
TRUE = [
    CHECKS.get_one(name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    )
]


@dataclass
class Answer:
    """What came back; the status is 0 where nothing did."""

    status: int
    kind: str = ""
    body: bytes = b""


class Sender:
    """Sends requests as they are, over one connection as long as it stays open."""

    def __init__(self, url: str) -> None:
        self.address = httpx.URL(url)
        self.connection: http.client.HTTPConnection | None = None

    def send(self, request: Request) -> Answer:
        method, path, headers, body = request
        connection = self.connection or http.client.HTTPConnection(self.address.host, self.address.port, timeout=30)
        self.connection = None
        names = {name.lower() for name in headers}
        head = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
        if "host" not in names:
            head.append("host: localhost")
        exact = not names & {"content-length", "transfer-encoding"}
        if exact:
            head.append(f"content-length: {len(body)}")
        if connection.sock is None:
            connection.connect()
        with suppress(OSError):  # the answer may come before all was sent
            connection.sock.sendall("\r\n".join([*head, "", ""]).encode("utf-8", "surrogateescape") + body)
        response = http.client.HTTPResponse(connection.sock, method=method)
        try:
            response.begin()
            answer = Answer(response.status, response.headers.get("content-type", ""), response.read())
        except (OSError, http.client.HTTPException):
            connection.close()
            return Answer(0)
        if exact and not response.will_close:
            self.connection = connection
        else:
            connection.close()
        response.close()
        return answer

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


@pytest.fixture(scope="module", params=["trees", "numbers"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, psutil.Process, Path]]:
    """With features of both kinds, and with numbers alone, whose bodies are parsed by another type."""
    folder = tmp_path_factory.mktemp("hostile")
    said = folder / "said"
    options = ("--log", folder / "log", "--timeout", "1")
    with running(saved(request.param), *options, output=said) as (url, process):
        yield url, psutil.Process(process.pid), said


@pytest.fixture(scope="module")
def facts(server: tuple[str, psutil.Process, Path]) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server[0]}/v1/model").json()
    return found


def check(request: Request, answer: Answer) -> None:
    """No failure; a refusal is a problem, as JSON, and says the status that it has."""
    told = (request[:2], request[2] if len(str(request[2])) < 300 else "", request[3][:300], answer)
    assert answer.status < 500, told
    if answer.status >= 400 and request[0] != "HEAD" and answer.body != UVICORN:
        assert answer.kind == "application/problem+json", told
        found = json.loads(answer.body)
        assert found["status"] == answer.status, told
        assert found["title"], told
        assert found["detail"], told
        said = json.dumps([found["title"], found["detail"], *(each["problem"] for each in found.get("errors", []))])
        assert not [words for words in TOLD_TO_NOBODY if words in said], told
        assert len(answer.body) < 10_000, told


def good(url: str, facts: dict[str, Any]) -> list[Any]:
    """The server lives and does what it is there for: what it answers, but for the ids of rankings."""
    bodies = valid_bodies(facts)
    ranked = httpx.post(f"{url}/v1/rank", json=bodies["/v1/rank"])
    batch = httpx.post(f"{url}/v1/rank", json=bodies["/v1/rank batch"])
    explained = httpx.post(f"{url}/v1/explain", json=bodies["/v1/explain"])
    assert (ranked.status_code, batch.status_code, explained.status_code) == (200, 200, 200)
    assert httpx.post(f"{url}/v1/feedback", json=bodies["/v1/feedback"]).status_code == 202
    headers = {"content-type": "application/vnd.apache.arrow.stream"}
    assert httpx.post(f"{url}/v1/rank", content=valid_stream(facts), headers=headers).status_code == 200
    assert httpx.get(f"{url}/readyz").status_code == 200
    rankings = [ranked.json(), *batch.json()["rankings"]]
    assert all(each.pop("ranking_id") for each in rankings)
    return [*rankings, explained.json(), httpx.get(f"{url}/v1/model").json()]


def test_the_same_requests_for_the_same_seed(facts: dict[str, Any]) -> None:
    assert list(hostile_requests(facts, 1, 300)) == list(hostile_requests(facts, 1, 300))
    assert list(hostile_requests(facts, 1, 300)) != list(hostile_requests(facts, 2, 300))


def test_every_node_of_every_body(server: tuple[str, psutil.Process, Path], facts: dict[str, Any]) -> None:
    """Replaced by each odd value, left out, said twice, under another name."""
    url, _, said = server
    sender, seen = Sender(url), Counter[int]()
    for path, text in changed_bodies(facts):
        request = ("POST", path, {"content-type": JSON}, text.encode("utf-8", "surrogatepass"))
        answer = sender.send(request)
        check(request, answer)
        assert answer.status in (200, 202, 400, 422), (text[:500], answer)
        seen[answer.status] += 1
    sender.close()
    assert sum(seen.values()) > 2_000
    assert min(seen[status] for status in (200, 202, 400, 422)) > 20
    good(url, facts)
    assert "Traceback" not in said.read_text()


def test_hostile_requests(server: tuple[str, psutil.Process, Path], facts: dict[str, Any]) -> None:
    url, process, said = server
    answers = good(url, facts)
    sender, seen, before = Sender(url), Counter[int](), 0
    for number, request in enumerate(hostile_requests(facts, 7, COUNT)):
        if number == WARM:
            before = process.memory_info().rss
        answer = sender.send(request)
        check(request, answer)
        seen[answer.status] += 1
    sender.close()
    assert good(url, facts) == answers
    grown = process.memory_info().rss - before
    assert grown < GROWTH, f"{grown / 2**20:.0f} MB, statuses {dict(seen)}"
    assert set(seen) >= {200, 400, 404, 405, 408, 413, 415, 421, 422}
    assert seen[0] <= COUNT // 100, seen  # connections that were closed without an answer
    assert "Traceback" not in said.read_text()


def test_connections_that_say_nothing_or_nonsense(
    server: tuple[str, psutil.Process, Path], facts: dict[str, Any]
) -> None:
    url, process, said = server
    address = (httpx.URL(url).host, httpx.URL(url).port)
    nonsense = [
        *(b"", b"\x00" * 1_000, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET", b"GET / HTTP/9.9\r\n\r\n"),
        *(b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n\r\n\r\n", b"GET /\r\n", b"A" * 10_000),
        b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.org\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /v1/model HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        os.urandom(5_000),
    ]
    for words in nonsense:
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                answer = connection.recv(65_536)
                assert not answer.startswith(b"HTTP/1.1 5"), words
    good(url, facts)
    assert process.is_running()
    assert "Traceback" not in said.read_text()


def test_a_body_full_of_errors_costs_little() -> None:
    """Two megabytes, each three bytes of which are wrong."""
    with running(saved("trees"), "--timeout", "20") as (url, process):
        assert httpx.post(f"{url}/v1/rank", json=example("trees")).status_code == 200
        before = psutil.Process(process.pid).memory_info().rss
        body = b'{"query_id": "q", "candidates": [' + b"{}," * 700_000 + b"{}]}"
        answer = httpx.post(f"{url}/v1/rank", content=body, headers={"content-type": JSON}, timeout=60)
        assert answer.status_code == 422
        highest = int(
            next(
                line.split()[1]
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
                if line.startswith("VmHWM")
            )
        )
        assert highest * 1024 - before < 100 * 2**20


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The description of a server that wants a key, of a model on numbers alone; `test_openapi` has the other kinds."""
    folder = tmp_path_factory.mktemp("guarded")
    key = folder / "key"
    key.write_text(KEY)
    with running(saved("numbers"), "--log", folder / "log", "--key-file", key) as (url, _):
        schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json", headers={"x-api-key": KEY}).json())
        schema.config.update(base_url=url)
        yield schema


def statuses_of(operation: Any, mode: GenerationMode, key: str) -> set[int]:
    """What came of requests that the description allows, or forbids; every answer must be as it says."""
    seen: set[int] = set()
    with requests.Session() as session:
        session.trust_env = False

        @SOME
        @given(operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            response = case.call(session=session, headers={"X-API-Key": key})
            body = case.meta.components.get(ParameterLocation.BODY)
            if body is None or body.mode == mode:  # otherwise only the key was to be wrong, and it was put right
                seen.add(response.status_code)
            case.validate_response(response, checks=TRUE)

        ask()
    return seen


def test_these_are_all_operations(guarded: Any) -> None:
    described = {(path, method.upper()) for path, methods in guarded.raw_schema["paths"].items() for method in methods}
    assert described == {*POSTED, *OPEN, *OTHERS}


@pytest.mark.parametrize(("path", "method"), [*POSTED, *OTHERS, *OPEN])
def test_answers_are_as_described_with_the_key(guarded: Any, path: str, method: str) -> None:
    seen = statuses_of(guarded[path][method], GenerationMode.POSITIVE, KEY)
    others = {"/v1/feedback": 202, "/v1/items": 409, "/v1/rank": 422, "/v1/explain": 422}  # few have all features
    assert others.get(path, 404 if "{" in path else 200) in seen


@pytest.mark.parametrize(("path", "method"), POSTED)
def test_what_is_not_described_is_refused_as_described(guarded: Any, path: str, method: str) -> None:
    seen = statuses_of(guarded[path][method], GenerationMode.NEGATIVE, KEY)
    assert seen
    assert seen <= {400, 415, 422}


@pytest.mark.parametrize(("path", "method"), [*POSTED, *OTHERS])
def test_nothing_is_told_without_the_key(guarded: Any, path: str, method: str) -> None:
    assert statuses_of(guarded[path][method], GenerationMode.POSITIVE, KEY[:-1]) == {401}
