"""A whole analysis: every number from its parts, checks and warnings, sentences and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy import stats

from abtest.helpers import of, users
from benchmarks.ab_visits import impressions_of, simulate_visits
from urank.abtest.analysis import Analysis, analyse, covariates, sample_ratio, split_check
from urank.abtest.effects import bootstrap_lift, compare, effect, moments
from urank.abtest.exposures import Exposures, read_exposures
from urank.abtest.metrics import METRICS, by_user
from urank.errors import ConfigError, DataError
from urank.evaluation.intervals import holm

START = "2020-05-13"


@pytest.fixture(scope="module")
def visits() -> Exposures:
    return simulate_visits(4000, days=10, before=7, lift=0.2, rng=np.random.default_rng(0))


@pytest.fixture(scope="module")
def analysis(visits: Exposures) -> Analysis:
    return analyse(visits, control="A", start=START)


@pytest.fixture(scope="module")
def three(visits: Exposures) -> Exposures:
    """The users of B in two arms that do not differ from each other."""
    arm = np.where((visits.arm == 1) & (np.arange(visits.users) % 2 == 0), 2, visits.arm)
    return replace(visits, arms=("A", "B", "C"), arm=arm)


def test_totals_are_those_of_the_test_alone(visits: Exposures, analysis: Analysis) -> None:
    test = visits.between(7, 16)
    for index, arm in enumerate(analysis.arms):
        rows = visits.arm[test.user] == index
        assert arm.users == len(set(test.user[rows].tolist()))
        assert arm.impressions == test.impressions[rows].sum()
        assert arm.revenue == pytest.approx(test.revenue[rows].sum())  # type: ignore[index]
    assert [arm.name for arm in analysis.arms] == ["A", "B"]
    assert (analysis.start, analysis.end) == (START, "2020-05-22")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_effects_are_those_of_the_users_of_the_test(visits: Exposures, analysis: Analysis, metric: Any) -> None:
    columns = by_user(visits.between(7, 16), metric)
    seen = columns[:, 1] > 0
    arms = moments(columns[seen], visits.arm[seen], 2)
    found = analysis.result(metric.name)
    assert found.effect == effect(arms[0], arms[1])
    assert found.looks[-1].lift.value == pytest.approx(found.effect.lift.value)
    assert found.looks[-1].p_value == pytest.approx(found.effect.p_value)
    assert found.adjusted_p == found.effect.p_value


def test_cuped_takes_out_what_users_did_before(visits: Exposures, analysis: Analysis) -> None:
    metric = METRICS[1]
    columns, earlier = by_user(visits.between(7, 16), metric), by_user(visits.between(0, 6), metric)
    seen = columns[:, 1] > 0
    rate = earlier[:, 0].sum() / earlier[:, 1].sum()
    extra = np.stack([earlier[:, 0] - rate * earlier[:, 1], earlier[:, 1] > 0], axis=1)
    np.testing.assert_allclose(covariates(visits.between(0, 6), metric), extra)
    arms = moments(np.concatenate([columns, extra], axis=1)[seen], visits.arm[seen], 2)
    found = analysis.result("cvr").cuped
    assert found is not None
    assert found.effect == effect(arms[0], arms[1])
    plain = moments(columns[seen], visits.arm[seen], 2)
    errors = [compare(each[0], each[1], "log")[1] for each in (arms, plain)]
    assert found.variance_reduction == pytest.approx(1 - (errors[0] / errors[1]) ** 2)
    assert 0.1 < found.variance_reduction < 0.6
    assert found.seen_before == pytest.approx((earlier[seen, 1] > 0).mean())


def test_each_day_alone(visits: Exposures, analysis: Analysis) -> None:
    daily = analysis.result("ctr").daily
    assert [day.period for day in daily] == ["before"] * 7 + ["test"] * 10
    columns = by_user(visits.between(9, 9), METRICS[0])
    seen = columns[:, 1] > 0
    arms = moments(columns[seen], visits.arm[seen], 2)
    assert daily[9].effect == effect(arms[0], arms[1])
    assert daily[9].day == visits.days[9]


def test_days_after_the_end_are_shown_but_not_counted(visits: Exposures) -> None:
    found = analyse(visits, control="A", start=START, end=date(2020, 5, 20), splits=0)
    whole = analyse(visits.between(0, 14), control="A", start=START, splits=0)
    assert found.arms == whole.arms
    for one, other in zip(found.results, whole.results, strict=True):
        assert one.effect == other.effect
        assert one.looks == other.looks[:8]
    assert [day.period for day in found.results[0].daily][-2:] == ["after", "after"]


def test_without_a_time_before_there_is_no_cuped_and_no_warning(visits: Exposures) -> None:
    found = analyse(visits, control="A")
    assert all(result.cuped is None for result in found.results)
    assert found.warnings == []
    assert found.splits[0].users == found.arms[0].users  # the halves of the control


def test_the_splits_are_made_of_everyone_before_the_test(visits: Exposures, analysis: Analysis) -> None:
    assert analysis.splits[0].users == len(set(visits.between(0, 6).user.tolist()))
    assert [check.metric for check in analysis.splits] == ["ctr", "cvr", "revenue"]
    assert all(check.sound for check in analysis.splits)
    assert analyse(visits, control="A", splits=0).splits == []


def test_the_bootstrap_changes_the_ends_only(visits: Exposures, analysis: Analysis) -> None:
    found = analyse(visits, control="A", start=START, interval="bootstrap", splits=0, seed=3)
    columns = by_user(visits.between(7, 16), METRICS[0])
    arms = [columns[(visits.arm == arm) & (columns[:, 1] > 0)] for arm in (0, 1)]
    low, high = bootstrap_lift(*arms, rng=np.random.default_rng([3, 1]))
    one, other = found.result("ctr").effect, analysis.result("ctr").effect
    assert one.lift == replace(other.lift, low=low, high=high)
    assert one.p_value == other.p_value


def test_several_treatments_are_corrected_for(three: Exposures) -> None:
    found = analyse(three, control="A", splits=0)
    assert found.treatments == ["B", "C"]
    for metric in METRICS:
        results = [found.result(metric.name, arm) for arm in "BC"]
        expected = holm([result.effect.p_value for result in results])
        np.testing.assert_allclose([result.adjusted_p for result in results], expected)
    assert "corrected for several treatments" in found.results[0].sentence


def test_treatments_can_be_chosen(three: Exposures) -> None:
    found = analyse(three, control="C", treatment="B", splits=0)
    assert [arm.name for arm in found.arms] == ["C", "B"]
    assert len(found.results) == 3
    both = analyse(three, control="A", treatment=["C", "B"], splits=0)
    assert both.treatments == ["C", "B"]
    back = analyse(three, control="B", treatment="C", splits=0).result("ctr")
    np.testing.assert_allclose(1 + back.effect.lift.value, 1 / (1 + found.result("ctr").effect.lift.value))
    with pytest.raises(KeyError, match="metric 'ctr' and treatment 'A'"):
        found.result("ctr", "A")


def test_a_log_of_impressions_says_the_same(visits: Exposures, analysis: Analysis) -> None:
    read = read_exposures(impressions_of(visits, np.random.default_rng(1)))
    found = analyse(read, control="A", start=START)
    assert found.arms[0].impressions == analysis.arms[0].impressions
    for one, other in zip(found.results, analysis.results, strict=True):
        assert one.effect.lift.value == pytest.approx(other.effect.lift.value)
        assert one.effect.lift.low == pytest.approx(other.effect.lift.low)


def test_a_log_without_time_has_one_look_and_one_day() -> None:
    rng = np.random.default_rng(2)
    log = pl.DataFrame({"user_id": range(400), "arm": ["A", "B"] * 200, "click": rng.integers(2, size=400)})
    found = analyse(read_exposures(log), control="A")
    assert len(found.result("ctr").looks) == len(found.result("ctr").daily) == 1
    assert "always-valid" not in found.result("ctr").sentence


# Warnings


def test_arms_of_the_wrong_size_give_a_warning(visits: Exposures) -> None:
    kept = visits.where((visits.arm[visits.user] == 0) | (visits.user % 4 != 0))
    found = analyse(kept, control="A", splits=0)
    assert not found.sample_ratio.sound
    assert "as many users as they should" in found.warnings[0]
    assert analyse(kept, control="A", shares={"A": 4, "B": 3}, splits=0).warnings == []


def test_crossed_and_few_users_give_a_warning(visits: Exposures) -> None:
    few = replace(visits.where(visits.user < 90), crossed=30)
    found = analyse(few, control="A", end=visits.days[0], splits=0)
    warnings = "\n".join(found.warnings)
    share = 100 * 30 / (30 + visits.users)
    assert f"30 users ({share:.2f} %) were seen in two arms" in warnings
    assert "too few for intervals of clicks per impression" in warnings
    assert found.results[0].looks == []


def test_halves_of_too_few_users_or_of_a_constant_say_nothing(visits: Exposures) -> None:
    assert analyse(visits.where(visits.user < 300), control="A", start=visits.days[1]).splits == []
    log = pl.DataFrame({"user_id": range(600), "arm": ["A", "B"] * 300, "click": 1})
    found = analyse(read_exposures(log), control="A")
    assert (found.splits, found.warnings) == ([], [])


def test_p_values_that_are_off_give_a_warning() -> None:
    rows = [(user, "AB"[user % 2], int(user % 3 > 0 or user < 8), 1000.0 if user < 8 else 1e-3) for user in range(800)]
    log = pl.DataFrame(rows, schema=["user_id", "arm", "click", "value"], orient="row")
    found = analyse(read_exposures(log), control="A")
    [warnings] = [warning for warning in found.warnings if "random splits" in warning]
    assert "differed in revenue per user at p < 0.05" in warnings


# Sentences


def test_sentences_lead_with_the_lift_and_end_with_the_caveats(visits: Exposures, analysis: Analysis) -> None:
    found = analysis.result("ctr")
    lift = found.effect.lift
    assert found.differs
    assert found.sentence.startswith(
        f"B earned {100 * lift.value:.1f} % more clicks per impression than A "
        f"(95 % interval {100 * lift.low:.1f} % to {100 * lift.high:.1f} %, p = "
    )
    assert found.decided in visits.days
    assert f"the end of {found.decided} on: always-valid interval" in found.sentence
    assert "less variance" in found.sentence
    back = analyse(visits, control="B", splits=0).result("ctr")
    assert "% fewer clicks per impression than B" in back.sentence
    assert str(analysis).count("\n") == 2


def test_sentences_without_a_decision(visits: Exposures) -> None:
    alike = analyse(visits.between(0, 6), control="A", splits=0).result("ctr")
    assert alike.sentence.startswith("B and A cannot be told apart: B earned")
    assert alike.decided is None
    silent = replace(visits, clicks=np.where(visits.arm[visits.user] == 0, 0.0, visits.clicks))
    assert analyse(silent, control="A", splits=0).result("ctr").sentence.startswith("There is no lift in clicks")


def test_a_decision_holds_even_if_the_last_interval_contains_0_again(analysis: Analysis) -> None:
    found = analysis.result("ctr")
    assert found.decided is not None
    assert found.looks[-1].always_p < found.alpha
    back = replace(found, looks=[*found.looks[:-1], replace(found.looks[-1], always_low=-0.5)])
    assert (back.decided, back.sentence) == (found.decided, found.sentence)


# Arms are those of the test


def launched(visits: Exposures) -> pl.DataFrame:
    """A log in which everybody is in B after the test, and nobody has an arm before it."""
    log = impressions_of(visits, np.random.default_rng(1))
    day = pl.col("timestamp").dt.date()
    arm = pl.when(day > date(2020, 5, 18)).then(pl.lit("B")).when(day >= date.fromisoformat(START)).then("arm")
    return log.with_columns(arm=arm)


def test_what_users_were_shown_after_the_test_does_not_decide_who_is_in_it(visits: Exposures) -> None:
    log = launched(visits)
    read = read_exposures(log)
    assert read.crossed > 500
    until = log.filter(pl.col("timestamp").dt.date() <= date(2020, 5, 18))
    found = analyse(read, control="A", start=START, end="2020-05-18", splits=20)
    alone = analyse(read_exposures(until), control="A", start=START, splits=20)
    assert (found.crossed, alone.crossed) == (0, 0)
    assert found.arms == alone.arms
    for one, other in zip(found.results, alone.results, strict=True):
        assert (one.effect, one.cuped, one.looks) == (other.effect, other.cuped, other.looks)
        assert [day for day in one.daily if day.period != "after"] == other.daily
    assert found.splits == alone.splits
    assert [day.day for day in found.results[0].daily][-1] == visits.days[-1]
    everybody = analyse(
        read_exposures(log.with_columns(pl.col("arm").fill_null("B"))),
        control="A",
        start=START,
        end="2020-05-18",
        splits=0,
    )
    assert everybody.arms == found.arms


def test_who_was_in_two_arms_in_the_test_is_left_out(visits: Exposures) -> None:
    read = read_exposures(launched(visits))
    found = analyse(read, control="A", start="2020-05-18", end="2020-05-19", splits=0)
    assert 0 < found.crossed < read.crossed
    assert any("were seen in two arms" in warning for warning in found.warnings)


def test_an_arm_that_is_not_in_the_test_is_no_treatment(visits: Exposures) -> None:
    log = launched(visits).with_columns(
        arm=pl.when(pl.col("timestamp").dt.date() > date(2020, 5, 18)).then(pl.lit("everyone")).otherwise("arm")
    )
    assert analyse(read_exposures(log), control="A", start=START, end="2020-05-18", splits=0).treatments == ["B"]


def test_json_holds_everything(analysis: Analysis) -> None:
    content = json.loads(json.dumps(analysis.to_dict(), allow_nan=False))
    assert content["results"][0]["metric"]["name"] == "ctr"
    assert content["results"][0]["sentence"] == analysis.results[0].sentence
    assert content["sample_ratio"]["sound"] is True
    assert len(content["results"][0]["looks"]) == 10
    assert content["splits"][0]["sound"] is True


def test_progress_is_in_metrics(visits: Exposures) -> None:
    calls: list[tuple[float, float | None]] = []
    analyse(visits, control="A", splits=0, report=lambda step, done, total, note="": calls.append((done, total)))
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_the_same_seed_gives_the_same(visits: Exposures, analysis: Analysis) -> None:
    assert analyse(visits, control="A", start=START).to_dict() == analysis.to_dict()


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"control": "X"}, "control must be an arm of the simulated visits, A, B; got 'X'"),
        ({"treatment": "X"}, "treatment must be an arm of the simulated visits, A, B; got 'X'"),
        ({"treatment": "A"}, "treatment must be another arm than the control 'A'; got A"),
        ({"treatment": []}, "treatment must be another arm than the control 'A'; got none"),
        ({"start": "2021-01-01"}, "start must be a day of .*, from '2020-05-06' to '2020-05-22'; got '2021-01-01'"),
        ({"start": "2020-05-20", "end": "2020-05-10"}, "start must not be after end; got 2020-05-20 and 2020-05-10"),
        ({"alpha": 2.0}, "alpha must be between 0 and 1; got 2.0"),
        ({"interval": "exact"}, "interval must be delta or bootstrap; got 'exact'"),
        ({"expected_lift": float("inf")}, "expected_lift must be from 1e-12 to 1,000 in size; got inf"),
        ({"expected_lift": 0.0}, "expected_lift must be above −1 and not 0; got 0.0"),
        ({"splits": -1}, "splits must be a whole number from 0 up; got -1"),
        ({"shares": {"A": 1.0}}, "shares must give each arm a share above 0; got 0 for 'B'"),
    ],
)
def test_invalid_arguments(visits: Exposures, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        analyse(visits, **({"control": "A"} | settings))


def test_an_arm_without_users_is_refused(visits: Exposures) -> None:
    empty = replace(visits, arms=("A", "B", "C"))
    with pytest.raises(DataError, match="arm 'C' of the simulated visits must have users in the test; it has none"):
        analyse(empty, control="A")


# Validity checks


@pytest.mark.parametrize("shares", [None, {"A": 1, "B": 1, "C": 2}])
def test_the_sample_ratio_is_tested_as_by_scipy(shares: dict[str, float] | None) -> None:
    found = sample_ratio({"A": 1000, "B": 1090, "C": 2010}, shares)
    expected = np.array([1, 1, 1]) / 3 if shares is None else np.array([1, 1, 2]) / 4
    test = stats.chisquare([1000, 1090, 2010], expected * 4100)
    np.testing.assert_allclose([found.chi_square, found.p_value], [test.statistic, test.pvalue])
    assert found.sound == (shares is not None)


def test_arms_of_the_wrong_size_are_suspicious() -> None:
    assert sample_ratio({"A": 5160, "B": 4840}).p_value > 0.001
    assert not sample_ratio({"A": 5170, "B": 4830}).sound
    assert sample_ratio({"A": 5170, "B": 4830}, {"A": 0.52, "B": 0.48}).sound


@pytest.mark.parametrize("n", [2000, 25_000])
def test_halves_of_ordinary_users_differ_as_often_as_they_should(n: int) -> None:
    """Also in blocks of users, above 10,000 of them."""
    found = split_check(users(np.random.default_rng(0), n), metric="ctr", rng=0)
    assert found.sound
    assert (found.users, found.splits, found.metric) == (n, 1000, "ctr")
    interval = stats.binomtest(round(found.share * 1000), 1000).proportion_ci(0.99, method="exact")
    np.testing.assert_allclose([found.low, found.high], [interval.low, interval.high])


def test_halves_are_tested_as_arms_are() -> None:
    """The same halves, one by one."""
    columns = users(np.random.default_rng(1), 150)
    rng = np.random.default_rng(7)
    drawn = rng.integers(2, size=(100, 150), dtype=np.int8).astype(bool)
    called = [effect(of(columns[~half]), of(columns[half])).p_value < 0.2 for half in drawn]
    assert split_check(columns, metric="ctr", rng=7, alpha=0.2, splits=100).share == np.mean(called)


def test_a_few_users_that_earn_all_put_p_values_off() -> None:
    columns = np.stack([np.full(400, 1e-3), np.ones(400)], axis=1)
    columns[:4, 0] = 1000.0
    found = split_check(columns, metric="revenue", rng=0)
    assert not found.sound
