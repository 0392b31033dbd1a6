"""Arrow IPC bodies, for many candidates: a column for each feature is an array as it lies, and nothing is parsed.

In: one stream with `query_id`, `item_id`, the features, and optionally `value`, `user_id`, `positions` and `method`.
The rows of a list lie together, and what belongs to a list is that of its first row. Out: one stream with `ranking_id`,
`query_id`, `item_id`, `position`, `score`, `click`, `utility`, `method`, `policy`, `arm` and `model`, best first.
"""

from __future__ import annotations

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
from urank.serve.arrow_stream import is_number, is_text, read_stream
from urank.serve.bodies import MAX_POSITIONS, MAX_TEXT, MAX_VALUE
from urank.serve.items import Lists, Reader, check_sizes
from urank.serve.problems import Problem
from urank.serve.ranking import Shown
from urank.serve.runtime import MISSING, Items

__all__ = ["ARROW_TYPE", "read_lists", "write_rankings"]

ARROW_TYPE = "application/vnd.apache.arrow.stream"


def read_lists(body: bytes, reader: Reader) -> Lists:
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
    return Lists(
        query_ids=query_ids,
        user_ids=_firsts(table, "user_id", first),
        positions=_positions(table, first),
        methods=[_method(each) for each in _firsts(table, "method", first)],
        item_ids=items,
        items=_items(table, reader, offsets),
        valued=[_has(table, "value")] * len(first),
        batch=False,  # what is wrong is a column, whatever the number of lists
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
