"""Figures of the app store: the debiased estimate of each method beside the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from urank.report.figures import plain_label
from urank.report.paper_figures import INK, KINDS, clicks_plot
from urank.report.store_tables import DOWNLOADS, SCENARIOS, as_judged

if TYPE_CHECKING:
    from urank.paper.results import StoreRow

__all__ = ["agreement_plot", "downloads_plot"]

_UNITS = dict(zip(SCENARIOS, ("downloads a visit (#click)", "revenue of a visit"), strict=True))
_MARKERS = "os^DvPX<>hp*"


def downloads_plot(rows: Sequence[StoreRow]) -> Figure:
    """A bar for each row of Table 3, its debiased downloads, with a diamond at the true ones."""
    true = {row.key: row.true.get(DOWNLOADS, nan) for row in rows}
    return clicks_plot(as_judged(rows), DOWNLOADS, "downloads a visit, debiased", marks=true)


def agreement_plot(rows: Sequence[StoreRow]) -> Figure:
    """The debiased estimate over the truth, a panel for each scenario and a point for each method.

    On the dotted line the two are equal. Where the points rise from left to right, they order the methods alike.
    """
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    panels = figure.subplots(1, len(SCENARIOS), squeeze=False)[0]
    for metric, axes in zip(SCENARIOS, panels, strict=True):
        _panel(axes, rows, metric)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


def _panel(axes: Axes, rows: Sequence[StoreRow], metric: str) -> None:
    axes.set_title(_UNITS[metric], fontsize="medium", loc="left")
    axes.set_xlabel("true")
    axes.set_ylabel("debiased estimate")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    seen: Counter[str] = Counter()
    ends = []
    for row in rows:
        x, y = row.true.get(metric, nan), row.mean.get(metric, nan)
        marker = _MARKERS[seen[row.kind] % len(_MARKERS)]
        seen[row.kind] += 1
        axes.scatter(x, y, s=42, marker=marker, color=KINDS[row.kind], edgecolor=INK, label=plain_label(row.name))
        ends += [each for each in (x, y) if isfinite(x) and isfinite(y)]
    if ends:
        low, high = min(ends), max(ends)
        margin = 0.06 * (high - low) or 0.5
        axes.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
        axes.axline((low, low), slope=1, color=INK, linestyle=":", linewidth=1)
