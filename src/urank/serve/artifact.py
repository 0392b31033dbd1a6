"""The files of a saved model as they are at one time, also when another takes its place while they are read."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from urank.errors import DataError
from urank.manifest import read_manifest

__all__ = ["read_artifact", "version_of"]

_TRIES = 5
_PAUSE_SECONDS = 0.01


def read_artifact(folder: Path) -> dict[str, bytes]:
    """The files of one artifact, also when another takes its name meanwhile."""
    for left in reversed(range(_TRIES)):
        try:
            manifest = read_manifest(folder)
        except RecursionError as error:
            raise DataError(f"{folder} is not a urank model: its manifest.json cannot be read") from error
        except DataError:
            if folder.exists() or not left:
                raise
            time.sleep(_PAUSE_SECONDS)  # one folder has gone, and the next is about to come
            continue
        files = _read_at_once(folder, _names(manifest))
        if files is not None and _is_json_of(files["manifest.json"], manifest):
            return files
    raise DataError(f"{folder} changes while it is read")


def _names(manifest: Mapping[str, Any]) -> list[str]:
    """The files that a model of this kind is served from."""
    names, scorer = ["manifest.json", "features.json", "clicks.onnx"], manifest.get("scorer")
    if isinstance(scorer, dict) and scorer:
        names.append("scorer.txt" if scorer.get("family") == "trees" else "scorer.onnx")
    return names


def _read_at_once(folder: Path, names: Sequence[str]) -> dict[str, bytes] | None:
    """Files of a folder as they are at one time; none when they are deleted or written to meanwhile.

    They are read through one handle of the folder: paths could lead to another folder of that name, and back again to
    the first, between one file and the next.
    """
    handle = -1
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        before = _identities(handle, names)
        files = {name: _read_in(handle, name) for name in names}
        return files if _identities(handle, names) == before else None
    except OSError as error:
        if handle != -1 and not _is_still(folder, handle):
            return None
        name = Path(str(error.filename)).name
        raise DataError(f"{folder} cannot be served: {name} cannot be read ({error.strerror})") from error
    finally:
        if handle != -1:
            os.close(handle)


def _read_in(handle: int, name: str) -> bytes:
    with open(name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=handle)) as file:
        return file.read()


def _identities(handle: int, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """What tells files from others of their names, and from what they were before."""
    found = [os.stat(name, dir_fd=handle) for name in names]
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in found]


def _is_still(folder: Path, handle: int) -> bool:
    """Whether a folder is the one that was opened."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(handle))
    except OSError:
        return False


def _is_json_of(content: bytes, value: Any) -> bool:
    try:
        return bool(json.loads(content) == value)
    except ValueError:
        return False


def version_of(files: Mapping[str, bytes]) -> str:
    """The same for the same files, wherever they lie."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode())
        digest.update(files[name])
    return digest.hexdigest()[:12]
