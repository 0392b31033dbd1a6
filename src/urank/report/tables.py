"""An inspection in the terminal: tables with small bars, the verdict last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite, isnan, log10, nan

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as TerminalTable
from rich.text import Text

from urank.log.inspection import Facts, Inspection, PositionRates

__all__ = [
    "UNKNOWN",
    "Table",
    "Units",
    "bar",
    "bullet",
    "counted",
    "curve_table",
    "feature_tables",
    "group_table",
    "groups",
    "inspection_tables",
    "number",
    "overview_table",
    "p_text",
    "percent",
    "print_inspection",
    "terminal_table",
]

UNKNOWN = "–"
_LEAST_P = 1e-16
"""Below it, a p-value says no more than that it is small."""


def number(value: float, decimals: int, *, sign: bool = False) -> str:
    """A number with so many decimals; with its sign also when it is not negative, if asked.

    >>> number(1234.5, 1), number(-0.061, 3), number(0.061, 3, sign=True), number(float("nan"), 3)
    ('1,234.5', '−0.061', '+0.061', '–')
    """
    if isnan(value):
        return UNKNOWN
    if not isfinite(value):
        return "−∞" if value < 0 else "+∞" if sign else "∞"
    return format(value, f"{'+' if sign else ''}z,.{decimals}f").replace("-", "−")


def percent(share: float, *, sign: bool = False, decimals: int | None = None) -> str:
    """A share in percent; two decimals below one percent and one above, unless told.

    >>> percent(0.0724), percent(-0.0724, sign=True), percent(0.004, sign=True)
    ('7.2 %', '−7.2 %', '+0.40 %')
    """
    shown = number(100 * share, percent_decimals(share) if decimals is None else decimals, sign=sign)
    return shown if shown == UNKNOWN else f"{shown} %"


def percent_decimals(*shares: float) -> int:
    """As many decimals as the largest of the shares needs."""
    return 2 if all(abs(share) < 0.01 for share in shares) else 1


def p_text(p_value: float) -> str:
    """A p-value with the digits that mean something.

    >>> p_text(0.4123), p_text(2.2e-5), p_text(0.0)
    ('0.41', '2e-05', '<1e-16')
    """
    if isnan(p_value):
        return UNKNOWN
    if p_value < _LEAST_P:
        return f"<{_LEAST_P:g}"
    return f"{p_value:.2g}" if p_value >= 0.001 else f"{p_value:.0e}"


def counted(n: int, one: str, many: str) -> str:
    """How many there are.

    >>> counted(1, "query", "queries"), counted(1012, "query", "queries")
    ('1 query', '1,012 queries')
    """
    return f"{n:,} {one if n == 1 else many}"


@dataclass(frozen=True)
class Units:
    """How amounts and differences of one evaluation are written: all with the same decimals, differences in percent.

    Attributes:
        base: what differences are percents of; where it is not above 0 they have none, and are told as they are.
        decimals: of amounts.
    """

    base: float
    decimals: int

    @classmethod
    def of(cls, base: float) -> Units:
        """With at least three digits of the base.

        >>> [Units.of(base).decimals for base in (0.0123, 0.845, 4.2, 42.0, 42000.0, 0.0)]
        [4, 3, 3, 2, 0, 3]
        """
        size = floor(log10(abs(base))) if isfinite(base) and base != 0 else 0
        return cls(base, max(0, 3 - size) if size >= 0 else 2 - size)

    @property
    def in_percent(self) -> bool:
        """Whether a difference can be told in percent."""
        return 0 < self.base < inf

    def share(self, difference: float) -> float:
        """Of the base; NaN when there is none."""
        return difference / self.base if self.in_percent else nan

    def amount(self, value: float) -> str:
        """A utility."""
        return number(value, self.decimals)

    def within(self, low: float, high: float) -> str:
        """An interval of a utility."""
        return UNKNOWN if isnan(low) or isnan(high) else f"{self.amount(low)} – {self.amount(high)}"

    def change(self, difference: float) -> str:
        """A difference, in percent if it can be.

        >>> Units.of(0.8).change(0.04), Units.of(0.0).change(0.04)
        ('+5.0 %', '+0.040')
        """
        if not self.in_percent:
            return number(difference, self.decimals, sign=True)
        return percent(self.share(difference), sign=True)

    def changes(self, low: float, high: float) -> str:
        """An interval of a difference, for a table.

        >>> Units.of(0.8).changes(-0.04, 0.08), Units.of(0.0).changes(-0.04, 0.08)
        ('−5.0 to +10.0 %', '−0.040 to +0.080')
        """
        if isnan(low) or isnan(high):
            return UNKNOWN
        if not self.in_percent:
            return " to ".join(number(end, self.decimals, sign=True) for end in (low, high))
        ends = [self.share(low), self.share(high)]
        return " to ".join(number(100 * end, percent_decimals(*ends), sign=True) for end in ends) + " %"

    def size(self, difference: float) -> str:
        """How large a difference is, whichever way."""
        return self.change(abs(difference)).removeprefix("+")

    def sizes(self, low: float, high: float) -> str:
        """An interval of a difference, for a sentence.

        >>> Units.of(0.8).sizes(-0.04, 0.08)
        '−5.0 % to 10.0 %'
        """
        if not self.in_percent:
            return f"{self.amount(low)} to {self.amount(high)}"
        ends = [self.share(low), self.share(high)]
        return " to ".join(percent(end, decimals=percent_decimals(*ends)) for end in ends)


_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR_WIDTH = 12


@dataclass(frozen=True)
class Table:
    """Rows of text under a head.

    Attributes:
        head, rows: the cells.
        words: the heads of columns that hold words (set flush left and wrapped); the first column always does.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ("",)


def bar(share: float, width: int = _BAR_WIDTH) -> str:
    """A bar of eighths of a character.

    >>> bar(0.5, width=4)
    '██'
    """
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def inspection_tables(facts: Facts) -> Iterator[Table]:
    """Everything there is to tell, in order."""
    yield overview_table(facts)
    yield curve_table(facts)
    for group, curves in groups(facts).items():
        yield group_table(group, curves)
    yield from feature_tables(facts)


def groups(facts: Facts) -> dict[str, dict[str, PositionRates]]:
    """The curves of policies and of categories, where there are several."""
    curves = {"policy": facts.by_policy, "category": facts.by_category}
    return {group: by_name for group, by_name in curves.items() if len(by_name) > 1}


def feature_tables(facts: Facts) -> Iterator[Table]:
    """How features tell the position, and which are missing."""
    if facts.confounding is not None:
        yield _confounding_table(facts)
    if facts.missing:
        worst = sorted(facts.missing.items(), key=lambda entry: -entry[1])[:10]
        yield Table(("feature", "missing", ""), [(name, f"{share:.1%}", bar(share)) for name, share in worst])


def overview_table(facts: Facts) -> Table:
    """Counts."""
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


def curve_table(facts: Facts) -> Table:
    """Click rate by position, and the clicks that link it to the others."""
    curve, evidence = facts.curve, facts.interventions.evidence
    top = max(curve.rate) or 1.0
    rows = [
        (str(k), f"{n:,}", f"{rate:.2%}", f"{low:.2%} – {high:.2%}", bar(rate / top), _linked(evidence[k - 1]))
        for k, n, rate, low, high in zip(
            curve.position, curve.impressions, curve.rate, curve.low, curve.high, strict=True
        )
    ]
    return Table(("position", "shown", "click rate", "95 % interval", "", "linking clicks"), rows)


def _linked(clicks: float) -> str:
    return f"{clicks:,.0f}" if clicks > 0 else "none"


def group_table(group: str, curves: dict[str, PositionRates]) -> Table:
    """Click rates of groups at a few positions."""
    shown = sorted({k for curve in curves.values() for k in curve.position})
    places = [k for k in shown if k in (1, 2, 3, 5, 10, 20)] or shown[:5]
    rows = []
    for name, curve in curves.items():
        rates = dict(zip(curve.position, curve.rate, strict=True))
        cells = [f"{rates[k]:.2%}" if k in rates else "–" for k in places]
        rows.append((name, f"{sum(curve.impressions):,}", *cells))
    return Table((group, "impressions", *(f"rate at {k}" for k in places)), rows)


def _confounding_table(facts: Facts) -> Table:
    head = ("features tell position", "R²", "", "strongest correlations")
    everything = {} if facts.confounding is None else {"all lists": facts.confounding}
    rows = [
        (
            name,
            f"{found.share:.1%}",
            bar(found.share),
            ", ".join(f"{f} {r:+.2f}" for f, r in list(found.strongest.items())[:3]),
        )
        for name, found in {**everything, **facts.confounding_by_policy}.items()
    ]
    return Table(head, rows, words=("", head[-1]))


_WRAPPED = 12
_STYLES = {"learnable": "bold green", "partly learnable": "bold yellow", "not learnable": "bold red"}


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print everything a person should know, the verdict last, where the eye is when it ends."""
    for table in inspection_tables(inspection.facts):
        console.print(terminal_table(table))
        console.print()
    verdict = inspection.verdict
    bullet(console, "verdict", Text(verdict.sentence, style=_STYLES[verdict.level]))
    for title, lines in (("why", verdict.reasons), ("beware", verdict.warnings), ("do", verdict.advice)):
        for line in lines:
            bullet(console, title, Text(line))


def bullet(console: Console, title: str, line: Text) -> None:
    """Print a line, which may wrap, beside a word that says what kind of line it is."""
    grid = TerminalTable.grid(padding=(0, 1))
    grid.add_column(width=8, style="dim")
    grid.add_column()
    grid.add_row(title, line)
    console.print(grid, highlight=False)


def terminal_table(table: Table) -> RenderableType:
    """The table as rich draws it, with as many columns as the terminal has room for."""
    return _Fitted(table)


@dataclass(frozen=True)
class _Fitted:
    """Draws a table within the width there is: the first column always stays, others go where there is no room."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.table
        shown = TerminalTable(box=None, header_style="bold", pad_edge=False)
        columns = self._that_fit(options.max_width)
        for number in columns:
            name = table.head[number]
            left = number == 0 or name in table.words
            shown.add_column(
                Text(name),
                justify="left" if left else "right",
                no_wrap=not self._may_wrap(number),
                min_width=self._least(number),
                overflow="fold",
            )
        for row in table.rows:
            shown.add_row(*(Text(row[number]) for number in columns))
        yield shown

    def _that_fit(self, width: int) -> Sequence[int]:
        """Bars go first, then the last columns; the first two stay."""
        columns = list(range(len(self.table.head)))
        while sum(self._least(number) for number in columns) + 2 * (len(columns) - 1) > width and len(columns) > 2:
            bars = [number for number in columns[1:] if not self.table.head[number]]
            columns.remove(bars[-1] if bars else columns[-1])
        return columns

    def _may_wrap(self, number: int) -> bool:
        """Words wrap; numbers and bars do not, unless there is nothing else."""
        named = self.table.head[number] != ""
        return number == 0 or (named and self.table.head[number] in self.table.words) or len(self.table.head) == 2

    def _least(self, number: int) -> int:
        """The width that a column needs at least."""
        cells = [self.table.head[number], *(row[number] for row in self.table.rows)]
        longest = max(cell_len(cell) for cell in cells)
        return min(longest, _WRAPPED) if self._may_wrap(number) else longest
