"""Exposure logs in every form, users without one arm, invalid rows; and the assignment of users to arms."""

from __future__ import annotations

import gzip
from dataclasses import replace
from datetime import date, datetime, timedelta
from itertools import product
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from urank.abtest import exposures
from urank.abtest.analysis import analyse
from urank.abtest.exposures import EVERYONE, Exposures, assign_arms, read_exposures
from urank.errors import ConfigError, DataError

HALVES = {"A": 0.5, "B": 0.5}
USERS = pl.Series(range(40_000))
DAY = date(2020, 5, 30)
LOG = pl.DataFrame(
    {
        "user_id": ["u1", "u1", "u2", "u1", "u3", "u2"],
        "arm": ["A", "A", "B", "A", "B", "B"],
        "click": [1, 0, 1, 1, 0, 1],
        "value": [2.0, 9.0, 3.0, 4.0, 9.0, 0.5],
        "timestamp": [DAY, DAY, DAY, DAY + timedelta(days=3), DAY + timedelta(days=2), DAY],
        "item": ["x", "y", "z", "x", "x", "y"],
    }
)


def rows(found: Exposures) -> list[tuple[Any, ...]]:
    """By user: its arm, and for each of its days the day and the sums."""
    columns = [np.array(found.days)[found.day], *found.sums.values()]
    by_row = [(found.arms[found.arm[user]], *row) for user, *row in zip(found.user, *columns, strict=True)]
    return sorted((user, *row) for user, row in zip(found.user.tolist(), by_row, strict=True))


def broken(column: str, value: object, row: int = 3) -> pl.DataFrame:
    """The log with another value at a row."""
    values = LOG[column].to_list()
    values[row] = value
    return LOG.with_columns(pl.Series(column, values, strict=False))


def test_sums_by_user_and_day() -> None:
    found = read_exposures(LOG)
    assert (found.arms, found.users, found.crossed, found.unassigned) == (("A", "B"), 3, 0, 0)
    assert found.days == ("2020-05-30", "2020-05-31", "2020-06-01", "2020-06-02")
    assert rows(found) == [
        (0, "A", "2020-05-30", 2, 1, 1, 2.0),
        (0, "A", "2020-06-02", 1, 1, 1, 4.0),
        (1, "B", "2020-05-30", 2, 2, 2, 3.5),
        (2, "B", "2020-06-01", 1, 0, 0, 0.0),
    ]


def test_every_form_gives_the_same(tmp_path: Path) -> None:
    expected = rows(read_exposures(LOG))
    LOG.write_parquet(tmp_path / "log.parquet", row_group_size=2)
    LOG.write_csv(tmp_path / "log.csv")
    (tmp_path / "zipped.csv.gz").write_bytes(gzip.compress((tmp_path / "log.csv").read_bytes()))
    LOG.with_columns(pl.col("user_id", "arm").cast(pl.Categorical)).write_parquet(tmp_path / "names.parquet")
    for source in ("log.parquet", "log.csv", "zipped.csv.gz", "names.parquet"):
        assert rows(read_exposures(tmp_path / source)) == expected, source
    assert rows(read_exposures(LOG.lazy())) == expected
    assert rows(read_exposures(LOG.to_arrow())) == expected
    assert rows(read_exposures(pd.DataFrame(LOG.to_dict(as_series=False)))) == expected
    assert rows(read_exposures(LOG.sample(fraction=1, shuffle=True, seed=1))) == expected


def test_a_user_may_go_on_in_other_files_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows(read_exposures(LOG))
    numbered = LOG.with_columns(pl.col("user_id").str.slice(1).cast(pl.Int64))
    for place, frame in enumerate((LOG[:2], LOG[2:4], LOG[4:])):
        frame.write_parquet(tmp_path / f"{place}.parquet")
    assert rows(read_exposures(tmp_path)) == expected
    monkeypatch.setattr(exposures, "MERGE_ROWS", 1)
    assert rows(read_exposures(f"{tmp_path}/*.parquet")) == expected
    numbered[:3].write_parquet(tmp_path / "a.parquet")
    numbered[3:].write_csv(tmp_path / "b.csv")  # where ids are text
    monkeypatch.setattr(exposures, "BATCH_ROWS", 2)
    assert rows(read_exposures(f"{tmp_path}/[ab].*")) == expected


def test_partitions_may_name_the_day_and_the_arm(tmp_path: Path) -> None:
    for arm in "AB":
        for day in (DAY, DAY + timedelta(days=2), DAY + timedelta(days=3)):
            part = LOG.filter((pl.col("arm") == arm) & (pl.col("timestamp") == day))
            folder = tmp_path / f"arm={arm}" / f"day={day}"
            folder.mkdir(parents=True)
            part.drop("arm", "timestamp").write_parquet(folder / "part.parquet")
    assert rows(read_exposures(tmp_path)) == rows(read_exposures(LOG))


def test_conversions_may_differ_from_clicks() -> None:
    found = read_exposures(LOG.with_columns(conversion=pl.Series([0, 0, 1, 1, 0, 0])))
    assert (found.clicks.sum(), found.conversions.sum()) == (4, 2)
    assert found.revenue is not None
    assert found.revenue.sum() == 3 + 4


def test_without_values_there_is_no_revenue_and_without_time_one_day() -> None:
    found = read_exposures(LOG.select("user_id", "arm", "click"))
    assert found.revenue is None
    assert (found.days, found.day.tolist()) == (("",), [0, 0, 0])
    assert found.impressions.tolist() == [3, 2, 1]


def test_a_value_may_be_missing_where_nothing_was_bought() -> None:
    for missing in (None, float("nan")):
        assert rows(read_exposures(broken("value", missing, row=1))) == rows(read_exposures(LOG))


def test_values_are_summed_to_the_same_bits_in_any_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    value = rng.lognormal(size=50_000)
    log = pl.DataFrame({"user_id": rng.integers(300, size=50_000), "arm": "A", "click": 1, "value": value})
    found = []
    for number in range(4):
        path = tmp_path / f"{number}.parquet"
        log.sample(fraction=1, shuffle=True, seed=number).write_parquet(path)
        found.append(read_exposures(path).revenue)
    assert all(np.array_equal(each, found[0]) for each in found)
    assert found[0] is not None
    exact = log.select(pl.col("value").round(6).sum().over("user_id")).item(0, 0)
    assert found[0][log["user_id"].unique().sort().index_of(log["user_id"][0])] == pytest.approx(exact, rel=1e-13)
    assert float(np.sum(found[0])) == pytest.approx(value.sum(), rel=1e-8)


def test_prices_are_summed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = pl.DataFrame({"user_id": 1, "arm": "A", "click": 1, "value": [19.99] * 100_000})
    assert read_exposures(log).revenue == 1_999_000.0
    log.write_csv(tmp_path / "log.csv")
    monkeypatch.setattr(exposures, "BATCH_ROWS", 30_000)
    monkeypatch.setattr(exposures, "MERGE_ROWS", 1)
    assert read_exposures(tmp_path / "log.csv").revenue == 1_999_000.0


def test_other_names_can_be_given() -> None:
    renamed = LOG.rename({"user_id": "who", "arm": "group", "click": "download", "value": "price"})
    columns = {"user_id": "who", "arm": "group", "click": "download", "value": "price"}
    assert rows(read_exposures(renamed, columns=columns)) == rows(read_exposures(LOG))


# Users and arms


def test_users_of_two_arms_are_counted_and_left_out() -> None:
    found = read_exposures(broken("arm", "B", row=3))
    assert (found.crossed, found.users) == (1, 2)
    assert [row[1:3] for row in rows(found)] == [("B", "2020-05-30"), ("B", "2020-06-01")]


def test_rows_without_an_arm_count_for_that_of_their_user() -> None:
    for row in (0, 3):  # on a day on which it has one, and on another
        assert rows(read_exposures(broken("arm", None, row=row))) == rows(read_exposures(LOG))


def test_users_without_an_arm_are_not_in_the_test() -> None:
    found = read_exposures(broken("arm", None, row=4))
    assert (found.unassigned, found.crossed, found.users) == (1, 0, 2)


def test_arms_can_be_those_of_some_days() -> None:
    rows_of = [(1, 1, "A"), (1, 2, "A"), (1, 2, None), (1, 3, "B"), (1, 3, None), (1, 3, "A"), (2, 2, "B"), (2, 2, "A")]
    others = [(3, 1, "B"), (4, 3, "B"), (5, 2, None), (5, 1, "A"), (6, 2, "B"), (6, 1, "A")]
    log = pl.DataFrame([*rows_of, *others], schema=["user_id", "day", "arm"], orient="row").with_columns(click=1)
    whole = read_exposures(log)
    assert (whole.crossed, whole.unassigned, whole.users) == (3, 0, 3)
    found = whole.settle_arms(1, 1)  # day 2
    assert (found.crossed, found.unassigned) == (1, 1)  # users 2 and 5
    assert [found.arms[arm] for arm in found.arm] == ["A", "B", "B"]  # users 1, 3 (seen before only) and 6
    assert list(zip(found.user.tolist(), found.day.tolist(), found.clicks.tolist(), strict=True)) == [
        (0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 1), (2, 0, 1), (2, 1, 1)
    ]  # fmt: skip
    assert found.settle_arms(0, 2) is found
    assert replace(whole, name="renamed").settle_arms(1, 1).name == "renamed"
    cut = whole.between(1, 2).settle_arms(1, 1)
    assert (cut.users, cut.crossed) == (2, 1)
    assert rows(whole.settle_arms(0, 2)) == rows(whole)


def test_a_log_for_planning_needs_no_arms() -> None:
    found = read_exposures(LOG.drop("arm"), arms=False)
    assert (found.arms, found.arm.tolist()) == ((EVERYONE,), [0, 0, 0])
    assert found.clicks.tolist() == read_exposures(LOG).clicks.tolist()
    assert read_exposures(broken("arm", "B", row=3), arms=False).crossed == 0


# Days

FORMS: dict[str, list[Any]] = {
    "dates": [date(2020, 5, 31), date(2020, 6, 2)],
    "times": [datetime(2020, 5, 31, 23, 59), datetime(2020, 6, 2, 0, 0)],
    "text": ["2020-05-31T23:59:00Z", "2020-06-02"],
    "yyyymmdd": [20200531, 20200602],
    "seconds": [1590969540, 1591056000],
    "milliseconds": [1590969540_000, 1591056000_000],
    "microseconds": [1590969540_000000, 1591056000_000000],
    "fractions": [1590969540.5, 1591056000.0],
}


@pytest.mark.parametrize(("form", "role"), [*product(FORMS, ["timestamp"]), *product(list(FORMS)[:-1], ["day"])])
def test_days_come_in_many_forms(form: str, role: str) -> None:
    log = pl.DataFrame({"user_id": [1, 1], "arm": ["A", "A"], "click": [1, 0], role: FORMS[form]})
    found = read_exposures(log)
    assert found.days == ("2020-05-31", "2020-06-01", "2020-06-02")
    assert found.day.tolist() == [0, 2]


@pytest.mark.parametrize("days", [[3, 5], [3.0, 5.0]])
def test_days_may_only_be_numbered(days: list[float]) -> None:
    log = pl.DataFrame({"user_id": [1, 1], "arm": ["A", "A"], "click": [1, 0], "day": days})
    found = read_exposures(log)
    assert (found.days, found.day.tolist()) == (("3", "4", "5"), [0, 2])


def test_a_day_wins_over_a_timestamp() -> None:
    assert read_exposures(LOG.with_columns(day=pl.lit(7))).days == ("7",)


def test_days_too_far_apart_are_refused() -> None:
    with pytest.raises(DataError, match="must lie within 3,660 of each other; they go from 1970-01-01"):
        read_exposures(broken("timestamp", date(1970, 1, 1)))


# Refusals


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("user_id", None, "user_id must not be missing; got nothing"),
        ("click", 2, "click must be 0 or 1; got 2"),
        ("click", None, "click must be 0 or 1; got nothing"),
        ("value", -1.0, "value must be 0 or a finite number from 0.000001 up; got -1.0"),
        ("value", float("nan"), "value must .*; got nothing"),
        ("value", None, "value must .*; got nothing"),
        ("value", float("inf"), "value must .*; got inf"),
        ("value", 1e-9, "value must .*; got 1e-09"),
        ("timestamp", None, "timestamp must be a date or time, or a whole number; got nothing"),
    ],
)
def test_invalid_rows(column: str, value: object, message: str) -> None:
    with pytest.raises(DataError, match=f"{message} at row 4 of the table"):
        read_exposures(broken(column, value))


def test_the_first_such_row_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = pl.concat([LOG, broken("click", 7, row=2), broken("click", 8, row=2)])
    wrong.write_parquet(tmp_path / "wrong.parquet", row_group_size=4)
    with pytest.raises(DataError, match=r"click must be 0 or 1; got 7 at row 9 of .*wrong.parquet"):
        read_exposures(tmp_path)
    wrong.write_csv(tmp_path / "wrong.csv")
    monkeypatch.setattr(exposures, "BATCH_ROWS", 4)
    with pytest.raises(DataError, match=r"click must be 0 or 1; got 7 at row 9 of .*wrong.csv"):
        read_exposures(tmp_path / "wrong.csv")


def test_a_number_that_is_no_date_among_dates_is_refused() -> None:
    log = pl.DataFrame({"user_id": [1, 1], "arm": ["A", "A"], "click": [1, 0], "day": [20200531, 20200199]})
    with pytest.raises(DataError, match=r"day must be a date, as others are \(20200531\); got 20200199 at row 2"):
        read_exposures(log)


@pytest.mark.parametrize(
    ("log", "columns", "error", "message"),
    [
        (LOG.drop("arm"), {}, DataError, "the table has no column 'arm'; name the one that plays this role"),
        (LOG, {"user_id": "who"}, DataError, r"the table has no column 'who' \(asked for as user_id\)"),
        (LOG, {"query_id": "item"}, ConfigError, "'query_id' is not a role that a column of an exposure log can play"),
        (LOG[:0], {}, DataError, "the table is empty; an exposure log needs at least one impression"),
        (LOG.with_columns(click=pl.lit([1])), {}, DataError, "'click' .* cannot play the role click"),
        (LOG.with_columns(arm=pl.lit(None)), {}, DataError, "must name the arm of some user; it names none"),
        ({"user_id": [1]}, {}, DataError, "an exposure log must be a path or a table"),
    ],
)
def test_invalid_logs(log: Any, columns: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_exposures(log, columns=columns)


def test_a_log_in_which_everybody_crossed_is_refused() -> None:
    log = pl.DataFrame({"user_id": [1, 1], "arm": ["A", "B"], "click": [1, 0]})
    with pytest.raises(DataError, match="must have users that were seen in one arm only; it has none"):
        analyse(read_exposures(log), control="A")


def test_files_must_agree_on_the_roles(tmp_path: Path) -> None:
    LOG.write_parquet(tmp_path / "a.parquet")
    LOG.drop("value").write_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"value is in some files of .* but not in others, as in .*b.parquet"):
        read_exposures(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    LOG.write_parquet(tmp_path / "log.parquet", compression="uncompressed")
    content = bytearray((tmp_path / "log.parquet").read_bytes())
    content[4:60] = b"\xff" * 56
    (tmp_path / "log.parquet").write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"log.parquet cannot be read"):
        read_exposures(tmp_path / "log.parquet")


def test_progress_is_in_bytes(tmp_path: Path) -> None:
    LOG.write_parquet(tmp_path / "a.parquet")
    LOG.write_parquet(tmp_path / "b.parquet")
    calls: list[tuple[str, float, float | None]] = []
    read_exposures(tmp_path, report=lambda step, done, total, note="": calls.append((step, done, total)))
    size = (tmp_path / "a.parquet").stat().st_size
    assert calls == [("read", size, 2 * size), ("read", 2 * size, 2 * size)]


# Assignment


def test_an_arm_is_the_same_on_every_machine() -> None:
    """These are fixed: a change of the hash would move users from arm to arm in the middle of a test."""
    found = assign_arms(pl.Series(["u1", "u2", "u3", "u4", "u5", "u6"]), {"A": 0.4, "B": 0.4}, salt="test 1")
    assert found.to_list() == ["B", "A", "A", None, "B", "A"]


@given(st.lists(st.text(max_size=20), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_the_arm_of_a_user_depends_on_nobody_else(ids: list[str], random: Random) -> None:
    shuffled = ids * 2
    random.shuffle(shuffled)
    alone = {each: assign_arms(pl.Series([each]), HALVES, salt="s").item() for each in ids}
    assert assign_arms(pl.Series(shuffled), HALVES, salt="s").to_list() == [alone[each] for each in shuffled]


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.text(min_size=1, max_size=10))
def test_shares_are_respected(parts: list[float], salt: str) -> None:
    whole = max(1.0, sum(parts) * (1 + 1e-12))
    shares = {f"arm {j}": part / whole for j, part in enumerate(parts)}
    found = assign_arms(USERS, shares, salt=salt)
    n = len(USERS)
    for arm, share in shares.items():
        assert abs((found == arm).sum() - n * share) <= 5 * sqrt(n * share * (1 - share)) + 1
    rest = 1 - sum(shares.values())
    assert abs(found.null_count() - n * rest) <= 5 * sqrt(n * max(rest, 0) * (1 - rest)) + 1


def test_tests_with_other_salts_are_independent() -> None:
    found = [assign_arms(USERS, HALVES, salt=salt) == "A" for salt in ("one", "two", "onf")]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        both = (found[a] & found[b]).sum()
        assert abs(both - 10_000) < 5 * sqrt(40_000 * 0.25 * 0.75)


def test_appended_arms_move_nobody() -> None:
    old = assign_arms(USERS, {"A": 0.1, "B": 0.1}, salt="s")
    new = assign_arms(USERS, {"A": 0.1, "B": 0.1, "C": 0.3}, salt="s")
    assert new.filter(old.is_not_null()).equals(old.drop_nulls())
    assert set(new.filter(old.is_null()).drop_nulls()) == {"C"}


def test_numbers_and_their_text_are_one_user() -> None:
    whole = assign_arms(USERS, HALVES, salt="s")
    assert assign_arms(USERS.cast(pl.String), HALVES, salt="s").equals(whole)
    assert assign_arms(USERS.cast(pl.Float64), HALVES, salt="s").equals(whole)  # what pandas makes of gaps


def test_shares_that_sum_to_one_leave_nobody_out() -> None:
    assert assign_arms(USERS, {str(j): 0.1 for j in range(10)}, salt="s").null_count() == 0


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({}, "shares must name at least one arm"),
        ({"A": 0.5, "B": 0.6}, r"must sum to at most 1; got 1\.1"),
        ({"A": 0.5, "B": 0.0}, "must be above 0 and at most 1; got 0.0 for 'B'"),
        ({"A": float("nan")}, "must be above 0 and at most 1; got nan for 'A'"),
    ],
)
def test_invalid_shares(shares: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_arms(USERS, shares, salt="s")


def test_missing_users_and_salts_are_refused() -> None:
    with pytest.raises(DataError, match="user_ids must not be missing; got nothing at row 2"):
        assign_arms(pl.Series(["a", None]), HALVES, salt="s")
    with pytest.raises(ConfigError, match="salt must name the test"):
        assign_arms(USERS, HALVES, salt="")
