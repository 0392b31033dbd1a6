"""The reports of A/B tests: of the plan of a test, and of its analysis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from urank.report import style as theme
from urank.report.page import Chart, Section, Summary, notebook_html, write_page
from urank.report.tables import UNKNOWN, Table, Units, bullet, number, p_text, percent, print_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

    from urank.abtest.analysis import Analysis, Result
    from urank.abtest.planning import Horizon, Plan


PERIODS: Mapping[str, str] = {"before": "before", "test": "test", "after": "after"}
"""The labels of the parts of a log above the days."""
LIFTS = Units(base=1.0, decimals=3)
"""The format of lifts, which are shares already."""
OUTCOME_STYLES = {1: "bold green", 0: "bold yellow", -1: "bold red"}
_LEADING_METRIC = "ctr"
_SHADES = {"before": theme.SHADE, "test": theme.BLUE_SHADE, "after": theme.SHADE}

_LIFT_CAPTION = (
    "The lift of each metric with {level} intervals: for a single look at the end; the same adjusted for the behaviour "
    "of users before the test (CUPED), if they were seen before; and always valid, for daily looks."
)
_DAYS_CAPTION = (
    "Each day alone: the lift of {treatment} over {control} among the users of that day, with {level} intervals, as in "
    "the paper's Figures 5 and 6. The days of the test are shaded blue, others grey."
)
_LOOKS_CAPTION = (
    "The lift over all days so far. The dark band is the {level} interval for a single look; the light band is the "
    "always-valid one, for daily looks. The dashed line is the first day on which it excluded 0."
)
_USERS = (
    "Users are the sampling unit. The actions of one user are correlated, so standard errors that treat impressions as "
    "independent are too small; a user counts as one observation, however often it returned. The rate of an arm is the "
    "sum over its users of what is counted, divided by the sum of impressions or by the number of users; the lift is "
    "the ratio of two rates, minus 1."
)
_DELTA = (
    "Intervals and p-values of the lift come from the delta method: the log of the ratio is close to a weighted sum of "
    "means over users, whose variance is known. On the log scale an interval is symmetric; transformed back, it never "
    "falls below −100 %."
)
_BOOTSTRAP = (
    "The interval of the lift comes from the Poisson bootstrap: each of many resamples counts each user a random "
    "number of times, and the interval contains the middle of their lifts. Standard errors, p-values and all other "
    "intervals come from the delta method on the log of the ratio."
)
_CUPED = (
    "CUPED adjusts for the behaviour of users before the test. The test cannot have caused it, and it predicts part of "
    "their behaviour in the test, so the adjustment reduces the variance, here by {reduced}. {seen} of the users were "
    "seen before."
)
_ALWAYS_VALID = (
    "An interval of {level} misses the truth in {alpha} of all tests if it is looked at once, at the planned end. "
    "Looking every day and stopping as soon as it excludes 0 is wrong far more often. The always-valid interval is "
    "wider, so that all looks together miss the truth in at most {alpha}. It is tightest near the lift that the test "
    "was planned for, {expected}."
)
_SPLITS = (
    "A/A splits divide the same users at random into halves and count how often the test finds a difference, which "
    "cannot exist; the share should be {alpha}. They cannot show whether users are the right sampling unit."
)
_HOLM = "There are several treatments, so p-values are corrected by Holm's method; intervals are not."
_LIMITS = (
    "What the numbers cannot show: whether the treatment of one arm changed the behaviour of the other, and whether "
    "users will behave as they did on these days."
)
_BEYOND = "* longer than the log: growth of users and decrease of errors are extrapolated."
_ONE_OR_DAILY_LOOKS = (
    "One look means a single look at the planned end. Daily looks use the always-valid interval, with which a test may "
    "be stopped on the first day that it excludes 0; this takes more users if the lift is as planned."
)
_PLAN_CAPTION = (
    "The smallest lift that is found with a power of {power:g} %, by the duration of the test, with one look and with "
    "daily looks. The dotted lines are the plan."
)


# Analyses


def print_analysis(analysis: Analysis, console: Console) -> None:
    """Print the tables, checks and warnings, then the sentence on the main metric."""
    print_tables(console, (arm_table(analysis), result_table(analysis)))
    for check, finding, sound in _checks(analysis):
        if sound or check != "crossed users":  # there is a warning about these
            bullet(console, "sound" if sound else "unsound", f"{check}: {finding}")
    for warning in analysis.warnings:
        bullet(console, "beware", warning)
    console.print()
    for result in _leading(analysis):
        console.print(Text(result.sentence, style=OUTCOME_STYLES[outcome(result)]))


def write_analysis(analysis: Analysis, path: str | Path) -> None:
    """Write the page with plots."""
    title = f"A/B test: {', '.join(analysis.treatments)} against {analysis.control}"
    write_page(path, title, analysis_summary(analysis), analysis_sections(analysis))


def analysis_html(analysis: Analysis) -> str:
    """Return the view in a notebook."""
    return notebook_html(analysis_summary(analysis), analysis_sections(analysis)[:2])


def analysis_summary(analysis: Analysis) -> Summary:
    """Return what to do about each treatment, by the main metric."""
    leading = _leading(analysis)
    answers, outcomes = [], [outcome(result) for result in leading]
    for result, found in zip(leading, outcomes, strict=True):
        lift = percent(abs(result.effect.lift.value))
        answers.append(
            {
                1: f"{result.treatment} is better: {lift} more {result.metric.title} than {result.control}.",
                0: f"No clear difference between {result.treatment} and {result.control} in {result.metric.title}.",
                -1: f"{result.treatment} is worse: {lift} fewer {result.metric.title} than {result.control}.",
            }[found]
        )
    failed = [check for check, _, sound in _checks(analysis) if not sound]
    if failed:
        following = "find out why before anything else; see the checks below."
        answer = f"Do not trust this test: it fails the check of {' and '.join(failed)}."
        return Summary(answer, " ".join(result.sentence for result in leading), following, "bad")
    following = {
        1: "ship the better arm.",
        0: "run longer if a smaller lift would be worth it (`urank abtest plan` says how long), or keep the control.",
        -1: "keep the control.",
    }[max(outcomes, default=0)]
    evidence = " ".join(result.sentence for result in leading)
    return Summary(" ".join(answers), evidence, following, {1: "good", 0: "", -1: "bad"}[max(outcomes, default=0)])


def analysis_sections(
    analysis: Analysis,
    *,
    truth: float = nan,
    true_lifts: Mapping[str, float] | None = None,
    periods: Mapping[str, str] = PERIODS,
) -> list[Section]:
    """Return the sections of the page.

    Args:
        truth: the true lift of clicks and conversions in a simulated test.
        true_lifts: day -> the same on that day.
        periods: the labels of the parts of the log before, in and after the test.
    """
    shown = {"control": analysis.control, "level": level(analysis.alpha)}
    looked = [result for result in analysis.results if len(result.looks) > 1]
    several = len(analysis.treatments) > 1
    lifts, days, looks = [], [], []
    for treatment in analysis.treatments:
        caption = f"{treatment}: {_LIFT_CAPTION.format(**shown)}"
        lifts.append(Chart(partial(lift_plot, _results_of(analysis, treatment), truth), caption))
        if len(analysis.days) > 1:
            caption = _DAYS_CAPTION.format(treatment=treatment, **shown)
            caption += " Diamonds are the true lifts." if true_lifts else ""
            draw = partial(days_plot, analysis, treatment, truth=true_lifts, periods=periods)
            days.append(Chart(draw, caption))
        if any(result.treatment == treatment for result in looked):
            caption = f"{treatment}: {_LOOKS_CAPTION.format(**shown)}"
            looks.append(Chart(partial(looks_plot, analysis, treatment), caption))
    decisions = [(f"{each.treatment}, " if several else "") + _decision(each) for each in looked]
    sections = [
        Section("Arms", tables=[arm_table(analysis)]),
        Section("Lift", charts=lifts, tables=[result_table(analysis)]),
        Section("Day by day", charts=days) if days else None,
        Section("If you had looked every day", bullets=decisions, charts=looks) if looks else None,
        Section("Checks", tables=[check_table(analysis)]),
        Section("Beware", bullets=analysis.warnings) if analysis.warnings else None,
        Section("How these numbers are computed", paragraphs=list(methods(analysis))),
    ]
    return [section for section in sections if section is not None]


def outcome(result: Result) -> int:
    """Return 1 if the treatment earned significantly more, −1 if less, 0 otherwise."""
    return 0 if not result.differs else 1 if result.effect.lift.value > 0 else -1


def level(alpha: float) -> str:
    """Format the level of intervals.

    >>> level(0.05), level(0.005)
    ('95 %', '99.5 %')
    """
    return f"{100 * (1 - alpha):g} %"


def methods(analysis: Analysis) -> Iterator[str]:
    """Explain how the numbers are computed, in paragraphs."""
    share = percent(analysis.alpha, decimals=0 if analysis.alpha >= 0.01 else None)
    yield _USERS
    yield _DELTA if analysis.interval == "delta" else _BOOTSTRAP
    adjusted = [result.cuped for result in analysis.results if result.cuped is not None]
    if adjusted:
        least, most = (percent(max(0.0, of(each.variance_reduction for each in adjusted))) for of in (min, max))
        reduced = least if least == most else f"{least} to {most}"
        yield _CUPED.format(reduced=reduced, seen=percent(adjusted[0].seen_before))
    if any(result.looks for result in analysis.results):
        yield _ALWAYS_VALID.format(level=level(analysis.alpha), alpha=share, expected=percent(analysis.expected_lift))
    if analysis.splits:
        yield _SPLITS.format(alpha=share)
    if len(analysis.treatments) > 1:
        yield _HOLM
    yield _LIMITS


def _leading(analysis: Analysis) -> list[Result]:
    return [result for result in analysis.results if result.metric.name == _LEADING_METRIC]


def _results_of(analysis: Analysis, treatment: str) -> list[Result]:
    return [result for result in analysis.results if result.treatment == treatment]


def _decision(result: Result) -> str:
    """The first day on which daily looks were conclusive."""
    title = result.metric.title
    if result.decided is None:
        return f"{title}: the always-valid interval never excluded 0, so there was no day to stop on."
    return f"{title}: from the end of {result.decided} on it was safe to stop; the always-valid interval excluded 0."


def arm_table(analysis: Analysis) -> Table:
    """Totals of each arm in the test."""
    arms, counts = analysis.arms, ("users", "impressions", "clicks", "conversions")
    columns = {"arm": [arm.name for arm in arms]}
    columns |= {count: [f"{getattr(arm, count):,}" for arm in arms] for count in counts}
    if any(arm.revenue is not None for arm in arms):
        columns["revenue"] = [UNKNOWN if arm.revenue is None else number(arm.revenue, 2) for arm in arms]
    return Table.of_columns(columns)


def result_table(analysis: Analysis) -> Table:
    """A row for each metric and treatment; a narrow terminal omits the last columns, which matter least."""
    results = analysis.results
    lifts, lasts = [each.effect.lift for each in results], [each.looks[-1] if each.looks else None for each in results]
    several = len(analysis.treatments) > 1
    columns = {"metric": [result.metric.title for result in results]}
    if several:
        columns["arm"] = [result.treatment for result in results]
    columns |= {
        "control": [_rate(result, result.effect.control) for result in results],
        "treatment": [_rate(result, result.effect.treatment) for result in results],
        "lift": [percent(lift.value, sign=True) for lift in lifts],
        f"{level(analysis.alpha)} interval": [LIFTS.changes(lift.low, lift.high) for lift in lifts],
        "p, corrected" if several else "p": [p_text(result.adjusted_p) for result in results],
        "always valid": [LIFTS.changes(last.always_low, last.always_high) if last else UNKNOWN for last in lasts],
    }
    if any(result.cuped is not None for result in results):
        adjusted = [None if result.cuped is None else result.cuped.effect.lift for result in results]
        columns["CUPED"] = [
            UNKNOWN if lift is None else f"{percent(lift.value, sign=True)} ({LIFTS.changes(lift.low, lift.high)})"
            for lift in adjusted
        ]
    return Table.of_columns(columns)


def _rate(result: Result, rate: float) -> str:
    """Format a rate with the decimals of the control's, in percent if it is at most 1."""
    if result.metric.denominator == "impressions":
        return percent(rate, decimals=Units.of(100 * result.effect.control).decimals)
    return Units.of(result.effect.control).amount(rate)


def check_table(analysis: Analysis) -> Table:
    """The validity checks of the test."""
    rows = [(check, finding, "sound" if sound else "beware") for check, finding, sound in _checks(analysis)]
    return Table(("check", "found", "verdict"), rows, words=("found", "verdict"))


def _checks(analysis: Analysis) -> Iterator[tuple[str, str, bool]]:
    """Yield each check, its finding, and whether that is sound."""
    ratio = analysis.sample_ratio
    counts = [f"{arm} {users:,} users ({ratio.expected[arm]:,.0f} expected)" for arm, users in ratio.users.items()]
    yield "sample ratio", f"{', '.join(counts)}, p = {p_text(ratio.p_value)}", ratio.sound
    crossed = f"{analysis.crossed:,} were" if analysis.crossed > 1 else "one was" if analysis.crossed else "nobody was"
    yield "crossed users", f"{crossed} seen in two arms", not analysis.crossed
    if analysis.splits:
        first = analysis.splits[0]
        shares = ", ".join(f"{percent(check.share)} in {check.metric}" for check in analysis.splits)
        before = any(result.cuped is not None for result in analysis.results)
        users = "all users before the test" if before else analysis.control
        finding = f"share with p < {first.alpha:g} of {first.splits:,} random halves of {users}: {shares}"
        yield "A/A splits", finding, all(check.sound for check in analysis.splits)


def lift_plot(results: Sequence[Result], truth: float = nan) -> Figure:
    """Draw a forest plot of one treatment: the metrics from the top, each with its kinds of interval.

    The dashed line is the true lift of clicks and conversions, unless it is NaN.
    """
    figure = theme.new_figure(1.0 + 0.75 * len(results))
    axes = figure.add_subplot()
    theme.style_axes(axes, "x")
    axes.axvline(0, color=theme.INK, linestyle=":", linewidth=1)
    if isfinite(truth):
        axes.axvline(100 * truth, color=theme.INK, linestyle="--", linewidth=1.2, label="truth")
    for row, result in enumerate(results):
        once = result.effect.lift
        kinds = [("one look", theme.BLUE, once.value, once.low, once.high)]
        if result.cuped is not None:
            adjusted = result.cuped.effect.lift
            kinds.append(("one look, CUPED", theme.GREEN, adjusted.value, adjusted.low, adjusted.high))
        if result.looks:
            last = result.looks[-1]
            kinds.append(("always valid", theme.GREY, last.lift.value, last.always_low, last.always_high))
        for place, (kind, colour, *interval) in enumerate(kinds):
            if all(map(isfinite, interval)):
                label = kind if kind not in axes.get_legend_handles_labels()[1] else None
                ends = [100 * each for each in interval]
                theme.draw_interval(axes, row + 0.22 * (place - 1), ends, colour=colour, label=label)
    axes.set_yticks(range(len(results)), [result.metric.title for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlabel("lift, %")
    axes.locator_params(axis="x", nbins=7)
    theme.legend(axes, columns=4, place="above")
    return figure


def days_plot(
    analysis: Analysis,
    treatment: str,
    *,
    truth: Mapping[str, float] | None = None,
    periods: Mapping[str, str] = PERIODS,
) -> Figure:
    """Plot the lift of each metric on each single day with its interval (the paper's Figures 5 and 6).

    `truth` is day -> the true lift of clicks and conversions, shown as diamonds; `periods` labels the shaded parts.
    """
    results, days = _results_of(analysis, treatment), analysis.days
    figure, panels = _panels(results)
    for axes, result in zip(panels, results, strict=True):
        lifts = [(days.index(each.day), each.effect.lift) for each in result.daily]
        bars = [(at, 100 * lift.value, 100 * lift.low, 100 * lift.high) for at, lift in lifts]
        bars = [each for each in bars if all(map(isfinite, each))]
        axes.plot([each[0] for each in bars], [each[1] for each in bars], color=theme.BLUE)
        for at, *ends in bars:
            theme.draw_interval(axes, at, ends, colour=theme.BLUE, upright=True)
        known = {} if truth is None or result.metric.numerator == "revenue" else truth
        true = [100 * known.get(day, nan) for day in days]
        theme.draw_truth(axes, range(len(days)), true)
        _limit(axes, [*true, *(end for each in bars for end in each[2:])])
        _shade_periods(axes, analysis, periods if axes is panels[0] else None)
    _label_days(panels[-1], days)
    theme.legend(panels[0], place="upper right")
    return figure


def looks_plot(analysis: Analysis, treatment: str) -> Figure:
    """Plot the lift over all days so far, with the interval for one look and the always-valid one."""
    results = [result for result in _results_of(analysis, treatment) if len(result.looks) > 1]
    figure, panels = _panels(results)
    for axes, result in zip(panels, results, strict=True):
        places = [analysis.days.index(look.day) for look in result.looks]
        once = [(100 * look.lift.low, 100 * look.lift.high) for look in result.looks]
        always = [(100 * look.always_low, 100 * look.always_high) for look in result.looks]
        for ends, alpha, label in ((always, 0.18, "always valid"), (once, 0.45, "one look")):
            low, high = zip(*ends, strict=True)
            axes.fill_between(places, low, high, color=theme.BLUE, alpha=alpha, linewidth=0, label=label)
        axes.plot(places, [100 * look.lift.value for look in result.looks], color=theme.INK, linewidth=1.4)
        if result.decided is not None:
            decided = analysis.days.index(result.decided)
            axes.axvline(decided, color=theme.GREEN, linestyle="--", linewidth=1.2, label="safe")
        # The first always-valid intervals are very wide and would hide the rest.
        shown = [*once, *always[len(always) // 2 :]]
        _limit(axes, [end for ends in shown if all(map(isfinite, ends)) for end in ends])
    _label_days(panels[-1], analysis.days)
    theme.legend(panels[0], columns=3, place="above")
    return figure


def _panels(results: Sequence[Result]) -> tuple[Figure, list[Axes]]:
    """Return a panel for each metric, with a common axis of days."""
    figure = theme.new_figure(0.5 + 2.0 * len(results))
    panels: list[Axes] = list(figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0])
    for axes, result in zip(panels, results, strict=True):
        axes.axhline(0, color=theme.INK, linestyle=":", linewidth=1)
        axes.set_ylabel(f"{result.metric.title},\nlift in %")
        theme.style_axes(axes)
    return figure, panels


def _limit(axes: Axes, values: Sequence[float]) -> None:
    """Limit the y axis to these values and 0, with a margin; other data may be cut off."""
    ends = [0.0, *filter(isfinite, values)]
    low, high = min(ends), max(ends)
    margin = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _shade_periods(axes: Axes, analysis: Analysis, periods: Mapping[str, str] | None) -> None:
    """Shade the parts of the log; if there are several, label them above unless `periods` is None."""
    first, last = analysis.days.index(analysis.start), analysis.days.index(analysis.end)
    parts = {"before": (0, first - 1), "test": (first, last), "after": (last + 1, len(analysis.days) - 1)}
    shown = {part: ends for part, ends in parts.items() if ends[0] <= ends[1]}
    for part, (begin, end) in shown.items():
        axes.axvspan(begin - 0.5, end + 0.5, color=_SHADES[part], linewidth=0, zorder=0)
        if periods is not None and len(shown) > 1:
            middle = (begin + end) / 2
            axes.text(middle, 1.0, periods[part], transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.set_xlim(-0.5, len(analysis.days) - 0.5)


def _label_days(axes: Axes, days: Sequence[str]) -> None:
    """Label some days on the x axis."""

    def label(place: float, _: float) -> str:
        return theme.plain_label(days[int(place)]) if place == int(place) and 0 <= place < len(days) else ""

    axes.locator_params(axis="x", nbins=3 if theme.for_phone() else 6, integer=True)
    axes.xaxis.set_major_formatter(label)
    axes.set_xlabel("day")


# Plans


def print_plans(plans: Sequence[Plan], requested: Plan, console: Console) -> None:
    """Print the table, its basis, and the sentence of the requested plan."""
    table = plan_table(plans)
    print_tables(console, [table])
    for note in _plan_notes(table, requested):
        console.print(Text(note, style="dim"))
    console.print()
    console.print(Text(requested.sentence, style="bold"))


def write_plans(plans: Sequence[Plan], requested: Plan, curve: Sequence[Plan], path: str | Path) -> None:
    """Write the page: a table of `plans`, and the `curve` of plans for tests of increasing duration."""
    table = plan_table(plans)
    chart = Chart(partial(plan_plot, curve, requested), _PLAN_CAPTION.format(power=100 * requested.power))
    notes = _plan_notes(table, requested)
    sections = [
        Section("Users and days", paragraphs=[_ONE_OR_DAILY_LOOKS], tables=[table], notes=notes),
        Section("What a longer test finds", charts=[chart]),
    ]
    title = f"Plan of an A/B test: {requested.title}"
    start = "run the test with `urank serve`, or assign users yourself, and read it with `urank abtest analyse`."
    write_page(path, title, Summary(requested.sentence, next_step=start), sections)


def plan_table(plans: Sequence[Plan]) -> Table:
    """A row for each plan: users and days of given lifts, or lifts of given users or days."""
    once, daily = [plan.once for plan in plans], [plan.daily for plan in plans]
    if all(a.lift == b.lift for a, b in zip(once, daily, strict=True)):
        columns = {"lift": [f"{100 * each.lift:+.3g} %".replace("-", "−") for each in once]}
        for looks, found in {"once": once, "daily": daily}.items():
            columns[f"users an arm, {looks}"] = [f"{each.users:,}" for each in found]
            columns[f"days, {looks}"] = [_duration(each) for each in found]
    else:
        columns = {"days": [_duration(each) for each in once], "users an arm": [f"{each.users:,}" for each in once]}
        for looks, found in {"once": once, "daily": daily}.items():
            columns[f"lift, {looks}"] = [percent(each.lift, sign=True) for each in found]
    return Table.of_columns(columns)


def _duration(found: Horizon) -> str:
    if found.days is None:
        return "> 10 years" if found.extrapolated else UNKNOWN
    return f"{found.days:,}{'*' if found.extrapolated else ''}"


def _plan_notes(table: Table, plan: Plan) -> list[str]:
    """Explain the asterisks, if there are any, and the basis of the plan."""
    basis = (
        f"{plan.title} today: {plan.rate:.4g}; variance between users relative to its square: "
        f"{plan.relative_variance:.4g}; power {100 * plan.power:g} %, alpha {plan.alpha:g}, {100 * plan.share:g} % of "
        f"all users in both arms; always-valid intervals for an expected lift of {percent(plan.expected_lift)}."
    )
    return [*([_BEYOND] if any(cell.endswith("*") for row in table.rows for cell in row) else []), basis]


def plan_plot(curve: Sequence[Plan], requested: Plan) -> Figure:
    """Plot the lift that is found by days, or by users if the days are unknown."""
    dated = all(plan.once.days is not None for plan in curve)
    figure, axes = theme.new_axes("days" if dated else "users in each arm", "lift that is found, %", integer_x=True)
    for colour, label, found, planned in (
        (theme.BLUE, "one look", [plan.once for plan in curve], requested.once),
        (theme.GREEN, "daily looks", [plan.daily for plan in curve], requested.daily),
    ):
        places = [float((each.days or 0) if dated else each.users) for each in found]
        axes.plot(places, [100 * each.lift for each in found], color=colour, marker="o", markersize=3, label=label)
        at = planned.days if dated else planned.users
        if at is not None and at <= max(places):
            axes.vlines(at, 0, 100 * abs(planned.lift), color=colour, linestyle=":", linewidth=1)
    highest = [100 * plan.daily.lift for plan in curve if isfinite(plan.daily.lift)]
    axes.set_ylim(0, min(max(highest, default=1.0), 100 * 5 * abs(requested.daily.lift)))
    theme.legend(axes)
    return figure
