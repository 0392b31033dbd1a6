"""The report of an A/B test: every figure by arithmetic, the terminal and the pages."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from io import StringIO
from math import nan
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from pages import Page
from urank.abtest.always_valid import Look
from urank.abtest.analysis import Analysis, ArmTotals, Cuped, DayEffect, Result, SampleRatio, SplitCheck, analyse
from urank.abtest.effects import Effect, Estimate
from urank.abtest.metrics import METRICS
from urank.lab.live_test import CONTROL, TREATMENT, AbTestConfig, AbTestRun, JudgedTest, Learned
from urank.lab.live_test_report import print_judged, write_judged
from urank.lab.visits import simulate_visits
from urank.report.abtest_report import (
    arm_table,
    check_table,
    days_plot,
    how_it_is_made,
    learned_table,
    lift_plot,
    looks_plot,
    outcome,
    print_analysis,
    result_table,
    verdict_table,
    when_it_was_safe,
    write_analysis,
)
from urank.report.style import svg

DAYS = ["2020-05-06", "2020-05-07", "2020-05-08", "2020-05-09"]


def effect(lift: float, half: float, rate: float = 0.05, p_value: float = 0.002) -> Effect:
    """A lift with an interval of so much to either side."""
    around = Estimate(lift, half / 1.96, lift - half, lift + half)
    return Effect(rate, rate * (1 + lift), 5000, 5100, replace(around, value=rate * lift), around, p_value)


def look(day: str, lift: float, half: float) -> Look:
    return Look(day, 5000, 5100, effect(lift, half).lift, lift - 2 * half, lift + 2 * half, 0.002, 0.04)


def result(metric: int, lift: float, rate: float, treatment: str = "B") -> Result:
    """A test of three days, the first day of the log before it."""
    daily = [DayEffect(day, "test" if n else "before", effect(lift * (n > 0), 0.1)) for n, day in enumerate(DAYS)]
    return Result(
        metric=METRICS[metric],
        control="A",
        treatment=treatment,
        alpha=0.05,
        effect=effect(lift, 0.04, rate),
        adjusted_p=0.002,
        cuped=Cuped(effect(lift - 0.01, 0.03, rate), 1 - (0.03 / 0.04) ** 2, 0.62),
        looks=[look(day, lift, half) for day, half in zip(DAYS[1:], (0.12, 0.06, 0.04), strict=True)],
        daily=daily,
    )


@pytest.fixture
def found() -> Analysis:
    return Analysis(
        name="exposures.parquet",
        control="A",
        treatments=["B"],
        days=DAYS,
        start=DAYS[1],
        end=DAYS[3],
        alpha=0.05,
        interval="delta",
        expected_lift=0.05,
        arms=[ArmTotals("A", 5000, 100_000, 5000, 2000, 1234.5), ArmTotals("B", 5100, 102_000, 5610, 2200, 1400.0)],
        results=[result(0, 0.1, 0.05), result(1, 0.1, 0.4)],
        sample_ratio=SampleRatio({"A": 5000, "B": 5100}, {"A": 5050, "B": 5050}, 0.99, 0.32),
        splits=[SplitCheck("ctr", 6000, 1000, 0.048, 0.03, 0.07, 0.05)],
        crossed=0,
        unassigned=0,
        warnings=[],
    )


@pytest.fixture
def judged(found: Analysis, tmp_path: Path) -> JudgedTest:
    """The same as a simulated test, whose A/A tests are before and after it."""
    alone = replace(found, start=DAYS[0], end=DAYS[0], results=[replace(result(0, 0.02, 0.05), cuped=None)])
    truth = pl.DataFrame({"day": [1, 2, 3, 4], "lift": [0.0, 0.1, 0.12, 0.14]})
    truth = truth.with_columns(pl.lit(1.0).alias(CONTROL), (1 + pl.col("lift")).alias(TREATMENT))
    learned = [Learned(2, "B", "network on monotone", 12_345, 6.78)]
    return JudgedTest(AbTestRun(tmp_path, AbTestConfig(), learned, truth), found, alone, None)


def shown(found: Analysis, width: int = 140) -> str:
    out = StringIO()
    print_analysis(found, Console(file=out, width=width))
    return " ".join(out.getvalue().split())


def drawn(figure: Figure) -> str:
    """What a figure says, without its styles."""
    return re.sub(r"<style.*?</style>", "", svg(figure), flags=re.DOTALL)


def read(page: Path) -> tuple[Page, str]:
    parsed = Page()
    parsed.feed(page.read_text())
    assert all(source.startswith("data:") for source in parsed.fetched)
    return parsed, unescape(page.read_text())


def test_the_arms(found: Analysis) -> None:
    table = arm_table(found)
    assert table.head == ("arm", "users", "impressions", "clicks", "conversions", "revenue")
    assert table.rows[1] == ("B", "5,100", "102,000", "5,610", "2,200", "1,400.00")
    poor = replace(found, arms=[replace(arm, revenue=None) for arm in found.arms])
    assert "revenue" not in arm_table(poor).head


def test_the_results_by_arithmetic(found: Analysis) -> None:
    table = result_table(found)
    assert [dict(zip(table.head, row, strict=True)) for row in table.rows] == [
        {
            "metric": "clicks per impression",
            "control": "5.000 %",
            "treatment": f"{100 * 0.05 * 1.1:.3f} %",
            "lift": "+10.0 %",
            "95 % interval": f"+{100 * (0.1 - 0.04):.1f} to +{100 * (0.1 + 0.04):.1f} %",
            "p": "0.002",
            "always valid": f"+{100 * (0.1 - 0.08):.1f} to +{100 * (0.1 + 0.08):.1f} %",
            "CUPED": f"+9.0 % (+{100 * (0.09 - 0.03):.1f} to +{100 * (0.09 + 0.03):.1f} %)",
        },
        {**dict(zip(table.head, table.rows[0], strict=True)), "metric": "conversions per user"}
        | {"control": "0.400", "treatment": f"{0.4 * 1.1:.3f}"},
    ]


def test_what_is_not_known_has_no_column_or_a_dash(found: Analysis) -> None:
    bare = [replace(each, cuped=None, looks=[]) for each in found.results]
    table = result_table(replace(found, results=bare, alpha=0.1))
    assert table.head[-1] == "always valid"
    assert table.rows[0][-1] == "–"
    assert "90 % interval" in table.head


def test_several_treatments(found: Analysis, tmp_path: Path) -> None:
    other = replace(result(0, -0.02, 0.05, "C"), adjusted_p=0.2)
    three = replace(found, treatments=["B", "C"], results=[*found.results, other])
    table = result_table(three)
    assert [row[1] for row in table.rows] == ["B", "B", "C"]
    assert "p, corrected" in table.head
    assert shown(three).endswith(" ".join(other.sentence.split()))
    write_analysis(three, tmp_path / "page.html")
    assert "Holm" in (tmp_path / "page.html").read_text()


def test_the_checks(found: Analysis) -> None:
    assert check_table(found).rows == [
        ("sample ratio", "A 5,000 users (5,050 expected), B 5,100 users (5,050 expected), p = 0.32", "sound"),
        ("crossed users", "nobody was seen in two arms", "sound"),
        (
            "A/A splits",
            "of 1,000 random halves of all users before the test, so many had p < 0.05: 4.8 % in ctr",
            "sound",
        ),
    ]
    ratio = replace(found.sample_ratio, p_value=1e-5)
    split = replace(found.splits[0], share=0.09, low=0.07, high=0.12)
    bare = [replace(each, cuped=None) for each in found.results]
    odd = replace(found, sample_ratio=ratio, crossed=7, splits=[split], results=bare)
    assert [row[2] for row in check_table(odd).rows] == ["beware"] * 3
    assert "7 were seen in two arms" in check_table(odd).rows[1][1]
    assert "random halves of A, so many" in check_table(odd).rows[2][1]
    assert len(check_table(replace(found, splits=[])).rows) == 2


def test_the_terminal_ends_with_the_sentence_that_counts(found: Analysis) -> None:
    text = shown(replace(found, warnings=["Users got lost."]))
    assert text.endswith(" ".join(found.result("ctr").sentence.split()))
    assert "sound sample ratio: A 5,000 users" in text
    assert "beware Users got lost." in text
    assert "CUPED" not in shown(found, 80)


def test_outcomes(found: Analysis) -> None:
    more = found.results[0]
    assert outcome(more) == 1
    assert outcome(result(0, -0.1, 0.05)) == -1
    assert outcome(replace(more, adjusted_p=0.5)) == 0
    assert outcome(replace(more, adjusted_p=nan)) == 0
    assert "from the end of 2020-05-09 on it was safe" in when_it_was_safe(more)  # 0.1 − 2 · 0.04 is above 0
    assert "never left out 0" in when_it_was_safe(replace(more, looks=more.looks[:2]))


def test_how_it_is_made(found: Analysis) -> None:
    said = " ".join(how_it_is_made(found))
    for words in ("Users are the sample", "delta method", "43.8 % of the variance", "62.0 % of the users", "5.0 %"):
        assert words in said
    bare = [replace(each, cuped=None, looks=[]) for each in found.results]
    less = " ".join(how_it_is_made(replace(found, results=bare, splits=[], interval="bootstrap")))
    assert "Poisson bootstrap" in less
    for words in ("CUPED", "always-valid", "A/A splits"):
        assert words not in less


def test_the_page(found: Analysis, tmp_path: Path) -> None:
    write_analysis(replace(found, warnings=["Users got <lost>."]), tmp_path / "page.html")
    parsed, said = read(tmp_path / "page.html")
    assert parsed.tags.count("svg") == 3
    assert found.result("ctr").sentence in said
    titles = ["Arms", "Lift", "Day by day", "If you had looked every day", "Checks", "Beware", "How these numbers"]
    places = [said.index(f"<h2>{title}") for title in titles]
    assert places == sorted(places)
    assert "A/B test: B against A" in said
    assert "&lt;lost&gt;" in (tmp_path / "page.html").read_text()
    assert "truth" not in drawn(days_plot(found, "B")) + drawn(lift_plot(found.results))


def test_a_log_without_days(found: Analysis, tmp_path: Path) -> None:
    results = [replace(each, looks=each.looks[:1], daily=[], cuped=None) for each in found.results]
    write_analysis(replace(found, days=[""], start="", end="", results=results), tmp_path / "page.html")
    _, said = read(tmp_path / "page.html")
    assert "Day by day" not in said
    assert "If you had looked" not in said


def test_figures_of_what_has_no_interval(found: Analysis) -> None:
    none = Estimate(nan, nan, nan, nan)
    results = [
        replace(
            each,
            effect=replace(each.effect, lift=none),
            daily=[replace(day, effect=replace(day.effect, lift=none)) for day in each.daily],
        )
        for each in found.results
    ]
    odd = replace(found, results=results)
    for figure in (lift_plot(results), days_plot(odd, "B"), looks_plot(odd, "B")):
        assert "nan" not in drawn(figure)


def test_figures_tell_days_and_parts(found: Analysis) -> None:
    words = drawn(days_plot(found, "B", truth=dict.fromkeys(DAYS, 0.1), periods={"before": "A/A", "test": "A/B"}))
    for word in ("2020-05-06", ">A/A<", ">A/B<", "truth", "conversions per user"):
        assert word in words
    for word in ("always valid", "looked at once", "safe"):
        assert word in drawn(looks_plot(found, "B"))
    for word in ("once, CUPED", "always valid", "revenue per user"):
        assert word in drawn(lift_plot([*found.results, result(2, 0.1, 3.0)]))


def test_pages_of_real_numbers(tmp_path: Path) -> None:
    visits = simulate_visits(800, days=5, before=3, lift=0.3, rng=np.random.default_rng(0))
    few = analyse(visits, control="A", start=visits.days[3], end=visits.days[6], splits=20)
    write_analysis(few, tmp_path / "page.html")
    parsed, said = read(tmp_path / "page.html")
    assert parsed.tags.count("svg") == 3
    assert "nan" not in said.split("</style>")[1]
    write_analysis(analyse(visits, control="A", expected_lift=1e-9, splits=0), tmp_path / "page.html")
    nothing = replace(visits, clicks=0 * visits.clicks, conversions=0 * visits.clicks, revenue=None)
    write_analysis(analyse(nothing, control="A", splits=20), tmp_path / "page.html")
    _, said = read(tmp_path / "page.html")
    assert "There is no lift" in said
    assert "Beware" in said


# A simulated test


def test_what_a_simulated_test_came_to(judged: JudgedTest, tmp_path: Path) -> None:
    table = verdict_table(judged)
    assert [dict(zip(table.head, row, strict=True)) for row in table.rows[:2]] == [
        {
            "test": "A/A before",
            "metric": "CTR",
            "lift": "+2.0 %",
            "95 % interval": f"−{100 * (0.04 - 0.02):.1f} to +{100 * (0.02 + 0.04):.1f} %",
            "0 inside": "yes",
            "true lift": "0 %",
            "truth inside": "yes",
            "days": "2020-05-06 – 2020-05-06",
        },
        {
            "test": "A/B",
            "metric": "CTR",
            "lift": "+10.0 %",
            "95 % interval": "+6.0 to +14.0 %",
            "0 inside": "no",
            "true lift": f"+{100 * (0.1 + 0.12 + 0.14) / 3:.1f} %",
            "truth inside": "yes",
            "days": "2020-05-07 – 2020-05-09",
        },
    ]
    assert learned_table(judged).rows == [("B", "2", "network on monotone", "12,345", "6.8")]
    out = StringIO()
    print_judged(replace(judged, ab=replace(judged.ab, warnings=["Users got lost."])), Console(file=out, width=140))
    said = " ".join(out.getvalue().split())
    assert said.endswith("The true lift was 12.0 %, which the 95 % interval contains.")
    assert "beware Users got lost." in said
    write_judged(judged, tmp_path / "page.html")
    parsed, said = read(tmp_path / "page.html")
    assert parsed.tags.count("svg") == 3
    for words in ("A/A, A/B<", "19.2 %", "Diamonds are the true lifts", "Rankers", "network on monotone"):
        assert words in said


def test_tables_need_neither_torch_nor_matplotlib() -> None:
    script = (
        "import sys, urank.report.abtest_report, urank.report.abtest_report, urank.lab.live_test_report; "
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
