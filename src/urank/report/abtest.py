"""The report of an A/B test: in the terminal, and as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from urank.report.abtest_tables import arm_table, check_table, checks, level, result_table
from urank.report.abtest_words import how_it_is_made, outcome, when_it_was_safe
from urank.report.terminal import bullet, terminal_table

if TYPE_CHECKING:  # matplotlib is slow to load
    from urank.abtest.results import Analysis, Result
    from urank.report.page import Section

__all__ = ["OUTCOMES", "analysis_lead", "analysis_sections", "print_analysis", "write_analysis"]

OUTCOMES = {1: "bold green", 0: "bold yellow", -1: "bold red"}
_LEADING = "ctr"

_LIFT = (
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
    from urank.report.abtest_figures import lift_plot
    from urank.report.page import Chart, Section

    charts = [
        Chart(
            lift_plot([result for result in analysis.results if result.treatment == treatment], truth),
            f"{treatment}: {_LIFT.format(level=level(analysis.alpha))}",
        )
        for treatment in analysis.treatments
    ]
    return Section("Lift", charts=charts, tables=[result_table(analysis)])


def _days(
    analysis: Analysis, true_lifts: Mapping[str, float] | None, periods: Mapping[str, str] | None
) -> Iterator[Section]:
    """Left out when there is but one day."""
    from urank.report.abtest_figures import PERIODS, days_plot
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
    from urank.report.abtest_figures import looks_plot
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
