"""How rows become lists: the hash that brings a query together, the split it belongs to, and one row for each list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.lists import offsets_of_runs
from urank.log.read import Log
from urank.log.schema import QUERY, ROW, SESSION
from urank.log.split import SPLITS, split_by_hash, split_by_time, stable_hash
from urank.log.summary import Summary
from urank.log.write import SplitWriter

__all__ = ["Assign", "assignment", "refuse_clicks_beyond", "with_keys", "write_bucket"]

_LIST_LEVEL = ("query_id", "session_id")

Assign = Callable[[NDArray[np.uint64], NDArray[np.int64] | None], NDArray[np.uint8]]


def refuse_clicks_beyond(log: Log, frame: pl.DataFrame, last: int) -> None:
    """Refuse a click on an item that nobody is said to have seen."""
    clicked = frame.filter((pl.col("position") > last) & (pl.col("click") == 1)).sort(ROW).head(1)
    if clicked.height:
        raise DataError(
            f"items below position {last}, the last that is said to be shown, must have no clicks; "
            f"got one at position {clicked['position'][0]} at {log.row_name(clicked[ROW][0])}"
        )


def with_keys(frame: pl.DataFrame) -> pl.DataFrame:
    """Add the hash of the query, which decides bucket and split, and of the list."""
    keys = [pl.Series(QUERY, stable_hash(frame["query_id"]))]
    if "session_id" in frame.columns:
        keys.append(pl.Series(SESSION, stable_hash(frame["session_id"])))
    return frame.with_columns(keys)


def assignment(split: str, valid: float, test: float, times: list[pl.DataFrame]) -> tuple[Assign, dict[str, Any]]:
    """The rule that gives each list its split, from the hash of its query and the query's latest time."""
    if split == "hash":
        return (lambda hashes, _: split_by_hash(hashes, valid=valid, test=test)), {}
    latest = pl.concat(times).group_by(QUERY).agg(pl.col("timestamp").max())["timestamp"].to_numpy()
    first, second = split_by_time(latest, valid=valid, test=test)

    def by_time(_: NDArray[np.uint64], time: NDArray[np.int64] | None) -> NDArray[np.uint8]:
        assert time is not None  # noqa: S101 - the timestamp was asked for above
        return (time > first).astype(np.uint8) + (time > second)

    return by_time, {"train_until": first, "valid_until": second}


def write_bucket(
    log: Log, frame: pl.DataFrame, assign: Assign, writers: dict[str, SplitWriter], summary: Summary
) -> None:
    """Sort a bucket into lists, check that no position occurs twice in one, and hand each split its lists."""
    keys = [key for key in (QUERY, SESSION) if key in frame.columns]
    ids = [key for key in ("query_id", "session_id") if key in frame.columns]
    frame = frame.sort([*keys, "position"])
    starts = _starts(frame, keys)
    if (starts != _starts(frame, ids)).any():  # two ids with one hash: the ids themselves must sort
        frame = frame.sort([*ids, "position"])
        starts = _starts(frame, ids)
    _refuse_twice(log, frame, starts)
    offsets = np.append(np.flatnonzero(starts), frame.height).astype(np.int64)
    latest = None
    if "timestamp" in frame.columns:
        time = frame["timestamp"].to_numpy()
        query_starts = offsets_of_runs(frame[QUERY].to_numpy())
        latest = np.repeat(np.maximum.reduceat(time, query_starts[:-1]), np.diff(query_starts))[offsets[:-1]]
    splits = assign(frame[QUERY].to_numpy()[offsets[:-1]], latest)
    n_items = np.diff(offsets)
    for number, name in enumerate(SPLITS):
        chosen = splits == number
        if chosen.any():
            rows = frame if chosen.all() else frame.filter(pl.Series(np.repeat(chosen, n_items)))
            bounds = np.append(0, np.cumsum(n_items[chosen]))
            summary.add(name, rows, bounds)
            writers[name].write(_lists(rows, bounds))


def _starts(frame: pl.DataFrame, columns: Sequence[str]) -> NDArray[np.bool_]:
    """True at each row that differs from the one before it in any of the columns."""
    changed = pl.any_horizontal(pl.col(column) != pl.col(column).shift(1) for column in columns)
    starts: NDArray[np.bool_] = frame.select(changed.fill_null(True).alias("s"))["s"].to_numpy()
    return starts


def _refuse_twice(log: Log, frame: pl.DataFrame, starts: NDArray[np.bool_]) -> None:
    position = frame["position"].to_numpy()
    twice = np.flatnonzero(~starts[1:] & (position[1:] == position[:-1]))
    if len(twice):
        row = int(twice[0])
        session = frame["session_id"][row] if "session_id" in frame.columns else None
        rows = frame[ROW][row : row + 2].to_list()
        raise log.position_twice(frame["query_id"][row], session, int(position[row]), rows)


def _lists(rows: pl.DataFrame, bounds: NDArray[np.int64]) -> pa.Table:
    """One row per list: the ids once, everything else as a list column."""
    table = rows.drop(ROW, QUERY, SESSION, strict=False).to_arrow().combine_chunks()
    offsets = pa.array(bounds, type=pa.int32())
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        values = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        if name == "timestamp":  # that of the latest item, so that the log is split in the same way when prepared again
            columns[name] = pa.array(np.maximum.reduceat(values.to_numpy(), bounds[:-1]))
        elif name in _LIST_LEVEL:
            columns[name] = values.take(offsets[:-1])
        else:
            columns[name] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns)
