"""Run a `urank` command and record the modules whose functions ran.

    python -m benchmarks.house_trace OUTPUT ARGUMENTS...                   a command, as `train log.parquet -o model`
    python -m benchmarks.house_trace OUTPUT --request BODY ARGUMENTS...    a command that serves: the second of two
                                                                           requests POST /v1/rank with the file BODY

Writes JSON: the modules, and the pairs of modules of which the first calls the second (hops). Only function bodies
count. Whatever runs while a module is imported, class bodies and generated code do not. Processes that the command
starts are not traced. The command is run as `python -m urank` is, so no module of it is named here.
"""

from __future__ import annotations

import http.client
import inspect
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

SOURCE = Path(__file__).parents[1] / "src"
START_SECONDS = 60.0
REST_SECONDS = 0.05
"""After the answer has arrived, until the server has finished the request."""


class Recorder:
    """Profile function that collects the modules of `SOURCE` in which a function body runs, and their calls."""

    def __init__(self, *, active: bool = True) -> None:
        self.active = active
        self.modules: set[str] = set()
        self.hops: set[tuple[str, str]] = set()
        self._names: dict[str, str | None] = {}
        self._imports = threading.local()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            self._follow_import(frame, event)
        elif self.active and (name := self._body_of(frame)) and not getattr(self._imports, "depth", 0):
            self.modules.add(name)
            if event == "call" and (caller := self._caller(frame)) not in (None, name):
                self.hops.add((str(caller), name))

    def to_dict(self) -> dict[str, list[str] | list[list[str]]]:
        hops = [list(hop) for hop in sorted(self.hops) if self.modules.issuperset(hop)]
        return {"modules": sorted(self.modules), "hops": hops}

    def _follow_import(self, frame: FrameType, event: str) -> None:
        if frame.f_globals.get("__name__") != "__main__" and event in ("call", "return"):
            self._imports.depth = getattr(self._imports, "depth", 0) + (1 if event == "call" else -1)

    def _body_of(self, frame: FrameType) -> str | None:
        """Return the module of a frame; None outside `SOURCE`, and for the body of a module or class."""
        return self._module(frame.f_code.co_filename) if frame.f_code.co_flags & inspect.CO_OPTIMIZED else None

    def _caller(self, frame: FrameType) -> str | None:
        """Return the module of the nearest frame of `SOURCE` below this one."""
        below = frame.f_back
        while below is not None:
            if name := self._body_of(below):
                return name
            below = below.f_back
        return None

    def _module(self, file: str) -> str | None:
        if file not in self._names:
            inside = file.startswith(f"{SOURCE}{os.sep}")
            self._names[file] = module_name(Path(file).relative_to(SOURCE)) if inside else None
        return self._names[file]


def module_name(path: Path) -> str:
    """Return the dotted name of a file below the source folder.

    >>> module_name(Path("urank/serve/app.py")), module_name(Path("urank/serve/__init__.py"))
    ('urank.serve.app', 'urank.serve')
    """
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def trace(arguments: list[str], recorder: Recorder) -> None:
    """Run `urank ARGUMENTS` in this process.

    Raises:
        RuntimeError: if it fails.
    """
    sys.argv = ["urank", *arguments]
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        runpy.run_module("urank", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"urank {' '.join(arguments)} ended with exit code {end.code}") from end
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def trace_request(arguments: list[str], body: bytes, recorder: Recorder) -> None:
    """Run a command that serves, send two requests, and record the handling of the second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    failures: list[str] = []

    def ask() -> None:
        try:
            _wait_until_ready(port)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
            _rank(connection, body)
            recorder.active = True
            _rank(connection, body)
            time.sleep(REST_SECONDS)
            connection.close()
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            failures.append(str(error))
        finally:
            recorder.active = False
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    trace([*arguments, "--port", str(port)], recorder)
    if failures:
        raise RuntimeError(failures[0])


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _rank(connection: http.client.HTTPConnection, body: bytes) -> None:
    connection.request("POST", "/v1/rank", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    if response.status != http.HTTPStatus.OK:
        raise RuntimeError(f"POST /v1/rank was answered with {response.status}: {text.decode(errors='replace')}")


def main() -> None:
    output, *arguments = sys.argv[1:]
    if arguments[0] == "--request":
        recorder = Recorder(active=False)
        trace_request(arguments[2:], Path(arguments[1]).read_bytes(), recorder)
    else:
        recorder = Recorder()
        trace(arguments, recorder)
    Path(output).write_text(json.dumps(recorder.to_dict()), encoding="utf-8")


if __name__ == "__main__":
    main()
