"""Arms by a hash: stable, in the shares asked for, independent from test to test."""

from __future__ import annotations

from math import sqrt
from random import Random

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from urank.abtest.exposures import assign_arms
from urank.errors import ConfigError, DataError

HALVES = {"A": 0.5, "B": 0.5}
USERS = pl.Series(range(40_000))


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
def test_shares_that_are_none_are_refused(shares: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_arms(USERS, shares, salt="s")


def test_missing_users_and_salts_are_refused() -> None:
    with pytest.raises(DataError, match="user_ids must not be missing; got nothing at row 2"):
        assign_arms(pl.Series(["a", None]), HALVES, salt="s")
    with pytest.raises(ConfigError, match="salt must name the test"):
        assign_arms(USERS, HALVES, salt="")
