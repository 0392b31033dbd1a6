"""Commands about a log: `urank inspect`, `urank prepare` and `urank examination`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console

from urank.cli.options import (
    PLOTS,
    EngineOptions,
    Html,
    LogOptions,
    MemoryOption,
    Overwrite,
    PrepareOptions,
    PrintOptions,
    Randomised,
    SeedOption,
    command,
    left_out_notes,
    print_notes,
)
from urank.errors import ConfigError
from urank.log.columns import marked_policies
from urank.log.inspection import inspect
from urank.log.prepare import PREPARE_STEPS, prepare
from urank.memory import Memory
from urank.report.inspection_report import print_inspection, write_inspection
from urank.report.tables import Table, terminal_table

if TYPE_CHECKING:
    from urank.log.dataset import Dataset
    from urank.propensity.examination import ExaminationCurve, Propensity
    from urank.report.tables import Table


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
    randomised: Randomised = None,
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


@command()
def prepare_command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="Parquet or CSV (also gzipped): a file, a folder, a glob in quotes, or the URL of Parquet files.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Where to write the prepared log: a folder or a URL.")
    ],
    parts: PrepareOptions = PrepareOptions(),
    columns: LogOptions = LogOptions(),
    memory: MemoryOption = "4GB",
    engine: EngineOptions = EngineOptions(),
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Turn an impression log into one row per query, split into train, valid and test.

    The log has a row for each item shown: which query, at which position, clicked or not, and the item's features.
    It may be in any order and larger than memory. A log that breaks a rule is refused with the file and the row, and
    nothing is left behind. Columns that are outcomes of the click, such as bookings, are left out and named.

    Example: `urank prepare log.parquet -o prepared -c position=rank -c click=clicked`
    """
    limit, cluster = Memory.parse(memory), engine.cluster
    source = columns.open(log)
    with printing.progress(PREPARE_STEPS) as report:
        options: dict[str, Any] = {**parts.arguments, "overwrite": overwrite, "report": report}
        if cluster is None:
            description = prepare(source, output, bucket_bytes=limit.bucket_bytes, **options)
        else:
            from urank.ray.jobs import prepare_on_ray

            description = prepare_on_ray(source, output, cluster, memory=limit, **options)
    counts = description["counts"]
    columns_shown = ("queries", "lists", "shown" if "shown" in counts["train"] else "rows", "clicks")
    rows = [(name, *(f"{each[key]:,}" for key in columns_shown)) for name, each in counts.items()]
    table = Table(("split", "queries", "lists", "impressions", "clicks"), rows)
    kinds = [feature["kind"] for feature in description["features"]]
    unseen = sum(each["rows"] - each.get("shown", each["rows"]) for each in counts.values())
    sentence = (
        f"{description['positions']} positions, {kinds.count('numeric')} numeric and {kinds.count('categorical')} "
        f"categorical features, {f'{unseen:,} unseen candidates, ' if unseen else ''}written to {output}"
    )

    def text(console: Console) -> None:
        print_notes(left_out_notes(description.get("left_out", ())), console)
        console.print(terminal_table(table))

    printing.show(description, text, sentence)


MOST_CATEGORIES = 12
"""Above this, the table shows the mean and the examination_quantiles instead of a column for each category."""


@command()
def examination_command(
    method: Annotated[
        str,
        typer.Argument(
            metavar="randomised|harvest|cpbm|em",
            help="**randomised**: from lists in random order; **harvest**: from items that the lists of a "
            "query showed at different positions; **cpbm**: the same, a curve for every context; **em**: relevance "
            "by features, examination by the rest.",
        ),
    ],
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log, prepared or not.")],
    randomised: Randomised = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="One curve for each value of this column. For randomised: `category`, or a categorical feature.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Save the estimate, for `urank train --examination FILE`."),
    ] = None,
    seed: SeedOption = 0,
    columns: LogOptions = LogOptions(),
    memory: MemoryOption = "4GB",
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Estimate examination: how likely an item at each position is looked at, relative to position 1.

    Train is learned from, valid stops. Prints one curve, with standard errors where the method provides them. With
    `--by`, one for each category; categories with few clicks use the overall one. For cpbm, whose curve differs by
    context, and for more than 12 categories: the mean over the items shown in train and the 10 % and 90 % quantiles;
    JSON has all categories.

    Example: `urank examination harvest prepared -o curve.json`
    """
    from urank.pipeline import prepared  # torch is slow to load
    from urank.propensity.methods import PropensityMethod, fit_propensity, save_propensity
    from urank.report.tables import terminal_table

    methods = [name for name in get_args(PropensityMethod) if name != "none"]
    if method not in methods:
        raise ConfigError(f"the method must be one of {', '.join(methods)}; got '{method}'")
    if output is not None and output.is_dir():  # fail fast: before the fit
        raise ConfigError(f"{output} is a folder; a file name is needed")
    source, limit = columns.source(log), Memory.parse(memory)
    with printing.progress() as report, prepared(source, memory=limit, report=report) as dataset:
        estimate = fit_propensity(
            method,  # type: ignore[arg-type]
            dataset,
            policies=marked_policies(randomised or (), _policy_column(dataset), str(dataset.folder)),
            by=by,
            seed=seed,
            report=report,
        )
        assert estimate is not None  # noqa: S101 - only the method none gives none
        curves = _to_dict(estimate, dataset)
    if output is not None:
        save_propensity(estimate, output)
    notes = [f"\nThe examination is in {output}"] if output is not None else []
    printing.show(curves, lambda console: console.print(terminal_table(_table(curves))), *notes)


def _policy_column(dataset: Dataset) -> dict[str, str]:
    """Return the role policy and its column in the source; nothing for a log without policies."""
    return {"policy": dataset.columns.get("policy", "policy")} if dataset.has("policy") else {}


def _to_dict(estimate: Propensity, dataset: Dataset) -> dict[str, Any]:
    """Return the curve, or the curves, as a JSON-serialisable dict."""
    from urank.propensity.examination import ExaminationCurve, examination_quantiles
    from urank.propensity.randomised import ByCategory

    if isinstance(estimate, ExaminationCurve):
        return {"method": estimate.name, **_curve(estimate)}
    mean, low, high = examination_quantiles(estimate, dataset, "train", levels=(0.1, 0.9))
    found = {"method": estimate.name, "examination": mean.tolist(), "p10": low.tolist(), "p90": high.tolist()}
    if isinstance(estimate, ByCategory):
        curves = {category: _curve(curve) for category, curve in estimate.curves.items()}
        found |= {"column": estimate.column, "overall": _curve(estimate.overall), "categories": curves}
    return found


def _curve(curve: ExaminationCurve) -> dict[str, Any]:
    return {"examination": curve.values, "error": curve.errors}


def _table(found: dict[str, Any]) -> Table:
    from urank.report.tables import Table, bar

    if 0 < len(found.get("categories", ())) <= MOST_CATEGORIES:
        curves = [found["overall"]["examination"], *(each["examination"] for each in found["categories"].values())]
        rows = [(str(k), *(f"{v:.3f}" for v in at)) for k, at in enumerate(zip(*curves, strict=True), start=1)]
        return Table(("position", "overall", *found["categories"]), rows)
    values = found["examination"]
    names = {"error": "standard error", "p10": "10 %", "p90": "90 %"}
    more = {head: found[key] for key, head in names.items() if found.get(key) is not None}
    rows = [
        (str(k), f"{value:.3f}", *(f"{numbers[k - 1]:.3f}" for numbers in more.values()), bar(value / max(values)))
        for k, value in enumerate(values, start=1)
    ]
    return Table(("position", "examination", *more, ""), rows)
