"""Processes that serve one socket, and their signals.

    SIGTERM, SIGINT   accept no more requests, finish those in flight, close the log, and exit
    SIGHUP            reload the models

A single process serves by itself. Several workers are started by a supervisor: each runs the command that it is given,
finds its socket in the environment, and reports when it serves. The supervisor forwards signals and replaces workers
that die.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from urank.errors import ConfigError, UrankError
from urank.serve.server_settings import ServeConfig

WORKER = "URANK_SERVE_WORKER"
"""Environment variable of a worker: its number, socket, pipe to the supervisor, and the supervisor's process id."""

BACKLOG = 2_048
GRACE_SECONDS = 20
RESTART_SECONDS = 1.0
POLL_SECONDS = 0.1
REFUSALS = (2, 3)
"""Exit codes of a worker that cannot start, and would fail again."""

logger = logging.getLogger("urank.serve")


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror or error}") from error
    return sock


@dataclass(frozen=True)
class Worker:
    """One of several worker processes.

    Attributes:
        number: Index of the worker.
        socket: File descriptor of the shared socket.
        pipe: File descriptor on which it reports that it serves.
        parent: Process id of the supervisor.
    """

    number: int
    socket: int
    pipe: int
    parent: int

    @classmethod
    def from_environment(cls) -> Worker | None:
        """Return the worker that this process is; None if no supervisor started it."""
        text = os.environ.pop(WORKER, "")
        return cls(*map(int, text.split(":"))) if text else None

    def __str__(self) -> str:
        return f"{self.number}:{self.socket}:{self.pipe}:{self.parent}"

    def serve(self, config: ServeConfig, *, access_log: bool) -> None:
        """Serve until a signal arrives or the supervisor is gone."""
        try:
            with socket.socket(fileno=self.socket) as sock:
                _run(config, sock, access_log=access_log, ready=self._report_ready, worker=self)
        except UrankError:
            if self.number == 0:
                raise
            raise SystemExit(2) from None  # only the first worker reports the error

    def _report_ready(self) -> None:
        os.write(self.pipe, b".")
        os.close(self.pipe)


def serve(
    config: ServeConfig,
    sock: socket.socket,
    *,
    command: Sequence[str],
    workers: int = 1,
    access_log: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal arrives.

    Args:
        config: Settings.
        sock: Listening socket.
        command: Command line that starts a worker, if there are several; it must call `Worker.serve`.
        workers: Number of processes.
        access_log: Write a line for every request to standard output.
        ready: Called when requests are served.

    Raises:
        UrankError: If the models cannot be loaded.
    """
    if workers == 1:
        _run(config, sock, access_log=access_log, ready=ready)
        return
    shared = tempfile.mkdtemp(prefix="urank-metrics-")
    try:
        _Supervisor(sock, workers, command, shared).run(ready)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def _run(
    config: ServeConfig,
    sock: socket.socket,
    *,
    access_log: bool,
    ready: Callable[[], None],
    worker: Worker | None = None,
) -> None:
    """Serve in this process."""
    reloads: list[int] = []  # a SIGHUP while the models are loaded must neither be lost nor end the process
    signal.signal(signal.SIGHUP, lambda number, _: reloads.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    import uvicorn  # slow to import, and a supervisor needs none of these

    from urank.serve.app import build_app
    from urank.serve.security import HeaderLimitProtocol

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    app = build_app(
        config,
        compacts=worker is None or worker.number == 0,
        parent=None if worker is None else worker.parent,
        reload_pending=lambda: bool(reloads),
    )
    settings = uvicorn.Config(
        app,
        http=HeaderLimitProtocol,
        log_level="info" if access_log else "error",
        access_log=access_log,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
        proxy_headers=False,
        ws="none",
        lifespan="on",
    )
    server = Server(settings)

    def stop(*_: object) -> None:
        """Handle signals before uvicorn does, and after its end, when it raises them again."""
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run(sockets=[sock])


@dataclass(frozen=True, eq=False)
class _Child:
    number: int
    started: float
    process: subprocess.Popen[bytes]


class _Supervisor:
    """Starts several workers, forwards signals to them, and replaces those that die."""

    def __init__(self, sock: socket.socket, workers: int, command: Sequence[str], shared: str) -> None:
        self.sock = sock
        self.count = workers
        self.command = command
        self.shared = shared
        self.children: list[_Child] = []
        self.ending = False
        self.code = 0

    def run(self, ready: Callable[[], None]) -> None:
        """Run until all workers have ended."""
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, self._handle_signal)
        reports, pipe = os.pipe()
        os.set_blocking(reports, False)
        try:
            for number in range(self.count):
                self._start(number, pipe)
            serving = 0
            while self.children:
                if serving < self.count:
                    serving += len(_read(reports))
                    if serving == self.count:
                        ready()
                for child in list(self.children):
                    if child.process.poll() is not None:
                        self._replace(child, pipe)
                time.sleep(POLL_SECONDS)
        finally:
            self._forward(signal.SIGTERM)
        if self.code:
            raise SystemExit(self.code)

    def _start(self, number: int, pipe: int) -> None:
        worker = Worker(number, self.sock.fileno(), pipe, os.getpid())
        variables = {**os.environ, WORKER: str(worker), "PROMETHEUS_MULTIPROC_DIR": self.shared}
        # SIGHUP would end a process without a handler, so a worker starts with it blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        process = subprocess.Popen(  # noqa: S603 - the command comes from the caller, not from a user
            list(self.command), env=variables, pass_fds=[worker.socket, pipe]
        )
        self.children.append(_Child(number, time.monotonic(), process))
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if self.ending:  # a signal before it was listed did not reach it
            process.terminate()

    def _replace(self, child: _Child, pipe: int) -> None:
        """Start a new worker after one died, unless all are ending."""
        self.children.remove(child)
        _remove_gauges(child.process.pid, self.shared)
        if self.ending:
            return
        if child.process.returncode in REFUSALS:
            self.code = 2
            for first in (each for each in self.children if each.number == 0):  # it reports the reason
                with suppress(subprocess.TimeoutExpired):
                    first.process.wait(GRACE_SECONDS)
            self._end()
            return
        logger.error("worker %d ended (%s); starting another", child.number, child.process.returncode)
        time.sleep(max(0.0, RESTART_SECONDS - (time.monotonic() - child.started)))
        if not self.ending:  # a signal may have arrived meanwhile
            self._start(child.number, pipe)

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._forward(signal.SIGHUP)
        else:
            self._end()

    def _end(self) -> None:
        self.ending = True
        self._forward(signal.SIGTERM)

    def _forward(self, number: signal.Signals) -> None:
        for child in self.children:
            child.process.send_signal(number)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4_096)
    except BlockingIOError:
        return b""


def _remove_gauges(pid: int, shared: str) -> None:
    """Remove the gauges of a worker that ended; its counters stay."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid, shared)  # type: ignore[no-untyped-call]
