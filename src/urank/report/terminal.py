"""An inspection in the terminal: tables with small bars, the verdict last."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table as TerminalTable

from urank.log.inspect import Inspection
from urank.report.tables import Table, inspection_tables

__all__ = ["print_inspection", "terminal_table"]

_STYLES = {"learnable": "bold green", "partly learnable": "bold yellow", "not learnable": "bold red"}


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print everything a person should know, the verdict last, where the eye is when it ends."""
    for table in inspection_tables(inspection.facts):
        console.print(terminal_table(table))
        console.print()
    verdict = inspection.verdict
    _bullet(console, "verdict", f"[{_STYLES[verdict.level]}]{verdict.sentence}[/]")
    for title, lines in (("why", verdict.reasons), ("beware", verdict.warnings), ("do", verdict.advice)):
        for line in lines:
            _bullet(console, title, escape(line))


def _bullet(console: Console, title: str, line: str) -> None:
    grid = TerminalTable.grid(padding=(0, 1))
    grid.add_column(width=8, style="dim")
    grid.add_column()
    grid.add_row(title, line)
    console.print(grid, highlight=False)


def terminal_table(table: Table) -> RenderableType:
    """The table as rich draws it."""
    shown = TerminalTable(box=None, header_style="bold", pad_edge=False)
    for number, name in enumerate(table.head):
        left = number == 0 or name in table.words
        shown.add_column(name, justify="left" if left else "right", no_wrap=not (left and name))
    for row in table.rows:
        shown.add_row(*(escape(cell) for cell in row))
    return shown
