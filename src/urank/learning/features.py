"""Feature encoding: the scale of numbers, vocabularies that map categories to codes, and within-list columns.

A `Featurizer` is fitted on the train split only and saved as JSON. It applies the part that must happen outside a
network: the look-up of categories, and the comparison of numbers within their list (`within_list`), which needs the
whole list. The rest of the numeric part, compression by the signed log, standardisation and missing-value indicators,
is a layer of every network (`networks.FeatureLayer`), so that an exported model takes raw values and both share one
formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import starmap
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from urank import distributed
from urank.errors import ConfigError, DataError
from urank.learning.within_list import within_list, within_squares, within_width
from urank.log.candidates import LIST_KEYS, list_offsets
from urank.log.dataset import Block, Dataset
from urank.log.signed_log import signed_log

MAX_VOCABULARY = 1_000_000
WITHIN_SHARE = 0.01
"""Share of a feature's variance within lists above which `auto` compares it within lists."""
SAMPLE_ROWS = 100_000
"""Rows that the scales of within-list columns are fitted on, or few more; queries are ordered by hash, so the first
ones are a random sample."""
WithinList = tuple[str, ...] | Literal["auto", "off"]
_COUNTS = pl.DataFrame(schema={"v": pl.String, "n": pl.UInt64})


@dataclass(frozen=True, eq=False)
class Inputs:
    """Encoded features: `[rows, F]` numbers, NaN where missing, and `[rows, C]` codes, 0 if unknown or missing.

    The numbers are raw, followed by the within-list columns if the featurizer has any.
    """

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
    """The features of a model, in order.

    Attributes:
        numeric, categorical: the features that a log or a request has.
        within: names of the numeric features that are also compared within their list.
        derived: scales of the columns that result from this, in the order of `within_list`.
    """

    numeric: tuple[Numeric, ...]
    categorical: tuple[Categorical, ...]
    within: tuple[str, ...] = ()
    derived: tuple[Numeric, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the raw features, without within-list columns."""
        return [feature.name for feature in self.numeric] + [feature.name for feature in self.categorical]

    @property
    def inputs(self) -> tuple[Numeric, ...]:
        """The numeric columns that networks and trees take: the raw features, then the within-list columns."""
        return (*self.numeric, *self.derived)

    @property
    def width(self) -> int:
        """Number of columns that networks and trees take, numeric and categorical."""
        return len(self.inputs) + len(self.categorical)

    @property
    def cardinalities(self) -> list[int]:
        """Number of codes of each categorical feature, including 0 for unknown."""
        return [len(feature.vocabulary) + 1 for feature in self.categorical]

    @classmethod
    def fit(
        cls,
        blocks: Iterable[Block],
        numeric: Sequence[str],
        categorical: Sequence[str],
        *,
        min_count: int = 5,
        within: WithinList = "off",
        sample: Iterable[Block] = (),
    ) -> Featurizer:
        """Fit scales and vocabularies in one pass.

        Args:
            blocks: parts of the train split, with an item column for each feature; in a process group each worker
                passes its own blocks, and all get the same featurizer.
            numeric, categorical: names of the features.
            min_count: occurrences a category needs to have its own code.
            within: numeric features to compare within lists: `auto` for those whose variance of the signed log is
                within lists by more than `WITHIN_SHARE`, `off` for none. There are none if all lists have one item.
            sample: blocks that the scales of within-list columns are fitted on, the same in all workers. They are not
                read unless needed, and by the first worker only.

        Raises:
            ConfigError: `within` names a feature that is not numeric.
        """
        _check_within(within, numeric, categorical)
        moments = np.zeros((5, len(numeric)))
        longer_lists = 0
        counts = [_COUNTS] * len(categorical)
        for block in blocks:
            longer_lists += int((np.diff(block.offsets) > 1).sum())
            for place, name in enumerate(numeric):
                compressed = signed_log(block.column(name))
                moments[:4, place] += _moments(compressed)
                if within == "auto":
                    moments[4, place] += within_squares(compressed, block.offsets)
            for place, name in enumerate(categorical):
                column = pl.Series("v", block.items[name].combine_chunks())
                found = column.cast(pl.String).drop_nulls().value_counts(name="n")
                counts[place] = _add_counts(counts[place], found.cast({"n": pl.UInt64}))
        *sums, longer_lists_of_all = distributed.all_reduce_sum([*moments.ravel().tolist(), longer_lists])
        rows, missing, total, squares, within_lists = np.reshape(sums, moments.shape)
        counts = [_all_reduce_counts(each) for each in counts]
        known = np.maximum(rows - missing, 1)
        scales = _scales(numeric, rows, missing, total, squares)
        vocabularies = [_vocabulary(each, min_count) for each in counts]
        fitted = cls(scales, tuple(map(Categorical, categorical, vocabularies)))
        if within == "off" or longer_lists_of_all == 0:
            return fitted
        if within == "auto":
            variance = np.maximum(squares / known - (total / known) ** 2, 0)
            varies = (variance > _SMALLEST_STD**2) & (within_lists / known > WITHIN_SHARE * variance)
            within = tuple(name for name, chosen in zip(numeric, varies, strict=True) if chosen)
        return fitted._with_within(tuple(dict.fromkeys(within)), sample) if within else fitted

    def _with_within(self, within: tuple[str, ...], sample: Iterable[Block]) -> Featurizer:
        """Add within-list columns, with scales fitted on a sample."""
        kinds = ("z", "rank", "mean")
        names = [*(f"{name} in list: {kind}" for kind in kinds for name in within), "list size"]
        unscaled = replace(self, within=within)
        first = len(self.numeric)

        def summed() -> list[list[float]]:
            moments = np.zeros((4, len(names)))
            for block in sample:
                numbers = unscaled.add_within(unscaled._numbers(block.items), block.offsets)
                moments += np.transpose([_moments(signed_log(column)) for column in numbers[:, first:].T])
            return [each.tolist() for each in moments]

        moments = np.array(distributed.broadcast(summed))
        derived = _scales(names, *moments)  # missing where the raw feature is, whose indicator suffices
        return replace(unscaled, derived=tuple(replace(each, missing=False) for each in derived))

    def encode(self, table: pa.Table | pl.DataFrame, offsets: NDArray[np.int64] | None = None) -> Inputs:
        """Encode a table with a flat column for each feature; a DataError if one is missing.

        Args:
            table: the items of whole lists, since features are compared within them.
            offsets: `[lists + 1]`, the bounds of the lists; by default runs of equal `query_id` and `session_id`, or
                all rows if the table has neither column.
        """
        table = table.to_arrow() if isinstance(table, pl.DataFrame) else table
        inputs = self.encode_raw(table)
        if not self.within:
            return inputs
        offsets = _offsets_of(table) if offsets is None else offsets
        return Inputs(self.add_within(inputs.numeric, offsets), inputs.categorical)

    def encode_raw(self, table: pa.Table) -> Inputs:
        """Encode a table without the within-list columns."""
        absent = [name for name in self.names if name not in table.column_names]
        if absent:
            raise DataError(f"the model needs the feature '{absent[0]}', which is missing; add the column")
        numbers = self._numbers(table)
        codes = np.zeros((table.num_rows, len(self.categorical)), dtype=np.int64)
        for place, category in enumerate(self.categorical):
            known = pa.array(category.vocabulary, type=pa.large_string())
            text = table[category.name].cast(pa.large_string())
            found = pc.index_in(text, value_set=known, skip_nulls=True)
            codes[:, place] = pc.add(pc.fill_null(found, -1), 1).to_numpy()
        return Inputs(numbers, codes)

    def encode_shown(self, block: Block, positions: int) -> tuple[Inputs, Block]:
        """Encode whole lists, then drop the items beyond the last position; return the others encoded and raw."""
        inputs, shown = self.encode(block.items, block.offsets), block.shown(positions)
        return (inputs if shown is block else inputs[block.column("position") <= positions]), shown

    def add_within(self, numbers: NDArray[np.float32], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append the within-list columns, if any, to the raw numbers `[rows, F]` of whole lists."""
        if not self.within:
            return numbers
        width = numbers.shape[1]
        columns = np.empty((len(numbers), width + within_width(len(self.within))), dtype=np.float32)
        columns[:, :width] = numbers
        within_list(numbers[:, self._compared], offsets, out=columns[:, width:])
        return columns

    @cached_property
    def _compared(self) -> list[int] | slice:
        """The columns of the features that are compared within lists."""
        place = {feature.name: number for number, feature in enumerate(self.numeric)}
        places = [place[name] for name in self.within]
        return slice(None) if places == list(range(len(place))) else places

    def _numbers(self, table: pa.Table) -> NDArray[np.float32]:
        numbers = np.empty((table.num_rows, len(self.numeric)), dtype=np.float32)
        for place, feature in enumerate(self.numeric):
            column = table[feature.name].cast(pa.float32(), safe=False)
            numbers[:, place] = pc.fill_null(column, float("nan")).to_numpy()
        return numbers

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        values = asdict(self)
        return values if self.within else {name: values[name] for name in ("numeric", "categorical")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Featurizer:
        """Restore a featurizer from `to_dict`."""
        categorical = (Categorical(each["name"], tuple(each["vocabulary"])) for each in values["categorical"])
        numeric, derived = (tuple(Numeric(**each) for each in values.get(key, ())) for key in ("numeric", "derived"))
        return cls(numeric, tuple(categorical), tuple(values.get("within", ())), derived)


def fit_featurizer(dataset: Dataset, *, min_count: int = 5, within_list: WithinList = "off") -> Featurizer:
    """Fit the featurizer of a log on its train split, after checking that the log can be learned from.

    Args:
        dataset: a prepared log.
        min_count, within_list: as `min_count` and `within` of `Featurizer.fit`.

    Raises:
        DataError: the train or valid split is empty, or the log has no features.
        ConfigError: `within_list` names a feature that is not numeric.
    """
    for split in ("train", "valid"):
        if dataset.rows(split) == 0:
            raise DataError(f"{dataset.folder} has no {split} queries; prepare it with other shares (--valid, --test)")
    if not dataset.features:
        raise DataError(
            "the log has no features to tell items apart by; add columns that describe the items, as a price"
        )
    blocks = own_blocks(dataset, "train", dataset.features)
    sample = first_blocks(dataset, "train", dataset.numeric, SAMPLE_ROWS)
    names: dict[str, Sequence[str]] = {"numeric": dataset.numeric, "categorical": dataset.categorical}
    return Featurizer.fit(blocks, **names, min_count=min_count, within=within_list, sample=sample)


def own_blocks(dataset: Dataset, split: str, columns: Sequence[str]) -> Iterator[Block]:
    """Read the lists of a split by row group; in a process group, of this worker's row groups only."""
    groups = dataset.groups(split)
    mine = distributed.share(len(groups))
    return (dataset.read(group, columns) for group in groups[mine.start : mine.stop])


def first_blocks(dataset: Dataset, split: str, columns: Sequence[str], rows: int) -> Iterator[Block]:
    """Read lists from the first one until there are enough rows."""
    for block in dataset.blocks(split, columns):
        part = next(block.parts(rows))
        yield part
        rows -= part.items.num_rows
        if rows <= 0 or part.items.num_rows < block.items.num_rows:
            return


_SMALLEST_STD = 1e-6


def _scales(
    names: Sequence[str],
    rows: NDArray[np.float64],
    missing: NDArray[np.float64],
    total: NDArray[np.float64],
    squares: NDArray[np.float64],
) -> tuple[Numeric, ...]:
    """Compute scales from the sums of `_moments`, `[features]` each."""
    known = np.maximum(rows - missing, 1)
    mean = total / known
    std = np.sqrt(np.maximum(squares / known - mean**2, 0))
    std = np.where(std > _SMALLEST_STD, std, 1.0)
    return tuple(starmap(Numeric, zip(names, mean.tolist(), std.tolist(), (missing > 0).tolist(), strict=True)))


def _check_within(within: WithinList, numeric: Sequence[str], categorical: Sequence[str]) -> None:
    for name in within if isinstance(within, tuple) else ():
        if name not in numeric:
            reason = "is categorical" if name in categorical else "is not in the log"
            remedy = "use auto, off or names of numeric features (--within-list)"
            raise ConfigError(f"within_list must name numeric features; '{name}' {reason}: {remedy}")


def _offsets_of(table: pa.Table) -> NDArray[np.int64]:
    """Return the bounds of the lists of a table, as `RankingModel.rank` finds them."""
    ids = [name for name in LIST_KEYS if name in table.column_names]
    if not ids:
        return np.array([0, table.num_rows])
    return list_offsets(pl.DataFrame(table.select(ids)))


def _add_counts(counts: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
    return pl.concat([counts, more]).group_by("v").agg(pl.col("n").sum())


def _all_reduce_counts(counts: pl.DataFrame) -> pl.DataFrame:
    """Sum the occurrences of each category over all workers."""
    if distributed.size() == 1:
        return counts
    gathered = distributed.all_gather([counts["v"].to_list(), counts["n"].to_list()])
    parts = [pl.DataFrame({"v": v, "n": n}, schema=_COUNTS.schema) for v, n in gathered]
    return _add_counts(_COUNTS, pl.concat(parts))


def _moments(compressed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute rows, missing rows, sum and sum of squares of a signed log."""
    known = ~np.isnan(compressed)
    rows, present = len(compressed), known.sum()
    return np.array([rows, rows - present, np.sum(compressed, where=known), np.sum(compressed**2, where=known)])


def _vocabulary(counts: pl.DataFrame, min_count: int) -> tuple[str, ...]:
    frequent = counts.filter(pl.col("n") >= min_count).sort(["n", "v"], descending=[True, False])
    return tuple(frequent["v"].head(MAX_VOCABULARY).to_list())
