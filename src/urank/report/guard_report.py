"""The report of a guardrail: what each level would earn and how much it moves, in the terminal and as a page."""

from __future__ import annotations

from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from urank.report.evaluation_report import all_positions, how_it_is_made, how_it_is_supported, support_table, units_of
from urank.report.style import COLOURS
from urank.report.tables import UNKNOWN, Table, Units, bullet, number, p_text, percent, terminal_table

if TYPE_CHECKING:
    from urank.evaluation.guard_sweep import GuardLevel, GuardLevels
    from urank.report.page import Section

__all__ = ["guard_plot", "guard_sections", "guard_table", "print_guard", "write_guard"]

_BLUE, _RED, _GREEN, *_, _GREY = COLOURS
_INK = "#1f2328"


def guard_plot(levels: GuardLevels) -> Figure:
    """The difference of each level to the logged order, which is the line at 0, above the places that items move."""
    figure = Figure(figsize=(6.4, 4.4))
    gains, moves = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_gains(levels, gains)
    moves.bar(range(len(levels.levels)), [level.moves.mean for level in levels.levels], color=_BLUE, width=0.5)
    moves.set_ylabel("places moved")
    moves.set_xticks(range(len(levels.levels)), [level.name for level in levels.levels])
    for axes in (gains, moves):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure


def _draw_gains(levels: GuardLevels, axes: Axes) -> None:
    """Means with their intervals as upright bars: green above the logged order, red below, grey when it cannot be told;
    the truth as diamonds."""
    units, K = units_of(levels.evaluation), all_positions(levels.evaluation)
    scale = 100 / units.base if units.in_percent else 1.0
    axes.axhline(0, color=_INK, linestyle=":", linewidth=1, label="logged order")
    for at, level in enumerate(levels.levels):
        gain = level.difference
        colour = _GREEN if gain.low > 0 else _RED if gain.high < 0 else _GREY
        if isfinite(gain.low) and isfinite(gain.high):
            axes.vlines(at, gain.low * scale, gain.high * scale, color=colour, linewidth=2)
        axes.plot(at, gain.mean * scale, color=colour, marker="o", markersize=5, linestyle="none")
    truth = [nan if (true := level.value.true_difference) is None else true.mean for level in levels.levels]
    if any(map(isfinite, truth)):
        base = (levels.evaluation.policies[0].true or {}).get(K, nan)
        axes.plot(
            range(len(truth)),
            [each * (100 / (base or nan) if units.in_percent else 1.0) for each in truth],
            linestyle="none",
            marker="D",
            markersize=7,
            markerfacecolor="none",
            markeredgecolor=_INK,
            label="truth",
        )
    axes.set_ylabel(f"{levels.evaluation.measure}@{K} vs logged" + (", %" if units.in_percent else ""))
    axes.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)


_KINDS = {
    "shift": "No item moves more than so many places from its logged rank. Places are filled from the top, each with "
    "the most wanted item that may come there, unless another must not fall further.",
    "blend": "Items are sorted by the mean of their logged rank and the rank that the policy wants, of which the level "
    "is the share; ties stay in the logged order.",
}
_RULE = (
    "Recommended is the smallest level whose gain has an interval clear of 0 and is at least half of the full gain's "
    "estimate. Each interval holds for its own level. A guarded order follows the list that was shown, so the "
    "propensities of the log, if it has any, are not used."
)


def print_guard(levels: GuardLevels, console: Console) -> None:
    """Print what a person should know, the recommendation last, where the eye is when it ends.

    Warnings are those of the level that it tells of, or of the full order; the page has all of them.
    """
    console.print(terminal_table(guard_table(levels)))
    console.print()
    meant = levels.recommended or levels.levels[-1]
    warnings = [
        *levels.evaluation.specification.warnings,
        *(f"{meant.name}: {sentence}" for sentence in meant.value.support.warnings),
    ]
    for warning in warnings:
        bullet(console, "beware", Text(warning))
    if warnings:
        console.print()
    console.print(Text(levels.recommendation, style="bold yellow" if levels.recommended is None else "bold green"))


def write_guard(levels: GuardLevels, path: str | Path) -> None:
    """Write the page with the plot."""
    from urank.report.page import write_page  # matplotlib is slow to load

    lead = f"{levels.recommendation[0].upper()}{levels.recommendation[1:]}."
    write_page(path, f"A guard on {levels.policy}", lead, guard_sections(levels), footer="urank guard")


def guard_sections(levels: GuardLevels) -> list[Section]:
    """What the page tells, in order."""
    from urank.report.page import Chart, Section

    evaluation = levels.evaluation
    mark = " A diamond is the truth." if any(level.true is not None for level in levels.levels) else ""
    caption = (
        "Above, differences to the logged order, query by query, with 95 % intervals: green for more, red for less, "
        f"grey for what cannot be told.{mark} Below, how many places an item moves in the mean."
    )
    sections = [
        Section(
            "Level by level",
            paragraphs=[_KINDS[levels.kind], _RULE],
            charts=[Chart(guard_plot(levels), caption)],
            tables=[guard_table(levels)],
        ),
        Section("Beware", bullets=evaluation.warnings) if evaluation.warnings else None,
        Section(
            "What the log can tell", paragraphs=[how_it_is_supported(evaluation)], tables=[support_table(evaluation)]
        ),
        Section("How these numbers are made", paragraphs=list(how_it_is_made(evaluation))),
    ]
    return [section for section in sections if section is not None]


def guard_table(levels: GuardLevels) -> Table:
    """A row for the logged order and one for each level; the columns that matter most come first, since a narrow
    terminal leaves out the last."""
    units, K = units_of(levels.evaluation), all_positions(levels.evaluation)
    logged, found = levels.evaluation.policies[0], levels.levels
    gains = [level.difference for level in found]
    columns: dict[str, list[str]] = {
        "level": ["logged", *(level.name for level in found)],
        f"{levels.evaluation.measure}@{K}": [
            units.amount(each.mean) for each in (logged.utility[K], *(level.utility for level in found))
        ],
        "vs logged": [UNKNOWN, *(units.change(gain.mean) for gain in gains)],
        "95 % interval": [UNKNOWN, *(units.changes(gain.low, gain.high) for gain in gains)],
        "mean move": ["0.0", *(number(level.moves.mean, 1) for level in found)],
        "largest": ["0", *(str(level.moves.largest) for level in found)],
        "other first": [percent(0), *(percent(level.moves.other_first) for level in found)],
        "p": [UNKNOWN, *(p_text(gain.p_value) for gain in gains)],
    }
    if logged.true is not None:
        columns[f"true@{K}"] = [units.amount(logged.true[K]), *(units.amount(_true(level)) for level in found)]
        true_units = Units.of(logged.true[K])
        columns["true gain"] = [UNKNOWN, *(true_units.change(_true_gain(level)) for level in found)]
    return Table(tuple(columns), list(zip(*columns.values(), strict=True)))


def _true(level: GuardLevel) -> float:
    return nan if level.true is None else level.true


def _true_gain(level: GuardLevel) -> float:
    return nan if level.value.true_difference is None else level.value.true_difference.mean
