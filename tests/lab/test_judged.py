"""A simulated live test, judged: each part against an analysis of its days alone, the truth against arithmetic."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.ab_visits import impressions_of, simulate_visits
from urank.abtest.analysis import analyse
from urank.abtest.exposures import read_exposures
from urank.lab.live_test import CONTROL, TREATMENT, AbTestConfig, AbTestRun, JudgedTest, Learned, day_name, judge_abtest

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
    assert (
        judged.sentence
        == f"{judged.ab.result('ctr').sentence} The true lift was 36.5 %, which the 95 % interval holds."
    )
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
