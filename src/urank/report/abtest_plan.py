"""The report of a plan: how long a test takes for some lifts, or which lifts it can find."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from urank.report.numbers import UNKNOWN, percent
from urank.report.tables import Table
from urank.report.terminal import terminal_table

if TYPE_CHECKING:  # matplotlib is slow to load
    from matplotlib.figure import Figure

    from urank.abtest.plan import Horizon, Plan

__all__ = ["plan_plot", "plan_table", "print_plans", "write_plans"]

_BEYOND = "* longer than the log: users and errors are taken to go on as they went."
_ONCE_OR_DAILY = (
    "Looking once means one look, at the end that was planned. Looking every day means the always-valid interval, by "
    "which one may stop on the first day that it leaves out 0; this takes more users when the lift is as planned."
)
_CURVE = (
    "The smallest lift that is found with a power of {power:g} %, by how long the test runs: looking once, and looking "
    "every day. The dotted lines are the plan."
)


def print_plans(plans: Sequence[Plan], meant: Plan, console: Console) -> None:
    """Print the table, what it rests on, and the sentence that counts."""
    table = plan_table(plans)
    console.print(terminal_table(table))
    console.print()
    if _beyond(table):
        console.print(Text(_BEYOND, style="dim"))
    console.print(Text(_basis(meant), style="dim"))
    console.print()
    console.print(Text(meant.sentence, style="bold"))


def write_plans(plans: Sequence[Plan], meant: Plan, curve: Sequence[Plan], path: str | Path) -> None:
    """Write the page with the curve.

    Args:
        plans: the rows of the table.
        meant: the one that was asked for.
        curve: plans for tests of growing length.
        path: of the page.
    """
    from urank.report.page import Chart, Section, write_page  # matplotlib is slow to load

    table = plan_table(plans)
    chart = Chart(plan_plot(curve, meant), _CURVE.format(power=100 * meant.power))
    notes = [*([_BEYOND] if _beyond(table) else []), _basis(meant)]
    sections = [
        Section("Users and days", paragraphs=[_ONCE_OR_DAILY], tables=[table], notes=notes),
        Section("What a longer test finds", charts=[chart]),
    ]
    write_page(path, f"Plan of an A/B test: {meant.title}", meant.sentence, sections, footer="urank abtest plan")


def plan_table(plans: Sequence[Plan]) -> Table:
    """A row for each plan; where both ways to look take as long, the lifts that they find stand side by side."""
    once, daily = [plan.once for plan in plans], [plan.daily for plan in plans]
    if all(a.lift == b.lift for a, b in zip(once, daily, strict=True)):
        columns = {
            "lift": [f"{100 * each.lift:+.3g} %".replace("-", "−") for each in once],
            "users an arm, once": [f"{each.users:,}" for each in once],
            "days, once": [_days(each) for each in once],
            "users an arm, daily": [f"{each.users:,}" for each in daily],
            "days, daily": [_days(each) for each in daily],
        }
    else:
        columns = {
            "days": [_days(each) for each in once],
            "users an arm": [f"{each.users:,}" for each in once],
            "lift, once": [percent(each.lift, sign=True) for each in once],
            "lift, daily": [percent(each.lift, sign=True) for each in daily],
        }
    return Table(tuple(columns), list(zip(*columns.values(), strict=True)))


def plan_plot(curve: Sequence[Plan], meant: Plan) -> Figure:
    """The lift that is found, by days, or by users when the days are not known."""
    from matplotlib.figure import Figure  # slow to load

    from urank.report.figures import COLOURS, plain_axes

    dated = all(plan.once.days is not None for plan in curve)
    figure = Figure(figsize=(6.4, 3.4))
    axes = plain_axes(figure, "days" if dated else "users in each arm", "lift that is found, %")
    for colour, label, kind in ((COLOURS[0], "looking once", "once"), (COLOURS[2], "looking every day", "daily")):
        found: list[Horizon] = [getattr(plan, kind) for plan in curve]
        places = [float((each.days or 0) if dated else each.users) for each in found]
        lifts = [100 * each.lift for each in found]
        axes.plot(places, lifts, color=colour, marker="o", markersize=3, label=label)
        plan: Horizon = getattr(meant, kind)
        at = plan.days if dated else plan.users
        if at is not None and at <= max(places):
            axes.vlines(at, 0, 100 * abs(plan.lift), color=colour, linestyle=":", linewidth=1)
    highest = [100 * plan.daily.lift for plan in curve if isfinite(plan.daily.lift)]
    axes.set_ylim(0, min(max(highest, default=1.0), 100 * 5 * abs(meant.daily.lift)))
    axes.legend(frameon=False, fontsize="small")
    return figure


def _days(found: Horizon) -> str:
    if found.days is None:
        return "> 10 years" if found.extrapolated else UNKNOWN
    return f"{found.days:,}{'*' if found.extrapolated else ''}"


def _beyond(table: Table) -> bool:
    return any(cell.endswith("*") for row in table.rows for cell in row)


def _basis(plan: Plan) -> str:
    """What the plan rests on."""
    return (
        f"{plan.title} today: {plan.rate:.4g}; variance among users, by the square of that: "
        f"{plan.relative_variance:.4g}; power {100 * plan.power:g} %, alpha {plan.alpha:g}, {100 * plan.share:g} % of "
        f"all users in both arms; always-valid intervals made for a lift of {percent(plan.expected_lift)}."
    )
