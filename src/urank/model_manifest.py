"""The manifest of a saved model: its format and version, read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from urank.errors import DataError

MANIFEST_VERSION = 2
FORMAT = "urank model"


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Read the manifest of a model and check its version."""
    path = Path(folder) / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a urank model: its manifest.json cannot be read") from error
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
