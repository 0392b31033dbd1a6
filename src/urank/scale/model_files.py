"""A model on its way to workers that may not see the folder it is in."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from urank.errors import DataError
from urank.model import load_model
from urank.paths import to_path
from urank.rankers.ranking import RankingModel

__all__ = ["model_files", "model_from_files"]


def model_files(folder: str | Path) -> dict[str, bytes]:
    """The files of a model, by name."""
    load_model(folder)  # better refused here than by every worker
    try:
        return {path.name: path.read_bytes() for path in sorted(to_path(folder).iterdir()) if path.is_file()}
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error


def model_from_files(files: Mapping[str, bytes]) -> RankingModel:
    """The model again."""
    with tempfile.TemporaryDirectory(prefix="urank-model-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        return load_model(name)
