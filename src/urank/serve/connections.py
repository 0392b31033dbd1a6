"""Connections: limits on what arrives outside of bodies, refusals under overload, and probes that never wait.

A thread accepts the connections. It answers probes (`/healthz`, `/readyz`, `/metrics`) in an event loop of its own and
passes all other connections to the event loop that ranks, so that a backlog there delays no probe.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from urank.serve.admission import Admission, Ticket
from urank.serve.security import PROBE_PATHS, RESPONSE_HEADERS

MAX_HEADER_BYTES = 64 * 2**10
"""Largest size of headers; chunk sizes, chunk extensions and trailers may have as much, beside the size of the body."""
MAX_HEADER_LINES = 256
MAX_PIPELINED = 16
BUFFER_BYTES = 2**20
"""Size of the part of a body that is read ahead once the application wants it."""
NEW_SECONDS = 0.5
"""How long a server that ends waits for the first request of a connection."""
DISCARD_SECONDS = 30.0
PEEK_SECONDS = 0.1
STALLED_SECONDS = 30.0
"""Time without a sign of life of the main event loop, after which the thread answers no probes."""
_PROBES = tuple(f"GET {path} ".encode() for path in PROBE_PATHS)
_BATCH = 64


def _refusal(status: int, title: str, detail: str, *headers: bytes) -> bytes:
    body = f'{{"type":"about:blank","title":"{title}","status":{status},"detail":"{detail}"}}'
    first = f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\ncontent-length: {len(body)}"
    lines = [first.encode(), *(b"%s: %s" % pair for pair in RESPONSE_HEADERS), *headers, b"", body.encode()]
    return b"\r\n".join(lines)


_CLOSE = b"connection: close"
_TOO_LARGE = _refusal(431, "Request Header Fields Too Large", "headers too large", _CLOSE)
_OVERLOADED = ("the server is overloaded; nothing was done", b"retry-after: 1")
_BUSY = _refusal(503, "Service Unavailable", *_OVERLOADED)
_BUSY_CLOSE = _refusal(503, "Service Unavailable", *_OVERLOADED, _CLOSE)
_ANSWERED: Any = SimpleNamespace(response_complete=True, message_event=SimpleNamespace(set=lambda: None))
"""The state of a request that was answered without the application."""


class LimitedProtocol(HttpToolsProtocol):
    """A connection whose client can neither fill the memory before the key is checked nor overload the server.

    httptools buffers headers and trailers of any size.

    Args:
        admission: Queue of the event loop; None on a connection for one probe.
        on_shed: Called for each refusal under overload.
    """

    def __init__(
        self, *, admission: Admission | None, on_shed: Callable[[], None] = lambda: None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._admission, self._on_shed = admission, on_shed
        self._draining = admission is None  # whether the next answer is the last
        self._ticket: Ticket | None = None  # of this request
        self._in_headers, self._outside = True, 0  # bytes of this request that are not its body
        self._shed = False  # whether it was refused, and its body is to be discarded
        self._discarding: asyncio.TimerHandle | None = None  # ends the connection if the body does not end
        self._body = self._earlier = 0  # bytes of all bodies, and of those of earlier requests

    def data_received(self, data: bytes) -> None:
        before = self._body
        super().data_received(data)
        self._outside += len(data) - (self._body - before)
        if self._shed and self._discarding is None and self._admission is not None:
            self._discarding = self.loop.call_later(DISCARD_SECONDS, self.transport.abort)
            self._admission.discards.enter(self.transport)
        if self._outside > MAX_HEADER_BYTES + self._body - self._earlier and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._in_headers, self._outside, self._earlier = True, 0, self._body
        self._ticket = None
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # trailers are ignored
        if len(self.headers) == MAX_HEADER_LINES:
            self._refuse()
        elif len(self.headers) < MAX_HEADER_LINES:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
        if self.transport.is_closing():
            self.cycle = _ANSWERED
            return
        if self._admission is not None and self.parser.get_method() == b"POST":
            ticket = self._admission.admit()
            idle = self.cycle is None or self.cycle.response_complete
            if ticket is None and idle:  # the answer to a pipelined request cannot overtake
                self.cycle = _ANSWERED
                self._shed = True
                self._draining |= self.expect_100_continue or not self.parser.should_keep_alive()
                self.transport.write(_BUSY_CLOSE if self._draining else _BUSY)
                if self.expect_100_continue:
                    self.transport.close()  # the body will not be sent
                self._on_shed()
                return
            self.scope["ticket"] = self._ticket = ticket  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        if self._draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)
        if self._ticket is not None and self._ticket.is_read and len(self.cycle.body) < BUFFER_BYTES:
            self.flow.resume_reading()  # uvicorn pauses it at 64 KB, for an iteration of the loop each time

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._end_discard()
        if self.cycle is _ANSWERED and not self.transport.is_closing():
            if self._draining:
                self.transport.close()
            else:
                self.on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_discard()
        super().connection_lost(exc)

    def _end_discard(self) -> None:
        if self._discarding is not None and self._admission is not None:
            self._discarding.cancel()
            self._admission.discards.leave(self.transport)
        self._shed, self._discarding = False, None

    def shutdown(self) -> None:
        """End an idle connection at once, a new one if no request arrives soon, others after their answer."""
        if self.cycle is not None:
            super().shutdown()
        elif not self._draining:  # else it waits already: a connection from the last moment is told twice
            self._draining = True
            self.loop.call_later(NEW_SECONDS, super().shutdown)

    def _refuse(self) -> None:
        if self._in_headers and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(_TOO_LARGE)
        self.transport.close()
        self.cycle = _ANSWERED if self.cycle is None else self.cycle


class Acceptor:
    """A thread that accepts connections, answers probes, and passes all other connections to the main event loop.

    Args:
        sock: Bound socket.
        protocol: Builds the protocol of a connection, given its event loop and whether it is for a probe.
    """

    def __init__(
        self, sock: socket.socket, protocol: Callable[[asyncio.AbstractEventLoop, bool], asyncio.Protocol]
    ) -> None:
        self.sock, self.protocol = sock, protocol
        self.alive = time.monotonic()  # when the main event loop last gave a sign of life
        self._main, self._loop = asyncio.get_running_loop(), asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="urank acceptor", daemon=True)
        self._new: dict[socket.socket, asyncio.TimerHandle] = {}  # connections without data
        self._tasks: set[asyncio.Task[Any]] = set()  # of the main event loop
        self._probes: set[asyncio.Task[Any]] = set()

    def start(self, backlog: int) -> None:
        """Begin to listen."""
        self.sock.listen(backlog)
        self.sock.setblocking(False)
        self._loop.call_soon(self._loop.add_reader, self.sock, self._accept)
        self._thread.start()

    async def stop(self) -> None:
        """Close the socket, and pass on the connections that are established already."""
        stopped = self._main.create_future()

        def stop() -> None:
            self._loop.remove_reader(self.sock)
            while self._accept():
                pass
            self.sock.close()
            for connection in list(self._new):
                self._route(connection)
            self._main.call_soon_threadsafe(stopped.set_result, None)

        self._loop.call_soon_threadsafe(stop)
        await stopped
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> bool:
        """Accept some connections; return whether there may be more."""
        for _ in range(_BATCH):
            try:
                connection, _ = self.sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return False
            except OSError:  # no file descriptors left
                if self._loop.remove_reader(self.sock):
                    self._loop.call_later(PEEK_SECONDS, self._loop.add_reader, self.sock, self._accept)
                return False
            connection.setblocking(False)
            self._new[connection] = self._loop.call_later(PEEK_SECONDS, self._route, connection)
            self._loop.add_reader(connection, self._route, connection)
        return True

    def _route(self, connection: socket.socket) -> None:
        """Pass on a connection after a look at its first bytes."""
        self._new.pop(connection).cancel()
        self._loop.remove_reader(connection)
        try:
            is_probe = connection.recv(16, socket.MSG_PEEK).startswith(_PROBES)
        except OSError:
            is_probe = False
        if is_probe and time.monotonic() - self.alive < STALLED_SECONDS:
            self._connect(self._loop, connection, self._probes, True)
        else:
            self._main.call_soon_threadsafe(self._connect, self._main, connection, self._tasks, False)

    def _connect(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, tasks: set[asyncio.Task[Any]], is_probe: bool
    ) -> None:
        task = loop.create_task(loop.connect_accepted_socket(lambda: self.protocol(loop, is_probe), connection))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the client is gone
