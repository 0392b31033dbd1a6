"""The report of a fitted click model in the terminal: tables, the figure that counts last."""

from __future__ import annotations

from rich.console import Console

from urank.report.clicks import FitReport, fit_tables
from urank.report.terminal import terminal_table

__all__ = ["print_fit"]


def print_fit(report: FitReport, console: Console) -> None:
    """Print everything there is to tell, the figure that counts last, where the eye is when it ends."""
    for table in fit_tables(report):
        console.print(terminal_table(table))
        console.print()
    console.print(report.sentence, style="bold", highlight=False, markup=False)
