"""`urank evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import (
    Address,
    Categorical,
    Column,
    Cuts,
    Drop,
    Engine,
    EngineName,
    Floor,
    Json,
    MemoryOption,
    Quiet,
    Truth,
    Workers,
    cluster_of,
    open_log,
    print_json,
    refuse_columns,
)
from urank.errors import ConfigError
from urank.log.dataset import is_prepared
from urank.memory import Memory
from urank.progress import bars
from urank.storage import is_remote

__all__ = ["evaluate_command"]


def evaluate_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL... LOG",
            help="The folders of one or more models, and last the log: what `urank prepare` wrote, or a log as it "
            "takes it.",
            show_default=False,
        ),
    ],
    split: Annotated[
        str,
        typer.Option(
            metavar="test|valid|train|all",
            help="The queries to judge by. **test** are those that no training has looked at; **all** is for a log "
            "that is new to the models.",
        ),
    ] = "test",
    estimator: Annotated[
        str,
        typer.Option(
            metavar="auto|ratio|self_normalised|direct|doubly_robust|ips|snips",
            help="What the table shows. **ratio**: Eq. 3, a click times P(click at the new position) / P(click at the "
            "logged one); **self_normalised**: the same, divided by what it would be if clicks came as modelled; "
            "**direct**: what the click model expects; **doubly_robust**: that, corrected by the clicks; **ips** and "
            "**snips** need the column propensity. **auto**: doubly_robust where propensities are known, else ratio.",
        ),
    ] = "auto",
    cuts: Cuts = 2,
    floor: Floor = 0.01,
    truth: Truth = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with plots.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the folds and all random numbers.")] = 0,
    column: Column = None,
    categorical: Categorical = None,
    drop: Drop = None,
    memory: MemoryOption = "4GB",
    engine: Engine = EngineName.local,
    workers: Workers = None,
    address: Address = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what models would earn, from a log, with intervals, before anybody ships them.

    Every way in which a model can rank is judged beside the logged order and a random one: utility of the first 1, 3, 5
    and of all positions, the difference to the logged order with its 95 % interval, and how likely chance alone makes
    it. No policy is judged by the click table it was optimised on: the evaluation fits click models of its own on the
    log, each on other queries than it judges. Where the log cannot support a claim, it says so.

    Example: `urank evaluate model prepared --html evaluation.html`
    """
    if len(paths) < 2:
        raise ConfigError("urank evaluate takes one or more models and, last, a log; got only one path")
    *models, log = paths
    refuse_columns(log, column, categorical, drop)
    from urank.evaluation.cross_fitting import CrossfitConfig
    from urank.lab.truth import add_true_utilities, read_truth, true_reference, true_utilities
    from urank.model_io import read_manifest
    from urank.pipeline import evaluate, policies_to_evaluate, prepared  # slow to load, as all that needs torch
    from urank.report.evaluation_report import print_evaluation, write_evaluation

    asked: dict[str, Any] = {"split": split, "estimator": estimator, "floor": floor, "memory": Memory.parse(memory)}
    asked["config"] = CrossfitConfig(cuts=cuts, seed=seed)
    cluster = cluster_of(engine, workers, address)
    if cluster is not None and not is_prepared(log):
        raise ConfigError(f"the engine ray evaluates by a prepared log; run urank prepare {log} first")
    candidates = None if truth is None else read_truth(truth)  # fail fast
    source = log if is_prepared(log) else open_log(log, column, categorical, drop)
    with bars(quiet=quiet or json) as report, prepared(source, memory=asked["memory"], report=report) as dataset:
        if cluster is None:
            found = evaluate(models, dataset, report=report, **asked)
        else:
            from urank.ray.jobs import evaluate_on_ray

            there = log if is_remote(log) else Path(log).absolute()
            found = evaluate_on_ray(models, there, cluster, report=report, **asked)
        document, reference = found.to_dict(), None
        if candidates is not None:
            true = true_utilities(found, policies_to_evaluate(models), dataset, candidates, seed=seed)
            document, reference = add_true_utilities(document, true), true_reference(true)
    own = read_manifest(models[0])["method"] if len(models) == 1 else None
    if html is not None:
        write_evaluation(found, html, own, reference)
    if json:
        print_json(document)
    elif not quiet:
        console = Console()
        print_evaluation(found, console, own, reference)
        if html is not None:
            console.print(f"\nThe same with plots: {html}", highlight=False, markup=False, emoji=False, soft_wrap=True)
