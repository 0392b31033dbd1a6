"""What is refused before any worker starts."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from urank.cli.options import EngineName, cluster_of
from urank.errors import ConfigError
from urank.ray.cluster import Cluster, connected


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without_ray(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "ray" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_ray)
    with pytest.raises(ConfigError, match=r"pip install 'urank\[scale\]'"), connected(Cluster()):
        pass


def test_workers_are_counted_from_one() -> None:
    with pytest.raises(ConfigError, match="workers must be a whole number from 1 up; got 0"):
        Cluster(0)


def test_options_of_a_cluster_need_its_engine() -> None:
    assert cluster_of(EngineName.local, None, None) is None
    assert cluster_of(EngineName.ray, 3, "auto") == Cluster(3, "auto")
    assert cluster_of(EngineName.ray, None, None) == Cluster(2)
    with pytest.raises(ConfigError, match="--workers belongs to --engine ray"):
        cluster_of(EngineName.local, 2, None)
    with pytest.raises(ConfigError, match="--address belongs to --engine ray"):
        cluster_of(EngineName.local, None, "auto")
