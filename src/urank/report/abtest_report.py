"""The report of a plan: how long a test takes for some lifts, or which lifts it can find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.console import Console
from rich.text import Text

from urank.report.style import COLOURS, plain_label
from urank.report.tables import UNKNOWN, Table, Units, bullet, number, p_text, percent, terminal_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from urank.abtest.analysis import Analysis, Result
    from urank.abtest.metrics import Metric
    from urank.abtest.planning import Horizon, Plan
    from urank.lab.live_test import JudgedTest
    from urank.report.page import Section

__all__ = [
    "OUTCOMES",
    "PERIODS",
    "Check",
    "analysis_lead",
    "analysis_sections",
    "arm_table",
    "check_table",
    "checks",
    "days_plot",
    "how_it_is_made",
    "learned_table",
    "level",
    "lift_plot",
    "looks_plot",
    "outcome",
    "plan_plot",
    "plan_table",
    "print_analysis",
    "print_plans",
    "result_table",
    "verdict_table",
    "when_it_was_safe",
    "write_analysis",
    "write_plans",
]

PERIODS: Mapping[str, str] = {"before": "before", "test": "test", "after": "after"}
"""What the parts of a log are called above the days."""

_BLUE, _GREEN, _BROWN, _GREY = (COLOURS[number] for number in (0, 2, 3, -1))
_INK = "#1f2328"
_SHADE = {"before": "#eaeef2", "test": "#ddf4ff", "after": "#eaeef2"}
_ROOM = 0.06


@dataclass(frozen=True)
class _Bar:
    """A lift and its interval, in percent."""

    value: float
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        return isfinite(self.value) and isfinite(self.low) and isfinite(self.high)


def _bar(value: float, low: float, high: float) -> _Bar:
    return _Bar(100 * value, 100 * low, 100 * high)


def lift_plot(results: Sequence[Result], truth: float = nan) -> Figure:
    """A forest plot of one treatment: the metrics from the top, each with its kinds of interval.

    Args:
        results: of one treatment.
        truth: the true lift of clicks and conversions, a dashed line; none when it is not known.
    """
    figure = Figure(figsize=(6.4, 1.0 + 0.75 * len(results)))
    axes = figure.add_subplot()
    axes.axvline(0, color=_INK, linestyle=":", linewidth=1)
    if isfinite(truth):
        axes.axvline(100 * truth, color=_BROWN, linestyle="--", linewidth=1.2, label="truth")
    for row, result in enumerate(results):
        for place, (kind, colour, bar) in enumerate(_kinds(result)):
            at = row + 0.22 * (place - 1)
            if bar.bounded:
                axes.hlines(at, bar.low, bar.high, color=colour, linewidth=2)
                label = kind if kind not in axes.get_legend_handles_labels()[1] else None
                axes.plot(bar.value, at, color=colour, marker="o", markersize=4, linestyle="none", label=label)
    axes.set_yticks(range(len(results)), [result.metric.title for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlabel("lift, %")
    axes.xaxis.set_major_locator(MaxNLocator(7))
    _dress(axes, "x")
    _legend(axes, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0)
    return figure


def _kinds(result: Result) -> list[tuple[str, str, _Bar]]:
    """What is known of the lift: looking once, with the time before taken out, and looking daily."""
    lift = result.effect.lift
    found = [("looked at once", _BLUE, _bar(lift.value, lift.low, lift.high))]
    if result.cuped is not None:
        adjusted = result.cuped.effect.lift
        found.append(("once, CUPED", _GREEN, _bar(adjusted.value, adjusted.low, adjusted.high)))
    if result.looks:
        last = result.looks[-1]
        found.append(("always valid", _GREY, _bar(last.lift.value, last.always_low, last.always_high)))
    return found


def days_plot(
    analysis: Analysis,
    treatment: str,
    *,
    truth: Mapping[str, float] | None = None,
    periods: Mapping[str, str] = PERIODS,
) -> Figure:
    """Each day alone: the lift of each metric with its interval as an upright bar (the paper's Figures 5 and 6).

    Args:
        analysis: the test.
        treatment: which arm.
        truth: day -> the true lift of clicks and conversions, as diamonds; left out when it is not known.
        periods: what the shaded parts are called.
    """
    results = _of(analysis, treatment)
    figure, panels = _panels(results)
    for axes, result in zip(panels, results, strict=True):
        places = [analysis.days.index(each.day) for each in result.daily]
        lifts = [each.effect.lift for each in result.daily]
        bars = [_bar(lift.value, lift.low, lift.high) for lift in lifts]
        shown = [(at, bar) for at, bar in zip(places, bars, strict=True) if bar.bounded]
        if shown:
            axes.vlines(*zip(*((at, bar.low, bar.high) for at, bar in shown), strict=True), color=_BLUE, linewidth=1.6)
            axes.plot(*zip(*((at, bar.value) for at, bar in shown), strict=True), color=_BLUE, marker="o", markersize=4)
        known = {} if truth is None or result.metric.numerator == "revenue" else truth
        diamonds = [100 * known.get(day, nan) for day in analysis.days]
        if np.isfinite(diamonds).any():
            _diamonds(axes, diamonds)
        _limit(axes, [bar for _, bar in shown], [each for each in diamonds if isfinite(each)])
        _shade(axes, analysis, periods if axes is panels[0] else None)
    _day_axis(panels[-1], analysis.days)
    _legend(panels[0], loc="upper right")
    return figure


def looks_plot(analysis: Analysis, treatment: str) -> Figure:
    """All days so far: the lift as one who looks daily saw it, with the interval of one look and the always-valid."""
    results = [result for result in _of(analysis, treatment) if len(result.looks) > 1]
    figure, panels = _panels(results)
    for axes, result in zip(panels, results, strict=True):
        places = [analysis.days.index(look.day) for look in result.looks]
        once = [_bar(look.lift.value, look.lift.low, look.lift.high) for look in result.looks]
        always = [_bar(look.lift.value, look.always_low, look.always_high) for look in result.looks]
        for bars, alpha, label in ((always, 0.18, "always valid"), (once, 0.45, "looked at once")):
            low, high = [bar.low for bar in bars], [bar.high for bar in bars]
            axes.fill_between(places, low, high, color=_BLUE, alpha=alpha, linewidth=0, label=label)
        axes.plot(places, [bar.value for bar in once], color=_INK, linewidth=1.4)
        if result.decided is not None:
            axes.axvline(analysis.days.index(result.decided), color=_GREEN, linestyle="--", linewidth=1.2, label="safe")
        _limit(axes, [*once, *always[len(always) // 2 :]])
    _day_axis(panels[-1], analysis.days)
    _legend(panels[0], loc="lower right", ncols=3)
    return figure


def _of(analysis: Analysis, treatment: str) -> list[Result]:
    return [result for result in analysis.results if result.treatment == treatment]


def _panels(results: Sequence[Result]) -> tuple[Figure, list[Axes]]:
    """A panel for each metric, over the same days."""
    figure = Figure(figsize=(7.2, 0.5 + 2.0 * len(results)), layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0])
    for axes, result in zip(panels, results, strict=True):
        axes.axhline(0, color=_INK, linestyle=":", linewidth=1)
        axes.set_ylabel(f"{result.metric.title},\nlift in %")
        _dress(axes, "y")
    return figure, panels


def _dress(axes: Axes, lines: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if lines == "x" else "y", color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)


def _legend(axes: Axes, **where: Any) -> None:
    """What the colours mean, if there are any."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize="small", **where)


def _diamonds(axes: Axes, values: Sequence[float]) -> None:
    axes.plot(
        range(len(values)),
        values,
        linestyle="none",
        marker="D",
        markersize=6,
        markerfacecolor="none",
        markeredgecolor=_BROWN,
        label="truth",
    )


def _limit(axes: Axes, bars: Sequence[_Bar], others: Sequence[float] = ()) -> None:
    """Room for these and for 0; what else there is may be cut off."""
    ends = [0.0, *others, *(end for bar in bars if bar.bounded for end in (bar.low, bar.high))]
    low, high = min(ends), max(ends)
    margin = _ROOM * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _shade(axes: Axes, analysis: Analysis, periods: Mapping[str, str] | None) -> None:
    """The parts of the log behind its days, with their names above when there are several."""
    first, last = analysis.days.index(analysis.start), analysis.days.index(analysis.end)
    parts = {"before": (0, first - 1), "test": (first, last), "after": (last + 1, len(analysis.days) - 1)}
    shown = {part: ends for part, ends in parts.items() if ends[0] <= ends[1]}
    for part, (begin, end) in shown.items():
        axes.axvspan(begin - 0.5, end + 0.5, color=_SHADE[part], linewidth=0, zorder=0)
        if periods is not None and len(shown) > 1:
            middle = (begin + end) / 2
            axes.text(middle, 1.0, periods[part], transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.set_xlim(-0.5, len(analysis.days) - 0.5)


def _day_axis(axes: Axes, days: Sequence[str]) -> None:
    """The names of some days; a day that is not there has none."""

    def name(place: float, _: int | None) -> str:
        return plain_label(days[int(place)]) if place == int(place) and 0 <= place < len(days) else ""

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(name))
    axes.set_xlabel("day")


_LIFT = Units(base=1.0, decimals=3)
"""Lifts are shares already."""

Check = tuple[str, str, bool]
"""What is checked, what was found, and whether that is sound."""


def level(alpha: float) -> str:
    """How sure the intervals are.

    >>> level(0.05), level(0.005)
    ('95 %', '99.5 %')
    """
    return f"{100 * (1 - alpha):g} %"


def arm_table(analysis: Analysis) -> Table:
    """What the users of each arm were shown and did in the test."""
    arms = analysis.arms
    columns = {
        "arm": [arm.name for arm in arms],
        "users": [f"{arm.users:,}" for arm in arms],
        "impressions": [f"{arm.impressions:,}" for arm in arms],
        "clicks": [f"{arm.clicks:,}" for arm in arms],
        "conversions": [f"{arm.conversions:,}" for arm in arms],
    }
    if any(arm.revenue is not None for arm in arms):
        columns["revenue"] = [UNKNOWN if arm.revenue is None else number(arm.revenue, 2) for arm in arms]
    return _by_columns(columns)


def result_table(analysis: Analysis) -> Table:
    """A row for each metric and treatment; the columns that matter most come first, since a narrow terminal leaves out
    the last."""
    results = analysis.results
    several = len(analysis.treatments) > 1
    columns = {"metric": [result.metric.title for result in results]}
    if several:
        columns["arm"] = [result.treatment for result in results]
    columns |= {
        "control": [_rate(result.metric, result.effect.control, result) for result in results],
        "treatment": [_rate(result.metric, result.effect.treatment, result) for result in results],
        "lift": [percent(result.effect.lift.value, sign=True) for result in results],
        f"{level(analysis.alpha)} interval": [
            _LIFT.changes(result.effect.lift.low, result.effect.lift.high) for result in results
        ],
        "p, corrected" if several else "p": [p_text(result.adjusted_p) for result in results],
        "always valid": [_always(result) for result in results],
    }
    if any(result.cuped is not None for result in results):
        columns["CUPED"] = [_cuped(result) for result in results]
    return _by_columns(columns)


def checks(analysis: Analysis) -> Iterator[Check]:
    """Whether the test itself is sound."""
    ratio = analysis.sample_ratio
    counts = ", ".join(
        f"{arm} {users:,} users ({ratio.expected[arm]:,.0f} expected)" for arm, users in ratio.users.items()
    )
    yield "sample ratio", f"{counts}, p = {p_text(ratio.p_value)}", ratio.sound
    crossed = f"{analysis.crossed:,} were" if analysis.crossed > 1 else "one was" if analysis.crossed else "nobody was"
    yield "crossed users", f"{crossed} seen in two arms", not analysis.crossed
    if analysis.splits:
        first = analysis.splits[0]
        shares = ", ".join(f"{percent(check.share)} in {check.metric}" for check in analysis.splits)
        before = any(result.cuped is not None for result in analysis.results)
        whom = "all users before the test" if before else analysis.control
        found = f"of {first.splits:,} random halves of {whom}, so many had p < {first.alpha:g}: {shares}"
        yield "A/A splits", found, all(check.sound for check in analysis.splits)


def check_table(analysis: Analysis) -> Table:
    """The same as a table."""
    head = ("check", "found", "verdict")
    return Table(
        head, [(what, found, "sound" if sound else "beware") for what, found, sound in checks(analysis)], head[1:]
    )


def verdict_table(judged: JudgedTest) -> Table:
    """The parts of a simulated test: what was found in each, and what was true."""
    found = judged.verdicts
    return _by_columns(
        {
            "test": [each.period for each in found],
            "metric": [each.metric.name.upper() for each in found],
            "lift": [percent(each.effect.lift.value, sign=True) for each in found],
            f"{level(judged.ab.alpha)} interval": [
                _LIFT.changes(each.effect.lift.low, each.effect.lift.high) for each in found
            ],
            "0 inside": ["yes" if each.holds_zero else "no" for each in found],
            "true lift": [percent(each.true_lift, sign=True) if each.true_lift else "0 %" for each in found],
            "truth inside": ["yes" if each.holds_truth else "no" for each in found],
            "days": [f"{each.start} – {each.end}" for each in found],
        }
    )


def learned_table(judged: JudgedTest) -> Table:
    """The rankers that were learned while the test ran."""
    learned = judged.run.learned
    return _by_columns(
        {
            "arm": [each.arm for each in learned],
            "from day": [str(each.day) for each in learned],
            "model": [each.model for each in learned],
            "impressions": [f"{each.impressions:,}" for each in learned],
            "seconds": [number(each.seconds, 1) for each in learned],
        }
    )


def _by_columns(columns: dict[str, list[str]]) -> Table:
    rows: Sequence[tuple[str, ...]] = list(zip(*columns.values(), strict=True))
    return Table(tuple(columns), rows)


def _rate(metric: Metric, rate: float, result: Result) -> str:
    """With as many decimals as the control's rate needs; what is at most 1 in percent."""
    if metric.denominator == "impressions":
        shown = number(100 * rate, Units.of(100 * result.effect.control).decimals)
        return shown if shown == UNKNOWN else f"{shown} %"
    return Units.of(result.effect.control).amount(rate)


def _always(result: Result) -> str:
    return _LIFT.changes(result.looks[-1].always_low, result.looks[-1].always_high) if result.looks else UNKNOWN


def _cuped(result: Result) -> str:
    if result.cuped is None:
        return UNKNOWN
    lift = result.cuped.effect.lift
    return f"{percent(lift.value, sign=True)} ({_LIFT.changes(lift.low, lift.high)})"


_USERS = (
    "Users are the sample. What one user does hangs together, so errors that take impressions for independent are too "
    "small; a user counts as one observation, however often it came back. The rate of an arm is the sum over its users "
    "of what is counted, divided by the sum of impressions or by the number of users; the lift is the ratio of two "
    "rates, less 1."
)
_DELTA = (
    "Intervals and p-values of the lift come from the delta method: the log of the ratio is close to a weighted sum of "
    "means over users, whose variance is known. On the log scale an interval is symmetric; turned back, it never falls "
    "below −100 %."
)
_BOOTSTRAP = (
    "The interval of the lift comes from the Poisson bootstrap: each of many resamples counts each user a random "
    "number of times, and the interval holds the middle of their lifts. Errors, p-values and all other intervals come "
    "from the delta method on the log of the ratio."
)
_CUPED = (
    "CUPED takes out what users did before the test. It cannot be due to the test, and it tells in part what they do "
    "in it, so without it chance is smaller: by {reduced} of the variance. {seen} of the users were seen before."
)
_ALWAYS = (
    "An interval of {level} misses the truth in {alpha} of all tests when one looks once, at the end that was planned. "
    "Who looks every day and stops when 0 is left out is wrong far more often. The always-valid interval is wider, "
    "such that all looks together miss it in at most {alpha}. It is tightest near the lift that the test was planned "
    "for, {expected}."
)
_CHECKS = (
    "A/A splits cut the same users at random in halves and count how often the test finds a difference that cannot be "
    "there; that should be in {alpha}. It cannot tell whether users are the right sample."
)
_HOLM = "There are several treatments, so p-values are corrected by Holm's method; intervals are not."
_LIMITS = (
    "What the numbers cannot know: whether what one arm saw changed what the other did, and whether users go on as "
    "they did in these days."
)


def outcome(result: Result) -> int:
    """1 when the treatment earned more, −1 when less, 0 when that cannot be told."""
    if not result.differs:
        return 0
    return 1 if result.effect.lift.value > 0 else -1


def when_it_was_safe(result: Result) -> str:
    """From which day on one who looks daily knew the sign of the lift."""
    title = result.metric.title
    if result.decided is None:
        return f"{title}: the always-valid interval never left out 0, so there was no day to stop on."
    day = result.decided
    return f"{title}: from the end of {day} on it was safe to decide, as the always-valid interval then left out 0."


def how_it_is_made(analysis: Analysis) -> Iterator[str]:
    """What the numbers mean, in paragraphs."""
    share = percent(analysis.alpha, decimals=0 if analysis.alpha >= 0.01 else None)
    yield _USERS
    yield _DELTA if analysis.interval == "delta" else _BOOTSTRAP
    adjusted = [result.cuped for result in analysis.results if result.cuped is not None]
    if adjusted:
        least, most = (percent(max(0.0, of(each.variance_reduction for each in adjusted))) for of in (min, max))
        reduced = least if least == most else f"{least} to {most}"
        yield _CUPED.format(reduced=reduced, seen=percent(adjusted[0].seen_before))
    if any(result.looks for result in analysis.results):
        yield _ALWAYS.format(level=level(analysis.alpha), alpha=share, expected=percent(analysis.expected_lift))
    if analysis.splits:
        yield _CHECKS.format(alpha=share)
    if len(analysis.treatments) > 1:
        yield _HOLM
    yield _LIMITS


OUTCOMES = {1: "bold green", 0: "bold yellow", -1: "bold red"}
_LEADING = "ctr"

_LIFT_ABTEST = (
    "The lift of each metric with {level} intervals: for those who look once, at the end; the same with what users did "
    "before the test taken out (CUPED), if they were seen before; and always valid, for those who look every day."
)
_DAYS = (
    "Each day alone: the lift of {treatment} over {control} among the users of that day, with {level} intervals, as in "
    "the paper's Figures 5 and 6. The days of the test are shaded blue, others grey."
)
_TRUTH = " Diamonds are the true lifts."
_LOOKS = (
    "The lift over all days so far. The dark band is the {level} interval for those who look once; the light band is "
    "the always-valid one, for those who look every day. The dashed line is the first day on which it left out 0."
)


def print_analysis(analysis: Analysis, console: Console) -> None:
    """Print what a person should know, the sentence that counts last, where the eye is when it ends."""
    for table in (arm_table(analysis), result_table(analysis)):
        console.print(terminal_table(table))
        console.print()
    for what, found, sound in checks(analysis):
        if sound or what != "crossed users":  # of whom a warning tells
            bullet(console, "sound" if sound else "unsound", Text(f"{what}: {found}"))
    for warning in analysis.warnings:
        bullet(console, "beware", Text(warning))
    console.print()
    for result in _leading(analysis):
        console.print(Text(result.sentence, style=OUTCOMES[outcome(result)]))


def write_analysis(analysis: Analysis, path: str | Path) -> None:
    """Write the page with the plots."""
    from urank.report.page import write_page  # matplotlib is slow to load

    title = f"A/B test: {', '.join(analysis.treatments)} against {analysis.control}"
    write_page(path, title, analysis_lead(analysis), analysis_sections(analysis), footer="urank abtest analyse")


def analysis_lead(analysis: Analysis) -> str:
    """What counts, for every treatment."""
    return " ".join(result.sentence for result in _leading(analysis))


def analysis_sections(
    analysis: Analysis,
    *,
    truth: float = nan,
    true_lifts: Mapping[str, float] | None = None,
    periods: Mapping[str, str] | None = None,
) -> list[Section]:
    """What the page tells, in order.

    Args:
        analysis: the test.
        truth: the true lift of clicks and conversions, in a simulated test.
        true_lifts: day -> the same on that day.
        periods: what the parts of the log are called: those before, in and after the test.
    """
    from urank.report.page import Section

    sections = [
        Section("Arms", tables=[arm_table(analysis)]),
        _lifts(analysis, truth),
        *_days(analysis, true_lifts, periods),
        *_looks(analysis),
        Section("Checks", tables=[check_table(analysis)]),
        Section("Beware", bullets=analysis.warnings) if analysis.warnings else None,
        Section("How these numbers are made", paragraphs=list(how_it_is_made(analysis))),
    ]
    return [section for section in sections if section is not None]


def _leading(analysis: Analysis) -> list[Result]:
    return [result for result in analysis.results if result.metric.name == _LEADING]


def _lifts(analysis: Analysis, truth: float) -> Section:
    from urank.report.page import Chart, Section

    charts = [
        Chart(
            lift_plot([result for result in analysis.results if result.treatment == treatment], truth),
            f"{treatment}: {_LIFT_ABTEST.format(level=level(analysis.alpha))}",
        )
        for treatment in analysis.treatments
    ]
    return Section("Lift", charts=charts, tables=[result_table(analysis)])


def _days(
    analysis: Analysis, true_lifts: Mapping[str, float] | None, periods: Mapping[str, str] | None
) -> Iterator[Section]:
    """Left out when there is but one day."""
    from urank.report.page import Chart, Section

    if len(analysis.days) < 2:
        return
    told = {"control": analysis.control, "level": level(analysis.alpha)}
    charts = [
        Chart(
            days_plot(analysis, treatment, truth=true_lifts, periods=periods or PERIODS),
            _DAYS.format(treatment=treatment, **told) + (_TRUTH if true_lifts else ""),
        )
        for treatment in analysis.treatments
    ]
    yield Section("Day by day", charts=charts)


def _looks(analysis: Analysis) -> Iterator[Section]:
    """Left out when nobody could look twice."""
    from urank.report.page import Chart, Section

    several = len(analysis.treatments) > 1
    looked = [result for result in analysis.results if len(result.looks) > 1]
    treatments = list(dict.fromkeys(result.treatment for result in looked))
    if not looked:
        return
    caption = _LOOKS.format(level=level(analysis.alpha))
    yield Section(
        "If you had looked every day",
        bullets=[(f"{each.treatment}, " if several else "") + when_it_was_safe(each) for each in looked],
        charts=[Chart(looks_plot(analysis, treatment), f"{treatment}: {caption}") for treatment in treatments],
    )


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
            "days, once": [_days_abtest_plan(each) for each in once],
            "users an arm, daily": [f"{each.users:,}" for each in daily],
            "days, daily": [_days_abtest_plan(each) for each in daily],
        }
    else:
        columns = {
            "days": [_days_abtest_plan(each) for each in once],
            "users an arm": [f"{each.users:,}" for each in once],
            "lift, once": [percent(each.lift, sign=True) for each in once],
            "lift, daily": [percent(each.lift, sign=True) for each in daily],
        }
    return Table(tuple(columns), list(zip(*columns.values(), strict=True)))


def plan_plot(curve: Sequence[Plan], meant: Plan) -> Figure:
    """The lift that is found, by days, or by users when the days are not known."""
    from matplotlib.figure import Figure  # slow to load

    from urank.report.style import COLOURS, plain_axes

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


def _days_abtest_plan(found: Horizon) -> str:
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
