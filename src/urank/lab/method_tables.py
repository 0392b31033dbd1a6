"""Tables, sentences and plots of compared methods, for the reports of the paper's experiments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan, nan
from typing import Any

from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich.console import Console
from rich.text import Text

from urank.lab.experiment_results import Claim, MethodRow
from urank.report.page import Chart
from urank.report.style import BLUE, GREY, GRID, INK, new_axes, wrapped_label
from urank.report.tables import UNKNOWN, Table, Units, bullet, number, p_text

ORACLES = (
    "Rows in italics are oracles, which use information that no log contains, and are not compared. The best figure of "
    "the other rows is in bold."
)
ORANGE = "#e8590c"
KIND_COLOURS = {"baseline": GREY, "oracle": GRID, "ours": BLUE}
_DECIMALS = {"CTR": 4}
_HATCHES = {"oracle": "///"}
_DIAMOND: dict[str, Any] = {
    "marker": "D",
    "markersize": 5,
    "markerfacecolor": ORANGE,
    "markeredgecolor": "white",
    "zorder": 4,
}
_NAME_WIDTH = 28
_URANK = ("urank", "store-urank")


# --- Rows ------------------------------------------------------------------------------------------------------------


def _highest(rows: Sequence[MethodRow], metric: str) -> list[MethodRow]:
    """Return the row with the largest mean, or those that tie; oracle rows are left out."""
    rivals = [row for row in rows if row.kind != "oracle" and isfinite(row.mean.get(metric, nan))]
    best = max((row.mean[metric] for row in rivals), default=nan)
    return [row for row in rivals if row.mean[metric] == best]


def leading_row(rows: Sequence[MethodRow], metric: str) -> MethodRow | None:
    """Return U-rank, or else the best row of ours; None if no such row has the metric."""
    named = [row for row in rows if row.key in _URANK and isfinite(row.mean.get(metric, nan))]
    return next(iter(named or _highest([row for row in rows if row.kind == "ours"], metric)), None)


def best_baseline(rows: Sequence[MethodRow], metric: str) -> MethodRow | None:
    """Return the best baseline; None if no baseline has the metric."""
    return next(iter(_highest([row for row in rows if row.kind == "baseline"], metric)), None)


def standing(rows: Sequence[MethodRow], metric: str) -> int | None:
    """Return 1 if U-rank is significantly better than every baseline, −1 if one is better, else 0; None if unknown."""
    ours, baseline = leading_row(rows, metric), best_baseline(rows, metric)
    if ours is None or baseline is None:
        return None
    return 1 if ours.significant(metric) else -1 if ours.mean[metric] < baseline.mean[metric] else 0


def has_spread(rows: Sequence[MethodRow]) -> bool:
    """Return whether there are deviations over seeds."""
    return any(isfinite(each) for row in rows for each in row.deviation.values())


# --- Text ------------------------------------------------------------------------------------------------------------


def figure_text(metric: str, mean: float) -> str:
    """Format a figure with as many decimals as in the paper.

    >>> figure_text("#Click", 0.90312), figure_text("CTR", 0.0915), figure_text("MAP", float("nan"))
    ('0.903', '0.0915', '–')
    """
    return number(mean, _DECIMALS.get(metric, 3))


def spread_text(metric: str, mean: float, deviation: float) -> str:
    """Format a mean with its deviation over seeds; a NaN deviation is omitted."""
    shown = figure_text(metric, mean)
    return shown if isnan(mean) or isnan(deviation) else f"{shown} ± {figure_text(metric, deviation)}"


def _starred(row: MethodRow, metric: str) -> str:
    shown = figure_text(metric, row.mean.get(metric, nan))
    return f"{shown}*" if shown != UNKNOWN and row.significant(metric) else shown


def earnings(rows: Sequence[MethodRow], metric: str, verb: str, unit: str) -> Iterator[str]:
    """Compare U-rank with the best baseline in words; without either, report what there is.

    Args:
        rows: of a table.
        metric: which metric.
        verb: such as `earns`.
        unit: such as `clicks a query`.
    """
    ours, baseline = leading_row(rows, metric), best_baseline(rows, metric)
    if ours is not None:
        earned = f"{ours.name} {verb} {figure_text(metric, ours.mean[metric])} {unit}"
        yield earned if baseline is None else f"{earned}, {_against(ours, baseline, metric)}"
    elif baseline is not None:
        yield f"the best baseline, {baseline.name}, {verb} {figure_text(metric, baseline.mean[metric])} {unit}"
    elif known := {row.name: row.mean[metric] for row in rows if isfinite(row.mean.get(metric, nan))}:
        yield earnings_by_name(known, metric, verb, unit)


def _against(ours: MethodRow, baseline: MethodRow, metric: str) -> str:
    mean, base = ours.mean[metric], baseline.mean[metric]
    rival = f"the best baseline ({baseline.name}: {figure_text(metric, base)})"
    if mean == base:
        return f"the same as {rival}"
    compared = f"{Units.of(base).size(mean - base)} {'more' if mean > base else 'less'} than {rival}"
    p_value = ours.p_value.get(metric)
    if mean < base or p_value is None or not isfinite(p_value):
        return compared
    shown = p_text(p_value)
    equals = f"p < {shown[1:]}" if shown.startswith("<") else f"p = {shown}"
    return f"{compared}, {equals}" if ours.significant(metric) else f"{compared}, which may be chance ({equals})"


def earnings_by_name(means: Mapping[str, float], metric: str, verb: str, unit: str) -> str:
    """List the mean of each method in words."""
    (first, earned), *others = means.items()
    listed = [f"{first} {verb} {figure_text(metric, earned)} {unit}"]
    return ", ".join(listed + [f"{name} {figure_text(metric, value)}" for name, value in others])


# --- Tables ----------------------------------------------------------------------------------------------------------


def performance_cells(rows: Sequence[MethodRow], metric: str) -> list[str]:
    """Return a column for a page: means with stars and deviations, the best in bold, oracles in italics."""
    best = _highest(rows, metric)
    cells = []
    for row in rows:
        mean, shown = row.mean.get(metric, nan), _starred(row, metric)
        spread = spread_text(metric, mean, row.deviation.get(metric, nan)).removeprefix(figure_text(metric, mean))
        cells.append((Markup("<strong>{}</strong>").format(shown) if row in best else shown) + spread)
    return italic_oracles(rows, cells)


def italic_oracles(rows: Sequence[MethodRow], cells: Sequence[str]) -> list[str]:
    """Set the cells of oracle rows in italics."""
    return [
        Markup("<em>{}</em>").format(cell) if row.kind == "oracle" else cell
        for row, cell in zip(rows, cells, strict=True)
    ]


def compact_columns(rows: Sequence[MethodRow], heads: Mapping[str, str]) -> dict[str, list[str]]:
    """Return columns for a terminal: names, with a dagger for oracles, and means with stars.

    Args:
        rows: of the table.
        heads: metric -> header.
    """
    names = [f"{row.name} †" if row.kind == "oracle" else row.name for row in rows]
    return {"method": names} | {head: [_starred(row, metric) for row in rows] for metric, head in heads.items()}


def claim_table(claims: Sequence[Claim]) -> Table:
    """Return each claim, whether it holds here, and the evidence."""
    head, holds = ("claim", "holds", "figures"), {True: "yes", False: "no", None: "undecided"}
    return Table(head, [(claim.text, holds[claim.holds], claim.figures or UNKNOWN) for claim in claims], words=head)


def print_claims(claims: Sequence[Claim], console: Console) -> None:
    """Print each claim beside whether it holds."""
    holds = {True: "yes", False: "no", None: "?"}
    for claim in claims:
        figures = f": {claim.figures}" if claim.figures else ""
        bullet(console, holds[claim.holds], f"{claim.text.removesuffix('.')}{figures}")
    if claims:
        console.print()


def print_signs(rows: Sequence[MethodRow], console: Console, *others: str) -> None:
    """Print the meaning of the signs in a compact table, and other remarks."""
    oracles = ["† knows the truth, not compared"] if any(row.kind == "oracle" for row in rows) else []
    console.print(Text("; ".join(["* better than every baseline, p < 0.05", *oracles, *others]), style="dim"))
    console.print()


# --- Bars ------------------------------------------------------------------------------------------------------------


def bar_chart(
    rows: Sequence[MethodRow], metric: str, unit: str, caption: str, *, truth: Mapping[str, float] | None = None
) -> Chart:
    """Draw a bar for each row, the first at the top, with its deviation and a line at the best baseline.

    Args:
        rows: of a table.
        metric: which metric.
        unit: label of the x axis.
        caption: format string with `{bars}` and `{line}`.
        truth: key of a row -> true value, drawn as a diamond.
    """
    whiskers = any(isfinite(row.deviation.get(metric, nan)) for row in rows)
    bars = "whiskers are one standard deviation over seeds" if whiskers else "one seed, hence no whiskers"
    line = "" if best_baseline(rows, metric) is None else " The dotted line is the best baseline."
    return Chart(_bars(rows, metric, unit, truth or {}), caption.format(bars=bars, line=line))


def _bars(rows: Sequence[MethodRow], metric: str, unit: str, truth: Mapping[str, float]) -> Figure:
    figure, axes = new_axes(unit, "", height=0.9 + 0.32 * len(rows))
    axes.grid(visible=False)
    ends = [_bar(axes, place, row, metric, truth.get(row.key, nan)) for place, row in enumerate(rows)]
    handles: list[Artist] = [
        Patch(facecolor=colour, edgecolor="white", linewidth=0, hatch=_HATCHES.get(kind), label=kind)
        for kind, colour in KIND_COLOURS.items()
        if any(row.kind == kind for row in rows)
    ]
    baseline = best_baseline(rows, metric)
    if baseline is not None:
        at = baseline.mean[metric]
        handles.append(axes.axvline(at, color=INK, linestyle=":", linewidth=1, label="best baseline"))
    if truth:
        handles.append(Line2D([], [], linestyle="none", label="true", **_DIAMOND))
    axes.set_yticks(range(len(rows)), [wrapped_label(row.name, _NAME_WIDTH) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * max(filter(isfinite, ends), default=1.0) or 1.0)
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
    axes.legend(handles=handles, frameon=False, fontsize="small", ncols=len(handles), **above)
    return figure


def _bar(axes: Axes, place: int, row: MethodRow, metric: str, truth: float) -> float:
    """Draw one bar, and return the right end of the bar, its whisker and its diamond."""
    mean, deviation = row.mean.get(metric, nan), row.deviation.get(metric, nan)
    end = mean + (deviation if isfinite(deviation) else 0.0)
    if isfinite(mean):
        look: dict[str, Any] = {"color": KIND_COLOURS[row.kind], "hatch": _HATCHES.get(row.kind)}
        axes.barh(place, mean, height=0.66, edgecolor="white", linewidth=0, **look)
        if isfinite(deviation):
            axes.errorbar(mean, place, xerr=deviation, fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
    if isfinite(truth):
        axes.plot(truth, place, **_DIAMOND)
        end = max(truth, end) if isfinite(end) else truth
    axes.annotate(
        _starred(row, metric),
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
