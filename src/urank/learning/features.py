"""Feature encoding: the scale of numbers, and vocabularies that map categories to codes.

A `Featurizer` is fitted on the train split only and saved as JSON. It applies the part that must happen outside a
network, the look-up of categories. The numeric part, compression by the signed log, standardisation and missing-value
indicators, is a layer of every network (`networks.FeatureLayer`), so that an exported model takes raw values and both
share one formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import starmap
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from urank import distributed
from urank.errors import DataError
from urank.log.columns import signed_log
from urank.log.dataset import Dataset

MAX_VOCABULARY = 1_000_000
_COUNTS = pl.DataFrame(schema={"v": pl.String, "n": pl.UInt64})


@dataclass(frozen=True, eq=False)
class Inputs:
    """Encoded features: `[rows, F]` raw numbers, NaN where missing, and `[rows, C]` codes, 0 if unknown or missing."""

    numeric: NDArray[np.float32]
    categorical: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numeric)

    def __getitem__(self, rows: Any) -> Inputs:
        return Inputs(self.numeric[rows], self.categorical[rows])


@dataclass(frozen=True)
class Numeric:
    """A numeric feature: mean and standard deviation of its signed log, and whether it was ever missing."""

    name: str
    mean: float
    std: float
    missing: bool


@dataclass(frozen=True)
class Categorical:
    """A categorical feature: its known values; the value at index i has code i + 1."""

    name: str
    vocabulary: tuple[str, ...]


@dataclass(frozen=True)
class Featurizer:
    """The features of a model, in order."""

    numeric: tuple[Numeric, ...]
    categorical: tuple[Categorical, ...]

    @property
    def names(self) -> list[str]:
        return [feature.name for feature in self.numeric] + [feature.name for feature in self.categorical]

    @property
    def cardinalities(self) -> list[int]:
        """Number of codes of each categorical feature, including 0 for unknown."""
        return [len(feature.vocabulary) + 1 for feature in self.categorical]

    @classmethod
    def fit(
        cls,
        tables: Iterable[pa.Table],
        numeric: Sequence[str],
        categorical: Sequence[str],
        *,
        min_count: int = 5,
    ) -> Featurizer:
        """Fit scales and vocabularies in one pass.

        Args:
            tables: chunks of the train split, with a flat column for each feature; in a process group each worker
                passes its own tables, and all get the same featurizer.
            numeric, categorical: names of the features.
            min_count: occurrences a category needs to have its own code.
        """
        moments = np.zeros((4, len(numeric)))
        counts = [_COUNTS] * len(categorical)
        for table in tables:
            for place, name in enumerate(numeric):
                moments[:, place] += _moments(table[name].to_numpy())
            for place, name in enumerate(categorical):
                found = pl.Series("v", table[name].combine_chunks()).cast(pl.String).drop_nulls().value_counts(name="n")
                counts[place] = _add_counts(counts[place], found.cast({"n": pl.UInt64}))
        rows, missing, total, squares = np.reshape(distributed.all_reduce_sum(moments.ravel().tolist()), moments.shape)
        counts = [_all_reduce_counts(each) for each in counts]
        known = np.maximum(rows - missing, 1)
        mean = total / known
        std = np.sqrt(np.maximum(squares / known - mean**2, 0))
        std = np.where(std > 1e-6, std, 1.0)
        scales = zip(numeric, mean.tolist(), std.tolist(), (missing > 0).tolist(), strict=True)
        vocabularies = [_vocabulary(each, min_count) for each in counts]
        return cls(tuple(starmap(Numeric, scales)), tuple(map(Categorical, categorical, vocabularies)))

    def encode(self, table: pa.Table | pl.DataFrame) -> Inputs:
        """Encode a table with a flat column for each feature; a DataError if one is missing."""
        table = table.to_arrow() if isinstance(table, pl.DataFrame) else table
        absent = [name for name in self.names if name not in table.column_names]
        if absent:
            raise DataError(f"the model needs the feature '{absent[0]}', which is missing; add the column")
        rows = table.num_rows
        numbers = np.empty((rows, len(self.numeric)), dtype=np.float32)
        for place, feature in enumerate(self.numeric):
            column = table[feature.name].cast(pa.float32(), safe=False)
            numbers[:, place] = pc.fill_null(column, float("nan")).to_numpy()
        codes = np.zeros((rows, len(self.categorical)), dtype=np.int64)
        for place, category in enumerate(self.categorical):
            known = pa.array(category.vocabulary, type=pa.large_string())
            text = table[category.name].cast(pa.large_string())
            found = pc.index_in(text, value_set=known, skip_nulls=True)
            codes[:, place] = pc.add(pc.fill_null(found, -1), 1).to_numpy()
        return Inputs(numbers, codes)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Featurizer:
        """Restore a featurizer from `to_dict`."""
        categorical = (Categorical(each["name"], tuple(each["vocabulary"])) for each in values["categorical"])
        return cls(tuple(Numeric(**each) for each in values["numeric"]), tuple(categorical))


def fit_featurizer(dataset: Dataset, *, min_count: int = 5) -> Featurizer:
    """Fit the featurizer of a log on its train split, after checking that the log can be learned from.

    Raises:
        DataError: the train or valid split is empty, or the log has no features.
    """
    for split in ("train", "valid"):
        if dataset.rows(split) == 0:
            raise DataError(f"{dataset.folder} has no {split} queries; prepare it with other shares (--valid, --test)")
    if not dataset.features:
        raise DataError(f"{dataset.folder} has no features to distinguish items by; prepare a log with feature columns")
    items = own_items(dataset, "train", dataset.features)
    return Featurizer.fit(items, dataset.numeric, dataset.categorical, min_count=min_count)


def own_items(dataset: Dataset, split: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read the items of a split by row group; in a process group, of this worker's row groups only."""
    groups = dataset.groups(split)
    mine = distributed.share(len(groups))
    return (dataset.read(group, columns).items for group in groups[mine.start : mine.stop])


def _add_counts(counts: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
    return pl.concat([counts, more]).group_by("v").agg(pl.col("n").sum())


def _all_reduce_counts(counts: pl.DataFrame) -> pl.DataFrame:
    """Sum the occurrences of each category over all workers."""
    if distributed.size() == 1:
        return counts
    gathered = distributed.all_gather([counts["v"].to_list(), counts["n"].to_list()])
    parts = [pl.DataFrame({"v": v, "n": n}, schema=_COUNTS.schema) for v, n in gathered]
    return _add_counts(_COUNTS, pl.concat(parts))


def _moments(x: NDArray[Any]) -> NDArray[np.float64]:
    """Compute rows, missing rows, sum and sum of squares of the signed log."""
    compressed = signed_log(x)
    known = ~np.isnan(compressed)
    return np.array([len(x), len(x) - known.sum(), np.sum(compressed, where=known), np.sum(compressed**2, where=known)])


def _vocabulary(counts: pl.DataFrame, min_count: int) -> tuple[str, ...]:
    frequent = counts.filter(pl.col("n") >= min_count).sort(["n", "v"], descending=[True, False])
    return tuple(frequent["v"].head(MAX_VOCABULARY).to_list())
