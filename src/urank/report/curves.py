"""Click curves of a model as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from urank.clicks.curves import ItemCurve
from urank.errors import ConfigError
from urank.files import new_file
from urank.report.tables import Table, bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["curve_figure", "curve_table", "save_curves"]


def curve_table(curves: Sequence[ItemCurve], by: str) -> Table:
    """Rates at a few positions, and how fast they fall."""
    K = len(curves[0].rate)
    places = [k for k in (1, 2, 3, 5, 10, 20, 50) if k <= K]
    steepest = max(max(curve.decay for curve in curves), 1e-9)
    rows = [
        (
            curve.name,
            f"{curve.rows:,}",
            *(f"{curve.rate[k - 1]:.2%}" for k in places),
            f"{curve.decay:.2f}",
            bar(curve.decay / steepest, 8),
        )
        for curve in curves
    ]
    return Table((by, "shown", *(f"at {k}" for k in places), "decay", ""), rows)


def curve_figure(curves: Sequence[ItemCurve]) -> Figure:
    """Click probability by position, a line for each (the paper's Figure 1, right)."""
    from matplotlib.figure import Figure  # slow to load

    from urank.report.figures import COLOURS, plain_axes, plain_label

    figure = Figure(figsize=(6.4, 3.4))
    axes = plain_axes(figure, "position", "P(click | item, position)")
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        places = range(1, len(curve.rate) + 1)
        axes.plot(
            places, curve.rate, color=colour, marker="o", markersize=3, linewidth=1.5, label=plain_label(curve.name)
        )
    axes.legend(frameon=False, fontsize="small")
    return figure


def save_curves(curves: Sequence[ItemCurve], path: Path) -> None:
    """Write the picture; it appears when it is complete."""
    from urank.report.figures import svg

    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"a picture must be named .svg or .png; got {path}")
    figure = curve_figure(curves)
    with new_file(path) as working:
        if path.suffix == ".svg":
            working.write_text(svg(figure) + "\n", encoding="utf-8")
        else:
            figure.savefig(working, format="png", dpi=150, bbox_inches="tight")
