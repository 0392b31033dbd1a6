"""The figure of a guardrail: what each level would earn, and how much it moves."""

from __future__ import annotations

from math import isfinite, nan
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from urank.report.evaluation_tables import all_positions, units_of
from urank.report.figures import COLOURS

if TYPE_CHECKING:
    from urank.evaluate.guardrail import GuardLevels

__all__ = ["guard_plot"]

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
