"""The report of Table 3: an app store, judged by the paper's debiased metrics and by the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite, nan

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from urank.lab.experiment_results import STORE_METRICS, MethodRow, Reproduction, StoreRow
from urank.lab.method_tables import (
    KIND_COLOURS,
    ORACLES,
    bar_chart,
    best_baseline,
    claim_table,
    compact_columns,
    earnings,
    figure_text,
    has_spread,
    italic_oracles,
    leading_row,
    performance_cells,
    print_claims,
    print_signs,
)
from urank.report.page import Chart, Section
from urank.report.style import INK, new_figure, plain_label, style_axes
from urank.report.tables import Table, Units, print_tables

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


def print_store(found: Reproduction, console: Console) -> None:
    """Print both scenarios and the claims of Section 6.1."""
    if found.store:
        print_tables(console, (_compact_scenario_table(found.store, scenario) for scenario in SCENARIOS))
        print_signs(found.store, console, "true: the expected value of the order")
    print_claims(found.store_claims, console)


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
        bars = bar_chart(rows, DOWNLOADS, "downloads a visit, debiased", _BARS, truth=true)
        charts = [bars, Chart(_agreement_plot(rows), _POINTS)]
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
    true = [MethodRow(row.key, row.name, row.kind, row.true, {}, row.true_p_value) for row in rows]
    columns = {"method": italic_oracles(rows, [row.name for row in rows])}
    for metric, cutoff in _cutoffs(scenario).items():
        columns[metric] = performance_cells(rows, metric)
        columns[f"true{cutoff}"] = performance_cells(true, metric)
    return Table.of_columns(columns)


def _compact_scenario_table(rows: Sequence[StoreRow], scenario: str) -> Table:
    """Return one scenario for a terminal: the debiased figures, then the true ones."""
    cutoffs = _cutoffs(scenario)
    estimated = compact_columns(rows, {metric: cutoff or metric for metric, cutoff in cutoffs.items()})
    true = compact_columns(
        [row.by_truth() for row in rows], {metric: f"true{cutoff}" for metric, cutoff in cutoffs.items()}
    )
    return Table.of_columns(estimated | true)


def _cutoffs(scenario: str) -> dict[str, str]:
    """Return metric -> cutoff, such as `@3` of `#click@3`; empty for all positions."""
    return {metric: metric.removeprefix(scenario) for metric in STORE_METRICS if metric.startswith(scenario)}


def _agreement_plot(rows: Sequence[StoreRow]) -> Figure:
    """Plot the debiased estimate over the truth, a panel for each scenario and a point for each method."""
    figure = new_figure(7.2, 4.4, layout="constrained")
    panels = figure.subplots(1, len(SCENARIOS), squeeze=False)[0]
    for metric, axes in zip(SCENARIOS, panels, strict=True):
        _agreement_panel(axes, rows, metric)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


def _agreement_panel(axes: Axes, rows: Sequence[StoreRow], metric: str) -> None:
    axes.set_title(SCENARIOS[metric], fontsize="medium", loc="left")
    axes.set(xlabel="true", ylabel="debiased estimate")
    style_axes(axes, "both")
    seen: Counter[str] = Counter()
    ends = []
    for row in rows:
        x, y = row.true.get(metric, nan), row.mean.get(metric, nan)
        marker = _MARKERS[seen[row.kind] % len(_MARKERS)]
        seen[row.kind] += 1
        colour = KIND_COLOURS[row.kind]
        axes.scatter(x, y, s=42, marker=marker, color=colour, edgecolor=INK, label=plain_label(row.name))
        ends += [x, y] if isfinite(x) and isfinite(y) else []
    if ends:
        low, high = min(ends), max(ends)
        margin = 0.06 * (high - low) or 0.5
        axes.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
        axes.axline((low, low), slope=1, color=INK, linestyle=":", linewidth=1)
