"""`urank prepare`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from urank.cli.options import EngineOptions, LogOptions, MemoryOption, Overwrite, PrintOptions, command
from urank.log.prepare import prepare
from urank.memory import Memory
from urank.report.tables import Table, terminal_table


class HoldOut(StrEnum):
    """How queries are held out."""

    hash = "hash"
    time = "time"


@command()
def prepare_command(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="Parquet or CSV (also gzipped): a file, a folder, a glob in quotes, or the URL of Parquet files.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Where to write the prepared log: a folder or a URL.")
    ],
    split: Annotated[
        HoldOut,
        typer.Option(
            help="Hold out queries by the hash of their id (a query keeps its split when data is added), "
            "or the newest ones by time."
        ),
    ] = HoldOut.hash,
    valid: Annotated[float, typer.Option(min=0, max=1, help="Share of queries for validation.")] = 0.1,
    test: Annotated[float, typer.Option(min=0, max=1, help="Share of queries for the test.")] = 0.1,
    positions: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="Only the first K positions were shown: items further down are unseen candidates, which a ranker "
            "learns to order as well.",
        ),
    ] = None,
    columns: LogOptions = LogOptions(),
    memory: MemoryOption = "4GB",
    engine: EngineOptions = EngineOptions(),
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Turn an impression log into one row per query, split into train, valid and test.

    The log has a row for each item shown: which query, at which position, clicked or not, and the item's features.
    It may be in any order and larger than memory. A log that breaks a rule is refused with the file and the row, and
    nothing is left behind.

    Example: `urank prepare log.parquet -o prepared -c position=rank -c click=clicked`
    """
    limit, cluster = Memory.parse(memory), engine.cluster
    source = columns.open(log)
    options: dict[str, Any] = {"split": split.value, "valid": valid, "test": test, "positions": positions}
    with printing.progress() as report:
        options |= {"overwrite": overwrite, "report": report}
        if cluster is None:
            description = prepare(source, output, bucket_bytes=limit.bucket_bytes, **options)
        else:
            from urank.ray.jobs import prepare_on_ray

            description = prepare_on_ray(source, output, cluster, memory=limit, **options)
    counts = description["counts"]
    columns_shown = ("queries", "lists", "shown" if "shown" in counts["train"] else "rows", "clicks")
    rows = [(name, *(f"{each[key]:,}" for key in columns_shown)) for name, each in counts.items()]
    table = Table(("split", "queries", "lists", "impressions", "clicks"), rows)
    kinds = [feature["kind"] for feature in description["features"]]
    unseen = sum(each["rows"] - each.get("shown", each["rows"]) for each in counts.values())
    sentence = (
        f"{description['positions']} positions, {kinds.count('numeric')} numeric and {kinds.count('categorical')} "
        f"categorical features, {f'{unseen:,} unseen candidates, ' if unseen else ''}written to {output}"
    )
    printing.show(description, lambda console: console.print(terminal_table(table)), sentence)
