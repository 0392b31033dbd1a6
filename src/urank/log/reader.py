"""Read a click log from files or from a table in memory, in batches, so that it may be larger than memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pyarrow.csv

from urank.errors import DataError
from urank.log.columns import TEXT_ROLES, LogSchema, RowName, is_index
from urank.log.svmlight import is_letor
from urank.storage import is_path, is_remote, matching, open_parquet, to_path

__all__ = [
    "PARQUET",
    "FileFormat",
    "Log",
    "Rows",
    "add_partitions",
    "arrow_frame",
    "csv_file",
    "find_files",
    "merged_dtypes",
    "open_file",
    "parquet_file",
    "read",
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


_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")
_MISSING = "__HIVE_DEFAULT_PARTITION__"
_TEXTS = (pl.String, pl.Categorical, pl.Enum)


def add_partitions(files: Sequence[FileFormat], source: str) -> None:
    """Give each file the columns that its folders name: `day=3/part.parquet` has the column `day`.

    Values are whole numbers when all of them are, otherwise text; what stands for a missing value is missing.
    """
    root = _fixed_part(source)
    found = [
        {unquote(key): unquote(value) for key, equals, value in (part.partition("=") for part in parts) if equals}
        for parts in (file.path.relative_to(root).parts[:-1] for file in files if file.path != root)
    ]
    for key in dict.fromkeys(key for partition in found for key in partition):
        texts = [partition.get(key) for partition in found]
        known = [text for text in texts if text != _MISSING]
        whole = all(text is not None and _WHOLE.fullmatch(text) for text in known)
        for file, text in zip(files, texts, strict=True):
            if text is None:
                raise DataError(f"{file.name} does not stand in a folder named {key}=…, as other files of {source} do")
            if key in file.dtypes:
                raise DataError(f"{file.name} has a column '{key}' and stands in a folder that names it too")
            value = None if text == _MISSING else text
            file.constants[key] = int(value) if whole and value is not None else value
            file.dtypes[key] = (pl.Int64() if whole else pl.String()) if known else pl.Null()


def _fixed_part(source: str) -> Path:
    """The folder under which partitions are told: the source itself, or what stands before a glob's first wildcard."""
    path = to_path(source)
    if path.exists():
        return path
    while any(wildcard in str(path) for wildcard in "*?["):
        path = path.parent
    return path


def merged_dtypes(files: Sequence[FileFormat], free: Collection[str] = ()) -> dict[str, pl.DataType]:
    """The type of each column over all files: a file in which it is empty says nothing of it.

    Args:
        files: the files.
        free: columns whose types need not agree, since they are taken as text or left out.

    Raises:
        DataError: when files do not agree on what they hold; whole and fractional numbers do agree.
    """
    first = files[0]
    merged = dict(first.dtypes)
    origin = dict.fromkeys(merged, first.name)
    for other in files[1:]:
        for column in [*merged, *other.dtypes]:
            has, lacks = (first, other) if column in merged else (other, first)
            if column not in lacks.dtypes and not is_index(column):
                raise DataError(f"column '{column}' is in {has.name} but not in {lacks.name}")
        for column, dtype in other.dtypes.items():
            known = merged.get(column, dtype)
            if not _agree(known, dtype) and column not in free:
                raise DataError(
                    f"column '{column}' is {known} in {origin[column]} but {dtype} in {other.name} "
                    f"(--categorical {column} takes it as text, --drop {column} leaves it out)"
                )
            if known == pl.Null or (known.is_numeric() and dtype.is_float()):
                merged[column], origin[column] = dtype, other.name
    return merged


def _agree(a: pl.DataType, b: pl.DataType) -> bool:
    return a == b or (a.is_numeric() and b.is_numeric()) or (a in _TEXTS and b in _TEXTS) or pl.Null in (a, b)


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
