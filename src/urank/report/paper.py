"""The report of a reproduction of the paper: in the terminal, and as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from urank.report.numbers import counted, number
from urank.report.paper_tables import (
    CLICKS,
    architecture_table,
    best_baseline,
    claim_table,
    compact_architecture_table,
    compact_table,
    difference_table,
    mean_of,
    performance_table,
    setting_tables,
)
from urank.report.paper_words import (
    ORACLES,
    earnings,
    earnings_of_each,
    print_claims,
    print_stars,
    standing,
    standing_style,
)
from urank.report.store import print_store, store_earnings, store_sections, store_standing
from urank.report.store_tables import as_judged
from urank.report.terminal import terminal_table

if TYPE_CHECKING:  # matplotlib is slow to load
    from urank.paper.results import ListExample, Reproduction, Row
    from urank.report.page import Chart, Section
    from urank.report.tables import Table

__all__ = ["print_reproduction", "reproduction_sections", "reproduction_sentence", "write_reproduction"]

_STARS = (
    "A star: better than every baseline. For each baseline a paired t-test compares the queries, each the mean over "
    "its seeds; its p-value is corrected for the number of baselines by Holm's method, and all must be below 0.05."
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
        print_stars(reproduction.rows, console)
    print_claims(reproduction.claims, console)
    if reproduction.architectures:
        console.print(terminal_table(compact_architecture_table(reproduction.architectures)))
        console.print()
    if reproduction.differences:
        console.print(terminal_table(difference_table(reproduction.differences)))
        console.print()
    print_claims([*reproduction.architecture_claims, *reproduction.curve_claims], console)
    print_store(reproduction, console)
    style = standing_style(standing(reproduction.rows, CLICKS), store_standing(reproduction.store))
    console.print(Text(reproduction_sentence(reproduction), style=style))


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
    """Of Table 1, or without it of what there is on simulated clicks; then of the app store."""
    table = list(earnings(reproduction.rows, CLICKS, "earns", "clicks a query"))
    yield from table or _without_table(reproduction)
    yield from store_earnings(reproduction.store)


def _without_table(reproduction: Reproduction) -> Iterator[str]:
    unit, clicks = "clicks a query", {}
    if reproduction.architectures:
        clicks = {f"U-rank on {row.name}": row.clicks for row in reproduction.architectures}
    elif reproduction.curves:
        clicks = {curve.name: float(np.sum(curve.mean)) for curve in reproduction.curves}
    elif reproduction.example is not None:
        unit, clicks = f"clicks on query {reproduction.example.query}", dict(reproduction.example.clicks)
    if clicks:
        yield earnings_of_each(clicks, CLICKS, "earns", unit)


def _claims_that_hold(reproduction: Reproduction) -> Iterator[str]:
    groups = {
        "Section 5.4": reproduction.claims,
        "Table 2": reproduction.architecture_claims,
        "Figure 4": reproduction.curve_claims,
        "Section 6.1": reproduction.store_claims,
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
    run = f"{', '.join(found.what) or 'Nothing'}, on {found.data.removesuffix('.')}: {_size(found)}."
    sections = [Section("What was run", paragraphs=[run])]
    if found.rows:
        sections.append(_performance(found))
    if found.claims:
        sections.append(Section("The claims of Section 5.4", tables=[claim_table(found.claims)]))
    if any(isfinite(mean_of(row)) for row in found.rows):
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
    sections += store_sections(found)
    if found.settings or found.versions or found.seconds:
        sections.append(_settings(found))
    return sections


def _size(found: Reproduction) -> str:
    judged = [counted(found.queries, "test query", "test queries")] if found.queries or not found.visits else []
    judged += [counted(found.visits, "test visit", "test visits")] if found.visits else []
    return f"{counted(found.seeds, 'seed', 'seeds')}, {' and '.join(judged)} in all"


def _performance(found: Reproduction) -> Section:
    from urank.report.page import Section

    spread = any(isfinite(each) for row in found.rows for each in row.deviation.values())
    over = f"± is the standard deviation over the {found.seeds} seeds." if spread else ""
    table = performance_table(found.rows)
    notes = [over, _STARS, ORACLES, _METRICS, *_on_published(table)]
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
    timed = {"method of Table 1": found.rows, "method of Table 3": as_judged(found.store)}
    tables = list(setting_tables(found.versions, timed))
    return Section("Settings", paragraphs=[took], tables=tables, code=found.settings)
