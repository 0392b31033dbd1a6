"""Lists of a log, for the playground to choose from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import polars as pl

from urank.errors import ConfigError
from urank.log.read import read

__all__ = ["Sample", "read_samples"]

MOST = 50


@dataclass(frozen=True)
class Sample:
    """A logged list: its candidates as a request has them, and the ids in the order shown."""

    query_id: str
    candidates: list[dict[str, Any]]
    logged: list[str]
    clicked: list[str]


def read_samples(source: str, numeric: Sequence[str], categorical: Sequence[str], *, most: int = MOST) -> list[Sample]:
    """The first list of each of the first queries of a log.

    Args:
        source: what `urank.read` takes.
        numeric, categorical: the features that requests must bring.
        most: how many lists.
    """
    log = read(source)
    known = {*log.schema.named("numeric"), *log.schema.named("categorical")}
    absent = [name for name in (*numeric, *categorical) if name not in known]
    if absent:
        raise ConfigError(f"--sample {source} must have the features of the model; it lacks '{absent[0]}'")
    frame = next(frame for frame, _ in islice(log.batches(), 1))
    if "session_id" in frame.columns:  # the first list of each query: the others have the same items, as a rule
        frame = frame.filter(pl.col("session_id") == pl.col("session_id").first().over("query_id"))
    groups = frame.partition_by("query_id", maintain_order=True)[:most]
    return [_sample(group.sort("position"), numeric, categorical) for group in groups]


def _sample(group: pl.DataFrame, numeric: Sequence[str], categorical: Sequence[str]) -> Sample:
    ids = _ids(group)
    features = group.select(
        *[pl.col(name).cast(pl.Float64).fill_nan(None) for name in numeric],
        *[pl.col(name).cast(pl.String) for name in categorical],
    )
    candidates = [{"item_id": each, "features": row} for each, row in zip(ids, features.to_dicts(), strict=True)]
    if "value" in group.columns:
        for candidate, value in zip(candidates, group["value"].to_list(), strict=True):
            candidate["value"] = value
    clicked = [each for each, click in zip(ids, group["click"].to_list(), strict=True) if click]
    return Sample(str(group["query_id"][0]), candidates, ids, clicked)


def _ids(group: pl.DataFrame) -> list[str]:
    """The ids of items, told apart where one occurs twice; by position where the log has none."""
    if "item_id" not in group.columns:
        return [f"item {position}" for position in group["position"].to_list()]
    ids = [str(each) for each in group["item_id"].to_list()]
    counts = Counter(ids)
    positions = group["position"].to_list()
    return [each if counts[each] == 1 else f"{each} at {k}" for each, k in zip(ids, positions, strict=True)]
