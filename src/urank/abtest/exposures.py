"""What each user was shown and did on each day of a test, from an exposure log with a row for each impression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.abtest.effects import Floats, Ints
from urank.errors import ConfigError, DataError
from urank.log.columns import ROW, RowName, can_play, check_mapping, missing_column, role_expr
from urank.log.reader import PARQUET, TableFile, add_partitions, find_files, open_file, table_frame
from urank.log.splits import stable_hash
from urank.progress import Report, silent

__all__ = [
    "EVERYONE",
    "EXPOSURE_ROLES",
    "Clock",
    "Exposures",
    "Source",
    "assign_arms",
    "check_arm_shares",
    "day_labels",
    "read_exposures",
    "time_expr",
]

_ROUNDING = 1e-9


def assign_arms(user_ids: pl.Series, shares: Mapping[str, float], *, salt: str) -> pl.Series:
    """The arm of each user: the same user has the same arm on every machine and on every day.

        u = hash(salt, id) / 2⁶⁴,      arm j  when  share_1 + … + share_{j−1} ≤ u < share_1 + … + share_j

    Users beyond the last share are not in the test and have null. The order of the arms counts: `{"A": 0.1, "B": 0.1}`
    keeps its users when a third arm is appended, or when the share of the last one is raised; raising that of A moves
    users of B to A. Each test needs a salt of its own, by which its arms are independent of those of every other test.

    Args:
        user_ids: text or numbers; 17 and "17" are one user.
        shares: arm -> its share of all users, in all at most 1.
        salt: the name of the test.

    Returns:
        the names of the arms, or null.

    >>> ids = pl.Series(range(10_000))
    >>> arms = assign_arms(ids, {"A": 0.5, "B": 0.3}, salt="new ranker")
    >>> [round(share, 2) for share in ((arms == "A").sum() / 1e4, (arms == "B").sum() / 1e4, arms.null_count() / 1e4)]
    [0.5, 0.3, 0.2]
    """
    check_arm_shares(shares)
    if not salt:
        raise ConfigError("salt must name the test; got an empty text")
    text = user_ids.alias("id").to_frame().select(role_expr("session_id", user_ids.dtype, "id")).to_series()
    if text.null_count():
        raise DataError(f"user_ids must not be missing; got nothing at row {int(text.is_null().arg_max() or 0) + 1}")
    hashes = stable_hash(pl.select(pl.concat_str(pl.lit(f"{salt}\x00"), pl.lit(text))).to_series())
    place = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53  # below 1, also for the largest hash
    ends = np.cumsum(list(shares.values()))
    ends[np.abs(ends - 1) < _ROUNDING] = 1.0
    names = pl.Series("arm", [*shares, None], dtype=pl.String)
    return names.gather(np.searchsorted(ends, place, side="right"))


def check_arm_shares(shares: Mapping[str, float]) -> None:
    """Refuse shares that are not parts of a whole."""
    if not shares:
        raise ConfigError("shares must name at least one arm; got none")
    for arm, share in shares.items():
        if not 0 < share <= 1:
            raise ConfigError(f"the share of an arm must be above 0 and at most 1; got {share} for '{arm}'")
    if sum(shares.values()) > 1 + _ROUNDING:
        raise ConfigError(f"the shares of the arms must sum to at most 1; got {sum(shares.values()):g}")


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


EXPOSURE_ROLES: Mapping[str, str] = {
    "user_id": "the user, by whom the arms were drawn",
    "arm": "what the user was shown; where it is missing, the arm that the user has elsewhere",
    "click": "1 when it was clicked, 0 when not",
    "conversion": "1 when it was bought, downloaded or the like; a click when there is no such column",
    "value": "what a conversion is worth; may be missing where there is none",
    "day": "the day: a date or a whole number; wins over the timestamp",
    "timestamp": "when it was shown: a date or time, or seconds, milliseconds or microseconds since 1970 (UTC)",
}

BATCH_ROWS = 500_000
MERGE_ROWS = 5_000_000

_LIKE = {"user_id": "session_id", "arm": "policy", "conversion": "click", "day": "timestamp"}
"""The roles of a click log that hold the same."""
_TIMES = ("day", "timestamp")
_LARGEST = 1e38
_MILLION = 1e6


@dataclass(frozen=True)
class _ExposurePart:
    """Rows of one file or table, from its row `first` on.

    Attributes:
        roles: role -> the column that plays it.
        user: the type of ids that are taken as they are; none for those that are taken as text.
    """

    name: str
    first: int
    rows: pl.LazyFrame
    roles: Mapping[str, str]
    user: pl.DataType | None


class Source:
    """An exposure log that is read once; the first rows tell in which unit its time is.

    Attributes:
        name: what errors call it.
        clock: what its times mean; none before it is read, and when it has no time.
    """

    def __init__(self, source: str | Path | Any, columns: Mapping[str, str] | None, *, arms: bool) -> None:
        self.name = str(source) if isinstance(source, (str, Path)) else "the table"
        self.clock: Clock | None = None
        self._source = source
        self._mapping = dict(columns or {})
        self._arms = arms

    def sums(self, report: Report) -> pl.DataFrame:
        """Impressions, clicks, conversions and revenue by user, arm and day, as far as these are known.

        Raises:
            DataError: with the row that breaks a rule; when there are no rows.
        """
        added: list[pl.DataFrame] = []
        for part in self._files(report) if isinstance(self._source, (str, Path)) else self._table():
            added.append(self._added_up(part))
            if sum(frame.height for frame in added[1:]) > max(MERGE_ROWS, added[0].height):
                added = [_merged(added)]
        if not sum(frame.height for frame in added):
            raise DataError(f"{self.name} is empty; an exposure log needs at least one impression")
        found = _merged(added)
        return found.with_columns(pl.col("revenue") / _MILLION) if "revenue" in found.columns else found

    def _table(self) -> Iterator[_ExposurePart]:
        frame = table_frame(self._source, self.name, "an exposure log")
        roles = self._roles(frame.schema, self.name)
        yield _ExposurePart(self.name, 0, frame.lazy(), roles, _id_type([frame.schema[roles["user_id"]]]))

    def _files(self, report: Report) -> Iterator[_ExposurePart]:
        text = {self._mapping.get(role, role) for role in ("user_id", "arm")}
        files = [open_file(path, text) for path in find_files(self.name)]
        add_partitions(files, self.name)
        roles = [self._roles(file.dtypes, file.name) for file in files]
        told = set(roles[0])
        for file, each in zip(files, roles, strict=True):
            if told != set(each):
                role = sorted(told ^ set(each))[0]
                raise DataError(f"{role} is in some files of {self.name} but not in others, as in {file.name}")
        user = _id_type([file.dtypes[each["user_id"]] for file, each in zip(files, roles, strict=True)])
        sizes = [file.path.stat().st_size for file in files]
        for number, (file, each) in enumerate(zip(files, roles, strict=True)):
            for first, rows in _rows(file, list(dict.fromkeys(each.values()))):
                yield _ExposurePart(file.name, first, rows, each, user)
            report("read", sum(sizes[: number + 1]), sum(sizes))

    def _roles(self, dtypes: Mapping[str, pl.DataType], name: str) -> dict[str, str]:
        """Which column plays which role; the time is told by one of them only."""
        check_mapping(self._mapping, EXPOSURE_ROLES, dtypes, name, "an exposure log")
        free = set(dtypes) - set(self._mapping.values())
        roles = {
            role: self._mapping.get(role, role) for role in EXPOSURE_ROLES if role in self._mapping or role in free
        }
        for role in ("user_id", "arm", "click") if self._arms else ("user_id", "click"):
            if role not in roles:
                raise missing_column(role, dtypes, name)
        if not self._arms:
            roles.pop("arm", None)
        if "day" in roles:
            roles.pop("timestamp", None)
        for role, column in roles.items():
            if not can_play(_LIKE.get(role, role), dtypes[column]):
                raise DataError(
                    f"column '{column}' of {name} is of type {dtypes[column]}, which cannot play the role {role}"
                )
        return roles

    def _added_up(self, part: _ExposurePart) -> pl.DataFrame:
        try:
            schema = part.rows.collect_schema()
            named = part.rows.select(_named(part, schema))
            self._check(part, named, schema)
            if self.clock is not None:
                named = named.with_columns(self.clock.day(pl.col("day")))
            keys = [key for key in ("user_id", "arm", "day") if key in named.collect_schema()]
            return named.group_by(keys).agg(_sums(part.roles)).collect(engine="streaming")
        except (pl.exceptions.PolarsError, OSError) as error:
            raise DataError(f"{part.name} cannot be read: {' '.join(str(error).split())[:200]}") from error

    def _check(self, part: _ExposurePart, named: pl.LazyFrame, schema: Mapping[str, pl.DataType]) -> None:
        """Refuse the first row that breaks a rule; tell the unit of time, if it is not yet known."""
        rules = _rules(part.roles)
        time = next((role for role in _TIMES if role in part.roles), None)
        exprs = {role: broken.any() for role, (_, broken) in rules.items()}
        if time is not None:
            exprs["largest"] = pl.col("day").max()
        found = named.select(**exprs).collect(engine="streaming").row(0, named=True)
        for role, (requirement, broken) in rules.items():
            if found[role]:
                raise _refusal(part, named, role, requirement, broken)
        if time is None or found["largest"] is None:
            return
        if self.clock is None:
            self.clock = Clock("us") if schema[part.roles[time]].is_temporal() else Clock.of(found["largest"])
        if self.clock.unit == "yyyymmdd":
            broken = self.clock.day(pl.col("day")).is_null()
            if named.select(broken.any()).collect(engine="streaming").item():
                raise _refusal(part, named, time, "be a date, as others are (20200531)", broken)


def _id_type(types: list[pl.DataType]) -> pl.DataType | None:
    """The type of ids that need not be brought into one form: text, or whole numbers of one kind."""
    return types[0] if len(set(types)) == 1 and (types[0].is_integer() or types[0] == pl.String) else None


def _rows(file: TableFile, columns: list[str]) -> Iterator[tuple[int, pl.LazyFrame]]:
    """The first row and the rows of each part of a file: of Parquet all at once, since it is not read before asked."""
    if file.path.name.endswith(PARQUET):
        own = [column for column in columns if column not in file.constants]
        constants = [pl.lit(value, dtype=file.dtypes[key]).alias(key) for key, value in file.constants.items()]
        yield 0, pl.scan_parquet(file.path, glob=False, hive_partitioning=False).select(own).with_columns(constants)
        return
    first = 0
    for frame, _ in file.batches(columns, BATCH_ROWS):
        yield first, frame.lazy()
        first += frame.height


def _named(part: _ExposurePart, schema: Mapping[str, pl.DataType]) -> list[pl.Expr]:
    """The roles under their names, the time as whole numbers under `day`."""
    exprs = []
    for role, column in part.roles.items():
        if role in _TIMES:
            expr: pl.Expr | None = time_expr(role, schema[column], column).alias("day")
        elif role == "user_id" and part.user is not None:
            expr = pl.col(column).cast(part.user)
        else:
            expr = role_expr(_LIKE.get(role, role), schema[column], column)
        if expr is not None:
            exprs.append(expr.alias("day" if role in _TIMES else role))
    return exprs


def _rules(roles: Mapping[str, str]) -> dict[str, tuple[str, pl.Expr]]:
    """Role -> what it must do, in words, and the expression that is true where it does not."""
    rules = {"user_id": ("not be missing", pl.col("user_id").is_null())}
    for role in ("click", "conversion"):
        if role in roles:
            rules[role] = ("be 0 or 1", pl.col(role).is_null() | ~pl.col(role).is_in([0.0, 1.0]))
    if "value" in roles:
        x, converted = pl.col("value"), pl.col(_conversion(roles)) == 1
        missing = x.is_null() | x.is_nan()
        lost = (x > 0) & (x < 1 / _MILLION) & converted
        outside = ((x < 0) | (x > _LARGEST) | lost) & x.is_not_nan()
        rules["value"] = ("be 0 or a finite number from 0.000001 up", outside.fill_null(False) | (missing & converted))
    for role in _TIMES:
        if role in roles:
            rules[role] = ("be a date or time, or a whole number", pl.col("day").is_null())
    return rules


def _conversion(roles: Mapping[str, str]) -> str:
    return "conversion" if "conversion" in roles else "click"


def _sums(roles: Mapping[str, str]) -> list[pl.Expr]:
    sums = [pl.len().cast(pl.Int64).alias("impressions"), pl.col("click").sum().alias("clicks")]
    if "conversion" in roles:
        sums.append(pl.col("conversion").sum().alias("conversions"))
    if "value" in roles:
        # Whole numbers of millionths: up to 2⁵³, some 9e9 a user and day, they are summed exactly, in whatever order.
        value = (pl.col("value").cast(pl.Float64) * _MILLION).round()
        earned = pl.when(pl.col(_conversion(roles)) == 1).then(value).otherwise(0.0)
        sums.append(earned.sum().alias("revenue"))
    return sums


def _refusal(part: _ExposurePart, named: pl.LazyFrame, role: str, requirement: str, broken: pl.Expr) -> DataError:
    row = named.with_row_index(ROW).filter(broken).select(pl.col(ROW).min()).collect(engine="streaming").item()
    got = part.rows.select(pl.col(part.roles[role]).slice(row, 1)).collect().item()
    shown = "nothing" if got is None or got != got else repr(got) if isinstance(got, str | float) else str(got)
    return DataError(f"{role} must {requirement}; got {shown} at {RowName([part.name])(part.first + row)}")


def _merged(added: list[pl.DataFrame]) -> pl.DataFrame:
    """Parts in one, where a user may have rows of one day in several."""
    if len(added) == 1:
        return added[0]
    keys = [key for key in ("user_id", "arm", "day") if key in added[0].columns]
    return pl.concat(added).group_by(keys).sum()


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
    told: ArmHistory | None = field(default=None, repr=False)

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
class ArmHistory:
    """What a log tells of arms.

    Attributes:
        rows: of all users; those of one user and day may be several, one for each arm.
        names: of the arms, sorted.
        arm: `[rows]`, an index into `names`, or −1 where the log names none.
    """

    rows: Exposures
    names: tuple[str, ...]
    arm: Ints

    def between(self, first: int, last: int) -> ArmHistory:
        kept = (self.rows.day >= first) & (self.rows.day <= last)
        return ArmHistory(self.rows.where(kept), self.names, self.arm[kept])


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
    told = ArmHistory(everything, tuple(names), index)
    return replace(_with_arms(told, 0, len(labels) - 1), told=told)


def _with_arms(told: ArmHistory, first: int, last: int) -> Exposures:
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
