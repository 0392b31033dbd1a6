"""`urank evaluate`, and `urank guard`, the evaluation of orders that stay close to the logged one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import (
    PLOTS,
    EngineOptions,
    Estimator,
    Floor,
    GoalOption,
    Html,
    LogOptions,
    MemoryOption,
    MethodOption,
    PrintOptions,
    Randomised,
    SplitName,
    Truth,
    check_truth,
    command,
)
from urank.config import validate
from urank.errors import ConfigError
from urank.evaluation.cross_fitting import CrossfitConfig
from urank.log.dataset import is_prepared
from urank.log.prepare import PREPARE_STEPS
from urank.memory import Memory
from urank.model_manifest import read_manifest
from urank.pipeline import (
    EVALUATE_STEPS,
    evaluate,
    goal_of,
    guard_levels,
    policies_to_evaluate,
    policy_to_guard,
    prepared,
)
from urank.report.evaluation_report import after_a_gain, print_evaluation, write_evaluation
from urank.report.guard_report import print_guard, write_guard
from urank.storage import absolute

_SETTINGS = {"--seed": "seed"}


@command(CrossfitConfig, _SETTINGS)
def evaluate_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL... LOG",
            help="Folders of one or more models and, last, the log: the output of `urank prepare`, or a raw log.",
            show_default=False,
        ),
    ],
    settings: dict[str, Any],
    split: SplitName = "test",
    estimator: Estimator = "auto",
    floor: Floor = 0.01,
    goal: GoalOption = None,
    randomised: Randomised = None,
    truth: Truth = None,
    html: Html = None,
    columns: LogOptions = LogOptions(),
    memory: MemoryOption = "4GB",
    engine: EngineOptions = EngineOptions(),
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Estimate from a log what models would earn, with intervals, before anybody ships them.

    Every way in which a model can rank is evaluated beside the logged order and a random one: utility of the first 1,
    3, 5 and of all positions, the difference to the logged order with its 95 % interval, and its p-value. No policy is
    judged by the click table it was optimised on: the evaluation has networks of its own, which never saw the queries
    they judge and are refitted on their clicks. Where the log cannot support a claim, a warning appears.

    Example: `urank evaluate model prepared --html evaluation.html`
    """
    if len(paths) < 2:
        raise ConfigError("urank evaluate takes one or more models and, last, a log; got only one path")
    *models, log = paths
    source, cluster = columns.source(log, models=models), engine.cluster
    compare = None
    if truth is not None:
        from urank.lab.truth import compare_evaluation

        compare = compare_evaluation(truth)
    config, limit = validate(CrossfitConfig, settings, "the evaluation"), Memory.parse(memory)
    options: dict[str, Any] = {"split": split, "estimator": estimator, "floor": floor, "config": config}
    if randomised:
        if cluster is not None:
            raise ConfigError("randomised lists are evaluated in one process; leave out --randomised or --engine ray")
        options["randomised"] = randomised
    if cluster is not None and not is_prepared(log):
        raise ConfigError(f"the engine ray evaluates on a prepared log; run urank prepare {log} first")
    policies = policies_to_evaluate(models)
    options["goal"] = goal_of(policies) if goal is None else goal.value
    if compare is not None:
        check_truth(options["goal"])
    plan = EVALUATE_STEPS if is_prepared(log) else {**PREPARE_STEPS, **EVALUATE_STEPS}
    with printing.progress(plan) as report, prepared(source, policies=policies, memory=limit, report=report) as dataset:
        if cluster is None:
            found = evaluate(models, dataset, report=report, **options)
        else:
            from urank.ray.jobs import evaluate_on_ray

            found = evaluate_on_ray(models, absolute(log), cluster, memory=limit, report=report, **options)
        document, reference = found.to_dict(), None
        if compare is not None:
            document, reference = compare(found, policies, dataset, config.seed)
    own = read_manifest(models[0])["method"] if len(models) == 1 else None
    next_step = after_a_gain(models[0], log) if len(models) == 1 else ""
    if html is not None:
        write_evaluation(found, html, own, reference, next_step)
    notes = [PLOTS.format(html)] if html is not None else []

    def text(console: Console) -> None:
        print_evaluation(found, console, own, reference, next_step=next_step)

    printing.show(document, text, *notes)


class GuardKindName(StrEnum):
    """What a guard level bounds."""

    shift = "shift"
    blend = "blend"


@command(CrossfitConfig, _SETTINGS)
def guard_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Output of `urank train`.")],
    log: Annotated[str, typer.Argument(metavar="LOG", help="Output of `urank prepare`, or a raw log.")],
    settings: dict[str, Any],
    kind: Annotated[
        GuardKindName,
        typer.Option(
            help="**shift**: no item moves more than this many places from its logged rank; **blend**: the ranks of "
            "both orders are averaged, the level is the model's share."
        ),
    ] = GuardKindName.shift,
    levels: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL,…",
            help="Levels to evaluate, besides the model's own order.",
            show_default="1,2,3,5 for shift; 0.25,0.5,0.75 for blend",
        ),
    ] = None,
    method: MethodOption = None,
    split: SplitName = "test",
    estimator: Estimator = "auto",
    floor: Floor = 0.01,
    goal: GoalOption = None,
    truth: Truth = None,
    html: Html = None,
    columns: LogOptions = LogOptions(),
    memory: MemoryOption = "4GB",
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Estimate what a model would earn if it had to stay close to the logged order, level by level, for a safe first
    launch.

    Each level is evaluated beside the logged order and the model's own, with the same click models: its utility, the
    difference to the logged order with its 95 % interval, how many places items move, and how many lists have another
    first item. It recommends the smallest level whose gain is clear of 0 and keeps half of the full gain, or reports
    that there is none. `urank rank --guard` then ranks within that level.

    Example: `urank guard model prepared --html guard.html`
    """
    source, limit = columns.source(log, models=[model]), Memory.parse(memory)
    config = validate(CrossfitConfig, settings, "the evaluation")
    wanted = None if levels is None else _levels(levels)
    known = None
    if truth is not None:
        from urank.lab.truth import add_true_utilities, read_truth, true_guard_utilities, true_reference

        known = read_truth(truth)
    policy = policy_to_guard(model, None if method is None else method.value)
    options: dict[str, Any] = {"kind": kind.value, "levels": wanted, "split": split, "estimator": estimator}
    options["goal"] = goal_of([policy]) if goal is None else goal.value
    if known is not None:
        check_truth(options["goal"])
    plan = EVALUATE_STEPS if is_prepared(log) else {**PREPARE_STEPS, **EVALUATE_STEPS}
    with printing.progress(plan) as report, prepared(source, policies=[policy], memory=limit, report=report) as dataset:
        found = guard_levels(policy, dataset, floor=floor, config=config, report=report, **options)
        document, reference = found.to_dict(), None
        if known is not None:
            true = true_guard_utilities(found, policy, dataset, known, seed=config.seed)
            document, reference = add_true_utilities(document, true), true_reference(true)
    if html is not None:
        write_guard(found, html, reference)
    notes = [PLOTS.format(html)] if html is not None else []
    printing.show(document, lambda console: print_guard(found, console, reference), *notes)


def _levels(text: str) -> list[float]:
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--levels takes numbers separated by commas, as 1,2,5; got '{text}'") from None
