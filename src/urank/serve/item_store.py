"""Features of items by id: a Parquet file, and a memory-mapped copy of it that all workers share.

The Parquet file has a row for each item: `item_id`, any features of the models, and optionally `value`. It may be
replaced at any time by rename, or changed by `put_items`. `load_items` keeps an uncompressed Arrow file beside it
(`.NAME.arrow`), with the numbers as one matrix and the categories as codes. Workers map this file, so that they share
its memory; only the index of ids is their own. A file lock makes one worker convert while the others wait.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from urank.client.wire_schemas import ItemsStored
from urank.errors import DataError
from urank.log.columns import feature_expr, infinite
from urank.serve.request_schemas import MAX_TEXT, MAX_VALUE
from urank.storage import new_file

_STATE = b"urank items"

FileState = tuple[int, int, int]

logger = logging.getLogger("urank.serve")


@dataclass(frozen=True, eq=False)
class ItemStore:
    """The items of a file, a row for each."""

    index: dict[str, int]  # row of each id
    columns: tuple[str, ...]  # names of the numeric features
    numeric: NDArray[np.float32]  # [items, columns], NaN if missing
    categories: dict[str, tuple[NDArray[np.int32], NDArray[np.object_]]]  # code of each item, text of each code
    value: NDArray[np.float32] | None  # [items], the value of a click; None if the file has none

    def rows(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the row of each id, -1 if it is unknown."""
        return np.array(list(map(self.index.get, ids, repeat(-1))), dtype=np.int64)


def file_state(path: Path) -> FileState:
    """Return what changes when a file is replaced."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def load_items(path: Path, numeric: Sequence[str], categorical: Sequence[str], missing: str) -> ItemStore:
    """Load the features that the file has of those named.

    If the file is broken, the copy of an earlier one is used, and logged; without a copy, raise a `DataError`.

    Args:
        missing: Text of missing categories.
    """
    mapped = path.with_name(f".{path.name}.arrow")
    try:
        file_state(path)  # before a lock file is made
        with _locked(path):
            table = _converted(path, mapped, numeric, categorical, missing)
    except (OSError, pa.ArrowException, pl.exceptions.PolarsError, DataError) as error:
        text = " ".join(str(error).split())[:200]
        reason = str(error) if isinstance(error, DataError) else f"the items of {path} cannot be used: {text}"
        if (earlier := _map(mapped)) is None:
            raise DataError(reason) from error
        logger.error("%s; the items of before stay", reason)
        table = earlier
    _, *known = json.loads(table.schema.metadata[_STATE])
    batch = table.to_batches()[0]
    columns, names = tuple(known[0]), batch.column("item_id").to_pylist()
    numbers = batch.column("numeric").flatten().to_numpy() if columns else np.empty(0, dtype=np.float32)
    coded = {name: batch.column(f"category {place}") for place, name in enumerate(known[1])}
    return ItemStore(
        dict(zip(names, range(len(names)), strict=True)),
        columns,
        numbers.reshape(len(names), len(columns)),
        {
            name: (each.indices.to_numpy(), each.dictionary.to_numpy(zero_copy_only=False))
            for name, each in coded.items()
        },
        batch.column("value").to_numpy() if "value" in batch.schema.names else None,
    )


def _converted(path: Path, mapped: Path, numeric: Sequence[str], categorical: Sequence[str], missing: str) -> pa.Table:
    """Map the Arrow file, after writing it if the Parquet file or the features are others than before."""
    schema = pq.read_schema(path)
    known = [[name for name in names if name in schema.names] for names in (numeric, categorical)]
    key = json.dumps([file_state(path), *known]).encode()
    table = _map(mapped)
    if table is None or table.schema.metadata[_STATE] != key:
        frame = _read(path, known[0], known[1], value="value" in schema.names)
        with new_file(mapped) as working:
            _write(working, frame, known[0], known[1], missing, key)
        table = _map(mapped)
        assert table is not None  # noqa: S101 - it has just been written, under the lock
    return table


def put_items(path: Path, items: pl.DataFrame, most: int) -> ItemsStored:
    """Add items to the file, or replace those that it has, atomically; at most this many items in total.

    Args:
        items: `item_id` and categories as text, numbers, and `value` if there are any.
    """
    with _locked(path):
        before = pl.read_parquet(path)
        texts = [name for name, kind in items.schema.items() if kind == pl.String and name in before.columns]
        as_text = (feature_expr(name, name, None, before[name].dtype, categorical=True) for name in texts)
        before = before.with_columns(as_text)
        kept = before.filter(~pl.col("item_id").is_in(items["item_id"].implode()))
        after = pl.concat([kept, items], how="diagonal_relaxed")
        if after.height > most:
            raise DataError(f"there are at most {most:,} items, see --max-items; these would be {after.height:,}")
        with new_file(path) as working:
            after.write_parquet(working)
            with working.open("rb") as file:
                os.fsync(file)
    replaced = before.height - kept.height
    return ItemsStored(items.height - replaced, replaced, after.height)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _map(path: Path) -> pa.Table | None:
    """Map the Arrow file; None if there is none, or it is damaged."""
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (OSError, pa.ArrowException):
        return None
    return table if _STATE in (table.schema.metadata or {}) else None


def _read(path: Path, numeric: Sequence[str], categorical: Sequence[str], *, value: bool) -> pl.DataFrame:
    frame = pl.read_parquet(path, columns=["item_id", *numeric, *categorical, *(["value"] if value else [])])
    kinds = dict.fromkeys(numeric, False) | dict.fromkeys(["item_id", *categorical], True)
    frame = frame.with_columns(
        *(feature_expr(name, name, None, frame[name].dtype, categorical=text) for name, text in kinds.items()),
        *([pl.col("value").cast(pl.Float64).fill_nan(None).fill_null(1.0)] if value else []),
    )
    length = pl.col("item_id").str.len_chars()
    wrong = {
        f"item_id must have 1 to {MAX_TEXT} characters": (length < 1) | (length > MAX_TEXT) | length.is_null(),
        "each item must occur once": pl.col("item_id").is_duplicated(),
        **{f"{name} must be finite and fit 32 bits": infinite(name) for name in numeric},
    }
    if value:
        wrong[f"value must be from 0 to {MAX_VALUE:g}"] = ~pl.col("value").is_between(0, MAX_VALUE)
    for rule, broken in wrong.items():
        found = frame.select(broken.arg_max().alias("row"), broken.any().alias("any")).row(0, named=True)
        if found["any"]:
            raise DataError(f"{path}, row {found['row'] + 1}: {rule}")
    if frame.is_empty():
        raise DataError(f"{path} has no items")
    return frame


def _write(
    path: Path, frame: pl.DataFrame, numeric: Sequence[str], categorical: Sequence[str], missing: str, key: bytes
) -> None:
    columns: dict[str, Any] = {"item_id": frame["item_id"].to_arrow().cast(pa.large_string())}
    if numeric:
        matrix = frame.select(pl.col(name).cast(pl.Float32) for name in numeric).to_numpy(order="c")
        columns["numeric"] = pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(matrix)), len(numeric))
    for place, name in enumerate(categorical):
        texts = frame[name].fill_null(missing).to_arrow().cast(pa.large_string())
        columns[f"category {place}"] = texts.dictionary_encode()
    if "value" in frame.columns:
        columns["value"] = frame["value"].cast(pl.Float32).to_arrow()
    table = pa.table(columns).replace_schema_metadata({_STATE: key})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=table.num_rows)
