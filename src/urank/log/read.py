"""Read a click log from files or from a table in memory, in batches, so that it may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import polars.selectors as cs

from urank.errors import DataError
from urank.log.files import Rows, find_files, open_file, table_frame
from urank.log.partitions import add_partitions, merged_dtypes
from urank.log.schema import TEXT_ROLES, LogSchema, RowName
from urank.paths import is_path

__all__ = ["Log", "read"]

BATCH_BYTES = 32 * 2**20
FIRST_ROWS = 1_000

Source = str | Path | pl.DataFrame | pl.LazyFrame | Any


@dataclass(frozen=True)
class Log:
    """An impression log that can be read again and again, a batch at a time.

    Attributes:
        name: what errors and reports call it.
        schema: the role or kind of each column.
        size: bytes of the source, of which `batches` tells how much is behind it.
        files: how many files it is in.
    """

    name: str
    schema: LogSchema
    size: int
    row_name: RowName
    _open: Callable[[int, Sequence[int]], Rows]
    files: int = 1

    @cached_property
    def row_bytes(self) -> int:
        """About how many bytes a row takes once it is in canonical form; text is measured on the first rows."""
        return self._first_rows[0]

    @cached_property
    def _first_rows(self) -> tuple[int, float]:
        """Bytes of an impression, and impressions in a row of the source, among the first of them."""
        texts = len(self.schema.named("categorical"))
        plain = 4 * len(self.schema.features) + 12 * texts + 16 * len(self.schema.roles) + 16
        raw = next((frame for frame, _ in self._open(FIRST_ROWS, range(self.files)) if frame.height), None)
        if raw is None:
            return plain, 1.0
        try:
            first = self.schema.canonical(raw.head(FIRST_ROWS), self.row_name)
        except DataError:  # it is told when the rows are read
            return plain, 1.0
        letters = first.select(cs.string().str.len_bytes().sum()).sum_horizontal().sum()
        return plain + round(letters / first.height), first.height / min(raw.height, FIRST_ROWS)

    def batches(self, seen: Callable[[pl.DataFrame], None] | None = None, only: Sequence[int] | None = None) -> Rows:
        """Batches in canonical form, each rule checked, and the bytes of the source that are behind each.

        Args:
            seen: shown each batch as it was read, before it is brought into canonical form.
            only: numbers of the files to read; all of them when left out.
        """
        row_bytes, in_a_row = self._first_rows
        rows = max(1_000, int(BATCH_BYTES / row_bytes / in_a_row))
        empty = True
        for frame, done in self._open(rows, range(self.files) if only is None else only):
            if frame.height:
                empty = False
                if seen is not None:
                    seen(frame)
                yield self.schema.canonical(frame, self.row_name), done
        if empty and only is None:
            raise self.empty()

    def empty(self) -> DataError:
        """The refusal of a log without rows."""
        return DataError(f"{self.name} is empty; a log needs at least one impression")

    def position_twice(self, query: str, session: str | None, position: int, rows: Collection[int]) -> DataError:
        """The refusal of a list in which a position occurs twice, at the rows with these codes."""
        earlier, later = sorted(rows)[:2]
        where = f"is at {self.row_name(earlier)} and again at {self.row_name(later)}"
        which = f"position {position} of query {query}"
        if session is not None:
            return DataError(f"a position must occur once in a list; {which}, session {session} {where}")
        advice = "if these are two showings, name their session with --column session_id=NAME"
        return DataError(f"a position must occur once in a list; {which} {where} ({advice})")

    def frame(self) -> pl.DataFrame:
        """The whole log in memory."""
        return pl.concat([frame for frame, _ in self.batches()])


def read(
    source: Source,
    *,
    columns: Mapping[str, str] | None = None,
    categorical: Collection[str] = (),
    drop: Collection[str] = (),
) -> Log:
    """Open a click log.

    Args:
        source: a Parquet or CSV file (also gzipped), a folder of them (hive partitions become columns), a glob, a
            folder that `urank prepare` wrote, or a table of Polars, pandas or PyArrow. One row per impression, or one
            row per query with list columns.
        columns: role -> the column that plays it, where names differ, as `{"position": "rank"}`.
        categorical: numeric columns whose numbers are names.
        drop: columns to leave out.

    >>> table = pl.DataFrame({"query_id": [1, 1], "rank": [1, 2], "click": [0, 1], "price": [9.5, 3.0]})
    >>> log = read(table, columns={"position": "rank"})
    >>> log.schema.named("numeric")
    ['price']
    """
    if is_path(source):
        return _read_files(str(source), columns, categorical, drop)
    return _read_table(source, columns, categorical, drop)


def _read_table(
    source: Any, columns: Mapping[str, str] | None, categorical: Collection[str], drop: Collection[str]
) -> Log:
    name = "the table"
    frame = table_frame(source, name, "a log")
    schema = LogSchema.infer(frame.schema, name, columns=columns, categorical=categorical, drop=drop)
    size = int(frame.estimated_size())

    def batches(rows: int, _: Sequence[int]) -> Rows:
        needed = frame.select(schema.columns)
        for start in range(0, needed.height, rows):
            part = needed.slice(start, rows)
            yield part.with_columns(RowName.codes(0, start, part.height)), size * start // needed.height

    return Log(name, schema, size, RowName([name]), batches)


def _read_files(
    source: str, columns: Mapping[str, str] | None, categorical: Collection[str], drop: Collection[str]
) -> Log:
    paths = find_files(source)
    text = {(columns or {}).get(role, role) for role in TEXT_ROLES} | set(categorical)
    files = [open_file(path, text) for path in paths]
    add_partitions(files, source)
    dtypes = merged_dtypes(files, {*text, *drop})
    schema = LogSchema.infer(dtypes, files[0].name, columns=columns, categorical=categorical, drop=drop)
    floats = [column for column in schema.columns if dtypes[column].is_float() and column not in text]
    size = sum(path.stat().st_size for path in paths)

    def batches(rows: int, numbers: Sequence[int]) -> Rows:
        done = 0
        for number in numbers:
            file = files[number]
            whole = [pl.col(column).cast(pl.Float64) for column in floats if file.dtypes[column].is_integer()]
            first = 0
            for frame, read_bytes in file.batches(schema.columns, rows, schema.categories):
                codes = RowName.codes(number, first, frame.height)
                first += frame.height
                yield frame.select(schema.columns).with_columns(*whole, codes), done + read_bytes
            done += file.path.stat().st_size

    return Log(source, schema, size, RowName([file.name for file in files]), batches, len(files))
