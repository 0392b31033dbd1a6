"""A simulated live test: the arms, their rankers, and the analysis beside the truth."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import urank.lab.live_test as module
from benchmarks.ab_visits import impressions_of, simulate_visits
from urank.abtest.analysis import analyse
from urank.abtest.exposures import assign_arms, read_exposures
from urank.lab.appstore import (
    FIRST_DAY,
    by_chance,
    by_popularity,
    draw_requests,
    expected_downloads,
    production_ranker,
    ranked_by,
)
from urank.lab.experiment import AbTestConfig
from urank.lab.live_test import (
    CONTROL,
    TREATMENT,
    AbTestRun,
    JudgedTest,
    Learned,
    day_name,
    judge_abtest,
    simulate_abtest,
)
from urank.lab.market import build_market

QUICK = {"training": {"epochs": 1, "batch_lists": 64}}
SETTINGS: dict[str, Any] = {
    "market": {
        "users": 1500,
        "visits": 0.5,
        "apps": 40,
        "candidates": 10,
        "positions": 6,
        "random_days": 1,
        "log_days": 2,
    },
    "before": 2,
    "during": 5,
    "after": 1,
    "retrain": 3,
    "train_days": 2,
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
        ({"arm_share": 0.6}, "less than or equal to 0.5"),
        ({"retrain": 0}, "greater than or equal to 1"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AbTestConfig.model_validate(SETTINGS | settings)


BEFORE, DURING, AFTER = 3, 4, 2
LIFTS = [0.0] * BEFORE + [0.2, 0.3, 0.4, 0.5] + [0.0] * AFTER
CONTROLS = [1.0] * BEFORE + [0.8, 1.0, 1.0, 1.2] + [1.0] * AFTER


def run_in(folder: Path, after: int = AFTER) -> AbTestRun:
    """A test whose users click 40 % more from the launch on, as if nothing was taken back after it."""
    days = {"before": BEFORE, "during": DURING, "after": after}
    visits = simulate_visits(6000, days=DURING + after, before=BEFORE, lift=0.4, rng=np.random.default_rng(0))
    arms = pl.col("arm").replace({"A": CONTROL, "B": TREATMENT})
    log = impressions_of(visits, np.random.default_rng(1)).with_columns(arms)
    log.write_parquet(folder / "exposures.parquet")
    number = range(1, BEFORE + DURING + after + 1)
    truth = pl.DataFrame({"day": number, CONTROL: CONTROLS[: len(number)], "lift": LIFTS[: len(number)]})
    truth = truth.with_columns((pl.col(CONTROL) * (1 + pl.col("lift"))).alias(TREATMENT))
    learned = [Learned(4, TREATMENT, "network on monotone", 1234, 5.6)]
    return AbTestRun(folder, AbTestConfig.model_validate(days), learned, truth)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> JudgedTest:
    return judge_abtest(run_in(tmp_path_factory.mktemp("judged")), splits=50)


def test_days_are_those_of_the_log() -> None:
    assert [day_name(day) for day in (1, 24)] == ["2020-05-06", "2020-05-29"]  # as the paper's test


def test_the_ab_test_has_the_first_aa_test_before_it(judged: JudgedTest) -> None:
    log = read_exposures(judged.run.folder / "exposures.parquet")
    found = analyse(log, control=CONTROL, start=day_name(4), end=day_name(7), splits=50)
    for metric in ("ctr", "cvr", "revenue"):
        assert judged.ab.result(metric) == found.result(metric)
        assert judged.ab.result(metric).cuped is not None


@pytest.mark.parametrize(("part", "first", "last"), [("aa_before", 1, 3), ("aa_after", 8, 9)])
def test_aa_tests_are_alone(judged: JudgedTest, part: str, first: int, last: int) -> None:
    log = pl.read_parquet(judged.run.folder / "exposures.parquet")
    ends = [date.fromisoformat(day_name(day)) for day in (first, last)]
    alone = analyse(read_exposures(log.filter(pl.col("timestamp").dt.date().is_between(*ends))), control=CONTROL)
    found = getattr(judged, part)
    for metric in ("ctr", "cvr", "revenue"):
        assert found.result(metric).effect == alone.result(metric).effect
        assert found.result(metric).looks == alone.result(metric).looks
        assert found.result(metric).cuped is None


def test_a_true_lift_is_of_sums_over_days(judged: JudgedTest) -> None:
    assert judged.true_lift == pytest.approx((0.8 * 0.2 + 1.0 * 0.3 + 1.0 * 0.4 + 1.2 * 0.5) / 4)
    assert judged.true_lifts["2020-05-10"] == 0.3
    by_period = {(each.period, each.metric.name): each for each in judged.verdicts}
    assert list(by_period) == [(p, m) for p in ("A/A before", "A/B", "A/A after") for m in ("ctr", "cvr")]
    assert by_period["A/A after", "ctr"].true_lift == 0


def test_verdicts(judged: JudgedTest) -> None:
    for each in judged.verdicts:
        lift = each.effect.lift
        assert each.holds_zero == (lift.low <= 0 <= lift.high)
        assert each.holds_truth == (lift.low <= each.true_lift <= lift.high)
    found = {(each.period, each.metric.name): each.holds_zero for each in judged.verdicts}
    assert found["A/A before", "ctr"]
    assert not found["A/B", "ctr"]
    assert not found["A/A after", "ctr"]  # here the treatment was not taken back


def test_words_and_json(judged: JudgedTest) -> None:
    assert "The true lift was 36.5 %" in judged.sentence
    told = json.loads(json.dumps(judged.to_dict(), allow_nan=False))
    assert told["learned"] == [
        {"day": 4, "arm": TREATMENT, "model": "network on monotone", "impressions": 1234, "seconds": 5.6}
    ]
    assert [each["holds_zero"] for each in told["verdicts"]] == [each.holds_zero for each in judged.verdicts]
    assert told["aa_after"]["start"] == day_name(8)


def test_without_a_second_aa_test(tmp_path: Path) -> None:
    judged = judge_abtest(run_in(tmp_path, after=0), splits=0)
    assert judged.aa_after is judged.to_dict()["aa_after"] is None
    assert {each.period for each in judged.verdicts} == {"A/A before", "A/B"}
