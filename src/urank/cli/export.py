"""`urank export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from urank.cli.options import Json, Overwrite, Quiet, print_json
from urank.errors import ConfigError

if TYPE_CHECKING:  # torch is slow to load
    from urank.export.bundle import Export

__all__ = ["export_command"]


def export_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that `urank train` wrote.")],
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
        typer.Option(metavar="NAME", help="A feature that comes with the query in Vespa. May be repeated."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model for a search engine or another runtime.

    The scorer and the click model become one ONNX graph. Before anything appears, the written file is run on random
    raw rows, with missing numbers and unknown categories among them; where it does not say what the model says, it is
    refused and nothing is left behind.

    Example: `urank export model --onnx exported` or `urank export model --vespa application --schema product`
    """
    if (onnx is None) == (vespa is None):
        raise ConfigError(f"give one of --onnx and --vespa; got {'neither' if onnx is None else 'both'}")
    if vespa is None and (schema is not None or query_feature):
        raise ConfigError("--schema and --query-feature belong to --vespa")
    done = _export(model, onnx, vespa, schema or "item", query_feature or [], overwrite=overwrite)
    if json:
        told = {"output": str(done.target), "files": list(done.files), "difference": done.difference}
        print_json({**done.content, **told})
    elif not quiet:
        _print(done)


def _export(
    folder: Path, onnx: Path | None, vespa: Path | None, schema: str, query_features: list[str], *, overwrite: bool
) -> Export:
    from urank.export.onnx import export_onnx  # torch is slow to load
    from urank.export.vespa import export_vespa
    from urank.model_io import load_model, read_manifest

    facts = {"trained_by": f"urank {read_manifest(folder).get('urank')}"}
    model = load_model(folder)
    if onnx is not None:
        return export_onnx(model, onnx, facts=facts, overwrite=overwrite)
    assert vespa is not None  # noqa: S101 - there is one of the two
    return export_vespa(model, vespa, schema=schema, query_features=query_features, facts=facts, overwrite=overwrite)


def _print(done: Export) -> None:
    content = done.content
    lines = [f"{content['model']['name']} written to {done.target}: {', '.join(done.files)}"]
    lines.append(f"The graph gives {', '.join(content['outputs'])}; it differs from the model by {done.difference:.0e}")
    if content["model"]["method"] == "match":
        lines.append("The model itself ranks by match, which needs whole lists; a graph knows one item at a time")
    lines += [f"{feature} is called {name} there" for feature, name in done.renamed.items()]
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    for line in lines:
        console.print(line)
