"""Read a click log from files or from a table in memory, in batches, so that it may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from urank.errors import DataError
from urank.log.files import FileFormat, csv_file, parquet_file
from urank.log.letor import is_letor
from urank.log.schema import LogSchema, RowName

__all__ = ["Log", "read"]

BATCH_BYTES = 32 * 2**20
_PARQUET = (".parquet", ".pq")
_CSV = (".csv", ".csv.gz", ".tsv", ".tsv.gz")

Source = str | Path | pl.DataFrame | pl.LazyFrame | Any


@dataclass(frozen=True)
class Log:
    """An impression log that can be read again and again, a batch at a time.

    Attributes:
        name: what errors and reports call it.
        schema: the role or kind of each column.
        size: bytes of the source, of which `batches` tells how much is behind it.
    """

    name: str
    schema: LogSchema
    size: int
    row_name: RowName
    _open: Callable[[int], Iterator[tuple[pl.DataFrame, int]]]

    @property
    def row_bytes(self) -> int:
        """About how many bytes a row takes once it is in canonical form."""
        return 4 * len(self.schema.features) + 16 * len(self.schema.roles) + 16

    def batches(self) -> Iterator[tuple[pl.DataFrame, int]]:
        """Batches in canonical form, each rule checked, and the bytes of the source that are behind each."""
        rows = max(1_000, BATCH_BYTES // self.row_bytes)
        empty = True
        for frame, done in self._open(rows):
            if frame.height:
                empty = False
                yield self.schema.canonical(frame, self.row_name), done
        if empty:
            raise DataError(f"{self.name} is empty; a log needs at least one impression")

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
    if isinstance(source, (str, Path)):
        return _read_files(str(source), columns, categorical, drop)
    return _read_table(source, columns, categorical, drop)


def _read_table(
    source: Any, columns: Mapping[str, str] | None, categorical: Collection[str], drop: Collection[str]
) -> Log:
    name = "the table"
    if isinstance(source, pl.LazyFrame):
        source = source.collect()
    if not isinstance(source, pl.DataFrame):
        if not hasattr(source, "__arrow_c_stream__"):
            raise DataError(
                "a log must be a path or a table of Polars, pandas or PyArrow; "
                f"got {type(source).__module__}.{type(source).__name__}"
            )
        source = pl.DataFrame(source)
    frame: pl.DataFrame = source
    schema = LogSchema.infer(frame.schema, name, columns=columns, categorical=categorical, drop=drop)
    size = int(frame.estimated_size())

    def batches(rows: int) -> Iterator[tuple[pl.DataFrame, int]]:
        needed = frame.select(schema.columns)
        for start in range(0, needed.height, rows):
            part = needed.slice(start, rows)
            yield part.with_columns(RowName.codes(0, start, part.height)), size * start // needed.height

    return Log(name, schema, size, RowName([name]), batches)


def _read_files(
    source: str, columns: Mapping[str, str] | None, categorical: Collection[str], drop: Collection[str]
) -> Log:
    paths = find_files(source)
    files = [_open_file(path) for path in paths]
    _add_partitions(files, Path(source))
    schema = LogSchema.infer(files[0].dtypes, files[0].name, columns=columns, categorical=categorical, drop=drop)
    for file in files[1:]:
        _check_same(files[0], file, schema)
    size = sum(path.stat().st_size for path in paths)

    def batches(rows: int) -> Iterator[tuple[pl.DataFrame, int]]:
        done = 0
        for number, file in enumerate(files):
            first = 0
            for frame, read_bytes in file.batches(schema.columns, rows):
                codes = RowName.codes(number, first, frame.height)
                first += frame.height
                yield frame.select(schema.columns).with_columns(codes), done + read_bytes
            done += file.path.stat().st_size

    return Log(source, schema, size, RowName([file.name for file in files]), batches)


def find_files(source: str) -> list[Path]:
    """The log files that a path, a folder or a glob stands for, in order."""
    path = Path(source)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith((*_PARQUET, *_CSV)))
        found = [p for p in found if not any(part.startswith(("_", ".")) for part in p.relative_to(path).parts)]
        if not found:
            raise DataError(f"{source} holds no Parquet or CSV file")
        return found
    if path.is_file():
        return [path]
    if not any(wildcard in source for wildcard in "*?["):
        raise DataError(f"{source} does not exist")
    found = sorted(p for p in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if p.is_file())
    if not found:
        raise DataError(f"no file matches {source}")
    return found


def _open_file(path: Path) -> FileFormat:
    if path.name.endswith(_PARQUET):
        return parquet_file(path)
    if path.name.endswith(_CSV):
        return csv_file(path)
    if is_letor(path):
        raise DataError(
            f"{path} is a LETOR file: it has relevance labels but no clicks; "
            f"simulate clicks on it with: urank simulate --data {path} -o DIR"
        )
    raise DataError(f"{path} is not a log that can be read; the name must end in {', '.join((*_PARQUET, *_CSV))}")


def _add_partitions(files: Sequence[FileFormat], root: Path) -> None:
    """Give each file the columns that its folders name: `day=3/part.parquet` has the column `day`."""
    if not root.is_dir():
        return
    found = [
        dict(part.split("=", 1) for part in file.path.relative_to(root).parts[:-1] if "=" in part) for file in files
    ]
    for key in dict.fromkeys(key for partition in found for key in partition):
        texts = [partition.get(key) for partition in found]
        whole = all(text is not None and text.lstrip("-").isdigit() for text in texts)
        for file, text in zip(files, texts, strict=True):
            if text is None:
                raise DataError(f"{file.name} does not stand in a folder named {key}=…, as other files of {root} do")
            if key in file.dtypes:
                raise DataError(f"{file.name} has a column '{key}' and stands in a folder that names it too")
            file.constants[key] = int(text) if whole else text
            file.dtypes[key] = pl.Int64() if whole else pl.String()


def _check_same(first: FileFormat, other: FileFormat, schema: LogSchema) -> None:
    """Refuse files whose columns do not agree on what they hold; whole and fractional numbers do agree."""
    for column in schema.columns:
        if column not in other.dtypes:
            raise DataError(f"column '{column}' is in {first.name} but not in {other.name}")
        a, b = first.dtypes[column], other.dtypes[column]
        both_numbers = a.is_numeric() and b.is_numeric()
        texts = (pl.String, pl.Categorical, pl.Enum)
        if a != b and not both_numbers and not (a in texts and b in texts) and pl.Null not in (a, b):
            raise DataError(f"column '{column}' is {a} in {first.name} but {b} in {other.name}")
    extra = [column for column in other.dtypes if column not in first.dtypes]
    if extra:
        raise DataError(f"column '{extra[0]}' is in {other.name} but not in {first.name}")
