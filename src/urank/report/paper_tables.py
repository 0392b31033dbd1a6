"""The tables of a reproduction: the paper's Tables 1 and 2, and its claims beside what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan, nan
from typing import TYPE_CHECKING

from markupsafe import Markup

from urank.paper.results import METRICS
from urank.report.numbers import UNKNOWN, Units, number, p_text
from urank.report.tables import Table

if TYPE_CHECKING:
    from urank.paper.results import AucRow, Claim, Difference, Row

__all__ = [
    "CLICKS",
    "architecture_table",
    "best_baseline",
    "by_columns",
    "claim_table",
    "compact_architecture_table",
    "compact_cells",
    "compact_names",
    "compact_table",
    "difference_table",
    "figure_text",
    "highest",
    "leading_row",
    "mean_of",
    "oracles_in_italics",
    "performance_cells",
    "performance_table",
    "setting_tables",
]

CLICKS = "#Click"
_URANK = ("urank", "store-urank")
_DECIMALS = {"CTR": 4}
_HOLDS = {True: "yes", False: "no", None: "cannot be told"}
_AUC = {
    "AUC, train": ("train", "train"),
    "AUC, test": ("test", "test"),
    "AUC, validation": ("valid", "valid"),
    CLICKS: ("clicks", CLICKS),
    "CTR": ("ctr", "CTR"),
}
"""The columns of Table 2: where an `AucRow` has them, and what its deviations and published figures call them."""


def performance_table(rows: Sequence[Row]) -> Table:
    """Table 1 for a page: the best figure of each metric in bold, oracle rows in italics, the paper's beside ours."""
    columns: dict[str, list[str]] = {"method": oracles_in_italics(rows, [row.name for row in rows])}
    for metric in METRICS:
        columns[metric] = performance_cells(rows, metric)
        for head, cells in _published(metric, metric, rows).items():
            columns[head] = oracles_in_italics(rows, cells)
    return by_columns(columns)


def performance_cells(rows: Sequence[Row], metric: str) -> list[str]:
    """A column for a page: means with their stars and deviations, the best in bold, oracles in italics."""
    best = highest(rows, metric)
    cells = []
    for row in rows:
        shown = _starred(row, metric)
        if row in best:
            shown = Markup("<strong>{}</strong>").format(shown)
        cells.append(shown + _spread(metric, mean_of(row, metric), row.deviation.get(metric, nan)))
    return oracles_in_italics(rows, cells)


def oracles_in_italics(rows: Sequence[Row], cells: Sequence[str]) -> list[str]:
    """The cells of these rows as they are, but for those of oracles."""
    return [
        Markup("<em>{}</em>").format(cell) if row.kind == "oracle" else cell
        for row, cell in zip(rows, cells, strict=True)
    ]


def compact_table(rows: Sequence[Row]) -> Table:
    """Table 1 for a terminal: the means and their stars; a dagger marks an oracle."""
    return by_columns({"method": compact_names(rows)} | {metric: compact_cells(rows, metric) for metric in METRICS})


def compact_names(rows: Sequence[Row]) -> list[str]:
    """The names for a terminal, oracles with a dagger."""
    return [f"{row.name} †" if row.kind == "oracle" else row.name for row in rows]


def compact_cells(rows: Sequence[Row], metric: str) -> list[str]:
    """A column for a terminal: means with their stars."""
    return [_starred(row, metric) for row in rows]


def highest(rows: Sequence[Row], metric: str) -> list[Row]:
    """The row with the largest mean, or those that share it; oracle rows do not compete."""
    rivals = [row for row in rows if row.kind != "oracle" and isfinite(mean_of(row, metric))]
    best = max((row.mean[metric] for row in rivals), default=nan)
    return [row for row in rivals if row.mean[metric] == best]


def mean_of(row: Row, metric: str = CLICKS) -> float:
    """What it earns on average; NaN when that is not known."""
    return row.mean.get(metric, nan)


def leading_row(rows: Sequence[Row], metric: str = CLICKS) -> Row | None:
    """U-rank, or else the best of ours; none when there is no such row with a figure."""
    ours = [row for row in rows if row.kind == "ours"]
    named = [row for row in rows if row.key in _URANK and isfinite(mean_of(row, metric))]
    return next(iter(named or highest(ours, metric)), None)


def best_baseline(rows: Sequence[Row], metric: str = CLICKS) -> Row | None:
    """The baseline that earns the most, if there is any with a figure."""
    return next(iter(highest([row for row in rows if row.kind == "baseline"], metric)), None)


def figure_text(metric: str, mean: float) -> str:
    """A figure with as many decimals as the paper gives it.

    >>> figure_text("#Click", 0.90312), figure_text("CTR", 0.0915), figure_text("MAP", float("nan"))
    ('0.903', '0.0915', '–')
    """
    return number(mean, _DECIMALS.get(metric, 3))


def _starred(row: Row, metric: str) -> str:
    shown = figure_text(metric, mean_of(row, metric))
    return f"{shown}*" if shown != UNKNOWN and row.significant(metric) else shown


def _spread(metric: str, mean: float, deviation: float) -> str:
    return "" if isnan(mean) or isnan(deviation) else f" ± {figure_text(metric, deviation)}"


def architecture_table(architectures: Sequence[AucRow]) -> Table:
    """Table 2: how well each architecture of the click model tells clicks, and what U-rank earns on it."""
    columns = {"architecture": [row.name for row in architectures]}
    for head, (where, key) in _AUC.items():
        values = [float(getattr(row, where)) for row in architectures]
        deviations = [row.deviation.get(key, nan) for row in architectures]
        columns[head] = [
            figure_text(head, value) + _spread(head, value, deviation)
            for value, deviation in zip(values, deviations, strict=True)
        ]
        columns |= _published(head, key, architectures)
    return by_columns(columns)


def compact_architecture_table(architectures: Sequence[AucRow]) -> Table:
    """Table 2 for a terminal: the means."""
    columns = {
        head: [figure_text(head, getattr(row, where)) for row in architectures] for head, (where, _) in _AUC.items()
    }
    return by_columns({"architecture": [row.name for row in architectures]} | columns)


def _published(head: str, key: str, rows: Sequence[Row] | Sequence[AucRow]) -> dict[str, list[str]]:
    """A column of what the paper says, where it says anything."""
    found = [row.published.get(key, nan) for row in rows]
    return {f"{head} (paper)": [figure_text(head, each) for each in found]} if any(map(isfinite, found)) else {}


def difference_table(found: Sequence[Difference]) -> Table:
    """What each change is worth."""
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


def claim_table(claims: Sequence[Claim]) -> Table:
    """What the paper says, whether it holds here, and by which numbers."""
    head = ("claim", "holds", "figures")
    return Table(head, [(claim.text, _HOLDS[claim.holds], claim.figures or UNKNOWN) for claim in claims], words=head)


def setting_tables(versions: Mapping[str, str], timed: Mapping[str, Sequence[Row]]) -> Iterator[Table]:
    """The libraries, and how long each method took to train; of each table of methods, by the head of its names."""
    if versions:
        yield Table(("library", "version"), list(versions.items()))
    for head, rows in timed.items():
        if any(isfinite(row.seconds) for row in rows):
            yield Table((head, "training, s a seed"), [(row.name, number(row.seconds, 1)) for row in rows])


def by_columns(columns: Mapping[str, Sequence[str]]) -> Table:
    """The table of these columns, by their heads."""
    return Table(tuple(columns), list(zip(*columns.values(), strict=True)))
