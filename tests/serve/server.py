"""A real `urank serve` in a process of its own, and a model for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:  # torch is slow to load
    from urank.pipeline import ModelFit

__all__ = ["running", "save_served"]

START_SECONDS = 60.0
END_SECONDS = 30.0


@contextmanager
def running(
    model: Path | None,
    *options: object,
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
    python: str | Path = sys.executable,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`urank serve MODEL` with more options on a free port: its address and its process, once it answers.

    It is ended with SIGTERM at the end of the block, unless the block did so itself.

    Args:
        model: the folder to serve; None if the options name models.
        options: as on the command line.
        environment: variables beside those of this process, of which the key is left out.
        output: a file for what it prints; a failed start shows it.
        python: the interpreter.

        with running(model, "--log", folder) as (url, process):
            httpx.post(f"{url}/v1/rank", json=...)
    """
    variables = {key: text for key, text in os.environ.items() if key != "URANK_API_KEY"}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})}
    models = [] if model is None else [str(model)]
    command = [str(python), "-m", "urank", "serve", *models, "--port", "0", *map(str, options)]
    with tempfile.TemporaryDirectory() as folder:
        said = output or Path(folder) / "output"
        with said.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=variables, start_new_session=True)
        try:
            yield _address(process, said), process
        finally:
            _end(process)


def save_served(fitted: ModelFit, folder: Path, method: str = "score") -> Path:
    """Write a model with its graphs, which is what a server loads."""
    from urank.config import validate
    from urank.model_io import save_model
    from urank.ranking.ranking_settings import UrankConfig

    save_model(fitted.model, validate(UrankConfig, {"method": method}), folder, onnx=True)
    return folder


def _address(process: subprocess.Popen[bytes], said: Path) -> str:
    """Where it serves, as it prints, as soon as it answers there."""
    last = time.monotonic() + START_SECONDS
    while time.monotonic() < last and process.poll() is None:
        found = re.search(r"Serving .* at (http://\S+?:\d+)", said.read_text())
        if found is not None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{found[1]}/readyz", timeout=START_SECONDS).status_code == 200:
                    return found[1]
        time.sleep(0.02)
    raise AssertionError(f"the server did not start:\n{said.read_text()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all of its workers."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it began a group of its own
        process.wait()
        raise AssertionError(f"the server did not end within {END_SECONDS:g} seconds") from None
