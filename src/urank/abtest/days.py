"""Days of an exposure log: what a column of times or days says, and what the days are called."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

import polars as pl

from urank.errors import DataError
from urank.log.cells import role_expr

__all__ = ["Clock", "day_labels", "time_expr"]

MOST_DAYS = 3_660

Unit = Literal["day", "yyyymmdd", "s", "ms", "us", "ns"]

_DAY_NUMBERS = 100_000  # below it, whole numbers count days: as seconds they would be the first day of 1970
_YYYYMMDD = (1900_01_01, 2100_12_31)
_A_DAY: dict[Unit, int] = {"day": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_EPOCH = date(1970, 1, 1)


@dataclass(frozen=True)
class Clock:
    """What a whole number means: a day that is only numbered, a date as 20200531, or a time since 1970 (UTC)."""

    unit: Unit

    @classmethod
    def of(cls, largest: int) -> Clock:
        """The unit that the largest number of a column tells; times from 1973 to 5138 are told apart.

        >>> [Clock.of(largest).unit for largest in (13, 20200531, 1588723200, 1588723200000, 1588723200000000)]
        ['day', 'yyyymmdd', 's', 'ms', 'us']
        """
        if largest < _DAY_NUMBERS:
            return cls("day")
        if _YYYYMMDD[0] <= largest <= _YYYYMMDD[1]:
            return cls("yyyymmdd")
        return cls("s" if largest < 10**11 else "ms" if largest < 10**14 else "us" if largest < 10**17 else "ns")

    @property
    def dated(self) -> bool:
        """Whether its days are those of a calendar."""
        return self.unit != "day"

    def day(self, number: pl.Expr) -> pl.Expr:
        """The day of each number: since 1970 when it is dated; none where 20201399 is no date."""
        if self.unit == "yyyymmdd":
            return number.cast(pl.String).str.to_date("%Y%m%d", strict=False).cast(pl.Int32)
        return (number // _A_DAY[self.unit]).cast(pl.Int32)


def time_expr(role: str, dtype: pl.DataType, column: str) -> pl.Expr:
    """The column that plays `timestamp` or `day` as whole numbers; dates and ISO text in microseconds."""
    if role == "day" and dtype.is_float():
        number = pl.col(column).cast(pl.Int64, strict=False)
        return pl.when(number == pl.col(column)).then(number)
    time = role_expr("timestamp", dtype, column)
    assert time is not None  # noqa: S101 - only a category has no expression of its own
    return time


def day_labels(first: int, last: int, *, dated: bool, name: str) -> tuple[str, ...]:
    """The names of all days from the first to the last.

    >>> day_labels(18388, 18389, dated=True, name="the log")
    ('2020-05-06', '2020-05-07')

    Raises:
        DataError: when they are too far apart to be days of one log.
    """
    if last - first >= MOST_DAYS:
        ends = [_label(day, dated=dated) for day in (first, last)]
        raise DataError(
            f"the days of {name} must lie within {MOST_DAYS:,} of each other; they go from {ends[0]} to {ends[1]} "
            "(is the time of some rows missing, or in another unit?)"
        )
    return tuple(_label(day, dated=dated) for day in range(first, last + 1))


def _label(day: int, *, dated: bool) -> str:
    if not dated:
        return str(day)
    try:
        return (_EPOCH + timedelta(days=day)).isoformat()
    except OverflowError:
        return f"day {day:,} since 1970"
