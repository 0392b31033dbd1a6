"""What is refused before any worker starts."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from urank.cli.options import EngineName, EngineOptions
from urank.errors import ConfigError
from urank.ray.cluster import Cluster, connected


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without_ray(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "ray" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_ray)
    with pytest.raises(ConfigError, match=r"pip install 'urank\[ray\]'"), connected(Cluster()):
        pass


def test_workers_are_counted_from_one() -> None:
    with pytest.raises(ConfigError, match="workers must be a whole number from 1 up; got 0"):
        Cluster(0)


def test_options_of_a_cluster_need_its_engine() -> None:
    assert EngineOptions().cluster is None
    assert EngineOptions(EngineName.ray, 3, "auto").cluster == Cluster(3, "auto")
    assert EngineOptions(EngineName.ray).cluster == Cluster(2)
    for options, flag in (((2, None), "--workers"), ((None, "auto"), "--address")):
        with pytest.raises(ConfigError, match=f"{flag} belongs to --engine ray"):
            _ = EngineOptions(EngineName.local, *options).cluster
