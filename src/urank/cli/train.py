"""`urank train`, and `urank run`, the whole job."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import (
    ConfigFile,
    EngineOptions,
    Html,
    Keep,
    LogOptions,
    MemoryOption,
    Overwrite,
    PrepareOptions,
    PrintOptions,
    Randomised,
    Truth,
    check_truth,
    command,
    left_out_notes,
    print_notes,
    quick_imports,
    refuse_url,
)
from urank.config import deep_merge, read_toml, validate
from urank.errors import ConfigError
from urank.log.dataset import is_prepared
from urank.log.prepare import PREPARE_STEPS
from urank.memory import Memory
from urank.ranking.ranking_settings import UrankConfig
from urank.storage import absolute

_SETTINGS = {
    "--goal": "goal",
    "--click-model": "clicks.families",
    "--ensemble": "clicks.ensemble",
    "--mix": "clicks.mix",
    "--backbone": ("clicks.backbone", "scorer.backbone"),
    "--calibration": "clicks.calibration",
    "--within-list": "clicks.within_list",
    "--ranker": "ranker",
    "--method": "method",
    "--target": "scorer.target",
    "--form": "scorer.form",
    "--examination": "baseline.examination",
    "--learn-from": "baseline.learn_from",
    "--epochs": "clicks.training.epochs",
    "--device": ("clicks.training.device", "scorer.training.device"),
    "--seed": ("clicks.seed", "scorer.seed", "svm.seed"),
}
_RUN_SETTINGS = {flag: _SETTINGS[flag] for flag in ("--goal", "--click-model", "--ensemble", "--ranker", "--seed")}


@command(UrankConfig, _RUN_SETTINGS)
def run_command(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log as `urank prepare` takes it.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the model, the data and the report.")
    ],
    settings: dict[str, Any],
    config: ConfigFile = None,
    truth: Truth = None,
    columns: LogOptions = LogOptions(),
    parts: PrepareOptions = PrepareOptions(),
    randomised: Randomised = None,
    force: Annotated[bool, typer.Option("--force", help="Go on even if the log is not learnable.")] = False,
    memory: MemoryOption = "4GB",
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Do the whole job: inspect a log, prepare it, train a ranker, estimate what it would earn, and write one report.

    DIR then contains `prepared/`, `model/` (for `urank rank` and `urank.load_model`), `report.html` and
    `evaluation.json`. It appears when everything is done. A log that `urank inspect` finds not learnable is refused.
    Columns that are outcomes of the click, such as bookings, are left out of the features and named.

    Example: `urank run log.parquet -o job -c position=rank`
    """
    with quick_imports():
        from urank.pipeline import RUN_STEPS, run  # slow to import, like torch
    from urank.report.evaluation_report import print_evaluation

    checked = _settings(config, settings)
    arguments: dict[str, Any] = {"preparation": parts.arguments, "randomised": randomised or (), "force": force}
    arguments |= {"overwrite": overwrite, "memory": Memory.parse(memory)}
    if truth is not None:
        from urank.lab.truth import check_items, compare_evaluation, review_fit

        check_truth(checked.goal)
        arguments |= {"check": check_items(truth), "review": review_fit(truth), "compare": compare_evaluation(truth)}
    with printing.progress(RUN_STEPS) as report:
        found = run(columns.open(log), checked, output, report=report, **arguments)

    def text(console: Console) -> None:
        notes = [*left_out_notes(found.training.left_out), f"The log is {found.inspection.verdict.sentence}."]
        notes += [f"{warning}." for warning in found.training.warnings]
        options: dict[str, Any] = {"notes": notes, "next_step": found.next_step}
        print_evaluation(found.evaluation, console, found.training.method, found.reference, **options)

    printing.show(found.document, text, f"\n{found.training.sentence}. The report is {output / 'report.html'}")


def _settings(file: Path | None, flags: dict[str, Any]) -> UrankConfig:
    """Validate the settings of a file, overridden by flags."""
    given = {} if file is None else read_toml(file)
    validate(UrankConfig, given, str(file))
    return validate(UrankConfig, deep_merge(given, flags), "the model")


@command(UrankConfig, _SETTINGS)
def train_command(
    log: Annotated[
        str,
        typer.Argument(metavar="LOG", help="Output of `urank prepare`, or a raw log, which is then prepared first."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="MODEL", help="Folder of the model.")],
    settings: dict[str, Any],
    config: ConfigFile = None,
    truth: Truth = None,
    html: Html = None,
    no_onnx: Annotated[bool, typer.Option("--no-onnx", help="Do not write ONNX graphs of the model.")] = False,
    columns: LogOptions = LogOptions(),
    keep: Keep = None,
    memory: MemoryOption = "4GB",
    engine: EngineOptions = EngineOptions(),
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where the state of the training is kept until it ends. For a cluster of several machines name a "
            "place that all of them reach, such as a URL.",
            show_default="beside the model",
            rich_help_panel="Where it runs",
        ),
    ] = None,
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Train a ranker: a click model, P(click | item, position), and a scorer that learns from it the order of highest
    expected utility.

    Train is learned from, valid stops, chooses and calibrates; test is only reported. A run that was killed resumes
    when the same command is given again. The model is a folder with a JSON manifest, weights and ONNX graphs that take
    raw features. Columns of a raw log that are outcomes of the click, such as bookings, are left out and named.

    Example: `urank train prepared -o model --click-model monotone --ensemble 3`
    """
    with quick_imports():
        from urank.pipeline import TRAIN_STEPS, train  # slow to import, like torch
    from urank.report.click_report import print_fit, write_fit

    checked = _settings(config, settings)
    limit, cluster = Memory.parse(memory), engine.cluster
    refuse_url(output, "--output")
    arguments: dict[str, Any] = {}
    if truth is not None:
        from urank.lab.truth import check_items, review_fit

        arguments |= {"check": check_items(truth), "review": review_fit(truth)}
    if cluster is not None:
        from urank.ray.jobs import train_on_ray

        if cluster.address is not None and not is_prepared(log):
            raise ConfigError(f"a cluster learns from a prepared log that it can read; run urank prepare {log} first")
        arguments["fit"] = partial(train_on_ray, cluster=cluster)
    with printing.progress(TRAIN_STEPS if is_prepared(log) else {**PREPARE_STEPS, **TRAIN_STEPS}) as report:
        trained = train(
            columns.source(log, keep),
            checked,
            output,
            keep=keep or (),
            checkpoints=None if checkpoints is None else absolute(checkpoints),
            onnx=not no_onnx,
            overwrite=overwrite,
            memory=limit,
            report=report,
            **arguments,
        )
    if html is not None:
        write_fit(trained.quality, html)

    def text(console: Console) -> None:
        first = [] if trained.headline is None else [trained.headline]
        print_notes([*first, *left_out_notes(trained.left_out)], console)
        print_fit(trained.quality, console)

    sentence = f"\n{trained.sentence}. The model is in {output}"
    printing.show(trained.to_dict(), text, sentence, *trained.warnings)
