"""The columns of an impression log: which role each plays, what it must hold, and the one place that checks it.

Required are `query_id`, `position` (1-based) and `click` (0 or 1). The other roles are optional. Every column without
a role is a feature: numbers are numeric; text, booleans and dictionaries are categorical; fixed-size lists of numbers
are expanded into one numeric feature for each place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import polars as pl
import polars.selectors as cs
from numpy.typing import NDArray
from polars.datatypes import DataTypeClass

from urank.errors import ConfigError, DataError

__all__ = [
    "ITEM",
    "LIST",
    "MAX_POSITION",
    "OWN",
    "QUERY",
    "REQUIRED",
    "ROLES",
    "ROW",
    "SESSION",
    "TEXT_ROLES",
    "Feature",
    "LogSchema",
    "RowName",
    "can_play",
    "check_mapping",
    "check_types",
    "entry_type",
    "exploded",
    "feature_expr",
    "infinite",
    "is_index",
    "list_columns",
    "loses_digits",
    "no_column",
    "role_expr",
    "role_rule",
    "signed_log",
    "some_of",
]


def signed_log(x: NDArray[Any]) -> NDArray[np.float64]:
    """sign(x) · log(1 + |x|): compresses heavy tails on both sides of 0 and keeps the order.

    >>> signed_log(np.array([-(np.e - 1), 0.0, np.e - 1])).tolist()
    [-1.0, 0.0, 1.0]
    """
    x = np.asarray(x, dtype=np.float64)
    compressed: NDArray[np.float64] = np.copysign(np.log1p(np.abs(x)), x)
    return compressed


# Columns of our own, beside those of the log; no column of a log may be called so.
OWN = "__urank_"
ROW, QUERY, SESSION, ITEM, LIST = (f"{OWN}{name}" for name in ("row", "query", "session", "item", "list"))

MAX_POSITION = 10_000
TEXT_ROLES = ("query_id", "session_id", "item_id", "policy", "category", "user_id", "arm")

_FLOAT32_MAX = 3.4028234e38
_TEXTS = (pl.String, pl.Boolean, pl.Categorical, pl.Enum, pl.Null)
_ISO_TIME = (
    r"^\s*(?<day>\d{4}-\d{2}-\d{2})"
    r"(?:[T ](?<minute>\d{2}:\d{2})(?<second>:\d{2}(?:\.\d+)?)?\s*(?<zone>[Zz]|[+-]\d{2}(?::?\d{2})?)?)?\s*$"
)


class RowName:
    """Turns the code in the column `ROW` into words: 'row 17 of log.parquet'."""

    _BITS = 40

    def __init__(self, files: list[str], word: str = "row") -> None:
        self.files = files
        self.word = word

    def __call__(self, code: int) -> str:
        return f"{self.word} {(code & (1 << self._BITS) - 1) + 1} of {self.files[code >> self._BITS]}"

    @classmethod
    def codes(cls, file: int, first: int, length: int) -> pl.Series:
        """The codes of `length` rows of a file, from its row `first` on."""
        return pl.int_range((file << cls._BITS) + first, (file << cls._BITS) + first + length, eager=True).alias(ROW)


def can_play(role: str, dtype: pl.DataType | DataTypeClass) -> bool:
    """Whether a column of this type can play a role; numbers may also come as text."""
    if dtype.is_numeric() or dtype in _TEXTS:
        return True
    return (role in TEXT_ROLES or role == "timestamp") and dtype in (pl.Date, pl.Datetime)


def role_expr(role: str, dtype: pl.DataType, column: str) -> pl.Expr | None:
    """The column that plays a role under the role's name; `None` for `category`, which its feature carries."""
    if role == "category":
        return None
    if role in TEXT_ROLES:
        return _as_text(column, dtype).alias(role)
    return (_as_time(column, dtype) if role == "timestamp" else _as_number(column, dtype)).alias(role)


def feature_expr(name: str, column: str, place: int | None, dtype: pl.DataType, *, categorical: bool) -> pl.Expr:
    """A feature under its name: text, or a number with NaN where it is missing."""
    if categorical:
        return _as_text(column, dtype).alias(name)
    values = pl.col(column) if place is None else pl.col(column).arr.get(place)
    wide = pl.Float32 if dtype == pl.Float32 else pl.Float64
    return values.cast(wide).fill_null(float("nan")).alias(name)


def _as_number(column: str, dtype: pl.DataType) -> pl.Expr:
    values = pl.col(column)
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        values = values.cast(pl.String).str.strip_chars()
    return values.cast(pl.Float64, strict=False)


def _as_text(column: str, dtype: pl.DataType) -> pl.Expr:
    """Ids as text; whole floats (what pandas makes of integers with gaps) as integers."""
    if dtype.is_float():
        values = pl.col(column).fill_nan(None)
        whole = values.cast(pl.Int64, strict=False)
        return pl.when(whole == values).then(whole.cast(pl.String)).otherwise(values.cast(pl.String))
    return pl.col(column).cast(pl.String)


def _as_time(column: str, dtype: pl.DataType) -> pl.Expr:
    """Microseconds since 1970 (UTC) for dates, ISO text and fractional seconds; whole numbers as they are."""
    values = pl.col(column)
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        text = values.cast(pl.String)
        return pl.coalesce(_iso_time(text), text.str.strip_chars().cast(pl.Int64, strict=False))
    if dtype.is_temporal():
        return values.cast(pl.Datetime("us")).cast(pl.Int64)
    if dtype.is_float() or dtype == pl.Decimal:
        return (values.cast(pl.Float64) * 1_000_000).round().cast(pl.Int64, strict=False)
    return values.cast(pl.Int64, strict=False)


def _iso_time(text: pl.Expr) -> pl.Expr:
    """ISO 8601 only, with or without an offset: 01/02/2020 is January here and February there, so it is no time."""
    part = text.str.extract_groups(_ISO_TIME).struct
    clock = pl.concat_str(
        part.field("day"),
        pl.lit("T"),
        part.field("minute").fill_null("00:00"),
        part.field("second").fill_null(":00"),
    )
    local = clock.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False).cast(pl.Int64)
    zone = part.field("zone").str.replace(":", "")
    hours = zone.str.slice(1, 2).cast(pl.Int64, strict=False).fill_null(0)
    minutes = zone.str.slice(3, 2).cast(pl.Int64, strict=False).fill_null(0)
    ahead = pl.when(zone.str.starts_with("-").fill_null(False)).then(-1).otherwise(1) * (60 * hours + minutes)
    return local - ahead * 60_000_000


def infinite(name: str) -> pl.Expr:
    """True where a numeric feature is infinite or does not fit 32 bits."""
    return (pl.col(name).abs() > _FLOAT32_MAX) & pl.col(name).is_not_nan()


def loses_digits(column: str) -> pl.Expr:
    """Whether a column of whole numbers holds one that a 32-bit float cannot tell from its neighbours."""
    values = pl.col(column)
    return (values.cast(pl.Float32).cast(pl.Int128) != values.cast(pl.Int128)).any()


def role_rule(role: str) -> tuple[str, pl.Expr]:
    """What a numeric role must be, in words, and the expression that is true where it is not."""
    x = pl.col(role)
    missing = x.is_null() | (x.is_nan() if role != "timestamp" else False)
    match role:
        case "position" | "ranked_position":
            rule = f"a whole number from 1 to {MAX_POSITION}"
            return rule, missing | (x < 1) | (x != x.floor()) | (x > MAX_POSITION)
        case "click" | "conversion":
            return "0 or 1", missing | ~x.is_in([0.0, 1.0])
        case "value":
            return "a finite number from 0 up", missing | (x < 0) | (x > _FLOAT32_MAX)
        case "propensity":
            return "above 0 and at most 1", missing | (x <= 0) | (x > 1)
        case "relevance":
            return "a finite number from 0 up, or missing", (x < 0) | ((x > _FLOAT32_MAX) & x.is_not_nan())
        case _:
            return "a date or time (as 2020-01-31 or 2020-01-31T23:59:00Z) or a whole number", missing


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
    "user_id": "who saw it; kept for experiments, not a feature",
    "arm": "the arm of an A/B test that the user was in; `urank abtest analyse` reads it",
    "conversion": "1 when the click led to what counts, as a download or an order",
}

_MAY_BE_MISSING = ("policy", "category", "relevance", "user_id", "arm")
_INDEX = re.compile(r"(__index_level_\d+__)?")

Kind = Literal["numeric", "categorical"]
Type = pl.DataType | DataTypeClass


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

    @property
    def categories(self) -> list[str]:
        """The columns of the source that hold names."""
        return [feature.column for feature in self.features if feature.kind == "categorical"]

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
        _check_names(dtypes, mapping, categorical, drop, name)
        dtypes = {
            column: dtype for column, dtype in dtypes.items() if not is_index(column) or column in mapping.values()
        }
        # A column may be the category besides its own role; any other role takes it away from that.
        taken = {column for role, column in mapping.items() if role != "category"} | set(drop)
        roles = {role: mapping.get(role, role) for role in ROLES if role in mapping or role in set(dtypes) - taken}
        _check_roles(roles, mapping, dtypes, drop, name)
        used = set(roles.values()) | set(drop)
        in_lists = isinstance(dtypes[roles["position"]], pl.List)
        types = {column: entry_type(dtype) if in_lists else dtype for column, dtype in dtypes.items()}
        check_types(roles, types, name)
        features: list[Feature] = []
        if "category" in roles:
            features.append(Feature("category", "categorical", roles["category"]))
        for column, dtype in types.items():
            if column not in used:
                features.extend(_features_of(column, dtype, name, as_category=column in categorical))
        twice = [feature for feature, count in Counter(feature.name for feature in features).items() if count > 1]
        if twice:
            raise DataError(f"two columns of {name} would make the feature '{twice[0]}'; rename one or --drop it")
        return cls(roles, tuple(features))

    def canonical(self, frame: pl.DataFrame, where: RowName) -> pl.DataFrame:
        """The batch under its canonical names and types, every rule checked; the column `ROW` is kept.

        Text is `String`, numbers `Float32` with NaN for missing, positions `Int32`, clicks and conversions `Int8`, time
        `Int64` (microseconds since 1970 for dates). Raises `DataError` with the first row that breaks a rule.
        """
        frame = exploded(frame, self.roles["position"], where)
        result = self._named_columns(frame)
        self._check(frame, result, where)
        return result.with_columns(
            pl.col("position").cast(pl.Int32),
            cs.by_name("click", "conversion", require_all=False).cast(pl.Int8),
            cs.by_name("ranked_position", require_all=False).cast(pl.Int32),
            cs.by_name("value", "relevance", "propensity", require_all=False).cast(pl.Float32),
            *[pl.col(name).cast(pl.Float32) for name in self.named("numeric")],
        )

    def losing_digits(self, frame: pl.DataFrame) -> list[str]:
        """The numeric features of a batch, as it was read, whose whole numbers do not survive as 32-bit floats."""
        flags = {}
        dtypes = frame.schema
        for feature in self.features:
            dtype = dtypes[feature.column]
            if feature.kind == "numeric" and feature.place is None and entry_type(dtype).is_integer():
                values = frame[feature.column].explode() if isinstance(dtype, pl.List) else frame[feature.column]
                flags[feature.name] = values.to_frame().select(loses_digits(feature.column)).item()
        return [name for name, flag in flags.items() if flag]

    def _named_columns(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The roles and features of a batch under their names, and `ROW`."""
        dtypes = frame.schema  # made anew each time it is asked for
        exprs = [role_expr(role, dtypes[column], column) for role, column in self.roles.items()]
        exprs += [
            feature_expr(each.name, each.column, each.place, dtypes[each.column], categorical=each.kind != "numeric")
            for each in self.features
        ]
        return frame.select(ROW, *[expr for expr in exprs if expr is not None])

    def _check(self, raw: pl.DataFrame, result: pl.DataFrame, where: RowName) -> None:
        rules: list[tuple[str, str, pl.Expr]] = []
        for role in self.roles:
            if role in TEXT_ROLES and role not in _MAY_BE_MISSING:
                rules.append((role, f"{role} must not be missing", pl.col(role).is_null()))
            elif role not in TEXT_ROLES:
                requirement, broken = role_rule(role)
                rules.append((role, f"{role} must be {requirement}", broken))
        rules += [
            (name, f"feature '{name}' must be finite or missing", infinite(name)) for name in self.named("numeric")
        ]
        flags = result.select(expr.any().alias(str(i)) for i, (_, _, expr) in enumerate(rules)).row(0)
        for (column, message, expr), flag in zip(rules, flags, strict=True):
            if flag:
                row = int(result.select(expr.fill_null(False).arg_max()).item())
                source, place = self._source(column)
                got = raw[source][row] if place is None else raw[source][row][place]
                shown = "nothing" if got is None or got != got else repr(got)
                raise DataError(f"{message}; got {shown} at {where(result[ROW][row])}")

    def _source(self, name: str) -> tuple[str, int | None]:
        """The column, and the place in it, that a role or a feature comes from."""
        if name in self.roles:
            return self.roles[name], None
        return next((feature.column, feature.place) for feature in self.features if feature.name == name)


def list_columns(dtypes: Mapping[str, pl.DataType]) -> list[str]:
    """The columns that hold one list for each query."""
    return [column for column, dtype in dtypes.items() if isinstance(dtype, pl.List)]


def entry_type(dtype: pl.DataType) -> Type:
    """The type of an item's entry, in a column that may hold one list for each query."""
    return dtype.inner if isinstance(dtype, pl.List) else dtype


def is_index(column: str) -> bool:
    """Whether a column is the unnamed index that pandas writes beside a table: neither role nor feature."""
    return _INDEX.fullmatch(column) is not None


def check_mapping(
    mapping: Mapping[str, str], roles: Collection[str], dtypes: Collection[str], name: str, kind: str
) -> None:
    """Refuse to give a column a role when one of them does not exist; `kind` is what has these roles, as "a log"."""
    for role, column in mapping.items():
        if role not in roles:
            raise ConfigError(
                f"'{role}' is not a role that a column of {kind} can play; the roles are {', '.join(roles)}"
            )
        if column not in dtypes:
            raise DataError(f"{name} has no column '{column}' (asked for as {role}); it has {some_of(dtypes)}")


def check_types(roles: Mapping[str, str], types: Mapping[str, Type], name: str) -> None:
    """Refuse a column whose type cannot play its role."""
    for role, column in roles.items():
        if not can_play(role, types[column]):
            raise DataError(
                f"column '{column}' of {name} is of type {types[column]}, which cannot play the role {role}"
            )


def no_column(role: str, dtypes: Collection[str], name: str) -> DataError:
    """The refusal of a source in which nothing plays a role."""
    return DataError(
        f"{name} has no column '{role}'; name the one that plays this role with "
        f"--column {role}=NAME (it has {some_of(dtypes)})"
    )


def some_of(names: Collection[str], most: int = 12) -> str:
    """Names for an error, cut short when there are many.

    >>> some_of(["query_id", "position", "click"], most=2)
    'query_id, position and 1 more'
    """
    shown = ", ".join(list(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _check_names(
    dtypes: Collection[str],
    mapping: Mapping[str, str],
    categorical: Collection[str],
    drop: Collection[str],
    name: str,
) -> None:
    """Refuse roles and columns that do not exist, and names that are kept for our own columns."""
    check_mapping(mapping, ROLES, dtypes, name, "a log")
    for column in [*categorical, *drop]:
        if column not in dtypes:
            raise DataError(f"{name} has no column '{column}'; it has {some_of(dtypes)}")
    for column in dtypes:
        if column.startswith(OWN) and column not in drop:
            raise DataError(
                f"column '{column}' of {name} begins with {OWN}, which is kept for urank; rename it or --drop it"
            )


def _check_roles(
    roles: Mapping[str, str],
    mapping: Mapping[str, str],
    dtypes: Collection[str],
    drop: Collection[str],
    name: str,
) -> None:
    """Refuse a log in which nothing plays a required role, or two columns claim one."""
    for role in REQUIRED:
        if role in roles:
            continue
        other = next((other for other, column in mapping.items() if column == role), None)
        if role in drop:
            raise ConfigError(f"{name} needs its column '{role}', which --drop leaves out")
        if other is not None:
            raise ConfigError(
                f"column '{role}' of {name} is to play {other}, so nothing plays {role}; "
                f"name the column that does with --column {role}=NAME"
            )
        raise no_column(role, dtypes, name)
    claimed = set(mapping.values()) | set(drop)
    for role, column in mapping.items():
        if role in dtypes and column != role and role not in claimed:
            raise ConfigError(
                f"{name} has a column '{role}' besides '{column}', which is to play that role; drop one of them"
            )


def _features_of(column: str, dtype: Type, name: str, *, as_category: bool) -> list[Feature]:
    if isinstance(dtype, pl.Array) and dtype.inner.is_numeric() and not as_category:
        return [Feature(f"{column}[{place}]", "numeric", column, place) for place in range(dtype.size)]
    if dtype in (pl.String, pl.Boolean, pl.Categorical, pl.Enum) or (as_category and can_play("category", dtype)):
        return [Feature(column, "categorical", column)]
    if not as_category and (dtype.is_numeric() or dtype == pl.Null):
        return [Feature(column, "numeric", column)]
    raise DataError(
        f"column '{column}' of {name} is of type {dtype}, which cannot be a feature; "
        "give it a role with --column ROLE=NAME or leave it out with --drop NAME"
    )


def exploded(frame: pl.DataFrame, position: str, where: RowName) -> pl.DataFrame:
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
                f"{column} {lengths[column][row]} at {where(frame[ROW][row])}"
            )
    empty = lengths[position] == 0
    if empty.any():
        raise DataError(f"a query must have items; got none at {where(frame[ROW][int(empty.arg_max() or 0)])}")
    return frame.explode(lists)
