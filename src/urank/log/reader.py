"""Read a click log from files or from a table in memory, in batches, so that it may be larger than memory."""

from __future__ import annotations

import codecs
import gzip
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

from urank.errors import ConfigError, DataError
from urank.log.columns import ROW, TEXT_ROLES, LogSchema, RowName, guessed_roles, is_index
from urank.log.svmlight import is_letor
from urank.storage import glob_files, is_path, is_remote, open_parquet, to_path

PARQUET = (".parquet", ".pq")
CSV = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
CSV_BLOCK_BYTES = 16 * 2**20
MISSING = ("", "NULL", "null", "NA", "N/A", "nan", "NaN", "NAN", "None")
"""The marks of a missing number in a CSV column whose other entries are all numbers."""

BATCH_BYTES = 32 * 2**20
FIRST_ROWS = 1_000

_DUPLICATED = re.compile(r"(.*)_duplicated_\d+", re.DOTALL)  # how Polars names the second of two equal names
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_TEXT_TYPES = (pl.String, pl.Categorical, pl.Enum)

Rows = Iterator[tuple[pl.DataFrame, int]]
"""Batches of rows, each with the number of bytes of the source read so far."""


@dataclass(frozen=True)
class Log:
    """An impression log that can be read repeatedly, a batch at a time.

    Attributes:
        sources: The files, or the table in memory.
        floats: Columns that are fractional in some file, so that whole numbers of other files become floats.
    """

    name: str
    schema: LogSchema
    sources: tuple[TableSource, ...]
    floats: tuple[str, ...] = ()

    @property
    def files(self) -> int:
        return len(self.sources)

    @property
    def size(self) -> int:
        return sum(source.size for source in self.sources)

    @cached_property
    def row_name(self) -> RowName:
        return RowName([source.name for source in self.sources])

    @property
    def row_bytes(self) -> int:
        """The approximate bytes of a row in canonical form; text is measured on the first rows."""
        return self._measured[0]

    @cached_property
    def _measured(self) -> tuple[int, float]:
        """Bytes per impression, and impressions per row of the source, measured on the first rows."""
        texts = len(self.schema.named("categorical"))
        fixed = 4 * len(self.schema.features) + 12 * texts + 16 * len(self.schema.roles) + 16
        raw = next((frame for frame, _ in self._raw_batches(FIRST_ROWS, range(self.files)) if frame.height), None)
        if raw is None:
            return fixed, 1.0
        try:
            first = self.schema.canonical(raw.head(FIRST_ROWS), self.row_name)
        except DataError:  # raised again when the rows are read
            return fixed, 1.0
        letters = first.select(cs.string().str.len_bytes().sum()).sum_horizontal().sum()
        return fixed + round(letters / first.height), first.height / min(raw.height, FIRST_ROWS)

    def batches(self, seen: Callable[[pl.DataFrame], None] | None = None, only: Sequence[int] | None = None) -> Rows:
        """Read validated batches in canonical form, of the files numbered `only`; `seen` is called with raw ones."""
        row_bytes, impressions = self._measured
        rows = max(1_000, int(BATCH_BYTES / row_bytes / impressions))
        empty = True
        for frame, done in self._raw_batches(rows, range(self.files) if only is None else only):
            if frame.height:
                empty = False
                if seen is not None:
                    seen(frame)
                yield self.schema.canonical(frame, self.row_name), done
        if empty and only is None:
            raise self.empty_error()

    def _raw_batches(self, rows: int, numbers: Sequence[int]) -> Rows:
        """Read batches as the source has them, with the column `ROW`."""
        done = 0
        for number in numbers:
            source = self.sources[number]
            whole = [pl.col(column).cast(pl.Float64) for column in self.floats if source.dtypes[column].is_integer()]
            first = 0
            for frame, read_bytes in source.batches(self.schema.columns, rows, self.schema.categories):
                codes = RowName.codes(number, first, frame.height)
                first += frame.height
                yield frame.select(self.schema.columns).with_columns(*whole, codes), done + read_bytes
            done += source.size

    def frame(self) -> pl.DataFrame:
        """Read the whole log into memory."""
        return pl.concat([frame for frame, _ in self.batches()])

    def empty_error(self) -> DataError:
        """Return the error for a log without rows."""
        return DataError(f"{self.name} is empty; a log needs at least one impression")

    def duplicate_position_error(self, rows: pl.DataFrame) -> DataError:
        """Return the error for a list with a position twice, given these two rows in canonical form."""
        earlier, later = map(self.row_name, rows[ROW].sort())
        where = f"is at {earlier} and again at {later}"
        which = f"a position must occur once in a list; position {rows['position'][0]} of query {rows['query_id'][0]}"
        if "session_id" in rows.columns:
            return DataError(f"{which}, session {rows['session_id'][0]} {where}")
        advice = "if these are two showings, name their session with --column session_id=NAME"
        return DataError(f"{which} {where} ({advice})")


def read(
    source: str | Path | Any,
    *,
    columns: Mapping[str, str] | None = None,
    categorical: Collection[str] = (),
    drop: Collection[str] = (),
    known: Mapping[str, str] | None = None,
    first_position: int = 1,
    binarise: bool = False,
) -> Log:
    """Open a click log.

    Args:
        source: A Parquet or CSV file (also gzipped), a folder of them (hive partitions become columns), a glob, a
            folder written by `urank prepare`, or a table of Polars, pandas or PyArrow. One row per impression, or one
            row per query with list columns.
        columns: Role -> column, where the names differ, as in `{"position": "place"}`. Unmistakable names, such as
            `rank` for the position, are found without (`log.schema.guesses` says which).
        categorical: Numeric columns to treat as categories.
        drop: Columns to leave out.
        known: As `columns`, but only where such a column exists and none has the name of the role: the columns of the
            log that a model was trained on.
        first_position: Number of the top position in the source, such as 0.
        binarise: Take counts of clicks (and conversions) above 0, and yes or true, for 1.

    >>> table = pl.DataFrame({"query_id": [1, 1], "place": [1, 2], "clicked": [0, 1], "price": [9.5, 3.0]})
    >>> log = read(table, columns={"position": "place"})
    >>> log.schema.named("numeric"), log.schema.guesses
    (['price'], 'reading clicked as click; say -c ROLE=COLUMN if that is wrong')
    """
    if first_position < 0:
        raise ConfigError(f"first_position must be 0 or 1, or whatever number the top has; got {first_position}")
    text = {(columns or {}).get(role, role) for role in TEXT_ROLES} | set(categorical)
    sources: Sequence[TableSource]
    if is_path(source):
        name = str(source)
        files = [open_file(path, text) for path in find_files(name)]
        guesses = guessed_roles(files[0].dtypes, columns or {}, {*categorical, *drop}, known)
        if ids := {column for role, column in guesses.items() if role in TEXT_ROLES} - text:
            text |= ids
            files = [open_file(file.path, text) for file in files]
        sources = add_partitions(files, name)
    else:
        name = "the table"
        sources = [open_table(source, name, "a log")]
    dtypes = _merge_dtypes(sources, {*text, *drop})
    schema = LogSchema.infer(
        dtypes,
        sources[0].name,
        columns=columns,
        categorical=categorical,
        drop=drop,
        known=known,
        first_position=first_position,
        binarise=binarise,
    )
    floats = tuple(column for column in schema.columns if dtypes[column].is_float() and column not in text)
    return Log(name, schema, tuple(sources), floats)


@dataclass(kw_only=True)
class TableSource:
    """A table of `size` bytes that is read in batches."""

    name: str
    dtypes: dict[str, pl.DataType]
    size: int
    read: Callable[[Sequence[str], int], Rows]
    rows: int | None = None  # the number of rows, None if unknown
    constants: dict[str, Any] = field(default_factory=dict)  # columns with one value throughout (hive partitions)

    def batches(self, columns: Sequence[str], rows: int, categories: Collection[str] = ()) -> Rows:
        """Read batches of at most about `rows` rows.

        If a CSV column contains only marks of missing values such as NA, these are kept as text in a categorical
        column, one of `categories`, and are missing values in any other.
        """
        own = [column for column in columns if column not in self.constants]
        missing = [pl.lit(None).alias(key) for key in own if self.dtypes[key] == pl.Null and key not in categories]
        constants = [pl.lit(value, dtype=self.dtypes[key]).alias(key) for key, value in self.constants.items()]
        for frame, done in self.read(own, rows):
            yield frame.with_columns(*missing, *constants), done


@dataclass(kw_only=True)
class TableFile(TableSource):
    """A file that contains a table."""

    path: Path


def find_files(source: str) -> list[Path]:
    """Return the files of a path, a folder (its Parquet and CSV files) or a glob, in order."""
    path = to_path(source)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith((*PARQUET, *CSV)))
        found = [p for p in found if not any(part.startswith(("_", ".")) for part in p.relative_to(path).parts)]
        if not found:
            raise DataError(f"{source} contains no Parquet or CSV file")
        return found
    if path.is_file():
        return [path]
    if not any(wildcard in source for wildcard in "*?["):
        raise DataError(f"{source} does not exist; give a Parquet or CSV file, a folder of them, or a glob in quotes")
    found = glob_files(path)
    if not found:
        raise DataError(f"no file matches {source}")
    return found


def open_file(path: Path, text: Collection[str] = ()) -> TableFile:
    """Open a file in the format of its suffix; the CSV columns `text` are read as written."""
    if path.name.endswith(PARQUET):
        return _parquet_file(path)
    if is_remote(path):
        raise DataError(f"{path} is not a Parquet file, the only format that is read from a URL")
    if path.name.endswith(CSV):
        return _csv_file(path, text)
    if is_letor(path):
        raise DataError(
            f"{path} is a LETOR file, which has labels but no clicks and serves only to simulate them: "
            f"urank simulate --data {path} -o DIR"
        )
    raise DataError(f"{path} is not a file that can be read; the name must end in {', '.join((*PARQUET, *CSV))}")


def open_table(table: Any, name: str, kind: str) -> TableSource:
    """Open a table in memory; `name` and `kind` are as in `table_frame`."""
    frame = table_frame(table, name, kind)
    size = int(frame.estimated_size())

    def rows_of(columns: Sequence[str], rows: int) -> Rows:
        done = 0
        for part in frame.select(columns).iter_slices(rows):
            done += part.height
            yield part, size * done // frame.height

    return TableSource(name=name, dtypes=dict(frame.schema), size=size, read=rows_of, rows=frame.height)


def table_frame(table: Any, name: str, kind: str) -> pl.DataFrame:
    """Convert a table of Polars, pandas or PyArrow to Polars.

    Raises a `DataError` about `name`, which is `kind` (as "a log"), if it is no such table, or has columns that cannot
    be converted, such as mixed types of pandas.
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
        raise DataError(f"{name} has a column that cannot be read: {_reason(error)}") from error
    return _arrow_frame(arrow, name)


def in_type_of(table: Any, frame: pl.DataFrame) -> Any:
    """Return a frame as the kind of table that another one is: pandas, PyArrow, or else Polars."""
    if isinstance(table, pa.Table | pa.RecordBatch):
        return frame.to_arrow()
    return frame.to_pandas() if type(table).__module__.split(".")[0] == "pandas" else frame


def _arrow_frame(table: pa.Table | pa.RecordBatch, name: str) -> pl.DataFrame:
    """Convert an Arrow table to Polars, decoding dictionaries."""
    duplicates = [column for column, count in Counter(table.schema.names).items() if count > 1]
    if duplicates:
        raise DataError(f"{name} has two columns named '{duplicates[0]}'; rename one")
    fields = [
        each.with_type(each.type.value_type) if pa.types.is_dictionary(each.type) else each for each in table.schema
    ]
    decoded = pa.schema(fields)
    try:
        return pl.DataFrame(pl.from_arrow(table if decoded.equals(table.schema) else table.cast(decoded)))
    except (pl.exceptions.PolarsError, pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        raise DataError(f"{name} has a column of a type that cannot be read: {_reason(error)}") from error


def _parquet_file(path: Path) -> TableFile:
    """Open a Parquet file, read a part of a row group at a time."""
    try:
        with open_parquet(path) as file:
            empty = file.schema_arrow.empty_table()
        size = path.stat().st_size
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error

    def rows_of(columns: Sequence[str], rows: int) -> Rows:
        try:
            with open_parquet(path) as file:
                total, done = file.metadata.num_rows, 0
                for batch in file.iter_batches(batch_size=rows, columns=list(columns)):
                    done += batch.num_rows
                    yield _arrow_frame(batch, str(path)), size * done // max(total, 1)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, "Parquet", error) from error

    dtypes = dict(_arrow_frame(empty, str(path)).schema)
    return TableFile(name=str(path), dtypes=dtypes, size=size, read=rows_of, path=path)


def _csv_file(path: Path, text: Collection[str] = ()) -> TableFile:
    """Open a CSV file with a header, also gzipped; an empty field is missing.

    Fields are separated by commas, by semicolons (then numbers may have decimal commas), or in a .tsv by tabs. Types
    are inferred from the whole file, so that a late first number, or a late first text, is not missed. The
    columns `text`, such as ids, are read as written: 00017 stays 00017.
    """
    try:
        size = path.stat().st_size
        separator = _separator(path)
        comma = separator == ";" and _has_decimal_commas(path)
        scan = pl.scan_csv(path, separator=separator, decimal_comma=comma, infer_schema_length=None, glob=False)
        inferred = dict(scan.collect_schema())
        _check_header(path, list(inferred))
        dtypes = {name: pl.String() if name in text else dtype for name, dtype in inferred.items()}
        unsure = [name for name, dtype in dtypes.items() if dtype == pl.String and name not in text and name]
        retyped = _numbers_with_gaps(scan, unsure)
    except pl.exceptions.NoDataError as error:
        raise DataError(f"{path} is empty; the first line must name the columns") from error
    except (pl.exceptions.PolarsError, OSError, EOFError) as error:
        raise _unreadable(path, "CSV", error) from error
    types = {name: _arrow_type(dtype) for name, dtype in dtypes.items()}

    def rows_of(columns: Sequence[str], rows: int) -> Rows:
        missing: dict[str, Any] = {"null_values": [""], "strings_can_be_null": True}
        point = "," if comma else "."
        convert = pa.csv.ConvertOptions(
            column_types=types, include_columns=list(columns), decimal_point=point, **missing
        )
        parse = pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        block = pa.csv.ReadOptions(block_size=CSV_BLOCK_BYTES)
        done, step = 0, 0 if path.suffix == ".gz" else CSV_BLOCK_BYTES
        numbers = [_number(name).alias(name) for name in columns if retyped.get(name) == pl.Float64]
        try:
            with pa.csv.open_csv(path, read_options=block, parse_options=parse, convert_options=convert) as reader:
                for batch in reader:
                    done = min(size, done + step)
                    frame = pl.DataFrame(pl.from_arrow(batch)).with_columns(numbers)
                    for part in frame.iter_slices(rows):
                        yield part, done
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, "CSV", error) from error

    return TableFile(name=str(path), dtypes=dtypes | retyped, size=size, read=rows_of, path=path)


def _separator(path: Path) -> str:
    """Return what separates the fields of a CSV file: by its name, or by what its header has most of."""
    header = _first_lines(path, 1)
    if ".tsv" in path.name:
        return "\t"
    return max(",;\t|", key=header.count) if "," not in header else ","


def _has_decimal_commas(path: Path) -> bool:
    """Return whether numbers with decimal commas, and none with points, are in the first lines of a file."""
    fields = [field for line in _first_lines(path, 100).splitlines()[1:] for field in line.split(";")]
    commas, points = (sum(bool(re.fullmatch(rf"-?\d+{mark}\d+", f.strip())) for f in fields) for mark in (",", r"\."))
    return commas > points


def _first_lines(path: Path, count: int) -> str:
    """Read the first lines of a file as text, and refuse encodings other than UTF-8."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        start = file.read(4)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start:
            raise DataError(f"{path} is UTF-16 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8 IN.csv > OUT.csv")
        lines = (start + file.readline(2**20)).splitlines()[:1]
        lines += [file.readline(2**20) for _ in range(count - 1)]
    return b"\n".join(line.rstrip(b"\r\n") for line in lines).decode("utf-8", errors="replace")


def _check_header(path: Path, names: list[str]) -> None:
    """Refuse duplicate and empty names; only the first column may be unnamed: the index that pandas writes."""
    for number, name in enumerate(names, start=1):
        second = _DUPLICATED.fullmatch(name)
        if second and second[1] in names:
            raise DataError(f"{path} has two columns named '{second[1]}'; rename one")
        if not name and number > 1:
            raise DataError(f"column {number} of {path} has no name; the first line must name the columns")


def _numbers_with_gaps(scan: pl.LazyFrame, names: Sequence[str]) -> dict[str, pl.DataType]:
    """Return the text columns that contain only numbers and `MISSING` (as Float64), or only `MISSING` (as Null)."""
    if not names:
        return {}
    known = {name: pl.col(name).str.strip_chars().is_in(MISSING).fill_null(True).not_() for name in names}
    checks = [known[name].any().alias(f"any {name}") for name in names]
    checks += [(known[name] & _number(name).is_null()).any().alias(f"text {name}") for name in names]
    found = scan.select(checks).collect(engine="streaming").row(0, named=True)
    return {name: pl.Float64() if found[f"any {name}"] else pl.Null() for name in names if not found[f"text {name}"]}


def _number(name: str) -> pl.Expr:
    """Parse numbers in a text column; null where they are missing or invalid."""
    text = pl.col(name).str.strip_chars()
    return pl.when(text.is_in(MISSING)).then(None).otherwise(text).cast(pl.Float64, strict=False)


def _arrow_type(dtype: pl.DataType) -> Any:
    if dtype == pl.Boolean:
        return pa.bool_()
    if dtype.is_integer() and dtype != pl.Int128:
        return pa.int64()
    return pa.float64() if dtype.is_numeric() else pa.string()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200]


def _unreadable(path: Path, kind: str, error: Exception) -> DataError:
    reason = _reason(error)
    if "utf-8" in reason.lower() or "utf8" in reason.lower():
        remedy = "if it is text in another encoding, convert it: iconv -f WINDOWS-1252 -t UTF-8 IN.csv > OUT.csv"
        return DataError(f"{path} is not UTF-8 text; {remedy}")
    return DataError(f"{path} is not a readable {kind} file (damaged, cut short, or of another kind): {reason}")


def add_partitions(files: list[TableFile], source: str) -> list[TableFile]:
    """Add to each file the columns named by its folders: `day=3/part.parquet` has the column `day`.

    Values are whole numbers if all of them are, otherwise text.
    """
    root = to_path(source)
    if not root.exists():  # a glob: partitions begin after the last folder without a wildcard
        while any(wildcard in str(root) for wildcard in "*?["):
            root = root.parent
    found = [
        {unquote(key): unquote(value) for key, equals, value in (part.partition("=") for part in parts) if equals}
        for parts in (file.path.relative_to(root).parts[:-1] for file in files if file.path != root)
    ]
    for key in dict.fromkeys(key for partition in found for key in partition):
        texts = [partition.get(key) for partition in found]
        known = [text for text in texts if text != _NO_PARTITION]
        whole = all(text is not None and _WHOLE.fullmatch(text) for text in known)
        for file, text in zip(files, texts, strict=True):
            if text is None:
                raise DataError(f"{file.name} is not in a folder named {key}=…, as other files of {source} are")
            if key in file.dtypes:
                raise DataError(f"{file.name} has a column '{key}' and is in a folder that names it, too")
            value = None if text == _NO_PARTITION else text
            file.constants[key] = int(value) if whole and value is not None else value
            file.dtypes[key] = (pl.Int64() if whole else pl.String()) if known else pl.Null()
    return files


def _merge_dtypes(files: Sequence[TableSource], free: Collection[str]) -> dict[str, pl.DataType]:
    """Merge the column types of all files; a file in which a column is empty does not determine its type.

    Files must agree on columns and types, except those of `free`, which are read as text or left out. Whole and
    fractional numbers do agree.
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
    same_kind = (a.is_numeric() and b.is_numeric()) or (a in _TEXT_TYPES and b in _TEXT_TYPES)
    return a == b or same_kind or pl.Null in (a, b)
