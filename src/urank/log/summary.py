"""What `schema.json` says of a prepared log: features with their statistics, positions, counts by split."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.log.lists import offsets_of_runs
from urank.log.schema import QUERY, LogSchema
from urank.log.split import SPLITS

__all__ = ["Summary"]

MAX_CATEGORIES = 100_000
"""A feature with more says so (`more_categories`) instead of how many; the rarest are not kept."""


class Summary:
    """Counts and statistics, gathered a bucket at a time. The statistics of features are those of train alone."""

    def __init__(self, schema: LogSchema) -> None:
        self.schema = schema
        self.positions = 0
        self.counts = {name: dict.fromkeys(("queries", "lists", "rows", "clicks"), 0) for name in SPLITS}
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
        self.positions = max(self.positions, int(rows["position"].max()))  # type: ignore[arg-type]
        if split == "train":
            self._add_statistics(rows)

    def _add_statistics(self, rows: pl.DataFrame) -> None:
        names = [*self.schema.named("numeric"), *(["value"] if "value" in self.schema.roles else [])]
        if names:
            self._numeric.append(pl.concat([_moments(rows[name]) for name in names]))
        for name in self.schema.named("categorical"):
            found = rows[name].alias("category").value_counts(name="count")
            if name in self._categories:
                found = pl.concat([self._categories[name], found]).group_by("category").agg(pl.col("count").sum())
            missing = found.filter(pl.col("category").is_null())
            found = found.drop_nulls().sort(["count", "category"], descending=[True, False])
            if found.height > MAX_CATEGORIES:
                self._cut.add(name)
            self._categories[name] = pl.concat([found.head(MAX_CATEGORIES), missing])

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


def _moments(values: pl.Series) -> pl.DataFrame:
    x = pl.col("x")
    known = x.drop_nans()
    return pl.DataFrame({"x": values}).select(
        pl.lit(values.name).alias("name"),
        x.is_nan().sum().alias("missing"),
        known.count().alias("known"),
        known.cast(pl.Float64).sum().alias("sum"),
        (known.cast(pl.Float64) ** 2).sum().alias("squares"),
        known.min().alias("min"),
        known.max().alias("max"),
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
