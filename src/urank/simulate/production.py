"""What an app store does with its own log: learn a ranker from it, serve it, and write the next log.

The production ranker of Section 6 is DeepFM, trained with the position as a field and asked for position 1. U-rank
learns a click model and a scorer from the same kind of log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import tomli_w
from numpy.typing import NDArray

from urank.clicks.config import ClickConfig
from urank.clicks.fit import fit_clicks
from urank.errors import ConfigError
from urank.files import new_folder
from urank.log.dataset import Dataset
from urank.log.prepare import prepare
from urank.log.read import read
from urank.progress import Report, silent
from urank.rankers.order import Method
from urank.rankers.ranking import RankingModel
from urank.rankers.urank import RankerConfig, fit_urank
from urank.simulate.appstore import Ranker, Requests, Served, by_chance, by_popularity, draw_requests, serve, traffic
from urank.simulate.market import Market, MarketConfig, build_market

__all__ = [
    "NOT_LEARNED",
    "PRODUCTION",
    "learn",
    "production_ranker",
    "random_traffic",
    "ranked_by",
    "with_table",
    "write_appstore",
    "write_days",
]

PRODUCTION = ClickConfig(families=("deepfm",))
"""The production ranker."""

NOT_LEARNED = ("value", "user_id", "arm", "policy", "timestamp")
"""Columns of a store's log that its rankers do not learn from: a bid decides what a download is worth, not whether."""


def learn(
    log: pl.DataFrame, clicks: ClickConfig, scorer: RankerConfig | None = None, *, report: Report = silent
) -> RankingModel:
    """Train a click model on a store's log, and U-rank's scorer on its table if one is asked for."""
    with tempfile.TemporaryDirectory(prefix="urank-") as folder:
        known = [name for name in NOT_LEARNED if name in log.columns]
        prepare(read(log, drop=known), Path(folder) / "prepared", test=0.0, report=report)
        dataset = Dataset(Path(folder) / "prepared")
        model = fit_clicks(dataset, clicks, reference=False, report=report).model
        if scorer is None:
            return RankingModel(model, method="ctr1")
        return RankingModel(model, fit_urank(dataset, model, scorer, report=report)[0], "score")


def ranked_by(model: RankingModel, method: Method | None = None) -> Ranker:
    """The order of a model, for downloads: every one counts the same."""

    def rank(requests: Requests, frame: pl.DataFrame, rng: np.random.Generator) -> NDArray[np.int64]:
        return model.order(frame, requests.offsets, value=np.ones(frame.height), method=method)

    return rank


def production_ranker(market: Market, clicks: ClickConfig = PRODUCTION, *, report: Report = silent) -> RankingModel:
    """DeepFM, learned from the days before the log, when apps were ranked by popularity."""
    days = range(1 - market.config.warmup_days, 1)
    log = pl.concat([served.log for served in traffic(market, by_popularity(), days, policy="popularity")])
    seeded = clicks.model_copy(update={"seed": clicks.seed + market.config.seed})
    return learn(log, seeded, report=report)


def random_traffic(market: Market) -> Iterable[Served]:
    """The slice of visits, on the days before all others, that saw apps in a random order."""
    last = -market.config.warmup_days
    for day in range(last - market.config.random_days + 1, last + 1):
        requests = draw_requests(market, day, kind="random", visits=market.config.random_visits)
        yield serve(requests, by_chance, policy="random")


def write_appstore(
    config: MarketConfig,
    folder: str | Path,
    *,
    clicks: ClickConfig = PRODUCTION,
    overwrite: bool = False,
    report: Report = silent,
) -> dict[str, float]:
    """Simulate a store and write its logs, and beside them the truth that only an evaluation may see.

        log.parquet                the production ranker's log, a row group for each day
        random.parquet             the random traffic before it
        appstore.toml              the config; it makes the same bytes again
        truth/candidates.parquet   what was shown on the last day, with the true P(download) at every position

    Args:
        config: the market.
        folder: a new or empty folder; it appears when all of it is complete.
        clicks: the production ranker, and how it is trained.
        overwrite: replace an earlier one. A folder that holds anything else is never replaced.
        report: told how far it is.

    Returns:
        impressions, visits and downloads of the production ranker's log.
    """
    market = build_market(config)
    try:
        with new_folder(folder, marker="appstore.toml", overwrite=overwrite) as target:
            settings = config.model_dump(mode="json", exclude_none=True)
            (target / "appstore.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
            (target / "truth").mkdir()
            write_days(target / "random.parquet", random_traffic(market), config.random_days, "random traffic", report)
            ranker = ranked_by(production_ranker(market, clicks, report=report))
            days = traffic(market, ranker, range(1, config.days + 1), policy="production")
            last, counts = write_days(target / "log.parquet", days, config.days, "production traffic", report)
            truth = with_table(last).drop("position", "click", "timestamp", "policy")
            truth.write_parquet(target / "truth" / "candidates.parquet")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return counts


def write_days(
    path: Path, days: Iterable[Served], total: int, name: str, report: Report = silent
) -> tuple[Served, dict[str, float]]:
    """Write one day after another, and give the last of them and what all had."""
    writer: pq.ParquetWriter | None = None
    counts = {"impressions": 0.0, "visits": 0.0, "downloads": 0.0}
    served: Served | None = None
    try:
        for number, served in enumerate(days, start=1):
            table = served.log.to_arrow()
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            counts["impressions"] += served.log.height
            counts["visits"] += served.log["query_id"].n_unique()
            counts["downloads"] += float(served.log["click"].sum())
            report(name, number, total)
    finally:
        if writer is not None:
            writer.close()
    assert served is not None  # noqa: S101 - a market has days
    return served, counts


def with_table(served: Served) -> pl.DataFrame:
    """What was shown, a row for each, with its true table."""
    return served.log.with_columns(pl.Series("table", served.table.astype(np.float32)).arr.to_list())
