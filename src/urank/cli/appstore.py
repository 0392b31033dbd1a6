"""`urank appstore`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from urank.cli.options import Json, Overwrite, Quiet, config_option, numbers, print_json
from urank.config import build, read_toml
from urank.progress import bars
from urank.simulate.market import MarketConfig

__all__ = ["appstore_command"]

_option = partial(config_option, MarketConfig)


def appstore_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write the logs and the truth.")
    ],
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML with any of the keys below; flags come before it.")
    ] = None,
    users: Annotated[int | None, _option("users", panel="Users")] = None,
    visits: Annotated[float | None, _option("visits", panel="Users")] = None,
    tastes: Annotated[int | None, _option("tastes", panel="Users")] = None,
    attention: Annotated[float | None, _option("attention", panel="Users")] = None,
    steepness: Annotated[float | None, _option("steepness", panel="Users")] = None,
    thumbnails: Annotated[float | None, _option("thumbnails", panel="Users")] = None,
    apps: Annotated[int | None, _option("apps", panel="Apps")] = None,
    appeal: Annotated[float | None, _option("appeal", panel="Apps")] = None,
    drift: Annotated[float | None, _option("drift", panel="Apps")] = None,
    bids: Annotated[str | None, _option("bids", panel="Apps", metavar="LOW:HIGH")] = None,
    candidates: Annotated[int | None, _option("candidates", panel="Traffic")] = None,
    positions: Annotated[int | None, _option("positions", panel="Traffic")] = None,
    days: Annotated[int | None, _option("days", panel="Traffic")] = None,
    warmup_days: Annotated[int | None, _option("warmup_days", panel="Traffic")] = None,
    random_days: Annotated[int | None, _option("random_days", panel="Traffic")] = None,
    random_visits: Annotated[int | None, _option("random_visits", panel="Traffic")] = None,
    seed: Annotated[int | None, _option("seed")] = None,
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
    checked = build(MarketConfig, values, str(config) if config is not None else "the app store")
    import torch  # slow to load, as all that needs it

    from urank.simulate.production import write_appstore

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
