"""`urank reproduce`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import Json, Overwrite, Quiet, config_option, json_text, numbers, print_json
from urank.config import deep_merge, read_toml, validate
from urank.errors import ConfigError
from urank.lab.letor_simulation import Simulation, SimulationConfig, simulate, write_simulation
from urank.lab.market import MarketConfig
from urank.progress import bars

if TYPE_CHECKING:
    from urank.lab.live_test import AbTestRun, JudgedTest

__all__ = ["appstore_command", "reproduce_command", "simulate_command", "simulate_command_abtest_simulate"]

_option = partial(config_option, SimulationConfig)


def simulate_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write the log and its truth.")
    ],
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML with any of the keys below; flags come before it.")
    ] = None,
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

    Weak rankers order the documents of a LETOR file, or of generated data; users look at a document at position k
    with probability 1/k^max(wᵀx+1, 0), where x are the document's features, and click on it if it is relevant. Writes
    `log.parquet`, `simulation.toml` and `truth/`, from which the true utility of any order can be computed. The same
    seed gives the same bytes.

    Example: `urank simulate -o sim --data mslr/train.txt --loggers 2 --randomise swap:0.05`
    """
    given = {
        "data": data,
        "queries": queries,
        "features": features,
        "noise": noise,
        "candidates": candidates,
        "values": numbers("--values", values, 2),
        "positions": positions,
        "sessions": sessions,
        "loggers": loggers,
        "traffic": numbers("--traffic", traffic),
        "label_share": label_share,
        **_randomise(randomise),
        "user": user,
        "eta": eta,
        "epsilon": epsilon,
        "gamma": gamma,
        "label_max": label_max,
        "denominator": denominator,
        "scaling": scaling,
        "truth": truth,
        "valid": valid,
        "test": test,
        "seed": seed,
    }
    from_file = read_toml(config) if config is not None else {}
    if data is not None or "data" in from_file:
        ignored = [key for key in ("queries", "features", "noise") if given[key] is not None]
        if ignored:
            raise ConfigError(f"--{ignored[0]} belongs to generated documents; with --data they come from the file")
    values_given = from_file | {key: value for key, value in given.items() if value is not None}
    checked = validate(SimulationConfig, values_given, str(config) if config is not None else "the simulation")
    with bars(quiet=quiet or json) as report:
        simulation = simulate(checked, report)
        write_simulation(simulation, output, overwrite=overwrite, progress=report)
    summary = _summary(simulation)
    if json:
        print_json({"folder": str(output), **summary, "config": checked.model_dump(mode="json")})
    elif not quiet:
        Console().print(
            f"{summary['impressions']:,} impressions in {summary['lists']:,} lists of {summary['queries']:,} queries, "
            f"{summary['clicks_per_list']:.3f} clicks per list, written to {output}",
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )


def _summary(simulation: Simulation) -> dict[str, Any]:
    log = simulation.log
    lists = log["session_id"].n_unique()
    clicks = int(log["click"].to_numpy().sum(dtype="int64"))
    return {
        "impressions": log.height,
        "lists": lists,
        "queries": log["query_id"].n_unique(),
        "clicks": clicks,
        "clicks_per_list": clicks / lists,
    }


def _randomise(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    kind, _, share = text.partition(":")
    try:
        return {"randomise": kind, "randomise_share": float(share)}
    except ValueError:
        raise ConfigError(f"--randomise takes KIND:SHARE, as swap:0.1; got '{text}'") from None


_option_appstore = partial(config_option, MarketConfig)


def appstore_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write the logs and the truth.")
    ],
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML with any of the keys below; flags come before it.")
    ] = None,
    users: Annotated[int | None, _option_appstore("users", panel="Users")] = None,
    visits: Annotated[float | None, _option_appstore("visits", panel="Users")] = None,
    tastes: Annotated[int | None, _option_appstore("tastes", panel="Users")] = None,
    attention: Annotated[float | None, _option_appstore("attention", panel="Users")] = None,
    steepness: Annotated[float | None, _option_appstore("steepness", panel="Users")] = None,
    thumbnails: Annotated[float | None, _option_appstore("thumbnails", panel="Users")] = None,
    apps: Annotated[int | None, _option_appstore("apps", panel="Apps")] = None,
    appeal: Annotated[float | None, _option_appstore("appeal", panel="Apps")] = None,
    drift: Annotated[float | None, _option_appstore("drift", panel="Apps")] = None,
    bids: Annotated[str | None, _option_appstore("bids", panel="Apps", metavar="LOW:HIGH")] = None,
    candidates: Annotated[int | None, _option_appstore("candidates", panel="Traffic")] = None,
    positions: Annotated[int | None, _option_appstore("positions", panel="Traffic")] = None,
    days: Annotated[int | None, _option_appstore("days", panel="Traffic")] = None,
    warmup_days: Annotated[int | None, _option_appstore("warmup_days", panel="Traffic")] = None,
    random_days: Annotated[int | None, _option_appstore("random_days", panel="Traffic")] = None,
    random_visits: Annotated[int | None, _option_appstore("random_visits", panel="Traffic")] = None,
    seed: Annotated[int | None, _option_appstore("seed")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate an app store whose truth is known, as in Section 6 of the paper.

    Users come back day after day; a DeepFM, learned from the days before, ranks what is retrieved for each visit. They
    look at an app at position k with a probability that falls with k, faster for some categories, devices and
    thumbnails than for others, and download it if it appeals to them. Writes `log.parquet`, the DeepFM's log;
    `random.parquet`, earlier visits that saw a random order; `appstore.toml`; and `truth/`, the true click table of
    what was shown on the last day. The same seed gives the same bytes.

    Both logs have a row for each app shown: `query_id` (the visit), `item_id`, `position`, `click` (a download),
    `value` (the bid for it), `user_id`, `timestamp`, `policy`, and the features `device`, `region`, `category`, `app`,
    `downloads` (yesterday's), `thumbnail`, `taste_1`… of the user and `genre_1`… of the app.

    What comes next:

    - `urank inspect store/log.parquet` says what can be learned from the log;

    - `urank propensity store/random.parquet --method randomised --by category` shows how attention falls;

    - `urank run store/log.parquet -o job` learns an order that earns the most by the bids, or with `--drop value` the
      most downloads;

    - `urank evaluate job/model last-day.parquet --split all --truth store` says what an order would earn on the last
      day, beside the truth. Cut that day out of the log by its timestamp, and let the model learn from the rest.

    Example: `urank appstore -o store --users 5000`
    """
    given = {
        "users": users,
        "visits": visits,
        "tastes": tastes,
        "attention": attention,
        "steepness": steepness,
        "thumbnails": thumbnails,
        "apps": apps,
        "appeal": appeal,
        "drift": drift,
        "bids": numbers("--bids", bids, 2),
        "candidates": candidates,
        "positions": positions,
        "days": days,
        "warmup_days": warmup_days,
        "random_days": random_days,
        "random_visits": random_visits,
        "seed": seed,
    }
    from_file = read_toml(config) if config is not None else {}
    values = from_file | {key: value for key, value in given.items() if value is not None}
    checked = validate(MarketConfig, values, str(config) if config is not None else "the app store")
    import torch  # slow to load, as all that needs it

    from urank.lab.appstore import write_appstore

    torch.set_num_threads(1)  # sums in another order could end with other bits
    with bars(quiet=quiet or json) as report:
        counts = write_appstore(checked, output, overwrite=overwrite, report=report)
    downloads = counts["downloads"] / max(counts["visits"], 1)
    if json:
        whole = {key: int(count) for key, count in counts.items()}
        told = {"folder": str(output), **whole, "downloads_per_visit": downloads}
        print_json({**told, "config": checked.model_dump(mode="json")})
    elif not quiet:
        Console().print(
            f"{counts['impressions']:,.0f} impressions in {counts['visits']:,.0f} visits, "
            f"{downloads:.3f} downloads per visit, written to {output}",
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )


# The words are those of `AbTestConfig`, which would load torch (a test holds them together).
def simulate_command_abtest_simulate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write the log, the truth and the report.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML with any of the keys below, and the tables market (users among them), production, clicks and "
            "scorer; flags come before it.",
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
        int | None, typer.Option(help="Days after which the arms' rankers are learned anew.", show_default="5")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Days of an arm's log that its ranker learns from.", show_default="7")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="score|match", help="How U-rank ranks: by score, or by the matching.", show_default="score"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Added to all other seeds.", show_default="0")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate the live test of the paper's Section 6.2: A/A, then U-rank against DeepFM, then A/A again.

    Users of an app store come back day after day. Both arms are served by a DeepFM at first; then each has a ranker of
    its own, learned every few days from the log of that arm; then one serves both again. Writes `exposures.parquet`,
    which `urank abtest analyse` reads; `truth.parquet`, the true lift of each day; `abtest.toml`; and what came out,
    `report.html` and `analysis.json`. The same seed gives the same log.

    Example: `urank abtest simulate -o test --users 20000`
    """
    given: dict[str, Any] = {
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
    flags |= {} if users is None else {"market": {"users": users}}
    values = deep_merge(read_toml(config) if config is not None else {}, flags)
    import torch  # slow to load, as all that needs it

    from urank.lab.live_test import AbTestConfig, judge_abtest, simulate_abtest
    from urank.lab.live_test_report import print_judged, write_judged

    checked = validate(AbTestConfig, values, str(config) if config is not None else "the test")
    torch.set_num_threads(1)  # sums in another order could end with other bits
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
        console = Console()
        print_judged(judged, console)
        page = output / "report.html"
        console.print(f"\nThe report is {page}", highlight=False, markup=False, emoji=False, soft_wrap=True)


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
    from urank.lab.paper_report import print_reproduction, write_reproduction
    from urank.lab.reproduction import experiments_of, reproduce

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
