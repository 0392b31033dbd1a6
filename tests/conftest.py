"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real datasets, which are not part of the repository."""
    folder = Path(os.environ.get("URANK_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set URANK_DATA to the folder that holds mq2008/, mslr/ and expedia/")
    return folder
