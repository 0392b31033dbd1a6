"""Commands about a model: `urank curves` and `urank export`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from urank.cli.options import LogOptions, Overwrite, PrintOptions, command
from urank.errors import ConfigError


@command()
def curves_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Output of `urank train`.")],
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log, prepared or not, with the items to look at.")],
    by: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="One curve for each value of this column. It is item_id, category, policy, or a categorical feature.",
        ),
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
    curves = click_curves_of(loaded, columns.open(log, [model]), by=by, names=name or (), most=most)
    if output is not None:
        save_curves(curves, output)
    notes = [f"\nThe figure is {output}"] if output is not None else []
    document = [asdict(curve) for curve in curves]
    printing.show(document, lambda console: console.print(terminal_table(curve_table(curves, by))), *notes)


@command()
def export_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Output of `urank train`.")],
    onnx: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE.onnx", help="For any ONNX Runtime: one graph from raw rows to scores and clicks."
        ),
    ] = None,
    vespa: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For Vespa: the graph, a rank profile, the fields and the vocabularies."),
    ] = None,
    schema: Annotated[
        str | None, typer.Option(metavar="NAME", help="Vespa's document type.", show_default="item")
    ] = None,
    query_feature: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Feature that comes with the query in Vespa. May be repeated."),
    ] = None,
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Write a model for a search engine or another runtime.

    The scorer and the click model become one ONNX graph. Before anything appears, the written file is run on random
    raw rows, with missing numbers and unknown categories among them; if it disagrees with the model, the export is
    refused and nothing is left behind.

    Example: `urank export model --onnx exported` or `urank export model --vespa application --schema product`
    """
    if (onnx is None) == (vespa is None):
        raise ConfigError(f"give one of --onnx and --vespa; got {'neither' if onnx is None else 'both'}")
    if vespa is None and (schema is not None or query_feature):
        raise ConfigError("--schema and --query-feature belong to --vespa")
    from urank.export.onnx import export_onnx  # torch is slow to load
    from urank.export.vespa import export_vespa
    from urank.model_io import load_model
    from urank.model_manifest import read_manifest

    facts = {"trained_by": f"urank {read_manifest(model).get('urank')}"}
    loaded = load_model(model)
    if onnx is not None:
        done = export_onnx(loaded, onnx, facts=facts, overwrite=overwrite)
    elif vespa is not None:
        queried = query_feature or []
        done = export_vespa(
            loaded, vespa, schema=schema or "item", query_features=queried, facts=facts, overwrite=overwrite
        )
    content = done.content
    files = {"output": str(done.target), "files": list(done.files), "difference": done.difference}
    lines = [
        f"{content['model']['name']} written to {done.target}: {', '.join(done.files)}",
        f"The graph outputs {', '.join(content['outputs'])}; it differs from the model by {done.difference:.0e}",
    ]
    if content["model"]["method"] == "match":
        lines.append("The model itself ranks by match, which needs whole lists; a graph sees one item at a time")
    lines += [f"{feature} is called {name} there" for feature, name in done.renamed.items()]
    printing.show({**content, **files}, lambda console: None, *lines)
