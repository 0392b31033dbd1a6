"""Candidates to rank: validated like a log and read as whole lists, a batch at a time.

The rows of a list, one (`query_id`, `session_id`), must be adjacent. Lists that are cut by the end of a batch or of a
file are joined while reading, so the source may be larger than memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    FeatureKind,
    LogSchema,
    RowName,
    can_play,
    check_mapping,
    check_types,
    entry_type,
    explode_lists,
    guessed_roles,
    join_names,
    list_columns,
    missing_columns,
)
from urank.log.ragged import list_ids, offsets_of_runs
from urank.log.reader import Rows, TableFile, TableSource, add_partitions, find_files, open_file, open_table
from urank.log.splits import stable_hash
from urank.storage import is_path

IDS = ("query_id", "session_id", "item_id")
CANDIDATE_ROLES: Mapping[str, str] = {
    "query_id": "the query or request that it is a candidate for",
    "session_id": "distinguishes several lists of one query; a list is one (query_id, session_id)",
    "item_id": "the item; copied to the result",
    "value": "the value of a click; 1 without such a column",
    "category": "a group of items, if the model was trained with one",
    "position": "its current rank, from 1; read only for a guard",
}

BATCH_BYTES = 32 * 2**20
FIRST_ROWS = 100

LIST_KEYS = ("query_id", "session_id")
_ELEMENT = re.compile(r"(.+)\[(\d+)\]", re.DOTALL)


@dataclass(frozen=True)
class CandidateSchema(LogSchema):
    """The column of each role and of each feature of a model; ids keep their type unless they are in `as_text`."""

    as_text: tuple[str, ...] = ()

    def canonical(self, frame: pl.DataFrame, where: RowName) -> pl.DataFrame:
        """Validate a batch and convert it to canonical names, one row per candidate; the column `ROW` is kept.

        Features and positions are as in a log, the value is `Float32`. Raises `DataError` for the first row that
        breaks a rule.
        """
        lists = list_columns(frame.schema)
        frame = explode_lists(frame, lists[0], where) if lists else frame
        result = self._named_columns(frame)
        if self.roles or self.named("numeric"):
            self._check(frame, result, where)
        return result.with_columns(
            *[frame[column].alias(role) for role, column in self._unchanged_ids.items()],
            cs.by_name("value", *self.named("numeric"), require_all=False).cast(pl.Float32),
            cs.by_name("position", require_all=False).cast(pl.Int32),
        )

    @property
    def _unchanged_ids(self) -> dict[str, str]:
        return {role: self.roles[role] for role in IDS if role in self.roles and role not in self.as_text}

    def _named_columns(self, frame: pl.DataFrame) -> pl.DataFrame:
        """As in a log, but without converting unchanged ids to text, which would take as long as all else.

        Floats are converted nevertheless: NaN is a missing id only in their text.
        """
        dtypes = frame.schema
        unchanged = {role: column for role, column in self._unchanged_ids.items() if not dtypes[column].is_float()}
        others = {role: column for role, column in self.roles.items() if role not in unchanged}
        named = LogSchema(others, self.features)._named_columns(frame)
        named = named.with_columns(frame[column].alias(role) for role, column in unchanged.items())
        return named.select(ROW, *self.roles, *(feature.name for feature in self.features))


def candidate_schema(
    dtypes: Mapping[str, pl.DataType],
    name: str,
    *,
    numeric: Sequence[str],
    categorical: Sequence[str],
    columns: Mapping[str, str] | None = None,
    known: Mapping[str, str] | None = None,
    required: Collection[str] = (),
) -> CandidateSchema:
    """Find the columns of the roles and of a model's features in a source; `name` is its name in errors."""
    mapping = dict(columns or {})
    check_mapping(mapping, CANDIDATE_ROLES, dtypes, name, "candidates")
    guesses = guessed_roles(dtypes, mapping, {*numeric, *categorical} - {"category"}, known)
    mapping |= {role: column for role, column in guesses.items() if role in (*IDS, "value", "category", *required)}
    free = set(dtypes) - {column for role, column in mapping.items() if role != "category"}
    read = (*IDS, "value", *(["position"] if "position" in required else []))
    roles = {role: mapping.get(role, role) for role in read if role in mapping or role in free}
    if absent := [role for role in required if role not in roles]:
        raise missing_columns(absent, dtypes, name)
    check_types(roles, {column: entry_type(dtype) for column, dtype in dtypes.items()}, name)
    sizes = Counter(found[1] for found in map(_ELEMENT.fullmatch, numeric) if found)
    features = [_numeric_feature(feature, dtypes, name, sizes) for feature in numeric]
    categories = _category_columns(categorical, mapping)
    features += [_feature(feature, "categorical", column, dtypes, name) for feature, column in categories.items()]
    return CandidateSchema(roles, tuple(features))


def _category_columns(categorical: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the column of each categorical feature: only that of `category` can be mapped."""
    return {name: columns.get(name, name) if name == "category" else name for name in categorical}


def _numeric_feature(name: str, dtypes: Mapping[str, pl.DataType], source: str, sizes: Mapping[str, int]) -> Feature:
    found = _ELEMENT.fullmatch(name)
    if name in dtypes or not found or found[1] not in dtypes:
        return _feature(name, "numeric", name, dtypes, source)
    column, place = found[1], int(found[2])
    dtype = entry_type(dtypes[column])
    if not isinstance(dtype, pl.Array) or not dtype.inner.is_numeric() or dtype.size != sizes[column]:
        raise DataError(
            f"the model needs the feature '{name}', so column '{column}' of {source} must contain fixed-size lists "
            f"of {sizes[column]} numbers; it is of type {dtypes[column]}"
        )
    return Feature(name, "numeric", column, place)


def _feature(name: str, kind: FeatureKind, column: str, dtypes: Mapping[str, pl.DataType], source: str) -> Feature:
    if column not in dtypes:
        raise DataError(
            f"the model needs the feature '{name}', which is not there: the columns of {source} are "
            f"{join_names(dtypes)}; add it, with nulls where it is unknown"
        )
    dtype = entry_type(dtypes[column])
    numeric = kind == "numeric"
    if not (dtype.is_numeric() or dtype == pl.Null if numeric else can_play("category", dtype)):
        needed = f"the model takes the feature '{name}' as a {'number' if numeric else 'category'}"
        raise DataError(f"{needed}; column '{column}' of {source} is of type {dtype}")
    return Feature(name, kind, column)


@dataclass(frozen=True, eq=False)
class CandidateLists:
    """A batch of whole lists, a row per candidate, with their bounds `[lists + 1]` and the bytes read so far."""

    frame: pl.DataFrame
    offsets: NDArray[np.int64]
    done: int


@dataclass(frozen=True)
class Candidates:
    """Candidates that can be read repeatedly, a batch of lists at a time.

    Attributes:
        sources: The files, or the table in memory, each with its schema.
        work_bytes: Bytes that the work on a candidate takes besides the candidate itself; batches shrink accordingly.
        batch_bytes: Limit of a batch, including the work; never more than `BATCH_BYTES`.
        list_bytes: Limit of a list; a longer one is refused. None for no limit.
    """

    name: str
    sources: tuple[tuple[TableSource, CandidateSchema], ...]
    work_bytes: int = 0
    batch_bytes: int | None = None
    list_bytes: int | None = None

    @property
    def size(self) -> int:
        return sum(source.size for source, _ in self.sources)

    @property
    def row_name(self) -> RowName:
        return RowName([source.name for source, _ in self.sources])

    def lists(self) -> Iterator[CandidateLists]:
        """Read all lists, as many at a time as fit `batch_bytes`, but at least one; an empty batch if there are none.

        Refuses a list that occurs again after another one, has a position twice, or takes more than `list_bytes`. To
        detect the first, each list read is remembered by an 8-byte hash (twice that while hashes are merged): a
        million lists take 8 to 16 MB, and have a chance of 1 in 40 million of a false alarm.
        """
        seen = _HashSet()
        for frame, done in whole_lists(self._batches(), self._check_length):
            offsets = list_offsets(frame)
            self._check_adjacent(frame, offsets, seen)
            self._check_positions(frame, offsets)
            yield CandidateLists(frame.drop(ROW), offsets, done)

    def _batches(self) -> Rows:
        """Read validated batches in canonical form; one without rows if the source is empty."""
        done, empty = 0, True
        for number, (source, schema) in enumerate(self.sources):
            first = 0
            for frame, read_bytes in source.batches(schema.columns, self._batch_rows(number), schema.categories):
                if frame.height:
                    yield self._canonical(frame, number, first), done + read_bytes
                    empty = False
                first += frame.height
            done += source.size
        if empty:
            source, schema = self.sources[0]
            nothing = pl.DataFrame(schema={column: source.dtypes[column] for column in schema.columns})
            yield self._canonical(nothing, 0, 0), done

    def _batch_rows(self, number: int) -> int:
        """Return the rows of a batch, measured on the first rows of the source."""
        source, schema = self.sources[number]
        if source.rows is not None and source.rows <= FIRST_ROWS:
            return FIRST_ROWS
        batches = source.batches(schema.columns, FIRST_ROWS, schema.categories)
        raw = next((frame.head(FIRST_ROWS) for frame, _ in batches if frame.height), None)
        if raw is None:
            return 1
        frame = self._canonical(raw, number, 0)
        limit = BATCH_BYTES if self.batch_bytes is None else min(BATCH_BYTES, self.batch_bytes)
        return max(1, int(limit * raw.height / self._held_bytes([frame])))

    def _canonical(self, frame: pl.DataFrame, number: int, first: int) -> pl.DataFrame:
        schema = self.sources[number][1]
        rows = frame.select(schema.columns).with_columns(RowName.codes(number, first, frame.height))
        return schema.canonical(rows, self.row_name)

    def _held_bytes(self, frames: Sequence[pl.DataFrame]) -> int:
        return int(sum(frame.estimated_size() + self.work_bytes * frame.height for frame in frames))

    def _check_length(self, parts: Sequence[pl.DataFrame]) -> None:
        """Refuse a list, given by its rows so far, that does not fit into memory."""
        held = self._held_bytes(parts)
        if self.list_bytes is not None and held > self.list_bytes:
            rows = sum(part.height for part in parts)
            raise DataError(
                f"a list is ranked as a whole and may take {self.list_bytes / 1e9:.2g} GB; the one that begins at "
                f"{self.row_name(parts[0][ROW][0])} has {rows:,} candidates or more, which take {held / 1e9:.2g} GB "
                "(allow more memory)"
            )

    def _check_adjacent(self, frame: pl.DataFrame, offsets: NDArray[np.int64], seen: _HashSet) -> None:
        keys = _list_keys(frame)
        if not keys:
            return
        heads = frame.select(ROW, *keys)[offsets[:-1]]
        again = seen.add(stable_hash(heads.select(pl.concat_str(keys, separator="\x00")).to_series()))
        if again.any():
            row, *ids = heads.row(int(again.argmax()))
            which = ", ".join(f"{key.removesuffix('_id')} {name}" for key, name in zip(keys, ids, strict=True))
            advice = " (if this is another list, name its session with --column session_id=NAME)"
            raise DataError(
                f"the candidates of a list must lie together; {which} comes again, after others, "
                f"at {self.row_name(row)}{'' if 'session_id' in keys else advice}"
            )

    def _check_positions(self, frame: pl.DataFrame, offsets: NDArray[np.int64]) -> None:
        if "position" not in frame.columns:
            return
        places = frame.select(ROW, "position", list=pl.Series(list_ids(offsets)))
        again = places.filter(~pl.struct("list", "position").is_first_distinct())
        if again.height:
            row, position, _ = again.row(0)
            raise DataError(
                f"a current position must occur once in a list; {position} comes again at {self.row_name(row)}"
            )


def read_candidates(
    source: str | Path | Any,
    *,
    numeric: Sequence[str],
    categorical: Sequence[str],
    columns: Mapping[str, str] | None = None,
    known: Mapping[str, str] | None = None,
    required: Collection[str] = (),
    work_bytes: int = 0,
    batch_bytes: int | None = None,
    list_bytes: int | None = None,
) -> Candidates:
    """Open candidates.

    Args:
        source: As in `urank.read`: one row per candidate, or one row per query with list columns.
        numeric, categorical: The features of the model; `emb[0]` is the first number of a fixed-size list `emb`.
            Columns that are neither feature nor role are not read.
        columns: Role -> column, where the names differ; the roles are `CANDIDATE_ROLES`.
        known: The same for the log of the model, used where such columns exist and none has the name of the role.
        required: Roles that must be present.
        work_bytes, batch_bytes, list_bytes: As in `Candidates`.

    >>> table = pl.DataFrame({"query_id": [1, 1, 2], "price": [9, 3, 5], "more": ["x", "y", "z"]})
    >>> [lists] = read_candidates(table, numeric=["price"], categorical=[]).lists()
    >>> lists.frame.columns, lists.offsets.tolist()
    (['query_id', 'price'], [0, 2, 3])
    """
    sources: Sequence[TableSource]
    if is_path(source):
        name, mapping = str(source), {**(known or {}), **(columns or {})}
        ids = {mapping.get(role, role) for role in IDS}
        categories = _category_columns(categorical, mapping).values()
        sources = add_partitions([_open(path, ids, categories) for path in find_files(name)], name)
    else:
        name = "the candidates"
        sources = [open_table(source, name, "candidates")]
    model: dict[str, Any] = {"numeric": numeric, "categorical": categorical}
    roles: dict[str, Any] = {"columns": columns, "known": known, "required": required}
    schemas = [candidate_schema(s.dtypes, s.name, **roles, **model) for s in sources]
    return Candidates(name, _with_same_ids(sources, schemas), work_bytes, batch_bytes, list_bytes)


def _open(path: Path, ids: Collection[str], categories: Collection[str]) -> TableFile:
    """Open a file; ids, and categories that look like numbers in a CSV, are read as written."""
    file = open_file(path, ids)
    codes = {name for name in categories if name in file.dtypes and file.dtypes[name].is_numeric()}
    return open_file(path, {*ids, *codes}) if codes else file


def _with_same_ids(
    sources: Sequence[TableSource], schemas: Sequence[CandidateSchema]
) -> tuple[tuple[TableSource, CandidateSchema], ...]:
    """Check that all sources have the same roles, and return ids as text where their types differ."""
    first, roles = sources[0], schemas[0].roles
    for other, schema in zip(sources[1:], schemas[1:], strict=True):
        for role, column in {**schema.roles, **roles}.items():
            if role not in roles or role not in schema.roles:
                has, lacks = (first, other) if role in roles else (other, first)
                raise DataError(f"column '{column}' is in {has.name} but not in {lacks.name}")
    pairs = tuple(zip(sources, schemas, strict=True))
    ids = [role for role in roles if role in IDS]
    types = {role: {entry_type(source.dtypes[schema.roles[role]]) for source, schema in pairs} for role in ids}
    as_text = tuple(role for role in ids if len(types[role]) > 1)
    return tuple((source, replace(schema, as_text=as_text)) for source, schema in pairs)


def list_offsets(frame: pl.DataFrame) -> NDArray[np.int64]:
    """Return the bounds of the lists: runs of equal `query_id` and `session_id`; without either, one list.

    >>> list_offsets(pl.DataFrame({"query_id": ["a", "a", "b"], "session_id": [1, 2, 2]})).tolist()
    [0, 1, 2, 3]
    """
    keys = _list_keys(frame)
    if not keys:
        return offsets_of_runs(np.zeros(frame.height))
    return offsets_of_runs(frame.select(pl.struct(keys).rle_id()).to_series().to_numpy())


def _list_keys(frame: pl.DataFrame) -> list[str]:
    return [name for name in LIST_KEYS if name in frame.columns]


def whole_lists(
    batches: Iterable[tuple[pl.DataFrame, int]], check: Callable[[Sequence[pl.DataFrame]], object] = len
) -> Rows:
    """Cut batches between lists: rows that may continue in the next batch wait for it, if `check` of them agrees.

    >>> parts = [pl.DataFrame({"query_id": ids}) for ids in (["a", "b"], ["b"], ["b", "c", "c"])]
    >>> [frame["query_id"].to_list() for frame, _ in whole_lists((part, 0) for part in parts)]
    [['a'], ['b', 'b', 'b', 'c', 'c']]
    """

    def key(frame: pl.DataFrame, row: int) -> tuple[Any, ...]:
        keys = _list_keys(frame)
        return frame.select(keys).row(row) if keys else ()

    whole: list[pl.DataFrame] = []
    last: list[pl.DataFrame] = []  # the rows of a list that may continue
    done = 0
    for frame, done in batches:
        if last and key(last[-1], -1) != key(frame, 0):
            whole, last = [*whole, *last], []
        if whole:
            yield pl.concat(whole), done
        cut = int(list_offsets(frame)[-2]) if frame.height else 0
        whole, last = ([*last, frame[:cut]], [frame[cut:]]) if cut else ([], [*last, frame])
        check(last)
    if whole or last:
        yield pl.concat([*whole, *last]), done


class _HashSet:
    """A set of 64-bit hashes as sorted arrays, each more than twice as long as the next: 8 bytes per hash."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.uint64]] = []

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add hashes; return true for those that are in the set already, or occur earlier among them."""
        known = np.ones(len(hashes), dtype=np.bool_)
        fresh, firsts = np.unique(hashes, return_index=True)
        known[firsts] = False
        for array in self._arrays:
            places = np.minimum(np.searchsorted(array, hashes), len(array) - 1)
            known |= array[places] == hashes
        while self._arrays and len(self._arrays[-1]) <= 2 * len(fresh):
            fresh = np.sort(np.concatenate([self._arrays.pop(), fresh]), kind="stable")  # merges sorted runs
        if len(fresh):
            self._arrays.append(fresh)
        return known
