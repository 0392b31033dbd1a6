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
import pyarrow.parquet as pq
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.lists import list_ids

__all__ = ["Block", "Dataset", "is_prepared"]

PREPARED_VERSION = 1


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


def is_prepared(path: str | Path) -> bool:
    """Whether `urank prepare` wrote this folder."""
    return (Path(path) / "schema.json").is_file()


class Dataset:
    """A folder that `urank prepare` wrote.

    Attributes:
        description: the content of its `schema.json`.
        positions: K.
        numeric, categorical: the names of the features.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
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

    def groups(self, split: str) -> list[tuple[Path, int, int]]:
        """The row groups of a split: file, number in the file, lists in it."""
        found = []
        for path in sorted((self.folder / split).glob("*.parquet")):
            try:
                with pq.ParquetFile(path) as file:
                    metadata = file.metadata
                    found += [(path, i, metadata.row_group(i).num_rows) for i in range(metadata.num_row_groups)]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path} is not a readable Parquet file: {error}") from error
        return found

    def read(self, group: tuple[Path, int, int], columns: Sequence[str]) -> Block:
        """One row group, with these columns of the items and the ids of the lists."""
        path, number, _ = group
        ids = [name for name in ("query_id", "session_id") if self.has(name)]
        wanted = list(dict.fromkeys(columns))
        try:
            with pq.ParquetFile(path, pre_buffer=False) as file:
                table = file.read_row_group(number, columns=[*ids, *wanted])
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {error}") from error
        arrays = {name: table[name].combine_chunks() for name in wanted}
        arrays = {n: a.chunk(0) if isinstance(a, pa.ChunkedArray) else a for n, a in arrays.items()}
        offsets = next(iter(arrays.values())).offsets.to_numpy().astype(np.int64)
        items = pa.table({name: array.flatten() for name, array in arrays.items()})
        return Block(table.select(ids), items, offsets - offsets[0])

    def blocks(self, split: str, columns: Sequence[str]) -> Iterator[Block]:
        """All row groups of a split, in order."""
        for group in self.groups(split):
            yield self.read(group, columns)
