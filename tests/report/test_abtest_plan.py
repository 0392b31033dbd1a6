"""The report of a plan: the table, what is beyond the log, and the curve."""

from __future__ import annotations

from html import unescape
from io import StringIO
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.ab_visits import simulate_visits
from pages import Page
from urank.abtest.planning import plan
from urank.report.abtest_report import plan_plot, plan_table, print_plans, write_plans
from urank.report.style import svg


def test_the_table_of_a_plan() -> None:
    plans = [plan(lift=lift, mean=0.5, variance=1.0, daily_users=1000, expected_lift=0.1) for lift in (0.05, 0.1)]
    table = plan_table(plans)
    assert table.head == ("lift", "users an arm, once", "days, once", "users an arm, daily", "days, daily")
    first = plans[1].once, plans[1].daily
    assert table.rows[1] == ("+10 %", *(cell for each in first for cell in (f"{each.users:,}", f"{each.days:,}")))
    table = plan_table([plan(users=5000, mean=0.5, variance=1.0)])
    assert table.head == ("days", "users an arm", "lift, once", "lift, daily")
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
    assert "clicks per impression today: 0.0" in said
    assert said.endswith(plans[1].sentence)
    write_plans(plans, plans[1], plans, tmp_path / "page.html")
    said = unescape((tmp_path / "page.html").read_text())
    parsed = Page()
    parsed.feed(said)
    assert "svg" in parsed.tags
    assert all(source.startswith("data:") for source in parsed.fetched)
    assert "* longer than the log" in said
    assert plans[1].sentence in said


def test_the_curve_of_a_plan() -> None:
    dated = [plan(days=days, mean=0.5, variance=1.0, daily_users=1000) for days in (1, 5, 20)]
    assert ">days<" in svg(plan_plot(dated, dated[1]))
    by_users = [plan(users=users, mean=0.5, variance=1.0) for users in (100, 5000)]
    assert "users in each arm" in svg(plan_plot(by_users, by_users[1]))
