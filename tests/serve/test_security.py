"""Who may ask, under which name, how much and how slowly; and nothing of the inside gets out."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.cases import client, example, saved
from serve.server import running
from urank.serve.app import build_app
from urank.serve.models import ModelSources
from urank.serve.request_arrays import ARROW_TYPE
from urank.serve.security import OPEN_PATHS, AccessMiddleware
from urank.serve.server_settings import ServeConfig

KEY = "a-key-of-the-tests-0123"
RIGHT = [
    {"authorization": f"Bearer {KEY}"},
    {"authorization": f"bearer {KEY}"},
    {"authorization": f"BEARER  {KEY} "},
    {"x-api-key": KEY},
    {"authorization": "Basic " + base64.b64encode(f"anybody:{KEY}".encode()).decode()},
    {"authorization": "basic " + base64.b64encode(f":{KEY}".encode()).decode()},
]


def basic(text: bytes) -> bytes:
    return b"Basic " + base64.b64encode(text)


WRONG: list[dict[bytes, bytes]] = [
    {},
    {b"authorization": b""},
    {b"authorization": b"Bearer"},
    {b"authorization": b"Bearer "},
    {b"authorization": KEY.encode()},
    {b"authorization": b"Bearer " + KEY.encode()[:-1]},
    {b"authorization": b"Bearer " + KEY.encode() + b"0"},
    {b"authorization": b"Bearer " + KEY.upper().encode()},
    {b"authorization": b"Bearer k\xe9y"},
    {b"authorization": "Bearer schlüssel-🔑".encode()},
    {b"authorization": b"Digest " + KEY.encode()},
    {b"authorization": b"Basic"},
    {b"authorization": b"Basic not base64!"},
    {b"authorization": b"Basic " + KEY.encode()},
    {b"authorization": basic(KEY.encode())},
    {b"authorization": basic(KEY.encode() + b":")},
    {b"authorization": basic(b"a:\xff\xfe")},
    {b"authorization": basic(f"a:b:{KEY}".encode())},
    {b"x-api-key": b""},
    {b"x-api-key": b"wrong"},
    {b"x-api-key": b"wrong", b"authorization": b"Bearer " + KEY.encode()},
    {b"cookie": b"key=" + KEY.encode()},
]


def routes(kind: str = "trees") -> list[tuple[str, str]]:
    """Every path and method of the application, so that a new one cannot be forgotten."""
    app = build_app(ServeConfig(ModelSources(saved(kind)), key=KEY))
    found = [(route.path, method) for route in app.routes for method in route.methods]  # type: ignore[attr-defined]
    assert len(found) >= 13
    return found


def test_every_route_needs_the_key_but_health() -> None:
    with client("trees", key=KEY) as http:
        for path, method in routes():
            answer = http.request(method, path.replace("{number}", "0"))
            if path in OPEN_PATHS:
                assert answer.status_code == 200
            else:
                assert answer.status_code == 401, path
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["www-authenticate"].startswith("Basic realm=")
        for path in ("/nothing", "/v1/", "/v1/rank/", "/HEALTHZ", "/healthz/", "/healthz/../metrics", "//healthz"):
            assert http.get(path, follow_redirects=False).status_code == 401, path
        assert http.get("/healthz?path=/metrics").status_code == 200
    assert OPEN_PATHS == ("/healthz", "/readyz")


@pytest.mark.parametrize("shown", RIGHT)
def test_ways_to_show_the_key(shown: dict[str, str]) -> None:
    with client("trees", key=KEY) as http:
        assert http.get("/v1/model", headers=shown).status_code == 200
        assert http.post("/v1/rank", headers=shown, json=example("trees")).status_code == 200
        assert http.get("/nothing", headers=shown).status_code == 404


@pytest.mark.parametrize("shown", WRONG)
def test_wrong_keys(shown: dict[bytes, bytes]) -> None:
    with client("trees", key=KEY) as http:
        answer = http.get("/v1/model", headers=list(shown.items()))  # type: ignore[arg-type]
        assert answer.status_code == 401
        assert KEY not in answer.text


@given(st.dictionaries(st.sampled_from([b"authorization", b"x-api-key"]), st.binary(max_size=60)))
def test_no_header_fails_or_fits(shown: dict[bytes, bytes]) -> None:
    """Whatever bytes a header holds."""
    assert passed_gate("GET", "/v1/model", shown, key=KEY) == 401


def passed_gate(method: str, path: str, headers: dict[bytes, bytes], **settings: Any) -> int:
    """The status with which a request is refused; 200 when it gets through."""
    statuses: list[int] = []

    async def behind(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    gate = AccessMiddleware(behind, settings.get("key"), settings.get("hosts", ()), 1_000, lambda _: None)
    scope = {"type": "http", "method": method, "path": path, "headers": list(headers.items())}
    asyncio.run(gate(scope, receive, send))
    (status,) = statuses
    return status


HOSTS = ("localhost", "127.0.0.1", "::1", "Ranker.Example.org")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000", "ranker.example.ORG:80"]
)
def test_names_of_the_server(host: str) -> None:
    with client("trees", hosts=HOSTS) as http:
        assert http.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.org", "evil.org:8000", "localhost.evil.org", "evil.org.localhost", "evil-localhost", "localhost."),
        *("127.0.0.1.evil.org", "[::1].evil.org.", "[::2]", "::1", "0.0.0.1", "0", "2130706433", "127.1", "local host"),
        *("localhost, evil.org", "localhost:80:90", "localhost:x", "http://localhost", "user@localhost", "\xe9", "["),
    ],
)
def test_foreign_names(host: str) -> None:
    """A page of another site may let its name point to this machine; even health is not told to it."""
    with client("trees", hosts=HOSTS, key=KEY) as http:
        answer = http.get("/healthz", headers=[(b"host", host.encode("latin-1"))])  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["title"]) == (421, "Misdirected Request")
        right = {"x-api-key": KEY}
        assert http.get("/v1/model", headers={**right, "host": "evil.org"}).status_code == 421


def test_every_answer_has_the_headers() -> None:
    with client("trees", key=KEY) as http:
        right = {"x-api-key": KEY}
        answers = [http.request(method, path.replace("{number}", "0"), headers=right) for path, method in routes()]
        answers += [http.get("/nothing", headers=right), http.get("/"), http.put("/v1/rank", headers=right)]
        for answer in answers:
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["cache-control"] == "no-store"
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert "server" not in answer.headers


class Inline(HTMLParser):
    """The scripts and styles that stand in a page, and whatever else could run or load something."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: str | None = None
        self.found: dict[str, list[str]] = {"script": [], "style": []}
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.found:
            self.inside = tag
            self.found[tag].append("")
        for name, value in attrs:
            if name.startswith("on") or (name in ("src", "href") and re.match(r"(https?:)?//", value or "")):
                self.foreign.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.found[self.inside][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.inside = None if tag == self.inside else self.inside


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_run_their_own_scripts_only(path: str) -> None:
    with client("trees") as http:
        answer = http.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Inline()
    page.feed(answer.text)
    assert page.foreign == []
    directives = {
        words[0]: words[1:] for part in answer.headers["content-security-policy"].split(";") if (words := part.split())
    }
    for tag in ("script", "style"):
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.found[tag]]
        assert directives[f"{tag}-src"] == ([f"'sha256-{each}'" for each in hashes] or ["'none'"])
    assert directives["default-src"] == directives["base-uri"] == ["'none'"]
    assert directives["form-action"] == directives["frame-ancestors"] == ["'none'"]
    assert directives["connect-src"] == ["'self'"]
    assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/jsonp"]
)
def test_types_that_pages_of_other_sites_may_send_are_refused(kind: str) -> None:
    """Without asking first, which nothing here says yes to."""
    body = json.dumps(example("trees")).encode()
    with client("trees") as http:
        for path in ("/v1/rank", "/v1/explain", "/v1/feedback"):
            answer = http.post(path, content=body, headers={"content-type": kind} if kind else {})
            assert (answer.status_code, answer.headers["content-type"]) == (415, "application/problem+json")
            assert answer.headers["accept-post"].startswith("application/json")
        asks = {"origin": "https://evil.org", "access-control-request-method": "POST"}
        answer = http.options("/v1/rank", headers=asks)
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({b"origin": b"http://evil.org"}, 403),
        ({b"origin": b"http://localhost"}, 403),
        ({b"origin": b"http://localhost:8001"}, 403),
        ({b"origin": b"http://localhost:8000.evil.org"}, 403),
        ({b"origin": b"null"}, 403),
        ({b"origin": b""}, 403),
        ({b"origin": b"http://LOCALHOST:8000"}, 200),
        ({b"origin": b"http://localhost:8000"}, 200),
        ({b"sec-fetch-site": b"cross-site"}, 403),
        ({b"sec-fetch-site": b"same-site"}, 403),
        ({b"sec-fetch-site": b"same-origin"}, 200),
        ({b"sec-fetch-site": b"none"}, 200),
        ({}, 200),
    ],
)
def test_pages_of_other_sites_change_nothing(headers: dict[bytes, bytes], status: int) -> None:
    """Even if the browser has the key and shows it for them: a reload needs no body, and so no type of one."""
    shown = {b"host": b"localhost:8000", b"x-api-key": KEY.encode(), **headers}
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert passed_gate(method, "/v1/reload", shown, key=KEY) == status
        assert passed_gate(method, "/v1/reload", shown) == status
    assert passed_gate("GET", "/v1/model", shown, key=KEY) == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "zstd", "gzip, identity", "x"])
def test_compressed_bodies_are_refused(coding: str) -> None:
    with client("trees") as http:
        headers = {"content-type": "application/json", "content-encoding": coding}
        answer = http.post("/v1/rank", content=b"\x1f\x8b\x08", headers=headers)
        assert (answer.status_code, answer.json()["detail"]) == (415, "the body must not be compressed")


@pytest.mark.parametrize("length", ["²", "1" * 30, "1" * 5_000, "-1", "1e9", "", " 5", "+5", "x"])
def test_odd_lengths_fail_nothing(length: str) -> None:
    """As another server than uvicorn might let them pass."""
    with client("trees") as http:
        headers = [(b"content-type", b"application/json"), (b"content-length", length.encode("latin-1"))]
        answer = http.post("/v1/rank", content=b"{}", headers=headers)  # type: ignore[arg-type]
        assert answer.status_code in (413, 422)


# What follows needs a real server: it is about bytes on a connection.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    """One that takes bodies of ten kilobytes and waits for them for a second."""
    folder = tmp_path_factory.mktemp("limited")
    with running(saved("trees"), "--body-mb", "0.01", "--timeout", "1", output=folder / "said") as (url, process):
        yield url, psutil.Process(process.pid)


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port or 80), timeout=30)


def answer_of(connection: socket.socket) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of what comes until the server closes the connection."""
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, json.loads(body)


def head(length: str) -> bytes:
    return f"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n".encode()


LIMIT = int(0.01 * 2**20)


@pytest.mark.slow
def test_a_body_that_is_said_to_be_too_large_is_not_read(server: tuple[str, psutil.Process]) -> None:
    with connect(server[0]) as connection:
        connection.sendall(head(f"Content-Length: {LIMIT + 1}"))  # and nothing of the body
        status, headers, body = answer_of(connection)
    assert (status, body["title"], headers["connection"]) == (413, "Content Too Large", "close")
    assert body["detail"] == f"a body has at most {LIMIT} bytes"


@pytest.mark.slow
def test_nor_is_one_that_turns_out_to_be(server: tuple[str, psutil.Process]) -> None:
    """Sent in pieces, without a word about its length; the server stops long before its end."""
    with connect(server[0]) as connection:
        connection.sendall(head("Transfer-Encoding: chunked"))
        connection.sendall(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
        connection.sendall(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
        status, headers, body = answer_of(connection)
    assert (status, body["status"], headers["connection"]) == (413, 413, "close")


@pytest.mark.slow
def test_a_body_of_the_largest_size_is_read(server: tuple[str, psutil.Process]) -> None:
    body = json.dumps(example("trees")).encode()
    for padded in (body + b" " * (LIMIT - len(body)), (part for part in (body, b" " * (LIMIT - len(body))))):
        headers = {"content-type": "application/json"}
        assert httpx.post(f"{server[0]}/v1/rank", content=padded, headers=headers).status_code == 200


@pytest.mark.slow
def test_a_body_that_does_not_come_is_not_waited_for(server: tuple[str, psutil.Process]) -> None:
    with connect(server[0]) as connection:
        connection.sendall(head("Content-Length: 100") + b"{")
        status, headers, body = answer_of(connection)
    assert (status, body["title"], headers["connection"]) == (408, "Request Timeout", "close")
    assert body["detail"] == "the body did not arrive within 1 seconds"


@pytest.mark.slow
def test_nor_is_one_that_comes_drop_by_drop(server: tuple[str, psutil.Process]) -> None:
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        while not stop.wait(0.3):
            try:
                connection.sendall(b" ")
            except OSError:
                return

    with connect(server[0]) as connection:
        connection.sendall(head("Content-Length: 1000"))
        thread = threading.Thread(target=drip, args=(connection,))
        thread.start()
        try:
            status, _, _ = answer_of(connection)
        finally:
            stop.set()
            thread.join()
    assert status == 408


@pytest.mark.slow
def test_so_many_requests_at_one_time() -> None:
    """More are turned away at once; health is told to whoever asks, and what was under way is finished."""
    body = json.dumps(example("trees")).encode()
    with running(saved("trees"), "--max-requests", 2) as (url, _), connect(url) as first, connect(url) as second:
        for connection in (first, second):
            connection.sendall(head(f"Connection: close\r\nContent-Length: {len(body)}") + body[:-1])
        while (refused := httpx.get(f"{url}/v1/model")).status_code == 200:
            pass  # those above have not been looked at yet
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["detail"] == "at most 2 concurrent requests"
        assert httpx.get(f"{url}/healthz").status_code == httpx.get(f"{url}/readyz").status_code == 200
        for connection in (first, second):
            connection.sendall(body[-1:])
            assert answer_of(connection)[0] == 200
        assert httpx.get(f"{url}/v1/model").status_code == 200


@pytest.mark.slow
def test_a_client_that_goes_away_hurts_nobody(server: tuple[str, psutil.Process]) -> None:
    for _ in range(5):
        with connect(server[0]) as connection:
            connection.sendall(head("Content-Length: 1000") + b"{")
    assert httpx.get(f"{server[0]}/healthz").status_code == 200


@pytest.mark.slow
def test_heads_without_an_end_are_refused(server: tuple[str, psutil.Process]) -> None:
    url, process = server
    before = process.memory_info().rss
    with connect(url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nx-endless: ")
        with pytest.raises(OSError, match=r"reset|pipe|closed"):
            for _ in range(20):
                connection.sendall(b"a" * 2**20)
    assert process.memory_info().rss - before < 2**24


ENDLESS = {
    "trailers": (b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"x: " + b"a" * 2**20 + b"\r\n"),
    "one trailer": (b"Transfer-Encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 2**20),
    "a chunk extension": (b"Transfer-Encoding: chunked\r\n\r\n1;x=", b"a" * 2**20),
    "chunk extensions": (b"Transfer-Encoding: chunked\r\n\r\n", b"1;x=" + b"a" * 2**16 + b"\r\nb\r\n"),
    "header lines": (b"", b"a:b\r\n" * 2**18),
    "pipelined requests": (b"Content-Length: 0\r\n\r\n", head("Content-Length: 0") * 10_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDLESS)
def test_nothing_outside_of_bodies_fills_the_memory(kind: str, tmp_path: Path) -> None:
    """Without a key."""
    begin, more = ENDLESS[kind]
    start = b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + begin
    with running(saved("numbers"), environment={"URANK_API_KEY": KEY}) as (url, started):
        process = psutil.Process(started.pid)
        before = process.memory_info().rss
        for _ in range(5):
            with connect(url) as connection:
                connection.sendall(start)
                with pytest.raises(OSError, match=r"reset|pipe|closed"):
                    for _ in range(100):
                        connection.sendall(more)
        assert process.memory_info().rss - before < 2**25
        assert httpx.get(f"{url}/healthz").status_code == 200


@pytest.mark.slow
def test_trailers_are_no_headers(server: tuple[str, psutil.Process]) -> None:
    body = json.dumps(example("trees")).encode()
    with connect(server[0]) as connection:
        connection.sendall(head("Connection: close\r\nTransfer-Encoding: chunked"))
        connection.sendall(b"%x\r\n%s\r\n0\r\nHost: evil.org\r\nx-request-id: other\r\n\r\n" % (len(body), body))
        status, headers, _ = answer_of(connection)
    assert status == 200
    assert headers["x-request-id"] != "other"


@pytest.mark.slow
def test_two_host_headers_are_refused(server: tuple[str, psutil.Process]) -> None:
    with connect(server[0]) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status, _, body = answer_of(connection)
    assert (status, body["detail"]) == (400, "a request has one Host header")


@pytest.mark.slow
def test_nothing_of_the_inside_gets_out(tmp_path: Path) -> None:
    """No key, no path and no traceback: not in what is answered, and no key and no traceback in what is printed."""
    folder, said = tmp_path / "a-folder-with-a-name" / "model", tmp_path / "said"
    shutil.copytree(saved("trees"), folder)
    (tmp_path / "key").write_text(KEY)
    answers: list[httpx.Response] = []
    with running(folder, "--key-file", tmp_path / "key", "--access-log", "--log", tmp_path / "log", output=said) as (
        url,
        _,
    ):
        right = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, trust_env=False) as http:
            bodies: list[Any] = [
                b"",
                b"{",
                b"[]",
                b'{"query_id": "q"}',
                b"\xff",
                b'{"candidates": [{}]}',
                b"[" * 10_000,
            ]
            answers += [
                http.post(path, content=body, headers={**right, "content-type": kind})
                for body in bodies
                for path in ("/v1/rank", "/v1/explain", "/v1/feedback")
                for kind in ("application/json", ARROW_TYPE, "text/plain")
            ]
            sendable = [shown for shown in WRONG if not any(text.endswith(b" ") for text in shown.values())]
            answers += [http.get("/v1/model", headers=list(shown.items())) for shown in sendable]
            answers += [
                http.get(path, headers=right) for path in ("/nothing", "/v1/samples/9", "/%00", "/../etc/passwd")
            ]
            answers.append(http.get(f"/nothing?key={KEY[:4]}", headers={**right, "host": "evil.org"}))
            answers.append(http.delete("/v1/rank", headers=right))
            (folder / "clicks.onnx").write_bytes(b"broken")
            answers.append(http.post("/v1/reload", headers=right))
            facts = http.get("/v1/model", headers=right)
        assert facts.status_code == 200
    for answer in answers:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        everything = answer.text + str(answer.headers)
        for secret in (KEY, "Traceback", ".py", "site-packages"):
            assert secret not in everything, answer.text
        assert folder.parent.name not in everything
    assert KEY not in facts.text
    printed = said.read_text()
    assert KEY not in printed
    assert "Traceback" not in printed
    assert "the models were not replaced" in printed
