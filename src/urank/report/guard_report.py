"""The report of a guard sweep: utility and moves of each level, in the terminal and as a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from urank.report.evaluation_report import ReferenceValues, evaluation_units, method_paragraphs, support_section
from urank.report.page import Chart, Section, Summary, notebook_html, write_page
from urank.report.style import BLUE, INK, difference_colour, draw_interval, draw_truth, legend, new_figure, style_axes
from urank.report.tables import UNKNOWN, Table, as_sentence, number, p_text, percent, print_tables, print_warnings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from urank.evaluation.guard_sweep import GuardLevels


_KINDS = {
    "shift": "No item moves more than the given number of places from its logged rank. Places are filled from the top, "
    "each with the most wanted item that may move there, unless another must not fall further.",
    "blend": "Items are sorted by the weighted mean of their logged rank and the policy's rank, whose weight is the "
    "level; ties stay in the logged order.",
}
_RULE = (
    "The recommended level is the smallest whose gain has an interval above 0 and is at least half of the full gain's "
    "estimate. Each interval holds for its own level. A guarded order follows the logged list, so the propensities of "
    "the log, if it has any, are not used."
)


def print_guard(levels: GuardLevels, console: Console, reference: ReferenceValues | None = None) -> None:
    """Print the table, the warnings and, last, the recommendation.

    The warnings are those of the recommended level, or of the full order; the page has all of them.
    """
    print_tables(console, [guard_table(levels, reference)])
    subject = levels.recommended or levels.levels[-1]
    own = [f"{subject.name}: {sentence}" for sentence in subject.value.support.warnings]
    print_warnings(console, [*levels.evaluation.specification.warnings, *own])
    console.print(Text(levels.recommendation, style="bold yellow" if levels.recommended is None else "bold green"))


def write_guard(levels: GuardLevels, path: str | Path, reference: ReferenceValues | None = None) -> None:
    """Write the page with the plot."""
    write_page(path, f"A guard on {levels.policy}", guard_summary(levels), guard_sections(levels, reference))


def guard_html(levels: GuardLevels) -> str:
    """Return the view in a notebook."""
    return notebook_html(guard_summary(levels), guard_sections(levels)[:1])


def guard_summary(levels: GuardLevels) -> Summary:
    """Return the recommendation, and how to follow it."""
    chosen = levels.recommended
    if chosen is None:
        following = "keep the logged order, and collect more clicks or a longer log."
        return Summary(as_sentence(levels.recommendation), next_step=following)
    option = "" if chosen.guard is None else f" --guard {chosen.guard}"
    following = f"`urank rank MODEL CANDIDATES{option}` ranks like this; `urank abtest plan` sizes a live test."
    return Summary(as_sentence(levels.recommendation), next_step=following, tone="good")


def guard_sections(levels: GuardLevels, reference: ReferenceValues | None = None) -> list[Section]:
    """Return the sections of the page."""
    evaluation = levels.evaluation
    mark = "" if reference is None else f" A diamond is the {reference.noun}."
    caption = (
        "Above, differences to the logged order, paired by query, with 95 % intervals: green for more, red for less, "
        f"grey for not significant.{mark} Below, the mean number of places that an item moves."
    )
    chart, rules = Chart(partial(guard_plot, levels, reference), caption), [_KINDS[levels.kind], _RULE]
    sections = [
        Section("Level by level", paragraphs=rules, charts=[chart], tables=[guard_table(levels, reference)]),
        Section("Beware", bullets=evaluation.warnings) if evaluation.warnings else None,
        support_section(evaluation),
        Section("How these numbers are made", paragraphs=list(method_paragraphs(evaluation, reference))),
    ]
    return [section for section in sections if section is not None]


def guard_table(levels: GuardLevels, reference: ReferenceValues | None = None) -> Table:
    """Return a row for the logged order and one for each level.

    The most important columns come first, since a narrow terminal omits the last.
    """
    units, K = evaluation_units(levels.evaluation), levels.evaluation.positions
    logged, found = levels.evaluation.policies[0], levels.levels
    gains, utilities = [level.difference for level in found], [logged.utility[K], *(level.utility for level in found)]
    columns = {
        "level": ["logged", *(level.name for level in found)],
        f"{levels.evaluation.measure}@{K}": [units.amount(each.mean) for each in utilities],
        "vs logged": [UNKNOWN, *(units.change(gain.mean) for gain in gains)],
        "95 % interval": [UNKNOWN, *(units.changes(gain.low, gain.high) for gain in gains)],
        "mean move": ["0.0", *(number(level.moves.mean, 1) for level in found)],
        "largest": ["0", *(str(level.moves.largest) for level in found)],
        "other first": [percent(0), *(percent(level.moves.other_first) for level in found)],
        "p": [UNKNOWN, *(p_text(gain.p_value) for gain in gains)],
    }
    if reference is not None:
        columns |= reference.columns([logged.name, *(level.value.name for level in found)], units, K)
    return Table.of_columns(columns)


def guard_plot(levels: GuardLevels, reference: ReferenceValues | None = None) -> Figure:
    """Plot the difference of each level to the logged order, and below it the mean number of places moved."""
    figure = new_figure(4.4)
    gains, moves = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_gains(levels, gains, reference)
    moves.bar(range(len(levels.levels)), [level.moves.mean for level in levels.levels], color=BLUE, width=0.5)
    moves.set_ylabel("places moved")
    moves.set_xticks(range(len(levels.levels)), [level.name for level in levels.levels])
    for axes in (gains, moves):
        style_axes(axes)
    return figure


def _draw_gains(levels: GuardLevels, axes: Axes, reference: ReferenceValues | None) -> None:
    evaluation, units = levels.evaluation, evaluation_units(levels.evaluation)
    scale = 100 / units.base if units.in_percent else 1.0
    axes.axhline(0, color=INK, linestyle=":", linewidth=1, label="logged order")
    for at, gain in enumerate(level.difference for level in levels.levels):
        ends = [each * scale for each in (gain.mean, gain.low, gain.high)]
        draw_interval(axes, at, ends, colour=difference_colour(gain.low, gain.high), upright=True)
    if reference is not None:
        names = [level.value.name for level in levels.levels]
        values = reference.scaled_differences(names, evaluation.policies[0].name, in_percent=units.in_percent)
        draw_truth(axes, range(len(names)), values, reference.noun)
    axes.set_ylabel(f"{evaluation.measure}@{evaluation.positions} vs logged" + (", %" if units.in_percent else ""))
    legend(axes, 2, place="above")
