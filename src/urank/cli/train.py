"""`urank train`."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import (
    Address,
    Categorical,
    Column,
    Drop,
    Engine,
    EngineName,
    Json,
    MemoryOption,
    Overwrite,
    Quiet,
    Workers,
    cluster_of,
    open_log,
    print_json,
    refuse_columns,
    refuse_url,
)
from urank.config import read_toml, to_jsonable, validate
from urank.errors import ConfigError, UrankError
from urank.log.dataset import Dataset, is_prepared
from urank.log.prepare import prepare
from urank.memory import Memory
from urank.progress import Report, bars
from urank.ray.cluster import Cluster
from urank.storage import is_remote, refuse_taken, remove_folder, to_path

if TYPE_CHECKING:  # torch is slow to load
    from urank.ranking.urank_config import UrankConfig
    from urank.report.click_report import FitReport

__all__ = ["families", "train_command"]

_FAMILIES = "auto|monotone|factorised|vector|position|deepfm|gbdt|pbm"


def train_command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG", help="What `urank prepare` wrote, or a log as it takes it, which is then prepared first."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="MODEL", help="The folder of the model.")],
    click_model: Annotated[
        str,
        typer.Option(
            metavar=_FAMILIES,
            help="The family of the click model. **monotone**: one falling curve, steeper or flatter by item; "
            "**factorised**: examination(item, k) · relevance(item); **vector**: K outputs (the paper's A1); "
            "**position**: position as an input (A2); **deepfm**: a DeepFM with the position as a field; **gbdt**: "
            "LightGBM; **pbm**: one curve for all items. **auto** takes the best of monotone, factorised and vector, "
            "or the mean of all three, by held-out log loss; several with commas between them: likewise of these.",
        ),
    ] = "auto",
    ensemble: Annotated[
        int | None, typer.Option(min=1, help="Seeds whose tables are averaged.", show_default="1")
    ] = None,
    mix: Annotated[bool, typer.Option("--mix", help="Average all families that were named in any case.")] = False,
    backbone: Annotated[str | None, typer.Option(metavar="mlp|deepfm", help="What every network is built on.")] = None,
    calibration: Annotated[
        str | None,
        typer.Option(metavar="temperature|isotonic|none", help="How the table is calibrated, by position."),
    ] = None,
    ranker: Annotated[
        str | None,
        typer.Option(
            metavar="network|trees|lambdarank|lambdarank-trees|ranksvm|dla|none",
            help="What learns to rank: U-rank from the click table, as a **network** or LightGBM **trees**; to compare "
            "with, **lambdarank** (a network or, **lambdarank-trees**, LightGBM), **ranksvm** and **dla**, which learn "
            "from clicks alone; or **none**, which leaves the exact matching.",
            show_default="network",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="auto|score|match|ctr1",
            help="How the model ranks: by **score**, by the exact **match** of items to positions, or by the expected "
            "utility at position 1 (**ctr1**). **auto** takes the better of score and match by a cross-fitted estimate "
            "on the validation split.",
            show_default="auto",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="model|counterfactual|blend",
            help="The utility that is maximised: what the click **model** expects, Eq. 3 on the logged clicks "
            "(**counterfactual**, as in the paper), or a **blend** of both.",
            show_default="model",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            metavar="stable|paper", help="The loss: **stable**, or Eq. 9 as **paper** prints it.", show_default="stable"
        ),
    ] = None,
    propensity: Annotated[
        str | None,
        typer.Option(
            metavar="none|randomised|harvest|cpbm|em|FILE",
            help="For lambdarank and ranksvm: how clicks are weighed by their examination; a file is what "
            "`urank propensity -o` wrote.",
            show_default="none",
        ),
    ] = None,
    learn_from: Annotated[
        str | None,
        typer.Option(
            metavar="clicks|relevance",
            help="For lambdarank and ranksvm: learn from the labels of the column `relevance` instead.",
            show_default="clicks",
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data at most.", show_default="30")] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="Where networks are trained.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of all random numbers.", show_default="0")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="TOML with any setting, in the tables clicks, scorer and trees; flags come before it."
        ),
    ] = None,
    truth: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="What `urank simulate` wrote: compare with the true click table."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the report as a page with plots.")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx/--no-onnx", help="Write the model as an ONNX graph too.")] = True,
    column: Column = None,
    categorical: Categorical = None,
    drop: Drop = None,
    memory: MemoryOption = "4GB",
    engine: Engine = EngineName.local,
    workers: Workers = None,
    address: Address = None,
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
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a ranker: a click model, P(click | item, position), and a scorer that learns from it the order of highest
    expected utility.

    Train teaches, valid stops, chooses and calibrates; test is only reported. A run that was killed goes on where it
    was when the same command is given again. The model is a folder with a JSON manifest, weights and ONNX graphs
    that take raw features.

    Example: `urank train prepared -o model --click-model monotone --ensemble 3`
    """
    settings = _settings(
        read_toml(config) if config is not None else {},
        {"ranker": ranker, "method": method},
        {
            **families(click_model),
            "ensemble": ensemble,
            "backbone": backbone,
            "calibration": calibration,
            "seed": seed,
            "mix": mix or None,
        },
        {"target": target, "form": form, "backbone": backbone, "seed": seed},
        {"epochs": epochs, "device": device},
        {"propensity": propensity, "learn_from": learn_from},
    )
    limit, cluster = Memory.parse(memory), cluster_of(engine, workers, address)
    from urank.lab.truth import read_truth  # slow to load, as all that needs torch
    from urank.ranking.urank_config import UrankConfig
    from urank.report.click_report import print_fit

    checked = validate(UrankConfig, settings, str(config) if config is not None else "the model")
    refuse_url(output, "--output")
    refuse_taken(output, marker="manifest.json", overwrite=overwrite)
    if truth is not None:
        read_truth(truth)  # better refused now than after the training
    working = output.absolute().with_name(f".{output.name}.training")
    # Of a folder that was named, one of our own within it: it is emptied at the beginning and removed at the end.
    state = working / "checkpoints" if checkpoints is None else _absolute(checkpoints) / f"{output.name}.training"
    try:
        with bars(quiet=quiet or json) as report:
            if cluster is not None and cluster.address is not None and not is_prepared(log):
                raise ConfigError(
                    f"a cluster learns from a prepared log that it can read; run urank prepare {log} first"
                )
            dataset = _dataset(log, working, column, categorical, drop, limit, report)
            if cluster is None:
                made = _train_here(dataset, checked, output, state, truth, onnx, overwrite, report)
            else:
                made = _train_there(cluster, dataset, checked, output, state, truth, onnx, overwrite, report)
            samples = _samples(dataset, checked)
    except UrankError:
        shutil.rmtree(working, ignore_errors=True)  # what was refused is not gone on with; what was killed is
        raise
    remove_folder(state)
    shutil.rmtree(working, ignore_errors=True)
    if html is not None:
        from urank.report.click_report import write_fit

        write_fit(made.judged, html)
    if json:
        told = {"model": made.name, "method": made.method, "why": made.why, "rounds": to_jsonable(made.rounds)}
        told["warnings"] = samples
        print_json({**made.judged.to_dict(), **told})
    elif not quiet:
        console = Console()
        print_fit(made.judged, console)
        sentence = f"\n{made.name} ranks by {made.method}: {made.why}. The model is in {output}"
        for line in (sentence, *samples):
            console.print(line, highlight=False, soft_wrap=True, markup=False, emoji=False)


def _samples(dataset: Dataset, config: UrankConfig) -> list[str]:
    """What to tell of trees that memory made learn from a part of the log."""
    from urank.learning.lightgbm_data import sample_sentence

    features, row_bytes = len(dataset.features), []
    if "gbdt" in config.clicks.families:
        row_bytes.append(config.clicks.trees.row_bytes(features))
    if config.ranker in ("trees", "lambdarank-trees"):
        row_bytes.append(config.trees.row_bytes(features, dataset.positions))
    found = (sample_sentence(dataset, each) for each in row_bytes)
    return [f"{sentence} (allow more with --memory)" for sentence in found if sentence is not None]


@dataclass(frozen=True)
class _Made:
    """What a training tells of itself."""

    judged: FitReport
    name: str
    method: str
    why: str
    rounds: dict[str, list[dict[str, float]]]


def _train_here(
    dataset: Dataset,
    config: UrankConfig,
    output: Path,
    checkpoints: Path,
    truth: Path | None,
    onnx: bool,
    overwrite: bool,
    report: Report,
) -> _Made:
    import torch

    from urank.model_io import save_model
    from urank.pipeline import fit_model
    from urank.report.fit import fit_report

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # the rest reads ahead; small networks gain no more
    fit = fit_model(dataset, config, checkpoints=checkpoints, report=report)
    judged = fit_report(fit.clicks, dataset, config.clicks, truth=truth)
    report("writing the model", 0, None)
    facts = {"quality": judged.to_dict(), "why": fit.why}
    save_model(fit.model, config, output, overwrite=overwrite, onnx=onnx, facts=facts)
    return _Made(judged, fit.model.name, fit.model.method, fit.why, fit.rounds)


def _train_there(
    cluster: Cluster,
    dataset: Dataset,
    config: UrankConfig,
    output: Path,
    checkpoints: Path,
    truth: Path | None,
    onnx: bool,
    overwrite: bool,
    report: Report,
) -> _Made:
    from urank.ray.jobs import train_on_ray

    trained = train_on_ray(
        _absolute(dataset.folder),
        config,
        cluster,
        checkpoints=checkpoints,
        memory=dataset.memory,
        truth=None if truth is None else str(truth.absolute()),
        onnx=onnx,
        report=report,
    )
    trained.save(output, overwrite=overwrite)
    return _Made(trained.judged, trained.name, trained.method, trained.why, trained.rounds)


def _absolute(path: str | Path) -> Path:
    """The same place for who works in another folder."""
    found = to_path(path)
    return found if is_remote(found) else found.absolute()


def _settings(
    config: dict[str, Any],
    model: dict[str, Any],
    clicks: dict[str, Any],
    scorer: dict[str, Any],
    training: dict[str, Any],
    baseline: dict[str, Any],
) -> dict[str, Any]:
    """The settings of a file with the flags that were given laid over them."""

    def laid_over(under: Any, flags: dict[str, Any]) -> dict[str, Any]:
        return dict(under) | {key: value for key, value in flags.items() if value is not None}

    for table in ("clicks", "scorer", "baseline", "svm"):
        found = config.get(table, {})
        if not isinstance(found, dict):
            raise ConfigError(f"{table} must be a table of settings; got {found!r}")
        if not isinstance(found.get("training", {}), dict):
            raise ConfigError(f"{table}.training must be a table of settings; got {found['training']!r}")
    settings = laid_over(config, model)
    settings["clicks"] = laid_over(config.get("clicks", {}), clicks)
    settings["clicks"]["training"] = laid_over(settings["clicks"].get("training", {}), training)
    settings["scorer"] = laid_over(config.get("scorer", {}), scorer)
    settings["baseline"] = laid_over(config.get("baseline", {}), baseline)
    settings["svm"] = laid_over(config.get("svm", {}), {"seed": scorer["seed"]})
    if training["device"] is not None:
        given = {"device": training["device"]}
        settings["scorer"]["training"] = laid_over(settings["scorer"].get("training", {}), given)
    return settings


def families(name: str) -> dict[str, Any]:
    """The settings that the name of a click model stands for."""
    if name == "auto":
        return {}
    return {"families": tuple(part.strip() for part in name.split(","))}


def _dataset(
    log: str,
    working: Path,
    column: list[str] | None,
    categorical: list[str] | None,
    drop: list[str] | None,
    memory: Memory,
    report: Report,
) -> Dataset:
    """The prepared log; one that is not prepared yet is, beside the model to be."""
    refuse_columns(log, column, categorical, drop)
    if is_prepared(log):
        return Dataset(log, memory=memory)
    folder = working / "prepared"
    source = open_log(log, column, categorical, drop)
    prepare(source, folder, overwrite=True, bucket_bytes=memory.bucket_bytes, report=report)
    return Dataset(folder, memory=memory)
