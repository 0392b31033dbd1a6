"""Figures of an evaluation: what each policy would earn, how that differs from the logged order, and by cutoff."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, nan
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from urank.report.evaluation_tables import all_positions, ranked, units_of
from urank.report.figures import COLOURS, plain_label

if TYPE_CHECKING:
    from urank.evaluate.compare import Evaluation
    from urank.evaluate.stats import Interval

__all__ = ["cutoffs_plot", "differences_plot", "estimates_plot"]

_BLUE, _RED, _GREEN, *_, _GREY = COLOURS
_INK = "#1f2328"
_MARKERS = "os^Dv"
_NAME_WIDTH = 24


def estimates_plot(evaluation: Evaluation) -> Figure:
    """A forest plot: the estimate of each policy with its 95 % interval, a line at the logged order, the truth."""
    policies, K = ranked(evaluation), all_positions(evaluation)
    intervals = [policy.utility[K] for policy in policies]
    truth = [nan if policy.true is None else policy.true[K] for policy in policies]
    return _forest(
        [policy.name for policy in policies],
        intervals,
        truth,
        [_BLUE] * len(policies),
        across=f"{evaluation.measure}@{K}, a list",
        line=intervals[0].mean,
    )


def differences_plot(evaluation: Evaluation) -> Figure:
    """The same of the differences to the logged order: green above it, red below, grey when that cannot be told."""
    units, K = units_of(evaluation), all_positions(evaluation)
    shown = [(policy, found) for policy in ranked(evaluation) if (found := policy.difference) is not None]
    true_base = (evaluation.policies[0].true or {}).get(K, nan)
    scale, true_scale = (100 / units.base, 100 / (true_base or nan)) if units.in_percent else (1.0, 1.0)
    return _forest(
        [policy.name for policy, _ in shown],
        [replace(found, mean=found.mean * scale, low=found.low * scale, high=found.high * scale) for _, found in shown],
        [nan if (true := policy.true_difference) is None else true.mean * true_scale for policy, _ in shown],
        [_GREEN if found.low > 0 else _RED if found.high < 0 else _GREY for _, found in shown],
        across=f"difference in {evaluation.measure}@{K}" + (", %" if units.in_percent else ""),
        line=0.0,
    )


def cutoffs_plot(evaluation: Evaluation) -> Figure:
    """The estimates at each cutoff with their 95 % intervals, policies side by side."""
    policies = ranked(evaluation)
    places = list(policies[0].utility)
    figure = Figure(figsize=(6.4, 3.4))
    axes = _bare_axes(figure, "y")
    steps = np.linspace(-0.3, 0.3, len(policies)) if len(policies) > 1 else np.zeros(1)
    for number, (policy, step) in enumerate(zip(policies, steps, strict=True)):
        colour, marker = COLOURS[number % len(COLOURS)], _MARKERS[number // len(COLOURS) % len(_MARKERS)]
        found = [policy.utility[k] for k in places]
        at = np.arange(len(places)) + step
        bars = [(x, each.low, each.high) for x, each in zip(at, found, strict=True) if _bounded(each)]
        if bars:
            axes.vlines(*zip(*bars, strict=True), color=colour, linewidth=1.2)
        means = [each.mean for each in found]
        label = plain_label(policy.name)
        axes.plot(at, means, color=colour, marker=marker, markersize=4, linestyle="none", label=label)
    axes.set_xticks(range(len(places)), [f"{evaluation.measure}@{k}" for k in places])
    axes.set_ylabel(f"{evaluation.measure} a list")
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _forest(
    names: Sequence[str],
    intervals: Sequence[Interval],
    truth: Sequence[float],
    colours: Sequence[str],
    *,
    across: str,
    line: float,
) -> Figure:
    """Means with their intervals as horizontal bars, the first at the top."""
    figure = Figure(figsize=(6.4, 0.9 + 0.36 * len(names)))
    axes = _bare_axes(figure, "x")
    if isfinite(line):
        axes.axvline(line, color=_INK, linestyle=":", linewidth=1, label="logged order")
    for row, (interval, colour) in enumerate(zip(intervals, colours, strict=True)):
        if _bounded(interval):
            axes.hlines(row, interval.low, interval.high, color=colour, linewidth=2)
        axes.plot(interval.mean, row, color=colour, marker="o", markersize=5, linestyle="none")
    if np.isfinite(truth).any():
        axes.plot(
            truth,
            range(len(names)),
            linestyle="none",
            marker="D",
            markersize=7,
            markerfacecolor="none",
            markeredgecolor=_INK,
            label="truth",
        )
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(across)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    return figure


def _bare_axes(figure: Figure, lines: str) -> Axes:
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if lines == "x" else "y", color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _bounded(interval: Interval) -> bool:
    return isfinite(interval.low) and isfinite(interval.high)


def _label(name: str) -> str:
    """A name beside its row, in several lines when it is long."""
    return "\n".join(plain_label(line) for line in wrap(name, _NAME_WIDTH) or [name])
