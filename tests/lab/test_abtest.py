"""The live test while it runs: who is in which arm, which ranker serves whom, and what each was learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import urank.lab.live_test as module
from urank.abtest.exposures import assign_arms
from urank.errors import ConfigError
from urank.lab.appstore import (
    FIRST_DAY,
    by_chance,
    by_popularity,
    draw_requests,
    expected_downloads,
    production_ranker,
    ranked_by,
)
from urank.lab.live_test import CONTROL, TREATMENT, AbTestConfig, AbTestRun, simulate_abtest
from urank.lab.market import build_market

QUICK = {"training": {"epochs": 1, "batch_lists": 64}}
SETTINGS: dict[str, Any] = {
    "market": {"users": 1500, "visits": 0.5, "apps": 40, "candidates": 10, "positions": 6, "random_days": 1, "days": 2},
    "before": 2,
    "during": 5,
    "after": 1,
    "retrain": 3,
    "window": 2,
    "production": QUICK,
    "clicks": QUICK,
    "scorer": QUICK,
}


@dataclass
class Watched:
    """A run, and the logs from which rankers were learned, in order."""

    run: AbTestRun
    log: pl.DataFrame
    lessons: list[pl.DataFrame] = field(default_factory=list)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    lessons: list[pl.DataFrame] = []
    learn = module.learn

    def noted(log: pl.DataFrame, *rest: Any, **more: Any) -> Any:
        lessons.append(log)
        return learn(log, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "learn", noted)
        run = simulate_abtest(AbTestConfig.model_validate(SETTINGS), tmp_path_factory.mktemp("live") / "test")
    return Watched(run, pl.read_parquet(run.folder / "exposures.parquet"), lessons)


def test_arms_are_those_of_the_hash(watched: Watched) -> None:
    users = watched.log.unique("user_id").sort("user_id")
    shares = {CONTROL: 0.15, TREATMENT: 0.15}
    assert users["arm"].to_list() == assign_arms(users["user_id"], shares, salt="appstore-0").to_list()
    assert set(users["arm"]) == {CONTROL, TREATMENT}
    everybody = 1500 * 2 * 0.15
    assert 0.6 * everybody < users.height <= everybody + 4 * np.sqrt(everybody)  # not all of them come within 8 days


def test_a_user_stays_in_its_arm(watched: Watched) -> None:
    assert watched.log.group_by("user_id").agg(pl.col("arm").n_unique())["arm"].max() == 1
    assert watched.log.group_by("query_id").agg(pl.col("arm").n_unique())["arm"].max() == 1


def test_rankers_are_learned_at_the_launch_and_every_three_days(watched: Watched) -> None:
    assert [(each.day, each.arm) for each in watched.run.learned] == [
        (3, CONTROL),
        (3, TREATMENT),
        (6, CONTROL),
        (6, TREATMENT),
    ]
    assert [each.impressions for each in watched.run.learned] == [log.height for log in watched.lessons]


def test_each_arm_learns_from_its_own_log_of_the_days_before(watched: Watched) -> None:
    for each, lesson in zip(watched.run.learned, watched.lessons, strict=True):
        assert set(lesson["arm"]) == {each.arm}
        first, end = (FIRST_DAY + timedelta(days=day - 1) for day in (each.day - 2, each.day))
        own = watched.log.filter(pl.col("arm") == each.arm, pl.col("timestamp").is_between(first, end, closed="left"))
        assert lesson.sort(pl.all()).equals(own.sort(pl.all()))


def test_the_arms_differ_in_the_test_and_not_before_or_after(watched: Watched) -> None:
    truth = watched.run.truth
    assert truth["day"].to_list() == list(range(1, 9))
    served_alike = ((truth[CONTROL] == 1) & (truth[TREATMENT] == 1)).to_list()  # by the production ranker
    assert served_alike == [True, True, False, False, False, False, False, True]
    assert truth["lift"].to_list() == pytest.approx((truth[TREATMENT] / truth[CONTROL] - 1).to_list())


def test_what_is_told_as_true_is_what_comes(watched: Watched) -> None:
    """Downloads a visit of each arm, against what its ranker and the production ranker should bring."""
    market = build_market(AbTestConfig.model_validate(SETTINGS).market)
    truth = {row["day"]: row for row in watched.run.truth.to_dicts()}
    assigned = assign_arms(pl.Series(market.user_names), {CONTROL: 0.15, TREATMENT: 0.15}, salt="appstore-0")
    production = production_ranker(market, AbTestConfig.model_validate(SETTINGS).production)
    for arm in (CONTROL, TREATMENT):
        expected = 0.0
        for day in range(1, 9):
            requests = draw_requests(market, day, among=(assigned == arm).fill_null(False).to_numpy())
            base = expected_downloads(requests, ranked_by(production, "ctr1"))
            expected += truth[day][arm] * base * len(requests.user)
        found = watched.log.filter(pl.col("arm") == arm)["click"].sum()
        assert found == pytest.approx(expected, abs=4 * np.sqrt(expected))


def test_everything_shown_is_an_order_of_six(watched: Watched) -> None:
    places = watched.log.group_by("query_id").agg(pl.col("position").sort())["position"]
    assert (places == pl.Series([[1, 2, 3, 4, 5, 6]], dtype=pl.List(pl.Int32))).all()


def test_same_seed_same_log(watched: Watched, tmp_path: Path) -> None:
    again = simulate_abtest(AbTestConfig.model_validate(SETTINGS), tmp_path / "again")
    same = (again.folder / "exposures.parquet").read_bytes()
    assert same == (watched.run.folder / "exposures.parquet").read_bytes()


def test_only_some_can_come_and_see_what_they_would_have_seen() -> None:
    market = build_market(AbTestConfig.model_validate(SETTINGS).market)
    among = np.arange(1500) % 3 == 0
    everybody, some = draw_requests(market, 1), draw_requests(market, 1, among=among)
    kept = among[everybody.user]
    assert np.array_equal(some.user, everybody.user[kept])
    assert np.array_equal(some.app, everybody.app[kept])
    only = everybody.only(kept)
    assert expected_downloads(only, by_popularity()) > expected_downloads(only, by_chance)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"before": 30, "during": 40, "after": 30}, "before, during and after must be 62 days in all at most"),
        ({"share": 0.6}, "less than or equal to 0.5"),
        ({"retrain": 0}, "greater than or equal to 1"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AbTestConfig.model_validate(SETTINGS | settings)


def test_a_folder_that_holds_something_else_stays(tmp_path: Path) -> None:
    (tmp_path / "abtest.toml").write_text("mine = true\n", encoding="utf-8")
    with pytest.raises(ConfigError):
        simulate_abtest(AbTestConfig.model_validate(SETTINGS), tmp_path, overwrite=True)
    assert (tmp_path / "abtest.toml").read_text(encoding="utf-8") == "mine = true\n"
