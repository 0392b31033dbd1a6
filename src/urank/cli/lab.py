"""The commands of the lab: `urank simulate`, `urank appstore`, `urank abtest simulate` and `urank reproduce`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from urank.cli.options import ConfigFile, Overwrite, PrintOptions, command, json_text
from urank.config import deep_merge, read_toml, validate
from urank.errors import ConfigError
from urank.lab.letor_simulation import SimulationConfig, simulate, write_simulation
from urank.lab.market import AbTestSchedule, MarketConfig

if TYPE_CHECKING:
    from urank.lab.live_test import AbTestRun, JudgedTest

Randomise = Annotated[
    str | None,
    typer.Option(
        metavar="KIND:SHARE",
        rich_help_panel="Traffic",
        help="Randomise a share of the sessions, as `swap:0.1`: **swap** with position 1, **adjacent** swap, "
        "or full **shuffle**. Recorded in the log as `policy`, `propensity` and `ranked_position`.",
    ),
]


def _output(content: str) -> Any:
    return typer.Option("--output", "-o", metavar="DIR", help=f"Output folder for {content}.")


_SIMULATION = {
    "Documents": "data queries features noise candidates values",
    "Traffic": "positions sessions loggers traffic label_share",
    "Users": "user eta attention_features epsilon gamma label_max denominator scaling",
    "Truth": "truth_split valid test",
    "Options": "seed",
}
_MARKET = {
    "Users": "users visits tastes attention steepness thumbnails",
    "Apps": "apps appeal drift bids",
    "Traffic": "candidates positions log_days warmup_days random_days random_visits",
    "Options": "seed",
}
_ABTEST = {"Options": "market.users arm_share before during after retrain train_days method seed"}


@command(SimulationConfig, panels=_SIMULATION)
def simulate_command(
    output: Annotated[Path, _output("the log and its truth")],
    settings: dict[str, Any],
    config: ConfigFile = None,
    randomise: Randomise = None,
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Simulate a click log whose truth is known, as in Section 5.2 of the paper.

    Weak rankers order the documents of a LETOR file, or of generated data; users examine a document at position k
    with probability 1/k^max(wᵀx+1, 0), where x are the document's features, and click on it if it is relevant. Writes
    `log.parquet`, `simulation.toml` and `truth/`, from which the true utility of any order can be computed. The same
    seed gives the same bytes.

    Example: `urank simulate -o sim --data mslr/train.txt --loggers 2 --randomise swap:0.05`
    """
    if randomise is not None:
        kind, _, share = randomise.partition(":")
        try:
            settings |= {"randomise": kind, "randomise_share": float(share)}
        except ValueError:
            raise ConfigError(f"--randomise takes KIND:SHARE, as swap:0.1; got '{randomise}'") from None
    values = (read_toml(config) if config is not None else {}) | settings
    for key in ("queries", "features", "noise"):
        if "data" in values and key in settings:
            raise ConfigError(f"--{key} is for generated documents; with --data they come from the file")
    checked = validate(SimulationConfig, values, str(config) if config is not None else "the simulation")
    with printing.progress({"simulate": 3, "write": 1}) as report:
        simulation = simulate(checked, report)
        write_simulation(simulation, output, overwrite=overwrite, report=report)
    log = simulation.log
    lists, queries = log["session_id"].n_unique(), log["query_id"].n_unique()
    clicks = int(log["click"].to_numpy().sum(dtype="int64"))
    counts = {"impressions": log.height, "lists": lists, "queries": queries, "clicks": clicks}
    document = {"folder": str(output), **counts, "clicks_per_list": clicks / lists}
    printing.show(
        document | {"config": checked.model_dump(mode="json")},
        lambda console: None,
        f"{log.height:,} impressions in {lists:,} lists of {queries:,} queries, "
        f"{clicks / lists:.3f} clicks per list, written to {output}",
    )


@command(MarketConfig, panels=_MARKET)
def appstore_command(
    output: Annotated[Path, _output("the logs and the truth")],
    settings: dict[str, Any],
    config: ConfigFile = None,
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Simulate an app store whose truth is known, as in Section 6 of the paper.

    Users return day after day; a DeepFM, trained on the days before, ranks the apps retrieved for each visit. Users
    examine an app at position k with a probability that falls with k, faster for some categories, devices and
    thumbnails than for others, and download it if it appeals to them. Writes `log.parquet`, the DeepFM's log;
    `random.parquet`, earlier visits with a random order; `appstore.toml`; and `truth/`, the true click table of the
    impressions of the last day. The same seed gives the same bytes.

    Both logs have a row for each app shown: `query_id` (the visit), `item_id`, `position`, `click` (a download),
    `value` (the bid for it), `user_id`, `timestamp`, `policy`, and the features `device`, `region`, `category`, `app`,
    `downloads` (yesterday's), `thumbnail`, `taste_1`… of the user and `genre_1`… of the app.

    Next steps:

    - `urank inspect store/log.parquet` reports what can be learned from the log;

    - `urank examination randomised store/random.parquet --by category` estimates examination by category;

    - `urank run store/log.parquet -o job` learns an order that maximises revenue by the bids, or with `--drop value`
      downloads;

    - `urank evaluate job/model last-day.parquet --split all --truth store` estimates the utility of an order on the
      last day, beside the truth. Cut that day out of the log by its timestamp, and train on the rest.

    Example: `urank appstore -o store --users 5000`
    """
    values = (read_toml(config) if config is not None else {}) | settings
    checked = validate(MarketConfig, values, str(config) if config is not None else "the app store")
    import torch  # slow to import

    from urank.lab.appstore import write_appstore

    torch.set_num_threads(1)  # sums in another order could have other bits
    with printing.progress() as report:
        counts = write_appstore(checked, output, overwrite=overwrite, report=report)
    downloads = counts["downloads"] / max(counts["visits"], 1)
    document = {"folder": str(output), **{key: int(count) for key, count in counts.items()}}
    printing.show(
        document | {"downloads_per_visit": downloads, "config": checked.model_dump(mode="json")},
        lambda console: None,
        f"{counts['impressions']:,.0f} impressions in {counts['visits']:,.0f} visits, "
        f"{downloads:.3f} downloads per visit, written to {output}",
    )


@command(AbTestSchedule, panels=_ABTEST)
def abtest_simulate_command(
    output: Annotated[Path, _output("the log, the truth and the report")],
    settings: dict[str, Any],
    config: ConfigFile = None,
    overwrite: Overwrite = False,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Simulate the live test of the paper's Section 6.2: A/A, then U-rank against DeepFM, then A/A again.

    Users of an app store return day after day. Both arms are served by one DeepFM at first; then each has its own
    ranker, trained every few days on the log of that arm; then one ranker serves both again. Writes
    `exposures.parquet`, which `urank abtest analyse` reads; `truth.parquet`, the true lift of each day; `abtest.toml`;
    and the analysis, `report.html` and `analysis.json`. The same seed gives the same log.

    Example: `urank abtest simulate -o test --users 20000`
    """
    values = deep_merge(read_toml(config) if config is not None else {}, settings)
    import torch  # slow to import

    from urank.lab.experiment import AbTestConfig
    from urank.lab.live_test import judge_abtest, print_judged, simulate_abtest, write_judged

    checked = validate(AbTestConfig, values, str(config) if config is not None else "the test")
    torch.set_num_threads(1)  # sums in another order could have other bits
    found: list[JudgedTest] = []

    def finish(run: AbTestRun) -> None:
        judged = judge_abtest(run, name=str(output / "exposures.parquet"), report=report)
        report("write the report", 0, None)
        (run.folder / "analysis.json").write_text(json_text(judged.to_dict()) + "\n", encoding="utf-8")
        write_judged(judged, run.folder / "report.html")
        found.append(judged)

    with printing.progress() as report:
        simulate_abtest(checked, output, overwrite=overwrite, finish=finish, report=report)
    [judged] = found
    document = {"folder": str(output), **judged.to_dict(), "config": checked.model_dump(mode="json")}
    printing.show(document, partial(print_judged, judged), f"\nThe report is {output / 'report.html'}")


@command()
def reproduce_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="table1|table2|table3|live-test|fig-ctr-by-position|fig-result-list|differences|attention|users|all",
            help="Which table or figure. **table1**: every ranker and propensity estimate; **table2**: architectures "
            "of the click model (RQ2); **table3**: an app store, without bids and with; **live-test**: the A/B test of "
            "Section 6.2 in it; **fig-ctr-by-position**: Figure 4; **fig-result-list**: Figure 3; **differences**: the "
            "effect of each change to U-rank as printed; "
            "**attention**: Table 1 for weak and strong item-specific attention; **users**: for users whose curves the "
            "click models do not presume.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Output folder for results and report; an interrupted run resumes."
        ),
    ] = Path("reproduction"),
    data: Annotated[
        str | None,
        typer.Option(
            help="LETOR file or folder; documents are generated if left out. No effect on table3, whose store is "
            "always simulated.",
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            metavar="yahoo|mslr-web10k|istella-s",
            help="Name of the data if it is one of the paper's: its figures are then shown beside ours. No effect on "
            "table3, whose store is not the paper's.",
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Number of repetitions, each with another seed.")] = 5,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of worker processes.", show_default="one for each core"),
    ] = None,
    config: ConfigFile = None,
    printing: PrintOptions = PrintOptions(),
) -> None:
    """Reproduce the paper: its tables and figures on simulated clicks, with every baseline, and the claims of Sections
    5.4, 6.1 and 6.2 checked one by one.

    DIR then contains `report.html`, `results.parquet` (each method, seed and test query), `settings.toml` and a file
    for each table (`table1.parquet`, `attention.parquet` …); after table3 also `store-results.parquet` (each method,
    seed and test visit). The same command resumes an interrupted run; another experiment in the same DIR reuses the
    trained models.

    Example: `urank reproduce table1 --seeds 1 -o reproduction`
    """
    from urank.lab.paper_report import print_reproduction, write_reproduction
    from urank.lab.reproduction import experiment_names, reproduce

    names = experiment_names(what)
    overrides, source = (read_toml(config), str(config)) if config is not None else ({}, "")
    given: dict[str, Any] = {"data": data, "dataset": dataset, "seeds": seeds, "workers": workers}
    flags = {"data": data and Path(data).name, "dataset": dataset, "seeds": seeds, "config": config and config.name}
    run = " ".join(["urank reproduce", what, *(f"--{name} {flag}" for name, flag in flags.items() if flag)])
    with printing.progress({"all steps": 1}) as report:
        found = reproduce(names, output, **given, overrides=overrides, source=source, command=run, report=report)
    write_reproduction(found, output / "report.html")
    printing.show(found.to_dict(), partial(print_reproduction, found), f"\nThe report is {output / 'report.html'}")
