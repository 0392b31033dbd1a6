"""Raw columns to what a model takes: numbers with their scale, categories as numbers of a vocabulary.

A `Featurizer` is fitted on the train split only and saved as JSON. It holds what the features need, and applies the
part that must happen outside a network: looking categories up. The numeric part, compression by the signed log,
standardisation, and missing values with an indicator, is a layer of every network (`networks.FeatureLayer`), so that
an exported model takes raw values and there is one formula for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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

__all__ = ["Categorical", "Featurizer", "Inputs", "Numeric", "fit_featurizer", "own_items"]

MAX_VOCABULARY = 1_000_000
_COUNTS = pl.DataFrame(schema={"v": pl.String, "n": pl.UInt64})


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model takes, a row for each item.

    Attributes:
        numeric: `[rows, F]` raw numbers, NaN where missing.
        categorical: `[rows, C]` numbers of categories; 0 is unknown or missing.
    """

    numeric: NDArray[np.float32]
    categorical: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numeric)

    def __getitem__(self, rows: Any) -> Inputs:
        return Inputs(self.numeric[rows], self.categorical[rows])


@dataclass(frozen=True)
class Numeric:
    """A numeric feature: mean and deviation of its signed log, and whether it was ever missing."""

    name: str
    mean: float
    std: float
    missing: bool


@dataclass(frozen=True)
class Categorical:
    """A categorical feature: its known values; the value at place i has number i + 1."""

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
        """The number of numbers each categorical feature can take, the unknown one included."""
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
        """Gather scales and vocabularies in one pass.

        Args:
            tables: the rows of the train split, some at a time, with a flat column for each feature; of a team, each
                worker has tables of its own, and all get the same featurizer.
            numeric: names of the numeric features.
            categorical: names of the categorical features.
            min_count: a category must be seen this often to have a number of its own.
        """
        moments = np.zeros((4, len(numeric)))
        counts = [_COUNTS] * len(categorical)
        for table in tables:
            for place, name in enumerate(numeric):
                moments[:, place] += _moments(table[name].to_numpy())
            for place, name in enumerate(categorical):
                found = pl.Series("v", table[name].combine_chunks()).cast(pl.String).drop_nulls().value_counts(name="n")
                counts[place] = _added(counts[place], found.cast({"n": pl.UInt64}))
        rows, missing, total, squares = np.reshape(distributed.all_reduce_sum(moments.ravel().tolist()), moments.shape)
        counts = [_of_team(each) for each in counts]
        known = np.maximum(rows - missing, 1)
        mean = total / known
        std = np.sqrt(np.maximum(squares / known - mean**2, 0))
        std = np.where(std > 1e-6, std, 1.0)
        return cls(
            numeric=tuple(
                Numeric(name, float(mean[i]), float(std[i]), bool(missing[i] > 0)) for i, name in enumerate(numeric)
            ),
            categorical=tuple(
                Categorical(name, _vocabulary(counts[i], min_count)) for i, name in enumerate(categorical)
            ),
        )

    def encode(self, table: pa.Table | pl.DataFrame) -> Inputs:
        """The inputs of a model from a table with a flat column for each feature.

        Raises:
            DataError: when a feature is not there.
        """
        table = table.to_arrow() if isinstance(table, pl.DataFrame) else table
        absent = [name for name in self.names if name not in table.column_names]
        if absent:
            raise DataError(f"the model needs the feature '{absent[0]}', which is not there")
        rows = table.num_rows
        numbers = np.empty((rows, len(self.numeric)), dtype=np.float32)
        for place, feature in enumerate(self.numeric):
            column = table[feature.name].cast(pa.float32(), safe=False)
            numbers[:, place] = pc.fill_null(column, float("nan")).to_numpy()
        numerals = np.zeros((rows, len(self.categorical)), dtype=np.int64)
        for place, category in enumerate(self.categorical):
            known = pa.array(category.vocabulary, type=pa.large_string())
            text = table[category.name].cast(pa.large_string())
            found = pc.index_in(text, value_set=known, skip_nulls=True)
            numerals[:, place] = pc.add(pc.fill_null(found, -1), 1).to_numpy()
        return Inputs(numbers, numerals)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Featurizer:
        """What `to_dict` wrote."""
        return cls(
            numeric=tuple(Numeric(**feature) for feature in values["numeric"]),
            categorical=tuple(
                Categorical(feature["name"], tuple(feature["vocabulary"])) for feature in values["categorical"]
            ),
        )


def fit_featurizer(dataset: Dataset, *, min_count: int = 5) -> Featurizer:
    """The featurizer of the train split of a log that something is to be learned from.

    Raises:
        DataError: when there is nothing to learn from, to stop by, or to tell items apart by.
    """
    for split in ("train", "valid"):
        if dataset.rows(split) == 0:
            raise DataError(f"{dataset.folder} has no {split} queries; prepare it with other shares (--valid, --test)")
    if not dataset.features:
        raise DataError(f"{dataset.folder} has no features, so nothing tells its items apart")
    return Featurizer.fit(
        own_items(dataset, "train", dataset.features), dataset.numeric, dataset.categorical, min_count=min_count
    )


def own_items(dataset: Dataset, split: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    """The items of a split, a row group at a time; of a team, those of this worker's row groups."""
    groups = dataset.groups(split)
    mine = distributed.share(len(groups))
    return (dataset.read(group, columns).items for group in groups[mine.start : mine.stop])


def _added(counts: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
    return pl.concat([counts, more]).group_by("v").agg(pl.col("n").sum())


def _of_team(counts: pl.DataFrame) -> pl.DataFrame:
    """How often each category was seen by all workers."""
    if distributed.size() == 1:
        return counts
    told = distributed.all_gather([counts["v"].to_list(), counts["n"].to_list()])
    parts = [pl.DataFrame({"v": v, "n": n}, schema=_COUNTS.schema) for v, n in told]
    return _added(_COUNTS, pl.concat(parts))


def _moments(x: NDArray[Any]) -> NDArray[np.float64]:
    """Rows, missing rows, sum and sum of squares of the signed log."""
    compressed = signed_log(x)
    known = ~np.isnan(compressed)
    return np.array([len(x), len(x) - known.sum(), np.sum(compressed, where=known), np.sum(compressed**2, where=known)])


def _vocabulary(counts: pl.DataFrame, min_count: int) -> tuple[str, ...]:
    frequent = counts.filter(pl.col("n") >= min_count).sort(["n", "v"], descending=[True, False])
    return tuple(frequent["v"].head(MAX_VOCABULARY).to_list())
