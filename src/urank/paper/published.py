"""The figures that the paper prints, to stand beside ours where the data is the paper's."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from urank.config import read_toml
from urank.errors import ConfigError
from urank.paper.results import METRICS, STORE_METRICS

__all__ = ["DATASETS", "dataset_name", "published_architectures", "published_metrics", "published_store"]

DATASETS = ("yahoo", "mslr-web10k", "istella-s")


@cache
def _published() -> dict[str, Any]:
    return read_toml(str(files("urank.paper").joinpath("published.toml")))


def dataset_name(dataset: str) -> str:
    """What the paper calls a data set."""
    return str(_of(dataset)["name"])


def published_metrics(dataset: str) -> dict[str, dict[str, float]]:
    """Method -> metric -> the figure of Table 1; nothing when the data is not the paper's.

    >>> published_metrics("yahoo")["urank-paper"]["#Click"]
    0.618
    """
    if not dataset:
        return {}
    return {
        key: dict(zip(METRICS, figures, strict=True))
        for key, figures in _of(dataset).items()
        if isinstance(figures, list)
    }


def published_architectures(dataset: str) -> dict[str, dict[str, float]]:
    """Method -> column -> the figure of Table 2, which the paper has for MSLR-WEB10K alone."""
    if not dataset:
        return {}
    columns = ("train", "test", "valid", "#Click", "CTR")
    found = _of(dataset).get("architectures", {})
    return {key: dict(zip(columns, figures, strict=True)) for key, figures in found.items()}


def published_store() -> dict[str, dict[str, float]]:
    """Method -> metric -> the figure of Table 3, of the paper's own app store.

    >>> published_store()["store-urank"]["Revenue@1"]
    1.264
    """
    return {key: dict(zip(STORE_METRICS, figures, strict=True)) for key, figures in _published()["store"].items()}


def _of(dataset: str) -> dict[str, Any]:
    if dataset not in DATASETS:
        raise ConfigError(f"the paper's data sets are {', '.join(DATASETS)}; got '{dataset}'")
    found: dict[str, Any] = _published()[dataset]
    return found
