"""Processes that serve one socket, and the signals they obey.

    SIGTERM, SIGINT   take no more requests, finish those at hand, seal the log, end
    SIGHUP            load the models anew

One process serves by itself. Several are started anew by one that only watches: they run the same command, find their
socket in the environment, and say when they serve. The watching process hands signals on, and starts another where one
died.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from urank.errors import ConfigError, UrankError
from urank.serve.settings import ServeConfig

__all__ = ["WORKER", "Worker", "open_socket", "serve"]

WORKER = "URANK_SERVE_WORKER"
"""The variable that tells a process that it is one of several: its number, its socket, where to say that it serves."""

BACKLOG = 2_048
GRACE_SECONDS = 20
RESTART_SECONDS = 1.0
LOOK_SECONDS = 0.1
FINAL = (2, 3)
"""Exit codes of a worker that said what is wrong, and would say it again."""

logger = logging.getLogger("urank.serve")


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
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
    """One process of several."""

    number: int
    socket: int
    told: int
    parent: int

    @classmethod
    def here(cls) -> Worker | None:
        """What this process is told to be; none when it was started by somebody else."""
        text = os.environ.pop(WORKER, "")
        return cls(*map(int, text.split(":"))) if text else None

    def __str__(self) -> str:
        return f"{self.number}:{self.socket}:{self.told}:{self.parent}"

    def serve(self, config: ServeConfig, *, access_log: bool) -> None:
        """Serve until a signal, or the end of the parent, ends it."""
        try:
            with socket.socket(fileno=self.socket) as sock:
                _run(config, sock, access_log=access_log, ready=lambda: _tell(self.told), worker=self)
        except UrankError:
            if self.number == 0:
                raise
            raise SystemExit(2) from None  # the first says it for all


def serve(
    config: ServeConfig,
    sock: socket.socket,
    *,
    workers: int = 1,
    access_log: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal ends it.

    Args:
        config: how.
        sock: what `open_socket` gave.
        workers: how many processes; several run the command of this one.
        access_log: write a line for every request on standard output.
        ready: called when requests are served.

    Raises:
        UrankError: when the models cannot be loaded.
    """
    if workers == 1:
        _run(config, sock, access_log=access_log, ready=ready)
        return
    shared = tempfile.mkdtemp(prefix="urank-metrics-")
    try:
        _Watcher(sock, workers, shared).run(ready)
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
    asked: list[int] = []  # a signal that comes while the models are loaded must not be lost, or end the process
    signal.signal(signal.SIGHUP, lambda number, _: asked.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    import uvicorn  # these load much that a watching process has no use for

    from urank.serve.app import build_app
    from urank.serve.security import BoundedHeads

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    app = build_app(
        config,
        compacts=worker is None or worker.number == 0,
        parent=None if worker is None else worker.parent,
        reload_wanted=lambda: bool(asked),
    )
    settings = uvicorn.Config(
        app,
        http=BoundedHeads,
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

    def end(*_: object) -> None:
        """Before uvicorn listens to signals, and once more at its end, when it raises them again."""
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    server.run(sockets=[sock])


def _tell(descriptor: int) -> None:
    os.write(descriptor, b".")
    os.close(descriptor)


@dataclass(frozen=True, eq=False)
class _Child:
    number: int
    started: float
    process: subprocess.Popen[bytes]


class _Watcher:
    """The parent of several workers."""

    def __init__(self, sock: socket.socket, workers: int, shared: str) -> None:
        self.sock = sock
        self.count = workers
        self.shared = shared
        self.children: list[_Child] = []
        self.ending = False
        self.code = 0

    def run(self, ready: Callable[[], None]) -> None:
        """Watch until all have ended."""
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, self._signalled)
        heard, told = os.pipe()
        os.set_blocking(heard, False)
        try:
            for number in range(self.count):
                self._start(number, told)
            serving = 0
            while self.children:
                if serving < self.count:
                    serving += len(_read(heard))
                    if serving == self.count:
                        ready()
                for child in list(self.children):
                    if child.process.poll() is not None:
                        self._ended(child, told)
                time.sleep(LOOK_SECONDS)
        finally:
            self._hand_on(signal.SIGTERM)
        if self.code:
            raise SystemExit(self.code)

    def _start(self, number: int, told: int) -> None:
        worker = Worker(number, self.sock.fileno(), told, os.getpid())
        variables = {**os.environ, WORKER: str(worker), "PROMETHEUS_MULTIPROC_DIR": self.shared}
        # SIGHUP would end a process that does not listen to it yet, so it begins with it held back.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        process = subprocess.Popen(  # noqa: S603 - the command of this very process
            [sys.executable, "-m", "urank", *sys.argv[1:]], env=variables, pass_fds=[worker.socket, told]
        )
        self.children.append(_Child(number, time.monotonic(), process))
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if self.ending:  # a signal that came before it was listed did not reach it
            process.terminate()

    def _ended(self, child: _Child, told: int) -> None:
        """Start another where one died, unless all are to end."""
        self.children.remove(child)
        _forget_metrics(child.process.pid, self.shared)
        if self.ending:
            return
        if child.process.returncode in FINAL:
            self.code = 2
            for first in (each for each in self.children if each.number == 0):  # it is the one that says why
                with suppress(subprocess.TimeoutExpired):
                    first.process.wait(GRACE_SECONDS)
            self._end()
            return
        logger.error("worker %d ended (%s); starting another", child.number, child.process.returncode)
        time.sleep(max(0.0, RESTART_SECONDS - (time.monotonic() - child.started)))
        if not self.ending:  # a signal may have come meanwhile
            self._start(child.number, told)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._hand_on(signal.SIGHUP)
        else:
            self._end()

    def _end(self) -> None:
        self.ending = True
        self._hand_on(signal.SIGTERM)

    def _hand_on(self, number: signal.Signals) -> None:
        for child in self.children:
            child.process.send_signal(number)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4_096)
    except BlockingIOError:
        return b""


def _forget_metrics(pid: int, shared: str) -> None:
    """What a worker that ended said of itself holds no longer; what it counted stays."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid, shared)  # type: ignore[no-untyped-call]
