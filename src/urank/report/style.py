"""Figures as SVG text, ready to stand in a page without any other file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from io import StringIO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from urank.log.inspection import PositionRates

__all__ = ["COLOURS", "click_curves", "link_map", "plain_axes", "plain_label", "svg"]

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#0e7490", "#bf3989", "#57606a")


def svg(figure: Figure) -> str:
    """The figure as an SVG element; the same figure always gives the same text."""
    text = StringIO()
    settings = {"svg.hashsalt": "urank", "svg.fonttype": "none", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():  # type: ignore[arg-type]
        # The letters are drawn by the browser, whose fonts have more of them than the one that measures here.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font")
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def click_curves(curves: Mapping[str, PositionRates]) -> Figure:
    """Click rate by position, a line for each group (the paper's Figure 1), with its 95 % interval as a band.

    Positions that a group was shown at a tenth as often as at its most frequent one, or less, are left out: their
    wide intervals would hide the rest. The bands are left out when there are more than three groups.
    """
    figure = Figure(figsize=(6.4, 3.4))
    axes = plain_axes(figure, "position", "click rate")
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        often = np.array(curve.impressions) > 0.1 * max(curve.impressions)
        position, rate = np.array(curve.position)[often], np.array(curve.rate)[often]
        axes.plot(position, rate, color=colour, marker="o", markersize=3, linewidth=1.5, label=plain_label(name))
        if len(curves) <= 3:
            low, high = np.array(curve.low)[often], np.array(curve.high)[often]
            axes.fill_between(position, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_ylim(bottom=0)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize="small")
    return figure


def plain_label(name: str) -> str:
    """A name as a label that shows it as it is: no mathematics between dollars, no hiding behind an underscore.

    >>> plain_label("$10_$20")
    '\\\\$10_\\\\$20'
    """
    shown = name.replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown


def plain_axes(figure: Figure, across: str, up: str) -> Axes:
    """Axes with whole numbers across, light lines, and no frame above and to the right."""
    axes = figure.add_subplot()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    return axes


def link_map(shared: NDArray[np.int64]) -> Figure:
    """How many items were seen at both of two positions, as a map; the diagonal is left out."""
    figure = Figure(figsize=(4.4, 3.6))
    axes = figure.add_subplot()
    links = shared.astype(float)
    np.fill_diagonal(links, np.nan)
    K = len(links)
    image = axes.imshow(links, cmap="Blues", vmin=0, extent=(0.5, K + 0.5, K + 0.5, 0.5), interpolation="nearest")
    axes.set_xlabel("position")
    axes.set_ylabel("position")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, label="items seen at both")
    return figure
