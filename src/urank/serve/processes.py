"""Processes that serve one socket, and their signals.

    SIGTERM, SIGINT   accept no more connections, finish the requests in flight, close the log, and exit
    SIGHUP            reload the models

A single process serves by itself. Several workers are started by a supervisor, which this module is as a program: it
imports only the standard library. Each worker runs the command line of `urank serve`, finds its socket in the
environment, and reports when it serves. The supervisor forwards signals and replaces workers that die. A server that
was ready once ends on signals alone: workers that die later, even at once, are replaced.

    python -m urank.serve.processes SETTINGS COMMAND...
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from urank.errors import ConfigError, UrankError
from urank.serve.logs import LogFormat, configure_logging

if TYPE_CHECKING:
    import asyncio

    from urank.serve.server_settings import ServeConfig

WORKER = "URANK_SERVE_WORKER"
"""Environment variable of a worker: the fields of a `Worker` as JSON."""
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of a worker: the folder of the metrics, as their library requires, and of copies of models."""

BACKLOG = 2_048
GRACE_SECONDS = 20
RESTART_SECONDS, MAX_RESTART_SECONDS = 1.0, 30.0
"""Least time from one start of a worker to the next, and the largest after it failed repeatedly."""
RELOAD_SECONDS = 60.0
POLL_SECONDS = 0.1
REFUSALS = (2, 3)
"""Exit codes of a worker that cannot start, and would fail again."""

logger = logging.getLogger("urank.serve")


def open_socket(host: str, port: int) -> socket.socket:
    """Reserve an address; port 0 selects a free one. Nothing can connect before the socket listens."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
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
    replaces: bool  # whether all workers served before it was started

    @classmethod
    def from_environment(cls) -> Worker | None:
        """Return the worker that this process is; None if no supervisor started it."""
        text = os.environ.pop(WORKER, "")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        return cls(*json.loads(text)) if text else None

    def serve(self, config: ServeConfig) -> None:
        """Serve until a signal arrives or the supervisor is gone."""
        try:
            with socket.socket(fileno=self.socket) as sock:
                run(config, sock, self._report_ready, self)
        except UrankError:
            if self.number == 0 or self.replaces:
                raise
            raise SystemExit(2) from None  # only the first worker reports the error
        finally:
            if os.getppid() != self.parent:
                shutil.rmtree(os.environ[SHARED_FOLDER], ignore_errors=True)

    def _report_ready(self) -> None:
        os.write(self.pipe, b".")
        os.close(self.pipe)


def run(config: ServeConfig, sock: socket.socket, ready: Callable[[], None], worker: Worker | None = None) -> None:
    """Serve in this process until a signal arrives, and call `ready` when requests are served.

    Raise a `UrankError` if the models cannot be loaded.
    """
    reloads: list[int] = []  # a SIGHUP while the models are loaded must neither be lost nor end the process
    signal.signal(signal.SIGHUP, lambda number, _: reloads.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    import uvicorn  # slow to import, and the supervisor needs none of these
    from uvicorn.server import ServerState

    from urank.serve.app import build_app
    from urank.serve.connections import Acceptor, LimitedProtocol

    class Server(uvicorn.Server):
        acceptor: Acceptor

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup([])
            self.acceptor = Acceptor(sock, self.protocol)
            try:
                self.acceptor.start(BACKLOG)
            except OSError as error:  # another server has bound the address as well, and listens
                raise ConfigError(f"cannot listen at {sock.getsockname()}: {error.strerror}") from error
            ready()

        def protocol(self, loop: asyncio.AbstractEventLoop, is_probe: bool) -> asyncio.Protocol:
            made = LimitedProtocol(
                admission=None if is_probe else app.state.admission,
                on_shed=app.state.on_shed,
                config=settings,
                server_state=ServerState() if is_probe else self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
            )
            if self.should_exit and not is_probe:
                made.shutdown()
            return made

        async def on_tick(self, counter: int) -> bool:
            self.acceptor.alive = time.monotonic()
            return await super().on_tick(counter)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await self.acceptor.stop()
            await super().shutdown([])

    exports, parent = (True, None) if worker is None else (worker.number == 0, worker.parent)
    app = build_app(config, exports=exports, parent=parent, reloads=reloads)
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
        proxy_headers=False,
        ws="none",
        lifespan="on",
    )
    server = Server(settings)
    sys.setswitchinterval(0.001)  # probes need the interpreter's lock several times

    def stop(*_: object) -> None:
        """Handle signals before uvicorn does, and after its end, when it raises them again."""
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run(sockets=[])


def supervise(
    sock: socket.socket, workers: int, command: Sequence[str], *, message: str, log_format: LogFormat, quiet: bool
) -> NoReturn:
    """Become the supervisor of several workers, without the memory of what this process has imported."""
    sock.set_inheritable(True)
    settings = json.dumps([sock.fileno(), workers, message, log_format, quiet])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "urank.serve.processes", settings, *command])  # noqa: S606


def announce(message: str, log_format: LogFormat, *, quiet: bool) -> None:
    """Report that requests are served."""
    if log_format == "json":
        logger.info("%s", message)
    elif not quiet:
        print(message, flush=True)


class Supervisor:
    """Starts several workers, forwards signals to them, and replaces those that die."""

    def __init__(self, sock: socket.socket, workers: int, command: Sequence[str], shared: str) -> None:
        self.sock, self.count, self.command, self.shared = sock, workers, command, shared
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.started: dict[int, float] = {}
        self.failures = dict.fromkeys(range(workers), 0)  # in a row
        self.due: dict[int, float] = {}  # when to start a worker again
        self.reloaded = -RELOAD_SECONDS
        self.was_ready, self.ending, self.code = False, False, 0

    def run(self, ready: Callable[[], None]) -> int:
        """Run until all workers have ended; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end())
        signal.signal(signal.SIGHUP, lambda *_: self._reload())
        reports, pipe = os.pipe()
        os.set_blocking(reports, False)
        self.due = dict.fromkeys(range(self.count), 0.0)
        serving = 0
        try:
            while self.children or self.due:
                for worker in [each for each, when in self.due.items() if when <= time.monotonic()]:
                    self._start(worker, pipe)
                if not self.was_ready:
                    with suppress(BlockingIOError):
                        serving += len(os.read(reports, 4_096))
                    if serving == self.count:
                        self.was_ready = True
                        ready()
                for worker, process in list(self.children.items()):
                    if process.poll() is not None:
                        self._ended(worker, process)
                time.sleep(POLL_SECONDS)
        finally:
            self._forward(signal.SIGTERM)
        return self.code

    def _start(self, number: int, pipe: int) -> None:
        # A signal must not arrive between the start and the entry in the list, and SIGHUP would end a process without a
        # handler. A worker unblocks them itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
        if not self.ending:
            worker = Worker(number, self.sock.fileno(), pipe, os.getpid(), self.was_ready)
            variables = {**os.environ, WORKER: json.dumps(worker), SHARED_FOLDER: self.shared}
            process = subprocess.Popen(  # noqa: S603 - the command comes from the caller, not from a user
                list(self.command), env=variables, pass_fds=[worker.socket, pipe]
            )
            self.children[number], self.started[number] = process, time.monotonic()
            del self.due[number]
            if time.monotonic() - self.reloaded < RELOAD_SECONDS:  # the snapshot may be from before the reload
                process.send_signal(signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _ended(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Plan the start of a new worker after one died, unless all are ending."""
        del self.children[number]
        for gauge in Path(self.shared).glob(f"gauge_live*_{process.pid}.db"):
            gauge.unlink()  # its counters stay
        if self.ending:
            return
        if not self.was_ready and process.returncode in REFUSALS:
            self.code = 2
            if (first := self.children.get(0)) is not None:  # it reports the reason
                with suppress(subprocess.TimeoutExpired):
                    first.wait(GRACE_SECONDS)
            self._end()
            return
        lived = time.monotonic() - self.started[number]
        self.failures[number] = 0 if lived > MAX_RESTART_SECONDS else self.failures[number] + 1
        delay = min(MAX_RESTART_SECONDS, RESTART_SECONDS * 2.0 ** max(0, self.failures[number] - 1)) - lived
        self.due[number] = time.monotonic() + delay
        logger.error("worker %d ended (%s); starting another in %.1f s", number, process.returncode, max(0.0, delay))

    def _end(self) -> None:
        self.ending = True
        self.due.clear()
        self.sock.close()  # else connections would still be established, and nobody would accept them
        self._forward(signal.SIGTERM)

    def _reload(self) -> None:
        self.reloaded = time.monotonic()
        self._forward(signal.SIGHUP)

    def _forward(self, number: signal.Signals) -> None:
        for process in self.children.values():
            process.send_signal(number)


def main() -> None:
    """Supervise workers as `supervise` says."""
    descriptor, workers, message, log_format, quiet = json.loads(sys.argv[1])
    configure_logging(log_format, quiet=quiet)

    shared_folder = TemporaryDirectory(prefix="urank-serve-", ignore_cleanup_errors=True)
    with socket.socket(fileno=descriptor) as sock, shared_folder as shared:
        code = Supervisor(sock, workers, sys.argv[2:], shared).run(partial(announce, message, log_format, quiet=quiet))
    sys.exit(code)


if __name__ == "__main__":
    main()
