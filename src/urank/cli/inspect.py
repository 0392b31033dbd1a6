"""`urank inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from urank.cli.options import Categorical, Column, Drop, Json, Quiet, open_log, print_json
from urank.log.inspection import inspect
from urank.progress import bars
from urank.report.inspection_report import print_inspection

__all__ = ["inspect_command"]


def inspect_command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="Parquet or CSV (also gzipped): a file, a folder, a glob in quotes, or what `urank prepare` wrote.",
        ),
    ],
    column: Column = None,
    categorical: Categorical = None,
    drop: Drop = None,
    randomised: Annotated[
        list[str] | None,
        typer.Option(metavar="POLICY", help="A value of `policy` whose lists were in random order. May be repeated."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with plots.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say whether position effects can be learned from a log, why, and what to do if not.

    Shows counts, click rates by position (also by policy and category) with 95 % intervals, missing and odd values,
    how well features tell the position, and which positions can be compared because items were seen at both.

    Example: `urank inspect searches.csv.gz -c query_id=srch_id -c click=click_bool -c item_id=prop_id`
    """
    source = open_log(log, column, categorical, drop)
    with bars(quiet=quiet or json) as report:
        inspection = inspect(source, randomised=randomised or (), report=report)
    if html is not None:
        from urank.report.inspection_report import write_inspection  # matplotlib is slow to load

        write_inspection(inspection, html)
    if json:
        print_json(inspection.to_dict())
    elif not quiet:
        console = Console()
        print_inspection(inspection, console)
        if html is not None:
            console.print(f"\nThe same with plots: {html}", highlight=False, markup=False, emoji=False, soft_wrap=True)
