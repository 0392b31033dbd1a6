"""`urank inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from urank.cli.options import PLOTS, Html, LogOptions, PrintOptions, command
from urank.log.inspection import inspect
from urank.report.inspection_report import print_inspection, write_inspection


@command()
def inspect_command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="Parquet or CSV (also gzipped): a file, a folder, a glob in quotes, or the output of `urank prepare`.",
        ),
    ],
    columns: LogOptions = LogOptions(),
    randomised: Annotated[
        list[str] | None,
        typer.Option(metavar="POLICY", help="Value of `policy` whose lists were in random order. May be repeated."),
    ] = None,
    html: Html = None,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Check whether position effects can be learned from a log, why, and what to do if not.

    Shows counts, click rates by position (also by policy and category) with 95 % intervals, missing and odd values,
    how well features predict the position, and which positions can be compared because items were shown at both.

    Example: `urank inspect searches.csv.gz -c query_id=srch_id -c click=click_bool -c item_id=prop_id`
    """
    with printing.progress() as report:
        inspection = inspect(columns.open(log), randomised=randomised or (), report=report)
    if html is not None:
        write_inspection(inspection, html)
    notes = [PLOTS.format(html)] if html is not None else []
    printing.show(inspection.to_dict(), lambda console: print_inspection(inspection, console), *notes)
