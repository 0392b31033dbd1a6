"""Files and tables of a log, or of candidates: which they are, what columns they have, and their rows in batches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.csv

from urank.errors import DataError
from urank.log.letor import is_letor
from urank.paths import is_remote, matching, open_parquet, to_path

__all__ = [
    "PARQUET",
    "FileFormat",
    "Rows",
    "arrow_frame",
    "csv_file",
    "find_files",
    "open_file",
    "parquet_file",
    "table_frame",
]

PARQUET = (".parquet", ".pq")
CSV = (".csv", ".csv.gz", ".tsv", ".tsv.gz")

CSV_BLOCK_BYTES = 16 * 2**20
MISSING = ("", "NULL", "null", "NA", "N/A", "nan", "NaN", "NAN", "None")
"""What stands for a missing number in a CSV, in a column whose other entries are all numbers."""

_SECOND = re.compile(r"(.*)_duplicated_\d+", re.DOTALL)

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

    def batches(self, columns: Sequence[str], rows: int, categories: Collection[str] = ()) -> Rows:
        """Batches of at most about `rows` rows, and the bytes of the file behind each.

        Args:
            columns: the columns to read.
            rows: how many rows make a batch.
            categories: columns of names. One in which a CSV has nothing but NA, or the like, is given as it is written
                if it is among these (other files, or a model, may tell that it is), otherwise as missing.
        """
        own = [column for column in columns if column not in self.constants]
        missing = [pl.lit(None).alias(key) for key in own if self.dtypes[key] == pl.Null and key not in categories]
        constants = [pl.lit(value, dtype=self.dtypes[key]).alias(key) for key, value in self.constants.items()]
        for frame, done in self._read(own, rows):
            yield frame.with_columns(*missing, *constants), done


def find_files(source: str) -> list[Path]:
    """The files that a path, a folder or a glob stands for, in order; of a folder, those of Parquet and CSV."""
    path = to_path(source)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith((*PARQUET, *CSV)))
        found = [p for p in found if not any(part.startswith(("_", ".")) for part in p.relative_to(path).parts)]
        if not found:
            raise DataError(f"{source} holds no Parquet or CSV file")
        return found
    if path.is_file():
        return [path]
    if not any(wildcard in source for wildcard in "*?["):
        raise DataError(f"{source} does not exist")
    found = matching(path)
    if not found:
        raise DataError(f"no file matches {source}")
    return found


def open_file(path: Path, text: Collection[str] = ()) -> FileFormat:
    """A file of the format that its name tells; the columns `text` of a CSV are read as they are written."""
    if path.name.endswith(PARQUET):
        return parquet_file(path)
    if is_remote(path):
        raise DataError(f"{path} is not a Parquet file; of other places than this machine only these are read")
    if path.name.endswith(CSV):
        return csv_file(path, text)
    if is_letor(path):
        raise DataError(
            f"{path} is a LETOR file, which has labels but no clicks and serves only to simulate them: "
            f"urank simulate --data {path} -o DIR"
        )
    raise DataError(f"{path} is not a file that can be read; the name must end in {', '.join((*PARQUET, *CSV))}")


def table_frame(table: Any, name: str, kind: str) -> pl.DataFrame:
    """A table of Polars, pandas or PyArrow as Polars has it.

    Args:
        table: the table.
        name: what errors call it.
        kind: what must be such a table: "a log".

    Raises:
        DataError: when it is no such table, or has what pandas cannot give, such as a column of mixed types.
    """
    if isinstance(table, pl.LazyFrame):
        return table.collect()
    if isinstance(table, pl.DataFrame):
        return table
    if not hasattr(table, "__arrow_c_stream__"):
        got = f"{type(table).__module__}.{type(table).__name__}"
        raise DataError(f"{kind} must be a path or a table of Polars, pandas or PyArrow; got {got}")
    try:
        arrow = pa.table(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{name} holds a column that cannot be read: {_reason(error)}") from error
    return arrow_frame(arrow, name)


def arrow_frame(table: pa.Table | pa.RecordBatch, name: str) -> pl.DataFrame:
    """An Arrow table in Polars, dictionaries of text or numbers as what they hold.

    Raises:
        DataError: when two columns have one name, or Polars knows no such type.
    """
    twice = [column for column, count in Counter(table.schema.names).items() if count > 1]
    if twice:
        raise DataError(f"{name} has two columns named '{twice[0]}'; rename one")
    plain = pa.schema([_without_dictionary(column) for column in table.schema])
    try:
        return pl.DataFrame(pl.from_arrow(table if plain.equals(table.schema) else table.cast(plain)))
    except (pl.exceptions.PolarsError, pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        raise DataError(f"{name} holds a column of a type that cannot be read: {_reason(error)}") from error


def _without_dictionary(column: pa.Field) -> pa.Field:
    return column.with_type(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def parquet_file(path: Path) -> FileFormat:
    """A Parquet file, read a row group's part at a time."""
    try:
        with open_parquet(path) as file:
            empty = file.schema_arrow.empty_table()
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error
    dtypes = dict(arrow_frame(empty, str(path)).schema)

    def rows_of(columns: Sequence[str], rows: int) -> Rows:
        try:
            with open_parquet(path) as file:
                total, done, size = file.metadata.num_rows, 0, path.stat().st_size
                for batch in file.iter_batches(batch_size=rows, columns=list(columns)):
                    done += batch.num_rows
                    yield arrow_frame(batch, str(path)), size * done // max(total, 1)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, "Parquet", error) from error

    return FileFormat(path, dtypes, rows_of)


def csv_file(path: Path, text: Collection[str] = ()) -> FileFormat:
    """A CSV file with a header, comma separated (tabs in a .tsv), also gzipped. An empty field is missing.

    The type of each column is inferred from the whole file, so that a column whose first numbers come late, or whose
    first text comes late, is not mistaken.

    Args:
        path: the file.
        text: columns that are read as they are written, such as ids: 00017 stays 00017.
    """
    separator = "\t" if ".tsv" in path.name else ","
    try:
        scan = pl.scan_csv(path, separator=separator, infer_schema_length=None, glob=False)
        inferred = dict(scan.collect_schema())
        _check_header(path, list(inferred))
        dtypes = {name: pl.String() if name in text else dtype for name, dtype in inferred.items()}
        unsure = [name for name, dtype in dtypes.items() if dtype == pl.String and name not in text and name]
        odd = _odd_numbers(scan, unsure)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _unreadable(path, "CSV", error) from error
    types = {name: _arrow_type(dtype) for name, dtype in dtypes.items()}
    dtypes |= odd

    def rows_of(columns: Sequence[str], rows: int) -> Rows:
        convert = pa.csv.ConvertOptions(
            column_types=types, include_columns=list(columns), null_values=[""], strings_can_be_null=True
        )
        parse = pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        block = pa.csv.ReadOptions(block_size=CSV_BLOCK_BYTES)
        size = path.stat().st_size
        compressed = path.suffix == ".gz"
        done = 0
        numbers = [_number(name).alias(name) for name in columns if odd.get(name) == pl.Float64]
        try:
            with pa.csv.open_csv(path, read_options=block, parse_options=parse, convert_options=convert) as reader:
                for batch in reader:
                    done = min(size, done + (0 if compressed else CSV_BLOCK_BYTES))
                    frame = pl.DataFrame(pl.from_arrow(batch)).with_columns(numbers)
                    for part in frame.iter_slices(rows):
                        yield part, done
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, "CSV", error) from error

    return FileFormat(path, dtypes, rows_of)


def _check_header(path: Path, names: list[str]) -> None:
    """Refuse columns that have one name, or none; only a first column may have none: the index that pandas writes."""
    for number, name in enumerate(names, start=1):
        second = _SECOND.fullmatch(name)
        if second and second[1] in names:
            raise DataError(f"{path} has two columns named '{second[1]}'; rename one")
        if not name and number > 1:
            raise DataError(f"column {number} of {path} has no name in the header")


def _odd_numbers(scan: pl.LazyFrame, names: Sequence[str]) -> dict[str, pl.DataType]:
    """Columns that look like text but hold only numbers and `MISSING` (Float64), or nothing at all (Null)."""
    if not names:
        return {}
    known = {name: pl.col(name).str.strip_chars().is_in(MISSING).fill_null(True).not_() for name in names}
    checks = [known[name].any().alias(f"any {name}") for name in names]
    checks += [(known[name] & _number(name).is_null()).any().alias(f"text {name}") for name in names]
    found = scan.select(checks).collect(engine="streaming").row(0, named=True)
    odd: dict[str, pl.DataType] = {}
    for name in names:
        if not found[f"text {name}"]:
            odd[name] = pl.Float64() if found[f"any {name}"] else pl.Null()
    return odd


def _number(name: str) -> pl.Expr:
    """The number in a text; none where it is missing or not a number."""
    text = pl.col(name).str.strip_chars()
    return pl.when(text.is_in(MISSING)).then(None).otherwise(text).cast(pl.Float64, strict=False)


def _arrow_type(dtype: pl.DataType) -> Any:
    if dtype == pl.Boolean:
        return pa.bool_()
    if dtype == pl.Int128:
        return pa.float64()
    if dtype.is_integer():
        return pa.int64()
    return pa.float64() if dtype.is_float() else pa.string()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200]


def _unreadable(path: Path, kind: str, error: Exception) -> DataError:
    return DataError(f"{path} is not a readable {kind} file (damaged, cut short, or of another kind): {_reason(error)}")
