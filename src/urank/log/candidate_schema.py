"""The columns of candidates: which role each plays, and which gives each feature of a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import polars as pl
import polars.selectors as cs

from urank.errors import DataError
from urank.log.cells import ROW, RowName, can_play
from urank.log.schema import (
    Feature,
    Kind,
    LogSchema,
    check_mapping,
    check_types,
    entry_type,
    exploded,
    list_columns,
    no_column,
    some_of,
)

__all__ = ["CANDIDATE_ROLES", "IDS", "CandidateSchema", "candidate_schema", "category_columns"]

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
