"""A prepared log: its row groups, views of it, and samples of its queries.

`urank prepare` writes queries in the order of their hashes, so adjacent row groups are a random sample of them. Such a
sample costs next to nothing: only its first and last row group, where a query may continue in the neighbour, are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.ragged import list_ids, offsets_of_runs
from urank.log.splits import SPLITS, stable_hash
from urank.memory import DEFAULT_MEMORY, Memory
from urank.storage import open_parquet, to_path

PREPARED_VERSION = 1


@dataclass(frozen=True, eq=False)
class RowGroup:
    """A row group of a file, or some of its lists: `keep` has their places in it, ascending; None for all."""

    path: Path
    number: int
    lists: int
    keep: NDArray[np.int64] | None = None

    def select(self, places: NDArray[np.int64]) -> RowGroup:
        """Select some of these lists by their places among them, ascending."""
        return RowGroup(self.path, self.number, len(places), places if self.keep is None else self.keep[places])


@dataclass(frozen=True, eq=False)
class Block:
    """A batch of lists: `lists` has one row per list, `items` one per item, `offsets` the bounds of the lists."""

    lists: pa.Table
    items: pa.Table
    offsets: NDArray[np.int64]

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the items as an array."""
        return np.asarray(self.items[name].to_numpy())

    @property
    def query(self) -> NDArray[np.int64]:
        """The number of each item's query within this block."""
        numbers = pl.Series(self.lists["query_id"].combine_chunks()).rle_id().to_numpy().astype(np.int64)
        return numbers[list_ids(self.offsets)]

    @property
    def query_hash(self) -> NDArray[np.uint64]:
        """The stable hash of each list's query."""
        return stable_hash(pl.Series(self.lists["query_id"].combine_chunks()))

    def parts(self, most_rows: int) -> Iterator[Block]:
        """Divide the lists into parts of at most `most_rows` items after padding; a longer list is its own part."""
        lengths, last = np.diff(self.offsets), 0
        while last < len(lengths):
            first = last
            window = lengths[first : first + max(1, most_rows // max(1, int(lengths[first])))]
            padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)  # ascending
            last = first + max(1, int(np.searchsorted(padded, most_rows, side="right")))
            begin, end = int(self.offsets[first]), int(self.offsets[last])
            offsets = self.offsets[first : last + 1] - begin
            yield Block(self.lists.slice(first, last - first), self.items.slice(begin, end - begin), offsets)

    def shown(self, positions: int) -> Block:
        """Drop the items beyond the last position, which were candidates that nobody saw."""
        keep = self.column("position") <= positions
        if keep.all():
            return self
        before = np.append(0, np.cumsum(keep))
        return Block(self.lists, self.items.filter(pa.array(keep)), before[self.offsets])

    def shuffled(self, rng: np.random.Generator) -> Block:
        """Shuffle the items of each list.

        They are stored in the order of their positions, so a ranker that gives ties would be credited with the order
        of the one that produced the log.
        """
        order = np.lexsort((rng.random(self.items.num_rows), list_ids(self.offsets)))
        return Block(self.lists, self.items.take(pa.array(order)), self.offsets)


def is_prepared(path: str | Path) -> bool:
    """Return whether a folder was written by `urank prepare`."""
    return (to_path(path) / "schema.json").is_file()


def shown_positions(name: str) -> int | None:
    """Return K of a folder that was prepared with `positions`, or of one of its splits; None for any other log."""
    folder = to_path(name)
    for path in (folder / "schema.json", folder.parent / "schema.json"):  # the second for a split of the folder
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            return int(described["positions"]) if "shown" in described["counts"]["train"] else None
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None


class Dataset:
    """A folder written by `urank prepare`, whose `schema.json` is its description, with a memory budget of training."""

    def __init__(self, folder: str | Path, *, memory: Memory = DEFAULT_MEMORY) -> None:
        self.folder = to_path(folder)
        self.memory = memory
        path = self.folder / "schema.json"
        try:
            self.description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} was not written by urank prepare: {path.name} cannot be read") from error
        if self.description.get("version", 0) > PREPARED_VERSION:
            raise DataError(f"{folder} was prepared by a newer version of urank; update urank or prepare it again")
        self.positions = int(self.description["positions"])
        features = self.description["features"]
        self.numeric = [feature["name"] for feature in features if feature["kind"] == "numeric"]
        self.categorical = [feature["name"] for feature in features if feature["kind"] == "categorical"]
        self.left_out: list[str] = self.description.get("left_out", [])
        self.columns: dict[str, str] = self.description.get("columns", {})  # of the source, role -> column
        self.outcome = "clicks"  # what the column `click` contains

    @property
    def features(self) -> list[str]:
        return [*self.numeric, *self.categorical]

    def has(self, role: str) -> bool:
        """Return whether the log has a column of this role."""
        return role in self.description["roles"]

    def rows(self, split: str) -> int:
        """Return the number of impressions of a split."""
        return int(self.description["counts"][split]["rows"])

    def rows_of_query(self, splits: Sequence[str]) -> float:
        """Return the mean number of impressions per query."""
        counts = [self.description["counts"][split] for split in splits]
        return float(sum(each["rows"] for each in counts) / max(1, sum(each["queries"] for each in counts)))

    def groups(self, split: str) -> list[RowGroup]:
        """Return the row groups of a split."""
        found = []
        for path in sorted((self.folder / split).glob("*.parquet")):
            with _opened(path) as file:
                metadata = file.metadata
                found += [RowGroup(path, i, metadata.row_group(i).num_rows) for i in range(metadata.num_row_groups)]
        return found

    def read(self, group: RowGroup, columns: Sequence[str]) -> Block:
        """Read these item columns of a row group, and the ids of its lists."""
        ids = [name for name in ("query_id", "session_id") if self.has(name)]
        wanted = list(dict.fromkeys(columns))
        with _opened(group.path) as file:
            absent = [name for name in wanted if name not in file.schema_arrow.names]
            if absent:
                raise DataError(f"{self.folder} has no column '{absent[0]}'")
            table = file.read_row_group(group.number, columns=[*ids, *wanted])
        if group.keep is not None:
            table = table.take(pa.array(group.keep))
        arrays = {name: one_array(table[name]) for name in wanted}
        offsets = next(iter(arrays.values())).offsets.to_numpy().astype(np.int64)
        items = pa.table({name: array.flatten() for name, array in arrays.items()})
        return Block(table.select(ids), items, offsets - offsets[0])

    def blocks(self, split: str, columns: Sequence[str]) -> Iterator[Block]:
        """Read all row groups of a split, in order."""
        for group in self.groups(split):
            yield self.read(group, columns)


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Combine the chunks of a column, which Arrow may return as one chunk rather than an array."""
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with open_parquet(path) as file:
            yield file
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


@dataclass
class SplitView:
    """The visible part of a split: row groups, or some of their lists, and the number of their impressions."""

    groups: list[RowGroup] = field(default_factory=list)
    rows: int = 0


class DatasetView(Dataset):
    """A part of a prepared log that is used like a whole one: splits that `parts` does not name stay whole."""

    def __init__(self, dataset: Dataset, parts: Mapping[str, SplitView]) -> None:
        # Copied rather than read from the folder, to keep changes that were made to the dataset.
        vars(self).update(vars(dataset))
        self._whole = dataset
        self._parts = dict(parts)

    def groups(self, split: str) -> list[RowGroup]:
        return self._parts[split].groups if split in self._parts else self._whole.groups(split)

    def rows(self, split: str) -> int:
        return self._parts[split].rows if split in self._parts else self._whole.rows(split)

    def read(self, group: RowGroup, columns: Sequence[str]) -> Block:
        return self._whole.read(group, columns)


def has_unseen(dataset: Dataset) -> bool:
    """Return whether the log was prepared with `positions`, so that it may contain items below the last of them."""
    return any("shown" in counts for counts in dataset.description["counts"].values())


def drop_unseen(dataset: Dataset) -> Dataset:
    """Return a view of the log without the items beyond the last position."""
    return _SeenItems(dataset, {}) if has_unseen(dataset) else dataset


class _SeenItems(DatasetView):
    """The first K positions of a log; lists of which nothing was shown are kept, without items."""

    def rows(self, split: str) -> int:
        if type(self._whole) is Dataset:
            return int(self.description["counts"][split]["shown"])
        return sum(int(block.offsets[-1]) for block in self.blocks(split, []))  # a part of a log has no counts

    def read(self, group: RowGroup, columns: Sequence[str]) -> Block:
        return self._whole.read(group, [*columns, "position"]).shown(self.positions)


def conversions_as_clicks(dataset: Dataset) -> Dataset:
    """Return a view of the log whose clicks are those that led to a conversion."""
    return _Conversions(dataset)


class _Conversions(DatasetView):
    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, {})
        self.outcome = "conversions"

    def read(self, group: RowGroup, columns: Sequence[str]) -> Block:
        if "click" not in columns:
            return self._whole.read(group, columns)
        block = self._whole.read(group, [*columns, "conversion"])
        converted = pa.array(block.column("click") * block.column("conversion"))
        items = block.items.set_column(block.items.column_names.index("click"), "click", converted)
        return Block(block.lists, items, block.offsets)


def sample_queries(dataset: Dataset, most_rows: Mapping[str, int], *, seed: int = 0) -> Dataset:
    """Sample whole queries of a prepared log.

    `most_rows` has, by split, about how many impressions; at least one query is taken, however long. Returns a view of
    the log, in which splits that are not named are whole; the log itself if all of it fits.
    """
    parts = {
        split: _sample(dataset, split, most, np.random.default_rng([seed, SPLITS.index(split)]))
        for split, most in most_rows.items()
        if dataset.rows(split) > max(most, 0)
    }
    return DatasetView(dataset, parts) if parts else dataset


def sample_to_fit(dataset: Dataset, splits: Sequence[str], most_rows: float) -> Dataset:
    """Sample the queries of some splits, in proportion to their sizes, if they have more than `most_rows` rows."""
    rows = {split: dataset.rows(split) for split in splits}
    share = most_rows / max(1, sum(rows.values()))
    if share >= 1:
        return dataset
    return sample_queries(dataset, {split: int(share * each) for split, each in rows.items()})


def _sample(dataset: Dataset, split: str, most_rows: int, rng: np.random.Generator) -> SplitView:
    """Take adjacent row groups from a random one that is followed by enough rows."""
    groups = dataset.groups(split)
    rows = _rows_of(dataset, groups)
    enough = np.flatnonzero(np.cumsum(rows[::-1])[::-1] >= most_rows)
    first = int(rng.choice(enough))
    found = _from(dataset, groups, rows, first, most_rows)
    return found if found.rows else _from(dataset, groups, rows, 0, most_rows)


def _from(
    dataset: Dataset, groups: Sequence[RowGroup], rows: NDArray[np.int64], first: int, most_rows: int
) -> SplitView:
    """Take whole queries from row group `first` on, until there are enough; at least one, if one begins there."""
    part = SplitView()
    for number in range(first, len(groups)):
        group, left = groups[number], most_rows - part.rows
        if (part.rows or number == 0) and rows[number] <= left:
            part.groups.append(group)
            part.rows += int(rows[number])
            continue
        block = dataset.read(group, ["position"])
        query = block.query_hash
        ends = offsets_of_runs(query)  # bounds of the queries among the lists
        continues = number > 0 and query[0] == dataset.read(groups[number - 1], ["position"]).query_hash[-1]
        begin, least = (0, int(continues)) if part.rows else (int(continues), int(continues) + 1)
        if begin + 1 == len(ends):  # only the continuation of an earlier query
            continue
        rows_until = block.offsets[ends] - block.offsets[ends[begin]]
        end = max(least, int(np.searchsorted(rows_until, left, side="right")) - 1)
        if end > begin:
            part.groups.append(group.select(np.arange(ends[begin], ends[end])))
            part.rows += int(rows_until[end])
        if end + 1 < len(ends):
            break
    return part


def _rows_of(dataset: Dataset, groups: Sequence[RowGroup]) -> NDArray[np.int64]:
    """Count the impressions `[groups]`: those of whole row groups from the file footers."""
    rows: list[int] = []
    for path, of_file in groupby(groups, lambda group: group.path):
        with _opened(path) as file:
            metadata = file.metadata
            paths = [column.path.split(".")[0] for column in file.schema]
            for group in of_file:
                if group.keep is None:  # as no list is empty, there is one position per impression
                    rows.append(metadata.row_group(group.number).column(paths.index("position")).num_values)
                else:
                    rows.append(int(dataset.read(group, ["position"]).offsets[-1]))
    return np.array(rows, dtype=np.int64)
