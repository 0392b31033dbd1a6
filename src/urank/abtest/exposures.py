"""Exposure logs of A/B tests, aggregated by user and day; and the assignment of users to arms.

An exposure log has one row for each impression. Only sums by user and day are kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.errors import ConfigError, DataError
from urank.log.columns import ROW, RowName, check_mapping, check_types, missing_columns, role_expr
from urank.log.reader import PARQUET, TableFile, add_partitions, find_files, open_file, table_frame
from urank.log.splits import stable_hash
from urank.progress import Report, silent

EXPOSURE_ROLES: Mapping[str, str] = {
    "user_id": "the user, the unit of randomisation",
    "arm": "the arm of the test; where it is missing, the arm that the user has elsewhere",
    "click": "1 if clicked, else 0",
    "conversion": "1 if bought, downloaded or the like; defaults to the click",
    "value": "the value of a conversion; may be missing where there is none",
    "day": "the day: a date or a whole number; takes precedence over the timestamp",
    "timestamp": "time of the impression: a date or time, or seconds, milliseconds or microseconds since 1970 (UTC)",
}
EVERYONE = "everyone"
"""The only arm of a log that is read without arms."""
MOST_DAYS = 3_660
BATCH_ROWS = 500_000
MERGE_ROWS = 5_000_000

_NO_ARM = -1
_SUMS = ("impressions", "clicks", "conversions", "revenue")
_TIMES = ("day", "timestamp")
_ROUNDING = 1e-9
_LARGEST_VALUE = 1e38
_MILLION = 1e6

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def assign_arms(user_ids: pl.Series, shares: Mapping[str, float], *, salt: str) -> pl.Series:
    """Assign users to arms by a hash: the same user has the same arm on every machine and every day.

        u = hash(salt, id) / 2⁶⁴,      arm j  if  share_1 + … + share_{j−1} ≤ u < share_1 + … + share_j

    Users beyond the last share are not in the test and get null. The order of the arms matters: `{"A": 0.1, "B": 0.1}`
    keeps its users if a third arm is appended or the share of the last one is raised; raising that of A moves users of
    B to A. Each test needs its own salt, which makes its arms independent of those of all other tests.

    Args:
        user_ids: text or numbers; 17 and "17" are the same user.
        shares: arm -> its share of all users; the sum is at most 1.
        salt: the name of the test.

    >>> ids = pl.Series(range(10_000))
    >>> arms = assign_arms(ids, {"A": 0.5, "B": 0.3}, salt="new ranker")
    >>> [round(share, 2) for share in ((arms == "A").sum() / 1e4, (arms == "B").sum() / 1e4, arms.null_count() / 1e4)]
    [0.5, 0.3, 0.2]
    """
    if not shares:
        raise ConfigError("shares must name at least one arm; got none")
    for arm, share in shares.items():
        if not 0 < share <= 1:
            raise ConfigError(f"the share of an arm must be above 0 and at most 1; got {share} for '{arm}'")
    if sum(shares.values()) > 1 + _ROUNDING:
        raise ConfigError(f"the shares of the arms must sum to at most 1; got {sum(shares.values()):g}")
    if not salt:
        raise ConfigError("salt must name the test; got an empty text")
    text = user_ids.alias("id").to_frame().select(role_expr("user_id", user_ids.dtype, "id")).to_series()
    if text.null_count():
        raise DataError(f"user_ids must not be missing; got nothing at row {int(text.is_null().arg_max() or 0) + 1}")
    hashes = stable_hash(pl.select(pl.concat_str(pl.lit(f"{salt}\x00"), pl.lit(text))).to_series())
    place = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53  # below 1, also for the largest hash
    ends = np.cumsum(list(shares.values()))
    ends[np.abs(ends - 1) < _ROUNDING] = 1.0
    names = pl.Series("arm", [*shares, None], dtype=pl.String)
    return names.gather(np.searchsorted(ends, place, side="right"))


@dataclass(frozen=True, eq=False)
class Exposures:
    """An exposure log, aggregated. Rows are sorted by user, then day, and each pair of these occurs once.

    Attributes:
        arms: the names of the arms, sorted.
        days: labels of all days from the first to the last without gaps; one empty label if the log has no time.
        arm: `[users]`, an index into `arms`.
        user: `[rows]`, an index into `arm`.
        day: `[rows]`, an index into `days`.
        impressions, clicks, conversions: `[rows]`, sums.
        revenue: `[rows]`, total value of the conversions; None if the log has no values.
        crossed, unassigned: numbers of users seen in two arms, and without any arm, which are excluded.
        history: the rows of all users with the arm of each row, for `settle_arms`; None if the arms are settled.
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
    history: ArmHistory | None = field(default=None, repr=False)

    @property
    def users(self) -> int:
        return len(self.arm)

    @property
    def sums(self) -> dict[str, Floats]:
        """The available sums by name."""
        return {name: getattr(self, name) for name in _SUMS if getattr(self, name) is not None}

    def where(self, kept: NDArray[np.bool_]) -> Exposures:
        """Select rows by a mask `[rows]`; users and days keep their indices, and the arms are settled."""
        if kept.all():
            return self
        sums: dict[str, Any] = {name: values[kept] for name, values in self.sums.items()}
        return replace(self, user=self.user[kept], day=self.day[kept], history=None, **sums)

    def between(self, first: int, last: int) -> Exposures:
        """Select the rows of a range of days, both ends included; users and days keep their indices."""
        part = self.where((self.day >= first) & (self.day <= last))
        return part if self.history is None else replace(part, history=self.history.between(first, last))

    def settle_arms(self, first: int, last: int) -> Exposures:
        """Decide the arm of each user from a range of days, both ends included.

        Users seen on these days have the arm of their rows on these days, whatever other rows contain, and all their
        rows count for that arm. So what users saw after a test does not decide who is in it. Users seen only before
        have the arm of that time; users seen only after are excluded. `crossed` and `unassigned` count users of these
        days.
        """
        if self.history is None:
            return self
        found = replace(self.history.settle(first, last), name=self.name)
        if not found.users:
            raise DataError(f"{self.name} must have users that were seen in one arm only; it has none")
        return found


@dataclass(frozen=True, eq=False)
class ArmHistory:
    """The rows of all users, one for each day and arm; `arm[rows]` is an index into `names`, −1 if it is missing."""

    rows: Exposures
    names: tuple[str, ...]
    arm: Ints

    def between(self, first: int, last: int) -> ArmHistory:
        """Select the rows of a range of days, both ends included."""
        kept = (self.rows.day >= first) & (self.rows.day <= last)
        return ArmHistory(self.rows.where(kept), self.names, self.arm[kept])

    def settle(self, first: int, last: int) -> Exposures:
        """Select the users with exactly one arm on these days, or before if they were not seen on these days."""
        rows, arm = self.rows, self.arm
        inside = (rows.day >= first) & (rows.day <= last)
        used = np.unique(arm[inside & (arm != _NO_ARM)])
        seen = np.bincount(rows.user[inside], minlength=rows.users) > 0
        counted = (inside | (~seen[rows.user] & (rows.day < first))) & (arm != _NO_ARM)
        highest, lowest = np.full(rows.users, _NO_ARM), np.full(rows.users, len(self.names))
        np.maximum.at(highest, rows.user[counted], arm[counted])
        np.minimum.at(lowest, rows.user[counted], arm[counted])
        kept = (highest == lowest) & np.isin(highest, used)
        chosen = rows.where(kept[rows.user])
        # A user may have several rows for a day: some without an arm or, on days outside the range, of another arm.
        key = chosen.user * len(rows.days) + chosen.day
        days = np.flatnonzero(np.append(True, np.diff(key) != 0)[: len(key)])
        sums: dict[str, Any] = chosen.sums
        if len(days) < len(key):
            sums = {name: np.add.reduceat(values, days) for name, values in sums.items()}
        return replace(
            chosen,
            arms=tuple(self.names[place] for place in used),
            arm=np.searchsorted(used, highest[kept]),
            user=(np.cumsum(kept) - 1)[chosen.user[days]],
            day=chosen.day[days],
            crossed=int((seen & (highest > lowest)).sum()),
            unassigned=int((seen & (highest < lowest)).sum()),
            **sums,
        )


# Days

_DAY_NUMBERS = 100_000  # smaller whole numbers count days: as seconds they would be the first day of 1970
_YYYYMMDD = (1900_01_01, 2100_12_31)
_TICKS = {"day": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def _time_unit(largest: int) -> str:
    """Infer the unit of whole numbers: numbered days, dates as 20200531, or a time since 1970 (UTC).

    The largest number decides; times from 1973 to 5138 are unambiguous.

    >>> [_time_unit(largest) for largest in (13, 20200531, 1588723200, 1588723200000, 1588723200000000)]
    ['day', 'yyyymmdd', 's', 'ms', 'us']
    """
    if largest < _DAY_NUMBERS:
        return "day"
    if _YYYYMMDD[0] <= largest <= _YYYYMMDD[1]:
        return "yyyymmdd"
    return "s" if largest < 10**11 else "ms" if largest < 10**14 else "us" if largest < 10**17 else "ns"


def _day_of(number: pl.Expr, unit: str) -> pl.Expr:
    """Return the day, counted from 1970 unless days are only numbered; null for invalid dates such as 20201399."""
    if unit == "yyyymmdd":
        return number.cast(pl.String).str.to_date("%Y%m%d", strict=False).cast(pl.Int32)
    return (number // _TICKS[unit]).cast(pl.Int32)


def _day_label(day: int, unit: str) -> str:
    """Return the date of a day, or its number if days are only numbered."""
    try:
        return str(day) if unit == "day" else (date(1970, 1, 1) + timedelta(days=day)).isoformat()
    except OverflowError:
        return f"day {day:,} since 1970"


def read_exposures(
    source: str | Path | Any, *, columns: Mapping[str, str] | None = None, arms: bool = True, report: Report = silent
) -> Exposures:
    """Read an exposure log with one row for each impression, and aggregate it by user and day.

    A user has one arm. Users seen in two arms are counted and excluded, since their behaviour belongs to neither; users
    without an arm are not in the test. A row without an arm counts for the arm of its user, so the log may include the
    time before the test. `analyse` decides this again by the days of the test alone (`Exposures.settle_arms`). Values
    are rounded to millionths. Days are in UTC; provide a column `day` for other time zones.

    Args:
        source: files, a folder, a glob or a table, as in `urank.read`.
        columns: role -> column, where the names differ; see `EXPOSURE_ROLES`. `user_id`, `arm` and `click` are
            required. All other columns are ignored.
        arms: False to read all users as one arm, `EVERYONE`, as for `plan`.
        report: Progress callback, in bytes.

    >>> log = pl.DataFrame({"user_id": [7, 7, 8, 9], "arm": list("AABB"), "click": [0, 1, 0, 1], "day": [1, 3, 3, 3]})
    >>> found = read_exposures(log)
    >>> found.arms, found.days, found.arm.tolist()
    (('A', 'B'), ('1', '2', '3'), [0, 1, 1])
    >>> found.user.tolist(), found.day.tolist(), found.clicks.tolist()
    ([0, 0, 1, 2], [0, 2, 2, 2], [0.0, 1.0, 0.0, 1.0])
    """
    reader = _ExposureReader(source, columns, arms=arms)
    frame = reader.aggregate(report)
    frame = frame.sort([key for key in ("user_id", "day", "arm") if key in frame.columns])
    labels, day = reader.day_index(frame)
    user = frame["user_id"].rle_id().to_numpy().astype(np.int64)
    sums: dict[str, Any] = {name: frame[name].to_numpy().astype(np.float64) for name in _SUMS if name in frame.columns}
    sums = {"conversions": sums["clicks"], "revenue": None, **sums}
    one_arm = np.zeros(int(user[-1]) + 1, dtype=np.int64)
    everyone = Exposures(reader.name, (EVERYONE,), labels, arm=one_arm, user=user, day=day, **sums)
    if not arms:
        return everyone
    names = sorted(frame["arm"].drop_nulls().unique())
    if not names:
        raise DataError(f"{reader.name} must name the arm of some user; it names none")
    index = frame["arm"].cast(pl.Enum(names)).to_physical().cast(pl.Int64).fill_null(_NO_ARM).to_numpy()
    history = ArmHistory(everyone, tuple(names), index)
    return replace(history.settle(0, len(labels) - 1), history=history)


@dataclass(frozen=True)
class _ExposureRows:
    """Rows of one file or table, from its row `first` on; `user` is the type of ids, None to convert them to text."""

    name: str
    first: int
    rows: pl.LazyFrame
    roles: Mapping[str, str]
    user: pl.DataType | None


class _ExposureReader:
    """Reads an exposure log once; `unit`, that of the time, is inferred from the first rows, None without a time."""

    def __init__(self, source: str | Path | Any, columns: Mapping[str, str] | None, *, arms: bool) -> None:
        self.name = str(source) if isinstance(source, (str, Path)) else "the table"
        self.unit: str | None = None
        self._source = source
        self._mapping = dict(columns or {})
        self._arms = arms

    def aggregate(self, report: Report) -> pl.DataFrame:
        """Sum impressions, clicks, conversions and revenue by user, arm and day, as far as the log has these."""
        parts: list[pl.DataFrame] = []
        for rows in self._files(report) if isinstance(self._source, (str, Path)) else self._table():
            parts.append(self._aggregate_rows(rows))
            if sum(part.height for part in parts[1:]) > max(MERGE_ROWS, parts[0].height):
                parts = [_merge(parts)]
        if not sum(part.height for part in parts):
            raise DataError(f"{self.name} is empty; an exposure log needs at least one impression")
        found = _merge(parts)
        return found.with_columns(pl.col("revenue") / _MILLION) if "revenue" in found.columns else found

    def day_index(self, frame: pl.DataFrame) -> tuple[tuple[str, ...], Ints]:
        """Return the labels of all days, and the index of the day of each row."""
        if "day" not in frame.columns:
            return ("",), np.zeros(frame.height, dtype=np.int64)
        unit = self.unit or "day"
        day = frame["day"].to_numpy().astype(np.int64)
        first, last = int(day.min()), int(day.max())
        if last - first >= MOST_DAYS:
            raise DataError(
                f"the days of {self.name} must lie within {MOST_DAYS:,} of each other; they go from "
                f"{_day_label(first, unit)} to {_day_label(last, unit)} "
                "(is the time of some rows missing, or in another unit?)"
            )
        return tuple(_day_label(each, unit) for each in range(first, last + 1)), day - first

    def _table(self) -> Iterator[_ExposureRows]:
        frame = table_frame(self._source, self.name, "an exposure log")
        roles = self._roles(frame.schema, self.name)
        yield _ExposureRows(self.name, 0, frame.lazy(), roles, _id_type([frame.schema[roles["user_id"]]]))

    def _files(self, report: Report) -> Iterator[_ExposureRows]:
        text = {self._mapping.get(role, role) for role in ("user_id", "arm")}
        files = [open_file(path, text) for path in find_files(self.name)]
        add_partitions(files, self.name)
        roles = [self._roles(file.dtypes, file.name) for file in files]
        for file, each in zip(files, roles, strict=True):
            if differing := sorted(set(roles[0]) ^ set(each)):
                raise DataError(f"{differing[0]} is in some files of {self.name} but not in others, as in {file.name}")
        user = _id_type([file.dtypes[each["user_id"]] for file, each in zip(files, roles, strict=True)])
        sizes = [file.path.stat().st_size for file in files]
        for number, (file, each) in enumerate(zip(files, roles, strict=True)):
            for first, rows in _file_rows(file, list(dict.fromkeys(each.values()))):
                yield _ExposureRows(file.name, first, rows, each, user)
            report("read", sum(sizes[: number + 1]), sum(sizes))

    def _roles(self, dtypes: Mapping[str, pl.DataType], name: str) -> dict[str, str]:
        """Return role -> column, with one role at most for the time."""
        check_mapping(self._mapping, EXPOSURE_ROLES, dtypes, name, "an exposure log")
        free = set(dtypes) - set(self._mapping.values())
        known = [role for role in EXPOSURE_ROLES if role in self._mapping or role in free]
        roles = {role: self._mapping.get(role, role) for role in known}
        needed = ("user_id", "arm", "click") if self._arms else ("user_id", "click")
        if absent := [role for role in needed if role not in roles]:
            raise missing_columns(absent, dtypes, name)
        if not self._arms:
            roles.pop("arm", None)
        if "day" in roles:
            roles.pop("timestamp", None)
        check_types({"timestamp" if role == "day" else role: column for role, column in roles.items()}, dtypes, name)
        return roles

    def _aggregate_rows(self, part: _ExposureRows) -> pl.DataFrame:
        try:
            schema = part.rows.collect_schema()
            named = part.rows.select(_role_exprs(part, schema))
            self._validate(part, named, schema)
            if self.unit is not None:
                named = named.with_columns(_day_of(pl.col("day"), self.unit))
            keys = [key for key in ("user_id", "arm", "day") if key in named.collect_schema()]
            return named.group_by(keys).agg(_sum_exprs(part.roles)).collect(engine="streaming")
        except (pl.exceptions.PolarsError, OSError) as error:
            raise DataError(f"{part.name} cannot be read: {' '.join(str(error).split())[:200]}") from error

    def _validate(self, part: _ExposureRows, named: pl.LazyFrame, schema: Mapping[str, pl.DataType]) -> None:
        """Raise `DataError` for the first invalid row; infer the unit of time if it is not known yet."""
        rules = _rules(part.roles)
        time = next((role for role in _TIMES if role in part.roles), None)
        exprs = {role: broken.any() for role, (_, broken) in rules.items()}
        if time is not None:
            exprs["largest"] = pl.col("day").max()
        found = named.select(**exprs).collect(engine="streaming").row(0, named=True)
        for role, (requirement, broken) in rules.items():
            if found[role]:
                raise _invalid_row(part, named, role, requirement, broken)
        if time is None or found["largest"] is None:
            return
        if self.unit is None:
            temporal = schema[part.roles[time]].is_temporal()
            self.unit = "us" if temporal else _time_unit(found["largest"])
        if self.unit == "yyyymmdd":
            broken = _day_of(pl.col("day"), self.unit).is_null()
            if named.select(broken.any()).collect(engine="streaming").item():
                raise _invalid_row(part, named, time, "be a date, as others are (20200531)", broken)


def _id_type(types: list[pl.DataType]) -> pl.DataType | None:
    """Return the common type if all ids are text, or integers of one type; else None."""
    return types[0] if len(set(types)) == 1 and (types[0].is_integer() or types[0] == pl.String) else None


def _file_rows(file: TableFile, columns: list[str]) -> Iterator[tuple[int, pl.LazyFrame]]:
    """Yield the first row number and the rows of each batch of a file; Parquet is scanned lazily as one batch."""
    if file.path.name.endswith(PARQUET):
        own = [column for column in columns if column not in file.constants]
        constants = [pl.lit(value, dtype=file.dtypes[key]).alias(key) for key, value in file.constants.items()]
        yield 0, pl.scan_parquet(file.path, glob=False, hive_partitioning=False).select(own).with_columns(constants)
        return
    first = 0
    for frame, _ in file.batches(columns, BATCH_ROWS):
        yield first, frame.lazy()
        first += frame.height


def _role_exprs(part: _ExposureRows, schema: Mapping[str, pl.DataType]) -> list[pl.Expr]:
    """Select the columns under the names of their roles, and the time as whole numbers named `day`."""
    exprs = []
    for role, column in part.roles.items():
        expr: pl.Expr | None
        if role == "user_id" and part.user is not None:
            expr = pl.col(column).cast(part.user)
        elif role == "day" and schema[column].is_float():
            number = pl.col(column).cast(pl.Int64, strict=False)
            expr = pl.when(number == pl.col(column)).then(number)
        else:
            expr = role_expr("timestamp" if role == "day" else role, schema[column], column)
        if expr is not None:
            exprs.append(expr.alias("day" if role in _TIMES else role))
    return exprs


def _rules(roles: Mapping[str, str]) -> dict[str, tuple[str, pl.Expr]]:
    """Return role -> its requirement in words, and an expression that is true where it is violated."""
    rules = {"user_id": ("not be missing", pl.col("user_id").is_null())}
    for role in ("click", "conversion"):
        if role in roles:
            rules[role] = ("be 0 or 1", pl.col(role).is_null() | ~pl.col(role).is_in([0.0, 1.0]))
    if "value" in roles:
        x, converted = pl.col("value"), pl.col(_conversion(roles)) == 1
        missing = x.is_null() | x.is_nan()
        lost = (x > 0) & (x < 1 / _MILLION) & converted
        outside = ((x < 0) | (x > _LARGEST_VALUE) | lost) & x.is_not_nan()
        rules["value"] = ("be 0 or a finite number from 0.000001 up", outside.fill_null(False) | (missing & converted))
    for role in _TIMES:
        if role in roles:
            rules[role] = ("be a date or time, or a whole number", pl.col("day").is_null())
    return rules


def _conversion(roles: Mapping[str, str]) -> str:
    return "conversion" if "conversion" in roles else "click"


def _sum_exprs(roles: Mapping[str, str]) -> list[pl.Expr]:
    sums = [pl.len().cast(pl.Int64).alias("impressions"), pl.col("click").sum().alias("clicks")]
    if "conversion" in roles:
        sums.append(pl.col("conversion").sum().alias("conversions"))
    if "value" in roles:
        # Whole millionths up to 2⁵³, about 9e9 per user and day, are summed exactly in any order.
        value = (pl.col("value").cast(pl.Float64) * _MILLION).round()
        earned = pl.when(pl.col(_conversion(roles)) == 1).then(value).otherwise(0.0)
        sums.append(earned.sum().alias("revenue"))
    return sums


def _invalid_row(part: _ExposureRows, named: pl.LazyFrame, role: str, requirement: str, broken: pl.Expr) -> DataError:
    """Return the error for the first row at which `broken` is true."""
    row = named.with_row_index(ROW).filter(broken).select(pl.col(ROW).min()).collect(engine="streaming").item()
    got = part.rows.select(pl.col(part.roles[role]).slice(row, 1)).collect().item()
    shown = "nothing" if got is None or got != got else repr(got) if isinstance(got, str | float) else str(got)
    return DataError(f"{role} must {requirement}; got {shown} at {RowName([part.name])(part.first + row)}")


def _merge(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Add up parts, in several of which a user may have rows of the same day."""
    if len(parts) == 1:
        return parts[0]
    keys = [key for key in ("user_id", "arm", "day") if key in parts[0].columns]
    return pl.concat(parts).group_by(keys).sum()
