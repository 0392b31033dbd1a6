"""The report of a reproduction of the paper: in the terminal, and as a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, isfinite, isnan, nan
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from rich.console import Console
from rich.text import Text

from urank.lab.results import METRICS
from urank.report.style import COLOURS, plain_axes, plain_label
from urank.report.tables import UNKNOWN, Table, Units, bullet, counted, number, p_text, terminal_table

if TYPE_CHECKING:
    from urank.lab.results import AucRow, Claim, Difference, ListExample, PositionCurve, Reproduction, Row
    from urank.report.page import Chart, Section
    from urank.report.tables import Table

__all__ = [
    "CLICKS",
    "INK",
    "KINDS",
    "ORACLES",
    "architecture_table",
    "best_baseline",
    "by_columns",
    "claim_table",
    "clicks_plot",
    "compact_architecture_table",
    "compact_cells",
    "compact_names",
    "compact_table",
    "difference_table",
    "earnings",
    "earnings_of_each",
    "figure_text",
    "highest",
    "leading_row",
    "lists_plot",
    "mean_of",
    "numbered",
    "oracles_in_italics",
    "performance_cells",
    "performance_table",
    "positions_plot",
    "print_claims",
    "print_reproduction",
    "print_stars",
    "reproduction_sections",
    "reproduction_sentence",
    "setting_tables",
    "standing",
    "standing_style",
    "write_reproduction",
]

ORACLES = (
    "Rows in italics are oracles, which know what no log tells: they are left out of the comparisons. In bold, the "
    "best figure of the others."
)
_STYLES = {1: "bold green", 0: "bold yellow", -1: "bold red"}
_HOLDS = {True: "yes", False: "no", None: "?"}


def earnings(rows: Sequence[Row], metric: str, verb: str, unit: str) -> Iterator[str]:
    """What U-rank earns against the best baseline; without either, what there is.

    Args:
        rows: of a table.
        metric: what is told of them.
        verb: such as `earns`.
        unit: such as `clicks a query`.
    """
    ours, baseline = leading_row(rows, metric), best_baseline(rows, metric)
    if ours is not None:
        told = f"{ours.name} {verb} {figure_text(metric, mean_of(ours, metric))} {unit}"
        yield told if baseline is None else f"{told}, {_against(ours, baseline, metric)}"
    elif baseline is not None:
        yield f"the best baseline, {baseline.name}, {verb} {figure_text(metric, mean_of(baseline, metric))} {unit}"
    elif known := {row.name: mean_of(row, metric) for row in rows if isfinite(mean_of(row, metric))}:
        yield earnings_of_each(known, metric, verb, unit)


def _against(ours: Row, baseline: Row, metric: str) -> str:
    mean, base = mean_of(ours, metric), mean_of(baseline, metric)
    rival = f"the best baseline ({baseline.name}: {figure_text(metric, base)})"
    if mean == base:
        return f"just as {rival} does"
    compared = f"{Units.of(base).size(mean - base)} {'more' if mean > base else 'less'} than {rival}"
    p_value = ours.p_value.get(metric)
    if mean < base or p_value is None or not isfinite(p_value):
        return compared
    shown = p_text(p_value)
    equals = f"p < {shown[1:]}" if shown.startswith("<") else f"p = {shown}"
    return f"{compared}, {equals}" if ours.significant(metric) else f"{compared}, which may be chance ({equals})"


def earnings_of_each(means: Mapping[str, float], metric: str, verb: str, unit: str) -> str:
    """What each of them earns, by name."""
    (first, earned), *others = means.items()
    told = [f"{first} {verb} {figure_text(metric, earned)} {unit}"]
    return ", ".join(told + [f"{name} {figure_text(metric, value)}" for name, value in others])


def standing(rows: Sequence[Row], metric: str) -> int | None:
    """1 when U-rank is better than every baseline beyond chance, −1 when one is better, 0 between; else none."""
    ours, baseline = leading_row(rows, metric), best_baseline(rows, metric)
    if ours is None or baseline is None:
        return None
    return 1 if ours.significant(metric) else -1 if mean_of(ours, metric) < mean_of(baseline, metric) else 0


def standing_style(*standings: int | None) -> str:
    """How a terminal shows the sentence that counts: as the worst of what it tells."""
    known = [each for each in standings if each is not None]
    return _STYLES[min(known)] if known else "bold"


def print_stars(rows: Sequence[Row], console: Console, *others: str) -> None:
    """Print what the signs of a table mean, and others that it has."""
    oracles = ["† knows the truth, not compared"] if any(row.kind == "oracle" for row in rows) else []
    console.print(Text("; ".join(["* better than every baseline, p < 0.05", *oracles, *others]), style="dim"))
    console.print()


def print_claims(claims: Sequence[Claim], console: Console) -> None:
    """Print each claim beside whether it holds."""
    for claim in claims:
        figures = f": {claim.figures}" if claim.figures else ""
        bullet(console, _HOLDS[claim.holds], Text(f"{claim.text.removesuffix('.')}{figures}"))
    if claims:
        console.print()


CLICKS = "#Click"
_URANK = ("urank", "store-urank")
_DECIMALS = {"CTR": 4}
_HOLDS_PAPER_TABLES = {True: "yes", False: "no", None: "cannot be told"}
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
    return Table(
        head, [(claim.text, _HOLDS_PAPER_TABLES[claim.holds], claim.figures or UNKNOWN) for claim in claims], words=head
    )


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


_BLUE, *_, _GREY = COLOURS
KINDS = {"baseline": _GREY, "oracle": "#d0d7de", "ours": _BLUE}
INK = "#1f2328"
_ORANGE = "#e8590c"
_MARKERS = "os^Dv"
_DIAMOND: dict[str, Any] = {
    "marker": "D",
    "markersize": 5,
    "markerfacecolor": _ORANGE,
    "markeredgecolor": "white",
    "zorder": 4,
}
_NAME_WIDTH = 28
_MOST_NUMBERED = 12
"""With more items than this, the cells are too small for numbers."""
_MOST_LABELLED = 40


def clicks_plot(
    rows: Sequence[Row],
    metric: str = CLICKS,
    unit: str = "clicks a query",
    *,
    marks: Mapping[str, float] | None = None,
    marked: str = "true",
) -> Figure:
    """A bar for each row of a table, the first at the top, with its deviation and a line at the best baseline.

    Args:
        rows: of the table.
        metric: what the bars are.
        unit: what they are in.
        marks: key of a row -> where a diamond stands on its bar; none when left out.
        marked: what the legend calls the diamonds.
    """
    figure = Figure(figsize=(6.4, 0.9 + 0.32 * len(rows)))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    ends = [_bar(axes, place, row, metric, (marks or {}).get(row.key, nan)) for place, row in enumerate(rows)]
    keys: list[Artist] = [_kind_patch(kind) for kind in KINDS if any(row.kind == kind for row in rows)]
    baseline = best_baseline(rows, metric)
    if baseline is not None:
        at = mean_of(baseline, metric)
        keys.append(axes.axvline(at, color=INK, linestyle=":", linewidth=1, label="best baseline"))
    if marks:
        keys.append(Line2D([], [], linestyle="none", label=marked, **_DIAMOND))
    axes.set_yticks(range(len(rows)), [_lines(row.name) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * max(filter(isfinite, ends), default=1.0) or 1.0)
    axes.set_xlabel(unit)
    axes.legend(
        handles=keys,
        frameon=False,
        fontsize="small",
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(keys),
        borderaxespad=0,
    )
    return figure


def _bar(axes: Axes, place: int, row: Row, metric: str, mark: float) -> float:
    """Draw one, and tell how far it reaches with its whisker and its mark."""
    mean, deviation = mean_of(row, metric), row.deviation.get(metric, nan)
    star = "*" if isfinite(mean) and row.significant(metric) else ""
    end = mean + (deviation if isfinite(deviation) else 0.0)
    if isfinite(mean):
        hatch = "///" if row.kind == "oracle" else None
        axes.barh(place, mean, height=0.66, color=KINDS[row.kind], edgecolor="white", linewidth=0, hatch=hatch)
        if isfinite(deviation):
            axes.errorbar(mean, place, xerr=deviation, fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
    if isfinite(mark):
        axes.plot(mark, place, **_DIAMOND)
        end = max(mark, end) if isfinite(end) else mark
    axes.annotate(
        figure_text(metric, mean) + star,
        (end if isfinite(end) else 0.0, place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize="small",
        fontweight="bold" if row.kind == "ours" else "normal",
        fontstyle="italic" if row.kind == "oracle" else "normal",
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
    )
    return end


def _kind_patch(kind: str) -> Patch:
    hatch = "///" if kind == "oracle" else None
    return Patch(facecolor=KINDS[kind], edgecolor="white", linewidth=0, hatch=hatch, label=kind)


def positions_plot(curves: Sequence[PositionCurve]) -> Figure:
    """Figure 4: the mean true click probability at each position, a line for each method, with its deviation."""
    figure = Figure(figsize=(6.4, 3.6))
    axes = plain_axes(figure, "position", "mean true click probability")
    for place, curve in enumerate(curves):
        colour, marker = COLOURS[place % len(COLOURS)], _MARKERS[place % len(_MARKERS)]
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


def numbered(example: ListExample) -> bool:
    """Whether the cells of Figure 3 are large enough for numbers."""
    return len(example.items) <= _MOST_NUMBERED


def lists_plot(example: ListExample) -> Figure:
    """Figure 3: the true click probabilities of items at positions, a panel for each method, its choices outlined."""
    items = len(example.items)
    height = min(6.0, max(1.2, (0.26 if numbered(example) else 0.17) * items))
    methods = list(example.positions)
    figure = Figure(figsize=(6.4, 0.9 + (height + 0.75) * len(methods)), layout="constrained")
    panels = figure.subplots(len(methods), squeeze=False)[:, 0]
    for method, axes in zip(methods, panels, strict=True):
        image = _panel(axes, example, method)
        clicks, ndcg = example.clicks.get(method, nan), example.ndcg.get(method, nan)
        earned = f"{figure_text(CLICKS, clicks)} clicks, nDCG {figure_text('nDCG@10', ndcg)}"
        axes.set_title(f"{_lines(method, 60)}: {earned}", fontsize="medium", loc="left")
    figure.colorbar(image, ax=list(panels), location="top", aspect=50, pad=0.01, label="true click probability")
    return figure


def _panel(axes: Axes, example: ListExample, method: str) -> AxesImage:
    """The table as a map; its cells that the method chose are outlined, with bold numbers, or dots where none fit."""
    items, K = example.table.shape
    most = float(np.nanmax(example.table, initial=0.0)) or 1.0
    edges = (0.5, K + 0.5, items - 0.5, -0.5)
    image = axes.imshow(
        example.table, cmap="Blues", vmin=0, vmax=most, extent=edges, aspect="auto", interpolation="nearest"
    )
    for item, position in np.ndindex(items, K):
        chosen = int(example.positions[method][item]) == position + 1
        if numbered(example):
            value = float(example.table[item, position])
            colour = "white" if value > 0.65 * most else INK
            weight = "bold" if chosen else "normal"
            text = number(value, 2)
            axes.text(position + 1, item, text, ha="center", va="center", color=colour, weight=weight, fontsize=8)
        if chosen:
            _outline(axes, item, position + 1, dotted=not numbered(example))
    axes.set_xticks(range(1, K + 1))
    axes.set_xlabel("position")
    step = ceil(items / _MOST_LABELLED)
    names = [_item_label(str(name), label) for name, label in zip(example.items, example.label, strict=True)]
    axes.set_yticks(range(0, items, step), names[::step], fontsize="small" if numbered(example) else "x-small")
    axes.tick_params(length=0)
    return image


def _outline(axes: Axes, item: int, position: int, *, dotted: bool) -> None:
    corner = (position - 0.5, item - 0.5)
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_ORANGE, linewidth=2.5, zorder=3, clip_on=False))
    if dotted:
        axes.plot(position, item, marker="o", markersize=4, color=_ORANGE, markeredgecolor=INK, zorder=4)


def _item_label(name: str, label: float) -> str:
    shown = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
    return f"{plain_label(shown)} (label {number(label, 0) if float(label).is_integer() else number(label, 2)})"


def _lines(name: str, width: int = _NAME_WIDTH) -> str:
    """A name in several lines when it is long."""
    return "\n".join(plain_label(line) for line in wrap(name, width, break_on_hyphens=False) or [name])


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
    from urank.lab.appstore_report import print_store, store_standing

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
    from urank.lab.appstore_report import store_earnings

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
    from urank.lab.appstore_report import store_sections

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

    charts = []
    if found.curves:
        spread = any(np.isfinite(curve.deviation).any() for curve in found.curves)
        bands = ", with a band of one standard deviation over seeds to either side" if spread else ""
        charts.append(Chart(positions_plot(found.curves), _CURVES.format(bands=bands)))
    tables = [claim_table(found.curve_claims)] if found.curve_claims else []
    return Section("Figure 4: clicks by position", charts=charts, tables=tables)


def _lists(example: ListExample) -> Section:
    from urank.report.page import Chart, Section

    mark = "a bold number" if numbered(example) else "a dot"
    chart = Chart(lists_plot(example), _LISTS.format(mark=mark))
    return Section("Figure 3: the lists of one query", paragraphs=[f"Query {example.query}."], charts=[chart])


def _settings(found: Reproduction) -> Section:
    from urank.report.page import Section

    took = f"{counted(found.seeds, 'seed', 'seeds')}. All training together took {number(found.seconds, 0)} seconds."
    from urank.lab.appstore_report import as_judged

    timed = {"method of Table 1": found.rows, "method of Table 3": as_judged(found.store)}
    tables = list(setting_tables(found.versions, timed))
    return Section("Settings", paragraphs=[took], tables=tables, code=found.settings)
