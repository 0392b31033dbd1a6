"""A model to serve, and the log that it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from serve.server import save_served

if TYPE_CHECKING:  # torch is slow to load
    from simulated import Small
    from urank.pipeline import ModelFit


@pytest.fixture(scope="session")
def served_model(fitted: ModelFit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can rank in every way, with its graphs."""
    return save_served(fitted, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def served_log(small: Small) -> Path:
    """The log that it was trained on."""
    return small.folder / "log.parquet"
