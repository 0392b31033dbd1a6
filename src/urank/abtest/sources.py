"""Files and tables of an exposure log: every row checked, then added up by user, arm and day."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from urank.abtest.days import Clock, time_expr
from urank.errors import DataError
from urank.log.cells import ROW, RowName, can_play, role_expr
from urank.log.files import PARQUET, FileFormat, find_files, open_file, table_frame
from urank.log.partitions import add_partitions
from urank.log.schema import check_mapping, no_column
from urank.progress import Report

__all__ = ["EXPOSURE_ROLES", "Source"]

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
class _Part:
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

    def _table(self) -> Iterator[_Part]:
        frame = table_frame(self._source, self.name, "an exposure log")
        roles = self._roles(frame.schema, self.name)
        yield _Part(self.name, 0, frame.lazy(), roles, _id_type([frame.schema[roles["user_id"]]]))

    def _files(self, report: Report) -> Iterator[_Part]:
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
                yield _Part(file.name, first, rows, each, user)
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
                raise no_column(role, dtypes, name)
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

    def _added_up(self, part: _Part) -> pl.DataFrame:
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

    def _check(self, part: _Part, named: pl.LazyFrame, schema: Mapping[str, pl.DataType]) -> None:
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


def _rows(file: FileFormat, columns: list[str]) -> Iterator[tuple[int, pl.LazyFrame]]:
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


def _named(part: _Part, schema: Mapping[str, pl.DataType]) -> list[pl.Expr]:
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


def _refusal(part: _Part, named: pl.LazyFrame, role: str, requirement: str, broken: pl.Expr) -> DataError:
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
