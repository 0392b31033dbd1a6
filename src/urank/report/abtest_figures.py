"""Figures of an A/B test: lifts, each day alone (the paper's Figures 5 and 6), and what one who looks daily saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from urank.report.figures import COLOURS, plain_label

if TYPE_CHECKING:
    from urank.abtest.results import Analysis, Result

__all__ = ["PERIODS", "days_plot", "lift_plot", "looks_plot"]

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
