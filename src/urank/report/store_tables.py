"""The tables of the app store: Table 3 with the truth beside it, and what the paper has of its own store."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan

from urank.paper.results import STORE_METRICS, Row, StoreRow
from urank.report.paper_tables import (
    by_columns,
    compact_cells,
    compact_names,
    figure_text,
    oracles_in_italics,
    performance_cells,
)
from urank.report.tables import Table

__all__ = [
    "DOWNLOADS",
    "REVENUE",
    "SCENARIOS",
    "as_judged",
    "by_truth",
    "compact_scenario_table",
    "published_table",
    "scenario_table",
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
