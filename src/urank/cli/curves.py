"""`urank curves`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from urank.cli.options import Categorical, Column, Drop, Json, Quiet, open_log, print_json

__all__ = ["curves_command"]


def curves_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that `urank train` wrote.")],
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log, prepared or not, with the items to look at.")],
    by: Annotated[
        str,
        typer.Option(metavar="NAME", help="What makes a group: item_id, category, policy, or a categorical feature."),
    ] = "item_id",
    name: Annotated[
        list[str] | None,
        typer.Option("--name", "-n", metavar="NAME", help="An item or group to show. May be repeated."),
    ] = None,
    most: Annotated[int, typer.Option(min=1, max=50, help="Without names: so many of the most frequent ones.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The picture, as .svg or .png.")
    ] = None,
    column: Column = None,
    categorical: Categorical = None,
    drop: Drop = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how the clicks of items or groups fall with position, and how sensitive each is to its place.

    `decay` is the exponent a of the curve's best fit 1/kᵃ: 0 is clicked alike everywhere, 1 halves at position 2.

    Example: `urank curves model log.parquet --by category -o curves.svg`
    """
    from urank.clicks.item_curves import click_curves_of  # torch is slow to load
    from urank.model_io import load_model
    from urank.report.click_report import curve_table, save_curves
    from urank.report.tables import terminal_table

    loaded = load_model(model).clicks
    curves = click_curves_of(loaded, open_log(log, column, categorical, drop), by=by, names=name or (), most=most)
    if output is not None:
        save_curves(curves, output)
    if json:
        print_json([curve.to_dict() for curve in curves])
    elif not quiet:
        console = Console()
        console.print(terminal_table(curve_table(curves, by)))
        if output is not None:
            console.print(f"\nThe picture is {output}", highlight=False, soft_wrap=True, markup=False, emoji=False)
