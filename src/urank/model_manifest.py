"""The manifest of a saved model, its format and version, and safe reading of its files; without torch."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from urank.errors import DataError

MANIFEST_VERSION = 2
FORMAT = "urank model"
MAX_FILE_BYTES = 2**31 - 1  # of an ONNX graph


def read_regular(path: str | Path, *, dir_fd: int | None = None) -> bytes:
    """Read a file of a model; raise an `OSError` unless it is a regular one, or links to one, of at most 2 GB.

    A device or a pipe would be read without end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(None, "it is not a regular file", str(path))
        if state.st_size > MAX_FILE_BYTES:
            raise OSError(None, f"it has more than {MAX_FILE_BYTES} bytes", str(path))
        return file.read(MAX_FILE_BYTES)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Read the manifest of a model and check its version."""
    path = Path(folder) / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(read_regular(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        exists, inside = Path(folder).exists(), Path(folder) / "model"
        reason = "its manifest.json cannot be read" if exists else "it does not exist"
        remedy = f"its model is {inside}" if (inside / path.name).is_file() else "give a folder that urank train wrote"
        raise DataError(f"{folder} is not a urank model: {reason}; {remedy}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{folder} is not a urank model: its manifest.json has another format")
    if not isinstance(manifest.get("version"), int):
        raise DataError(f"{folder} is damaged: the version in its manifest.json is {manifest.get('version')!r}")
    if manifest["version"] != MANIFEST_VERSION:
        older = manifest["version"] < MANIFEST_VERSION
        by, remedy = ("an older urank", "train it again") if older else ("a newer urank", "update urank")
        versions = f"manifest version {manifest['version']}, this one reads {MANIFEST_VERSION}"
        raise DataError(f"{folder} was written by {by} ({versions}); {remedy}")
    return manifest
