"""Arrow IPC bodies, for many candidates: a column for each feature is an array as it lies, and nothing is parsed.

In: one stream with `query_id`, `item_id`, the features, and optionally `value`, `user_id`, `positions` and `method`.
The rows of a list lie together, and what belongs to a list is that of its first row. Out: one stream with `ranking_id`,
`query_id`, `item_id`, `position`, `score`, `click`, `utility`, `method`, `policy`, `arm` and `model`, best first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from urank.ranking.positions import METHODS, Method
from urank.serve.models import MISSING, Items
from urank.serve.schemas import (
    MAX_POSITIONS,
    MAX_TEXT,
    MAX_VALUE,
    MOST_ERRORS,
    Candidate,
    ExplainQuery,
    Limits,
    Problem,
    RankQuery,
)

if TYPE_CHECKING:
    from urank.serve.ranking import RankedList

__all__ = [
    "ARROW_TYPE",
    "Reader",
    "RequestLists",
    "category_text",
    "check_sizes",
    "is_number",
    "is_text",
    "read_lists",
    "read_stream",
    "write_rankings",
]

_NAN = float("nan")
_WHOLE = 2.0**63  # the log knows whole numbers below
Row = Mapping[str, Any]
Named = Sequence[tuple[str, Sequence[Candidate[Any]]]]


@dataclass(frozen=True, eq=False)
class RequestLists:
    """The lists of a request.

    Attributes:
        query_ids, user_ids, positions, methods: of each list; None where the request does not say.
        item_ids: of each row of `items`.
        items: the candidates of all lists.
        valued: whether each list came with values.
        batch: whether the places of refusals are those in a batch, though it may have but one list.
    """

    query_ids: Sequence[str]
    user_ids: Sequence[str | None]
    positions: Sequence[int | None]
    methods: Sequence[Method | None]
    item_ids: Sequence[str]
    items: Items
    valued: Sequence[bool]
    batch: bool = True

    def __len__(self) -> int:
        return len(self.query_ids)


class Reader:
    """Turns candidates into arrays for models with these features.

    Args:
        numeric, categorical: the names of the features, in the order of the arrays.
        ignore_unknown: let candidates bring other features too.
    """

    def __init__(
        self, numeric: Sequence[str], categorical: Sequence[str], limits: Limits, *, ignore_unknown: bool = False
    ) -> None:
        self.numeric = tuple(numeric)
        self.categorical = tuple(categorical)
        self.limits = limits
        self.ignore_unknown = ignore_unknown
        self._numbers = _getter(self.numeric)
        self._texts = _getter(self.categorical)
        self._pack = struct.Struct(f"={len(self.numeric)}f").pack

    def lists(self, queries: Sequence[RankQuery[Any]], *, batch: bool) -> RequestLists:
        """The lists of a request; `batch` tells how its refusals name their places.

        Raises:
            Problem: when there are too many, an id occurs twice in a list, or the features are not those of the model.
        """
        named = [(f"queries.{number}." if batch else "", query.candidates) for number, query in enumerate(queries)]
        return RequestLists(
            query_ids=[query.query_id for query in queries],
            user_ids=[query.user_id for query in queries],
            positions=[query.positions for query in queries],
            methods=[query.method for query in queries],
            item_ids=[candidate.item_id for _, candidates in named for candidate in candidates],
            items=self._items(named),
            valued=[any(each.value is not None for each in candidates) for _, candidates in named],
            batch=batch,
        )

    def list_of(self, query: ExplainQuery[Any]) -> RequestLists:
        """The one list of a request to explain."""
        asked = RankQuery[Any].model_construct(
            query_id=query.query_id or "",
            user_id=None,
            positions=query.positions,
            method=None,
            candidates=query.candidates,
        )
        return self.lists([asked], batch=False)

    def _items(self, named: Named) -> Items:
        for before, candidates in named:
            check_sizes([len(candidates)], self.limits, before)
            _check_ids(before, [candidate.item_id for candidate in candidates])
        check_sizes([len(candidates) for _, candidates in named], self.limits)
        rows = [candidate.features for _, candidates in named for candidate in candidates]
        try:
            numeric, categorical = self._numeric(rows), self._categorical(rows)
        except (KeyError, TypeError, ValueError, OverflowError, struct.error):
            raise self._wrong_features(named) from None
        width = len(self.numeric) + len(self.categorical)
        if not self.ignore_unknown and any(len(row) != width for row in rows):
            raise self._wrong_features(named)
        values = [candidate.value for _, candidates in named for candidate in candidates]
        value = np.array([1.0 if each is None else each for each in values], dtype=np.float32)
        return Items(numeric, categorical, value, np.cumsum([0, *(len(candidates) for _, candidates in named)]))

    def _numeric(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        pack, numbers = self._pack, self._numbers
        if self.categorical:  # the parser let text and booleans pass
            packed = [pack(*[_number(each) for each in numbers(row)]) for row in rows]
        else:
            try:
                packed = [pack(*numbers(row)) for row in rows]
            except struct.error:  # something is missing
                packed = [pack(*[_NAN if each is None else each for each in numbers(row)]) for row in rows]
        return np.frombuffer(b"".join(packed), dtype=np.float32).reshape(len(rows), len(self.numeric))

    def _categorical(self, rows: Sequence[Row]) -> NDArray[np.object_]:
        texts = np.empty((len(rows), len(self.categorical)), dtype=object)
        if self.categorical:
            texts[:] = [[category_text(each) for each in self._texts(row)] for row in rows]
        return texts

    def _wrong_features(self, named: Named) -> Problem:
        """Which candidate has which feature wrong, from the first one on."""
        errors: list[tuple[str, str]] = []
        for before, candidates in named:
            for number, candidate in enumerate(candidates):
                place = f"{before}candidates.{number}.features"
                errors += [(f"{place}.{name}", problem) for name, problem in self._wrong(candidate.features)]
                if len(errors) >= MOST_ERRORS:
                    break
        return Problem(422, "the features are not those of the model; see /v1/model", errors)

    def _wrong(self, row: Row) -> list[tuple[str, str]]:
        known = {*self.numeric, *self.categorical}
        wrong = [(name, "is needed; send null where it is missing") for name in known.difference(row)]
        if not self.ignore_unknown:
            wrong += [(name[:100], "is not a feature of the model") for name in row if name not in known]
        for name in self.numeric:
            if name in row and not _fits(row[name]):
                wrong.append((name, "must be a number that fits 32 bits, or null"))
        return sorted(wrong)


def check_sizes(lengths: Sequence[int], limits: Limits, before: str = "") -> None:
    """Refuse more lists, or longer ones, than the limits allow."""
    if len(lengths) > limits.queries:
        raise Problem(422, f"a batch has at most {limits.queries} queries; got {len(lengths)}")
    if (total := sum(lengths)) > limits.rows:
        raise Problem(422, f"a batch has at most {limits.rows} candidates in all; got {total}")
    if (longest := max(lengths)) > limits.candidates:
        places = [(f"{before}candidates", f"at most {limits.candidates}")]
        raise Problem(422, f"a query has at most {limits.candidates} candidates; got {longest}", places)


def _check_ids(before: str, ids: Sequence[str]) -> None:
    """Refuse an item that stands in a list twice."""
    if len(set(ids)) == len(ids):
        return
    seen: dict[str, int] = {}
    for number, each in enumerate(ids):
        if each in seen:
            places = [(f"{before}candidates.{number}.item_id", f"is also that of {before}candidates.{seen[each]}")]
            raise Problem(422, "an item may stand in a list once", places)
        seen[each] = number


def category_text(value: str | bool | float | None) -> str:
    """A category as the log has it: whole numbers without a point, booleans in lower case.

    >>> [category_text(each) for each in ("red", 3.0, 2.5, True)]
    ['red', '3', '2.5', 'true']
    """
    if isinstance(value, str):
        return value
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (abs(value) < _WHOLE and value == int(value)):
        return str(int(value))
    return str(pl.Series([value]).cast(pl.String)[0])  # as Polars writes it, which reads the log


def _number(value: Any) -> float:
    if value is None:
        return _NAN
    if isinstance(value, str | bool):
        raise TypeError
    return float(value)


def _fits(value: Any) -> bool:
    """Whether a value is a number of 32 bits, or missing."""
    try:
        struct.pack("=f", _number(value))
    except (TypeError, OverflowError):
        return False
    return True


def _getter(names: Sequence[str]) -> Callable[[Row], tuple[Any, ...]]:
    """Picks the values of these names, always as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda row: tuple(row[name] for name in names)


_MOST_MESSAGES = 10_000
_OWN = ("query_id", "item_id", "value", "user_id", "positions", "method")

# Kinds of columns by number, which is looked up faster than asked for by name when there are hundreds of columns.
_TEXTS = frozenset(kind.id for kind in (pa.string(), pa.large_string(), pa.string_view()))
_WHOLE_ARROW_STREAM = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_NUMBERS = frozenset(kind.id for kind in (*_WHOLE_ARROW_STREAM, pa.float16(), pa.float32(), pa.float64(), pa.null()))
_SHARED = frozenset({pa.string_view().id, pa.dictionary(pa.int8(), pa.string()).id})


def read_stream(body: bytes, reader: Reader) -> pa.Table:
    """The rows of a stream, in columns of numbers, booleans or texts; others than those asked for are left out."""
    try:
        _refuse_compressed(body)
        with pa.ipc.open_stream(pa.BufferReader(body)) as stream:
            table = stream.read_all()
        table.validate()
        table = _named(table, reader)
        _refuse_inflated(table, reader.limits)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError, struct.error):
        raise Problem(400, "the body is not an Arrow IPC stream") from None
    if any(field.type.id in _SHARED for field in table.schema):
        table = pa.table([_decoded(column) for column in table.columns], table.column_names)
    return table.combine_chunks()


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without dictionaries, and without views, which not all of Arrow's functions know."""
    if pa.types.is_dictionary(column.type):
        kind = pa.large_string() if is_text(column.type.value_type) else column.type.value_type
        return pa.chunked_array([_as(kind, chunk.dictionary).take(chunk.indices) for chunk in column.chunks], kind)
    if pa.types.is_string_view(column.type):
        return pa.chunked_array([_as(pa.large_string(), chunk) for chunk in column.chunks], pa.large_string())
    return column


def _as(kind: pa.DataType, array: pa.Array) -> pa.Array:
    """An array of this kind.

    What a view says where the text is missing is not validated, but Arrow's cast follows it all the same, out of the
    body and out of the process. So texts with gaps go through Python.
    """
    if pa.types.is_string_view(array.type) and array.null_count:
        return pa.array(array.to_pylist(), kind)
    return array.cast(kind)


def _named(table: pa.Table, reader: Reader) -> pa.Table:
    """The columns that are asked for, if all of them are there."""
    if table.num_rows == 0:
        raise Problem(422, "a stream needs at least one candidate")
    if table.num_rows > reader.limits.rows:
        raise Problem(422, f"a batch has at most {reader.limits.rows} candidates in all; got {table.num_rows}")
    names, needed = dict.fromkeys(table.column_names), ("query_id", "item_id", *reader.numeric, *reader.categorical)
    if len(names) != table.num_columns:
        raise Problem(422, "a column may be there once")
    known = dict.fromkeys((*needed, *_OWN))
    errors = [(name, "is needed") for name in needed if name not in names]
    if not reader.ignore_unknown:
        errors += [(name[:100], "is not a feature of the model") for name in names if name not in known]
    if errors:
        raise Problem(422, "the columns are not those of the model; see /v1/model", sorted(errors))
    return table.select([name for name in known if name in names])


def _refuse_compressed(body: bytes) -> None:
    """Refuse streams with compressed buffers, of which a few bytes may stand for gigabytes.

    PyArrow does not tell, so the field `compression` of each RecordBatch (Arrow's Message.fbs describes it) is looked
    up in the flatbuffer of its message. Before version 5 a note beside the message could say it too.
    """
    for number, message in enumerate(pa.ipc.MessageReader.open_stream(pa.BufferReader(body))):
        if number == _MOST_MESSAGES:
            raise Problem(422, f"a stream has at most {_MOST_MESSAGES} messages; send more rows in each")
        if message.metadata_version < pa.ipc.MetadataVersion.V5:
            raise Problem(415, "an Arrow IPC stream must be of metadata version 5, which Arrow has written since 1.0")
        header = message.metadata.to_pybytes()
        root = struct.unpack_from("<I", header, 0)[0]
        batch = _flatbuffer_table(header, root, 2)
        if message.type == "dictionary" and batch is not None:
            batch = _flatbuffer_table(header, batch, 1)
        if message.type != "schema" and batch is not None and _flatbuffer_table(header, batch, 3) is not None:
            raise Problem(415, "an Arrow IPC stream must not be compressed")


def _refuse_inflated(table: pa.Table, limits: Limits) -> None:
    """Refuse texts that are longer in all than a body may be: a dictionary, or a view, lets many rows share one."""
    total = 0
    for place, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if not (is_number(kind) or is_text(kind) or pa.types.is_boolean(kind)):
            raise Problem(422, "a column must hold numbers or texts", [(field.name, f"is {str(field.type)[:60]}")])
        if field.type.id not in _SHARED:
            continue
        for chunk in table.column(place).chunks:
            if pa.types.is_dictionary(chunk.type):
                total += int(_lengths(chunk.dictionary).sum())
                lengths = pa.array(_lengths(chunk.dictionary)).take(chunk.indices)
                total += pc.sum(lengths).as_py() or 0
            elif pa.types.is_string_view(chunk.type):
                total += int(_lengths(chunk).sum())
    if total > limits.body_bytes:
        raise Problem(413, f"the texts of a stream have at most {limits.body_bytes} bytes in all, as a body has")


def _lengths(texts: pa.Array) -> NDArray[np.int64]:
    """The bytes of each text, or what is no less; 0 for what is no text."""
    if len(texts) == 0 or not is_text(texts.type):
        return np.zeros(len(texts), dtype=np.int64)
    if pa.types.is_string_view(texts.type):
        views = np.frombuffer(texts.buffers()[1], dtype=np.int32)[: 4 * (texts.offset + len(texts))]
        return np.abs(views.reshape(-1, 4)[texts.offset :, 0].astype(np.int64))
    lengths: NDArray[Any] = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    return np.abs(lengths.astype(np.int64))


def _flatbuffer_table(buffer: bytes, table: int, field: int) -> int | None:
    """Where the table that is a field of another begins; none when the field is not there."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    size = struct.unpack_from("<H", buffer, vtable)[0]
    if 4 + 2 * field >= size:
        return None
    offset = struct.unpack_from("<H", buffer, vtable + 4 + 2 * field)[0]
    if offset == 0:
        return None
    start = table + offset
    return int(start + struct.unpack_from("<I", buffer, start)[0])


def is_text(kind: pa.DataType) -> bool:
    return kind.id in _TEXTS


def is_number(kind: pa.DataType) -> bool:
    return kind.id in _NUMBERS


ARROW_TYPE = "application/vnd.apache.arrow.stream"


def read_lists(body: bytes, reader: Reader) -> RequestLists:
    """The lists of a stream.

    Raises:
        Problem: when it is no stream, or breaks a rule that a JSON body has to obey too.
    """
    table = read_stream(body, reader)
    queries = _texts(table, "query_id")
    items = _texts(table, "item_id")
    offsets = offsets_of_runs(_codes(table["query_id"]))
    check_sizes(np.diff(offsets).tolist(), reader.limits)
    first = offsets[:-1].tolist()
    query_ids = [queries[row] for row in first]
    if len(set(query_ids)) != len(query_ids):
        raise Problem(422, "the rows of a query must lie together", [("query_id", "comes back after another")])
    _check_items(table, items, offsets)
    return RequestLists(
        query_ids=query_ids,
        user_ids=_firsts(table, "user_id", first),
        positions=_positions(table, first),
        methods=[_method(each) for each in _firsts(table, "method", first)],
        item_ids=items,
        items=_items(table, reader, offsets),
        valued=[_has(table, "value")] * len(first),
        batch=False,  # what is wrong is a column, whatever the number of lists
    )


def write_rankings(shown: Sequence[RankedList], lists: RequestLists, ranking_ids: Sequence[str]) -> bytes:
    """The stream of an answer."""
    lengths = [len(each.rows) for each in shown]

    def repeated(texts: Iterable[str | None]) -> pa.Array:
        pairs = zip(texts, lengths, strict=True)
        return pa.array([text for text, length in pairs for _ in range(length)], pa.string())

    scores = [np.full(len(each.rows), np.nan, np.float32) if each.score is None else each.score for each in shown]
    score, click = np.concatenate(scores), np.concatenate([each.click for each in shown])
    columns = {
        "ranking_id": repeated(ranking_ids),
        "query_id": repeated(lists.query_ids[each.number] for each in shown),
        "item_id": pa.array([lists.item_ids[row] for each in shown for row in each.rows.tolist()], pa.string()),
        "position": pa.array([k for length in lengths for k in range(1, length + 1)], pa.int32()),
        "score": pa.array(score, mask=np.isnan(score)),
        "click": pa.array(click, mask=np.isnan(click)),
        "utility": pa.array(np.concatenate([each.utility for each in shown])),
        "method": repeated(each.method for each in shown),
        "policy": repeated(each.policy for each in shown),
        "arm": repeated(each.arm for each in shown),
        "model": repeated(each.model.version for each in shown),
    }
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def _items(table: pa.Table, reader: Reader, offsets: NDArray[np.int64]) -> Items:
    numeric = _matrix(table.select(list(reader.numeric)))
    if np.isinf(numeric).any():
        place = int(np.isinf(numeric).any(axis=0).argmax())
        raise Problem(422, "numbers must be finite and fit 32 bits", [(reader.numeric[place], "is infinite")])
    categorical = np.empty((table.num_rows, len(reader.categorical)), dtype=object)
    for place, name in enumerate(reader.categorical):
        categorical[:, place] = _categories(table, name)
    return Items(numeric, categorical, _values(table), offsets)


def _matrix(table: pa.Table) -> NDArray[np.float32]:
    """Columns of numbers `[rows, columns]`, NaN where one is missing, infinite where one does not fit 32 bits."""
    for field in table.schema:
        if not is_number(field.type):
            raise Problem(422, "a numeric feature needs numbers", [(field.name, f"is {str(field.type)[:60]}")])
    if table.num_columns == 0:
        return np.empty((table.num_rows, 0), dtype=np.float32)
    if any(field.type.id != pa.float32().id for field in table.schema):
        table = table.cast(pa.schema([(name, pa.float32()) for name in table.column_names]), safe=False)
    batch = table.combine_chunks().to_batches()[0]
    return np.ascontiguousarray(batch.to_tensor(null_to_nan=True).to_numpy())


def _categories(table: pa.Table, name: str) -> list[str]:
    column = table[name]
    kind = column.type
    if pa.types.is_floating(kind) and pc.any(pc.is_inf(column)).as_py():
        raise Problem(422, "numbers must be finite and fit 32 bits", [(name, "is infinite")])
    frame = pl.DataFrame({name: pl.Series(column)})
    texts = frame.select(feature_expr(name, name, None, frame.dtypes[0], categorical=True)).to_series()
    return texts.fill_null(MISSING).to_list()


def _values(table: pa.Table) -> NDArray[np.float32]:
    if not _has(table, "value"):
        return np.ones(table.num_rows, dtype=np.float32)
    values = _matrix(table.select(["value"]))[:, 0].copy()
    if table["value"].null_count:
        values[pc.is_null(table["value"]).to_numpy()] = 1.0
    if not ((values >= 0) & (values <= MAX_VALUE)).all():
        raise Problem(422, f"a value must be a finite number from 0 to {MAX_VALUE:g}", [("value", "is not")])
    return values


def _texts(table: pa.Table, name: str) -> list[str]:
    """A column of ids."""
    column = table[name]
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    elif not is_text(column.type):
        raise Problem(422, f"{name} must be text or whole numbers", [(name, f"is {str(column.type)[:60]}")])
    texts: list[str] = column.to_pylist()
    if column.null_count or not 0 < min(map(len, texts)) <= max(map(len, texts)) <= MAX_TEXT:
        raise Problem(422, f"{name} must have 1 to {MAX_TEXT} characters everywhere", [(name, "is empty or too long")])
    return texts


def _has(table: pa.Table, name: str) -> bool:
    return bool(table.schema.get_field_index(name) >= 0)


def _codes(column: pa.ChunkedArray) -> NDArray[Any]:
    """Numbers that are equal where the ids are."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _check_items(table: pa.Table, items: Sequence[str], offsets: NDArray[np.int64]) -> None:
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if len(set(items[start:end])) != end - start:
            raise Problem(422, "an item may stand in a list once", [("item_id", "occurs twice in a list")])


def _firsts(table: pa.Table, name: str, rows: Sequence[int]) -> list[str | None]:
    """What the first row of each list says."""
    if not _has(table, name) or pa.types.is_null(table[name].type):
        return [None] * len(rows)
    part = table.select([name]).take(pa.array(rows))
    if part[name].null_count == len(rows):
        return [None] * len(rows)
    if part[name].null_count:
        raise Problem(422, f"{name} must be there for all lists or for none", [(name, "is missing")])
    return list(_texts(part, name))


def _positions(table: pa.Table, rows: Sequence[int]) -> list[int | None]:
    if not _has(table, "positions") or pa.types.is_null(table["positions"].type):
        return [None] * len(rows)
    column = table["positions"]
    if not pa.types.is_integer(column.type):
        raise Problem(422, "positions must be whole numbers", [("positions", f"is {str(column.type)[:60]}")])
    found = [column[row].as_py() for row in rows]
    if any(each is not None and not 1 <= each <= MAX_POSITIONS for each in found):
        raise Problem(422, f"positions must be from 1 to {MAX_POSITIONS}", [("positions", "is not")])
    return found


def _method(text: str | None) -> Method | None:
    found = next((each for each in METHODS if each == text), None)
    if text is not None and found is None:
        raise Problem(422, f"method must be {', '.join(METHODS)}", [("method", "is none of them")])
    return found
