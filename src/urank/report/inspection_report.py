"""An inspection as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from urank.log.identifiability import ranges
from urank.log.inspection import Facts, Inspection
from urank.report.page import Chart, Section, write_page
from urank.report.style import click_curves, link_map
from urank.report.tables import curve_table, feature_tables, group_table, groups, overview_table

__all__ = ["inspection_lead", "inspection_sections", "write_inspection"]

_CAPTION = "Click rate by position; a band is the 95 % interval. Positions shown rarely are left out."


def write_inspection(inspection: Inspection, path: str | Path) -> None:
    """Write the page with the plots."""
    name = inspection.facts.name
    sections = inspection_sections(inspection)
    title = f"Inspection of {Path(name).name}"
    write_page(path, title, inspection_lead(inspection), sections, footer=f"urank inspect {name}")


def inspection_lead(inspection: Inspection) -> str:
    """The verdict as a sentence of its own."""
    sentence = inspection.verdict.sentence
    return f"{sentence[:1].upper()}{sentence[1:]}."


def inspection_sections(inspection: Inspection) -> list[Section]:
    """What the page tells, in order."""
    facts, verdict = inspection.facts, inspection.verdict
    features = list(feature_tables(facts))
    joined, lost = ranges(facts.interventions.joined), ranges(facts.interventions.lost)
    sections = [
        Section("Why", bullets=verdict.reasons),
        Section("Beware", bullets=verdict.warnings) if verdict.warnings else None,
        Section("What to do", bullets=verdict.advice) if verdict.advice else None,
        Section("Counts", tables=[overview_table(facts)]),
        Section(
            "Clicks by position",
            charts=[Chart(click_curves({"all": facts.curve}), _CAPTION)],
            tables=[curve_table(facts)],
        ),
        *_group_sections(facts),
        Section(
            "Which positions can be compared",
            paragraphs=[f"Joined: {joined}. Not: {lost or '–'}."],
            charts=_link_charts(facts),
        ),
        Section("Features", tables=features) if features else None,
    ]
    return [section for section in sections if section is not None]


def _link_charts(facts: Facts) -> list[Chart]:
    shared = facts.interventions.shared
    return [] if shared is None else [Chart(link_map(shared), "Items that were seen at both of two positions.")]


def _group_sections(facts: Facts) -> Iterator[Section]:
    for group, curves in groups(facts).items():
        chart = Chart(click_curves(curves), f"{_CAPTION} The largest groups of {group}.")
        yield Section(f"Clicks by position and {group}", charts=[chart], tables=[group_table(group, curves)])
