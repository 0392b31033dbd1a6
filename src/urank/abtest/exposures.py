"""What each user was shown and did on each day of a test, from an exposure log with a row for each impression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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

_NOT_TOLD = -1

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
        told: the rows of all users with the arms they tell, from which `with_arms_of` decides anew; none when the arms
            are settled.
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
    told: _Told | None = field(default=None, repr=False)

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
        part = self.where((self.day >= first) & (self.day <= last))
        return part if self.told is None else replace(part, told=self.told.between(first, last))

    def with_arms_of(self, first: int, last: int) -> Exposures:
        """The same log with the arms that users had on these days, both ends included, settled.

        A user that was seen on these days has the arm that its rows of these days tell; whatever other rows tell, they
        count for that arm. So what users did after a test does not decide who is in it. Who was seen only before has
        the arm of that time; who was seen only after is left out. `crossed` and `unassigned` count users of these days.

        Raises:
            DataError: when nobody has one arm.
        """
        if self.told is None:
            return self
        found = replace(_with_arms(self.told, first, last), name=self.name)
        if not found.users:
            raise DataError(f"{self.name} must have users that were seen in one arm only; it has none")
        return found

    def of_arms(self, arms: Sequence[int]) -> Exposures:
        """The rows of the users of these arms, by index; users and arms keep their indices."""
        return self.where(np.isin(self.arm, arms)[self.user])

    def where(self, kept: NDArray[np.bool_]) -> Exposures:
        """The rows that are true in `kept[rows]`; users and days keep their indices, and arms are settled."""
        if kept.all():
            return self
        sums: dict[str, Any] = {name: values[kept] for name, values in self.sums.items()}
        return replace(self, user=self.user[kept], day=self.day[kept], told=None, **sums)


@dataclass(frozen=True, eq=False)
class _Told:
    """What a log tells of arms.

    Attributes:
        rows: of all users; those of one user and day may be several, one for each arm.
        names: of the arms, sorted.
        arm: `[rows]`, an index into `names`, or −1 where the log names none.
    """

    rows: Exposures
    names: tuple[str, ...]
    arm: Ints

    def between(self, first: int, last: int) -> _Told:
        kept = (self.rows.day >= first) & (self.rows.day <= last)
        return _Told(self.rows.where(kept), self.names, self.arm[kept])


def read_exposures(
    source: str | Path | Any, *, columns: Mapping[str, str] | None = None, arms: bool = True, report: Report = silent
) -> Exposures:
    """Read an exposure log: one row for each impression, of which only the sums by user and day are kept.

    A user has one arm. Users seen in two are counted and left out, since what they did belongs to neither; those that
    never have one are not in the test. A row without an arm counts for the arm of its user, so that the time before
    the test may come in the same log. `analyse` decides this anew by the days of the test alone (`with_arms_of`).
    Values are counted in millionths. Days are those of UTC; a column `day` may have others.

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
        frame = frame.sort("user_id", "day", *(["arm"] if arms else []))
        first, last = int(frame["day"].min()), int(frame["day"].max())  # type: ignore[arg-type]
        labels = day_labels(first, last, dated=log.clock is not None and log.clock.dated, name=log.name)
        day = frame["day"].to_numpy().astype(np.int64) - first
    else:
        frame = frame.sort("user_id", *(["arm"] if arms else []))
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
    if not arms:
        return everything
    names = sorted(frame["arm"].drop_nulls().unique())
    if not names:
        raise DataError(f"{log.name} must name the arm of some user; it names none")
    index = frame["arm"].cast(pl.Enum(names)).to_physical().cast(pl.Int64).fill_null(_NOT_TOLD).to_numpy()
    told = _Told(everything, tuple(names), index)
    return replace(_with_arms(told, 0, len(labels) - 1), told=told)


def _with_arms(told: _Told, first: int, last: int) -> Exposures:
    """The users that have one arm by the rows of these days, or by those before when they were not seen on these."""
    rows, arm = told.rows, told.arm
    inside = (rows.day >= first) & (rows.day <= last)
    used = np.unique(arm[inside & (arm != _NOT_TOLD)])
    seen = np.bincount(rows.user[inside], minlength=rows.users) > 0
    counted = (inside | (~seen[rows.user] & (rows.day < first))) & (arm != _NOT_TOLD)
    highest, lowest = np.full(rows.users, _NOT_TOLD), np.full(rows.users, len(told.names))
    np.maximum.at(highest, rows.user[counted], arm[counted])
    np.minimum.at(lowest, rows.user[counted], arm[counted])
    kept = (highest == lowest) & np.isin(highest, used)
    chosen = rows.where(kept[rows.user])
    # A user may have several rows for a day: some without its arm, or, on other days, of another.
    key = chosen.user * len(rows.days) + chosen.day
    days = np.flatnonzero(np.append(True, np.diff(key) != 0)[: len(key)])
    sums: dict[str, Any] = chosen.sums
    if len(days) < len(key):
        sums = {name: np.add.reduceat(values, days) for name, values in sums.items()}
    return replace(
        chosen,
        arms=tuple(told.names[place] for place in used),
        arm=np.searchsorted(used, highest[kept]),
        user=(np.cumsum(kept) - 1)[chosen.user[days]],
        day=chosen.day[days],
        crossed=int((seen & (highest > lowest)).sum()),
        unassigned=int((seen & (highest < lowest)).sum()),
        **sums,
    )
