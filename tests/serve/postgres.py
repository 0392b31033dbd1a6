"""A real PostgreSQL server in a process of its own, which can be killed and restarted."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

__all__ = ["PASSWORD", "PostgresServer", "postgres_server"]

PASSWORD = "p%23ss-w0rd-of-the-test"  # noqa: S105 - percent-encoded, as in a URL
_BINARIES = "/usr/lib/postgresql"


class PostgresServer:
    """A server on a free port of the loopback address; it cannot run as root."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self._data, self._binaries = folder / "data", binaries
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        self.url = f"postgresql://urank:{PASSWORD}@127.0.0.1:{self.port}/postgres"
        (folder / "password").write_text(PASSWORD.replace("%23", "#"))
        if os.geteuid() == 0:
            for path in (folder, folder / "password"):
                shutil.chown(path, "postgres")
        options = [f"--pgdata={self._data}", "--username=urank", f"--pwfile={folder / 'password'}", "--auth=md5"]
        subprocess.run(self._as_user("initdb", *options), check=True, capture_output=True, cwd=folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = [f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories="]
        command = self._as_user(
            "postgres", "-D", str(self._data), *(part for each in settings for part in ("-c", each))
        )
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._data)
        last = time.monotonic() + 60
        while time.monotonic() < last:
            with suppress(psycopg.OperationalError), psycopg.connect(self.url, connect_timeout=2):
                return
            time.sleep(0.05)
        raise AssertionError("PostgreSQL did not start")

    def kill(self) -> None:
        """Kill it and its children, as a loss of power would."""
        assert self._process is not None
        family = subprocess.run(["/usr/bin/pgrep", "-P", str(self._process.pid)], capture_output=True, text=True).stdout
        self._process.kill()
        for pid in map(int, family.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.wait()
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _as_user(self, program: str, *arguments: str) -> Sequence[str]:
        command = [str(self._binaries / program), *arguments]
        if os.geteuid() != 0:
            return command
        user = pwd.getpwnam("postgres")
        prefix = ["/usr/bin/setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        return [*prefix, *command]


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Start a new, empty server; skip the test if PostgreSQL is not installed."""
    found = sorted(Path(_BINARIES).glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL is not installed")
    with tempfile.TemporaryDirectory(prefix="urank-postgres-", dir="/tmp") as name:
        server = PostgresServer(Path(name), found[-1].parent)
        try:
            server.start()
            yield server
        finally:
            server.stop()
