"""An inspection in the terminal: tables with small bars, the verdict last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as TerminalTable
from rich.text import Text

from urank.log.inspect import Inspection
from urank.report.tables import Table, inspection_tables

__all__ = ["bullet", "print_inspection", "terminal_table"]

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
