"""The theme of all plots: colours, axes, common marks, and output as SVG.

matplotlib takes about 0.3 s to import and is imported on first use only, so reports may import this module at the top.
"""

from __future__ import annotations

import warnings
from io import StringIO
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#0e7490", "#bf3989", "#57606a")
BLUE, RED, GREEN, BROWN, *_, GREY = COLOURS
INK, GRID = "#1f2328", "#d0d7de"
MARKERS = "os^Dv"
_LEGEND_PLACES: dict[str, dict[str, Any]] = {
    "above": {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0},
    "right": {"loc": "upper left", "bbox_to_anchor": (1, 1)},
}


def new_figure(width: float = 6.4, height: float = 3.4, *, layout: Literal["constrained"] | None = None) -> Figure:
    """Return an empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def new_axes(
    x_label: str, y_label: str, *, width: float = 6.4, height: float = 3.4, integer_x: bool = False
) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes in the theme, if asked with whole numbers as x ticks."""
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    axes.set(xlabel=x_label, ylabel=y_label)
    if integer_x:
        axes.locator_params(axis="x", integer=True)
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes, grid: Literal["x", "y", "both"] = "y") -> None:
    """Remove the frame above and to the right, and draw light grid lines behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def legend(axes: Axes, columns: int = 1, *, place: str = "best") -> None:
    """Add a legend if there are labels; `place` is a location of matplotlib, or "above" or "right" of the axes."""
    options = _LEGEND_PLACES.get(place, {"loc": place})
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize="small", ncols=columns, **options)


def draw_interval(
    axes: Axes, at: float, ends: Sequence[float], *, colour: str, upright: bool = False, label: str | None = None
) -> None:
    """Draw a point with its interval (value, low, high) as a bar; the bar is omitted if an end is not finite."""
    value, low, high = ends
    if isfinite(low) and isfinite(high):
        (axes.vlines if upright else axes.hlines)(at, low, high, color=colour, linewidth=2)
    x, y = (at, value) if upright else (value, at)
    axes.plot(x, y, color=colour, marker="o", markersize=5, linestyle="none", label=label)


def difference_colour(low: float, high: float) -> str:
    """Return green for an interval above 0, red for one below, grey for one that contains 0."""
    return GREEN if low > 0 else RED if high < 0 else GREY


def draw_truth(axes: Axes, x: Sequence[float], y: Sequence[float], label: str = "truth") -> None:
    """Mark known values, such as the truth of a simulation, with diamonds; those that are not finite are omitted."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if isfinite(a) and isfinite(b)]
    if known:
        outline = {"marker": "D", "markersize": 7, "markerfacecolor": "none", "markeredgecolor": INK}
        axes.plot(*zip(*known, strict=True), linestyle="none", label=label, **outline)  # type: ignore[arg-type]


def plain_label(name: str) -> str:
    """Return a name as a matplotlib label, without math between dollar signs and not hidden by a leading underscore.

    >>> plain_label("$10_$20")
    '\\\\$10_\\\\$20'
    """
    shown = name.replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown


def wrapped_label(name: str, width: int = 24) -> str:
    """Return `plain_label` of a name, wrapped to several lines if it is long."""
    return "\n".join(plain_label(line) for line in wrap(name, width, break_on_hyphens=False) or [name])


def svg(figure: Figure) -> str:
    """Return the figure as an SVG element; the output is deterministic."""
    import matplotlib

    text = StringIO()
    settings = {"svg.hashsalt": "urank", "svg.fonttype": "none", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():  # type: ignore[arg-type]
        # Browsers draw the text, and their fonts have more glyphs than the one used here for measuring.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font")
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
