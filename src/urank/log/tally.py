"""Counts of a log gathered a batch at a time, so that a log larger than memory can be inspected in one pass."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.log.schema import ITEM, LIST, QUERY, SESSION, LogSchema
from urank.log.split import stable_hash

__all__ = ["Tally"]

SAMPLE_ROWS = 200_000
SAMPLE_BYTES = 256 * 2**20
PAIR_ROWS = 2_000_000
FEWEST_ITEMS = 1_000
MERGE_ROWS = 1_000_000
EXACT_POSITIONS = 64

_MOVE = "__urank_move"


class _Sample:
    """All rows of some keys: of all keys while rows are few, of those with the lowest hashes when they grow too many.

    At least `fewest` keys are kept, whatever that takes; so it never ends empty, and a few keys are never sampled.
    """

    def __init__(self, key: str, most: int, fewest: int = 1) -> None:
        self.key = key
        self.most = most
        self.fewest = fewest
        self.limit = 2**64 - 1
        self._parts: list[pl.DataFrame] = []
        self._rows = 0

    def add(self, frame: pl.DataFrame) -> None:
        self._parts.append(self._kept(frame))
        self._rows += self._parts[-1].height
        if self._rows > self.most:
            self.cut()

    def cut(self) -> pl.DataFrame:
        """All rows in one frame, of half as many keys as long as they are too many."""
        frame = self._together()
        while frame.height > self.most:
            keys = frame[self.key].unique().sort()
            kept = max(len(keys) // 2, self.fewest)
            if kept >= len(keys):
                break
            self.limit = int(keys[kept - 1])
            frame = self._kept(frame)
        self._parts, self._rows = [frame], frame.height
        return frame

    def _together(self) -> pl.DataFrame:
        return pl.concat(self._parts)

    def _kept(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame if self.limit == 2**64 - 1 else frame.filter(pl.col(self.key) <= self.limit)

    @property
    def share(self) -> float:
        return float((self.limit + 1) / 2**64)


class _Sums(_Sample):
    """Grouped sums, smallest and largest values, drawn together whenever too many parts have gathered."""

    def __init__(self, keys: list[str], most: int = 2**62, fewest: int = 1, **how: str) -> None:
        super().__init__(keys[0], most, fewest)
        self.keys = keys
        self.how = how
        self._merged = 0

    def add(self, frame: pl.DataFrame) -> None:
        self._parts.append(self._kept(frame))
        self._rows += self._parts[-1].height
        if self._rows > self._merged + MERGE_ROWS:
            self.cut()

    def cut(self) -> pl.DataFrame:
        frame = super().cut()
        self._merged = frame.height
        return frame

    def _together(self) -> pl.DataFrame:
        if len(self._parts) == 1 and self._parts[0].height == self._merged:
            return self._parts[0]
        columns = [getattr(pl.col(name), how)() for name, how in self.how.items()]
        return super()._together().group_by(self.keys).agg(columns)


class Tally:
    """Everything `inspect` counts."""

    def __init__(self, schema: LogSchema) -> None:
        self.schema = schema
        self.rows = 0
        self.groups = [name for name in ("policy", "category") if name in schema.roles]
        self.names_items = "item_id" in schema.roles
        self.tells_items = self.names_items or bool(schema.features)
        self._cells = _Sums(["position", *self.groups], n="sum", clicks="sum")
        self._lists = _Sums([QUERY, SESSION], n="sum", clicks="sum", top="min", bottom="max", bits="sum")
        self._missing: list[pl.DataFrame] = []
        in_memory = SAMPLE_BYTES // (4 * len(schema.features) + 200)
        self._sample = _Sample(LIST, min(SAMPLE_ROWS, in_memory))
        self._pairs = _Sums([ITEM, "position"], PAIR_ROWS, FEWEST_ITEMS, clicks="sum")
        self._moves = _Sums([_MOVE], PAIR_ROWS, top="min", bottom="max")

    def add(self, frame: pl.DataFrame) -> None:
        """Take a batch in canonical form."""
        self.rows += frame.height
        queries = stable_hash(frame["query_id"])
        sessions = np.zeros(frame.height, np.uint64)
        lists = queries
        if "session_id" in frame.columns:
            sessions = stable_hash(frame["session_id"])
            lists = _paired(queries, sessions)
        frame = frame.with_columns(pl.Series(QUERY, queries), pl.Series(SESSION, sessions), pl.Series(LIST, lists))
        if self.tells_items:
            frame = frame.with_columns(self._item(frame))
        n, clicks = pl.len().alias("n"), pl.col("click").cast(pl.Int64).sum().alias("clicks")
        top, bottom = pl.col("position").min().alias("top"), pl.col("position").max().alias("bottom")
        self._cells.add(frame.group_by("position", *self.groups).agg(n, clicks))
        bit = pl.lit(2, pl.UInt64).pow((pl.col("position") - 1).clip(0, EXACT_POSITIONS - 1).cast(pl.UInt32))
        narrow = clicks.cast(pl.UInt32)
        self._lists.add(frame.group_by(QUERY, SESSION).agg(n, narrow, top, bottom, bit.sum().alias("bits")))
        self._missing.append(self._count_missing(frame))
        self._sample.add(frame)
        if self.tells_items:
            self._pairs.add(frame.group_by(ITEM, "position").agg(clicks))
            move = pl.Series(_MOVE, _paired(frame[ITEM].to_numpy(), queries))
            self._moves.add(frame.select(move, "position").group_by(_MOVE).agg(top, bottom))

    def _item(self, frame: pl.DataFrame) -> pl.Series:
        if self.names_items:
            return pl.Series(ITEM, stable_hash(frame["item_id"]))
        names = [feature.name for feature in self.schema.features]
        return frame.select(pl.struct(names).hash(seed=0).alias(ITEM))[ITEM]

    def _count_missing(self, frame: pl.DataFrame) -> pl.DataFrame:
        numeric = [pl.col(name).is_nan().sum() for name in self.schema.named("numeric")]
        return frame.select(*numeric, *[pl.col(name).null_count() for name in self.schema.named("categorical")])

    def cells(self) -> pl.DataFrame:
        """Impressions `n` and `clicks` by position, policy and category."""
        return self._cells.cut().sort("position", *self.groups)

    def lists(self) -> pl.DataFrame:
        """Items `n`, `clicks`, `top` and `bottom` position of each list; `bits` is the sum of its 2^(position − 1)."""
        return self._lists.cut()

    def position_twice(self) -> tuple[int, int] | None:
        """The hashes (query, session) of a list in which a position occurs twice.

        n powers of two sum to a number with n bits if and only if all are different: exact for lists that end at
        position 64 or above. A deeper list is caught if it has more items than positions, or if it is in the sample.
        """
        lists = self.lists()
        shallow, bits = pl.col("bottom") <= EXACT_POSITIONS, pl.col("bits").bitwise_count_ones()
        deep = pl.col("n") > pl.col("bottom") - pl.col("top") + 1
        found = lists.filter(deep | (shallow & (bits != pl.col("n")))).sort(QUERY, SESSION).head(1)
        if not found.height:
            sample = self.sample()
            found = sample.filter(pl.struct(QUERY, SESSION, "position").is_duplicated()).head(1)
        return (int(found[QUERY][0]), int(found[SESSION][0])) if found.height else None

    def missing(self) -> dict[str, float]:
        """The share of rows in which each feature is missing, for those where it ever is."""
        if not self.schema.features:
            return {}
        counts = pl.concat(self._missing).sum().row(0, named=True)
        return {name: count / self.rows for name, count in counts.items() if count}

    def sample(self) -> pl.DataFrame:
        """All rows of some of the lists, sorted into lists."""
        return self._sample.cut().sort(QUERY, SESSION, "position")

    def alike(self) -> float:
        """The share of lists in which two items cannot be told apart, since the log has only their features."""
        if self.names_items or not self.tells_items:
            return 0.0 if self.names_items else 1.0
        rows = self.sample().select(QUERY, SESSION, ITEM)
        counts = rows.group_by(QUERY, SESSION).agg(pl.len().alias("n"), pl.col(ITEM).n_unique().alias("unique"))
        return float((counts["unique"] < counts["n"]).to_numpy().mean())

    def pairs(self) -> tuple[pl.DataFrame, float]:
        """Clicks by item and position for some of the items, and the share of items that is; 1 means all."""
        return self._pairs.cut().sort(ITEM, "position"), self._pairs.share

    def same_query_moves(self) -> int:
        """How often an item was seen at two positions of one query."""
        moves = self._moves.cut()
        return round(int((moves["top"] < moves["bottom"]).to_numpy().sum()) / self._moves.share)


def _paired(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of two hashes."""
    with np.errstate(over="ignore"):
        mixed = (first ^ (second >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + second
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        paired: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(27))
    return paired
