"""`urank run`: the whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import LogOptions, MemoryOption, Overwrite, PrintOptions, Truth, command
from urank.cli.train import SETTINGS
from urank.config import validate
from urank.memory import Memory
from urank.pipeline import run
from urank.ranking.urank_config import UrankConfig
from urank.report.evaluation_report import print_evaluation

_FLAGS = {flag: SETTINGS[flag] for flag in ("--click-model", "--ensemble", "--ranker", "--seed")}


@command(UrankConfig, _FLAGS)
def run_command(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log as `urank prepare` takes it.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the model, the data and the report.")
    ],
    settings: dict[str, Any],
    truth: Truth = None,
    valid: Annotated[float, typer.Option(min=0, max=1, help="Share of the queries that stop and choose.")] = 0.1,
    test: Annotated[float, typer.Option(min=0, max=1, help="Share of the queries for evaluation.")] = 0.1,
    columns: LogOptions = LogOptions(),
    memory: MemoryOption = "4GB",
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Do the whole job: inspect a log, prepare it, train a ranker, estimate what it would earn, and write one report.

    DIR then contains `prepared/`, `model/` (for `urank rank` and `urank.load_model`), `report.html` and
    `evaluation.json`. It appears when everything is done.

    Example: `urank run log.parquet -o job -c position=rank`
    """
    checked = validate(UrankConfig, settings, "the model")
    arguments: dict[str, Any] = {"valid": valid, "test": test, "overwrite": overwrite, "memory": Memory.parse(memory)}
    if truth is not None:
        from urank.lab.truth import compare_evaluation, review_fit

        arguments |= {"review": review_fit(truth), "compare": compare_evaluation(truth)}
    with printing.progress() as report:
        found = run(columns.open(log), checked, output, report=report, **arguments)

    def text(console: Console) -> None:
        verdict = f"The log is {found.inspection.verdict.sentence}.\n"
        console.print(verdict, highlight=False, soft_wrap=True, markup=False)
        print_evaluation(found.evaluation, console, found.training.method, found.reference)

    printing.show(found.document, text, f"\n{found.training.sentence}. The report is {output / 'report.html'}")
