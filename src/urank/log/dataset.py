"""A sample of the queries of a prepared log, for what cannot take all of them.

`urank prepare` writes queries in the order of their hashes, so that some row groups next to each other hold a random
sample of them. Taking these costs next to nothing: only the first and the last, where a query may go on in the row
group beside it, are looked into.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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

__all__ = [
    "Block",
    "Dataset",
    "Group",
    "Part",
    "View",
    "drop_unseen",
    "has_unseen",
    "is_prepared",
    "sample_to_fit",
    "sampled",
    "some_lists",
]

PREPARED_VERSION = 1


@dataclass(frozen=True, eq=False)
class Group:
    """A row group of a file, or some of its lists.

    Attributes:
        path: the file.
        number: which row group of it.
        lists: how many lists are meant.
        keep: the places of these lists in the row group, rising; all of them when left out.
    """

    path: Path
    number: int
    lists: int
    keep: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """Some lists: `lists` has a row for each, `items` a row for each item, `offsets` tells which belong together."""

    lists: pa.Table
    items: pa.Table
    offsets: NDArray[np.int64]

    def column(self, name: str) -> NDArray[Any]:
        """A column of the items as an array."""
        return np.asarray(self.items[name].to_numpy())

    @property
    def query(self) -> NDArray[np.int64]:
        """The number, within this block, of the query that each item belongs to."""
        numbers = pl.Series(self.lists["query_id"].combine_chunks()).rle_id().to_numpy().astype(np.int64)
        return numbers[list_ids(self.offsets)]

    @property
    def query_hash(self) -> NDArray[np.uint64]:
        """What tells the query of each list from all others, in this block and beyond."""
        return stable_hash(pl.Series(self.lists["query_id"].combine_chunks()))

    def parts(self, most_rows: int) -> Iterator[Block]:
        """The same lists, some at a time, with no more items than so many once they are padded to the longest of them;
        a longer list comes by itself."""
        lengths, last = np.diff(self.offsets), 0
        while last < len(lengths):
            first = last
            window = lengths[first : first + max(1, most_rows // max(1, int(lengths[first])))]
            padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)  # rises
            last = first + max(1, int(np.searchsorted(padded, most_rows, side="right")))
            begin, end = int(self.offsets[first]), int(self.offsets[last])
            offsets = self.offsets[first : last + 1] - begin
            yield Block(self.lists.slice(first, last - first), self.items.slice(begin, end - begin), offsets)

    def shown(self, positions: int) -> Block:
        """The same lists without the items beyond the last position, which were candidates that nobody saw."""
        keep = self.column("position") <= positions
        if keep.all():
            return self
        before = np.append(0, np.cumsum(keep))
        return Block(self.lists, self.items.filter(pa.array(keep)), before[self.offsets])

    def shuffled(self, rng: np.random.Generator) -> Block:
        """The same lists with their items in random order. As written they are in the order of their positions, and a
        ranker that cannot tell two items apart would be credited with the work of the one that made the log."""
        order = np.lexsort((rng.random(self.items.num_rows), list_ids(self.offsets)))
        return Block(self.lists, self.items.take(pa.array(order)), self.offsets)


def is_prepared(path: str | Path) -> bool:
    """Whether `urank prepare` wrote this folder."""
    return (to_path(path) / "schema.json").is_file()


class Dataset:
    """A folder that `urank prepare` wrote.

    Attributes:
        description: the content of its `schema.json`.
        positions: K.
        numeric, categorical: the names of the features.
        memory: what those who learn from it may take.
    """

    def __init__(self, folder: str | Path, *, memory: Memory = DEFAULT_MEMORY) -> None:
        self.folder = to_path(folder)
        self.memory = memory
        path = self.folder / "schema.json"
        try:
            self.description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} is not a folder that urank prepare wrote: {path.name} cannot be read") from error
        if self.description.get("version", 0) > PREPARED_VERSION:
            raise DataError(f"{folder} was prepared by a newer version of urank; update urank or prepare it again")
        self.positions = int(self.description["positions"])
        features = self.description["features"]
        self.numeric = [feature["name"] for feature in features if feature["kind"] == "numeric"]
        self.categorical = [feature["name"] for feature in features if feature["kind"] == "categorical"]

    @property
    def features(self) -> list[str]:
        return [*self.numeric, *self.categorical]

    def has(self, role: str) -> bool:
        """Whether the log has a column of this role."""
        return role in self.description["roles"]

    def rows(self, split: str) -> int:
        """The number of impressions of a split."""
        return int(self.description["counts"][split]["rows"])

    def rows_of_query(self, splits: Sequence[str]) -> float:
        """The mean number of impressions of a query."""
        counts = [self.description["counts"][split] for split in splits]
        return float(sum(each["rows"] for each in counts) / max(1, sum(each["queries"] for each in counts)))

    def groups(self, split: str) -> list[Group]:
        """The row groups of a split."""
        found = []
        for path in sorted((self.folder / split).glob("*.parquet")):
            try:
                with open_parquet(path) as file:
                    metadata = file.metadata
                    found += [Group(path, i, metadata.row_group(i).num_rows) for i in range(metadata.num_row_groups)]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path} is not a readable Parquet file: {error}") from error
        return found

    def read(self, group: Group, columns: Sequence[str]) -> Block:
        """One row group, with these columns of the items and the ids of the lists."""
        path = group.path
        ids = [name for name in ("query_id", "session_id") if self.has(name)]
        wanted = list(dict.fromkeys(columns))
        try:
            with open_parquet(path) as file:
                absent = [name for name in wanted if name not in file.schema_arrow.names]
                if absent:
                    raise DataError(f"{self.folder} has no column '{absent[0]}'")
                table = file.read_row_group(group.number, columns=[*ids, *wanted])
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {error}") from error
        if group.keep is not None:
            table = table.take(pa.array(group.keep))
        arrays = {name: table[name].combine_chunks() for name in wanted}
        arrays = {n: a.chunk(0) if isinstance(a, pa.ChunkedArray) else a for n, a in arrays.items()}
        offsets = next(iter(arrays.values())).offsets.to_numpy().astype(np.int64)
        items = pa.table({name: array.flatten() for name, array in arrays.items()})
        return Block(table.select(ids), items, offsets - offsets[0])

    def blocks(self, split: str, columns: Sequence[str]) -> Iterator[Block]:
        """All row groups of a split, in order."""
        for group in self.groups(split):
            yield self.read(group, columns)


@dataclass
class Part:
    """What is seen of a split: row groups, or some lists of them, and how many impressions these have."""

    groups: list[Group] = field(default_factory=list)
    rows: int = 0


class View(Dataset):
    """Everything that learns from a `Dataset` learns from a view of it."""

    def __init__(self, dataset: Dataset, parts: Mapping[str, Part]) -> None:
        """See a log through parts of it; splits that are not named are seen whole."""
        # Not read again from its folder: what the dataset was told not to know, the view does not know either.
        vars(self).update(vars(dataset))
        self._whole = dataset
        self._parts = dict(parts)

    def groups(self, split: str) -> list[Group]:
        return self._parts[split].groups if split in self._parts else self._whole.groups(split)

    def rows(self, split: str) -> int:
        return self._parts[split].rows if split in self._parts else self._whole.rows(split)

    def read(self, group: Group, columns: Sequence[str]) -> Block:
        return self._whole.read(group, columns)


def some_lists(group: Group, places: NDArray[np.int64]) -> Group:
    """Some of the lists that a group means, by their places among these, rising."""
    return Group(group.path, group.number, len(places), places if group.keep is None else group.keep[places])


def has_unseen(dataset: Dataset) -> bool:
    """Whether the log was prepared with `positions`, so that it may hold items further down than the last of them."""
    return any("shown" in counts for counts in dataset.description["counts"].values())


def drop_unseen(dataset: Dataset) -> Dataset:
    """The same log without the items beyond the last position; nothing is copied."""
    return _Shown(dataset) if has_unseen(dataset) else dataset


class _Shown(View):
    """A log seen through its first K positions; a list of which nothing was shown stays, without items."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, {})

    def rows(self, split: str) -> int:
        if type(self._whole) is Dataset:
            return int(self.description["counts"][split]["shown"])
        return sum(int(block.offsets[-1]) for block in self.blocks(split, []))  # a part of a log: not counted yet

    def read(self, group: Group, columns: Sequence[str]) -> Block:
        return self._whole.read(group, [*columns, "position"]).shown(self.positions)


def sampled(dataset: Dataset, most_rows: Mapping[str, int], *, seed: int = 0) -> Dataset:
    """A prepared log with about so many impressions of each split that is named, in whole queries.

    Args:
        dataset: the prepared log.
        most_rows: split -> how many impressions; at least one query is taken, however long.
        seed: decides which queries.

    Returns:
        A view of the log, in which splits that are not named are whole; the log itself when all of it fits.
    """
    parts = {
        split: _sample(dataset, split, most, np.random.default_rng([seed, SPLITS.index(split)]))
        for split, most in most_rows.items()
        if dataset.rows(split) > max(most, 0)
    }
    return View(dataset, parts) if parts else dataset


def sample_to_fit(dataset: Dataset, splits: Sequence[str], most_rows: float) -> Dataset:
    """The log, or a sample of the queries of these splits when they have more impressions than so many, each split in
    proportion to its size."""
    rows = {split: dataset.rows(split) for split in splits}
    share = most_rows / max(1, sum(rows.values()))
    return dataset if share >= 1 else sampled(dataset, {split: int(share * each) for split, each in rows.items()})


def _sample(dataset: Dataset, split: str, most_rows: int, rng: np.random.Generator) -> Part:
    """Row groups from a random one on, of those after which enough rows come."""
    groups = dataset.groups(split)
    rows = _rows_of(dataset, groups)
    enough = np.flatnonzero(np.cumsum(rows[::-1])[::-1] >= most_rows)
    first = int(rng.choice(enough))
    found = _from(dataset, groups, rows, first, most_rows)
    return found if found.rows else _from(dataset, groups, rows, 0, most_rows)


def _from(dataset: Dataset, groups: Sequence[Group], rows: NDArray[np.int64], first: int, most_rows: int) -> Part:
    """Whole queries from the row group `first` on, until there are enough; at least one, if one begins there."""
    part = Part()
    for number in range(first, len(groups)):
        group, left = groups[number], most_rows - part.rows
        if (part.rows or number == 0) and rows[number] <= left:
            part.groups.append(group)
            part.rows += int(rows[number])
            continue
        block = dataset.read(group, ["position"])
        query = block.query_hash
        ends = offsets_of_runs(query)  # the place of the first list of each query, and the end
        goes_on = number > 0 and query[0] == dataset.read(groups[number - 1], ["position"]).query_hash[-1]
        begin, least = (0, int(goes_on)) if part.rows else (int(goes_on), int(goes_on) + 1)
        if begin + 1 == len(ends):  # nothing but more of a query that began before
            continue
        rows_until = block.offsets[ends] - block.offsets[ends[begin]]
        end = max(least, int(np.searchsorted(rows_until, left, side="right")) - 1)
        if end > begin:
            part.groups.append(some_lists(group, np.arange(ends[begin], ends[end])))
            part.rows += int(rows_until[end])
        if end + 1 < len(ends):
            break
    return part


def _rows_of(dataset: Dataset, groups: Sequence[Group]) -> NDArray[np.int64]:
    """The number of impressions `[groups]`: by the footers of the files, where whole row groups are meant."""
    rows: list[int] = []
    for path, of_file in groupby(groups, lambda group: group.path):
        try:
            with open_parquet(path) as file:
                metadata = file.metadata
                rows += [
                    _values(metadata.row_group(group.number))
                    if group.keep is None
                    else int(dataset.read(group, ["position"]).offsets[-1])
                    for group in of_file
                ]
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    return np.array(rows, dtype=np.int64)


def _values(row_group: pq.RowGroupMetaData) -> int:
    """The number of positions in a row group; no list is empty, so there is one for each impression."""
    columns = (row_group.column(number) for number in range(row_group.num_columns))
    return int(next(column.num_values for column in columns if column.path_in_schema.split(".")[0] == "position"))
