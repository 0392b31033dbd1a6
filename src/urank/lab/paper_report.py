"""The report of a reproduction of the paper: in the terminal, and as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from rich.console import Console
from rich.text import Text

from urank.lab.appstore_report import DOWNLOADS, print_store, store_earnings, store_sections
from urank.lab.experiment_results import (
    METRICS,
    ArchitectureRow,
    Difference,
    ListExample,
    MethodRow,
    PositionCurve,
    Reproduction,
)
from urank.lab.method_tables import (
    ORACLES,
    ORANGE,
    bar_chart,
    claim_table,
    compact_columns,
    earnings,
    earnings_by_name,
    figure_text,
    has_spread,
    italic_oracles,
    performance_cells,
    print_claims,
    print_signs,
    spread_text,
    standing,
)
from urank.report.page import Chart, Section, write_page
from urank.report.style import COLOURS, INK, MARKERS, new_axes, new_figure, plain_label, wrapped_label
from urank.report.tables import Table, Units, counted, number, p_text, print_tables

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

_STARS = (
    "A star: better than every baseline. For each baseline a paired t-test compares the queries, each averaged over "
    "its seeds; its p-value is corrected for the number of baselines by Holm's method, and all must be below 0.05."
)
_METRICS = (
    "#Click and CTR are computed from the true click probabilities: clicks per query, and clicks per document shown. "
    "MAP and nDCG leave out queries without a relevant document; for MAP, a document is relevant if its label is at "
    "least 1."
)
_PAPER = "Columns marked (paper) contain the paper's figures."
_ARCHITECTURES = (
    "RQ2 of the paper: A1 maps an item to its click probabilities at all positions; A2 maps an item and a position to "
    "one click probability. AUC is of the click model, #Click and CTR are of U-rank trained on it."
)
_BARS = "Clicks a query by the true click probabilities, as in Table 1: {bars}.{line}"
_CURVES = (
    "The mean true click probability at each position, a line for each method{bands}. The legend gives the sum over "
    "the positions."
)
_LISTS = (
    "The true click probability of each item of the query at each position, darker if higher. The cell with an orange "
    "outline and {mark} is the position that the method of the panel gives the item. The title of a panel gives the "
    "expected clicks and the nDCG of that order."
)
_DIFFERENCES = "One change at a time; p is of the paired t-test on queries, each averaged over its seeds."


def print_reproduction(found: Reproduction, console: Console) -> None:
    """Print the tables and claims, the summary last."""
    if found.rows:
        print_tables(console, [Table.of_columns(compact_columns(found.rows, {metric: metric for metric in METRICS}))])
        print_signs(found.rows, console)
    print_claims(found.claims, console)
    if found.architectures:
        print_tables(console, [_architecture_table(found.architectures, compact=True)])
    if found.differences:
        print_tables(console, [_difference_table(found.differences)])
    print_claims([*found.architecture_claims, *found.curve_claims], console)
    print_store(found, console)
    standings = (standing(found.rows, CLICKS), standing(found.store, DOWNLOADS))
    worst = min((each for each in standings if each is not None), default=None)
    console.print(Text(_summary(found), style="bold" if worst is None else _STYLES[worst]))


def write_reproduction(found: Reproduction, path: str | Path) -> None:
    """Write the page with the plots."""
    sections = list(reproduction_sections(found))
    write_page(path, "The paper's experiments", f"{_summary(found)}.", sections, footer="urank reproduce")


def _summary(found: Reproduction) -> str:
    """Return U-rank's gain over the best baseline, and the number of the paper's claims that hold, in one line."""
    clicks = list(earnings(found.rows, CLICKS, "earns", "clicks a query")) or list(_earnings_without_table(found))
    return "; ".join([*clicks, *store_earnings(found.store), *_claims_that_hold(found)]) or "there are no figures"


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
    }
    decided = [(source, [claim.holds for claim in claims]) for source, claims in groups.items() if claims]
    if not decided:
        return
    (source, holds), *others = decided
    counts = [f"{holds.count(True)} of {counted(len(holds), 'claim', 'claims')} of {source}"]
    counts += [f"{holds.count(True)} of {len(holds)} of {source}" for source, holds in others]
    verb = "holds" if len(decided) == 1 and 1 in (holds.count(True), len(holds)) else "hold"
    listed = " and ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
    undecided = sum(holds.count(None) for _, holds in decided)
    yield f"{listed} {verb} on this data" + (f" ({undecided} undecided)" if undecided else "")


# --- Sections --------------------------------------------------------------------------------------------------------


def reproduction_sections(found: Reproduction) -> Iterator[Section]:
    """Yield the sections of the page."""
    run = f"{', '.join(found.what) or 'Nothing'}, on {found.data.removesuffix('.')}: {_size(found)}."
    yield Section("What was run", paragraphs=[run])
    if found.rows:
        yield _performance(found.rows, found.seeds)
    if found.claims:
        yield Section("The claims of Section 5.4", tables=[claim_table(found.claims)])
    if any(isfinite(row.mean.get(CLICKS, nan)) for row in found.rows):
        yield Section("Clicks by method", charts=[bar_chart(found.rows, CLICKS, "clicks a query", _BARS)])
    if found.architectures or found.architecture_claims:
        yield _architectures(found)
    if found.curves or found.curve_claims:
        tables = [claim_table(found.curve_claims)] if found.curve_claims else []
        yield Section("Figure 4: clicks by position", charts=_curve_charts(found.curves), tables=tables)
    if found.example is not None and found.example.positions:
        caption = _LISTS.format(mark="a bold number" if _numbered(found.example) else "a dot")
        yield Section(
            "Figure 3: the lists of one query",
            paragraphs=[f"Query {found.example.query}."],
            charts=[Chart(lists_plot(found.example), caption)],
        )
    if found.differences:
        table = _difference_table(found.differences)
        yield Section("The effect of the differences to the paper", paragraphs=[_DIFFERENCES], tables=[table])
    yield from store_sections(found)
    if found.settings or found.versions or found.seconds:
        yield _settings(found)


def _size(found: Reproduction) -> str:
    judged = [counted(found.queries, "test query", "test queries")] if found.queries or not found.visits else []
    judged += [counted(found.visits, "test visit", "test visits")] if found.visits else []
    return f"{counted(found.seeds, 'seed', 'seeds')}, {' and '.join(judged)} in all"


def _performance(rows: Sequence[MethodRow], seeds: int) -> Section:
    columns = {"method": italic_oracles(rows, [row.name for row in rows])}
    for metric in METRICS:
        columns[metric] = performance_cells(rows, metric)
        columns |= {head: italic_oracles(rows, cells) for head, cells in _published(metric, metric, rows).items()}
    table = Table.of_columns(columns)
    over = [f"± is the standard deviation over the {seeds} seeds."] if has_spread(rows) else []
    notes = [*over, _STARS, ORACLES, _METRICS, *_note_on_published(table)]
    return Section("Table 1: overall performance", tables=[table], notes=notes)


def _published(head: str, key: str, rows: Sequence[MethodRow] | Sequence[ArchitectureRow]) -> dict[str, list[str]]:
    """Return a column of the paper's figures, if there are any."""
    found = [row.published.get(key, nan) for row in rows]
    return {f"{head} (paper)": [figure_text(head, each) for each in found]} if any(map(isfinite, found)) else {}


def _note_on_published(table: Table) -> list[str]:
    return [_PAPER] if any(head.endswith("(paper)") for head in table.head) else []


def _architectures(found: Reproduction) -> Section:
    tables = [_architecture_table(found.architectures)] if found.architectures else []
    notes = [note for table in tables for note in _note_on_published(table)]
    tables += [claim_table(found.architecture_claims)] if found.architecture_claims else []
    title = "Table 2: architectures of the click model"
    return Section(title, paragraphs=[_ARCHITECTURES], tables=tables, notes=notes)


def _architecture_table(rows: Sequence[ArchitectureRow], *, compact: bool = False) -> Table:
    """Return Table 2; compact, for a terminal, without deviations and published figures."""
    columns = {"architecture": [row.name for row in rows]}
    for head, (attribute, key) in _ARCHITECTURE_COLUMNS.items():
        deviations = [nan if compact else row.deviation.get(key, nan) for row in rows]
        columns[head] = [
            spread_text(head, getattr(row, attribute), deviation)
            for row, deviation in zip(rows, deviations, strict=True)
        ]
        columns |= {} if compact else _published(head, key, rows)
    return Table.of_columns(columns)


def _difference_table(found: Sequence[Difference]) -> Table:
    head = ["change", "from", "to", "#Click before", "after", "gain", "p"]
    rows = [
        [
            each.text,
            each.before,
            each.after,
            figure_text(CLICKS, each.clicks_before),
            figure_text(CLICKS, each.clicks_after),
            Units.of(each.clicks_before).change(each.clicks_after - each.clicks_before),
            p_text(each.p_value),
        ]
        for each in found
    ]
    return Table(head, rows, words=("from", "to"))


def _curve_charts(curves: Sequence[PositionCurve]) -> list[Chart]:
    spread = any(np.isfinite(curve.deviation).any() for curve in curves)
    bands = ", with a band of one standard deviation over seeds to either side" if spread else ""
    return [Chart(positions_plot(curves), _CURVES.format(bands=bands))] if curves else []


def _settings(found: Reproduction) -> Section:
    took = f"{counted(found.seeds, 'seed', 'seeds')}. Total training time: {number(found.seconds, 0)} seconds."
    tables = [Table(("library", "version"), list(found.versions.items()))] if found.versions else []
    timed: dict[str, Sequence[MethodRow]] = {"method of Table 1": found.rows, "method of Table 3": found.store}
    for head, rows in timed.items():
        if any(isfinite(row.seconds) for row in rows):
            tables.append(Table((head, "training, s a seed"), [(row.name, number(row.seconds, 1)) for row in rows]))
    return Section("Settings", paragraphs=[took], tables=tables, code=found.settings)


# --- Figures 3 and 4 -------------------------------------------------------------------------------------------------

_NAME_WIDTH = 28
_MOST_NUMBERED = 12
"""With more items, the cells are too small for numbers."""
_MOST_LABELLED = 40


def positions_plot(curves: Sequence[PositionCurve]) -> Figure:
    """Draw Figure 4: the mean true click probability at each position, a line for each method, with its deviation."""
    figure, axes = new_axes("position", "mean true click probability", height=3.6, integer_x=True)
    for place, curve in enumerate(curves):
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
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


def lists_plot(example: ListExample) -> Figure:
    """Draw Figure 3: the true click probabilities of items at positions, a panel for each method."""
    items = len(example.items)
    height = min(6.0, max(1.2, (0.26 if _numbered(example) else 0.17) * items))
    methods = list(example.positions)
    figure = new_figure(6.4, 0.9 + (height + 0.75) * len(methods), layout="constrained")
    panels = figure.subplots(len(methods), squeeze=False)[:, 0]
    for method, axes in zip(methods, panels, strict=True):
        image = _list_panel(axes, example, method)
        clicks, ndcg = example.clicks.get(method, nan), example.ndcg.get(method, nan)
        earned = f"{figure_text(CLICKS, clicks)} clicks, nDCG {figure_text('nDCG@10', ndcg)}"
        axes.set_title(f"{wrapped_label(method, 60)}: {earned}", fontsize="medium", loc="left")
    figure.colorbar(image, ax=list(panels), location="top", aspect=50, pad=0.01, label="true click probability")
    return figure


def _numbered(example: ListExample) -> bool:
    return len(example.items) <= _MOST_NUMBERED


def _list_panel(axes: Axes, example: ListExample, method: str) -> AxesImage:
    """Draw the table as a heat map; the method's cells are outlined, with bold numbers or dots."""
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
            colour = "white" if value > 0.65 * highest else INK
            weight = "bold" if chosen else "normal"
            shown = number(value, 2)
            axes.text(k + 1, item, shown, ha="center", va="center", color=colour, weight=weight, fontsize=8)
        if chosen:
            outline: dict[str, Any] = {
                "fill": False,
                "edgecolor": ORANGE,
                "linewidth": 2.5,
                "zorder": 3,
                "clip_on": False,
            }
            axes.add_patch(Rectangle((k + 0.5, item - 0.5), 1, 1, **outline))
            if not numbered:
                axes.plot(k + 1, item, marker="o", markersize=4, color=ORANGE, markeredgecolor=INK, zorder=4)
    axes.set_xticks(range(1, K + 1))
    axes.set_xlabel("position")
    step = ceil(items / _MOST_LABELLED)
    names = [_item_label(str(name), label) for name, label in zip(example.items, example.label, strict=True)]
    axes.set_yticks(range(0, items, step), names[::step], fontsize="small" if numbered else "x-small")
    axes.tick_params(length=0)
    return image


def _item_label(name: str, label: float) -> str:
    shown = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
    return f"{plain_label(shown)} (label {number(label, 0) if float(label).is_integer() else number(label, 2)})"
