"""What each user was shown and did on each day of a test, from an exposure log with a row for each impression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.abtest.days import day_labels
from urank.abtest.moments import Floats, Ints
from urank.abtest.sources import EXPOSURE_ROLES, Source
from urank.errors import DataError
from urank.progress import Report, silent

__all__ = ["EVERYONE", "EXPOSURE_ROLES", "Exposures", "read_exposures"]

EVERYONE = "everyone"
"""The one arm of a log that is read without arms."""

_SUMS = ("impressions", "clicks", "conversions", "revenue")


@dataclass(frozen=True, eq=False)
class Exposures:
    """An exposure log, added up. Rows are sorted by user, then day; no two have both alike.

    Attributes:
        name: what errors and reports call it.
        arms: the names of the arms, sorted.
        days: what the days are called, from the first to the last without gaps; one without a name ("") when the log
            has no time.
        arm: `[users]`, an index into `arms`.
        user: `[rows]`, an index into `arm`.
        day: `[rows]`, an index into `days`.
        impressions, clicks, conversions: `[rows]`, sums.
        revenue: `[rows]`, the worth of the conversions; none when the log has no values.
        crossed: users that were seen in two arms; they are left out.
        unassigned: users without any arm; they are left out too.
    """

    name: str
    arms: tuple[str, ...]
    days: tuple[str, ...]
    arm: Ints
    user: Ints
    day: Ints
    impressions: Floats
    clicks: Floats
    conversions: Floats
    revenue: Floats | None
    crossed: int = 0
    unassigned: int = 0

    @property
    def users(self) -> int:
        """How many users there are."""
        return len(self.arm)

    @property
    def sums(self) -> dict[str, Floats]:
        """The sums that it has, by name."""
        return {name: getattr(self, name) for name in _SUMS if getattr(self, name) is not None}

    def between(self, first: int, last: int) -> Exposures:
        """The rows of these days, both ends included; users and days keep their indices."""
        return self.where((self.day >= first) & (self.day <= last))

    def of_arms(self, arms: Sequence[int]) -> Exposures:
        """The rows of the users of these arms, by index; users and arms keep their indices."""
        return self.where(np.isin(self.arm, arms)[self.user])

    def where(self, kept: NDArray[np.bool_]) -> Exposures:
        """The rows that are true in `kept[rows]`; users and days keep their indices."""
        if kept.all():
            return self
        sums: dict[str, Any] = {name: values[kept] for name, values in self.sums.items()}
        return replace(self, user=self.user[kept], day=self.day[kept], **sums)


def read_exposures(
    source: str | Path | Any, *, columns: Mapping[str, str] | None = None, arms: bool = True, report: Report = silent
) -> Exposures:
    """Read an exposure log: one row for each impression, of which only the sums by user and day are kept.

    A user has one arm. Users seen in two are counted and left out, since what they did belongs to neither; those that
    never have one are not in the test. A row without an arm counts for the arm of its user, so that the time before
    the test may come in the same log. Days are those of UTC; a column `day` may have others.

    Args:
        source: a Parquet or CSV file (also gzipped), a folder of them (hive partitions become columns), a glob, or a
            table of Polars, pandas or PyArrow.
        columns: role -> the column that plays it, where names differ; the roles are `EXPOSURE_ROLES`. `user_id`, `arm`
            and `click` are required. All other columns are left alone.
        arms: whether there are arms; without them all users are of one, `EVERYONE`, as `plan` takes them.
        report: told the bytes read.

    Raises:
        DataError: with the row that breaks a rule.

    >>> log = pl.DataFrame({"user_id": [7, 7, 8, 9], "arm": list("AABB"), "click": [0, 1, 0, 1], "day": [1, 3, 3, 3]})
    >>> found = read_exposures(log)
    >>> found.arms, found.days, found.arm.tolist()
    (('A', 'B'), ('1', '2', '3'), [0, 1, 1])
    >>> found.user.tolist(), found.day.tolist(), found.clicks.tolist()
    ([0, 0, 1, 2], [0, 2, 2, 2], [0.0, 1.0, 0.0, 1.0])
    """
    log = Source(source, columns, arms=arms)
    frame = log.sums(report)
    if "day" in frame.columns:
        frame = frame.sort("user_id", "day")
        first, last = int(frame["day"].min()), int(frame["day"].max())  # type: ignore[arg-type]
        labels = day_labels(first, last, dated=log.clock is not None and log.clock.dated, name=log.name)
        day = frame["day"].to_numpy().astype(np.int64) - first
    else:
        frame = frame.sort("user_id")
        labels, day = ("",), np.zeros(frame.height, dtype=np.int64)
    user = frame["user_id"].rle_id().to_numpy().astype(np.int64)
    sums = {name: frame[name].to_numpy().astype(np.float64) for name in _SUMS if name in frame.columns}
    everything = Exposures(
        name=log.name,
        arms=(EVERYONE,),
        days=labels,
        arm=np.zeros(int(user[-1]) + 1, dtype=np.int64),
        user=user,
        day=day,
        impressions=sums["impressions"],
        clicks=sums["clicks"],
        conversions=sums.get("conversions", sums["clicks"]),
        revenue=sums.get("revenue"),
    )
    return _with_arms(everything, frame["arm"]) if arms else everything


def _with_arms(everything: Exposures, told: pl.Series) -> Exposures:
    """The users that have one arm, from the arm of each row, which may be missing."""
    names = sorted(told.drop_nulls().unique())
    if not names:
        raise DataError(f"{everything.name} must name the arm of some user; it names none")
    index = told.cast(pl.Enum(names)).to_physical().cast(pl.Int64)
    starts = np.flatnonzero(np.append(True, np.diff(everything.user) != 0))
    highest = np.maximum.reduceat(index.fill_null(-1).to_numpy(), starts)
    lowest = np.minimum.reduceat(index.fill_null(len(names)).to_numpy(), starts)
    kept = highest == lowest
    if not kept.any():
        raise DataError(f"{everything.name} must have users that were seen in one arm only; it has none")
    rows = everything.where(kept[everything.user])
    # A user that has its arm on some rows of a day only has two rows for that day.
    key = rows.user * len(rows.days) + rows.day
    days = np.flatnonzero(np.append(True, np.diff(key) != 0))
    sums: dict[str, Any] = {name: np.add.reduceat(values, days) for name, values in rows.sums.items()}
    return replace(
        rows,
        arms=tuple(names),
        arm=highest[kept],
        user=(np.cumsum(kept) - 1)[rows.user[days]],
        day=rows.day[days],
        crossed=int((highest > lowest).sum()),
        unassigned=int((highest < lowest).sum()),
        **sums,
    )
