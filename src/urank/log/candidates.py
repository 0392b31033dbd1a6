"""Candidates to rank: files or a table in memory, checked as a log is, and handed out as whole lists, some at a time.

The rows of a list, one (`query_id`, `session_id`), must lie together. Then lists larger than a batch, or cut by the end
of a batch or of a file, are put together again while reading, and all of it may be larger than memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import polars.selectors as cs
from numpy.typing import NDArray

from urank.errors import DataError
from urank.log.columns import (
    ROW,
    Feature,
    Kind,
    LogSchema,
    RowName,
    can_play,
    check_mapping,
    check_types,
    entry_type,
    exploded,
    list_columns,
    no_column,
    some_of,
)
from urank.log.ragged import list_ids, offsets_of_runs
from urank.log.reader import FileFormat, Rows, add_partitions, find_files, open_file, table_frame
from urank.log.splits import stable_hash
from urank.storage import is_path

__all__ = [
    "CANDIDATE_ROLES",
    "IDS",
    "CandidateLists",
    "CandidateSchema",
    "Candidates",
    "candidate_schema",
    "category_columns",
    "list_offsets",
    "read_candidates",
    "whole_lists",
]

IDS = ("query_id", "session_id", "item_id")
CANDIDATE_ROLES: Mapping[str, str] = {
    "query_id": "the query or request that it is a candidate for",
    "session_id": "tells apart several lists of one query; a list is one (query_id, session_id)",
    "item_id": "the item; handed on to the result",
    "value": "what a click on it is worth; 1 when there is no such column",
    "category": "a group of items, where the model was trained with one",
    "position": "its current rank, from 1 up; read only where a guard asks for it",
}

_PLACE = re.compile(r"(.+)\[(\d+)\]", re.DOTALL)


@dataclass(frozen=True)
class CandidateSchema(LogSchema):
    """Which column of the candidates plays which role, and which gives each feature of a model.

    Attributes:
        as_text: the ids that are given as text; the others are given as they came.
    """

    as_text: tuple[str, ...] = ()

    def canonical(self, frame: pl.DataFrame, where: RowName) -> pl.DataFrame:
        """The batch under its canonical names, every rule checked, a row for each candidate; `ROW` is kept.

        Features and positions are as in a log, the value is `Float32`. Raises `DataError` with the first row that
        breaks a rule.
        """
        lists = list_columns(frame.schema)
        frame = exploded(frame, lists[0], where) if lists else frame
        result = self._named_columns(frame)
        if self.roles or self.named("numeric"):
            self._check(frame, result, where)
        return result.with_columns(
            *[frame[column].alias(role) for role, column in self._as_they_came.items()],
            cs.by_name("value", require_all=False).cast(pl.Float32),
            cs.by_name("position", require_all=False).cast(pl.Int32),
            *[pl.col(name).cast(pl.Float32) for name in self.named("numeric")],
        )

    @property
    def _as_they_came(self) -> dict[str, str]:
        return {role: self.roles[role] for role in IDS if role in self.roles and role not in self.as_text}

    def _named_columns(self, frame: pl.DataFrame) -> pl.DataFrame:
        """As in a log, but without making text of ids that are given as they came: it would take as long as all else.
        A float may be NaN, which only the text has as missing."""
        dtypes = frame.schema
        plain = {role: column for role, column in self._as_they_came.items() if not dtypes[column].is_float()}
        others = {role: column for role, column in self.roles.items() if role not in plain}
        named = LogSchema(others, self.features)._named_columns(frame)
        named = named.with_columns(frame[column].alias(role) for role, column in plain.items())
        return named.select(ROW, *self.roles, *(feature.name for feature in self.features))


def candidate_schema(
    dtypes: Mapping[str, pl.DataType],
    name: str,
    *,
    numeric: Sequence[str],
    categorical: Sequence[str],
    columns: Mapping[str, str] | None = None,
    required: Collection[str] = (),
) -> CandidateSchema:
    """Find the columns of roles and features among those of a source; `name` is what errors call it."""
    mapping = dict(columns or {})
    check_mapping(mapping, CANDIDATE_ROLES, dtypes, name, "candidates")
    free = set(dtypes) - {column for role, column in mapping.items() if role != "category"}
    read = (*IDS, "value", *(["position"] if "position" in required else []))
    roles = {role: mapping.get(role, role) for role in read if role in mapping or role in free}
    for role in required:
        if role not in roles:
            raise no_column(role, dtypes, name)
    check_types(roles, {column: entry_type(dtype) for column, dtype in dtypes.items()}, name)
    sizes = Counter(found[1] for found in map(_PLACE.fullmatch, numeric) if found)
    features = [_numeric(feature, dtypes, name, sizes) for feature in numeric]
    features += [
        _feature(feature, "categorical", column, dtypes, name)
        for feature, column in category_columns(categorical, mapping).items()
    ]
    return CandidateSchema(roles, tuple(features))


def category_columns(categorical: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """The column of each categorical feature: of its name, but for `category`, whose column may be named.

    >>> category_columns(["brand", "category"], {"category": "kind"})
    {'brand': 'brand', 'category': 'kind'}
    """
    return {name: columns.get(name, name) if name == "category" else name for name in categorical}


def _numeric(name: str, dtypes: Mapping[str, pl.DataType], source: str, sizes: Mapping[str, int]) -> Feature:
    found = _PLACE.fullmatch(name)
    if name in dtypes or not found or found[1] not in dtypes:
        return _feature(name, "numeric", name, dtypes, source)
    column, place = found[1], int(found[2])
    dtype = entry_type(dtypes[column])
    if not isinstance(dtype, pl.Array) or not dtype.inner.is_numeric() or dtype.size != sizes[column]:
        raise DataError(
            f"the model needs the feature '{name}', so column '{column}' of {source} must hold fixed-size lists "
            f"of {sizes[column]} numbers; it is of type {dtypes[column]}"
        )
    return Feature(name, "numeric", column, place)


def _feature(name: str, kind: Kind, column: str, dtypes: Mapping[str, pl.DataType], source: str) -> Feature:
    if column not in dtypes:
        raise DataError(
            f"the model needs the feature '{name}', which is not there: {source} has the columns {some_of(dtypes)}"
        )
    dtype = entry_type(dtypes[column])
    if kind == "numeric":
        fits, needed = dtype.is_numeric() or dtype == pl.Null, "a number"
    else:
        fits, needed = can_play("category", dtype), "a category"
    if not fits:
        raise DataError(
            f"the model takes the feature '{name}' as {needed}; column '{column}' of {source} is of type {dtype}"
        )
    return Feature(name, kind, column)


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
