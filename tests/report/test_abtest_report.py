"""The reports of A/B tests: figures by arithmetic, the terminal and the pages."""

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
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.ab_visits import simulate_visits
from pages import Page
from report.analyses import DAYS, analysis, result
from urank.abtest.analysis import Analysis, analyse
from urank.abtest.effects import Estimate
from urank.abtest.planning import plan
from urank.report.abtest_report import (
    check_table,
    days_plot,
    lift_plot,
    looks_plot,
    methods,
    outcome,
    plan_plot,
    plan_table,
    print_analysis,
    print_plans,
    result_table,
    write_analysis,
    write_plans,
)
from urank.report.style import svg


@pytest.fixture
def found() -> Analysis:
    return analysis()


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
    rows = check_table(found).rows
    assert [row[2] for row in rows] == ["sound"] * 3
    assert "B 5,100 users (5,050 expected), p = 0.32" in rows[0][1]
    assert "1,000 random halves of all users before the test: 4.8 % in ctr" in rows[2][1]
    ratio = replace(found.sample_ratio, p_value=1e-5)
    split = replace(found.splits[0], share=0.09, low=0.07, high=0.12)
    bare = [replace(each, cuped=None) for each in found.results]
    odd = check_table(replace(found, sample_ratio=ratio, crossed=7, splits=[split], results=bare)).rows
    assert [row[2] for row in odd] == ["beware"] * 3
    assert odd[1][1].startswith("7 were")
    assert "random halves of A:" in odd[2][1]
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


def test_methods_explain_what_was_computed_only(found: Analysis) -> None:
    text = " ".join(methods(found))
    for words in ("delta method", "43.8 %", "62.0 % of the users", "CUPED", "always-valid", "A/A splits"):
        assert words in text
    bare = [replace(each, cuped=None, looks=[]) for each in found.results]
    text = " ".join(methods(replace(found, results=bare, splits=[], interval="bootstrap")))
    assert "Poisson bootstrap" in text
    for words in ("CUPED", "always-valid", "A/A splits"):
        assert words not in text


def test_the_page(found: Analysis, tmp_path: Path) -> None:
    write_analysis(replace(found, warnings=["Users got <lost>."]), tmp_path / "page.html")
    parsed, said = read(tmp_path / "page.html")
    assert parsed.tags.count("figcaption") == 3
    assert found.result("ctr").sentence in said
    assert parsed.tags.count("h2") == 7
    # 0.1 − 2 · 0.04 is above 0 on the last day
    assert "from the end of 2020-05-09 on it was safe" in said
    assert "&lt;lost&gt;" in (tmp_path / "page.html").read_text()
    assert "truth" not in drawn(days_plot(found, "B")) + drawn(lift_plot(found.results))


def test_a_log_without_days(found: Analysis, tmp_path: Path) -> None:
    results = [replace(each, looks=each.looks[:1], daily=[], cuped=None) for each in found.results]
    write_analysis(replace(found, days=[""], start="", end="", results=results), tmp_path / "page.html")
    parsed, _ = read(tmp_path / "page.html")
    assert parsed.tags.count("figcaption") == 1


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


def test_figures_label_days_and_periods(found: Analysis) -> None:
    words = drawn(days_plot(found, "B", truth=dict.fromkeys(DAYS, 0.1), periods={"before": "A/A", "test": "A/B"}))
    for word in ("2020-05-06", ">A/A<", ">A/B<", "truth", "conversions per user"):
        assert word in words
    for word in ("always valid", "one look", "safe"):
        assert word in drawn(looks_plot(found, "B"))
    for word in ("one look, CUPED", "always valid", "revenue per user"):
        assert word in drawn(lift_plot([*found.results, result(2, 0.1, 3.0)]))


def test_pages_of_real_numbers(tmp_path: Path) -> None:
    visits = simulate_visits(800, days=5, before=3, lift=0.3, rng=np.random.default_rng(0))
    few = analyse(visits, control="A", start=visits.days[3], end=visits.days[6], splits=20)
    write_analysis(few, tmp_path / "page.html")
    parsed, said = read(tmp_path / "page.html")
    assert parsed.tags.count("figcaption") == 3
    assert "nan" not in said.split("</style>")[1]
    write_analysis(analyse(visits, control="A", expected_lift=1e-9, splits=0), tmp_path / "page.html")
    nothing = replace(visits, clicks=0 * visits.clicks, conversions=0 * visits.clicks, revenue=None)
    write_analysis(analyse(nothing, control="A", splits=20), tmp_path / "page.html")
    _, said = read(tmp_path / "page.html")
    assert "There is no lift" in said
    assert "Beware" in said


# Plans


def test_the_table_of_a_plan() -> None:
    plans = [plan(lift=lift, mean=0.5, variance=1.0, daily_users=1000, expected_lift=0.1) for lift in (0.05, 0.1)]
    table = plan_table(plans)
    first = plans[1].once, plans[1].daily
    assert table.rows[1] == ("+10 %", *(cell for each in first for cell in (f"{each.users:,}", f"{each.days:,}")))
    table = plan_table([plan(users=5000, mean=0.5, variance=1.0)])
    assert table.rows[0][:2] == ("–", "5,000")


def test_what_is_beyond_the_log(tmp_path: Path) -> None:
    visits = simulate_visits(2000, days=7, rng=np.random.default_rng(0))
    plans = [plan(visits, days=days) for days in (4, 14)]
    assert [row[0] for row in plan_table(plans).rows] == ["4", "14*"]
    never = plan(visits, lift=0.001)
    assert plan_table([never]).rows[0][2] == "> 10 years"
    out = StringIO()
    print_plans(plans, plans[1], Console(file=out, width=120))
    said = " ".join(out.getvalue().split())
    assert "* longer than the log" in said
    assert said.endswith(plans[1].sentence)
    write_plans(plans, plans[1], plans, tmp_path / "page.html")
    parsed, said = read(tmp_path / "page.html")
    assert "svg" in parsed.tags
    assert "* longer than the log" in said
    assert plans[1].sentence in said


def test_the_curve_of_a_plan() -> None:
    dated = [plan(days=days, mean=0.5, variance=1.0, daily_users=1000) for days in (1, 5, 20)]
    assert ">days<" in svg(plan_plot(dated, dated[1]))
    by_users = [plan(users=users, mean=0.5, variance=1.0) for users in (100, 5000)]
    assert "users in each arm" in svg(plan_plot(by_users, by_users[1]))


def test_importing_reports_loads_neither_torch_nor_matplotlib() -> None:
    modules = ["abtest_report", "click_report", "inspection_report"]
    imports = "; ".join(f"import urank.report.{name}" for name in modules)
    script = f"import sys; {imports}; assert not {{'torch', 'matplotlib', 'jinja2'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
