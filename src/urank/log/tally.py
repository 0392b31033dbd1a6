"""Counts of a log gathered a batch at a time, so that a log larger than memory can be inspected in one pass."""

from __future__ import annotations

import numpy as np
import polars as pl

from urank.log.schema import LogSchema
from urank.log.split import stable_hash

__all__ = ["Tally"]

SAMPLE_ROWS = 200_000
PAIR_ROWS = 2_000_000
MERGE_ROWS = 1_000_000


class _Sample:
    """Rows of a random part of the keys: all while they are few, every second key's when they grow too many, and on."""

    def __init__(self, key: str, most: int) -> None:
        self.key = key
        self.most = most
        self.limit = 2**64 - 1
        self._parts: list[pl.DataFrame] = []
        self._rows = 0

    def add(self, frame: pl.DataFrame) -> None:
        self._parts.append(self._kept(frame))
        self._rows += self._parts[-1].height
        while self._rows > self.most:
            self.limit //= 2
            self._parts = [self._kept(pl.concat(self._parts))]
            self._rows = self._parts[0].height

    def _kept(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame if self.limit == 2**64 - 1 else frame.filter(pl.col(self.key) <= self.limit)

    def frame(self) -> pl.DataFrame:
        return pl.concat(self._parts)

    @property
    def share(self) -> float:
        return float((self.limit + 1) / 2**64)


class _Sums:
    """Grouped sums, smallest and largest values, drawn together whenever too many parts have gathered."""

    def __init__(self, keys: list[str], **how: str) -> None:
        self.keys = keys
        self.how = how
        self._parts: list[pl.DataFrame] = []
        self._rows = 0
        self._together = 0

    def add(self, part: pl.DataFrame) -> None:
        self._parts.append(part)
        self._rows += part.height
        if self._rows > self._together + MERGE_ROWS:
            self.frame()

    def frame(self) -> pl.DataFrame:
        columns = [getattr(pl.col(name), how)() for name, how in self.how.items()]
        self._parts = [pl.concat(self._parts).group_by(self.keys).agg(columns)]
        self._rows = self._together = self._parts[0].height
        return self._parts[0]


class Tally:
    """Everything `inspect` counts."""

    def __init__(self, schema: LogSchema) -> None:
        self.schema = schema
        self.rows = 0
        self.groups = [name for name in ("policy", "category") if name in schema.roles]
        self._cells = _Sums(["position", *self.groups], n="sum", clicks="sum")
        self._lists = _Sums(["_query", "_session"], n="sum", clicks="sum", top="min", bottom="max")
        self._missing: list[pl.DataFrame] = []
        self._sample = _Sample("_query", SAMPLE_ROWS)
        self._pairs = _Sample("_item", PAIR_ROWS)

    def add(self, frame: pl.DataFrame) -> None:
        """Take a batch in canonical form."""
        self.rows += frame.height
        sessions = (
            stable_hash(frame["session_id"]) if "session_id" in frame.columns else np.zeros(frame.height, np.uint64)
        )
        queries = stable_hash(frame["query_id"])
        frame = frame.with_columns(pl.Series("_query", queries), pl.Series("_session", sessions), self._item(frame))
        clicks = pl.col("click").cast(pl.Int64).sum().alias("clicks")
        self._cells.add(frame.group_by("position", *self.groups).agg(pl.len().alias("n"), clicks))
        top, bottom = pl.col("position").min().alias("top"), pl.col("position").max().alias("bottom")
        self._lists.add(frame.group_by("_query", "_session").agg(pl.len().alias("n"), clicks, top, bottom))
        self._missing.append(self._count_missing(frame))
        self._sample.add(frame)
        pairs = frame.group_by("_item", "_query", "position").agg(clicks)
        self._pairs.add(pairs.sort("_item", "_query", "position"))

    def _item(self, frame: pl.DataFrame) -> pl.Series:
        if "item_id" in frame.columns:
            return pl.Series("_item", stable_hash(frame["item_id"]))
        names = [feature.name for feature in self.schema.features]
        if not names:
            return pl.Series("_item", np.arange(self.rows, self.rows + frame.height, dtype=np.uint64))
        return frame.select(pl.struct(names).hash(seed=0).alias("_item"))["_item"]

    def _count_missing(self, frame: pl.DataFrame) -> pl.DataFrame:
        numeric = [pl.col(name).is_nan().sum() for name in self.schema.named("numeric")]
        return frame.select(*numeric, *[pl.col(name).null_count() for name in self.schema.named("categorical")])

    def cells(self) -> pl.DataFrame:
        """Impressions `n` and `clicks` by position, policy and category."""
        return self._cells.frame().sort("position", *self.groups)

    def lists(self) -> pl.DataFrame:
        """Items `n`, `clicks`, `top` and `bottom` position of each list."""
        return self._lists.frame()

    def missing(self) -> dict[str, float]:
        """The share of rows in which each feature is missing, for those where it ever is."""
        if not self.schema.features:
            return {}
        counts = pl.concat(self._missing).sum().row(0, named=True)
        return {name: count / self.rows for name, count in counts.items() if count}

    def sample(self) -> pl.DataFrame:
        """All rows of some of the queries, sorted into lists."""
        return self._sample.frame().sort("_query", "_session", "position")

    def pairs(self) -> tuple[pl.DataFrame, float]:
        """Clicks by item, query and position for some of the items, and the share of items that is."""
        pairs = self._pairs.frame().group_by("_item", "_query", "position").agg(pl.col("clicks").sum())
        return pairs.sort("_item", "_query", "position"), self._pairs.share
