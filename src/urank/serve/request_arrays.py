"""Candidates of a request as arrays, read from JSON bodies (`CandidateReader.lists`) or Arrow streams (`read_arrow`).

A JSON list has a row for each candidate, or a column for each feature, which is parsed faster. An Arrow IPC stream
suits many candidates: a column for each feature is used as it is, and nothing is parsed. It has the columns `query_id`,
`item_id`, the features, and optionally `value`, `user_id`, `positions` and `method`. The rows of a list are adjacent,
and properties of a list are read from its first row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType
from msgspec.structs import astuple
from numpy.typing import NDArray

from urank.log.columns import feature_expr
from urank.log.ragged import offsets_of_runs
from urank.ranking.matching import METHODS, Method
from urank.serve.request_schemas import (
    MAX_CATEGORY,
    MAX_ERRORS,
    MAX_POSITIONS,
    MAX_TEXT,
    MAX_VALUE,
    NOT_THE_FEATURES,
    Candidate,
    ExplainQuery,
    Problem,
    RankQuery,
)

if TYPE_CHECKING:
    from urank.serve.item_store import ItemStore
    from urank.serve.server_settings import Limits

ARROW_TYPE = "application/vnd.apache.arrow.stream"
FLOAT32_BOUND = (2 - 2.0**-24) * 2.0**127  # smaller numbers are rounded to finite float32
MISSING = "\x00missing"
"""Placeholder of a missing category: ONNX has no missing strings, and no vocabulary contains this one."""

_NAN = float("nan")
_INT64_LIMIT = 2.0**63
_REQUIRED = "is required; send null if it is missing"
Ids = Sequence[str]
Features = tuple[NDArray[np.float32], NDArray[np.object_]]
"""Numbers and categories, as in `CandidateArrays`."""
Column = Sequence[Any] | UnsetType


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


@dataclass(frozen=True, eq=False)
class CandidateReader:
    """Converts candidates to arrays with these features in this order.

    A feature of an item is that of the request; otherwise that of the context of its list; otherwise that of the item
    store. `ignore_unknown` accepts streams with other features, and `rank_unknown` items that are not in the store,
    whose features are then missing.
    """

    numeric: Sequence[str]
    categorical: Sequence[str]
    limits: Limits
    ignore_unknown: bool = False
    items: ItemStore | None = None
    rank_unknown: bool = False

    def lists(self, queries: Sequence[RankQuery | ExplainQuery], *, batch: bool) -> RequestLists:
        """Read the lists of a JSON request; too many, repeated items and wrong features are refused."""
        prefixes = [f"queries.{number}." if batch else "" for number in range(len(queries))]
        ids = [_item_ids(query, prefix) for query, prefix in zip(queries, prefixes, strict=True)]
        _check_sizes([len(each) for each in ids], self.limits)
        parts = [self._list(*each) for each in zip(queries, ids, prefixes, strict=True)]
        arrays, has_values = zip(*parts, strict=True)
        return RequestLists(
            query_ids=[query.query_id or "" for query in queries],
            user_ids=[query.user_id for query in queries],
            positions=[query.positions for query in queries],
            methods=[query.method for query in queries],
            item_ids=ids[0] if len(ids) == 1 else [each for part in ids for each in part],
            items=arrays[0] if len(arrays) == 1 else _concatenated(arrays),
            has_values=has_values,
            batch=batch,
        )

    def stored(self, ids: Ids, place: Callable[[int], str]) -> Features:
        """Look up items; features that the store lacks are missing.

        Args:
            place: Returns the location of an id.
        """
        n, F, store = len(ids), len(self.numeric), self.items
        categorical = np.full((n, len(self.categorical)), MISSING, dtype=object)
        if store is None:
            return np.full((n, F), np.nan, dtype=np.float32), categorical
        rows = store.rows(ids)
        if (unknown := rows < 0).any() and not self.rank_unknown:
            wrong = np.flatnonzero(unknown).tolist()
            named = ", ".join(f"'{ids[row][:40]}'" for row in wrong[:MAX_ERRORS]) + (" …" if wrong[MAX_ERRORS:] else "")
            detail = f"the server does not know the features of {named}; send them, or add the items by PUT /v1/items"
            raise Problem(422, detail, [(place(row), "is unknown") for row in wrong[:MAX_ERRORS]])
        numeric = store.numeric[rows]
        if store.columns != tuple(self.numeric):
            places = {name: number for number, name in enumerate(store.columns)}
            filled = np.hstack([numeric, np.full((n, 1), np.nan, dtype=np.float32)])  # the last is of what it lacks
            numeric = filled[:, [places.get(name, -1) for name in self.numeric]]
        for number, name in enumerate(self.categorical):
            if name in store.categories:
                codes, texts = store.categories[name]
                categorical[:, number] = texts[codes[rows]]
        if unknown.any():
            numeric[unknown], categorical[unknown] = np.nan, MISSING
        return numeric, categorical

    def values(self, ids: Ids, given: NDArray[np.float32] | None) -> tuple[NDArray[np.float32], bool]:
        """Return the value of each item, and whether any is known: of the request, or of the store; 1 otherwise."""
        stored = None if self.items is None else self.items.value
        if given is None and stored is None:
            return np.ones(len(ids), dtype=np.float32), False
        value = np.full(len(ids), np.nan, dtype=np.float32) if given is None else given
        if stored is not None and self.items is not None:
            rows = self.items.rows(ids)
            value = np.where(np.isnan(value) & (rows >= 0), stored[rows], value)
        value[np.isnan(value)] = 1.0
        return value, True

    def _list(self, query: RankQuery | ExplainQuery, ids: Ids, prefix: str) -> tuple[CandidateArrays, bool]:
        """Read a list, and whether it has values."""
        width = len(self.numeric) + len(self.categorical)
        columns: Sequence[Column]
        defaults = (UNSET,) * width if query.context is UNSET else self._context(query.context, prefix)
        if query.candidates is not UNSET:
            given: Sequence[float | None] = [each.value for each in query.candidates]
            features = [each.features for each in query.candidates]
            read = self._rows(features) if query.context is UNSET else None
            if read is None:
                columns = _transposed(query.candidates, width)
                read = self._merged(ids, columns, defaults, lambda *each: prefix + _place_in_candidates(*each))
        else:
            given = [None] * len(ids) if query.value is UNSET else query.value
            columns = (UNSET,) * width if query.features is UNSET else astuple(query.features)
            named = zip((*self.numeric, *self.categorical), columns, strict=True)
            lengths = {f"features.{name}": len(each) for name, each in named if each is not UNSET}
            for name, length in (lengths | {"value": len(given)}).items():
                if length != len(ids):
                    places = [(f"{prefix}{name}", f"has {length} values for {len(ids)} items")]
                    raise Problem(422, "a column must have a value for each item", places)
            read = self._columns(columns, len(ids)) if query.context is UNSET else None
            read = read or self._merged(ids, columns, defaults, lambda *each: prefix + _place_in_columns(*each))
        numbers = None if given.count(None) == len(given) else np.array(given, dtype=np.float32)  # NaN for None
        value, known = self.values(ids, numbers)
        return CandidateArrays(*read, value, np.array([0, len(ids)])), known

    def _rows(self, features: Sequence[Any]) -> Features | None:
        """Read features that are complete; None if one is absent or too large."""
        F, pack = len(self.numeric), self._pack
        texts: list[list[str]] = []
        try:
            rows = [astuple(each) for each in features]
            if self.categorical:
                texts = [[category_text(each) for each in row[F:]] for row in rows]
                rows = [row[:F] for row in rows]
            try:
                packed = [pack(*row) for row in rows]
            except struct.error:  # None somewhere
                packed = [pack(*[_nan_if_none(each) for each in row]) for row in rows]
        except (TypeError, OverflowError, struct.error):
            return None
        numeric = np.frombuffer(b"".join(packed), dtype=np.float32).reshape(len(rows), F)
        return numeric, np.array(texts, dtype=object).reshape(len(rows), len(self.categorical))

    def _columns(self, columns: Sequence[Column], n: int) -> Features | None:
        """Read columns that are complete; None if a number is absent, missing or too large."""
        F, pack = len(self.numeric), struct.Struct(f"={n}f").pack
        try:
            packed = [pack(*column) for column in columns[:F]]  # type: ignore[misc]
            texts = [[category_text(each) for each in column] for column in columns[F:]]  # type: ignore[union-attr]
        except (TypeError, OverflowError, struct.error):
            return None
        numeric = np.ascontiguousarray(np.frombuffer(b"".join(packed), dtype=np.float32).reshape(F, n).T)
        return numeric, np.ascontiguousarray(np.array(texts, dtype=object).reshape(len(self.categorical), n).T)

    def _context(self, context: Any, prefix: str) -> Sequence[Any]:
        """Return the features of a context, `UNSET` if absent."""
        values: tuple[Any, ...] = astuple(context)
        for name, each in zip(self.numeric, values, strict=False):
            if isinstance(each, float) and abs(each) >= FLOAT32_BOUND:
                raise _too_large(f"{prefix}context.{name}")
        return values

    def _merged(
        self, ids: Ids, columns: Sequence[Column], defaults: Sequence[Any], place: Callable[[int, str | None], str]
    ) -> Features:
        """Fill what is absent in columns by the defaults and the store.

        Args:
            columns: A column for each feature; it or its values may be `UNSET`.
            defaults: A value for each feature, or `UNSET`.
            place: Returns the location of a feature of a row, or of its id.
        """
        names, F = (*self.numeric, *self.categorical), len(self.numeric)
        absent = [column is UNSET or UNSET in column for column in columns]
        unfilled = [each and default is UNSET for each, default in zip(absent, defaults, strict=True)]
        known = set() if self.items is None else {*self.items.columns, *self.items.categories}
        errors = (
            (place(row, name), _REQUIRED)
            for name, column, each in zip(names, columns, unfilled, strict=True)
            if each and name not in known
            for row in ([0] if column is UNSET else [row for row, value in enumerate(column) if value is UNSET])
        )
        if first_errors := list(islice(errors, MAX_ERRORS)):
            raise Problem(422, NOT_THE_FEATURES, first_errors)
        if any(unfilled):
            numeric, categorical = self.stored(ids, lambda row: place(row, None))
        else:
            numeric, categorical = np.empty((len(ids), F), np.float32), np.empty((len(ids), len(names) - F), object)
        for number, (name, column, default) in enumerate(zip(names, columns, defaults, strict=True)):
            is_number = number < F
            convert: Any = _nan_if_none if is_number else category_text
            target = numeric[:, number] if is_number else categorical[:, number - F]
            if default is not UNSET:
                target[:] = convert(default)
            if column is UNSET:
                continue
            with np.errstate(over="ignore"):  # numbers that are too large become infinite
                if not absent[number]:
                    target[:] = [convert(each) for each in column]
                else:
                    for row in (row for row, each in enumerate(column) if each is not UNSET):
                        target[row] = convert(column[row])
            if is_number and np.isinf(target).any():
                raise _too_large(place(int(np.isinf(target).argmax()), name))
        return numeric, categorical

    @cached_property
    def _pack(self) -> Callable[..., bytes]:
        return struct.Struct(f"={len(self.numeric)}f").pack


def _item_ids(query: RankQuery | ExplainQuery, prefix: str) -> list[str]:
    """Return the ids of a list; refuse one in both forms or none, and repeated items."""
    columns = {"item_id": query.item_id, "features": query.features, "value": query.value}
    extra = [name for name, each in columns.items() if each is not UNSET and query.candidates is not UNSET]
    if extra:
        detail = "a list consists of candidates, or of the columns item_id, features and value"
        raise Problem(422, detail, [(f"{prefix}{extra[0]}", "is present beside candidates")])
    if query.candidates is not UNSET:
        ids = [each.item_id for each in query.candidates]
    elif query.item_id is not UNSET:
        ids = query.item_id
    else:
        raise Problem(422, "a list needs candidates, or the column item_id", [(f"{prefix}candidates", "is required")])
    if len(set(ids)) != len(ids):
        place = _place_in_columns if query.candidates is UNSET else _place_in_candidates
        first: dict[str, int] = {}
        row = next(row for row, each in enumerate(ids) if first.setdefault(each, row) != row)
        places = [(prefix + place(row, None), f"is the same as {prefix}{place(first[ids[row]], None)}")]
        raise Problem(422, "an item must occur only once in a list", places)
    return ids


def _transposed(candidates: Sequence[Candidate], width: int) -> list[tuple[Any, ...]]:
    """Return the column of each feature, with `UNSET` where one is absent."""
    absent = (UNSET,) * width
    return list(
        zip(*(absent if each.features is UNSET else astuple(each.features) for each in candidates), strict=True)
    )


def _place_in_candidates(row: int, name: str | None) -> str:
    return f"candidates.{row}.item_id" if name is None else f"candidates.{row}.features.{name}"


def _place_in_columns(row: int, name: str | None) -> str:
    return f"item_id.{row}" if name is None else f"features.{name}"


def _concatenated(parts: Sequence[CandidateArrays]) -> CandidateArrays:
    return CandidateArrays(
        np.concatenate([each.numeric for each in parts]),
        np.concatenate([each.categorical for each in parts]),
        np.concatenate([each.value for each in parts]),
        np.cumsum([0, *map(len, parts)]),
    )


def _check_sizes(lengths: Sequence[int], limits: Limits) -> None:
    if len(lengths) > limits.queries:
        raise Problem(422, f"a batch has at most {limits.queries} queries; got {len(lengths)}")
    if (total := sum(lengths)) > limits.rows:
        raise Problem(422, f"a batch has at most {limits.rows} candidates in total; got {total}")
    if (longest := max(lengths)) > limits.candidates:
        raise Problem(422, f"a query has at most {limits.candidates} candidates; got {longest}")


def _too_large(place: str) -> Problem:
    return Problem(422, NOT_THE_FEATURES, [(place, "must be a number that fits 32 bits, or null")])


def _nan_if_none(value: float | None) -> float:
    return _NAN if value is None else value


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


_MAX_MESSAGES = 10_000
_LIST_COLUMNS = ("user_id", "positions", "method")

# Type ids, since `pa.types.is_*` is slow for hundreds of columns.
_TEXT_TYPES = frozenset({pa.string().id, pa.large_string().id})
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_NUMBER_TYPES = frozenset(kind.id for kind in (*_INTEGERS, pa.float16(), pa.float32(), pa.float64(), pa.null()))
_TYPES = _TEXT_TYPES | _NUMBER_TYPES | {pa.bool_().id}  # of views, many rows could share one text


def read_arrow(body: bytes, reader: CandidateReader) -> RequestLists:
    """Read the lists of an Arrow stream, under the same rules as JSON."""
    table = _read_table(body, reader, ("query_id", "item_id"), (*_LIST_COLUMNS, "value"))
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
    value, has_values = reader.values(item_ids, _values(table))
    return RequestLists(
        query_ids=query_ids,
        user_ids=_first_texts(table, "user_id", first),
        positions=_positions(table, first),
        methods=[_method(each) for each in _first_texts(table, "method", first)],
        item_ids=item_ids,
        items=CandidateArrays(*_arrow_features(table, item_ids, reader), value, offsets),
        has_values=[has_values] * len(first),
        batch=False,  # errors are located by column, whatever the number of lists
    )


def _arrow_features(table: pa.Table, item_ids: Ids, reader: CandidateReader) -> Features:
    """Return the features of a table, those that it lacks from the store."""
    given = set(table.column_names)  # the property builds a new list on each access
    numeric = [name for name in reader.numeric if name in given]
    categorical = [name for name in reader.categorical if name in given]
    numbers, texts = _numeric_matrix(table, numeric), _categories(table, categorical)
    if len(numeric) == len(reader.numeric) and len(categorical) == len(reader.categorical):
        return numbers, texts
    stored = reader.stored(item_ids, lambda row: f"item_id.{row}")
    stored[0][:, [reader.numeric.index(name) for name in numeric]] = numbers
    stored[1][:, [reader.categorical.index(name) for name in categorical]] = texts
    return stored


def read_items(body: bytes, reader: CandidateReader) -> pl.DataFrame:
    """Read the items of an Arrow stream for `item_store.put_items`; features that it lacks are missing."""
    table = _read_table(body, reader, ("item_id",), ("value",), complete=False)
    ids, value = _texts(table, "item_id"), _values(table)
    return _items_frame(ids, _arrow_features(table, ids, replace(reader, items=None)), value, reader)


def items_of(candidates: Sequence[Candidate], reader: CandidateReader) -> pl.DataFrame:
    """Convert the items of a JSON body likewise."""
    ids = [each.item_id for each in candidates]
    width = len(reader.numeric) + len(reader.categorical)
    features = reader._merged(
        ids, _transposed(candidates, width), (None,) * width, lambda row, name: f"items.{row}.features.{name}"
    )
    given = np.array([each.value for each in candidates], dtype=np.float32)
    return _items_frame(ids, features, None if np.isnan(given).all() else given, reader)


def _items_frame(
    ids: Ids, features: Features, value: NDArray[np.float32] | None, reader: CandidateReader
) -> pl.DataFrame:
    if len(set(ids)) != len(ids):
        raise Problem(422, "an item must occur only once", [("item_id", "occurs twice")])
    numeric, categorical = features
    texts = {name: pl.Series(categorical[:, number], dtype=pl.String) for number, name in enumerate(reader.categorical)}
    frame = pl.DataFrame(
        {
            "item_id": pl.Series(ids, dtype=pl.String),
            **{name: numeric[:, number] for number, name in enumerate(reader.numeric)},
            **{name: each.replace(MISSING, None) for name, each in texts.items()},
        }
    )
    return (frame if value is None else frame.with_columns(value=pl.Series(value))).fill_nan(None)


def _read_table(
    body: bytes, reader: CandidateReader, needed: Sequence[str], optional: Sequence[str], *, complete: bool = True
) -> pa.Table:
    """Read the columns of a stream that are used, as numbers, booleans and plain strings.

    Args:
        needed, optional: Names of the columns beside the features.
        complete: Whether all features are needed that the item store lacks.
    """
    try:
        _refuse_inflating(body)
        with pa.ipc.open_stream(pa.BufferReader(body)) as stream:
            table = stream.read_all()
        table.validate()
        stored = set() if reader.items is None else {*reader.items.columns, *reader.items.categories}
        features = (*reader.numeric, *reader.categorical)
        needed = (*needed, *(name for name in features if complete and name not in stored))
        table = _used_columns(table, reader, needed, (*optional, *features))
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError, struct.error):
        raise Problem(400, "the body is not an Arrow IPC stream") from None
    return table.combine_chunks()


def _used_columns(table: pa.Table, reader: CandidateReader, needed: Sequence[str], optional: Sequence[str]) -> pa.Table:
    if table.num_rows == 0:
        raise Problem(422, "a stream needs at least one row")
    if table.num_rows > reader.limits.rows:
        raise Problem(422, f"a stream has at most {reader.limits.rows} rows; got {table.num_rows}")
    names = dict.fromkeys(table.column_names)
    if len(names) != table.num_columns:
        raise Problem(422, "column names must be unique")
    known = dict.fromkeys((*needed, *optional))
    errors = [(name, "is required") for name in needed if name not in names]
    if not reader.ignore_unknown:
        errors += [(name[:100], "is not a feature of the model") for name in names if name not in known]
    if errors:
        raise Problem(422, "the columns are not those of the model; see /v1/model", sorted(errors))
    table = table.select([name for name in known if name in names])
    for field in table.schema:
        if field.type.id not in _TYPES:
            raise Problem(422, "a column must have numbers, booleans or strings", [(field.name, _is_type(field.type))])
    return table


def _refuse_inflating(body: bytes) -> None:
    """Refuse dictionaries and compressed buffers, of which a few bytes may expand to gigabytes.

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
        if message.type == "dictionary":
            raise Problem(415, "an Arrow IPC stream must have plain strings instead of dictionaries")
        if message.type != "schema" and batch is not None and _flatbuffer_table(header, batch, 3) is not None:
            raise Problem(415, "an Arrow IPC stream must not be compressed")


def _flatbuffer_table(buffer: bytes, table: int, field: int) -> int | None:
    """Return the offset of the table that is a field of another; None if the field is absent."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    size = struct.unpack_from("<H", buffer, vtable)[0]
    offset = struct.unpack_from("<H", buffer, vtable + 4 + 2 * field)[0] if 4 + 2 * field < size else 0
    return int(table + offset + struct.unpack_from("<I", buffer, table + offset)[0]) if offset else None


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
        if (series.str.len_chars() > MAX_CATEGORY).any():
            raise Problem(422, f"a category has at most {MAX_CATEGORY} characters", [(name, "is too long")])
        texts[:, place] = series.fill_null(MISSING).to_list()
    return texts


def _values(table: pa.Table) -> NDArray[np.float32] | None:
    """Return the values, NaN if one is missing; None without values."""
    if "value" not in table.column_names:
        return None
    values = _matrix(table.select(["value"]))[:, 0].copy()
    known = pc.is_valid(table["value"]).to_numpy()
    if not ((values >= 0) & (values <= MAX_VALUE) | ~known).all():
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
