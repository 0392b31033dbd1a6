"""`urank simulate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import Json, Overwrite, Quiet, config_option, numbers, print_json
from urank.config import build, read_toml
from urank.errors import ConfigError
from urank.progress import bars
from urank.simulate.config import SimulationConfig
from urank.simulate.letor import Simulation, simulate, write_simulation

__all__ = ["simulate_command"]


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
    checked = build(SimulationConfig, values_given, str(config) if config is not None else "the simulation")
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
