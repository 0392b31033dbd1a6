"""`urank guard`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from urank.cli.options import (
    Categorical,
    Column,
    Cuts,
    Drop,
    Floor,
    Json,
    MemoryOption,
    Quiet,
    Truth,
    open_log,
    print_json,
    refuse_columns,
)
from urank.cli.rank import MethodName
from urank.errors import ConfigError
from urank.log.dataset import is_prepared
from urank.memory import Memory
from urank.progress import bars

__all__ = ["guard_command"]


class Kind(StrEnum):
    """What a level bounds."""

    shift = "shift"
    blend = "blend"


def guard_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that `urank train` wrote.")],
    log: Annotated[str, typer.Argument(metavar="LOG", help="What `urank prepare` wrote, or a log as it takes it.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="**shift**: no item moves more than so many places from its logged rank; **blend**: the ranks of "
            "both orders are averaged, the level is the share of the model's."
        ),
    ] = Kind.shift,
    levels: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL,…",
            help="The levels to judge, besides the model's own order.",
            show_default="1,2,3,5 for shift; 0.25,0.5,0.75 for blend",
        ),
    ] = None,
    method: Annotated[
        MethodName | None, typer.Option(help="How the model ranks, as in `urank rank`.", show_default="the model's own")
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            metavar="test|valid|train|all",
            help="The queries to judge by. **test** are those that no training has looked at; **all** is for a log "
            "that is new to the model.",
        ),
    ] = "test",
    estimator: Annotated[
        str,
        typer.Option(
            metavar="auto|ratio|self_normalised|direct|doubly_robust",
            help="As in `urank evaluate`, but without propensities, which cannot judge an order that follows the "
            "logged one. **auto** is ratio.",
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
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a model would earn if it had to stay close to the logged order, level by level, for a safe first launch.

    Each level is judged beside the logged order and the model's own, all by the same click models: what it would earn,
    the difference to the logged order with its 95 % interval, how many places items move, and how many lists have
    another first item. It recommends the smallest level whose gain is clear of 0 and keeps half of the full gain, or
    says that there is none. `urank rank --guard` then ranks within that level.

    Example: `urank guard model prepared --html guard.html`
    """
    refuse_columns(log, column, categorical, drop)
    wanted = None if levels is None else _numbers(levels)
    limit = Memory.parse(memory)
    from urank.evaluation.cross_fitting import CrossfitConfig
    from urank.lab.truth import add_true_utilities, read_truth, true_guard_utilities, true_reference
    from urank.pipeline import guard_levels, policy_to_guard, prepared  # slow to load, as all that needs torch
    from urank.report.guard_report import print_guard, write_guard

    candidates = None if truth is None else read_truth(truth)  # fail fast
    source = log if is_prepared(log) else open_log(log, column, categorical, drop)
    policy = policy_to_guard(model, None if method is None else method.value)
    with bars(quiet=quiet or json) as report, prepared(source, memory=limit, report=report) as dataset:
        found = guard_levels(
            policy,
            dataset,
            kind=kind.value,
            levels=wanted,
            split=split,
            estimator=estimator,
            floor=floor,
            config=CrossfitConfig(cuts=cuts, seed=seed),
            report=report,
        )
        document, reference = found.to_dict(), None
        if candidates is not None:
            true = true_guard_utilities(found, policy, dataset, candidates, seed=seed)
            document, reference = add_true_utilities(document, true), true_reference(true)
    if html is not None:
        write_guard(found, html, reference)
    if json:
        print_json(document)
    elif not quiet:
        console = Console()
        print_guard(found, console, reference)
        if html is not None:
            console.print(f"\nThe same with plots: {html}", highlight=False, markup=False, emoji=False, soft_wrap=True)


def _numbers(text: str) -> list[float]:
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--levels takes numbers with commas between them, as 1,2,5; got '{text}'") from None
