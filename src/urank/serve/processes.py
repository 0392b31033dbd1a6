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
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import NamedTuple

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
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror or error}") from error
    return sock


class Worker(NamedTuple):
    """One of several worker processes."""

    number: int
    socket: int  # file descriptor of the shared socket
    pipe: int  # file descriptor on which it reports that it serves
    parent: int  # process id of the supervisor

    @classmethod
    def from_environment(cls) -> Worker | None:
        """Return the worker that this process is; None if no supervisor started it."""
        text = os.environ.pop(WORKER, "")
        return cls(*map(int, text.split(":"))) if text else None

    def serve(self, config: ServeConfig, *, access_log: bool) -> None:
        """Serve until a signal arrives or the supervisor is gone."""
        try:
            with socket.socket(fileno=self.socket) as sock:
                _run(config, sock, access_log, self._report_ready, self)
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
    """Serve until a signal arrives, and call `ready` when requests are served.

    Several workers are started by the command line `command`, which must call `Worker.serve`. The `access_log` is a
    line for every request on standard output. Raise a `UrankError` if the models cannot be loaded.
    """
    if workers == 1:
        _run(config, sock, access_log, ready)
        return
    with TemporaryDirectory(prefix="urank-metrics-", ignore_cleanup_errors=True) as shared:
        _Supervisor(sock, workers, command, shared).run(ready)


def _run(
    config: ServeConfig, sock: socket.socket, access_log: bool, ready: Callable[[], None], worker: Worker | None = None
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

    compacts, parent = (True, None) if worker is None else (worker.number == 0, worker.parent)
    app = build_app(config, compacts=compacts, parent=parent, reloads=reloads)
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


class _Supervisor:
    """Starts several workers, forwards signals to them, and replaces those that die."""

    def __init__(self, sock: socket.socket, workers: int, command: Sequence[str], shared: str) -> None:
        self.sock, self.count, self.command, self.shared = sock, workers, command, shared
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.started: dict[int, float] = {}
        self.ending, self.code = False, 0

    def run(self, ready: Callable[[], None]) -> None:
        """Run until all workers have ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end())
        signal.signal(signal.SIGHUP, lambda *_: self._forward(signal.SIGHUP))
        reports, pipe = os.pipe()
        os.set_blocking(reports, False)
        try:
            for worker in range(self.count):
                self._start(worker, pipe)
            serving = 0
            while self.children:
                if serving < self.count:
                    with suppress(BlockingIOError):
                        serving += len(os.read(reports, 4_096))
                    if serving == self.count:
                        ready()
                for worker, process in list(self.children.items()):
                    if process.poll() is not None:
                        self._replace(worker, process, pipe)
                time.sleep(POLL_SECONDS)
        finally:
            self._forward(signal.SIGTERM)
        if self.code:
            raise SystemExit(self.code)

    def _start(self, number: int, pipe: int) -> None:
        worker = Worker(number, self.sock.fileno(), pipe, os.getpid())
        variables = {**os.environ, WORKER: ":".join(map(str, worker)), "PROMETHEUS_MULTIPROC_DIR": self.shared}
        # SIGHUP would end a process without a handler, so a worker starts with it blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        process = subprocess.Popen(  # noqa: S603 - the command comes from the caller, not from a user
            list(self.command), env=variables, pass_fds=[worker.socket, pipe]
        )
        self.children[number], self.started[number] = process, time.monotonic()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if self.ending:  # a signal before it was listed did not reach it
            process.terminate()

    def _replace(self, number: int, process: subprocess.Popen[bytes], pipe: int) -> None:
        """Start a new worker after one died, unless all are ending."""
        from prometheus_client.multiprocess import mark_process_dead

        del self.children[number]
        mark_process_dead(process.pid, self.shared)  # type: ignore[no-untyped-call]  # its counters stay
        if self.ending:
            return
        if process.returncode in REFUSALS:
            self.code = 2
            if (first := self.children.get(0)) is not None:  # it reports the reason
                with suppress(subprocess.TimeoutExpired):
                    first.wait(GRACE_SECONDS)
            self._end()
            return
        logger.error("worker %d ended (%s); starting another", number, process.returncode)
        time.sleep(max(0.0, RESTART_SECONDS - (time.monotonic() - self.started[number])))
        if not self.ending:  # a signal may have arrived meanwhile
            self._start(number, pipe)

    def _end(self) -> None:
        self.ending = True
        self._forward(signal.SIGTERM)

    def _forward(self, number: signal.Signals) -> None:
        for process in self.children.values():
            process.send_signal(number)
