"""One Ray cluster of this machine for all tests of the engine, which take turns in one process of the test runner."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulated import Small, make
from urank.ray.cluster import Cluster, connected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("ray"))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two workers; Ray stays up between the tests."""
    two = Cluster(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray and what it loads
        with connected(two):
            yield two


@pytest.fixture(scope="session")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A log that is large enough for two trainings to end alike."""
    return make(tmp_path_factory.mktemp("larger"), queries=800, sessions=8, features=6, seed=3)
