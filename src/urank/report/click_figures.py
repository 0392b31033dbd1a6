"""Figures of a fitted click model: its training, its calibration, and its rates by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from urank.evaluate.quality import Quality, Reliability
from urank.log.facts import wilson_interval
from urank.report.figures import COLOURS

__all__ = ["loss_curves", "rates_by_position", "reliability_plot"]


def loss_curves(history: Sequence[Mapping[str, float]]) -> Figure:
    """Train and validation loss over the rounds, the best round marked."""
    figure, axes = _axes("round", "log loss")
    rounds = [entry["round"] for entry in history]
    losses = {
        name: np.array([entry.get(f"{name}_loss") for entry in history], dtype=float) for name in ("train", "valid")
    }
    for colour, (name, loss) in zip(COLOURS, losses.items(), strict=False):
        if np.isfinite(loss).any():
            axes.plot(rounds, loss, color=colour, marker="o", markersize=3, linewidth=1.5, label=name)
    if np.isfinite(losses["valid"]).any():
        best = int(np.nanargmin(losses["valid"]))
        axes.axvline(rounds[best], color="#57606a", linestyle=":", linewidth=1, label="best")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize="small")
    return figure


def reliability_plot(reliabilities: Mapping[str, Reliability]) -> Figure:
    """Observed against predicted rates; a calibrated model stays on the diagonal."""
    figure, axes = _axes("predicted click rate", "observed click rate", size=(4.6, 4.2))
    top = 0.0
    for colour, (name, bins) in zip(COLOURS, reliabilities.items(), strict=False):
        observed, low, high = np.array(bins.observed), np.array(bins.low), np.array(bins.high)
        # Rounding can put an interval without clicks a hair beyond its rate, and a length must not be negative.
        lengths = np.maximum([observed - low, high - observed], 0.0)
        axes.errorbar(
            bins.predicted, observed, lengths, color=colour, marker="o", markersize=3, linewidth=1.2, label=name
        )
        top = max([top, *bins.predicted, *bins.high])
    axes.plot([0, top], [0, top], color="#57606a", linestyle=":", linewidth=1, zorder=0)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize="small")
    return figure


def rates_by_position(qualities: Mapping[str, Quality]) -> Figure:
    """Predicted click rates by position, a line for each model, and the observed ones with their 95 % interval."""
    figure, axes = _axes("position", "click rate")
    first = next(iter(qualities.values()))
    shown = [k for k, each in enumerate(first.by_position) if each.rows > 0]
    rows = np.array([first.by_position[k].rows for k in shown], dtype=np.int64)
    clicks = np.array([first.by_position[k].clicks for k in shown], dtype=np.int64)
    low, high = wilson_interval(clicks, rows)
    observed = clicks / rows
    lengths = np.maximum([observed - low, high - observed], 0.0)
    position = [k + 1 for k in shown]
    axes.errorbar(
        position, observed, lengths, color="#1f2328", marker="o", markersize=3, linestyle="none", label="observed"
    )
    for colour, (name, each) in zip(COLOURS, qualities.items(), strict=False):
        axes.plot(position, [each.by_position[k].predicted for k in shown], color=colour, linewidth=1.3, label=name)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize="small")
    return figure


def _axes(x: str, y: str, size: tuple[float, float] = (6.4, 3.4)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size)
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    return figure, axes
