"""`urank curves`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from urank.cli.options import LogOptions, PrintOptions, command


@command()
def curves_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Output of `urank train`.")],
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log, prepared or not, with the items to look at.")],
    by: Annotated[
        str,
        typer.Option(metavar="NAME", help="Column that defines a group: item_id, category, policy, or a category."),
    ] = "item_id",
    name: Annotated[
        list[str] | None,
        typer.Option("--name", "-n", metavar="NAME", help="Item or group to show. May be repeated."),
    ] = None,
    most: Annotated[int, typer.Option(min=1, max=50, help="Without names: how many of the most frequent ones.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The figure, as .svg or .png.")
    ] = None,
    columns: LogOptions = LogOptions(),
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Show how the clicks of items or groups fall with position, and how sensitive each is to its position.

    `decay` is the exponent a of the best fit 1/kᵃ: 0 is clicked alike at every position, 1 halves at position 2.

    Example: `urank curves model log.parquet --by category -o curves.svg`
    """
    from urank.clicks.item_curves import click_curves_of  # torch is slow to load
    from urank.model_io import load_model
    from urank.report.click_report import curve_table, save_curves
    from urank.report.tables import terminal_table

    loaded = load_model(model).clicks
    curves = click_curves_of(loaded, columns.open(log), by=by, names=name or (), most=most)
    if output is not None:
        save_curves(curves, output)
    notes = [f"\nThe figure is {output}"] if output is not None else []
    document = [curve.to_dict() for curve in curves]
    printing.show(document, lambda console: console.print(terminal_table(curve_table(curves, by))), *notes)
