"""The theme of all plots: colours, axes, common marks, and output as SVG.

The colours are those of `templates/theme.css`, the style sheet of reports and of the playground. matplotlib is an extra
and takes about 0.3 s to import; it is imported on first use only, so reports may import this module at the top.
"""

from __future__ import annotations

import re
import warnings
from contextvars import ContextVar
from functools import cache
from importlib.resources import files
from io import StringIO
from math import ceil, isfinite
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from urank.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@cache
def theme_css() -> str:
    """Return the style sheet of reports and of the playground."""
    return files("urank.report").joinpath("templates", "theme.css").read_text(encoding="utf-8")


_THEME: dict[str, str] = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", theme_css().partition("@media")[0]))
"""Variables of the style sheet, and their colours on a light screen."""
COLOURS = tuple(colour for name, colour in _THEME.items() if name.startswith("tone-"))
BLUE, GREEN, RED, GREY = COLOURS[0], _THEME["good"], _THEME["bad"], _THEME["muted"]
INK, GRID, SHADE, BLUE_SHADE = (_THEME[name] for name in ("text", "line", "raised", "accent-soft"))
MARKERS = "os^Dv"
_WIDTH = ContextVar("the width of new figures, in inches", default=6.4)
_PHONE = 5.0
"""Figures of this width or less are for phones."""
_LEGEND_PLACES: dict[str, dict[str, Any]] = {
    "above": {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0},
    "right": {"loc": "upper left", "bbox_to_anchor": (1, 1)},
}


def new_figure(height: float = 3.4) -> Figure:
    """Return an empty figure of a height in inches, in the width that `themed_svg` asks for."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("charts need matplotlib, which is not installed; run pip install 'urank[report]'") from error

    return Figure(figsize=(_WIDTH.get(), height), layout="constrained")


def new_axes(x_label: str, y_label: str, *, height: float = 3.4, integer_x: bool = False) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes in the theme, if asked with whole numbers as x ticks."""
    figure = new_figure(height)
    axes = figure.add_subplot()
    axes.set(xlabel=x_label, ylabel=y_label)
    if integer_x:
        axes.locator_params(axis="x", integer=True)
    style_axes(axes)
    return figure, axes


def position_axes(y_label: str, positions: int, *, height: float = 3.4) -> tuple[Figure, Axes]:
    """Return a figure with axes over positions 1 … K."""
    figure, axes = new_axes("position", y_label, height=height)
    axes.set_xlim(1 - 0.03 * positions, positions * 1.03)
    axes.set_xticks(position_ticks(positions))
    return figure, axes


def position_ticks(positions: int) -> list[int]:
    """Return about ten ticks of an axis over positions 1 … K, the first at 1.

    >>> position_ticks(5), position_ticks(40)
    ([1, 2, 3, 4, 5], [1, 5, 10, 15, 20, 25, 30, 35, 40])
    """
    power = 10 ** max(len(str(ceil(positions / 10))) - 1, 0)
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 10 >= positions)
    return [1, *range(max(step, 2), positions + 1, step)]


def style_axes(axes: Axes, grid: Literal["x", "y", "both"] = "y") -> None:
    """Remove the frame above and to the right, and draw light grid lines behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def legend(axes: Axes, columns: int = 1, *, place: str = "best") -> None:
    """Add a legend if there are labels; `place` is a location of matplotlib, or "above" or "right" of the axes."""
    labels = axes.get_legend_handles_labels()[1]
    phone = for_phone()
    options = _LEGEND_PLACES.get("above" if phone and place == "right" else place, {"loc": place})
    if labels:
        columns = 2 if phone and place == "right" and max(map(len, labels)) < 20 else legend_columns(columns)
        axes.legend(frameon=False, fontsize="small", ncols=columns, **options)


def legend_columns(most: int) -> int:
    """Return the number of columns of a legend: on a phone two at most."""
    return min(most, 2) if for_phone() else most


def for_phone() -> bool:
    """Return whether a figure is being drawn in the width of a phone."""
    return _WIDTH.get() <= _PHONE


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
        outline: dict[str, Any] = {"marker": "D", "markersize": 7, "markerfacecolor": "none", "markeredgecolor": INK}
        axes.plot(*zip(*known, strict=True), linestyle="none", label=label, **outline)


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


def svg(figure: Figure, salt: str = "") -> str:
    """Return the figure as an SVG element; the output is deterministic, and ids depend on the salt."""
    import matplotlib

    text = StringIO()
    settings: dict[Any, Any] = {"svg.hashsalt": f"urank{salt}", "svg.fonttype": "none", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Browsers draw the text, and their fonts have more glyphs than the one used here for measuring.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font")
        warnings.filterwarnings("ignore", r"constrained_layout not applied")  # very long names: they overlap the axes
        box = "tight" if figure.get_layout_engine() is None else None
        figure.savefig(text, format="svg", bbox_inches=box, metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def themed_svg(draw: Callable[[], Figure], width: float) -> str:
    """Draw a figure in a width, in inches, with colours that follow the style sheet."""
    previous = _WIDTH.set(width)
    try:
        # A salt for each width: an id must not refer to another rendering, which may be hidden.
        drawn = svg(draw(), salt=f"{width:g}")
    finally:
        _WIDTH.reset(previous)
    variables = {**{colour: name for name, colour in _THEME.items()}, "#000000": "text"}
    return re.sub(rf"(?<=: )({'|'.join(variables)})\b", lambda found: f"var(--{variables[found[0]]})", drawn)
