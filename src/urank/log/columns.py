"""The columns of an impression log: their roles, their types, and the validation of every row.

Required are `query_id`, `position` (1-based) and `click` (0 or 1); the other roles are optional. Every column without
a role is a feature: numbers are numeric; text, booleans and dictionaries are categorical; a column of fixed-size lists
of numbers becomes one numeric feature per element.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

import polars as pl
import polars.selectors as cs
from polars.datatypes import DataTypeClass

from urank.errors import ConfigError, DataError

ROLES: Mapping[str, str] = {
    "query_id": "the query or request; train, validation and test never share one",
    "session_id": "distinguishes several showings of one query; a list is one (query_id, session_id)",
    "item_id": "the item shown; position effects are learned from ids shown at two positions",
    "position": "the position at which it was shown, from 1 (the top); gaps are allowed",
    "click": "1 if it was clicked, 0 if not",
    "value": "the value of a click, b in the paper; 1 without such a column",
    "policy": "the ranker, or the kind of traffic, that produced the list",
    "timestamp": "the time at which it was shown",
    "category": "a group of items; also used as a categorical feature",
    "relevance": "a judged or true relevance label",
    "propensity": "the probability with which this item was placed at this position",
    "ranked_position": "the position before the list was randomised",
    "user_id": "the user; kept for experiments, not a feature",
    "arm": "the user's arm in an A/B test; `urank abtest analyse` reads it",
    "conversion": "1 if the click led to the desired outcome, such as a download or an order",
}
REQUIRED = ("query_id", "position", "click")
USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "query_id": ("srch_id", "search_id", "qid", "request_id"),
    "session_id": (),
    "item_id": ("prop_id", "doc_id", "product_id"),
    "position": ("rank", "pos", "display_position", "slot"),
    "click": ("click_bool", "clicked", "is_click", "is_clicked"),
    "conversion": ("booking_bool", "converted", "is_conversion", "purchased"),
    "user_id": (),
}
"""Names that, besides its own and in any case, can only mean a role. A column is taken by such a name if it is the only
one and the role is neither assigned nor played by a column of its own name."""
YES, NO = ("yes", "y", "true", "t"), ("no", "n", "false", "f")
"""Texts that `binarise` takes for 1 and 0."""
TEXT_ROLES = ("query_id", "session_id", "item_id", "policy", "category", "user_id", "arm")
MAX_POSITION = 10_000

# Internal columns; no column of a log may have this prefix.
_PREFIX = "__urank_"
ROW, QUERY, SESSION, ITEM, LIST = (f"{_PREFIX}{name}" for name in ("row", "query", "session", "item", "list"))

FeatureKind = Literal["numeric", "categorical"]
Type = pl.DataType | DataTypeClass

_OPTIONAL_TEXT = ("policy", "category", "user_id", "arm")
_FLOAT32_MAX = 3.4028234e38
_TEXT_TYPES = (pl.String, pl.Categorical, pl.Enum)
_CATEGORICAL_TYPES = (*_TEXT_TYPES, pl.Boolean)
_PANDAS_INDEX = re.compile(r"(__index_level_\d+__)?")
_ISO_TIME = (
    r"^\s*(?<day>\d{4}-\d{2}-\d{2})"
    r"(?:[T ](?<minute>\d{2}:\d{2})(?<second>:\d{2}(?:\.\d+)?)?\s*(?<zone>[Zz]|[+-]\d{2}(?::?\d{2})?)?)?\s*$"
)


@dataclass(frozen=True)
class Feature:
    """A feature: its name, kind and source column, and the element if that column contains fixed-size lists."""

    name: str
    kind: FeatureKind
    column: str
    place: int | None = None


class RowName:
    """Describe the code in the column `ROW` for error messages: 'row 17 of log.parquet'."""

    _BITS = 40

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __call__(self, code: int) -> str:
        return f"row {(code & (1 << self._BITS) - 1) + 1} of {self.files[code >> self._BITS]}"

    @classmethod
    def codes(cls, file: int, first: int, length: int) -> pl.Series:
        """Return the codes of `length` rows of a file, starting at its row `first`."""
        start = (file << cls._BITS) + first
        return pl.int_range(start, start + length, eager=True).alias(ROW)


@dataclass(frozen=True)
class LogSchema:
    """The column of each role, the features, and how numbers are read.

    Attributes:
        guessed: Roles that were assigned by `USUAL_NAMES`.
        first_position: The number of the top position in the source.
        binarise: Whether clicks and conversions may be counts or words, of which any but 0 and no become 1.
    """

    roles: Mapping[str, str]
    features: tuple[Feature, ...]
    guessed: tuple[str, ...] = ()
    first_position: int = 1
    binarise: bool = False

    @property
    def columns(self) -> list[str]:
        """The source columns to read."""
        return list(dict.fromkeys([*self.roles.values(), *(feature.column for feature in self.features)]))

    @property
    def categories(self) -> list[str]:
        """The source columns of the categorical features."""
        return [feature.column for feature in self.features if feature.kind == "categorical"]

    def named(self, kind: FeatureKind) -> list[str]:
        """Return the names of the features of one kind."""
        return [feature.name for feature in self.features if feature.kind == kind]

    def without(self, names: Collection[str]) -> LogSchema:
        """Return the schema without some of the features."""
        return replace(self, features=tuple(feature for feature in self.features if feature.name not in names))

    @property
    def renamed(self) -> dict[str, str]:
        """Role -> column where the names differ."""
        return {role: column for role, column in self.roles.items() if role != column}

    @property
    def guesses(self) -> str:
        """The guessed roles in words, with the remedy if one is wrong; empty without any."""
        if not self.guessed:
            return ""
        said = ", ".join(f"{self.roles[role]} as {role}" for role in self.guessed)
        return f"reading {said}; say -c ROLE=COLUMN if that is wrong"

    @classmethod
    def infer(
        cls,
        dtypes: Mapping[str, pl.DataType],
        name: str,
        *,
        columns: Mapping[str, str] | None = None,
        categorical: Collection[str] = (),
        drop: Collection[str] = (),
        known: Mapping[str, str] | None = None,
        first_position: int = 1,
        binarise: bool = False,
    ) -> LogSchema:
        """Assign a role or a feature kind to each column of a source; `columns` and the rest are as in `read`."""
        mapping = dict(columns or {})
        check_mapping(mapping, ROLES, dtypes, name, "a log")
        guesses = guessed_roles(dtypes, mapping, {*categorical, *drop}, known)
        mapping |= guesses
        for column in [*categorical, *drop]:
            if column not in dtypes:
                raise DataError(f"{name} has no column '{column}'; it has {join_names(dtypes)}")
        for column in dtypes:
            if column.startswith(_PREFIX) and column not in drop:
                raise DataError(
                    f"column '{column}' of {name} begins with {_PREFIX}, which is reserved; rename it or --drop it"
                )
        dtypes = {key: dtype for key, dtype in dtypes.items() if not is_index(key) or key in mapping.values()}
        # A column may be the category besides its own role; any other mapping takes that role away from it.
        taken = {column for role, column in mapping.items() if role != "category"} | set(drop)
        roles = {role: mapping.get(role, role) for role in ROLES if role in mapping or role in set(dtypes) - taken}
        _check_roles(roles, mapping, dtypes, drop, name)
        in_lists = isinstance(dtypes[roles["position"]], pl.List)
        types = {column: entry_type(dtype) if in_lists else dtype for column, dtype in dtypes.items()}
        check_types(roles, types, name)
        features = [Feature("category", "categorical", roles["category"])] if "category" in roles else []
        for column, dtype in types.items():
            if column not in {*roles.values(), *drop}:
                features += _features_of(column, dtype, name, as_category=column in categorical)
        duplicates = [feature for feature, count in Counter(each.name for each in features).items() if count > 1]
        if duplicates:
            raise DataError(f"two columns of {name} would make the feature '{duplicates[0]}'; rename one or --drop it")
        return cls(roles, tuple(features), tuple(guesses), first_position, binarise)

    def canonical(self, frame: pl.DataFrame, where: RowName) -> pl.DataFrame:
        """Validate a batch and convert it to canonical names and types; the column `ROW` is kept.

        Text is `String`, numbers `Float32` with NaN for missing, positions `Int32`, clicks and conversions `Int8`,
        times `Int64` (microseconds since 1970 for dates). Raises `DataError` for the first row that breaks a rule.
        """
        frame = explode_lists(frame, self.roles["position"], where)
        result = self._named_columns(frame)
        self._check(frame, result, where)
        return result.with_columns(
            cs.by_name("position", "ranked_position", require_all=False).cast(pl.Int32),
            cs.by_name("click", "conversion", require_all=False).cast(pl.Int8),
            cs.by_name("value", "relevance", "propensity", *self.named("numeric"), require_all=False).cast(pl.Float32),
        )

    def losing_digits(self, frame: pl.DataFrame) -> list[str]:
        """Return the numeric features of a raw batch with integers that float32 cannot represent."""
        found = []
        dtypes = frame.schema
        for feature in self.features:
            if feature.kind == "numeric" and feature.place is None and entry_type(dtypes[feature.column]).is_integer():
                values = frame[feature.column]
                values = values.explode() if isinstance(values.dtype, pl.List) else values
                if (values.cast(pl.Float32).cast(pl.Int128) != values.cast(pl.Int128)).any():
                    found.append(feature.name)
        return found

    def _named_columns(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Select the roles and features of a batch under their names, and `ROW`."""
        dtypes = frame.schema  # the property builds a new object on each access
        exprs = [role_expr(role, dtypes[column], column) for role, column in self.roles.items()]
        if self.binarise:
            exprs = [
                _binary(role, dtypes[self.roles[role]], expr) for role, expr in zip(self.roles, exprs, strict=True)
            ]
        if self.first_position != 1:
            shift, moved = 1 - self.first_position, ("position", "ranked_position")
            exprs = [
                expr + shift if role in moved and expr is not None else expr
                for role, expr in zip(self.roles, exprs, strict=True)
            ]
        exprs += [
            feature_expr(each.name, each.column, each.place, dtypes[each.column], categorical=each.kind != "numeric")
            for each in self.features
        ]
        return frame.select(ROW, *[expr for expr in exprs if expr is not None])

    def _check(self, raw: pl.DataFrame, result: pl.DataFrame, where: RowName) -> None:
        """Raise a `DataError` for the first broken rule; `raw` has the values as they were read."""
        rules: list[tuple[str, str, pl.Expr]] = []
        for role in self.roles:
            if role not in TEXT_ROLES:
                requirement, broken = _role_rule(role, self.first_position)
                rules.append((role, f"{role} must be {requirement}", broken))
            elif role not in _OPTIONAL_TEXT:
                rules.append((role, f"{role} must not be missing", pl.col(role).is_null()))
        features = self.named("numeric")
        rules += [(name, f"feature '{name}' must be finite or missing", infinite(name)) for name in features]
        flags = result.select(expr.any().alias(str(i)) for i, (_, _, expr) in enumerate(rules)).row(0)
        for (name, message, expr), flag in zip(rules, flags, strict=True):
            if not flag:
                continue
            row = int(result.select(expr.fill_null(False).arg_max()).item())
            column, place = self.roles.get(name), None
            if column is None:
                column, place = next((each.column, each.place) for each in self.features if each.name == name)
            got = raw[column][row] if place is None else raw[column][row][place]
            missing = got is None or got != got
            shown = "nothing" if missing else repr(got)
            told = f"{message}; got {shown} at {where(result[ROW][row])}"
            raise DataError(told + self._remedy(name, None if missing else str(got).strip()))

    def _remedy(self, role: str, got: str | None) -> str:
        """Return how to mend a value that breaks the rule of a role, where that is known; None is a missing value."""
        if role in ("position", "ranked_position") and self.first_position == 1 and got in ("0", "0.0"):
            return "; if positions count from 0, say --first-position 0"
        if role not in ("position", "click", "conversion"):
            return ""
        if got is None:
            known = "; write 0 where nothing was clicked, or leave the row out if it was not recorded"
            return "" if role == "position" else known
        countable = got.lower() in (*YES, *NO) or re.fullmatch(r"\d+(\.0*)?", got)
        if role != "position" and countable and not self.binarise:
            return "; for counts, or yes and no, say --binarise"
        return f"; if another column has the {role}, name it: -c {role}=NAME"


def _check_roles(
    roles: Mapping[str, str], mapping: Mapping[str, str], dtypes: Collection[str], drop: Collection[str], name: str
) -> None:
    """Refuse a log without a column for a required role, or with two columns for one role."""
    absent = [role for role in REQUIRED if role not in roles]
    for role in absent:
        other = next((other for other, column in mapping.items() if column == role), None)
        if role in drop:
            raise ConfigError(f"{name} needs its column '{role}', which --drop leaves out")
        if other is not None:
            raise ConfigError(
                f"column '{role}' of {name} is mapped to {other}, so nothing plays {role}; "
                f"name the column that does with --column {role}=NAME"
            )
    if absent:
        raise missing_columns(absent, dtypes, name)
    claimed = set(mapping.values()) | set(drop)
    for role, column in mapping.items():
        if role in dtypes and column != role and role not in claimed:
            raise ConfigError(
                f"{name} has a column '{role}' besides '{column}', which is mapped to that role; drop one of them"
            )


def _features_of(column: str, dtype: Type, name: str, *, as_category: bool) -> list[Feature]:
    if isinstance(dtype, pl.Array) and dtype.inner.is_numeric() and not as_category:
        return [Feature(f"{column}[{place}]", "numeric", column, place) for place in range(dtype.size)]
    if dtype in _CATEGORICAL_TYPES or (as_category and can_play("category", dtype)):
        return [Feature(column, "categorical", column)]
    if not as_category and (dtype.is_numeric() or dtype == pl.Null):
        return [Feature(column, "numeric", column)]
    raise DataError(
        f"column '{column}' of {name} is of type {dtype}, which cannot be a feature; "
        "give it a role with --column ROLE=NAME or leave it out with --drop NAME"
    )


def explode_lists(frame: pl.DataFrame, position: str, where: RowName) -> pl.DataFrame:
    """Return one row per item; the frame may have one row per query with list columns."""
    if not isinstance(frame.schema[position], pl.List):
        return frame
    lists = list_columns(frame.schema)
    lengths = frame.select(pl.col(column).list.len().fill_null(0) for column in lists)
    for column in lists:
        unequal = lengths[column] != lengths[position]
        if unequal.any():
            row = int(unequal.arg_max() or 0)
            raise DataError(
                f"the lists of a query must have equal lengths; {position} has {lengths[position][row]} items and "
                f"{column} {lengths[column][row]} at {where(frame[ROW][row])}"
            )
    empty = lengths[position] == 0
    if empty.any():
        raise DataError(f"a query must have items; got none at {where(frame[ROW][int(empty.arg_max() or 0)])}")
    return frame.explode(lists)


def list_columns(dtypes: Mapping[str, pl.DataType]) -> list[str]:
    """Return the columns that contain one list per query."""
    return [column for column, dtype in dtypes.items() if isinstance(dtype, pl.List)]


def entry_type(dtype: pl.DataType) -> Type:
    """Return the type of an item's entry in a column that may contain one list per query."""
    return dtype.inner if isinstance(dtype, pl.List) else dtype


def is_index(column: str) -> bool:
    """Return whether a column is the unnamed index that pandas writes, which is neither role nor feature."""
    return _PANDAS_INDEX.fullmatch(column) is not None


def check_mapping(
    mapping: Mapping[str, str], roles: Collection[str], dtypes: Collection[str], name: str, kind: str
) -> None:
    """Refuse unknown roles and columns in a mapping; `kind` describes the source, as in "a log"."""
    for role, column in mapping.items():
        if role not in roles:
            known = ", ".join(roles)
            raise ConfigError(f"'{role}' is not a role that a column of {kind} can play; the roles are {known}")
        if column not in dtypes:
            raise DataError(f"{name} has no column '{column}' (asked for as {role}); it has {join_names(dtypes)}")


def marked_policies(marks: Collection[str], roles: Mapping[str, str], name: str) -> list[str]:
    """Return the values of `policy` that marks COLUMN=VALUE name; COLUMN is `policy`, or the column that plays it.

    >>> marked_policies(["random_bool=1"], {"policy": "random_bool"}, "log.csv")
    ['1']
    """
    found = []
    for mark in marks:
        column, equals, value = mark.partition("=")
        if not equals or not column or not value:
            raise ConfigError(f"--randomised takes COLUMN=VALUE, as policy=shuffle; got '{mark}'")
        if "policy" not in roles or column not in ("policy", roles["policy"]):
            remedy = "log the ranker of each list" if column == "policy" else f"-c policy={column}"
            raise ConfigError(f"--randomised {mark} needs a column of {name} that plays 'policy': {remedy}")
        found.append(value)
    return found


def check_types(roles: Mapping[str, str], types: Mapping[str, Type], name: str) -> None:
    """Refuse columns whose type does not fit their role."""
    for role, column in roles.items():
        dtype = types[column]
        if not can_play(role, dtype):
            raise DataError(f"column '{column}' of {name} is of type {dtype}, which cannot play the role {role}")


def missing_columns(roles: Sequence[str], dtypes: Collection[str], name: str) -> DataError:
    """Return the error for a source without a column for some roles, with the options that name them.

    Where a name is close to that of a role, it is in the options.

    >>> print(missing_columns(["position", "click"], ["n_clicks", "place"], "log.csv"))
    log.csv has no column 'position' or 'click'; name them: -c position=NAME -c click=n_clicks (it has n_clicks, place)
    """
    options = []
    for role in roles:
        usual = [role, *USUAL_NAMES.get(role, ())]
        like = [c for c in dtypes if any(word in c.lower() for word in usual)]
        close = like or get_close_matches(role, list(dtypes), n=1, cutoff=0.75)
        options.append(f"-c {role}={close[0] if close else 'NAME'}")
    which = " or ".join(f"'{role}'" for role in roles)
    them = "them" if len(roles) > 1 else "the one that plays this role"
    return DataError(f"{name} has no column {which}; name {them}: {' '.join(options)} (it has {join_names(dtypes)})")


def guessed_roles(
    dtypes: Collection[str],
    mapping: Mapping[str, str],
    other: Collection[str],
    known: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return role -> column for roles whose column is unmistakable by its name; see `USUAL_NAMES`.

    `mapping` are the roles that are assigned already, `other` columns that cannot play one, and `known` the columns
    that played them in another log, as that of a model.

    >>> guessed_roles(["SRCH_ID", "position", "click_bool", "price"], {}, [])
    {'query_id': 'SRCH_ID', 'click': 'click_bool'}
    """
    taken = {*mapping.values(), *other}
    free = set(dtypes) - taken
    open_roles = {role for role in ROLES if role not in mapping and role not in free}
    found = {role: column for role, column in (known or {}).items() if role in open_roles and column in free}
    for role, names in USUAL_NAMES.items():
        if role not in open_roles or role in found:
            continue
        meant = {role, role.replace("_", ""), *names}
        columns = [column for column in dtypes if column.lower() in meant and column in free]
        if len(columns) == 1:
            found[role] = columns[0]
    return found


def join_names(names: Collection[str], most: int = 12) -> str:
    """Join names for an error message, at most `most` of them.

    >>> join_names(["query_id", "position", "click"], most=2)
    'query_id, position and 1 more'
    """
    shown = ", ".join(list(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def can_play(role: str, dtype: Type) -> bool:
    """Return whether a column of this type can play a role; numbers may also be written as text."""
    if dtype.is_numeric() or dtype in (*_CATEGORICAL_TYPES, pl.Null):
        return True
    return (role in TEXT_ROLES or role == "timestamp") and dtype in (pl.Date, pl.Datetime)


def role_expr(role: str, dtype: pl.DataType, column: str) -> pl.Expr | None:
    """Return the expression of a role under its name; None for `category`, which is stored as a feature."""
    if role == "category":
        return None
    if role in TEXT_ROLES:
        return _as_text(column, dtype).alias(role)
    if role == "timestamp":
        return _as_time(column, dtype).alias(role)
    values = pl.col(column)
    if dtype in _TEXT_TYPES:
        values = values.cast(pl.String).str.strip_chars()
    return values.cast(pl.Float64, strict=False).alias(role)


def feature_expr(name: str, column: str, place: int | None, dtype: pl.DataType, *, categorical: bool) -> pl.Expr:
    """Return the expression of a feature under its name: text, or a float with NaN where it is missing."""
    if categorical:
        return _as_text(column, dtype).alias(name)
    values = pl.col(column) if place is None else pl.col(column).arr.get(place)
    wide = pl.Float32 if dtype == pl.Float32 else pl.Float64
    return values.cast(wide).fill_null(float("nan")).alias(name)


def infinite(name: str) -> pl.Expr:
    """Return an expression that is true where a numeric feature is infinite or overflows float32."""
    return (pl.col(name).abs() > _FLOAT32_MAX) & pl.col(name).is_not_nan()


def _binary(role: str, dtype: pl.DataType, expr: pl.Expr | None) -> pl.Expr | None:
    """Return the expression of a role with counts, yes and no as 1 and 0, if it is a click or a conversion."""
    if role not in ("click", "conversion") or expr is None:
        return expr
    numbers = pl.when(expr > 0).then(1.0).otherwise(expr)
    if dtype not in _TEXT_TYPES:
        return numbers.alias(role)
    text = pl.col(expr.meta.root_names()[0]).cast(pl.String).str.strip_chars().str.to_lowercase()
    return pl.when(text.is_in(YES)).then(1.0).when(text.is_in(NO)).then(0.0).otherwise(numbers).alias(role)


def _role_rule(role: str, first: int = 1) -> tuple[str, pl.Expr]:
    """Return the requirement of a numeric role in words, and an expression that is true where it is broken."""
    x = pl.col(role)
    missing = x.is_null() | (x.is_nan() if role != "timestamp" else False)
    match role:
        case "position" | "ranked_position":
            rule = f"a whole number from {first} to {MAX_POSITION + first - 1}"
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


def _as_text(column: str, dtype: pl.DataType) -> pl.Expr:
    """Convert ids to text; whole floats, which pandas makes of integers with gaps, are written as integers."""
    if dtype.is_float():
        values = pl.col(column).fill_nan(None)
        whole = values.cast(pl.Int64, strict=False)
        return pl.when(whole == values).then(whole.cast(pl.String)).otherwise(values.cast(pl.String))
    return pl.col(column).cast(pl.String)


def _as_time(column: str, dtype: pl.DataType) -> pl.Expr:
    """Convert dates, ISO text and fractional seconds to microseconds since 1970 (UTC); keep whole numbers."""
    values = pl.col(column)
    if dtype in _TEXT_TYPES:
        text = values.cast(pl.String)
        return pl.coalesce(_iso_time(text), text.str.strip_chars().cast(pl.Int64, strict=False))
    if dtype.is_temporal():
        return values.cast(pl.Datetime("us")).cast(pl.Int64)
    if dtype.is_float() or dtype == pl.Decimal:
        return (values.cast(pl.Float64) * 1_000_000).round().cast(pl.Int64, strict=False)
    return values.cast(pl.Int64, strict=False)


def _iso_time(text: pl.Expr) -> pl.Expr:
    """Parse ISO 8601 only, with or without an offset: in 01/02/2020 the month is ambiguous."""
    part = text.str.extract_groups(_ISO_TIME).struct
    minute, second = part.field("minute").fill_null("00:00"), part.field("second").fill_null(":00")
    clock = pl.concat_str(part.field("day"), pl.lit("T"), minute, second)
    local = clock.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False).cast(pl.Int64)
    zone = part.field("zone").str.replace(":", "")
    hours = zone.str.slice(1, 2).cast(pl.Int64, strict=False).fill_null(0)
    minutes = zone.str.slice(3, 2).cast(pl.Int64, strict=False).fill_null(0)
    ahead = pl.when(zone.str.starts_with("-").fill_null(False)).then(-1).otherwise(1) * (60 * hours + minutes)
    return local - ahead * 60_000_000
