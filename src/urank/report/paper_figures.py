"""Figures of a reproduction: clicks by method, clicks by position (Figure 4), and the lists of one query (Figure 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite, nan
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from urank.report.figures import COLOURS, plain_axes, plain_label
from urank.report.numbers import number
from urank.report.paper_tables import CLICKS, best_baseline, figure_text, mean_of

if TYPE_CHECKING:
    from urank.paper.results import ListExample, PositionCurve, Row

__all__ = ["INK", "KINDS", "clicks_plot", "lists_plot", "numbered", "positions_plot"]

_BLUE, *_, _GREY = COLOURS
KINDS = {"baseline": _GREY, "oracle": "#d0d7de", "ours": _BLUE}
INK = "#1f2328"
_ORANGE = "#e8590c"
_MARKERS = "os^Dv"
_DIAMOND: dict[str, Any] = {
    "marker": "D",
    "markersize": 5,
    "markerfacecolor": _ORANGE,
    "markeredgecolor": "white",
    "zorder": 4,
}
_NAME_WIDTH = 28
_MOST_NUMBERED = 12
"""With more items than this, the cells are too small for numbers."""
_MOST_LABELLED = 40


def clicks_plot(
    rows: Sequence[Row],
    metric: str = CLICKS,
    unit: str = "clicks a query",
    *,
    marks: Mapping[str, float] | None = None,
    marked: str = "true",
) -> Figure:
    """A bar for each row of a table, the first at the top, with its deviation and a line at the best baseline.

    Args:
        rows: of the table.
        metric: what the bars are.
        unit: what they are in.
        marks: key of a row -> where a diamond stands on its bar; none when left out.
        marked: what the legend calls the diamonds.
    """
    figure = Figure(figsize=(6.4, 0.9 + 0.32 * len(rows)))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    ends = [_bar(axes, place, row, metric, (marks or {}).get(row.key, nan)) for place, row in enumerate(rows)]
    keys: list[Artist] = [_kind_patch(kind) for kind in KINDS if any(row.kind == kind for row in rows)]
    baseline = best_baseline(rows, metric)
    if baseline is not None:
        at = mean_of(baseline, metric)
        keys.append(axes.axvline(at, color=INK, linestyle=":", linewidth=1, label="best baseline"))
    if marks:
        keys.append(Line2D([], [], linestyle="none", label=marked, **_DIAMOND))
    axes.set_yticks(range(len(rows)), [_lines(row.name) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * max(filter(isfinite, ends), default=1.0) or 1.0)
    axes.set_xlabel(unit)
    axes.legend(
        handles=keys,
        frameon=False,
        fontsize="small",
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(keys),
        borderaxespad=0,
    )
    return figure


def _bar(axes: Axes, place: int, row: Row, metric: str, mark: float) -> float:
    """Draw one, and tell how far it reaches with its whisker and its mark."""
    mean, deviation = mean_of(row, metric), row.deviation.get(metric, nan)
    star = "*" if isfinite(mean) and row.significant(metric) else ""
    end = mean + (deviation if isfinite(deviation) else 0.0)
    if isfinite(mean):
        hatch = "///" if row.kind == "oracle" else None
        axes.barh(place, mean, height=0.66, color=KINDS[row.kind], edgecolor="white", linewidth=0, hatch=hatch)
        if isfinite(deviation):
            axes.errorbar(mean, place, xerr=deviation, fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
    if isfinite(mark):
        axes.plot(mark, place, **_DIAMOND)
        end = max(mark, end) if isfinite(end) else mark
    axes.annotate(
        figure_text(metric, mean) + star,
        (end if isfinite(end) else 0.0, place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize="small",
        fontweight="bold" if row.kind == "ours" else "normal",
        fontstyle="italic" if row.kind == "oracle" else "normal",
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
    )
    return end


def _kind_patch(kind: str) -> Patch:
    hatch = "///" if kind == "oracle" else None
    return Patch(facecolor=KINDS[kind], edgecolor="white", linewidth=0, hatch=hatch, label=kind)


def positions_plot(curves: Sequence[PositionCurve]) -> Figure:
    """Figure 4: the mean true click probability at each position, a line for each method, with its deviation."""
    figure = Figure(figsize=(6.4, 3.6))
    axes = plain_axes(figure, "position", "mean true click probability")
    for place, curve in enumerate(curves):
        colour, marker = COLOURS[place % len(COLOURS)], _MARKERS[place % len(_MARKERS)]
        position = np.arange(1, len(curve.mean) + 1)
        label = f"{plain_label(curve.name)}: {number(float(np.sum(curve.mean)), 3)}"
        axes.plot(position, curve.mean, color=colour, marker=marker, markersize=4, linewidth=1.5, label=label)
        low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
        if np.isfinite(low).any():
            axes.fill_between(position, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.legend(
        frameon=False,
        fontsize="small",
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        title="sum over positions",
        title_fontsize="small",
        alignment="left",
        borderaxespad=0,
    )
    return figure


def numbered(example: ListExample) -> bool:
    """Whether the cells of Figure 3 are large enough for numbers."""
    return len(example.items) <= _MOST_NUMBERED


def lists_plot(example: ListExample) -> Figure:
    """Figure 3: the true click probabilities of items at positions, a panel for each method, its choices outlined."""
    items = len(example.items)
    height = min(6.0, max(1.2, (0.26 if numbered(example) else 0.17) * items))
    methods = list(example.positions)
    figure = Figure(figsize=(6.4, 0.9 + (height + 0.75) * len(methods)), layout="constrained")
    panels = figure.subplots(len(methods), squeeze=False)[:, 0]
    for method, axes in zip(methods, panels, strict=True):
        image = _panel(axes, example, method)
        clicks, ndcg = example.clicks.get(method, nan), example.ndcg.get(method, nan)
        earned = f"{figure_text(CLICKS, clicks)} clicks, nDCG {figure_text('nDCG@10', ndcg)}"
        axes.set_title(f"{_lines(method, 60)}: {earned}", fontsize="medium", loc="left")
    figure.colorbar(image, ax=list(panels), location="top", aspect=50, pad=0.01, label="true click probability")
    return figure


def _panel(axes: Axes, example: ListExample, method: str) -> AxesImage:
    """The table as a map; its cells that the method chose are outlined, with bold numbers, or dots where none fit."""
    items, K = example.table.shape
    most = float(np.nanmax(example.table, initial=0.0)) or 1.0
    edges = (0.5, K + 0.5, items - 0.5, -0.5)
    image = axes.imshow(
        example.table, cmap="Blues", vmin=0, vmax=most, extent=edges, aspect="auto", interpolation="nearest"
    )
    for item, position in np.ndindex(items, K):
        chosen = int(example.positions[method][item]) == position + 1
        if numbered(example):
            value = float(example.table[item, position])
            colour = "white" if value > 0.65 * most else INK
            weight = "bold" if chosen else "normal"
            text = number(value, 2)
            axes.text(position + 1, item, text, ha="center", va="center", color=colour, weight=weight, fontsize=8)
        if chosen:
            _outline(axes, item, position + 1, dotted=not numbered(example))
    axes.set_xticks(range(1, K + 1))
    axes.set_xlabel("position")
    step = ceil(items / _MOST_LABELLED)
    names = [_item_label(str(name), label) for name, label in zip(example.items, example.label, strict=True)]
    axes.set_yticks(range(0, items, step), names[::step], fontsize="small" if numbered(example) else "x-small")
    axes.tick_params(length=0)
    return image


def _outline(axes: Axes, item: int, position: int, *, dotted: bool) -> None:
    corner = (position - 0.5, item - 0.5)
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_ORANGE, linewidth=2.5, zorder=3, clip_on=False))
    if dotted:
        axes.plot(position, item, marker="o", markersize=4, color=_ORANGE, markeredgecolor=INK, zorder=4)


def _item_label(name: str, label: float) -> str:
    shown = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
    return f"{plain_label(shown)} (label {number(label, 0) if float(label).is_integer() else number(label, 2)})"


def _lines(name: str, width: int = _NAME_WIDTH) -> str:
    """A name in several lines when it is long."""
    return "\n".join(plain_label(line) for line in wrap(name, width, break_on_hyphens=False) or [name])
