"""The file formats of an impression log: what columns a file has, and its rows in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from urank.errors import DataError

__all__ = ["FileFormat", "csv_file", "parquet_file"]

Rows = Iterator[tuple[pl.DataFrame, int]]


@dataclass
class FileFormat:
    """One file: its columns with their types, constant columns (hive partitions), and a way to read it."""

    path: Path
    dtypes: dict[str, pl.DataType]
    _read: Callable[[Sequence[str], int], Rows]
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.path)

    def batches(self, columns: Sequence[str], rows: int) -> Rows:
        """Batches of at most about `rows` rows, and the bytes of the file behind each."""
        own = [column for column in columns if column not in self.constants]
        for frame, done in self._read(own, rows):
            yield frame.with_columns(pl.lit(value).alias(key) for key, value in self.constants.items()), done


def parquet_file(path: Path) -> FileFormat:
    """A Parquet file, read a row group's part at a time."""
    try:
        with pq.ParquetFile(path) as file:
            dtypes = dict(pl.DataFrame(pl.from_arrow(file.schema_arrow.empty_table())).schema)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error

    def rows_of(columns: Sequence[str], rows: int) -> Rows:
        try:
            with pq.ParquetFile(path, pre_buffer=False) as file:  # pre-buffering would hold the whole file
                total, done, size = file.metadata.num_rows, 0, path.stat().st_size
                for batch in file.iter_batches(batch_size=rows, columns=list(columns)):
                    done += batch.num_rows
                    yield pl.DataFrame(pl.from_arrow(batch)), size * done // max(total, 1)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, "Parquet", error) from error

    return FileFormat(path, dtypes, rows_of)


def csv_file(path: Path) -> FileFormat:
    """A CSV file with a header, comma separated (tabs in a .tsv), also gzipped. An empty field is missing.

    The type of each column is inferred from the whole file, so that a column whose first numbers come late, or whose
    first text comes late, is not mistaken.
    """
    separator = "\t" if ".tsv" in path.name else ","
    try:
        scan = pl.scan_csv(path, separator=separator, infer_schema_length=None)
        dtypes = dict(scan.collect_schema())
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _unreadable(path, "CSV", error) from error
    types = {name: _arrow_type(dtype) for name, dtype in dtypes.items()}

    def rows_of(columns: Sequence[str], rows: int) -> Rows:
        convert = pa.csv.ConvertOptions(
            column_types=types, include_columns=list(columns), null_values=[""], strings_can_be_null=True
        )
        parse = pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        block = pa.csv.ReadOptions(block_size=16 * 2**20)
        size = path.stat().st_size
        compressed = path.suffix == ".gz"
        done = 0
        try:
            with pa.csv.open_csv(path, read_options=block, parse_options=parse, convert_options=convert) as reader:
                for batch in reader:
                    done = min(size, done + (0 if compressed else 16 * 2**20))
                    yield pl.DataFrame(pl.from_arrow(batch)), done
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, "CSV", error) from error

    return FileFormat(path, dtypes, rows_of)


def _arrow_type(dtype: pl.DataType) -> Any:
    if dtype == pl.Boolean:
        return pa.bool_()
    if dtype.is_integer():
        return pa.int64()
    return pa.float64() if dtype.is_float() else pa.string()


def _unreadable(path: Path, kind: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split()).rstrip(".")
    return DataError(f"{path} is not a readable {kind} file (damaged, cut short, or of another kind): {reason[:200]}")
