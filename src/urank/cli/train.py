"""`urank train`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from urank.cli.options import (
    EngineOptions,
    Html,
    LogOptions,
    MemoryOption,
    Overwrite,
    PrintOptions,
    Truth,
    command,
    refuse_url,
)
from urank.config import deep_merge, read_toml, validate
from urank.errors import ConfigError
from urank.log.dataset import is_prepared
from urank.memory import Memory
from urank.pipeline import train
from urank.ranking.urank_config import UrankConfig
from urank.storage import absolute

SETTINGS = {
    "--click-model": "clicks.families",
    "--ensemble": "clicks.ensemble",
    "--mix": "clicks.mix",
    "--backbone": ("clicks.backbone", "scorer.backbone"),
    "--calibration": "clicks.calibration",
    "--ranker": "ranker",
    "--method": "method",
    "--target": "scorer.target",
    "--form": "scorer.form",
    "--propensity": "baseline.propensity",
    "--learn-from": "baseline.learn_from",
    "--epochs": "clicks.training.epochs",
    "--device": ("clicks.training.device", "scorer.training.device"),
    "--seed": ("clicks.seed", "scorer.seed", "svm.seed"),
}


@command(UrankConfig, SETTINGS)
def train_command(
    log: Annotated[
        str,
        typer.Argument(metavar="LOG", help="Output of `urank prepare`, or a raw log, which is then prepared first."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="MODEL", help="Folder of the model.")],
    settings: dict[str, Any],
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="TOML with any setting, in the tables clicks, scorer and trees; flags override it."
        ),
    ] = None,
    truth: Truth = None,
    html: Html = None,
    onnx: Annotated[bool, typer.Option("--onnx/--no-onnx", help="Also write the model as ONNX graphs.")] = True,
    columns: LogOptions = LogOptions(),
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
    raw features.

    Example: `urank train prepared -o model --click-model monotone --ensemble 3`
    """
    file = {} if config is None else read_toml(config)
    validate(UrankConfig, file, str(config))
    checked = validate(UrankConfig, deep_merge(file, settings), "the model")
    limit, cluster = Memory.parse(memory), engine.cluster
    refuse_url(output, "--output")
    arguments: dict[str, Any] = {}
    if truth is not None:
        from urank.lab.truth import review_fit

        arguments["review"] = review_fit(truth)
    if cluster is not None:
        from urank.ray.jobs import train_on_ray

        if cluster.address is not None and not is_prepared(log):
            raise ConfigError(f"a cluster learns from a prepared log that it can read; run urank prepare {log} first")
        arguments["fit"] = partial(train_on_ray, cluster=cluster)
    with printing.progress() as report:
        trained = train(
            columns.source(log),
            checked,
            output,
            checkpoints=None if checkpoints is None else absolute(checkpoints),
            onnx=onnx,
            overwrite=overwrite,
            memory=limit,
            report=report,
            **arguments,
        )
    from urank.report.click_report import print_fit, write_fit

    if html is not None:
        write_fit(trained.quality, html)
    sentence = f"\n{trained.sentence}. The model is in {output}"
    printing.show(trained.to_dict(), lambda console: print_fit(trained.quality, console), sentence, *trained.warnings)
