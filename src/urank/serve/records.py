"""Records as bytes.

A payload is a kind (one byte), the length of its head (32 bits), the head (JSON), and arrays as raw little-endian
numbers, the shapes of which the head tells. Nothing of it is ever run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from urank.errors import DataError
from urank.serve.record_types import (
    RANKING_ID,
    SEGMENT,
    Columns,
    FeedbackRecord,
    RankingRecord,
    Record,
    ShadowRecord,
    new_ranking_id,
    new_segment,
    segment_of,
)

__all__ = [
    "RANKING_ID",
    "SEGMENT",
    "Columns",
    "FeedbackRecord",
    "Kind",
    "RankingRecord",
    "Record",
    "ShadowRecord",
    "columns_from",
    "decode",
    "encode",
    "kind_of",
    "new_ranking_id",
    "new_segment",
    "segment_of",
]

_HEAD = struct.Struct("<BI")
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Kind(IntEnum):
    """The first byte of a payload."""

    columns = 1
    ranking = 2
    feedback = 3
    shadow = 4


def encode(record: Record) -> bytes:
    """The payload of a record.

    Raises:
        DataError: when a text holds half a character (a lone surrogate), which no file can hold.
    """
    match record:
        case RankingRecord():
            kind, head, arrays = Kind.ranking, _ranking_head(record), _arrays(record)
        case FeedbackRecord():
            kind, arrays = Kind.feedback, b""
            head = {"id": record.ranking_id, "item": record.item_id, "click": record.click}
            head |= {"conversion": record.conversion, "value": record.value, "time": record.time_us}
        case ShadowRecord():
            kind, arrays = Kind.shadow, b""
            head = {"id": record.ranking_id, "model": record.model, "time": record.time_us, "items": record.items}
        case Columns():
            kind, head, arrays = Kind.columns, record.to_dict(), b""
    try:
        text = _to_json(head).encode()
    except ValueError as error:
        raise DataError(f"a {kind.name} record must hold whole characters and finite numbers: {error}") from error
    return _HEAD.pack(kind, len(text)) + text + arrays


def _ranking_head(record: RankingRecord) -> dict[str, Any]:
    return {
        "id": record.ranking_id,
        "query": record.query_id,
        "user": record.user_id,
        "arm": record.arm,
        "policy": record.policy,
        "model": record.model,
        "columns": record.columns,
        "time": record.time_us,
        "items": record.items,
        "features": record.numeric.shape[1],
        "categorical": record.categorical,
        "value": record.value is not None,
        "ranked": record.ranked_position,
    }


def _arrays(record: RankingRecord) -> bytes:
    parts = [record.numeric.astype("<f4", copy=False).tobytes()]
    if record.value is not None:
        parts.append(record.value.astype("<f4", copy=False).tobytes())
    if record.propensity is not None:
        parts.append(record.propensity.astype("<f8", copy=False).tobytes())
    return b"".join(parts)


def kind_of(payload: bytes) -> int:
    """The kind of a payload by its first byte alone; 0 for none."""
    return payload[0] if payload else 0


def decode(payload: bytes) -> Record:
    """The record of a payload.

    Raises:
        DataError: when it is not what `encode` makes, whatever it is.
    """
    try:
        return _decode(payload)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise DataError(f"a record must be as the server wrote it; got {type(error).__name__}: {error}") from error


def _decode(payload: bytes) -> Record:
    kind, length = _HEAD.unpack_from(payload)
    start = _HEAD.size + length
    text, arrays = payload[_HEAD.size : start], memoryview(payload)[start:]
    if len(text) < length:
        raise DataError(f"the head of a record must have {length} bytes; got {len(text)}")
    head = json.loads(text.decode())
    if not isinstance(head, dict):
        raise DataError("the head of a record must be an object of JSON")
    if b"\\ud" in text.lower():  # perhaps half a character, written as an escape
        _to_json(head).encode()
    if kind == Kind.ranking:
        return _ranking(head, arrays)
    if len(arrays):
        raise DataError(f"a record of kind {kind} must end with its head; got {len(arrays)} bytes more")
    match kind:
        case Kind.feedback:
            value = head["value"]
            if value is not None and type(value) not in (int, float):
                raise DataError("value must be a number")
            number = None if value is None else float(value)
            flags = _flag(head, "click"), _flag(head, "conversion")
            return FeedbackRecord(_text(head, "id"), _text(head, "item"), *flags, number, _whole(head["time"]))
        case Kind.shadow:
            items = _texts(head["items"], "items")
            return ShadowRecord(_text(head, "id"), _text(head, "model"), _whole(head["time"]), items)
        case Kind.columns:
            return columns_from(head)
    raise DataError(f"a record must be of a kind from 1 to {len(Kind)}; got {kind}")


def columns_from(head: Mapping[str, Any]) -> Columns:
    """The columns that a `Columns.to_dict` told.

    Raises:
        DataError: when it tells something else.
    """
    try:
        names = _texts(head["numeric"], "numeric"), _texts(head["categorical"], "categorical")
        return Columns(*names, value=_flag(head, "value"), explored=_flag(head, "explored"))
    except (LookupError, TypeError) as error:
        raise DataError(f"columns must be as the server told them; got {str(head)[:100]}") from error


def _ranking(head: Mapping[str, Any], arrays: memoryview) -> RankingRecord:
    items = _texts(head["items"], "items")
    count, features = len(items), _whole(head["features"])
    ranked = head["ranked"]
    taken = 4 * count * features, 4 * count * _flag(head, "value"), 8 * count * (ranked is not None)
    if features < 0 or sum(taken) != len(arrays):
        raise DataError(f"the arrays of a ranking must have {sum(taken)} bytes; got {len(arrays)}")
    numeric, value, propensity = (
        np.frombuffer(arrays[sum(taken[:place]) :][: taken[place]], dtype=dtype)
        for place, dtype in enumerate(("<f4", "<f4", "<f8"))
    )
    return RankingRecord(
        ranking_id=_text(head, "id"),
        query_id=_text(head, "query"),
        user_id=None if head["user"] is None else _text(head, "user"),
        arm=None if head["arm"] is None else _text(head, "arm"),
        policy=_text(head, "policy"),
        model=_text(head, "model"),
        columns=_text(head, "columns"),
        time_us=_whole(head["time"]),
        items=items,
        numeric=numeric.astype(np.float32, copy=False).reshape(count, features),
        categorical=tuple(_texts(row, "categorical", missing=True) for row in head["categorical"]),
        value=value.astype(np.float32, copy=False) if taken[1] else None,
        propensity=propensity.astype(np.float64, copy=False) if taken[2] else None,
        ranked_position=None if ranked is None else tuple(_whole(position) for position in ranked),
    )


def _text(head: Mapping[str, Any], key: str) -> str:
    if type(head[key]) is not str:
        raise DataError(f"{key} must be text; got {head[key]!r}")
    return str(head[key])


def _texts(values: Any, key: str, *, missing: bool = False) -> tuple[Any, ...]:
    allowed = {str, type(None)} if missing else {str}
    if type(values) is not list or not set(map(type, values)) <= allowed:
        raise DataError(f"{key} must be a list of texts")
    return tuple(values)


def _flag(head: Mapping[str, Any], key: str) -> bool:
    if type(head[key]) is not bool:
        raise DataError(f"{key} must be true or false; got {head[key]!r}")
    return bool(head[key])


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise DataError(f"a whole number is needed; got {value!r}")
    return value
