"""Processes that serve one socket, and the signals they obey.

    SIGTERM, SIGINT   take no more requests, finish those at hand, seal the log, end
    SIGHUP            load the models anew

One process serves by itself. Several are children of one that only watches: it hands signals on, and starts another
where one died. Children are forked before anything is loaded, so none inherits a thread.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType

from urank.errors import ConfigError, UrankError
from urank.serve.config import ServeConfig

__all__ = ["open_socket", "serve"]

BACKLOG = 2_048
GRACE_SECONDS = 20
RESTART_SECONDS = 1.0

logger = logging.getLogger("urank.serve")


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror or error}") from error
    sock.listen(BACKLOG)
    sock.set_inheritable(True)
    return sock


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
        workers: how many processes.
        access_log: write a line for every request on standard output.
        ready: called when requests are served; with several workers, when they were started.

    Raises:
        UrankError: when the models cannot be loaded.
    """
    if workers == 1:
        _run(config, sock, access_log=access_log, ready=ready)
        return
    shared = tempfile.mkdtemp(prefix="urank-metrics-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared
    try:
        _Watcher(config, sock, workers, access_log).run(ready)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def _run(
    config: ServeConfig,
    sock: socket.socket,
    *,
    access_log: bool,
    ready: Callable[[], None],
    compacts: bool = True,
    siblings: bool = False,
) -> None:
    """Serve in this process."""
    import uvicorn  # these load much that a watching process has no use for

    from urank.serve.app import build_app

    asked: list[int] = []  # a signal that comes while the models are loaded must not be lost, or end the process
    signal.signal(signal.SIGHUP, lambda number, _: asked.append(number))
    app = build_app(config, compacts=compacts, siblings=siblings, reload_wanted=lambda: bool(asked))
    settings = uvicorn.Config(
        app,
        log_level="warning" if not access_log else "info",
        access_log=access_log,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
        limit_concurrency=config.limits.connections,
        proxy_headers=False,
        ws="none",
        lifespan="on",
    )
    ready()
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them once more at its end, when all is well
        signal.signal(number, lambda *_: None)
    uvicorn.Server(settings).run(sockets=[sock])


class _Watcher:
    """The parent of several workers."""

    def __init__(self, config: ServeConfig, sock: socket.socket, workers: int, access_log: bool) -> None:
        self.config = config
        self.sock = sock
        self.access_log = access_log
        self.children: dict[int, tuple[int, float]] = {}
        self.count = workers
        self.ending = False

    def run(self, ready: Callable[[], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)
        for worker in range(self.count):
            self._start(worker)
        ready()
        failed = 0
        while self.children:
            failed = max(failed, self._wait())
        if failed:
            raise SystemExit(failed)

    def _wait(self) -> int:
        """Wait for a child to end; the exit code for which all must end, or 0."""
        try:
            pid, status = os.waitpid(-1, 0)
        except InterruptedError:
            return 0
        worker, started = self.children.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if self.ending:
            return 0
        if code == 2:  # it said what is wrong, and would say it again
            self._end(signal.SIGTERM)
            return 2
        logger.error("worker %d ended (%s); starting another", worker, code)
        time.sleep(max(0.0, RESTART_SECONDS - (time.monotonic() - started)))
        self._start(worker)
        return 0

    def _start(self, worker: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.children[pid] = worker, time.monotonic()
            return
        code = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            _run(
                self.config,
                self.sock,
                access_log=self.access_log,
                ready=lambda: None,
                compacts=worker == 0,
                siblings=True,
            )
            code = 0
        except UrankError as error:
            if worker == 0:
                print(f"Error: {error}", file=sys.stderr, flush=True)
            code = 2
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except KeyboardInterrupt:
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._hand_on(signal.SIGHUP)
        else:
            self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        self.ending = True
        self._hand_on(number)

    def _hand_on(self, number: signal.Signals) -> None:
        for pid in list(self.children):
            os.kill(pid, number)
