"""The report of `urank inspect`: what a log contains and whether position effects can be learned from it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from urank.log.identifiability import ranges
from urank.log.inspection import Facts, Inspection, LogVerdict, PositionRates
from urank.report.page import Chart, Section, Summary, notebook_html, write_page
from urank.report.style import COLOURS, legend, new_figure, plain_label, position_axes, position_ticks
from urank.report.tables import UNKNOWN, Table, as_sentence, bar, bullet, print_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


_CAPTION = "Click rate by position; a band is the 95 % interval. Positions shown rarely are omitted."
_LINKING = (
    "clicks on items that were also seen at other positions, by which the position is compared with them; without any, "
    "its effect on clicks is extrapolated"
)
_LINKS = (
    "The effect of a position shows in items that were seen there and elsewhere. Positions are connected if such items "
    "link them, directly or through others."
)
_FEATURES = (
    "R² is the share of the position within a list that the features predict. If it is near 100 %, the old ranker's "
    "choice is hard to separate from the effect of position."
)
_ANSWERS = {
    "learnable": "Yes: this log shows how clicks fall with position, so a better order can be learned from it.",
    "partly learnable": "Partly: this log shows how clicks fall with position for some positions only.",
    "not learnable": "No: this log does not show how clicks fall with position, so no order can be learned from it.",
}
_STYLES = {"learnable": "bold green", "partly learnable": "bold yellow", "not learnable": "bold red"}


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print the tables, then the verdict with its reasons, warnings and advice."""
    print_tables(console, inspection_tables(inspection.facts))
    verdict = inspection.verdict
    bullet(console, "verdict", Text(verdict.sentence, style=_STYLES[verdict.level]))
    for title, lines in (("why", verdict.reasons), ("beware", verdict.warnings), ("do", verdict.advice)):
        for line in lines:
            bullet(console, title, line)


def write_inspection(inspection: Inspection, path: str | Path) -> None:
    """Write the page with plots."""
    title = f"Inspection of {Path(inspection.facts.name).name}"
    write_page(path, title, inspection_summary(inspection), inspection_sections(inspection))


def inspection_html(inspection: Inspection) -> str:
    """Return the view in a notebook."""
    summary, verdict = inspection_summary(inspection), inspection.verdict
    if verdict.level != "not learnable":
        summary = replace(summary, next_step="`urank.URank().fit(log)` learns a ranker from it.")
    return notebook_html(summary, [*_verdict_sections(verdict), _click_section(inspection.facts)])


def inspection_summary(inspection: Inspection) -> Summary:
    """Return the verdict in plain words."""
    facts, verdict = inspection.facts, inspection.verdict
    counts = f"{facts.rows:,} impressions in {facts.lists:,} lists, with {facts.clicks:,} clicks"
    if verdict.level == "not learnable":
        return Summary(_ANSWERS[verdict.level], f"{as_sentence(verdict.sentence)} {counts}.", verdict.advice[0], "bad")
    log = shlex.quote(facts.name) if Path(facts.name).exists() else "LOG"
    run = f"`urank run {log} -o job`, with the same options for its columns, learns a ranker and estimates its gain."
    tone = "good" if verdict.level == "learnable" else ""
    return Summary(_ANSWERS[verdict.level], f"{as_sentence(verdict.sentence)} {counts}.", run, tone)


def inspection_sections(inspection: Inspection) -> list[Section]:
    """Return the sections of the page."""
    facts = inspection.facts
    graph, features = facts.interventions, list(_feature_tables(facts))
    shared = graph.shared
    links = [] if shared is None else [Chart(partial(_link_map, shared), "Items seen at both of two positions.")]
    by_group = [
        Section(
            f"Clicks by position and {group}",
            charts=[Chart(partial(click_curves, curves), f"{_CAPTION} The largest groups of {group}.")],
            tables=[_group_table(group, curves)],
        )
        for group, curves in _groups(facts).items()
    ]
    lost = f" Not connected, so they rest on extrapolation: {ranges(graph.lost)}." if graph.lost else ""
    connected = f"Connected: {ranges(graph.joined) or UNKNOWN}.{lost}"
    sections = [
        *_verdict_sections(inspection.verdict),
        Section("Counts", tables=[_overview_table(facts)]),
        _click_section(facts),
        *by_group,
        Section("Which positions can be compared", paragraphs=[_LINKS, connected], charts=links),
        Section("Features", paragraphs=[_FEATURES] if facts.confounding else [], tables=features) if features else None,
    ]
    return [section for section in sections if section is not None]


def _verdict_sections(verdict: LogVerdict) -> list[Section]:
    parts = {"Why": verdict.reasons, "Beware": verdict.warnings, "What to do": verdict.advice}
    return [Section(title, bullets=lines) for title, lines in parts.items() if lines]


def _click_section(facts: Facts) -> Section:
    curve, terms = Chart(partial(click_curves, {"all": facts.curve}), _CAPTION), {"linking clicks": _LINKING}
    return Section("Clicks by position", charts=[curve], terms=terms, tables=[_position_rate_table(facts)])


def inspection_tables(facts: Facts) -> Iterator[Table]:
    """Yield the tables in reading order."""
    yield _overview_table(facts)
    yield _position_rate_table(facts)
    for group, curves in _groups(facts).items():
        yield _group_table(group, curves)
    yield from _feature_tables(facts)


def _groups(facts: Facts) -> dict[str, dict[str, PositionRates]]:
    """Return the curves of policies and of categories where there are at least two."""
    curves = {"policy": facts.by_policy, "category": facts.by_category}
    return {group: by_name for group, by_name in curves.items() if len(by_name) > 1}


def _overview_table(facts: Facts) -> Table:
    length = facts.list_length
    rows = [
        ("impressions", f"{facts.rows:,}"),
        ("clicks", f"{facts.clicks:,} ({facts.clicks / facts.rows:.2%})"),
        ("queries", f"{facts.queries:,}"),
        ("lists", f"{facts.lists:,}"),
        ("items", f"{facts.items:,}" if facts.items is not None else "not named"),
        ("items seen at two positions", f"{facts.interventions.moved:,}"),
        ("list length", f"{length['p0']:.0f} – {length['p100']:.0f}, median {length['p50']:.0f}"),
        ("lists without a click", f"{facts.lists_without_click:.1%}"),
        ("lists with nothing at position 1", f"{facts.lists_below_top:.1%}"),
        ("lists with gaps", f"{facts.lists_with_gaps:.1%}"),
    ]
    if facts.value is not None:
        v = facts.value
        rows.append(("value", f"{v['p0']:g} – {v['p100']:g}, median {v['p50']:g}, mean {v['mean']:.4g}"))
        rows.append(("value is 0", f"{v['zero']:.1%}"))
    return Table(("log", ""), rows)


def _position_rate_table(facts: Facts) -> Table:
    """Click rate by position, and the clicks on items that connect the position with others."""
    curve, evidence = facts.curve, facts.interventions.evidence
    top = max(curve.rate) or 1.0
    rows = []
    for k, n, rate, low, high in zip(curve.position, curve.impressions, curve.rate, curve.low, curve.high, strict=True):
        linking = f"{evidence[k - 1]:,.0f}" if evidence[k - 1] > 0 else "none"
        rows.append((str(k), f"{n:,}", f"{rate:.2%}", f"{low:.2%} – {high:.2%}", bar(rate / top), linking))
    return Table(("position", "shown", "click rate", "95 % interval", "", "linking clicks"), rows)


def _group_table(group: str, curves: Mapping[str, PositionRates]) -> Table:
    """Click rates of each group at a few positions."""
    shown = sorted({k for curve in curves.values() for k in curve.position})
    places = [k for k in shown if k in (1, 2, 3, 5, 10, 20)] or shown[:5]
    rows = []
    for name, curve in curves.items():
        rates = dict(zip(curve.position, curve.rate, strict=True))
        cells = [f"{rates[k]:.2%}" if k in rates else UNKNOWN for k in places]
        rows.append((name, f"{sum(curve.impressions):,}", *cells))
    return Table((group, "impressions", *(f"rate at {k}" for k in places)), rows)


def _feature_tables(facts: Facts) -> Iterator[Table]:
    """How well features predict the position, and how often they are missing."""
    if facts.confounding is not None:
        head = ("features tell position", "R²", "", "strongest correlations")
        rows = []
        for name, found in {"all lists": facts.confounding, **facts.confounding_by_policy}.items():
            strongest = ", ".join(f"{feature} {r:+.2f}" for feature, r in list(found.strongest.items())[:3])
            rows.append((name, f"{found.share:.1%}", bar(found.share), strongest))
        yield Table(head, rows, words=("", head[-1]))
    if facts.missing:
        worst = sorted(facts.missing.items(), key=lambda entry: -entry[1])[:10]
        yield Table(("feature", "missing", ""), [(name, f"{share:.1%}", bar(share)) for name, share in worst])


def click_curves(curves: Mapping[str, PositionRates]) -> Figure:
    """Plot click rate by position, a line for each group (the paper's Figure 1), with the 95 % interval as a band.

    Positions with at most a tenth of the impressions of the group's most frequent position are omitted, since their
    wide intervals would hide the rest. With more than three groups there are no bands.
    """
    often = {name: np.array(curve.impressions) > 0.1 * max(curve.impressions) for name, curve in curves.items()}
    last = max(int(np.array(curve.position)[often[name]].max()) for name, curve in curves.items())
    figure, axes = position_axes("click rate", last)
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        shown = often[name]
        position, rate = np.array(curve.position)[shown], np.array(curve.rate)[shown]
        axes.plot(position, rate, color=colour, marker="o", markersize=3, linewidth=1.5, label=plain_label(name))
        if len(curves) <= 3:
            low, high = np.array(curve.low)[shown], np.array(curve.high)[shown]
            axes.fill_between(position, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_ylim(bottom=0)
    if len(curves) > 1:
        legend(axes)
    return figure


def _link_map(shared: NDArray[np.int64]) -> Figure:
    """Plot how many items were seen at both of two positions as a heat map without its diagonal."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    figure = new_figure(3.8)
    axes = figure.add_subplot()
    links = shared.astype(float)
    np.fill_diagonal(links, np.nan)
    K = len(links)
    blue = to_rgb(COLOURS[0])
    # Transparent where there are few, so that it is readable on light and dark pages.
    colours = LinearSegmentedColormap.from_list("links", [(*blue, 0.0), (*blue, 1.0)])
    extent = (0.5, K + 0.5, K + 0.5, 0.5)
    image = axes.imshow(links, cmap=colours, vmin=0, extent=extent, interpolation="nearest", aspect="auto")
    ticks = position_ticks(K)
    axes.set(xlabel="position", ylabel="position", xticks=ticks, yticks=ticks)
    figure.colorbar(image, label="items seen at both")
    return figure
