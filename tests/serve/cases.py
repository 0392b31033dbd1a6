"""Small models of every kind as a server loads them, and random lists for them, ties and missing values included."""

from __future__ import annotations

import atexit
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from urank.serve.app import build_app
from urank.serve.models import ActiveModels, ModelSources, ServedModel, load_served
from urank.serve.request_arrays import CandidateReader, RequestLists
from urank.serve.request_schemas import parse, request_types
from urank.serve.server_settings import Limits, ServeConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would rather have another version of httpx
    from starlette.testclient import TestClient

if TYPE_CHECKING:  # torch is slow to load
    from urank.ranking.ranking_model import RankingModel

__all__ = [
    "KINDS",
    "candidates",
    "client",
    "example",
    "frame",
    "lists_of",
    "loaded",
    "ranker",
    "reader_of",
    "saved",
]

KINDS = ("network", "trees", "clicks", "numbers")
"""A network, trees, or no scorer, on features of both kinds; and no scorer on numbers alone. All have 5 positions."""

_LONGEST_ID = 3


@cache
def ranker(kind: str, seed: int = 0) -> RankingModel:
    """The model as it was before it was saved."""
    from export.models import Case, build

    cases = {
        "network": Case("network", "t", "both", value=True),
        "trees": Case("trees", "t", "both", value=True),
        "clicks": Case(None, "t", "both", calibration="isotonic"),
        "numbers": Case(None, "t", "numbers"),
    }
    return build(cases[kind], seed)


def saved(kind: str, seed: int = 0) -> Path:
    """The folder of a model; it lives as long as the process."""
    from urank.model_io import save_model
    from urank.ranking.ranking_settings import UrankConfig

    folder = _home() / f"{kind}-{seed}"
    if not folder.exists():
        save_model(ranker(kind, seed), UrankConfig(), folder)
    return folder


@cache
def _home() -> Path:
    home = tempfile.TemporaryDirectory(prefix="urank-cases-")
    atexit.register(home.cleanup)
    return Path(home.name)


@cache
def loaded(kind: str, seed: int = 0) -> ServedModel:
    """The model as a server has it."""
    return load_served(saved(kind, seed))


def candidates(
    model: ServedModel, rng: np.random.Generator, count: int, *, values: bool = True
) -> list[dict[str, Any]]:
    """Candidates as a request has them: some are alike but for their ids, some lack features or have unknown ones."""
    kinds = [_features(model, rng) for _ in range(max(1, int(rng.integers(1, count + 1))))]
    made: list[dict[str, Any]] = []
    for number in range(count):
        features, value = kinds[int(rng.integers(len(kinds)))]
        made.append({"item_id": f"i{number:0{_LONGEST_ID}d}", "features": features})
        if values and rng.random() < 0.9:
            made[-1]["value"] = value
    return made


def _features(model: ServedModel, rng: np.random.Generator) -> tuple[dict[str, Any], float]:
    features: dict[str, Any] = {}
    for number in model.featurizer.numeric:
        drawn = np.float32(rng.normal(number.mean, 2 * number.std))
        features[number.name] = None if rng.random() < 0.2 else float(np.float32(np.sign(drawn) * np.expm1(abs(drawn))))
    for category in model.featurizer.categorical:
        known = [*category.vocabulary, "never seen", "", None]
        features[category.name] = known[int(rng.integers(len(known)))]
    return features, float(np.float32(rng.choice([0.0, 0.5, 1.0, 2.5, 7.25])))


def example(kind: str, count: int = 6, seed: int = 1) -> dict[str, Any]:
    """A request to rank."""
    return {"query_id": "q", "candidates": candidates(loaded(kind), np.random.default_rng(seed), count)}


def frame(queries: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Requests as the table that `RankingModel.rank` takes."""
    rows = [
        {"query_id": query["query_id"], "item_id": each["item_id"], "value": each.get("value", 1.0), **each["features"]}
        for query in queries
        for each in query["candidates"]
    ]
    features = queries[0]["candidates"][0]["features"]
    texts = {name for name in features if name in ("shop", "if", "shape")}
    schema = {"query_id": pl.String, "item_id": pl.String, "value": pl.Float32} | {
        name: pl.String if name in texts else pl.Float32 for name in features
    }
    return pl.DataFrame(rows, schema=schema)


def reader_of(served: ActiveModels | ServedModel, *, ignore_unknown: bool = False, **limits: Any) -> CandidateReader:
    """What reads requests for a model."""
    served = ActiveModels(served) if isinstance(served, ServedModel) else served
    return CandidateReader(served.numeric, served.categorical, Limits(**limits), ignore_unknown=ignore_unknown)


def lists_of(reader: CandidateReader, queries: Sequence[dict[str, Any]], *, batch: bool = True) -> RequestLists:
    """Requests as arrays, by way of the types that parse bodies."""
    limits = Limits(candidates=10**6, queries=10**6)
    decoder = request_types(reader.numeric, reader.categorical, limits, ignore_unknown=reader.ignore_unknown).rank
    return reader.lists([parse(decoder, msgspec.json.encode(query)) for query in queries], batch=batch)


def items_file(folder: Path, kind: str = "trees", count: int = 20, seed: int = 3, **columns: Any) -> Path:
    """A file of items with all features of a model, and more columns."""
    made = candidates(loaded(kind), np.random.default_rng(seed), count, values=False)
    query = {"query_id": "q", "candidates": made}
    table = frame([query]).drop("query_id", "value").with_columns(**columns)
    table.write_parquet(folder / "items.parquet")
    return folder / "items.parquet"


@contextmanager
def client(kind: str | Path = "trees", **settings: Any) -> Iterator[TestClient]:
    """The application in this process, under the address that a server at a loopback address has."""
    main = saved(kind) if isinstance(kind, str) else kind
    sources = {key: settings.pop(key) for key in ("method", "shadow", "test") if key in settings}
    headers = settings.pop("headers", None)
    config = ServeConfig(sources=ModelSources(main=main, **sources), **settings)
    with TestClient(build_app(config), base_url="http://127.0.0.1", headers=headers) as found:
        yield found
