"""The manifest of a saved model: what it is and of which version; read without loading the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from urank.errors import DataError

__all__ = ["FORMAT", "MANIFEST_VERSION", "read_manifest"]

MANIFEST_VERSION = 2
FORMAT = "urank model"


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a model, checked for its version."""
    path = Path(folder) / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a urank model: its manifest.json cannot be read") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{folder} is not a urank model: its manifest.json is of another kind")
    if not isinstance(manifest.get("version"), int):
        raise DataError(f"{folder} is damaged: the version in its manifest.json is {manifest.get('version')!r}")
    if manifest["version"] < MANIFEST_VERSION:
        raise DataError(
            f"{folder} was written by an older urank (manifest version {manifest.get('version')}, this one reads "
            f"{MANIFEST_VERSION}); train it again"
        )
    if manifest["version"] > MANIFEST_VERSION:
        raise DataError(
            f"{folder} was written by a newer urank (manifest version {manifest['version']}, this one reads "
            f"{MANIFEST_VERSION}); update urank"
        )
    return manifest
