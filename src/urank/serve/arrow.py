"""Arrow IPC bodies, for many candidates: a column for each feature is an array as it lies, and nothing is parsed.

In: one stream with `query_id`, `item_id`, the features, and optionally `value`, `user_id`, `positions` and `method`.
The rows of a list lie together, and what belongs to a list is that of its first row. Out: one stream with `ranking_id`,
`query_id`, `item_id`, `position`, `score`, `click`, `utility`, `method`, `policy`, `arm` and `model`, best first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from urank.log.cells import feature_expr
from urank.log.lists import offsets_of_runs
from urank.rankers.order import METHODS, Method
from urank.serve.bodies import MAX_POSITIONS, MAX_TEXT, MAX_VALUE, Limits
from urank.serve.items import Lists, Reader, check_sizes
from urank.serve.problems import Problem
from urank.serve.ranking import Shown
from urank.serve.runtime import MISSING, Items

__all__ = ["ARROW_TYPE", "read_lists", "write_rankings"]

ARROW_TYPE = "application/vnd.apache.arrow.stream"
_MOST_MESSAGES = 10_000
_OWN = ("query_id", "item_id", "value", "user_id", "positions", "method")

# Kinds of columns by number, which is looked up faster than asked for by name when there are hundreds of columns.
_FLOAT = pa.float32().id
_TEXTS = frozenset(kind.id for kind in (pa.string(), pa.large_string(), pa.string_view()))
_WHOLE = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_NUMBERS = frozenset(kind.id for kind in (*_WHOLE, pa.float16(), pa.float32(), pa.float64(), pa.null()))
_SHARED = frozenset({pa.string_view().id, pa.dictionary(pa.int8(), pa.string()).id})


def read_lists(body: bytes, reader: Reader) -> Lists:
    """The lists of a stream.

    Raises:
        Problem: when it is no stream, or breaks a rule that a JSON body has to obey too.
    """
    table = _read(body, reader)
    queries = _texts(table, "query_id")
    items = _texts(table, "item_id")
    offsets = offsets_of_runs(_codes(table["query_id"]))
    check_sizes(np.diff(offsets).tolist(), reader.limits)
    first = offsets[:-1].tolist()
    query_ids = [queries[row] for row in first]
    if len(set(query_ids)) != len(query_ids):
        raise Problem(422, "the rows of a query must lie together", [("query_id", "comes back after another")])
    _check_items(table, items, offsets)
    return Lists(
        query_ids=query_ids,
        user_ids=_firsts(table, "user_id", first),
        positions=_positions(table, first),
        methods=[_method(each) for each in _firsts(table, "method", first)],
        item_ids=items,
        items=_items(table, reader, offsets),
        valued=[_has(table, "value")] * len(first),
    )


def write_rankings(shown: Sequence[Shown], lists: Lists, ranking_ids: Sequence[str]) -> bytes:
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


def _read(body: bytes, reader: Reader) -> pa.Table:
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
        kind = pa.large_string() if _is_text(column.type.value_type) else column.type.value_type
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
        if not (_is_number(kind) or _is_text(kind) or pa.types.is_boolean(kind)):
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
    if len(texts) == 0 or not _is_text(texts.type):
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
        if not _is_number(field.type):
            raise Problem(422, "a numeric feature needs numbers", [(field.name, f"is {str(field.type)[:60]}")])
    if table.num_columns == 0:
        return np.empty((table.num_rows, 0), dtype=np.float32)
    if any(field.type.id != _FLOAT for field in table.schema):
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
    elif not _is_text(column.type):
        raise Problem(422, f"{name} must be text or whole numbers", [(name, f"is {str(column.type)[:60]}")])
    texts: list[str] = column.to_pylist()
    if column.null_count or not 0 < min(map(len, texts)) <= max(map(len, texts)) <= MAX_TEXT:
        raise Problem(422, f"{name} must have 1 to {MAX_TEXT} characters everywhere", [(name, "is empty or too long")])
    return texts


def _has(table: pa.Table, name: str) -> bool:
    return bool(table.schema.get_field_index(name) >= 0)


def _is_text(kind: pa.DataType) -> bool:
    return kind.id in _TEXTS


def _is_number(kind: pa.DataType) -> bool:
    return kind.id in _NUMBERS


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
