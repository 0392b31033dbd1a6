"""`urank reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from urank.cli.options import Json, Quiet, print_json
from urank.config import read_toml
from urank.progress import bars

__all__ = ["reproduce_command"]


def reproduce_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="table1|table2|table3|fig-ctr-by-position|fig-result-list|differences|all",
            help="Which table or figure. **table1**: every ranker and propensity estimate; **table2**: architectures "
            "of the click model (RQ2); **table3**: an app store, without bids and with; **fig-ctr-by-position**: "
            "Figure 4; **fig-result-list**: Figure 3; **differences**: what each change to U-rank as printed is worth.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="The folder for results and report; a killed run goes on."),
    ] = Path("reproduction"),
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A LETOR file or folder (Yahoo set 1, MSLR-WEB10K, Istella-S, MQ2008 …). Documents are generated "
            "when left out. Does not concern table3, whose store is always simulated.",
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            metavar="yahoo|mslr-web10k|istella-s",
            help="Say that the data is one of the paper's: its figures then stand beside ours. Does not concern "
            "table3, whose store is not the paper's.",
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="How often all of it is done, each time with another seed.")] = 5,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time.", show_default="one for each core")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML laid over the experiment's own: any setting of the simulation and of every method.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce the paper: its tables and figures on simulated clicks, with every baseline, and the claims of Sections
    5.4 and 6.1 checked one by one.

    DIR then holds `report.html`, `results.parquet` (each method, seed and test query), `table1.parquet` and
    `settings.toml`; after table3 also `store-results.parquet` (each method, seed and test visit) and `table3.parquet`.
    The same command goes on where it was killed; another experiment in the same DIR uses what was trained.

    Example: `urank reproduce table1 --seeds 1 -o reproduction`
    """
    from urank.paper.reproduce import experiments_of, reproduce
    from urank.report.paper import print_reproduction, write_reproduction

    names = experiments_of(what)
    overrides = read_toml(config) if config is not None else {}
    with bars(quiet=quiet or json) as report:
        found = reproduce(
            names,
            output,
            data=data,
            dataset=dataset,
            seeds=seeds,
            workers=workers,
            overrides=overrides,
            source=str(config) if config is not None else "",
            report=report,
        )
    write_reproduction(found, output / "report.html")
    if json:
        print_json(found.to_dict())
    elif not quiet:
        console = Console()
        print_reproduction(found, console)
        where = f"\nThe report is {output / 'report.html'}"
        console.print(where, highlight=False, soft_wrap=True, markup=False, emoji=False)
