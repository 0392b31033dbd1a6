"""The report of Table 3: an app store, judged as the paper judges it and by the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from urank.lab.paper_report import (
    INK,
    KINDS,
    ORACLES,
    best_baseline,
    by_columns,
    claim_table,
    clicks_plot,
    compact_cells,
    compact_names,
    earnings,
    figure_text,
    leading_row,
    mean_of,
    oracles_in_italics,
    performance_cells,
    print_claims,
    print_stars,
    standing,
)
from urank.lab.results import STORE_METRICS, Row, StoreRow
from urank.report.style import plain_label
from urank.report.tables import Table, Units, terminal_table

if TYPE_CHECKING:
    from urank.lab.results import Reproduction, StoreRow
    from urank.report.page import Section

__all__ = [
    "DOWNLOADS",
    "REVENUE",
    "SCENARIOS",
    "agreement_plot",
    "as_judged",
    "by_truth",
    "compact_scenario_table",
    "downloads_plot",
    "print_store",
    "published_table",
    "scenario_table",
    "store_earnings",
    "store_sections",
    "store_standing",
]

DOWNLOADS, REVENUE = "#click", "Revenue"
SCENARIOS = (DOWNLOADS, REVENUE)
"""Each named as its metric of all positions."""


def as_judged(rows: Sequence[StoreRow]) -> list[Row]:
    """The rows by the debiased estimate."""
    return [
        Row(row.key, row.name, row.kind, row.mean, row.deviation, row.p_value, row.published, row.seconds)
        for row in rows
    ]


def by_truth(rows: Sequence[StoreRow]) -> list[Row]:
    """The rows by what is true."""
    return [Row(row.key, row.name, row.kind, row.true, row.true_deviation, row.true_p_value) for row in rows]


def scenario_table(rows: Sequence[StoreRow], scenario: str) -> Table:
    """One scenario of Table 3 for a page: beside each debiased figure the true one, without its deviation."""
    judged = as_judged(rows)
    true = [Row(row.key, row.name, row.kind, row.mean, {}, row.p_value) for row in by_truth(rows)]
    columns = {"method": oracles_in_italics(judged, [row.name for row in rows])}
    for metric in _metrics(scenario):
        columns[metric] = performance_cells(judged, metric)
        columns[f"true{_cutoff(metric)}"] = performance_cells(true, metric)
    return by_columns(columns)


def compact_scenario_table(rows: Sequence[StoreRow], scenario: str) -> Table:
    """One scenario of Table 3 for a terminal: the debiased figures, then the true ones."""
    judged, true = as_judged(rows), by_truth(rows)
    metrics = _metrics(scenario)
    columns = {"method": compact_names(judged)}
    columns |= {_cutoff(metric) or metric: compact_cells(judged, metric) for metric in metrics}
    columns |= {f"true{_cutoff(metric)}": compact_cells(true, metric) for metric in metrics}
    return by_columns(columns)


def published_table(rows: Sequence[StoreRow]) -> Table | None:
    """What the paper's Table 3 says of the methods that it has; none when it has none of them."""
    known = [row for row in rows if any(map(isfinite, row.published.values()))]
    columns = {
        f"{metric} (paper)": [figure_text(metric, row.published.get(metric, nan)) for row in known]
        for metric in STORE_METRICS
    }
    return by_columns({"method": [row.name for row in known]} | columns) if known else None


def _metrics(scenario: str) -> list[str]:
    return [metric for metric in STORE_METRICS if metric.partition("@")[0] == scenario]


def _cutoff(metric: str) -> str:
    """`@3` of `#click@3`; nothing when all positions count."""
    return "".join(metric.partition("@")[1:])


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


_WHAT = (
    "A simulated app store takes the place of the paper's. Methods learn from the log of its production ranker, and "
    "the day after judges them. Scenario 1 counts the downloads of a visit (#click), Scenario 2 what they are worth "
    "(Revenue): of all positions, and of the first 1, 3 and 5."
)
_DEBIASED = (
    "The figures are debiased as in Section 6.1: a logged download counts by how much likelier, or less likely, its "
    "app is looked at where a method puts it than where it was shown. How likely that is, by category and position, "
    "is estimated from random traffic. The columns marked true hold what an order truly brings by the probabilities "
    "of the simulation, which no real store knows."
)
_STARS = (
    "A star: better than every baseline. For each baseline a paired t-test compares the visits of all seeds; its "
    "p-value is corrected for the number of baselines by Holm's method, and all must be below 0.05. A star of a true "
    "figure is of the same tests on the true figures."
)
_TOP = (
    "#click@1 counts position 1 alone. By definition it is best served by sorting by the chance of a download there, "
    "so a ranker that maximises the downloads of all positions can be behind on it, and likewise on Revenue@1.{oracles}"
)
_ORACLES = (
    " The oracles show it: by the truth, sorting by the CTR at 1 is never behind the matching on #click@1, and never "
    "ahead on #click."
)
_PAPER = "Columns marked (paper) hold what the paper's table says, which is of another store: only orders compare."
_CLAIMS = (
    "Those on the order of the methods are not the paper's own: they ask whether its way to judge can be trusted. Such "
    "a claim fails when two methods are told apart, beyond chance, by the estimate and by the truth the other way "
    "round."
)
_BARS = "Downloads a visit, debiased as in Table 3: {bars}.{line} The diamonds are the true downloads."
_POINTS = (
    "Each method by its true figure and its debiased estimate. On the dotted line the two are equal; where the points "
    "rise from left to right, the estimate orders the methods as the truth does. Grey: baselines; blue: ours; light: "
    "oracles."
)


def print_store(found: Reproduction, console: Console) -> None:
    """Print both scenarios and what holds of Section 6.1."""
    for scenario in SCENARIOS if found.store else ():
        console.print(terminal_table(compact_scenario_table(found.store, scenario)))
        console.print()
    if found.store:
        print_stars(as_judged(found.store), console, "true: what the order truly brings")
    print_claims(found.store_claims, console)


def store_earnings(rows: Sequence[StoreRow]) -> Iterator[str]:
    """What U-rank brings against the best baseline, by the estimate and by the truth."""
    judged, true = as_judged(rows), by_truth(rows)
    yield from earnings(judged, DOWNLOADS, "brings", "downloads a visit")
    ours, rival, best = leading_row(judged, DOWNLOADS), best_baseline(judged, DOWNLOADS), best_baseline(true, DOWNLOADS)
    if ours is None or rival is None or best is None:
        return
    mean = next(mean_of(row, DOWNLOADS) for row in true if row.key == ours.key)
    if isfinite(mean):
        base = mean_of(best, DOWNLOADS)
        other = "" if best.key == rival.key else f" against {best.name}, the best in truth"
        yield f"truly {Units.of(base).change(mean - base)}{other}"


def store_standing(rows: Sequence[StoreRow]) -> int | None:
    """How U-rank stands by the estimate, as `standing` has it."""
    return standing(as_judged(rows), DOWNLOADS)


def store_sections(found: Reproduction) -> Iterator[Section]:
    """What the page tells of the store, in order."""
    from urank.report.page import Section

    if found.store:
        yield _table(found)
    if found.store_claims:
        claims = claim_table(found.store_claims)
        yield Section("The claims of Section 6.1", tables=[claims], notes=[_CLAIMS])
    if any(isfinite(mean_of(row, DOWNLOADS)) for row in as_judged(found.store)):
        yield _charts(found.store)


def _table(found: Reproduction) -> Section:
    from urank.report.page import Section

    tables = [scenario_table(found.store, scenario) for scenario in SCENARIOS]
    published = published_table(found.store)
    seeds = f"± is the standard deviation over the {found.seeds} seeds, each another store."
    both = {"store-ctr1-truth", "store-km"} <= {row.key for row in found.store}
    notes = [seeds] if _spread(found.store) else []
    notes += [_STARS, ORACLES, _TOP.format(oracles=_ORACLES if both else "")]
    if published is not None:
        tables, notes = [*tables, published], [*notes, _PAPER]
    return Section("Table 3: an app store", paragraphs=[_WHAT, _DEBIASED], tables=tables, notes=notes)


def _spread(rows: Sequence[StoreRow]) -> bool:
    return any(isfinite(each) for row in rows for each in row.deviation.values())


def _charts(rows: Sequence[StoreRow]) -> Section:
    from urank.report.page import Chart, Section

    bars = "whiskers are one standard deviation over seeds" if _spread(rows) else "one seed, hence no whiskers"
    line = "" if best_baseline(as_judged(rows), DOWNLOADS) is None else " The dotted line is the best baseline."
    charts = [
        Chart(downloads_plot(rows), _BARS.format(bars=bars, line=line)),
        Chart(agreement_plot(rows), _POINTS),
    ]
    return Section("The debiased estimate and the truth", charts=charts)
