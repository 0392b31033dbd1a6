"""An Arrow IPC stream from outside as a table: uncompressed, no larger than it looks, in columns that are asked for."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from urank.serve.bodies import Limits
from urank.serve.items import Reader
from urank.serve.problems import Problem

__all__ = ["is_number", "is_text", "read_stream"]

_MOST_MESSAGES = 10_000
_OWN = ("query_id", "item_id", "value", "user_id", "positions", "method")

# Kinds of columns by number, which is looked up faster than asked for by name when there are hundreds of columns.
_TEXTS = frozenset(kind.id for kind in (pa.string(), pa.large_string(), pa.string_view()))
_WHOLE = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_NUMBERS = frozenset(kind.id for kind in (*_WHOLE, pa.float16(), pa.float32(), pa.float64(), pa.null()))
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
