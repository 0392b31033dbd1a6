"""What `schema.json` says of a prepared log: features with their statistics, positions, counts by split."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.log.lists import offsets_of_runs
from urank.log.schema import QUERY, LogSchema
from urank.log.split import SPLITS
from urank.paths import to_path

__all__ = ["Summary", "positions_of"]

MAX_CATEGORIES = 100_000
"""A feature with more says so (`more_categories`) instead of how many; the rarest are not kept."""


_MOMENTS = pl.Schema(
    {
        "name": pl.String,
        "missing": pl.Int64,
        "known": pl.Int64,
        "sum": pl.Float64,
        "squares": pl.Float64,
        "min": pl.Float64,
        "max": pl.Float64,
    }
)
_COUNTS = pl.Schema({"category": pl.String, "count": pl.Int64})


class Summary:
    """Counts and statistics, gathered a bucket at a time. The statistics of features are those of train alone.

    Attributes:
        last: items below this position were not shown; None when all were.
        positions: K, the last position at which anything was shown; 0 as long as nothing was.
    """

    def __init__(self, schema: LogSchema, last: int | None = None) -> None:
        self.schema = schema
        self.last = last
        self.positions = 0
        counted = ("queries", "lists", "rows", *(() if last is None else ("shown",)), "clicks")
        self.counts = {name: dict.fromkeys(counted, 0) for name in SPLITS}
        self._numeric: list[pl.DataFrame] = []
        self._categories: dict[str, pl.DataFrame] = {}
        self._cut: set[str] = set()

    def add(self, split: str, rows: pl.DataFrame, bounds: NDArray[np.int64]) -> None:
        """Take the rows of one split of a bucket, sorted into the lists that `bounds` delimits."""
        counts = self.counts[split]
        counts["queries"] += len(offsets_of_runs(rows[QUERY].to_numpy())) - 1
        counts["lists"] += len(bounds) - 1
        counts["rows"] += rows.height
        counts["clicks"] += int(rows["click"].cast(pl.Int64).sum())
        shown = rows["position"].to_numpy()
        if self.last is not None:
            shown = shown[shown <= self.last]
            counts["shown"] += len(shown)
        self.positions = max(self.positions, int(shown.max(initial=0)))
        if split == "train":
            self._add_statistics(rows)

    def _add_statistics(self, rows: pl.DataFrame) -> None:
        names = [*self.schema.named("numeric"), *(["value"] if "value" in self.schema.roles else [])]
        if names:
            self._numeric.append(pl.concat([_moments(rows[name]) for name in names]))
        for name in self.schema.named("categorical"):
            self._add_categories(name, rows[name].alias("category").value_counts(name="count").cast(_COUNTS))

    def _add_categories(self, name: str, found: pl.DataFrame) -> None:
        if name in self._categories:
            found = pl.concat([self._categories[name], found]).group_by("category").agg(pl.col("count").sum())
        missing = found.filter(pl.col("category").is_null())
        found = found.drop_nulls().sort(["count", "category"], descending=[True, False])
        if found.height > MAX_CATEGORIES:
            self._cut.add(name)
        self._categories[name] = pl.concat([found.head(MAX_CATEGORIES), missing])

    def to_json(self) -> str:
        """What was gathered so far, to be joined with what others gathered."""
        told = {
            "positions": self.positions,
            "counts": self.counts,
            "numeric": [frame.to_dict(as_series=False) for frame in self._numeric],
            "categories": {name: frame.to_dict(as_series=False) for name, frame in self._categories.items()},
            "cut": sorted(self._cut),
        }
        return json.dumps(told)

    def join(self, other: str) -> None:
        """Add what another gathered, as `to_json` gave it."""
        told = json.loads(other)
        self.positions = max(self.positions, told["positions"])
        for name, counts in told["counts"].items():
            self.counts[name] = {key: self.counts[name][key] + count for key, count in counts.items()}
        self._numeric += [pl.DataFrame(frame, schema=_MOMENTS) for frame in told["numeric"]]
        for name, frame in told["categories"].items():
            self._add_categories(name, pl.DataFrame(frame, schema=_COUNTS))
        self._cut |= set(told["cut"])

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON has it."""
        numeric = _combined(self._numeric)
        features = []
        for feature in self.schema.features:
            entry: dict[str, Any] = {"name": feature.name, "kind": feature.kind}
            if feature.kind == "numeric":
                entry |= numeric.get(feature.name, {})
            elif feature.name in self._categories:
                counts = self._categories[feature.name]
                entry["missing"] = int(counts.filter(pl.col("category").is_null())["count"].sum())
                entry["categories"] = counts.drop_nulls().height
                entry |= {"more_categories": True} if feature.name in self._cut else {}
                top = counts.drop_nulls().head(10)
                entry["most_frequent"] = dict(zip(top["category"].to_list(), top["count"].to_list(), strict=True))
            features.append(entry)
        summary: dict[str, Any] = {
            "positions": self.positions,
            "roles": list(self.schema.roles),
            "counts": self.counts,
            "features": features,
        }
        if "value" in numeric:
            summary["value"] = numeric["value"]
        return summary


def positions_of(name: str) -> int | None:
    """How many positions were shown by a folder that was prepared with `positions`, or by a split of it; None of any
    other log."""
    folder = to_path(name)
    for path in (folder / "schema.json", folder.parent / "schema.json"):  # of a split, that of the folder it is in
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            return int(described["positions"]) if "shown" in described["counts"]["train"] else None
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None


def _moments(values: pl.Series) -> pl.DataFrame:
    x = pl.col("x")
    known = x.drop_nans()
    return (
        pl.DataFrame({"x": values})
        .select(
            pl.lit(values.name).alias("name"),
            x.is_nan().sum().alias("missing"),
            known.count().alias("known"),
            known.cast(pl.Float64).sum().alias("sum"),
            (known.cast(pl.Float64) ** 2).sum().alias("squares"),
            known.min().alias("min"),
            known.max().alias("max"),
        )
        .cast(_MOMENTS)
    )


def _combined(parts: list[pl.DataFrame]) -> dict[str, dict[str, float | int | None]]:
    if not parts:
        return {}
    totals = (
        pl.concat(parts)
        .group_by("name")
        .agg(pl.col("missing", "known", "sum", "squares").sum(), pl.col("min").min(), pl.col("max").max())
    )
    result: dict[str, dict[str, float | int | None]] = {}
    for row in totals.iter_rows(named=True):
        known = row["known"]
        mean = row["sum"] / known if known else 0.0
        spread = max(row["squares"] / known - mean**2, 0.0) ** 0.5 if known else None
        result[row["name"]] = {
            "missing": row["missing"],
            "mean": mean if known else None,
            "std": spread,
            "min": row["min"],
            "max": row["max"],
        }
    return result
