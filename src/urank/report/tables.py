"""Numbers as text, tables, and how both are printed in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite, isnan, log10, nan

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

UNKNOWN = "–"
_SMALLEST_P = 1e-16
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WRAPPED = 12
"""The width to which a column of words may shrink."""


def number(value: float, decimals: int, *, sign: bool = False) -> str:
    """Format a number with a fixed number of decimals; with `sign`, positive numbers get a plus sign.

    >>> number(1234.5, 1), number(-0.061, 3), number(0.061, 3, sign=True), number(float("nan"), 3)
    ('1,234.5', '−0.061', '+0.061', '–')
    """
    if isnan(value):
        return UNKNOWN
    if not isfinite(value):
        return "−∞" if value < 0 else "+∞" if sign else "∞"
    return format(value, f"{'+' if sign else ''}z,.{decimals}f").replace("-", "−")


def percent(share: float, *, sign: bool = False, decimals: int | None = None) -> str:
    """Format a share in percent, by default with two decimals below one percent and one above.

    >>> percent(0.0724), percent(-0.0724, sign=True), percent(0.004, sign=True)
    ('7.2 %', '−7.2 %', '+0.40 %')
    """
    shown = number(100 * share, _percent_decimals(share) if decimals is None else decimals, sign=sign)
    return shown if shown == UNKNOWN else f"{shown} %"


def _percent_decimals(*shares: float) -> int:
    return 2 if all(abs(share) < 0.01 for share in shares) else 1


def p_text(p_value: float) -> str:
    """Format a p-value with its significant digits.

    >>> p_text(0.4123), p_text(2.2e-5), p_text(0.0)
    ('0.41', '2e-05', '<1e-16')
    """
    if isnan(p_value):
        return UNKNOWN
    if p_value < _SMALLEST_P:
        return f"<{_SMALLEST_P:g}"
    return f"{p_value:.2g}" if p_value >= 0.001 else f"{p_value:.0e}"


def counted(n: int, one: str, many: str) -> str:
    """Format a count with its noun.

    >>> counted(1, "query", "queries"), counted(1012, "query", "queries")
    ('1 query', '1,012 queries')
    """
    return f"{n:,} {one if n == 1 else many}"


def as_sentence(clause: str) -> str:
    """Capitalise a clause and end it with a full stop.

    >>> as_sentence("positions 1–4 are learnable")
    'Positions 1–4 are learnable.'
    """
    return f"{clause[:1].upper()}{clause[1:].removesuffix('.')}."


def bar(share: float, width: int = 12) -> str:
    """Draw a share as a bar of block characters, in eighths of a character.

    >>> bar(0.5, width=4)
    '██'
    """
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


@dataclass(frozen=True)
class Units:
    """The format of utilities and their differences in one report: equal decimals, differences in percent."""

    base: float  # 100 % of a difference; if it is not positive, differences are shown as absolute numbers
    decimals: int  # of utilities

    @classmethod
    def of(cls, base: float) -> Units:
        """Return units that show at least three digits of the base.

        >>> [Units.of(base).decimals for base in (0.0123, 0.845, 4.2, 42.0, 42000.0, 0.0)]
        [4, 3, 3, 2, 0, 3]
        """
        size = floor(log10(abs(base))) if isfinite(base) and base != 0 else 0
        return cls(base, max(0, 3 - size) if size >= 0 else 2 - size)

    @property
    def in_percent(self) -> bool:
        """Whether differences are shown in percent."""
        return 0 < self.base < inf

    def share(self, difference: float) -> float:
        """Divide by the base; NaN if differences are not in percent."""
        return difference / self.base if self.in_percent else nan

    def amount(self, value: float) -> str:
        """Format a utility."""
        return number(value, self.decimals)

    def within(self, low: float, high: float) -> str:
        """Format an interval of a utility."""
        return UNKNOWN if isnan(low) or isnan(high) else f"{self.amount(low)} – {self.amount(high)}"

    def change(self, difference: float) -> str:
        """Format a difference with its sign.

        >>> Units.of(0.8).change(0.04), Units.of(0.0).change(0.04)
        ('+5.0 %', '+0.040')
        """
        if not self.in_percent:
            return number(difference, self.decimals, sign=True)
        return percent(self.share(difference), sign=True)

    def changes(self, low: float, high: float) -> str:
        """Format an interval of a difference for a table.

        >>> Units.of(0.8).changes(-0.04, 0.08), Units.of(0.0).changes(-0.04, 0.08)
        ('−5.0 to +10.0 %', '−0.040 to +0.080')
        """
        if isnan(low) or isnan(high):
            return UNKNOWN
        if not self.in_percent:
            return " to ".join(number(end, self.decimals, sign=True) for end in (low, high))
        ends = [self.share(low), self.share(high)]
        return " to ".join(number(100 * end, _percent_decimals(*ends), sign=True) for end in ends) + " %"

    def size(self, difference: float) -> str:
        """Format the absolute value of a difference."""
        return self.change(abs(difference)).removeprefix("+")

    def sizes(self, low: float, high: float) -> str:
        """Format an interval of a difference for a sentence.

        >>> Units.of(0.8).sizes(-0.04, 0.08)
        '−5.0 % to 10.0 %'
        """
        if not self.in_percent:
            return f"{self.amount(low)} to {self.amount(high)}"
        ends = [self.share(low), self.share(high)]
        return " to ".join(percent(end, decimals=_percent_decimals(*ends)) for end in ends)


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; a column with an empty header contains bars."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ("",)  # headers of columns to left-align and wrap, as the first column always is

    @classmethod
    def of_columns(cls, columns: Mapping[str, Sequence[str]], words: Sequence[str] = ("",)) -> Table:
        """Build a table from header -> cells.

        >>> Table.of_columns({"arm": ["A", "B"], "users": ["10", "12"]}).rows
        [('A', '10'), ('B', '12')]
        """
        return cls(tuple(columns), list(zip(*columns.values(), strict=True)), words)


def print_tables(console: Console, tables: Iterable[Table]) -> None:
    """Print tables, each followed by an empty line."""
    for table in tables:
        console.print(terminal_table(table))
        console.print()


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    """Print warnings, followed by an empty line if there are any."""
    for warning in warnings:
        bullet(console, "beware", warning)
    if warnings:
        console.print()


def bullet(console: Console, title: str, line: Text | str) -> None:
    """Print a line, wrapped if necessary, beside a word that names its kind."""
    grid = RichTable.grid(padding=(0, 1))
    grid.add_column(width=8, style="dim")
    grid.add_column()
    grid.add_row(title, Text(line) if isinstance(line, str) else line)
    console.print(grid, highlight=False)


def terminal_table(table: Table) -> RenderableType:
    """Return the table as a rich renderable that omits the columns for which the terminal is too narrow."""
    return _FittedTable(table)


@dataclass(frozen=True)
class _FittedTable:
    """A table that fits the width: of all columns but the first two, bars are omitted first, then the last columns."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.table
        columns = list(range(len(table.head)))
        while len(columns) > 2 and sum(map(self._least_width, columns)) + 2 * (len(columns) - 1) > options.max_width:
            bars = [column for column in columns[1:] if not table.head[column]]
            columns.remove(bars[-1] if bars else columns[-1])
        shown = RichTable(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            shown.add_column(
                Text(table.head[column]),
                justify="left" if column == 0 or table.head[column] in table.words else "right",
                no_wrap=not self._wraps(column),
                min_width=self._least_width(column),
                overflow="fold",
            )
        for row in table.rows:
            shown.add_row(*(Text(row[column]) for column in columns))
        yield shown

    def _wraps(self, column: int) -> bool:
        """Words wrap; numbers and bars do so only in a table of two columns."""
        name = self.table.head[column]
        return column == 0 or (name != "" and name in self.table.words) or len(self.table.head) == 2

    def _least_width(self, column: int) -> int:
        longest = max(cell_len(cell) for cell in (self.table.head[column], *(row[column] for row in self.table.rows)))
        return min(longest, _WRAPPED) if self._wraps(column) else longest
