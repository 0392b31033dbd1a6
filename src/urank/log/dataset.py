"""A prepared log, read back a row group at a time as flat arrays of whole lists."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.lists import list_ids
from urank.log.split import stable_hash
from urank.memory import DEFAULT_MEMORY, Memory
from urank.paths import open_parquet, to_path

__all__ = ["Block", "Dataset", "Group", "is_prepared"]

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
