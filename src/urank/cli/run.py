"""`urank run`: the whole job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from urank.cli.options import (
    Categorical,
    Column,
    Drop,
    Json,
    MemoryOption,
    Overwrite,
    Quiet,
    json_text,
    open_log,
    print_json,
)
from urank.cli.train import families
from urank.config import validate
from urank.log.dataset import Dataset
from urank.log.inspection import inspect
from urank.log.prepare import prepare
from urank.memory import Memory
from urank.progress import bars
from urank.storage import new_folder

__all__ = ["run_command"]


def run_command(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log as `urank prepare` takes it.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The folder for the model, the data and the report.")
    ],
    click_model: Annotated[
        str, typer.Option(metavar="FAMILY", help="The family of the click model; see `urank train --help`.")
    ] = "auto",
    ensemble: Annotated[int, typer.Option(min=1, help="Seeds whose click tables are averaged.")] = 1,
    ranker: Annotated[str, typer.Option(metavar="network|trees|none", help="What learns to rank.")] = "network",
    truth: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="What `urank simulate` or `urank appstore` wrote: the truth beside every estimate."
        ),
    ] = None,
    valid: Annotated[float, typer.Option(min=0, max=1, help="Share of the queries that stop and choose.")] = 0.1,
    test: Annotated[float, typer.Option(min=0, max=1, help="Share of the queries that judge.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of all random numbers.")] = 0,
    column: Column = None,
    categorical: Categorical = None,
    drop: Drop = None,
    memory: MemoryOption = "4GB",
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Do the whole job: inspect a log, prepare it, train a ranker, say what it would earn, and write one report.

    DIR then holds `prepared/`, `model/` (for `urank rank` and `urank.load_model`), `report.html` and
    `evaluation.json`. It appears when all is done.

    Example: `urank run log.parquet -o job -c position=rank`
    """
    settings = {
        "ranker": ranker,
        "clicks": {**families(click_model), "ensemble": ensemble, "seed": seed},
        "scorer": {"seed": seed},
    }
    limit = Memory.parse(memory)
    import torch  # slow to load, as all that needs it

    from urank.clicks.item_curves import click_curves_of
    from urank.evaluation.cross_fitting import CrossfitConfig
    from urank.lab.truth import add_true_utilities, read_truth, true_reference, true_utilities
    from urank.model_io import save_model
    from urank.pipeline import evaluate, fit_model, policies_to_evaluate
    from urank.ranking.urank_config import UrankConfig
    from urank.report.evaluation_report import print_evaluation
    from urank.report.fit import fit_report
    from urank.report.run_report import write_job

    checked = validate(UrankConfig, settings, "the model")
    if truth is not None:
        read_truth(truth)  # better refused now than after the training
    source = open_log(log, column, categorical, drop)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # the rest reads ahead; small networks gain no more
    with (
        new_folder(output, marker="report.html", overwrite=overwrite) as folder,
        bars(quiet=quiet or json) as report,
    ):
        inspection = inspect(source, report=report)
        prepare(source, folder / "prepared", valid=valid, test=test, bucket_bytes=limit.bucket_bytes, report=report)
        dataset = Dataset(folder / "prepared", memory=limit)
        fit = fit_model(dataset, checked, report=report)
        judged = fit_report(fit.clicks, dataset, checked.clicks, truth=truth)
        found = evaluate([fit.model], dataset, config=CrossfitConfig(seed=seed), report=report)
        document, reference = found.to_dict(), None
        if truth is not None:
            true = true_utilities(found, policies_to_evaluate([fit.model]), dataset, truth, seed=seed)
            document, reference = add_true_utilities(document, true), true_reference(true)
        report("writing the model and the report", 0, None)
        facts = {"quality": judged.to_dict(), "why": fit.why}
        save_model(fit.model, checked, folder / "model", facts=facts)
        by = "category" if "category" in source.schema.roles else "item_id"
        curves = click_curves_of(fit.clicks.model, source, by=by) if by in source.schema.roles else None
        told = {"model": fit.model.name, "method": fit.model.method, "why": fit.why, **document}
        (folder / "evaluation.json").write_text(json_text(told) + "\n", encoding="utf-8")
        write_job(
            folder / "report.html",
            inspection=inspection,
            fit=judged,
            evaluation=found,
            reference=reference,
            chosen=fit.model.method,
            why=fit.why,
            curves=curves,
            by=by,
        )
    if json:
        print_json(told)
    elif not quiet:
        console = Console()
        console.print(f"The log is {inspection.verdict.sentence}.\n", highlight=False, soft_wrap=True, markup=False)
        print_evaluation(found, console, fit.model.method, reference)
        sentence = f"\n{fit.model.name} ranks by {fit.model.method}: {fit.why}. The report is {output / 'report.html'}"
        console.print(sentence, highlight=False, soft_wrap=True, markup=False, emoji=False)
