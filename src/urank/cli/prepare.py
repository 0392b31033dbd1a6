"""`urank prepare`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

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
)
from urank.log.prepare import prepare
from urank.memory import Memory
from urank.progress import bars
from urank.report.tables import Table, terminal_table

__all__ = ["prepare_command"]


class Split(StrEnum):
    """How queries are held out."""

    hash = "hash"
    time = "time"


def prepare_command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="Parquet or CSV (also gzipped): a file, a folder, a glob in quotes, or the URL of Parquet files.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Where to write the prepared log: a folder, or a URL.")
    ],
    split: Annotated[
        Split,
        typer.Option(
            help="Hold out queries by the hash of their id (a query keeps its place when data is added), "
            "or the newest ones by time."
        ),
    ] = Split.hash,
    valid: Annotated[float, typer.Option(min=0, max=1, help="Share of queries for validation.")] = 0.1,
    test: Annotated[float, typer.Option(min=0, max=1, help="Share of queries for the test.")] = 0.1,
    positions: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="Only the first K positions were shown: items further down are candidates that nobody saw, which a "
            "ranker learns to order too.",
        ),
    ] = None,
    column: Column = None,
    categorical: Categorical = None,
    drop: Drop = None,
    memory: MemoryOption = "4GB",
    engine: Engine = EngineName.local,
    workers: Workers = None,
    address: Address = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn an impression log into one row per query, split into train, valid and test.

    The log has a row for each item shown: which query, at which position, clicked or not, and the item's features.
    It may be in any order and larger than memory. A log that breaks a rule is refused with the file and the row, and
    nothing is left behind.

    Example: `urank prepare log.parquet -o prepared -c position=rank -c click=clicked`
    """
    limit, cluster = Memory.parse(memory), cluster_of(engine, workers, address)
    source = open_log(log, column, categorical, drop)
    with bars(quiet=quiet or json) as report:
        asked: dict[str, Any] = {"split": split.value, "valid": valid, "test": test, "positions": positions}
        asked |= {"overwrite": overwrite, "report": report}
        if cluster is None:
            description = prepare(source, output, bucket_bytes=limit.bucket_bytes, **asked)
        else:
            from urank.ray.jobs import prepare_on_ray

            description = prepare_on_ray(source, output, cluster, memory=limit, **asked)
    if json:
        print_json(description)
    elif not quiet:
        rows = [
            (
                name,
                *(f"{each[key]:,}" for key in ("queries", "lists", "shown" if "shown" in each else "rows", "clicks")),
            )
            for name, each in description["counts"].items()
        ]
        console = Console()
        console.print(terminal_table(Table(("split", "queries", "lists", "impressions", "clicks"), rows)))
        kinds = [feature["kind"] for feature in description["features"]]
        counts = description["counts"].values()
        unseen = sum(each["rows"] - each.get("shown", each["rows"]) for each in counts)
        console.print(
            f"{description['positions']} positions, {kinds.count('numeric')} numeric and "
            f"{kinds.count('categorical')} categorical features, "
            f"{f'{unseen:,} candidates that nobody saw, ' if unseen else ''}written to {output}",
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )
