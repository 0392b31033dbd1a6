"""Candidates to rank: files or a table in memory, checked as a log is, and handed out as whole lists, some at a time.

The rows of a list, one (`query_id`, `session_id`), must lie together. Then lists larger than a batch, or cut by the end
of a batch or of a file, are put together again while reading, and all of it may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.candidate_schema import IDS, CandidateSchema, candidate_schema, category_columns
from urank.log.cells import ROW, RowName
from urank.log.files import FileFormat, Rows, find_files, open_file, table_frame
from urank.log.lists import list_ids, offsets_of_runs
from urank.log.partitions import add_partitions
from urank.log.schema import entry_type
from urank.log.split import stable_hash
from urank.paths import is_path

__all__ = ["IDS", "CandidateLists", "Candidates", "list_offsets", "read_candidates", "whole_lists"]

BATCH_BYTES = 32 * 2**20
FIRST_ROWS = 100

_KEYS = ("query_id", "session_id")
_TABLE = "the candidates"


@dataclass(frozen=True, eq=False)
class CandidateLists:
    """Some whole lists of candidates.

    Attributes:
        frame: a row for each candidate, in canonical form.
        offsets: which rows are one list.
        done: the bytes of the source that are behind them.
    """

    frame: pl.DataFrame
    offsets: NDArray[np.int64]
    done: int


@dataclass(frozen=True)
class _Part:
    """A file or a table: its bytes, its rows where they are known, and these as it has them, so many at a time."""

    name: str
    dtypes: Mapping[str, pl.DataType]
    size: int
    rows: int | None
    schema: CandidateSchema
    open: Callable[[Sequence[str], int], Rows]


@dataclass(frozen=True)
class Candidates:
    """Candidates that can be read again and again, some lists at a time.

    Attributes:
        name: what errors and reports call it.
        size: bytes of the source.
        work_bytes: what the work on a candidate takes besides the candidate itself; batches are smaller for it.
        batch_bytes: what some lists may take at once, their work included; never more than `BATCH_BYTES`.
        list_bytes: what one list may take; a longer one is refused. Any length will do when it is none.
    """

    name: str
    size: int
    work_bytes: int
    parts: tuple[_Part, ...]
    batch_bytes: int | None = None
    list_bytes: int | None = None

    @property
    def row_name(self) -> RowName:
        return RowName([part.name for part in self.parts])

    def lists(self) -> Iterator[CandidateLists]:
        """All lists, as many at a time as fit `batch_bytes`, but at least one; one without rows if there are none.

        Lists that are behind are remembered by a hash of 8 bytes each (twice that at times, when they are merged), to
        tell one that comes again: a million lists take 8 to 16 MB. That two ids share a hash, so that the later one is
        taken for the earlier, has a chance of 1 in 40 million among a million lists.

        Raises:
            DataError: when a row breaks a rule, or a list comes again after another one, has a position twice, or takes
                more than `list_bytes`.
        """
        behind = _Hashes()
        for frame, done in whole_lists(self._batches(), self._refuse_long):
            offsets = list_offsets(frame)
            self._refuse_again(frame, offsets, behind)
            self._refuse_twice(frame, offsets)
            yield CandidateLists(frame.drop(ROW), offsets, done)

    def _batches(self) -> Rows:
        """Batches in canonical form, each rule checked, and the bytes of the source behind each."""
        done, empty = 0, True
        for number, part in enumerate(self.parts):
            first = 0
            for frame, behind in part.open(part.schema.columns, self._batch_rows(number)):
                if frame.height:
                    yield self._canonical(frame, number, first), done + behind
                    empty = False
                first += frame.height
            done += part.size
        if empty:
            nothing = pl.DataFrame(
                schema={column: self.parts[0].dtypes[column] for column in self.parts[0].schema.columns}
            )
            yield self._canonical(nothing, 0, 0), done

    def _batch_rows(self, number: int) -> int:
        """How many rows of a part make a batch, from the first of them."""
        part = self.parts[number]
        if part.rows is not None and part.rows <= FIRST_ROWS:
            return FIRST_ROWS
        first = next((frame for frame, _ in part.open(part.schema.columns, FIRST_ROWS) if frame.height), None)
        if first is None:
            return 1
        raw = first.head(FIRST_ROWS)
        frame = self._canonical(raw, number, 0)
        held = frame.estimated_size() + self.work_bytes * frame.height
        most = BATCH_BYTES if self.batch_bytes is None else min(BATCH_BYTES, self.batch_bytes)
        return max(1, int(most * raw.height / held))

    def _canonical(self, frame: pl.DataFrame, number: int, first: int) -> pl.DataFrame:
        part = self.parts[number]
        rows = frame.select(part.schema.columns).with_columns(RowName.codes(number, first, frame.height))
        return part.schema.canonical(rows, self.row_name)

    def _refuse_long(self, parts: Sequence[pl.DataFrame]) -> None:
        """Refuse a list, of which these are the rows so far, that memory cannot hold."""
        rows = sum(part.height for part in parts)
        held = sum(part.estimated_size() for part in parts) + self.work_bytes * rows
        if self.list_bytes is not None and held > self.list_bytes:
            begin = self.row_name(parts[0][ROW][0])
            raise DataError(
                f"a list is ranked as a whole and may take {self.list_bytes / 1e9:.2g} GB; the one that begins at "
                f"{begin} has {rows:,} candidates or more, which take {held / 1e9:.2g} GB (allow more memory)"
            )

    def _refuse_again(self, frame: pl.DataFrame, offsets: NDArray[np.int64], behind: _Hashes) -> None:
        keys = _keys(frame)
        if not keys:
            return
        heads = frame.select(ROW, *keys)[offsets[:-1]]
        again = behind.add(stable_hash(heads.select(pl.concat_str(keys, separator="\x00")).to_series()))
        if again.any():
            row, *ids = heads.row(int(again.argmax()))
            which = ", ".join(f"{key.removesuffix('_id')} {name}" for key, name in zip(keys, ids, strict=True))
            advice = (
                ""
                if "session_id" in keys
                else " (if this is another list, name its session with --column session_id=NAME)"
            )
            raise DataError(
                f"the candidates of a list must lie together; {which} comes again, after others, "
                f"at {self.row_name(row)}{advice}"
            )

    def _refuse_twice(self, frame: pl.DataFrame, offsets: NDArray[np.int64]) -> None:
        if "position" not in frame.columns:
            return
        places = frame.select(ROW, "position", list=pl.Series(list_ids(offsets)))
        twice = places.filter(~pl.struct("list", "position").is_first_distinct())
        if twice.height:
            row, position, _ = twice.row(0)
            raise DataError(
                f"a current position must occur once in a list; {position} comes again at {self.row_name(row)}"
            )


def read_candidates(
    source: str | Path | Any,
    *,
    numeric: Sequence[str],
    categorical: Sequence[str],
    columns: Mapping[str, str] | None = None,
    required: Collection[str] = (),
    work_bytes: int = 0,
    batch_bytes: int | None = None,
    list_bytes: int | None = None,
) -> Candidates:
    """Open candidates.

    Args:
        source: a Parquet or CSV file (also gzipped), a folder of them (hive partitions become columns), a glob, or a
            table of Polars, pandas or PyArrow. One row per candidate, or one row per query with list columns.
        numeric, categorical: the features of the model; `emb[0]` is the first number of a fixed-size list `emb`.
            Columns that are neither feature nor role are not read.
        columns: role -> the column that plays it, where names differ; the roles are `CANDIDATE_ROLES`.
        required: the roles that must be played.
        work_bytes: what the work on a candidate takes besides the candidate itself.
        batch_bytes, list_bytes: what some lists may take at once, and what a single one may, with the work on them.

    >>> table = pl.DataFrame({"query_id": [1, 1, 2], "price": [9, 3, 5], "more": ["x", "y", "z"]})
    >>> [lists] = read_candidates(table, numeric=["price"], categorical=[]).lists()
    >>> lists.frame.columns, lists.offsets.tolist()
    (['query_id', 'price'], [0, 2, 3])
    """

    def schema_of(name: str, dtypes: Mapping[str, pl.DataType]) -> CandidateSchema:
        return candidate_schema(
            dtypes, name, numeric=numeric, categorical=categorical, columns=columns, required=required
        )

    if not is_path(source):
        frame = table_frame(source, _TABLE, "candidates")
        part = _table_part(frame, schema_of(_TABLE, frame.schema))
        return Candidates(_TABLE, part.size, work_bytes, (part,), batch_bytes, list_bytes)
    mapping = columns or {}
    ids = {mapping.get(role, role) for role in IDS}
    categories = category_columns(categorical, mapping).values()
    files = [_open(path, ids, categories) for path in find_files(str(source))]
    add_partitions(files, str(source))
    parts = _with_same_ids([_file_part(file, schema_of(file.name, file.dtypes)) for file in files])
    size = sum(part.size for part in parts)
    return Candidates(str(source), size, work_bytes, parts, batch_bytes, list_bytes)


def list_offsets(frame: pl.DataFrame) -> NDArray[np.int64]:
    """Offsets of the lists: runs of the same `query_id` and `session_id`, those that are there; else all is one list.

    >>> list_offsets(pl.DataFrame({"query_id": ["a", "a", "b"], "session_id": [1, 2, 2]})).tolist()
    [0, 1, 2, 3]
    """
    keys = _keys(frame)
    if not keys:
        return offsets_of_runs(np.zeros(frame.height))
    return offsets_of_runs(frame.select(pl.struct(keys).rle_id()).to_series().to_numpy())


def whole_lists(
    batches: Iterable[tuple[pl.DataFrame, int]], check: Callable[[Sequence[pl.DataFrame]], None] | None = None
) -> Rows:
    """The same rows, cut between lists: what may go on in the next batch waits for it.

    Args:
        batches: rows, and the bytes of the source behind them.
        check: told the parts of a list each time that it waits; it may refuse to wait for more.

    >>> parts = [pl.DataFrame({"query_id": ids}) for ids in (["a", "b"], ["b"], ["b", "c", "c"])]
    >>> [frame["query_id"].to_list() for frame, _ in whole_lists((part, 0) for part in parts)]
    [['a'], ['b', 'b', 'b', 'c', 'c']]
    """
    whole: list[pl.DataFrame] = []
    last: list[pl.DataFrame] = []  # the rows of a list that may go on
    done = 0
    for frame, done in batches:
        if last and _key_of(last[-1], -1) != _key_of(frame, 0):
            whole, last = [*whole, *last], []
        if whole:
            yield pl.concat(whole), done
        cut = int(list_offsets(frame)[-2]) if frame.height else 0
        whole, last = ([*last, frame[:cut]], [frame[cut:]]) if cut else ([], [*last, frame])
        if check is not None:
            check(last)
    if whole or last:
        yield pl.concat([*whole, *last]), done


class _Hashes:
    """A set of 64-bit hashes as sorted arrays, each more than twice as long as the next: 8 bytes for each hash."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.uint64]] = []

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add hashes; true for those that were there already, or stand earlier among them."""
        known = np.ones(len(hashes), dtype=np.bool_)
        fresh, firsts = np.unique(hashes, return_index=True)
        known[firsts] = False
        for array in self._arrays:
            places = np.minimum(np.searchsorted(array, hashes), len(array) - 1)
            known |= array[places] == hashes
        while self._arrays and len(self._arrays[-1]) <= 2 * len(fresh):
            fresh = np.sort(np.concatenate([self._arrays.pop(), fresh]), kind="stable")  # merges what is sorted
        if len(fresh):
            self._arrays.append(fresh)
        return known


def _keys(frame: pl.DataFrame) -> list[str]:
    return [name for name in _KEYS if name in frame.columns]


def _key_of(frame: pl.DataFrame, row: int) -> tuple[Any, ...]:
    return frame.select(_keys(frame)).row(row) if _keys(frame) else ()


def _table_part(frame: pl.DataFrame, schema: CandidateSchema) -> _Part:
    size = int(frame.estimated_size())

    def batches(columns: Sequence[str], rows: int) -> Rows:
        done = 0
        for part in frame.select(columns).iter_slices(rows):
            done += part.height
            yield part, size * done // frame.height

    return _Part(_TABLE, frame.schema, size, frame.height, schema, batches)


def _file_part(file: FileFormat, schema: CandidateSchema) -> _Part:
    batches = partial(file.batches, categories=schema.categories)
    return _Part(file.name, file.dtypes, file.path.stat().st_size, None, schema, batches)


def _open(path: Path, ids: Collection[str], categories: Collection[str]) -> FileFormat:
    """A file; categories that look like numbers in a CSV are read as they are written, as ids are."""
    file = open_file(path, ids)
    codes = {name for name in categories if name in file.dtypes and file.dtypes[name].is_numeric()}
    return open_file(path, {*ids, *codes}) if codes else file


def _with_same_ids(parts: Sequence[_Part]) -> tuple[_Part, ...]:
    """The parts as one source: all with the same roles, and with ids as text where they do not agree on the type."""
    first = parts[0]
    for other in parts[1:]:
        for role in {**first.schema.roles, **other.schema.roles}:
            has, lacks = (first, other) if role in first.schema.roles else (other, first)
            if role not in lacks.schema.roles:
                raise DataError(f"column '{has.schema.roles[role]}' is in {has.name} but not in {lacks.name}")
    as_text = tuple(
        role
        for role in first.schema.roles
        if role in IDS and len({entry_type(part.dtypes[part.schema.roles[role]]) for part in parts}) > 1
    )
    return tuple(replace(part, schema=replace(part.schema, as_text=as_text)) for part in parts)
