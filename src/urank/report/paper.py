"""The report of a reproduction of the paper: in the terminal, and as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from urank.report.numbers import Units, counted, number, p_text
from urank.report.paper_tables import (
    CLICKS,
    architecture_table,
    best_baseline,
    claim_table,
    clicks_of,
    compact_architecture_table,
    compact_table,
    difference_table,
    figure_text,
    leading_row,
    performance_table,
    setting_tables,
)
from urank.report.terminal import bullet, terminal_table

if TYPE_CHECKING:  # matplotlib is slow to load
    from urank.paper.results import Claim, ListExample, Reproduction, Row
    from urank.report.page import Chart, Section
    from urank.report.tables import Table

__all__ = ["print_reproduction", "reproduction_sections", "reproduction_sentence", "write_reproduction"]

_STYLES = {1: "bold green", 0: "bold yellow", -1: "bold red"}
_HOLDS = {True: "yes", False: "no", None: "?"}
_STARS = (
    "A star: better than every baseline. For each baseline a paired t-test compares the queries, each the mean over "
    "its seeds; its p-value is corrected for the number of baselines by Holm's method, and all must be below 0.05. "
    "Rows in italics are oracles, which know what no log tells: they are left out of the comparisons. In bold, the "
    "best figure of the others."
)
_METRICS = (
    "#Click and CTR are by the true click probabilities: clicks a query, and clicks a document shown. MAP and nDCG "
    "leave out queries without a relevant document; for MAP, a document is relevant when its label is 1 or more."
)
_PAPER = "Columns marked (paper) hold what the paper's table says."
_ARCHITECTURES = (
    "RQ2 of the paper: A1 takes an item and tells its click probability at every position; A2 takes an item and a "
    "position and tells one click probability. AUC is of the click model, #Click and CTR are what U-rank earns on it."
)
_BARS = "Clicks a query by the true click probabilities, as in Table 1: {bars}.{line}"
_CURVES = (
    "The mean true click probability at each position, a line for each method{bands}. The legend gives the sum over "
    "the positions."
)
_LISTS = (
    "The true click probability of each item of the query at each position, darker for likelier. The cell with an "
    "orange outline and {mark} is where the method of the panel puts the item. Its title gives the clicks that this "
    "order earns and its nDCG."
)


def print_reproduction(reproduction: Reproduction, console: Console) -> None:
    """Print what a person should know, the sentence that counts last, where the eye is when it ends."""
    if reproduction.rows:
        console.print(terminal_table(compact_table(reproduction.rows)))
        oracle = any(row.kind == "oracle" for row in reproduction.rows)
        stars = "* better than every baseline, p < 0.05" + ("; † knows the truth, not compared" if oracle else "")
        console.print(Text(stars, style="dim"))
        console.print()
    _print_claims(reproduction.claims, console)
    if reproduction.architectures:
        console.print(terminal_table(compact_architecture_table(reproduction.architectures)))
        console.print()
    if reproduction.differences:
        console.print(terminal_table(difference_table(reproduction.differences)))
        console.print()
    _print_claims([*reproduction.architecture_claims, *reproduction.curve_claims], console)
    console.print(Text(reproduction_sentence(reproduction), style=_style(reproduction.rows)))


def _print_claims(claims: Sequence[Claim], console: Console) -> None:
    for claim in claims:
        figures = f": {claim.figures}" if claim.figures else ""
        bullet(console, _HOLDS[claim.holds], Text(f"{claim.text.removesuffix('.')}{figures}"))
    if claims:
        console.print()


def _style(rows: Sequence[Row]) -> str:
    ours, baseline = leading_row(rows), best_baseline(rows)
    if ours is None or baseline is None:
        return "bold"
    return _STYLES[1 if ours.significant(CLICKS) else -1 if clicks_of(ours) < clicks_of(baseline) else 0]


def write_reproduction(reproduction: Reproduction, path: str | Path) -> None:
    """Write the page with the plots."""
    from urank.report.page import write_page  # matplotlib is slow to load

    lead = f"{reproduction_sentence(reproduction)}."
    sections = reproduction_sections(reproduction)
    write_page(path, "The paper's experiments", lead, sections, footer="urank reproduce")


def reproduction_sentence(reproduction: Reproduction) -> str:
    """The line that counts: what U-rank earns against the best baseline, and how many of the paper's claims hold."""
    parts = [*_earnings(reproduction), *_claims_that_hold(reproduction)]
    return "; ".join(parts) or "there are no figures to tell of"


def _earnings(reproduction: Reproduction) -> Iterator[str]:
    """Of Table 1; without it, of what there is."""
    ours, baseline = leading_row(reproduction.rows), best_baseline(reproduction.rows)
    if ours is not None:
        earned = f"{ours.name} earns {figure_text(CLICKS, clicks_of(ours))} clicks a query"
        yield earned if baseline is None else f"{earned}, {_against(ours, baseline)}"
    elif baseline is not None:
        yield f"the best baseline, {baseline.name}, earns {figure_text(CLICKS, clicks_of(baseline))} clicks a query"
    elif rows := [row for row in reproduction.rows if isfinite(clicks_of(row))]:
        yield _each({row.name: clicks_of(row) for row in rows}, "a query")
    elif reproduction.architectures:
        yield _each({f"U-rank on {row.name}": row.clicks for row in reproduction.architectures}, "a query")
    elif reproduction.curves:
        yield _each({curve.name: float(np.sum(curve.mean)) for curve in reproduction.curves}, "a query")
    elif reproduction.example is not None and reproduction.example.clicks:
        yield _each(dict(reproduction.example.clicks), f"on query {reproduction.example.query}")


def _against(ours: Row, baseline: Row) -> str:
    mean, base = clicks_of(ours), clicks_of(baseline)
    rival = f"the best baseline ({baseline.name}: {figure_text(CLICKS, base)})"
    if mean == base:
        return f"just as {rival} does"
    compared = f"{Units.of(base).size(mean - base)} {'more' if mean > base else 'less'} than {rival}"
    p_value = ours.p_value.get(CLICKS)
    if mean < base or p_value is None or not isfinite(p_value):
        return compared
    shown = p_text(p_value)
    equals = f"p < {shown[1:]}" if shown.startswith("<") else f"p = {shown}"
    return f"{compared}, {equals}" if ours.significant(CLICKS) else f"{compared}, which may be chance ({equals})"


def _each(clicks: dict[str, float], where: str) -> str:
    (first, earned), *others = clicks.items()
    told = [f"{first} earns {figure_text(CLICKS, earned)} clicks {where}"]
    return ", ".join(told + [f"{name} {figure_text(CLICKS, value)}" for name, value in others])


def _claims_that_hold(reproduction: Reproduction) -> Iterator[str]:
    groups = {
        "Section 5.4": reproduction.claims,
        "Table 2": reproduction.architecture_claims,
        "Figure 4": reproduction.curve_claims,
    }
    told = [(source, [claim.holds for claim in claims]) for source, claims in groups.items() if claims]
    if not told:
        return
    (source, holds), *others = told
    counts = [f"{holds.count(True)} of {counted(len(holds), 'claim', 'claims')} of {source}"]
    counts += [f"{holds.count(True)} of {len(holds)} of {source}" for source, holds in others]
    verb = "holds" if len(told) == 1 and 1 in (holds.count(True), len(holds)) else "hold"
    listed = " and ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
    untold = sum(holds.count(None) for _, holds in told)
    yield f"{listed} {verb} on this data" + (f" ({untold} cannot be told)" if untold else "")


def reproduction_sections(reproduction: Reproduction) -> list[Section]:
    """What the page tells, in order."""
    from urank.report.page import Section

    found = reproduction
    size = f"{counted(found.seeds, 'seed', 'seeds')}, {counted(found.queries, 'test query', 'test queries')} in all"
    run = f"{', '.join(found.what) or 'Nothing'}, on {found.data.removesuffix('.')}: {size}."
    sections = [Section("What was run", paragraphs=[run])]
    if found.rows:
        sections.append(_performance(found))
    if found.claims:
        sections.append(Section("The claims of Section 5.4", tables=[claim_table(found.claims)]))
    if any(isfinite(clicks_of(row)) for row in found.rows):
        sections.append(Section("Clicks by method", charts=[_bars(found.rows)]))
    if found.architectures or found.architecture_claims:
        sections.append(_architectures(found))
    if found.curves or found.curve_claims:
        sections.append(_positions(found))
    if found.example is not None and found.example.positions:
        sections.append(_lists(found.example))
    if found.differences:
        told = "One change at a time; p is of the paired t-test on queries, each the mean over its seeds."
        table = difference_table(found.differences)
        sections.append(Section("What the differences to the paper are worth", paragraphs=[told], tables=[table]))
    if found.settings or found.versions or found.seconds:
        sections.append(_settings(found))
    return sections


def _performance(found: Reproduction) -> Section:
    from urank.report.page import Section

    spread = any(isfinite(each) for row in found.rows for each in row.deviation.values())
    over = f"± is the standard deviation over the {found.seeds} seeds." if spread else ""
    table = performance_table(found.rows)
    notes = [over, _STARS, _METRICS, *_on_published(table)]
    return Section("Table 1: overall performance", tables=[table], notes=list(filter(None, notes)))


def _on_published(table: Table) -> list[str]:
    return [_PAPER] if any(head.endswith("(paper)") for head in table.head) else []


def _bars(rows: Sequence[Row]) -> Chart:
    from urank.report.page import Chart
    from urank.report.paper_figures import clicks_plot

    spread = any(isfinite(row.deviation.get(CLICKS, float("nan"))) for row in rows)
    bars = "whiskers are one standard deviation over seeds" if spread else "one seed, hence no whiskers"
    line = "" if best_baseline(rows) is None else " The dotted line is the best baseline."
    return Chart(clicks_plot(rows), _BARS.format(bars=bars, line=line))


def _architectures(found: Reproduction) -> Section:
    from urank.report.page import Section

    tables = [architecture_table(found.architectures)] if found.architectures else []
    notes = [note for table in tables for note in _on_published(table)]
    tables += [claim_table(found.architecture_claims)] if found.architecture_claims else []
    title = "Table 2: architectures of the click model"
    return Section(title, paragraphs=[_ARCHITECTURES], tables=tables, notes=notes)


def _positions(found: Reproduction) -> Section:
    from urank.report.page import Chart, Section
    from urank.report.paper_figures import positions_plot

    charts = []
    if found.curves:
        spread = any(np.isfinite(curve.deviation).any() for curve in found.curves)
        bands = ", with a band of one standard deviation over seeds to either side" if spread else ""
        charts.append(Chart(positions_plot(found.curves), _CURVES.format(bands=bands)))
    tables = [claim_table(found.curve_claims)] if found.curve_claims else []
    return Section("Figure 4: clicks by position", charts=charts, tables=tables)


def _lists(example: ListExample) -> Section:
    from urank.report.page import Chart, Section
    from urank.report.paper_figures import lists_plot, numbered

    mark = "a bold number" if numbered(example) else "a dot"
    chart = Chart(lists_plot(example), _LISTS.format(mark=mark))
    return Section("Figure 3: the lists of one query", paragraphs=[f"Query {example.query}."], charts=[chart])


def _settings(found: Reproduction) -> Section:
    from urank.report.page import Section

    took = f"{counted(found.seeds, 'seed', 'seeds')}. All training together took {number(found.seconds, 0)} seconds."
    tables = list(setting_tables(found.versions, found.rows))
    return Section("Settings", paragraphs=[took], tables=tables, code=found.settings)
