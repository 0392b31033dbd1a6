"""Candidates of a request as arrays, read from JSON bodies (`CandidateReader.lists`) or Arrow streams (`read_arrow`).

An Arrow IPC stream suits many candidates: a column for each feature is used as it is, and nothing is parsed. It has the
columns `query_id`, `item_id`, the features, and optionally `value`, `user_id`, `positions` and `method`. The rows of a
list are adjacent, and properties of a list are read from its first row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from urank.log.columns import feature_expr
from urank.log.ragged import offsets_of_runs
from urank.ranking.matching import METHODS, Method
from urank.serve.request_schemas import (
    MAX_ERRORS,
    MAX_POSITIONS,
    MAX_TEXT,
    MAX_VALUE,
    Candidate,
    ExplainQuery,
    Problem,
    RankQuery,
)

if TYPE_CHECKING:
    from urank.serve.server_settings import Limits

ARROW_TYPE = "application/vnd.apache.arrow.stream"
MISSING = "\x00missing"
"""Placeholder of a missing category: ONNX has no missing strings, and no vocabulary contains this one."""

_NAN = float("nan")
_INT64_LIMIT = 2.0**63
Features = Mapping[str, Any]
NamedLists = Sequence[tuple[str, Sequence[Candidate[Any]]]]
"""Candidates of each list, with the prefix of their locations in refusals."""


@dataclass(frozen=True, eq=False)
class CandidateArrays:
    """Candidates of one list after the other, a row for each."""

    numeric: NDArray[np.float32]  # [rows, F] raw numbers, NaN if missing
    categorical: NDArray[np.object_]  # [rows, C] text, `MISSING` if missing
    value: NDArray[np.float32]  # [rows], the value of a click
    offsets: NDArray[np.int64]  # [lists + 1], the first row of each list

    def __len__(self) -> int:
        return len(self.numeric)

    def take(self, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> CandidateArrays:
        """Return some rows as new lists."""
        return CandidateArrays(self.numeric[rows], self.categorical[rows], self.value[rows], offsets)


@dataclass(frozen=True, eq=False)
class RequestLists:
    """The lists of a request: properties of each list, None where the request has none, and their candidates."""

    query_ids: Sequence[str]
    user_ids: Sequence[str | None]
    positions: Sequence[int | None]
    methods: Sequence[Method | None]
    item_ids: Sequence[str]  # of each row of `items`
    items: CandidateArrays
    has_values: Sequence[bool]  # whether each list came with values
    batch: bool = True  # whether refusals locate errors as in a batch, which may have a single list

    def __len__(self) -> int:
        return len(self.query_ids)

    def problem(self, number: int, field: str, detail: str, problem: str) -> Problem:
        """Return the refusal of a field of a list."""
        return Problem(422, detail, [(f"queries.{number}.{field}" if self.batch else field, problem)])


class CandidateReader:
    """Converts candidates to arrays with these features in this order; `ignore_unknown` accepts others as well."""

    def __init__(
        self, numeric: Sequence[str], categorical: Sequence[str], limits: Limits, *, ignore_unknown: bool = False
    ) -> None:
        self.numeric, self.categorical = tuple(numeric), tuple(categorical)
        self.limits, self.ignore_unknown = limits, ignore_unknown
        self._get_numbers, self._get_categories = _getter(self.numeric), _getter(self.categorical)
        self._pack = struct.Struct(f"={len(self.numeric)}f").pack

    def lists(self, queries: Sequence[RankQuery[Any] | ExplainQuery[Any]], *, batch: bool) -> RequestLists:
        """Read the lists of a JSON request; too many, repeated items and wrong features are refused."""
        named = [(f"queries.{number}." if batch else "", query.candidates) for number, query in enumerate(queries)]
        return RequestLists(
            query_ids=[query.query_id or "" for query in queries],
            user_ids=[query.user_id for query in queries],
            positions=[query.positions for query in queries],
            methods=[query.method for query in queries],
            item_ids=[candidate.item_id for _, candidates in named for candidate in candidates],
            items=self._items(named),
            has_values=[any(each.value is not None for each in candidates) for _, candidates in named],
            batch=batch,
        )

    def _items(self, named: NamedLists) -> CandidateArrays:
        for prefix, candidates in named:
            _check_sizes([len(candidates)], self.limits, prefix)
            _check_item_ids([candidate.item_id for candidate in candidates], prefix)
        _check_sizes([len(candidates) for _, candidates in named], self.limits)
        rows = [candidate.features for _, candidates in named for candidate in candidates]
        try:
            numeric = self._numeric(rows)
            texts = [[category_text(each) for each in self._get_categories(row)] for row in rows]
        except (KeyError, TypeError, ValueError, OverflowError, struct.error):
            raise self._wrong_features(named) from None
        width = len(self.numeric) + len(self.categorical)
        if not self.ignore_unknown and any(len(row) != width for row in rows):
            raise self._wrong_features(named)
        values = [1.0 if each.value is None else each.value for _, candidates in named for each in candidates]
        offsets = np.cumsum([0, *(len(candidates) for _, candidates in named)])
        categorical = np.array(texts, dtype=object).reshape(len(rows), len(self.categorical))
        return CandidateArrays(numeric, categorical, np.array(values, dtype=np.float32), offsets)

    def _numeric(self, rows: Sequence[Features]) -> NDArray[np.float32]:
        pack, numbers = self._pack, self._get_numbers
        if self.categorical:  # the schema of mixed features also allows text and booleans
            packed = [pack(*[_number(each) for each in numbers(row)]) for row in rows]
        else:
            try:
                packed = [pack(*numbers(row)) for row in rows]
            except struct.error:  # None somewhere
                packed = [pack(*[_NAN if each is None else each for each in numbers(row)]) for row in rows]
        return np.frombuffer(b"".join(packed), dtype=np.float32).reshape(len(rows), len(self.numeric))

    def _wrong_features(self, named: NamedLists) -> Problem:
        """Locate the first wrong features."""
        errors: list[tuple[str, str]] = []
        for prefix, candidates in named:
            for number, candidate in enumerate(candidates):
                errors += self._errors_of(candidate.features, f"{prefix}candidates.{number}.features")
                if len(errors) >= MAX_ERRORS:
                    break
        return Problem(422, "the features are not those of the model; see /v1/model", errors)

    def _errors_of(self, row: Features, place: str) -> list[tuple[str, str]]:
        known = {*self.numeric, *self.categorical}
        errors = [(name, "is required; send null if it is missing") for name in known.difference(row)]
        if not self.ignore_unknown:
            errors += [(name[:100], "is not a feature of the model") for name in row if name not in known]
        numbers = [name for name in self.numeric if name in row and not _is_float32(row[name])]
        errors += [(name, "must be a number that fits 32 bits, or null") for name in numbers]
        return [(f"{place}.{name}", problem) for name, problem in sorted(errors)]


def _check_sizes(lengths: Sequence[int], limits: Limits, prefix: str = "") -> None:
    if len(lengths) > limits.queries:
        raise Problem(422, f"a batch has at most {limits.queries} queries; got {len(lengths)}")
    if (total := sum(lengths)) > limits.rows:
        raise Problem(422, f"a batch has at most {limits.rows} candidates in total; got {total}")
    if (longest := max(lengths)) > limits.candidates:
        places = [(f"{prefix}candidates", f"at most {limits.candidates}")]
        raise Problem(422, f"a query has at most {limits.candidates} candidates; got {longest}", places)


def _check_item_ids(ids: Sequence[str], prefix: str) -> None:
    seen: dict[str, int] = {}
    for number, each in enumerate(ids):
        if (first := seen.setdefault(each, number)) != number:
            places = [(f"{prefix}candidates.{number}.item_id", f"is the same as in {prefix}candidates.{first}")]
            raise Problem(422, "an item must occur only once in a list", places)


def category_text(value: str | bool | float | None) -> str:
    """Convert a category to text as the log reader does: integers without a point, booleans in lower case.

    >>> [category_text(each) for each in ("red", 3.0, 2.5, True)]
    ['red', '3', '2.5', 'true']
    """
    if isinstance(value, str):
        return value
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (abs(value) < _INT64_LIMIT and value == int(value)):
        return str(int(value))
    return str(pl.Series([value]).cast(pl.String)[0])  # as Polars formats it when it reads a log


def _number(value: Any) -> float:
    if isinstance(value, str | bool):
        raise TypeError
    return _NAN if value is None else float(value)


def _is_float32(value: Any) -> bool:
    """Return whether a value is a number of 32 bits, or missing."""
    try:
        struct.pack("=f", _number(value))
    except (TypeError, OverflowError):
        return False
    return True


def _getter(names: Sequence[str]) -> Callable[[Features], tuple[Any, ...]]:
    """Return a function that picks these values, always as a tuple."""
    return itemgetter(*names) if len(names) > 1 else lambda row: tuple(row[name] for name in names)


_MAX_MESSAGES = 10_000
_LIST_COLUMNS = ("query_id", "item_id", "value", "user_id", "positions", "method")

# Type ids, since `pa.types.is_*` is slow for hundreds of columns.
_TEXT_TYPES = frozenset(kind.id for kind in (pa.string(), pa.large_string(), pa.string_view()))
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_NUMBER_TYPES = frozenset(kind.id for kind in (*_INTEGERS, pa.float16(), pa.float32(), pa.float64(), pa.null()))
_SHARED_TYPES = frozenset({pa.string_view().id, pa.dictionary(pa.int8(), pa.string()).id})
"""Types of which many rows may share one text."""


def read_arrow(body: bytes, reader: CandidateReader) -> RequestLists:
    """Read the lists of an Arrow stream, under the same rules as JSON."""
    table = _read_table(body, reader)
    queries, item_ids = _texts(table, "query_id"), _texts(table, "item_id")
    codes = table["query_id"].combine_chunks().dictionary_encode().indices
    offsets = offsets_of_runs(codes.to_numpy(zero_copy_only=False))
    _check_sizes(np.diff(offsets).tolist(), reader.limits)
    first = offsets[:-1].tolist()
    query_ids = [queries[row] for row in first]
    if len(set(query_ids)) != len(query_ids):
        raise Problem(422, "the rows of a query must be adjacent", [("query_id", "recurs after another")])
    for start, end in zip(first, offsets[1:].tolist(), strict=True):
        if len(set(item_ids[start:end])) != end - start:
            raise Problem(422, "an item must occur only once in a list", [("item_id", "occurs twice in a list")])
    return RequestLists(
        query_ids=query_ids,
        user_ids=_first_texts(table, "user_id", first),
        positions=_positions(table, first),
        methods=[_method(each) for each in _first_texts(table, "method", first)],
        item_ids=item_ids,
        items=CandidateArrays(
            _numeric_matrix(table, reader.numeric), _categories(table, reader.categorical), _values(table), offsets
        ),
        has_values=["value" in table.column_names] * len(first),
        batch=False,  # errors are located by column, whatever the number of lists
    )


def _read_table(body: bytes, reader: CandidateReader) -> pa.Table:
    """Read the columns of a stream that are used, as numbers, booleans and plain strings."""
    try:
        _refuse_compressed(body)
        with pa.ipc.open_stream(pa.BufferReader(body)) as stream:
            table = stream.read_all()
        table.validate()
        table = _used_columns(table, reader)
        _refuse_inflated(table, reader.limits)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError, struct.error):
        raise Problem(400, "the body is not an Arrow IPC stream") from None
    if any(field.type.id in _SHARED_TYPES for field in table.schema):
        table = pa.table([_decoded(column) for column in table.columns], table.column_names)
    return table.combine_chunks()


def _used_columns(table: pa.Table, reader: CandidateReader) -> pa.Table:
    if table.num_rows == 0:
        raise Problem(422, "a stream needs at least one candidate")
    if table.num_rows > reader.limits.rows:
        raise Problem(422, f"a batch has at most {reader.limits.rows} candidates in total; got {table.num_rows}")
    names, needed = dict.fromkeys(table.column_names), ("query_id", "item_id", *reader.numeric, *reader.categorical)
    if len(names) != table.num_columns:
        raise Problem(422, "column names must be unique")
    known = dict.fromkeys((*needed, *_LIST_COLUMNS))
    errors = [(name, "is required") for name in needed if name not in names]
    if not reader.ignore_unknown:
        errors += [(name[:100], "is not a feature of the model") for name in names if name not in known]
    if errors:
        raise Problem(422, "the columns are not those of the model; see /v1/model", sorted(errors))
    return table.select([name for name in known if name in names])


def _refuse_compressed(body: bytes) -> None:
    """Refuse compressed buffers, of which a few bytes may expand to gigabytes.

    PyArrow does not expose it, so the field `compression` of each RecordBatch is looked up in the flatbuffer of its
    message (Arrow's Message.fbs). Before metadata version 5, custom metadata could announce compression as well.
    """
    for number, message in enumerate(pa.ipc.MessageReader.open_stream(pa.BufferReader(body))):
        if number == _MAX_MESSAGES:
            raise Problem(422, f"a stream has at most {_MAX_MESSAGES} messages; send more rows in each")
        if message.metadata_version < pa.ipc.MetadataVersion.V5:
            raise Problem(415, "an Arrow IPC stream must have metadata version 5, as written since Arrow 1.0")
        header = message.metadata.to_pybytes()
        root = struct.unpack_from("<I", header, 0)[0]
        batch = _flatbuffer_table(header, root, 2)
        if message.type == "dictionary" and batch is not None:
            batch = _flatbuffer_table(header, batch, 1)
        if message.type != "schema" and batch is not None and _flatbuffer_table(header, batch, 3) is not None:
            raise Problem(415, "an Arrow IPC stream must not be compressed")


def _flatbuffer_table(buffer: bytes, table: int, field: int) -> int | None:
    """Return the offset of the table that is a field of another; None if the field is absent."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    size = struct.unpack_from("<H", buffer, vtable)[0]
    offset = struct.unpack_from("<H", buffer, vtable + 4 + 2 * field)[0] if 4 + 2 * field < size else 0
    return int(table + offset + struct.unpack_from("<I", buffer, table + offset)[0]) if offset else None


def _refuse_inflated(table: pa.Table, limits: Limits) -> None:
    """Refuse texts whose decoded size exceeds the limit of a body: rows of a dictionary or a view may share one."""
    total = 0
    for place, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if not (kind.id in _NUMBER_TYPES or kind.id in _TEXT_TYPES or pa.types.is_boolean(kind)):
            raise Problem(422, "a column must contain numbers or texts", [(field.name, _is_type(field.type))])
        for chunk in table.column(place).chunks if field.type.id in _SHARED_TYPES else ():
            texts = chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk
            lengths = _text_bytes(texts)
            total += int(lengths.sum())
            if texts is not chunk:
                total += pc.sum(pa.array(lengths).take(chunk.indices)).as_py() or 0
    if total > limits.body_bytes:
        raise Problem(413, f"the texts of a stream have at most {limits.body_bytes} bytes in total, as a body has")


def _text_bytes(texts: pa.Array) -> NDArray[np.int64]:
    """Return an upper bound of the bytes of each text; 0 for other types."""
    if len(texts) == 0 or texts.type.id not in _TEXT_TYPES:
        return np.zeros(len(texts), dtype=np.int64)
    if pa.types.is_string_view(texts.type):
        views = np.frombuffer(texts.buffers()[1], dtype=np.int32)[: 4 * (texts.offset + len(texts))]
        return np.abs(views.reshape(-1, 4)[texts.offset :, 0].astype(np.int64))
    lengths: NDArray[Any] = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    return np.abs(lengths.astype(np.int64))


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column from dictionaries and views, which not all of Arrow's functions support."""
    if column.type.id not in _SHARED_TYPES:
        return column
    coded = pa.types.is_dictionary(column.type)
    kind = column.type.value_type if coded and column.type.value_type.id not in _TEXT_TYPES else pa.large_string()
    chunks = [_cast(each.dictionary, kind).take(each.indices) if coded else _cast(each, kind) for each in column.chunks]
    return pa.chunked_array(chunks, kind)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast an array.

    Views of missing texts are not validated, but Arrow's cast follows them all the same, out of the body and out of
    the process. So views with missing texts are converted in Python.
    """
    if pa.types.is_string_view(array.type) and array.null_count:
        return pa.array(array.to_pylist(), kind)
    return array.cast(kind)


def _numeric_matrix(table: pa.Table, names: Sequence[str]) -> NDArray[np.float32]:
    numeric = _matrix(table.select(list(names)))
    if (infinite := np.isinf(numeric).any(axis=0)).any():
        name = names[int(infinite.argmax())]
        raise Problem(422, "numbers must be finite and fit 32 bits", [(name, "is infinite")])
    return numeric


def _matrix(table: pa.Table) -> NDArray[np.float32]:
    """Convert numeric columns to `[rows, columns]`, NaN if missing, infinite if too large for 32 bits."""
    for field in table.schema:
        if field.type.id not in _NUMBER_TYPES:
            raise Problem(422, "a numeric feature needs numbers", [(field.name, _is_type(field.type))])
    if table.num_columns == 0:
        return np.empty((table.num_rows, 0), dtype=np.float32)
    if any(field.type.id != pa.float32().id for field in table.schema):
        table = table.cast(pa.schema([(name, pa.float32()) for name in table.column_names]), safe=False)
    batch = table.combine_chunks().to_batches()[0]
    return np.ascontiguousarray(batch.to_tensor(null_to_nan=True).to_numpy())


def _categories(table: pa.Table, names: Sequence[str]) -> NDArray[np.object_]:
    texts = np.empty((table.num_rows, len(names)), dtype=object)
    for place, name in enumerate(names):
        column = table[name]
        if pa.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py():
            raise Problem(422, "numbers must be finite and fit 32 bits", [(name, "is infinite")])
        frame = pl.DataFrame({name: pl.Series(column)})
        series = frame.select(feature_expr(name, name, None, frame.dtypes[0], categorical=True)).to_series()
        texts[:, place] = series.fill_null(MISSING).to_list()
    return texts


def _values(table: pa.Table) -> NDArray[np.float32]:
    if "value" not in table.column_names:
        return np.ones(table.num_rows, dtype=np.float32)
    values = _matrix(table.select(["value"]))[:, 0].copy()
    if table["value"].null_count:
        values[pc.is_null(table["value"]).to_numpy()] = 1.0
    if not ((values >= 0) & (values <= MAX_VALUE)).all():
        raise Problem(422, f"a value must be a finite number from 0 to {MAX_VALUE:g}", [("value", "is out of range")])
    return values


def _texts(table: pa.Table, name: str) -> list[str]:
    """Read a column of ids."""
    column = table[name]
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    elif column.type.id not in _TEXT_TYPES:
        raise Problem(422, f"{name} must be text or integers", [(name, _is_type(column.type))])
    texts: list[str] = column.to_pylist()
    if column.null_count or not 0 < min(map(len, texts)) <= max(map(len, texts)) <= MAX_TEXT:
        raise Problem(422, f"{name} must have 1 to {MAX_TEXT} characters everywhere", [(name, "is empty or too long")])
    return texts


def _first_texts(table: pa.Table, name: str, rows: Sequence[int]) -> list[str | None]:
    """Read an optional text from the first row of each list."""
    part = table.select([name]).take(pa.array(rows)) if name in table.column_names else None
    if part is None or part[name].null_count == len(rows):
        return [None] * len(rows)
    if part[name].null_count:
        raise Problem(422, f"{name} must be present in all lists or in none", [(name, "is missing")])
    return list(_texts(part, name))


def _positions(table: pa.Table, rows: Sequence[int]) -> list[int | None]:
    column = table["positions"] if "positions" in table.column_names else None
    if column is None or pa.types.is_null(column.type):
        return [None] * len(rows)
    if not pa.types.is_integer(column.type):
        raise Problem(422, "positions must be integers", [("positions", _is_type(column.type))])
    positions = [column[row].as_py() for row in rows]
    if any(each is not None and not 1 <= each <= MAX_POSITIONS for each in positions):
        raise Problem(422, f"positions must be from 1 to {MAX_POSITIONS}", [("positions", "is out of range")])
    return positions


def _method(text: str | None) -> Method | None:
    method = next((each for each in METHODS if each == text), None)
    if text is not None and method is None:
        raise Problem(422, f"method must be {', '.join(METHODS)}", [("method", "is unknown")])
    return method


def _is_type(kind: pa.DataType) -> str:
    return f"is {str(kind)[:60]}"
