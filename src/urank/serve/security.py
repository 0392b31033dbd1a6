"""Who may ask, under which name, and how much they may send: before anything else looks at a request."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
from collections.abc import Callable, Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from urank.serve.schemas import Limits, Problem, problem_response

__all__ = ["OPEN_PATHS", "AccessMiddleware", "BoundedHeads", "read_body"]

MAX_HEAD = 64 * 2**10
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/problem+json\r\n"
    b"content-length: 100\r\nconnection: close\r\n\r\n"
    b'{"type":"about:blank","title":"Request Header Fields Too Large","status":431,"detail":"a long head"}'
)


class BoundedHeads(HttpToolsProtocol):
    """Closes a connection whose request goes on for longer than `MAX_HEAD` before its body begins.

    httptools keeps all of a head, whoever sends it and before any key is asked for.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._in_head = True
        self._head = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        self._head += len(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()


OPEN_PATHS = ("/healthz", "/readyz")
"""What needs no key: it tells nothing but whether the server is well."""

_HOST = re.compile(r"(?:(?P<name>[^\[\]:]+)|\[(?P<address>[^\[\]]+)\])(?::\d*)?")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)


class AccessMiddleware:
    """Lets through what shows the key and calls the server by a name of its own.

    Names are checked because a page of another site can have its name point to 127.0.0.1 and then talk to a server on
    the reader's machine as if it were its own (DNS rebinding).

    Args:
        app: what stands behind.
        key: what a request must show; nothing is asked for when there is none.
        hosts: the names, without port, under which the server may be called; any when empty.
        most: how many requests may be under way; health is not counted, and always answers.
        refused: told the status of what is turned away here.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        hosts: Iterable[str],
        most: int = 1_000,
        refused: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.app = app
        self.most = most
        self.refused = refused
        self.under_way = 0
        self.key = key.encode() if key is not None else None
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
                return
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        try:
            self._check(scope["method"], scope["path"], Headers(scope=scope))
        except Problem as problem:
            self.refused(problem.status)
            await problem_response(problem)(scope, receive, with_headers)
            return
        self.under_way += 1
        try:
            await self.app(scope, receive, with_headers)
        finally:
            self.under_way -= 1

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if self.hosts and _host_name(headers.get("host", "")) not in self.hosts:
            raise Problem(421, "this server is not known by that name; see --allow-host")
        if path in OPEN_PATHS:
            return
        shown = _shown_key(headers)
        if self.key is not None and (shown is None or not hmac.compare_digest(shown, self.key)):
            detail = "the key is wrong" if shown else "a key is needed: Authorization: Bearer KEY"
            raise Problem(401, detail, headers={"WWW-Authenticate": 'Basic realm="urank", charset="UTF-8"'})
        if method not in ("GET", "HEAD") and _is_foreign(headers):
            raise Problem(403, "a page of another site must not do this")
        if self.under_way >= self.most:
            raise Problem(503, f"at most {self.most} requests at one time", headers={"Retry-After": "1"})


def _host_name(host: str) -> str:
    """A Host header without its port; nothing when it is none.

    >>> [_host_name(host) for host in ("localhost:8000", "[::1]:8000", "EXAMPLE.org", "[::1].org")]
    ['localhost', '::1', 'example.org', '']
    """
    found = _HOST.fullmatch(host)
    return "" if found is None else (found["name"] or found["address"]).lower()


def _is_foreign(headers: Headers) -> bool:
    """Whether a browser says that a page of another site sends this, perhaps with the key that the browser keeps."""
    origin = headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2].lower() != headers.get("host", "").lower()
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _shown_key(headers: Headers) -> bytes | None:
    """The key that a request shows: as bearer, as `X-API-Key`, or as the password that a browser asked for."""
    if "x-api-key" in headers:
        return headers["x-api-key"].encode("latin-1")
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return None


async def read_body(request: Request, limits: Limits, *, json: bool = True) -> bytes:
    """The body of a request, if it is small enough and comes in time.

    Raises:
        Problem: 413, 408, or 400 when it breaks off.
    """
    most = min(limits.json_bytes, limits.body_bytes) if json else limits.body_bytes
    too_large = Problem(413, f"a body has at most {most} bytes", headers={"Connection": "close"})
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        detail = f"the body did not come within {limits.seconds:g} seconds"
        raise Problem(408, detail, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise Problem(400, "the body broke off") from None
    return b"".join(parts) if len(parts) != 1 else parts[0]
