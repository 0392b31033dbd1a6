"""`urank propensity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console

from urank.cli.options import Categorical, Column, Drop, Json, MemoryOption, Quiet, open_log, print_json, refuse_columns
from urank.errors import ConfigError
from urank.log.dataset import is_prepared
from urank.memory import Memory
from urank.progress import bars

if TYPE_CHECKING:
    from urank.log.dataset import Dataset
    from urank.propensity.examination import ExaminationCurve, Propensity
    from urank.report.tables import Table

__all__ = ["propensity_command"]

MOST_CATEGORIES = 12
"""Of more, the table has no columns: the mean and the spread are told."""


def propensity_command(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log, prepared or not.")],
    method: Annotated[
        str,
        typer.Option(
            metavar="randomised|harvest|cpbm|em",
            help="**randomised**: from lists whose order chance decided; **harvest**: from items that the lists of a "
            "query showed at different positions; **cpbm**: the same, a curve for every context; **em**: relevance "
            "by features, examination by the rest.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="For randomised: a policy whose lists were randomised. May be repeated."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="For randomised: a curve for each category of items that this column names: `category`, or a "
            "categorical feature.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Save it, for `urank train --propensity FILE`."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all random numbers.")] = 0,
    column: Column = None,
    categorical: Categorical = None,
    drop: Drop = None,
    memory: MemoryOption = "4GB",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Estimate examination: how likely an item at each position is looked at, relative to position 1.

    Train teaches, valid stops. One curve with its standard errors where the method tells them. With `--by` one for each
    category and, for the categories with few clicks, the overall one. For cpbm, whose curve differs by context, and for
    more than 12 categories: the mean over the items shown in train and the curves below which a tenth and nine tenths
    lie; JSON has all categories.

    Example: `urank propensity prepared --method harvest -o curve.json`
    """
    from urank.pipeline import prepared  # torch is slow to load
    from urank.propensity.methods import PropensityMethod, fit_propensity, save_propensity
    from urank.report.tables import terminal_table

    methods = [name for name in get_args(PropensityMethod) if name != "none"]
    if method not in methods:
        raise ConfigError(f"--method must be one of {', '.join(methods)}; got '{method}'")
    refuse_columns(log, column, categorical, drop)
    if output is not None and output.is_dir():  # better refused now than after the fit
        raise ConfigError(f"{output} is a folder; a file name is needed")
    limit = Memory.parse(memory)
    source = log if is_prepared(log) else open_log(log, column, categorical, drop)
    with bars(quiet=quiet or json) as report, prepared(source, memory=limit, report=report) as dataset:
        estimate = fit_propensity(
            method,  # type: ignore[arg-type]
            dataset,
            policies=policy,
            by=by,
            seed=seed,
            report=report,
        )
        assert estimate is not None  # noqa: S101 - only the method none gives none
        told = _told(estimate, dataset)
    if output is not None:
        save_propensity(estimate, output)
    if json:
        print_json(told)
    elif not quiet:
        console = Console()
        console.print(terminal_table(_table(told)))
        if output is not None:
            console.print(
                f"\nThe propensity is in {output}", highlight=False, soft_wrap=True, markup=False, emoji=False
            )


def _told(estimate: Propensity, dataset: Dataset) -> dict[str, Any]:
    """The curve, or the curves, as JSON has them."""
    from urank.propensity.examination import ExaminationCurve, examination_quantiles
    from urank.propensity.randomised import ByCategory

    if isinstance(estimate, ExaminationCurve):
        return {"method": estimate.name, **_curve(estimate)}
    mean, low, high = examination_quantiles(estimate, dataset, "train", levels=(0.1, 0.9))
    told = {"method": estimate.name, "examination": mean.tolist(), "p10": low.tolist(), "p90": high.tolist()}
    if isinstance(estimate, ByCategory):
        curves = {category: _curve(curve) for category, curve in estimate.curves.items()}
        told |= {"column": estimate.column, "overall": _curve(estimate.overall), "categories": curves}
    return told


def _curve(curve: ExaminationCurve) -> dict[str, Any]:
    return {"examination": curve.values, "error": curve.errors}


def _table(told: dict[str, Any]) -> Table:
    from urank.report.tables import Table, bar

    if 0 < len(told.get("categories", ())) <= MOST_CATEGORIES:
        curves = [told["overall"]["examination"], *(each["examination"] for each in told["categories"].values())]
        rows = [(str(k), *(f"{v:.3f}" for v in at)) for k, at in enumerate(zip(*curves, strict=True), start=1)]
        return Table(("position", "overall", *told["categories"]), rows)
    values = told["examination"]
    names = {"error": "standard error", "p10": "10 %", "p90": "90 %"}
    more = {head: told[key] for key, head in names.items() if told.get(key) is not None}
    rows = [
        (str(k), f"{value:.3f}", *(f"{numbers[k - 1]:.3f}" for numbers in more.values()), bar(value / max(values)))
        for k, value in enumerate(values, start=1)
    ]
    return Table(("position", "examination", *more, ""), rows)
