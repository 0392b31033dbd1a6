"""The columns of an impression log: which role each plays, what it must hold, and the one place that checks it.

Required are `query_id`, `position` (1-based) and `click` (0 or 1). The other roles are optional. Every column without
a role is a feature: numbers are numeric; text, booleans and dictionaries are categorical; fixed-size lists of numbers
are expanded into one numeric feature for each place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import polars as pl
import polars.selectors as cs
from polars.datatypes import DataTypeClass

from urank.errors import ConfigError, DataError

__all__ = ["MAX_POSITION", "REQUIRED", "ROLES", "Feature", "LogSchema", "list_columns"]

REQUIRED = ("query_id", "position", "click")

ROLES: Mapping[str, str] = {
    "query_id": "the query or request; train, validation and test never share one",
    "session_id": "tells apart several showings of one query; a list is one (query_id, session_id)",
    "item_id": "the item shown; the same id at two positions is what position effects are learned from",
    "position": "where it was shown, from 1 (the top) up; gaps are allowed",
    "click": "1 when it was clicked, 0 when not",
    "value": "what a click on it is worth, b in the paper; 1 when there is no such column",
    "policy": "which ranker, or which kind of traffic, made the list",
    "timestamp": "when it was shown",
    "category": "a group of items; also used as a categorical feature",
    "relevance": "a judged or true relevance label",
    "propensity": "the probability with which this item was put at this position",
    "ranked_position": "the position before the list was randomised",
}

MAX_POSITION = 10_000
_FLOAT32_MAX = 3.4028234e38
_TEXT_ROLES = ("query_id", "session_id", "item_id", "policy", "category")
_MAY_BE_MISSING = ("policy", "category", "relevance")

Kind = Literal["numeric", "categorical"]


@dataclass(frozen=True)
class Feature:
    """A feature: its name, its kind, the column it comes from, and its place there when that holds fixed-size lists."""

    name: str
    kind: Kind
    column: str
    place: int | None = None


@dataclass(frozen=True)
class LogSchema:
    """Which column plays which role, and the features."""

    roles: Mapping[str, str]
    features: tuple[Feature, ...]

    @property
    def columns(self) -> list[str]:
        """The columns of the source that are read."""
        return list(dict.fromkeys([*self.roles.values(), *(feature.column for feature in self.features)]))

    def named(self, kind: Kind) -> list[str]:
        """The names of the features of one kind."""
        return [feature.name for feature in self.features if feature.kind == kind]

    @classmethod
    def infer(
        cls,
        dtypes: Mapping[str, pl.DataType],
        name: str,
        *,
        columns: Mapping[str, str] | None = None,
        categorical: Collection[str] = (),
        drop: Collection[str] = (),
    ) -> LogSchema:
        """Give each column of a source its role or its kind; `name` is what errors call the source.

        Args:
            dtypes: the source's columns, each with its type.
            columns: role -> the column that plays it, for those whose names differ.
            categorical: numeric columns whose numbers are names (ids, codes).
            drop: columns that are neither role nor feature.
        """
        mapping = dict(columns or {})
        for role, column in mapping.items():
            if role not in ROLES:
                raise ConfigError(f"'{role}' is not a role a column can play; the roles are {', '.join(ROLES)}")
            if column not in dtypes:
                raise DataError(f"{name} has no column '{column}' (asked for as {role}); it has {_some(dtypes)}")
        for column in [*categorical, *drop]:
            if column not in dtypes:
                raise DataError(f"{name} has no column '{column}'; it has {_some(dtypes)}")
        taken = set(mapping.values()) | set(drop)
        roles = {role: mapping.get(role, role) for role in ROLES if role in mapping or role in set(dtypes) - taken}
        for role in REQUIRED:
            if role not in roles:
                raise DataError(
                    f"{name} has no column '{role}'; name the one that plays this role with "
                    f"--column {role}=NAME (it has {_some(dtypes)})"
                )
        for role, column in mapping.items():
            if role in dtypes and column != role and role not in taken:
                raise ConfigError(
                    f"{name} has a column '{role}' besides '{column}', which is to play that role; drop one of them"
                )
        used = set(roles.values()) | set(drop)
        in_lists = isinstance(dtypes[roles["position"]], pl.List)
        features: list[Feature] = []
        if "category" in roles:
            features.append(Feature("category", "categorical", roles["category"]))
        for column, dtype in dtypes.items():
            if column not in used:
                inner = dtype.inner if in_lists and isinstance(dtype, pl.List) else dtype
                features.extend(_features_of(column, inner, name, as_category=column in categorical))
        return cls(roles, tuple(features))

    def canonical(self, frame: pl.DataFrame, where: RowName) -> pl.DataFrame:
        """The batch under its canonical names and types, every rule checked; `_row` is kept.

        Text is `String`, numbers `Float32` with NaN for missing, positions `Int32`, clicks `Int8`, time `Int64`
        (microseconds since 1970 for dates). Raises `DataError` with the first row that breaks a rule.
        """
        frame = _exploded(frame, self.roles["position"], where)
        exprs = [_role_expr(role, frame.schema[column], column) for role, column in self.roles.items()]
        exprs += [_feature_expr(feature, frame.schema[feature.column]) for feature in self.features]
        result = frame.select("_row", *[expr for expr in exprs if expr is not None])
        self._check(frame, result, where)
        return result.with_columns(
            pl.col("position").cast(pl.Int32),
            pl.col("click").cast(pl.Int8),
            cs.by_name("ranked_position", require_all=False).cast(pl.Int32),
            cs.by_name("value", "relevance", "propensity", require_all=False).cast(pl.Float32),
            *[pl.col(name).cast(pl.Float32) for name in self.named("numeric")],
        )

    def _check(self, raw: pl.DataFrame, result: pl.DataFrame, where: RowName) -> None:
        rules: list[tuple[str, str, pl.Expr]] = []
        for role in self.roles:
            if role in _TEXT_ROLES and role not in _MAY_BE_MISSING:
                rules.append((role, f"{role} must not be missing", pl.col(role).is_null()))
            elif role not in _TEXT_ROLES:
                requirement, broken = _number_rule(role)
                rules.append((role, f"{role} must be {requirement}", broken))
        for name in self.named("numeric"):
            infinite = (pl.col(name).abs() > _FLOAT32_MAX) & pl.col(name).is_not_nan()
            rules.append((name, f"feature '{name}' must be finite or missing", infinite))
        flags = result.select(expr.any().alias(str(i)) for i, (_, _, expr) in enumerate(rules)).row(0)
        for (column, message, expr), flag in zip(rules, flags, strict=True):
            if flag:
                row = int(result.select(expr.fill_null(False).arg_max()).item())
                source = self.roles.get(column) or next(f.column for f in self.features if f.name == column)
                got = raw[source][row]
                shown = "nothing" if got is None or got != got else repr(got)
                raise DataError(f"{message}; got {shown} at {where(result['_row'][row])}")


class RowName:
    """Turns the code in the column `_row` into words: 'row 17 of log.parquet'."""

    _BITS = 40

    def __init__(self, files: list[str], word: str = "row") -> None:
        self.files = files
        self.word = word

    def __call__(self, code: int) -> str:
        return f"{self.word} {(code & (1 << self._BITS) - 1) + 1} of {self.files[code >> self._BITS]}"

    @classmethod
    def codes(cls, file: int, first: int, length: int) -> pl.Series:
        """The codes of `length` rows of a file, from its row `first` on."""
        return pl.int_range((file << cls._BITS) + first, (file << cls._BITS) + first + length, eager=True).alias("_row")


def list_columns(dtypes: Mapping[str, pl.DataType]) -> list[str]:
    """The columns that hold one list for each query."""
    return [column for column, dtype in dtypes.items() if isinstance(dtype, pl.List)]


def _some(names: Collection[str], most: int = 12) -> str:
    shown = ", ".join(list(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _features_of(column: str, dtype: pl.DataType | DataTypeClass, name: str, *, as_category: bool) -> list[Feature]:
    if isinstance(dtype, pl.Array) and dtype.inner.is_numeric():
        return [Feature(f"{column}[{place}]", "numeric", column, place) for place in range(dtype.size)]
    if as_category or dtype in (pl.String, pl.Boolean, pl.Categorical, pl.Enum):
        return [Feature(column, "categorical", column)]
    if dtype.is_numeric() or dtype == pl.Null:
        return [Feature(column, "numeric", column)]
    raise DataError(
        f"column '{column}' of {name} is of type {dtype}, which cannot be a feature; "
        "give it a role with --column ROLE=NAME or leave it out with --drop NAME"
    )


def _exploded(frame: pl.DataFrame, position: str, where: RowName) -> pl.DataFrame:
    """One row per item, from a frame that may have one row per query with list columns."""
    if not isinstance(frame.schema[position], pl.List):
        return frame
    lists = list_columns(frame.schema)
    lengths = frame.select(pl.col(column).list.len().fill_null(0) for column in lists)
    for column in lists:
        unequal = lengths[column] != lengths[position]
        if unequal.any():
            row = int(unequal.arg_max() or 0)
            raise DataError(
                f"the lists of a query must be of one length; {position} has {lengths[position][row]} items and "
                f"{column} {lengths[column][row]} at {where(frame['_row'][row])}"
            )
    empty = lengths[position] == 0
    if empty.any():
        raise DataError(f"a query must have items; got none at {where(frame['_row'][int(empty.arg_max() or 0)])}")
    return frame.explode(lists)


def _as_number(column: str) -> pl.Expr:
    return pl.col(column).cast(pl.Float64, strict=False)


def _role_expr(role: str, dtype: pl.DataType, column: str) -> pl.Expr | None:
    if role == "category":
        return None  # its feature of the same name carries it
    if role in _TEXT_ROLES:
        return _as_text(column, dtype).alias(role)
    if role != "timestamp":
        return _as_number(column).alias(role)
    if dtype == pl.String:
        return pl.col(column).str.to_datetime(time_unit="us", strict=False).cast(pl.Int64).alias(role)
    if dtype.is_temporal():
        return pl.col(column).cast(pl.Datetime("us")).cast(pl.Int64).alias(role)
    return pl.col(column).cast(pl.Int64, strict=False).alias(role)


def _as_text(column: str, dtype: pl.DataType) -> pl.Expr:
    """Ids as text; whole floats (what pandas makes of integers with gaps) as integers."""
    if dtype.is_float():
        values = pl.col(column).fill_nan(None)
        whole = values.cast(pl.Int64, strict=False)
        return pl.when(whole == values).then(whole.cast(pl.String)).otherwise(values.cast(pl.String))
    return pl.col(column).cast(pl.String)


def _feature_expr(feature: Feature, dtype: pl.DataType) -> pl.Expr:
    if feature.kind == "categorical":
        return _as_text(feature.column, dtype).alias(feature.name)
    values = pl.col(feature.column) if feature.place is None else pl.col(feature.column).arr.get(feature.place)
    wide = pl.Float32 if dtype == pl.Float32 else pl.Float64
    return values.cast(wide).fill_null(float("nan")).alias(feature.name)


def _number_rule(role: str) -> tuple[str, pl.Expr]:
    """What a numeric role must be, in words, and the expression that is true where it is not."""
    x = pl.col(role)
    missing = x.is_null() | (x.is_nan() if role != "timestamp" else False)
    match role:
        case "position" | "ranked_position":
            rule = f"a whole number from 1 to {MAX_POSITION}"
            return rule, missing | (x < 1) | (x != x.floor()) | (x > MAX_POSITION)
        case "click":
            return "0 or 1", missing | ~x.is_in([0.0, 1.0])
        case "value":
            return "a finite number from 0 up", missing | (x < 0) | (x > _FLOAT32_MAX)
        case "propensity":
            return "above 0 and at most 1", missing | (x <= 0) | (x > 1)
        case "relevance":
            return "a finite number from 0 up, or missing", (x < 0) | ((x > _FLOAT32_MAX) & x.is_not_nan())
        case _:
            return "a date, a time or a whole number", missing
