"""Access control and size limits that apply before anything else reads a request.

`AccessMiddleware` checks the key, the Host header and the origin, and notes what is logged and traced of a request;
`read_body` limits the size and duration of bodies, `urank.serve.connections` everything outside of them.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from urank.serve.logs import REQUEST, request_id
from urank.serve.request_schemas import Problem, problem_response

if TYPE_CHECKING:
    from urank.serve.admission import Admission, Ticket
    from urank.serve.server_settings import Limits
    from urank.serve.tracing import Tracing

OPEN_PATHS = ("/healthz", "/readyz")
"""Paths without a key: they reveal only whether the server is well."""
PROBE_PATHS = (*OPEN_PATHS, "/metrics")
"""Paths that are answered whatever the load."""

_HOST = re.compile(r"(?:(?P<name>[^\[\]:]+)|\[(?P<address>[^\[\]]+)\])(?::\d*)?")
RESPONSE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)
logger = logging.getLogger("urank.access")


class AccessMiddleware:
    """Passes on requests with the key and an allowed Host header.

    The Host header is checked because the name of another site can resolve to 127.0.0.1, whose pages could then
    address a server on the reader's machine as their own (DNS rebinding).

    Args:
        key: Key that a request must present; None accepts all.
        hosts: Allowed names in the Host header, without port; any if empty.
        max_requests: Largest number of concurrent requests; health checks are always answered.
        on_refusal: Called with the status of each refusal.
        admission: Queue in which requests with a ticket wait for their turn.
        on_wait: Called with the seconds that each of them waited.
        access_log: Whether to log every request.
        tracing: Exports a span of every request.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        hosts: Iterable[str],
        max_requests: int,
        on_refusal: Callable[[int], None],
        *,
        admission: Admission | None = None,
        on_wait: Callable[[float], None] = lambda _: None,
        access_log: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self.app, self.max_requests, self.on_refusal = app, max_requests, on_refusal
        self.admission, self.on_wait, self.access_log, self.tracing = admission, on_wait, access_log, tracing
        self.in_flight = 0
        self.key = key.encode() if key is not None else None
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, headers = time.perf_counter(), Headers(scope=scope)
        facts: dict[str, Any] = {"request_id": request_id(headers.get("x-request-id")), "status": 500}
        REQUEST.set(facts)
        identity = (b"x-request-id", facts["request_id"].encode())

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                message["headers"] = [*message["headers"], *RESPONSE_HEADERS, identity]
            await send(message)

        span = None if self.tracing is None else self.tracing.start(scope)
        ticket: Ticket | None = scope.get("ticket")
        counted = scope["path"] not in PROBE_PATHS  # probes run in another thread
        self.in_flight += counted
        try:
            self._check(scope["method"], scope["path"], headers)
            await self.app(scope, receive if ticket is None else self._in_turn(receive, ticket, facts), with_headers)
        except Problem as problem:
            self.on_refusal(problem.status)
            await problem_response(problem)(scope, receive, with_headers)
        finally:
            self.in_flight -= counted
            if ticket is not None and self.admission is not None:
                self.admission.leave(ticket)
            if self.tracing is not None and span is not None:
                self.tracing.end(span, scope, facts)
            if self.access_log:
                milliseconds = round(1e3 * (time.perf_counter() - started), 3)
                logger.info("%s %s", scope["method"], scope["path"], extra={"facts": {**facts, "ms": milliseconds}})

    def _in_turn(self, receive: Receive, ticket: Ticket, facts: dict[str, Any]) -> Receive:
        """Return a `receive` that passes on the end of a body when it is the turn of its request."""

        async def receive_in_turn() -> Message:
            ticket.is_read = True
            message = await receive()
            if self.admission is not None and message["type"] == "http.request" and not message.get("more_body"):
                await self.admission.turn(ticket)
                facts["queue_ms"] = round(1e3 * ticket.waited, 3)
                self.on_wait(ticket.waited)
            return message

        return receive_in_turn

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if len(headers.getlist("host")) > 1:
            raise Problem(400, "a request has one Host header")
        if self.hosts and _host_name(headers.get("host", "")) not in self.hosts:
            raise Problem(421, "this host name is not allowed; see --allow-host")
        if path in OPEN_PATHS:
            return
        presented = _presented_key(headers)
        if self.key is not None and (presented is None or not hmac.compare_digest(presented, self.key)):
            detail = "the key is wrong" if presented else "a key is required: Authorization: Bearer KEY"
            raise Problem(401, detail, headers={"WWW-Authenticate": 'Basic realm="urank", charset="UTF-8"'})
        if method not in ("GET", "HEAD") and _is_foreign(headers):
            raise Problem(403, "pages of other sites must not do this")
        if self.in_flight > self.max_requests and path not in PROBE_PATHS:
            raise Problem(503, f"at most {self.max_requests} concurrent requests", headers={"Retry-After": "1"})


def _host_name(host: str) -> str:
    """Return a Host header without its port; empty if it is invalid.

    >>> [_host_name(host) for host in ("localhost:8000", "[::1]:8000", "EXAMPLE.org", "[::1].org")]
    ['localhost', '::1', 'example.org', '']
    """
    found = _HOST.fullmatch(host)
    return "" if found is None else (found["name"] or found["address"]).lower()


def _is_foreign(headers: Headers) -> bool:
    """Return whether a browser sends this for a page of another site, perhaps with a key that it has stored."""
    origin = headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2].lower() != headers.get("host", "").lower()
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _presented_key(headers: Headers) -> bytes | None:
    """Return the key of a request: a bearer token, `X-API-Key`, or the password of Basic authentication."""
    if "x-api-key" in headers:
        return headers["x-api-key"].encode("latin-1")
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return None


async def read_body(request: Request, limits: Limits, *, json: bool = True) -> bytes:
    """Read the body of a request; refuse it with 413 if too large, 408 if too slow, 400 if the connection is lost."""
    most = min(limits.json_bytes, limits.body_bytes) if json else limits.body_bytes
    too_large = Problem(413, f"a body has at most {most} bytes", headers={"Connection": "close"})
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        detail = f"the body did not arrive within {limits.seconds:g} seconds"
        raise Problem(408, detail, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise Problem(400, "the body is incomplete") from None
    return bytes(body)
