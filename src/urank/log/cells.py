"""How one column of a source becomes one of the log: expressions for text, numbers, time, and the rules they obey."""

from __future__ import annotations

import polars as pl
from polars.datatypes import DataTypeClass

__all__ = [
    "ITEM",
    "LIST",
    "MAX_POSITION",
    "OWN",
    "QUERY",
    "ROW",
    "SESSION",
    "TEXT_ROLES",
    "RowName",
    "can_play",
    "feature_expr",
    "infinite",
    "loses_digits",
    "role_expr",
    "role_rule",
]

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
