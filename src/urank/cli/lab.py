"""The commands of the lab: `urank simulate`, `urank appstore`, `urank abtest simulate` and `urank reproduce`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import Json, Overwrite, Quiet, config_option, json_text, numbers, print_json
from urank.config import deep_merge, read_toml, validate
from urank.errors import ConfigError
from urank.lab.letor_simulation import SimulationConfig, simulate, write_simulation
from urank.lab.market import MarketConfig
from urank.progress import bars

if TYPE_CHECKING:
    from urank.lab.live_test import AbTestRun, JudgedTest


_option = partial(config_option, SimulationConfig)
_market_option = partial(config_option, MarketConfig)

ConfigFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TOML with any of the keys below; flags take precedence.")
]


def _given(context: typer.Context, model: type[SimulationConfig] | type[MarketConfig]) -> dict[str, Any]:
    """Return the flags that set a field of the settings."""
    flags = {name: context.params.get(name) for name in model.model_fields}
    return {name: value for name, value in flags.items() if value is not None}


def _print(text: str) -> None:
    Console().print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def simulate_command(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Output folder for the log and its truth.")
    ],
    config: ConfigFile = None,
    data: Annotated[str | None, _option("data", panel="Documents", metavar="PATH")] = None,
    queries: Annotated[int | None, _option("queries", panel="Documents")] = None,
    features: Annotated[int | None, _option("features", panel="Documents")] = None,
    noise: Annotated[float | None, _option("noise", panel="Documents")] = None,
    candidates: Annotated[int | None, _option("candidates", panel="Documents")] = None,
    values: Annotated[str | None, _option("values", panel="Documents", metavar="LOW:HIGH")] = None,
    positions: Annotated[int | None, _option("positions", panel="Traffic")] = None,
    sessions: Annotated[int | None, _option("sessions", panel="Traffic")] = None,
    loggers: Annotated[int | None, _option("loggers", panel="Traffic")] = None,
    traffic: Annotated[str | None, _option("traffic", panel="Traffic", metavar="SHARE:SHARE…")] = None,
    label_share: Annotated[float | None, _option("label_share", panel="Traffic")] = None,
    randomise: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:SHARE",
            rich_help_panel="Traffic",
            help="Randomise a share of the sessions, as `swap:0.1`: **swap** with position 1, **adjacent** swap, "
            "or full **shuffle**. Recorded in the log as `policy`, `propensity` and `ranked_position`.",
        ),
    ] = None,
    user: Annotated[str | None, _option("user", panel="Users", metavar="item|query|pbm|cascade|trust")] = None,
    eta: Annotated[float | None, _option("eta", panel="Users")] = None,
    epsilon: Annotated[float | None, _option("epsilon", panel="Users")] = None,
    gamma: Annotated[float | None, _option("gamma", panel="Users")] = None,
    label_max: Annotated[float | None, _option("label_max", panel="Users")] = None,
    denominator: Annotated[float | None, _option("denominator", panel="Users")] = None,
    scaling: Annotated[str | None, _option("scaling", panel="Users", metavar="log|minmax|rank")] = None,
    truth: Annotated[str | None, _option("truth", panel="Truth", metavar="test|all")] = None,
    valid: Annotated[float | None, _option("valid", panel="Truth")] = None,
    test: Annotated[float | None, _option("test", panel="Truth")] = None,
    seed: Annotated[int | None, _option("seed")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate a click log whose truth is known, as in Section 5.2 of the paper.

    Weak rankers order the documents of a LETOR file, or of generated data; users examine a document at position k
    with probability 1/k^max(wᵀx+1, 0), where x are the document's features, and click on it if it is relevant. Writes
    `log.parquet`, `simulation.toml` and `truth/`, from which the true utility of any order can be computed. The same
    seed gives the same bytes.

    Example: `urank simulate -o sim --data mslr/train.txt --loggers 2 --randomise swap:0.05`
    """
    given = _given(context, SimulationConfig) | _randomise(randomise)
    given |= {"values": numbers("--values", values, 2)} if values is not None else {}
    given |= {"traffic": numbers("--traffic", traffic)} if traffic is not None else {}
    from_file = read_toml(config) if config is not None else {}
    if data is not None or "data" in from_file:
        ignored = next((key for key in ("queries", "features", "noise") if key in given), None)
        if ignored is not None:
            raise ConfigError(f"--{ignored} is for generated documents; with --data they come from the file")
    checked = validate(SimulationConfig, from_file | given, str(config) if config is not None else "the simulation")
    with bars(quiet=quiet or json) as report:
        simulation = simulate(checked, report)
        write_simulation(simulation, output, overwrite=overwrite, report=report)
    log = simulation.log
    lists, clicks = log["session_id"].n_unique(), int(log["click"].to_numpy().sum(dtype="int64"))
    if json:
        counts = {"impressions": log.height, "lists": lists, "queries": log["query_id"].n_unique(), "clicks": clicks}
        summary = {"folder": str(output), **counts, "clicks_per_list": clicks / lists}
        print_json({**summary, "config": checked.model_dump(mode="json")})
    elif not quiet:
        _print(
            f"{log.height:,} impressions in {lists:,} lists of {log['query_id'].n_unique():,} queries, "
            f"{clicks / lists:.3f} clicks per list, written to {output}"
        )


def _randomise(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    kind, _, share = text.partition(":")
    try:
        return {"randomise": kind, "randomise_share": float(share)}
    except ValueError:
        raise ConfigError(f"--randomise takes KIND:SHARE, as swap:0.1; got '{text}'") from None


def appstore_command(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Output folder for the logs and the truth.")
    ],
    config: ConfigFile = None,
    users: Annotated[int | None, _market_option("users", panel="Users")] = None,
    visits: Annotated[float | None, _market_option("visits", panel="Users")] = None,
    tastes: Annotated[int | None, _market_option("tastes", panel="Users")] = None,
    attention: Annotated[float | None, _market_option("attention", panel="Users")] = None,
    steepness: Annotated[float | None, _market_option("steepness", panel="Users")] = None,
    thumbnails: Annotated[float | None, _market_option("thumbnails", panel="Users")] = None,
    apps: Annotated[int | None, _market_option("apps", panel="Apps")] = None,
    appeal: Annotated[float | None, _market_option("appeal", panel="Apps")] = None,
    drift: Annotated[float | None, _market_option("drift", panel="Apps")] = None,
    bids: Annotated[str | None, _market_option("bids", panel="Apps", metavar="LOW:HIGH")] = None,
    candidates: Annotated[int | None, _market_option("candidates", panel="Traffic")] = None,
    positions: Annotated[int | None, _market_option("positions", panel="Traffic")] = None,
    days: Annotated[int | None, _market_option("days", panel="Traffic")] = None,
    warmup_days: Annotated[int | None, _market_option("warmup_days", panel="Traffic")] = None,
    random_days: Annotated[int | None, _market_option("random_days", panel="Traffic")] = None,
    random_visits: Annotated[int | None, _market_option("random_visits", panel="Traffic")] = None,
    seed: Annotated[int | None, _market_option("seed")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
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

    - `urank propensity store/random.parquet --method randomised --by category` estimates examination by category;

    - `urank run store/log.parquet -o job` learns an order that maximises revenue by the bids, or with `--drop value`
      downloads;

    - `urank evaluate job/model last-day.parquet --split all --truth store` estimates the utility of an order on the
      last day, beside the truth. Cut that day out of the log by its timestamp, and train on the rest.

    Example: `urank appstore -o store --users 5000`
    """
    given = _given(context, MarketConfig)
    given |= {"bids": numbers("--bids", bids, 2)} if bids is not None else {}
    from_file = read_toml(config) if config is not None else {}
    checked = validate(MarketConfig, from_file | given, str(config) if config is not None else "the app store")
    import torch  # slow to import

    from urank.lab.appstore import write_appstore

    torch.set_num_threads(1)  # sums in another order could have other bits
    with bars(quiet=quiet or json) as report:
        counts = write_appstore(checked, output, overwrite=overwrite, report=report)
    downloads = counts["downloads"] / max(counts["visits"], 1)
    if json:
        summary = {"folder": str(output), **{key: int(count) for key, count in counts.items()}}
        print_json({**summary, "downloads_per_visit": downloads, "config": checked.model_dump(mode="json")})
    elif not quiet:
        _print(
            f"{counts['impressions']:,.0f} impressions in {counts['visits']:,.0f} visits, "
            f"{downloads:.3f} downloads per visit, written to {output}"
        )


# The descriptions and defaults repeat those of `AbTestConfig`, whose import would load torch; a test compares them.
def abtest_simulate_command(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Output folder for the log, the truth and the report."),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML with any of the keys below, and the tables market (users among them), production, clicks and "
            "scorer; flags take precedence.",
        ),
    ] = None,
    users: Annotated[int | None, typer.Option(help="Number of users.", show_default="60000")] = None,
    share: Annotated[
        float | None, typer.Option(help="Share of the users in each of the two arms.", show_default="0.15")
    ] = None,
    before: Annotated[int | None, typer.Option(help="Days of the first A/A test.", show_default="7")] = None,
    during: Annotated[int | None, typer.Option(help="Days of the A/B test.", show_default="10")] = None,
    after: Annotated[int | None, typer.Option(help="Days of the second A/A test.", show_default="7")] = None,
    retrain: Annotated[
        int | None, typer.Option(help="Days between trainings of the arms' rankers.", show_default="5")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Days of an arm's log on which its ranker is trained.", show_default="7")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="score|match", help="U-rank's order: by score, or by the matching.", show_default="score"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Added to all other seeds.", show_default="0")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate the live test of the paper's Section 6.2: A/A, then U-rank against DeepFM, then A/A again.

    Users of an app store return day after day. Both arms are served by one DeepFM at first; then each has its own
    ranker, trained every few days on the log of that arm; then one ranker serves both again. Writes
    `exposures.parquet`, which `urank abtest analyse` reads; `truth.parquet`, the true lift of each day; `abtest.toml`;
    and the analysis, `report.html` and `analysis.json`. The same seed gives the same log.

    Example: `urank abtest simulate -o test --users 20000`
    """
    given = {
        "market": None if users is None else {"users": users},
        "share": share,
        "before": before,
        "during": during,
        "after": after,
        "retrain": retrain,
        "window": window,
        "method": method,
        "seed": seed,
    }
    flags = {key: value for key, value in given.items() if value is not None}
    values = deep_merge(read_toml(config) if config is not None else {}, flags)
    import torch  # slow to import

    from urank.lab.live_test import AbTestConfig, judge_abtest, print_judged, simulate_abtest, write_judged

    checked = validate(AbTestConfig, values, str(config) if config is not None else "the test")
    torch.set_num_threads(1)  # sums in another order could have other bits
    found: list[JudgedTest] = []

    def finish(run: AbTestRun) -> None:
        judged = judge_abtest(run, name=str(output / "exposures.parquet"), report=report)
        report("write the report", 0, None)
        text = json_text(judged.to_dict()) + "\n"
        (run.folder / "analysis.json").write_text(text, encoding="utf-8")
        write_judged(judged, run.folder / "report.html")
        found.append(judged)

    with bars(quiet=quiet or json) as report:
        simulate_abtest(checked, output, overwrite=overwrite, finish=finish, report=report)
    [judged] = found
    if json:
        print_json({"folder": str(output), **judged.to_dict(), "config": checked.model_dump(mode="json")})
    elif not quiet:
        print_judged(judged, Console())
        _print(f"\nThe report is {output / 'report.html'}")


def reproduce_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="table1|table2|table3|fig-ctr-by-position|fig-result-list|differences|all",
            help="Which table or figure. **table1**: every ranker and propensity estimate; **table2**: architectures "
            "of the click model (RQ2); **table3**: an app store, without bids and with; **fig-ctr-by-position**: "
            "Figure 4; **fig-result-list**: Figure 3; **differences**: the effect of each change to U-rank as printed.",
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
            metavar="PATH",
            help="A LETOR file or folder (Yahoo set 1, MSLR-WEB10K, Istella-S, MQ2008 …). Documents are generated "
            "if left out. No effect on table3, whose store is always simulated.",
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
        int | None, typer.Option(min=1, help="Number of processes.", show_default="one for each core")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML merged into the experiment's: any setting of the simulation and of every method.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce the paper: its tables and figures on simulated clicks, with every baseline, and the claims of Sections
    5.4 and 6.1 checked one by one.

    DIR then contains `report.html`, `results.parquet` (each method, seed and test query), `table1.parquet` and
    `settings.toml`; after table3 also `store-results.parquet` (each method, seed and test visit) and `table3.parquet`.
    The same command resumes an interrupted run; another experiment in the same DIR reuses the trained models.

    Example: `urank reproduce table1 --seeds 1 -o reproduction`
    """
    from urank.lab.paper_report import print_reproduction, write_reproduction
    from urank.lab.reproduction import experiment_names, reproduce

    names = experiment_names(what)
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
        print_reproduction(found, Console())
        _print(f"\nThe report is {output / 'report.html'}")
