"""The report of a reproduction of the paper, in the terminal and as a page: shared tables, Table 3, and the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import ceil, isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from urank.lab.claims import architecture_difference
from urank.lab.experiment_results import (
    METRICS,
    STORE_METRICS,
    ArchitectureRow,
    Claim,
    Difference,
    ListExample,
    LiveRow,
    MethodRow,
    PositionCurve,
    Reproduction,
    SettingRows,
    StoreRow,
)
from urank.report import style
from urank.report.page import Chart, Section, Summary, write_page
from urank.report.tables import UNKNOWN, Table, Units, bullet, counted, number, p_text, percent, print_tables

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

ORACLES = (
    "Rows in italics are oracles, which use information that no log contains, and are not compared. The best figure of "
    "the other rows is in bold."
)
ORANGE = "#e8590c"
_LIGHT, _DARK = "#fefefe", "#111111"
"""Text on the cells of a heat map, which are the same on a light and on a dark page."""
KIND_COLOURS = {"baseline": style.GREY, "oracle": style.GRID, "ours": style.BLUE}
_DECIMALS = {"CTR": 4}
_HATCHES = {"oracle": "///"}
_DIAMOND: dict[str, Any] = {"marker": "D", "ms": 5, "mfc": ORANGE, "mec": "white", "zorder": 4}
_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": "small"}
_NAME_WIDTH = 28
_URANK = ("urank", "store-urank")


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
    """Compare U-rank with the best baseline in words, such as `earns` … `clicks a query`; else report what there is."""
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
    italic = Markup("<em>{}</em>")
    return [italic.format(cell) if row.kind == "oracle" else cell for row, cell in zip(rows, cells, strict=True)]


def compact_columns(rows: Sequence[MethodRow], heads: Mapping[str, str]) -> dict[str, list[str]]:
    """Return columns for a terminal: names, with a dagger for oracles, and means with stars; `heads` by metric."""
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


def bar_chart(
    rows: Sequence[MethodRow], metric: str, unit: str, caption: str, truth: Mapping[str, float] | None = None
) -> Chart:
    """Return the chart of `bar_plot`; `caption` has the fields `{bars}` and `{line}`."""
    whiskers = any(isfinite(row.deviation.get(metric, nan)) for row in rows)
    bars = "whiskers are one standard deviation over seeds" if whiskers else "one seed, hence no whiskers"
    line = " The dotted line is the best baseline." if best_baseline(rows, metric) else ""
    return Chart(partial(bar_plot, rows, metric, unit, truth or {}), caption.format(bars=bars, line=line))


def bar_plot(rows: Sequence[MethodRow], metric: str, unit: str, truth: Mapping[str, float]) -> Figure:
    """Draw a bar for each row, the first at the top, with its deviation and a line at the best baseline.

    `truth`, by the key of a row, is drawn as diamonds.
    """
    figure, axes = style.new_axes(unit, "", height=0.9 + 0.32 * len(rows))
    axes.grid(visible=False)
    ends = [_bar(axes, place, row, metric, truth.get(row.key, nan)) for place, row in enumerate(rows)]
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = [
        Patch(facecolor=colour, edgecolor="white", linewidth=0, hatch=_HATCHES.get(kind), label=kind)
        for kind, colour in KIND_COLOURS.items()
        if any(row.kind == kind for row in rows)
    ]
    if baseline := best_baseline(rows, metric):
        at = baseline.mean[metric]
        handles.append(axes.axvline(at, color=style.INK, linestyle=":", linewidth=1, label="best baseline"))
    if truth:
        handles.append(Line2D([], [], linestyle="none", label="true", **_DIAMOND))
    axes.set_yticks(range(len(rows)), [style.wrapped_label(row.name, _NAME_WIDTH) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * max(filter(isfinite, ends), default=1.0) or 1.0)
    axes.legend(handles=handles, ncols=style.legend_columns(len(handles)), **_ABOVE, **_LEGEND)
    return figure


def _bar(axes: Axes, place: int, row: MethodRow, metric: str, truth: float) -> float:
    """Draw one bar, and return the right end of the bar, its whisker and its diamond."""
    mean, deviation = row.mean.get(metric, nan), row.deviation.get(metric, nan)
    end = mean + (deviation if isfinite(deviation) else 0.0)
    if isfinite(mean):
        look: dict[str, Any] = {"color": KIND_COLOURS[row.kind], "hatch": _HATCHES.get(row.kind)}
        axes.barh(place, mean, height=0.66, edgecolor="white", linewidth=0, **look)
        if isfinite(deviation):
            axes.errorbar(mean, place, xerr=deviation, fmt="none", ecolor=style.INK, elinewidth=1, capsize=2.5)
    if isfinite(truth):
        axes.plot(truth, place, **_DIAMOND)
        end = max(truth, end) if isfinite(end) else truth
    font: dict[str, Any] = {"ours": {"fontweight": "bold"}, "oracle": {"fontstyle": "italic"}}.get(row.kind, {})
    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    at = (end if isfinite(end) else 0.0, place)
    offset: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "bbox": box}
    axes.annotate(_starred(row, metric), at, fontsize="small", **offset, **font)
    return end


DOWNLOADS = "#click"
SCENARIOS = {DOWNLOADS: "downloads a visit (#click)", "Revenue": "revenue of a visit"}
"""The scenarios by their metric over all positions, and their units."""

_MARKERS = "os^DvPX<>hp*"
_STORE = (
    "A simulated app store takes the place of the paper's. Methods learn from the log of its production ranker and are "
    "judged on the next day. Scenario 1 counts the downloads of a visit (#click), Scenario 2 their value (Revenue): "
    "over all positions, and over the first 1, 3 and 5."
)
_DEBIASED = (
    "The figures are debiased as in Section 6.1: a logged download is weighted by the examination probability at the "
    "position a method gives its app, divided by that at the position where it was shown. Examination, by category and "
    "position, is estimated from random traffic. The columns marked true contain the expected value under the "
    "probabilities of the simulation, which no real store knows."
)
_STARS = (
    "A star: better than every baseline. For each baseline a paired t-test compares the visits of all seeds; its "
    "p-value is corrected for the number of baselines by Holm's method, and all must be below 0.05. Stars of true "
    "figures are from the same tests on the true figures."
)
_FIRST_POSITION = (
    "#click@1 counts position 1 only. It is maximised by sorting by the probability of a download there, so a ranker "
    "that maximises the downloads of all positions can score lower on it, and likewise on Revenue@1."
)
_ORACLES_SHOW = (
    " The oracles show it: by the truth, sorting by the CTR at 1 is never behind the matching on #click@1, and never "
    "ahead on #click."
)
_PAPER = "Columns marked (paper) contain the paper's figures, which are of another store: only the order is comparable."
_CLAIMS = (
    "The claims on the order of the methods are not the paper's: they check whether its debiased metrics can be "
    "trusted. Such a claim fails if the estimate and the truth order two methods differently, both significantly."
)
_BARS = "Downloads a visit, debiased as in Table 3: {bars}.{line} The diamonds are the true downloads."
_POINTS = (
    "Each method by its true figure and its debiased estimate. On the dotted line the two are equal; where the points "
    "rise from left to right, the estimate orders the methods as the truth does. Grey: baselines; blue: ours; light: "
    "oracles."
)


def store_earnings(rows: Sequence[StoreRow]) -> Iterator[str]:
    """Compare U-rank with the best baseline in words, by the estimate and by the truth."""
    yield from earnings(rows, DOWNLOADS, "brings", "downloads a visit")
    true = [row.by_truth() for row in rows]
    ours, rival, best = leading_row(rows, DOWNLOADS), best_baseline(rows, DOWNLOADS), best_baseline(true, DOWNLOADS)
    if ours is None or rival is None or best is None:
        return
    mean = next(row.mean.get(DOWNLOADS, nan) for row in true if row.key == ours.key)
    if isfinite(mean):
        base = best.mean[DOWNLOADS]
        other = "" if best.key == rival.key else f" against {best.name}, the best in truth"
        yield f"truly {Units.of(base).change(mean - base)}{other}"


def store_sections(found: Reproduction) -> Iterator[Section]:
    """Yield the sections of the page."""
    rows = found.store
    if rows:
        yield _table_section(rows, found.seeds)
    if found.store_claims:
        yield Section("The claims of Section 6.1", tables=[claim_table(found.store_claims)], notes=[_CLAIMS])
    if any(isfinite(row.mean.get(DOWNLOADS, nan)) for row in rows):
        true = {row.key: row.true.get(DOWNLOADS, nan) for row in rows}
        bars = bar_chart(rows, DOWNLOADS, "downloads a visit, debiased", _BARS, true)
        charts = [bars, Chart(partial(_agreement_plot, rows), _POINTS)]
        yield Section("The debiased estimate and the truth", charts=charts)


def _table_section(rows: Sequence[StoreRow], seeds: int) -> Section:
    oracles = _ORACLES_SHOW if {"store-ctr1-truth", "store-km"} <= {row.key for row in rows} else ""
    notes = [f"± is the standard deviation over the {seeds} seeds, each another store."] if has_spread(rows) else []
    notes += [_STARS, ORACLES, _FIRST_POSITION + oracles]
    tables = [_scenario_table(rows, scenario) for scenario in SCENARIOS]
    if published := [row for row in rows if any(map(isfinite, row.published.values()))]:
        columns = {
            f"{metric} (paper)": [figure_text(metric, row.published.get(metric, nan)) for row in published]
            for metric in STORE_METRICS
        }
        tables.append(Table.of_columns({"method": [row.name for row in published]} | columns))
        notes.append(_PAPER)
    return Section("Table 3: an app store", paragraphs=[_STORE, _DEBIASED], tables=tables, notes=notes)


def _scenario_table(rows: Sequence[StoreRow], scenario: str) -> Table:
    """Return one scenario for a page: each debiased figure, and beside it the true one without its deviation."""
    true = [replace(row.by_truth(), deviation={}) for row in rows]
    columns = {"method": italic_oracles(rows, [row.name for row in rows])}
    for metric, cutoff in _cutoffs(scenario).items():
        columns |= {metric: performance_cells(rows, metric), f"true{cutoff}": performance_cells(true, metric)}
    return Table.of_columns(columns)


def _compact_scenario_table(rows: Sequence[StoreRow], scenario: str) -> Table:
    """Return one scenario for a terminal: the debiased figures, then the true ones."""
    cutoffs = _cutoffs(scenario)
    estimated = compact_columns(rows, {metric: cutoff or metric for metric, cutoff in cutoffs.items()})
    heads = {metric: f"true{cutoff}" for metric, cutoff in cutoffs.items()}
    return Table.of_columns(estimated | compact_columns([row.by_truth() for row in rows], heads))


def _cutoffs(scenario: str) -> dict[str, str]:
    """Return metric -> cutoff, such as `@3` of `#click@3`; empty for all positions."""
    return {metric: metric.removeprefix(scenario) for metric in STORE_METRICS if metric.startswith(scenario)}


def _agreement_plot(rows: Sequence[StoreRow]) -> Figure:
    """Plot the debiased estimate over the truth, a panel for each scenario and a point for each method."""
    figure = style.new_figure(4.4)
    panels = figure.subplots(1, len(SCENARIOS), squeeze=False)[0]
    for (metric, title), axes in zip(SCENARIOS.items(), panels, strict=True):
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set(xlabel="true", ylabel="debiased estimate")
        style.style_axes(axes, "both")
        markers = {kind: cycle(_MARKERS) for kind in KIND_COLOURS}
        ends: list[float] = []
        for row in rows:
            x, y = row.true.get(metric, nan), row.mean.get(metric, nan)
            look = {"marker": next(markers[row.kind]), "color": KIND_COLOURS[row.kind], "edgecolor": style.INK}
            axes.scatter(x, y, s=42, label=style.plain_label(row.name), **look)
            ends += [x, y] if isfinite(x) and isfinite(y) else []
        if ends:
            low, high = min(ends), max(ends)
            margin = 0.06 * (high - low) or 0.5
            axes.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
            axes.axline((low, low), slope=1, color=style.INK, linestyle=":", linewidth=1)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=style.legend_columns(3), **_LEGEND
    )
    return figure


CLICKS = "#Click"
_STYLES = {1: "bold green", 0: "bold yellow", -1: "bold red"}
_ARCHITECTURE_COLUMNS = {
    "AUC, train": ("train", "train"),
    "AUC, test": ("test", "test"),
    "AUC, validation": ("valid", "valid"),
    CLICKS: ("clicks", CLICKS),
    "CTR": ("ctr", "CTR"),
}
"""Header -> attribute of an `ArchitectureRow`, and key of its deviations and published figures."""

_TABLE1_STARS = (
    "A star: better than every baseline. For each baseline a paired t-test compares the queries, each averaged over "
    "its seeds; its p-value is corrected for the number of baselines by Holm's method, and all must be below 0.05."
)
_METRICS = (
    "#Click and CTR are computed from the true click probabilities: clicks per query, and clicks per document shown. "
    "MAP and nDCG leave out queries without a relevant document; for MAP, a document is relevant if its label is at "
    "least 1."
)
_TABLE1_PAPER = "Columns marked (paper) contain the paper's figures."
_ARCHITECTURES = (
    "RQ2 of the paper: A1 maps an item to its click probabilities at all positions; A2 maps an item and a position to "
    "one click probability. AUC is of the click model, #Click and CTR are of U-rank trained on it."
)
_TABLE1_BARS = "Clicks a query by the true click probabilities, as in Table 1: {bars}.{line}"
_CURVES = (
    "The mean true click probability at each position, a line for each method{bands}. The legend gives the sum over "
    "the positions."
)
_LISTS = (
    "The true click probability of each item of the query at each position, darker if higher. The cell with an orange "
    "outline and {mark} is the position that the method of the panel gives the item. The title of a panel gives the "
    "expected clicks and the nDCG of that order."
)
_SWEEPS = {
    "attention": "How the gain of every method depends on the item-specific attention of the users: Table 1 for "
    "several η and numbers of features on which attention depends. The paper states no η; in its released code "
    "attention depends on 10 features, and η is 0.7 by default and 1.5 in the script that draws the clicks.",
    "users": "Users whose curves the click family monotone does not have, beside the paper's (item), whose formula it "
    "shares: two-column grids, carousels, screens with a fold, attention held by the item above, and patience that "
    "differs by session. U-rank and CTR-1 use the click model A1, which presumes no curve.",
}
_GAINS = (
    "Clicks a query relative to the best baseline of the same setting, in the first row. A star: better than every "
    "baseline, p < 0.05, as in Table 1. Rows in italics are oracles. Users whose clicks depend on the item above have "
    "no click table, hence no oracles."
)
_LIVE = (
    "Each seed is a live test in a simulated app store, as `urank abtest simulate` runs it: in the A/A tests both arms "
    "are served by the same DeepFM, in the A/B test the treatment by U-rank. Figures are averaged over seeds; the "
    "largest day is that of any seed."
)
_LIVE_NOTE = (
    "CTR is downloads per impression, CVR downloads per user. The paper's figures are of another store with more "
    "users. What compares is the course: no difference, a step, no difference. How far days fluctuate in an A/A test "
    "depends on the number of users."
)
_DIFFERENCES = "One change at a time; p is of the paired t-test on queries, each averaged over its seeds."


def print_reproduction(found: Reproduction, console: Console) -> None:
    """Print the tables and claims, the summary last."""
    if found.rows:
        print_tables(console, [Table.of_columns(compact_columns(found.rows, {metric: metric for metric in METRICS}))])
        print_signs(found.rows, console, *_setting(found))
    print_claims(found.claims, console)
    if found.architectures:
        print_tables(console, [_architecture_table(found.architectures, compact=True)])
        console.print(Text("; ".join(_setting(found)), style="dim"))
    for tables in found.sweeps.values():
        parts = [tables[start : start + 2] for start in range(0, len(tables), 2)]  # as many as fit in 80 columns
        print_tables(console, map(gain_table, parts))
        print_signs([row for table in tables for row in table.rows], console, "gain over the best baseline")
    if found.differences:
        print_tables(console, [_difference_table(found.differences)])
    print_claims([*found.architecture_claims, *found.curve_claims], console)
    if found.store:
        print_tables(console, (_compact_scenario_table(found.store, scenario) for scenario in SCENARIOS))
        print_signs(found.store, console, "true: the expected value of the order")
    print_claims(found.store_claims, console)
    if found.live:
        print_tables(console, [_live_table(found.live)])
    print_claims(found.live_claims, console)
    standings = (standing(found.rows, CLICKS), standing(found.store, DOWNLOADS))
    worst = min((each for each in standings if each is not None), default=None)
    console.print(Text(_summary(found), style="bold" if worst is None else _STYLES[worst]))


def write_reproduction(found: Reproduction, path: str | Path) -> None:
    """Write the page with the plots."""
    sections = list(reproduction_sections(found))
    write_page(path, "The paper's experiments", Summary(f"{_summary(found)}."), sections)


def _summary(found: Reproduction) -> str:
    """Return U-rank's gain over the best baseline, and the number of the paper's claims that hold, in one line."""
    clicks = list(earnings(found.rows, CLICKS, "earns", "clicks a query")) or list(_earnings_without_table(found))
    parts = [*clicks, *_settings_won(found), *store_earnings(found.store), *_claims_that_hold(found)]
    return "; ".join(parts) or "there are no figures"


def _settings_won(found: Reproduction) -> Iterator[str]:
    """Count by sweep the settings with which U-rank, or the best row of ours, is significantly above all baselines."""
    for name, tables in found.sweeps.items():
        known = [each for each in (standing(table.rows, CLICKS) for table in tables) if each is not None]
        below = f", and below one with {known.count(-1)}" if -1 in known else ""
        yield f"by {name}, U-rank is significantly above every baseline with {known.count(1)} of {len(known)}{below}"


def _earnings_without_table(found: Reproduction) -> Iterator[str]:
    unit, clicks = "clicks a query", {}
    if found.architectures:
        clicks = {f"U-rank on {row.name}": row.clicks for row in found.architectures}
    elif found.curves:
        clicks = {curve.name: float(np.sum(curve.mean)) for curve in found.curves}
    elif found.example is not None:
        unit, clicks = f"clicks on query {found.example.query}", dict(found.example.clicks)
    if clicks:
        yield earnings_by_name(clicks, CLICKS, "earns", unit)


def _claims_that_hold(found: Reproduction) -> Iterator[str]:
    groups = {
        "Section 5.4": found.claims,
        "Table 2": found.architecture_claims,
        "Figure 4": found.curve_claims,
        "Section 6.1": found.store_claims,
        "Section 6.2": found.live_claims,
    }
    decided = [(source, [claim.holds for claim in claims]) for source, claims in groups.items() if claims]
    if not decided:
        return
    (source, holds), *others = decided
    counts = [f"{holds.count(True)} of {counted(len(holds), 'claim', 'claims')} of {source}"]
    counts += [f"{holds.count(True)} of {len(holds)} of {source}" for source, holds in others]
    verb = "holds" if len(decided) == 1 and 1 in (holds.count(True), len(holds)) else "hold"
    listed = " and ".join([", ".join(counts[:-1]), counts[-1]] if others else counts)
    undecided = sum(holds.count(None) for _, holds in decided)
    yield f"{listed} {verb} on this data" + (f" ({undecided} undecided)" if undecided else "")


def reproduction_sections(found: Reproduction) -> Iterator[Section]:
    """Yield the sections of the page."""
    run = f"{', '.join(found.what) or 'Nothing'}, on {found.data.removesuffix('.')}: {_size(found)}."
    yield Section("What was run", paragraphs=[run])
    if found.rows:
        yield _performance(found)
    if found.claims:
        yield Section("The claims of Section 5.4", tables=[claim_table(found.claims)])
    if any(isfinite(row.mean.get(CLICKS, nan)) for row in found.rows):
        yield Section("Clicks by method", charts=[bar_chart(found.rows, CLICKS, "clicks a query", _TABLE1_BARS)])
    if found.architectures or found.architecture_claims:
        tables = [_architecture_table(found.architectures)] if found.architectures else []
        notes = [note for table in tables for note in _note_on_published(table)]
        tables += [claim_table(found.architecture_claims)] if found.architecture_claims else []
        title = "Table 2: architectures of the click model"
        if len(found.architectures) == 2 and all(len(row.by_seed.get(CLICKS, ())) > 1 for row in found.architectures):
            tables.insert(1, _architecture_differences(found.architectures))
        yield Section(title, paragraphs=[_ARCHITECTURES], tables=tables, notes=[*_setting(found), *notes])
    if found.curves or found.curve_claims:
        spread = any(np.isfinite(curve.deviation).any() for curve in found.curves)
        bands = ", with a band of one standard deviation over seeds to either side" if spread else ""
        charts = [Chart(partial(positions_plot, found.curves), _CURVES.format(bands=bands))] if found.curves else []
        tables = [claim_table(found.curve_claims)] if found.curve_claims else []
        yield Section("Figure 4: clicks by position", charts=charts, tables=tables)
    if found.example is not None and found.example.positions:
        caption = _LISTS.format(mark="a bold number" if _numbered(found.example) else "a dot")
        charts = [Chart(partial(lists_plot, found.example), caption)]
        yield Section("Figure 3: the lists of one query", [f"Query {found.example.query}."], charts=charts)
    if found.differences:
        table = _difference_table(found.differences)
        yield Section("The effect of the differences to the paper", paragraphs=[_DIFFERENCES], tables=[table])
    for name, sweep in found.sweeps.items():
        title = "Table 1 by attention" if name == "attention" else "Table 1 by users"
        yield Section(title, paragraphs=[_SWEEPS[name]], tables=[gain_table(sweep, page=True)], notes=[_GAINS])
    yield from store_sections(found)
    if found.live:
        tables = [_live_table(found.live), claim_table(found.live_claims)]
        yield Section("The claims of Section 6.2: a live test", paragraphs=[_LIVE], tables=tables, notes=[_LIVE_NOTE])
    if found.settings or found.versions or found.seconds:
        took = f"{counted(found.seeds, 'seed', 'seeds')}. Total training time: {number(found.seconds, 0)} seconds."
        made = [f"Made by {' · '.join(found.provenance.values())}."] if found.provenance else []
        versions = [Table(("library", "version"), list(found.versions.items()))] if found.versions else []
        timed: dict[str, Sequence[MethodRow]] = {"method of Table 1": found.rows, "method of Table 3": found.store}
        times = [
            Table((head, "training, s a seed"), [(row.name, number(row.seconds, 1)) for row in rows])
            for head, rows in timed.items()
            if any(isfinite(row.seconds) for row in rows)
        ]
        yield Section("Settings", paragraphs=[took, *made], tables=versions + times, code=found.settings)


def _size(found: Reproduction) -> str:
    judged = [counted(found.queries, "test query", "test queries")] if found.queries else []
    judged += [counted(found.visits, "test visit", "test visits")] if found.visits else []
    return ", ".join([counted(found.seeds, "seed", "seeds"), *([f"{' and '.join(judged)} in all"] if judged else [])])


def _live_table(rows: Sequence[LiveRow]) -> Table:
    return Table.of_columns(
        {
            "test": [row.period for row in rows],
            "metric": [row.metric for row in rows],
            "lift": [percent(row.lift, sign=True) for row in rows],
            "95 % interval": [f"{percent(row.low, sign=True)} to {percent(row.high, sign=True)}" for row in rows],
            "largest day": [percent(row.largest_day) for row in rows],
            "true lift": [percent(row.true_lift, sign=True) for row in rows],
        }
    )


def _setting(found: Reproduction) -> list[str]:
    return [f"Setting: {found.setting}."] if found.setting else []


def _performance(found: Reproduction) -> Section:
    rows = found.rows
    columns = {"method": italic_oracles(rows, [row.name for row in rows])}
    for metric in METRICS:
        columns[metric] = performance_cells(rows, metric)
        columns |= {head: italic_oracles(rows, cells) for head, cells in _published(metric, metric, rows).items()}
    table = Table.of_columns(columns)
    over = [f"± is the standard deviation over the {found.seeds} seeds."] if has_spread(rows) else []
    notes = [*_setting(found), *over, _TABLE1_STARS, ORACLES, _METRICS, *_note_on_published(table)]
    return Section("Table 1: overall performance", tables=[table], notes=notes)


def gain_table(tables: Sequence[SettingRows], *, page: bool = False) -> Table:
    """Return the gain of every method over the best baseline, a column for each setting."""
    by_key = {row.key: row for table in tables for row in table.rows}
    rows = list(by_key.values())
    names = italic_oracles(rows, [row.name for row in rows]) if page else compact_columns(rows, {})["method"]
    columns: dict[str, list[str]] = {"method": ["best baseline", *names]}
    for table in tables:
        best = best_baseline(table.rows, CLICKS)
        own = {row.key: row for row in table.rows}
        first = UNKNOWN if best is None else f"{best.name}: {figure_text(CLICKS, best.mean[CLICKS])}"
        cells = [_gain(own.get(key), best) for key in by_key]
        columns[table.name] = [first, *(italic_oracles(rows, cells) if page else cells)]
    return Table.of_columns(columns)


def _gain(row: MethodRow | None, best: MethodRow | None) -> str:
    if row is None or best is None:
        return UNKNOWN
    star = "*" if row.significant(CLICKS) else ""
    return f"{100 * (row.mean[CLICKS] / best.mean[CLICKS] - 1):+.1f} %{star}"


def _architecture_differences(rows: Sequence[ArchitectureRow]) -> Table:
    """Return A2 − A1 with its interval over seeds."""
    a1, a2 = rows
    head = ("A2 − A1", *_ARCHITECTURE_COLUMNS)
    found = [architecture_difference(a2, a1, key) for _, key in _ARCHITECTURE_COLUMNS.values()]
    means = ("mean", *(f"{each.mean:+.4f}" for each in found))
    return Table(head, [means, ("95 % interval", *(f"{each.low:+.4f} to {each.high:+.4f}" for each in found))])


def _published(head: str, key: str, rows: Sequence[MethodRow] | Sequence[ArchitectureRow]) -> dict[str, list[str]]:
    """Return a column of the paper's figures, if there are any."""
    found = [row.published.get(key, nan) for row in rows]
    return {f"{head} (paper)": [figure_text(head, each) for each in found]} if any(map(isfinite, found)) else {}


def _note_on_published(table: Table) -> list[str]:
    return [_TABLE1_PAPER] if any(head.endswith("(paper)") for head in table.head) else []


def _architecture_table(rows: Sequence[ArchitectureRow], *, compact: bool = False) -> Table:
    """Return Table 2; compact, for a terminal, without deviations and published figures."""
    columns = {"architecture": [row.name for row in rows]}
    for head, (attribute, key) in _ARCHITECTURE_COLUMNS.items():
        deviations = {row.name: nan if compact else row.deviation.get(key, nan) for row in rows}
        columns[head] = [spread_text(head, getattr(row, attribute), deviations[row.name]) for row in rows]
        columns |= {} if compact else _published(head, key, rows)
    return Table.of_columns(columns)


def _difference_table(found: Sequence[Difference]) -> Table:
    columns = {
        "change": [each.text for each in found],
        "from": [each.before for each in found],
        "to": [each.after for each in found],
        "#Click before": [figure_text(CLICKS, each.clicks_before) for each in found],
        "after": [figure_text(CLICKS, each.clicks_after) for each in found],
        "gain": [Units.of(each.clicks_before).change(each.clicks_after - each.clicks_before) for each in found],
        "p": [p_text(each.p_value) for each in found],
    }
    return Table.of_columns(columns, words=("from", "to"))


_MOST_NUMBERED = 12
"""With more items, the cells are too small for numbers."""
_MOST_LABELLED = 40


def positions_plot(curves: Sequence[PositionCurve]) -> Figure:
    """Draw Figure 4: the mean true click probability at each position, a line for each method, with its deviation."""
    last = max(len(curve.mean) for curve in curves)
    figure, axes = style.position_axes("mean true click probability", last, height=3.6)
    for place, curve in enumerate(curves):
        colour, marker = style.COLOURS[place % len(style.COLOURS)], style.MARKERS[place % len(style.MARKERS)]
        position = np.arange(1, len(curve.mean) + 1)
        label = f"{style.plain_label(curve.name)}: {number(float(np.sum(curve.mean)), 3)}"
        axes.plot(position, curve.mean, color=colour, marker=marker, markersize=4, linewidth=1.5, label=label)
        low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
        if np.isfinite(low).any():
            axes.fill_between(position, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_ylim(bottom=0)
    title: dict[str, Any] = {"title": "sum over positions", "title_fontsize": "small", "alignment": "left"}
    axes.legend(ncols=style.legend_columns(2), **title, **_ABOVE, **_LEGEND)
    return figure


def lists_plot(example: ListExample) -> Figure:
    """Draw Figure 3: the true click probabilities of items at positions, a panel for each method."""
    items = len(example.items)
    height = min(6.0, max(1.2, (0.26 if _numbered(example) else 0.17) * items))
    methods = list(example.positions)
    figure = style.new_figure(0.9 + (height + 0.75) * len(methods))
    panels = figure.subplots(len(methods), squeeze=False)[:, 0]
    for method, axes in zip(methods, panels, strict=True):
        image = _list_panel(axes, example, method)
        clicks, ndcg = example.clicks.get(method, nan), example.ndcg.get(method, nan)
        earned = f"{figure_text(CLICKS, clicks)} clicks, nDCG {figure_text('nDCG@10', ndcg)}"
        axes.set_title(f"{style.wrapped_label(method, 60)}: {earned}", fontsize="medium", loc="left")
    figure.colorbar(image, ax=list(panels), location="top", aspect=50, pad=0.01, label="true click probability")
    return figure


def _numbered(example: ListExample) -> bool:
    return len(example.items) <= _MOST_NUMBERED


def _list_panel(axes: Axes, example: ListExample, method: str) -> AxesImage:
    """Draw the table as a heat map; the method's cells are outlined, with bold numbers or dots."""
    from matplotlib.patches import Rectangle

    items, K = example.table.shape
    highest = float(np.nanmax(example.table, initial=0.0)) or 1.0
    edges = (0.5, K + 0.5, items - 0.5, -0.5)
    look: dict[str, Any] = {"cmap": "Blues", "vmin": 0, "vmax": highest, "interpolation": "nearest"}
    image = axes.imshow(example.table, extent=edges, aspect="auto", **look)
    numbered = _numbered(example)
    for item, k in np.ndindex(items, K):
        chosen = int(example.positions[method][item]) == k + 1
        if numbered:
            value = float(example.table[item, k])
            colour, weight = _LIGHT if value > 0.65 * highest else _DARK, "bold" if chosen else "normal"
            look = {"ha": "center", "va": "center", "color": colour, "weight": weight, "fontsize": 8}
            axes.text(k + 1, item, number(value, 2), **look)
        if chosen:
            outline: dict[str, Any] = {"fill": False, "edgecolor": ORANGE, "linewidth": 2.5, "clip_on": False}
            axes.add_patch(Rectangle((k + 0.5, item - 0.5), 1, 1, zorder=3, **outline))
            if not numbered:
                axes.plot(k + 1, item, marker="o", markersize=4, color=ORANGE, markeredgecolor=style.INK, zorder=4)
    axes.set_xticks(range(1, K + 1))
    axes.set_xlabel("position")
    step = ceil(items / _MOST_LABELLED)
    short = [name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…" for name in map(str, example.items)]
    labels = [number(label, 0 if float(label).is_integer() else 2) for label in example.label]
    names = [f"{style.plain_label(name)} (label {label})" for name, label in zip(short, labels, strict=True)]
    axes.set_yticks(range(0, items, step), names[::step], fontsize="small" if numbered else "x-small")
    axes.tick_params(length=0)
    return image
