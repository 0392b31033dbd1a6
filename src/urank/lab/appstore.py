"""Traffic of a simulated app store: visits, rankers that serve them, and the logs they produce.

The production ranker of Section 6 is DeepFM, trained with the position as a field and evaluated at position 1. U-rank
learns a click model and a scorer from the same kind of log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pyarrow.parquet as pq
from numpy.typing import NDArray

from urank.clicks.click_settings import ClickConfig
from urank.clicks.fitting import fit_clicks
from urank.lab.letor_simulation import simulation_folder
from urank.lab.market import Market, MarketConfig, build_market
from urank.lab.user_models import table_probabilities
from urank.log.dataset import Dataset
from urank.log.prepare import prepare
from urank.log.ragged import pad, positions_by_score, where_items
from urank.log.reader import read
from urank.progress import Report, silent
from urank.ranking.matching import Method
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import RankerConfig
from urank.ranking.urank_network import fit_urank

FIRST_DAY = datetime(2020, 5, 6)
"""The date of day 1, on which the paper's live test began."""

_AT_ONCE = 4096
_KINDS = ("live", "random")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TrafficKind = Literal["live", "random"]


@dataclass(frozen=True, eq=False)
class Requests:
    """The visits of a day and the apps retrieved for each."""

    market: Market
    day: int  # 1 is the first of the production ranker's log; days before it are 0, −1, …
    kind: TrafficKind  # prefix of the visit ids, so that one day can have several kinds of traffic
    user: Ints  # [visits]
    app: Ints  # [visits, n], distinct within a visit, in random order

    @property
    def users(self) -> Ints:
        """`[rows]` the user of each candidate."""
        return np.repeat(self.user, self.app.shape[1])

    @property
    def offsets(self) -> Ints:
        """`[visits + 1]` where the candidates of each visit start."""
        visits, n = self.app.shape
        return np.asarray(np.arange(visits + 1) * n)

    def only(self, chosen: NDArray[np.bool_]) -> Requests:
        """Select visits by a mask `[visits]`."""
        return replace(self, user=self.user[chosen], app=self.app[chosen])

    def frame(self) -> pl.DataFrame:
        """Return a row for each candidate with a ranker's features."""
        market, rows = self.market, self.app.ravel()
        visit = np.repeat(np.arange(len(self.user)), self.app.shape[1])
        ids = pl.DataFrame(
            {
                "query_id": f"{self.kind}{self.day:+d}-" + pl.Series(visit).cast(pl.String).str.zfill(7),
                "item_id": pl.Series(market.app_names)[rows],
                "user_id": pl.Series(market.user_names)[self.users],
                "value": market.bid[rows].astype(np.float32),
            }
        )
        return ids.hstack(market.features(self.users, rows, self.day))


Ranker = Callable[[Requests, pl.DataFrame, np.random.Generator], Ints]
"""Returns the position `[rows]` of every candidate, given its features."""


@dataclass(frozen=True, eq=False)
class ServedVisits:
    """A log, a row for each impression by visit and position, and the true P(download) `[impressions, K]`."""

    log: pl.DataFrame
    table: Floats


def draw_requests(
    market: Market,
    day: int,
    *,
    kind: TrafficKind = "live",
    visits: int | None = None,
    among: NDArray[np.bool_] | None = None,
) -> Requests:
    """Draw the visits of a day and the retrieved apps; popular and matching apps are retrieved more often.

    Args:
        market, day: which.
        kind: of the traffic; each kind has its own random numbers.
        visits: number of visits; drawn from the users' activity if left out.
        among: `[users]` mask of users; all if left out. Visits of other users are drawn and then dropped, so that the
            visits of a user do not depend on the mask.
    """
    config, rng = market.config, _rng(market, day, kind, "visits")
    if visits is None:
        user = rng.permutation(np.repeat(np.arange(config.users), rng.poisson(market.activity)))
    else:
        user = rng.choice(config.users, size=visits, p=market.activity / market.activity.sum())
    popular = 0.5 * market.popularity[market.day(day)]
    apps = np.empty((len(user), config.candidates), dtype=np.int64)
    for start in range(0, len(user), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        wanted = popular + 0.5 * market.taste[user[some]] @ market.genre.T
        wanted += rng.gumbel(size=wanted.shape)  # Gumbel top-k: a sample without replacement
        best = np.argpartition(-wanted, config.candidates - 1, axis=1)[:, : config.candidates]
        apps[some] = rng.permuted(best, axis=1)
    requests = Requests(market, day, kind, user, apps)
    return requests if among is None else requests.only(among[user])


def serve(requests: Requests, ranker: Ranker, *, policy: str) -> ServedVisits:
    """Show the first K apps of a ranker's order, and draw the downloads; `policy` names the ranker in the log."""
    market, K = requests.market, requests.market.config.positions
    rng = _rng(market, requests.day, requests.kind, "clicks")
    frame = requests.frame()
    position = ranker(requests, frame, rng)
    shown = np.flatnonzero(position <= K)
    shown = shown[np.lexsort((position[shown], shown // requests.app.shape[1]))]
    places = position[shown]
    table = market.table(requests.users[shown], requests.app.ravel()[shown], requests.day)
    downloaded = rng.random(len(shown)) < table_probabilities(table, places)
    second = np.repeat(rng.integers(24 * 60 * 60, size=len(requests.user)), K)
    log = frame[shown].with_columns(
        position=pl.Series(places, dtype=pl.Int32),
        click=pl.Series(downloaded.astype(np.int8)),
        timestamp=pl.lit(FIRST_DAY + timedelta(days=requests.day - 1)) + pl.duration(seconds=pl.lit(pl.Series(second))),
        policy=pl.lit(policy),
    )
    return ServedVisits(log, table)


def expected_downloads(requests: Requests, ranker: Ranker) -> float:
    """Compute the true expected downloads per visit under a ranker's order."""
    position = ranker(requests, requests.frame(), _rng(requests.market, requests.day, requests.kind, "clicks"))
    table = requests.market.table(requests.users, requests.app.ravel(), requests.day)
    return float(table_probabilities(table, position).sum()) / max(len(requests.user), 1)


def traffic(market: Market, ranker: Ranker, days: range, *, policy: str) -> Iterator[ServedVisits]:
    """Serve several days with one ranker."""
    for day in days:
        yield serve(draw_requests(market, day), ranker, policy=policy)


def by_popularity(noise: float = 1.0) -> Ranker:
    """Return a ranker by yesterday's downloads with noise: the policy before any model is trained."""

    def rank(requests: Requests, frame: pl.DataFrame, rng: np.random.Generator) -> Ints:
        score = np.log(frame["downloads"].to_numpy()) + noise * rng.standard_normal(frame.height)
        return _ranked(score, requests.offsets)

    return rank


def by_chance(requests: Requests, frame: pl.DataFrame, rng: np.random.Generator) -> Ints:
    """Rank in uniformly random order."""
    return _ranked(rng.random(frame.height), requests.offsets)


def _ranked(score: Floats, offsets: Ints) -> Ints:
    where = where_items(offsets)
    return positions_by_score(pad(score, offsets), where=where)[where]


def _rng(market: Market, day: int, kind: TrafficKind, stream: str) -> np.random.Generator:
    return np.random.default_rng([market.config.seed, 100, market.day(day), _KINDS.index(kind), stream == "clicks"])


PRODUCTION = ClickConfig(families=("deepfm",), within_list="off")
"""Settings of the production ranker."""

NOT_LEARNED = ("value", "user_id", "arm", "policy", "timestamp")
"""Columns that are not features: a bid, for example, is the value of a download, not its cause."""


def learn(
    log: pl.DataFrame, clicks: ClickConfig, scorer: RankerConfig | None = None, *, report: Report = silent
) -> RankingModel:
    """Train a click model on a store's log and, if `scorer` is given, U-rank's scorer on its table."""
    with tempfile.TemporaryDirectory(prefix="urank-") as folder:
        known = [name for name in NOT_LEARNED if name in log.columns]
        prepare(read(log, drop=known), Path(folder) / "prepared", test=0.0, report=report)
        dataset = Dataset(Path(folder) / "prepared")
        model = fit_clicks(dataset, clicks, reference=False, report=report).model
        if scorer is None:
            return RankingModel(model, method="ctr1")
        return RankingModel(model, fit_urank(dataset, model, scorer, report=report)[0], "score")


def ranked_by(model: RankingModel, method: Method | None = None) -> Ranker:
    """Return a ranker that orders by a model; every download has the same value."""

    def rank(requests: Requests, frame: pl.DataFrame, rng: np.random.Generator) -> NDArray[np.int64]:
        return model.order(frame, requests.offsets, value=np.ones(frame.height), method=method)

    return rank


def production_ranker(market: Market, clicks: ClickConfig = PRODUCTION, *, report: Report = silent) -> RankingModel:
    """Train DeepFM on the days before the log, when apps were ranked by popularity."""
    days = range(1 - market.config.warmup_days, 1)
    log = pl.concat([served.log for served in traffic(market, by_popularity(), days, policy="popularity")])
    seeded = clicks.model_copy(update={"seed": clicks.seed + market.config.seed})
    return learn(log, seeded, report=report)


def random_traffic(market: Market) -> Iterable[ServedVisits]:
    """Serve the random traffic, on the days before all others."""
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
    """Simulate a store and write its logs and, in `truth/`, the truth for evaluations.

        log.parquet                the production ranker's log, a row group for each day
        random.parquet             the random traffic before it
        appstore.toml              the settings
        truth/candidates.parquet   the impressions of the last day, with the true P(download) at every position

    Args:
        config: settings of the market.
        folder: a new or empty folder, written atomically.
        clicks: settings of the production ranker.
        overwrite: replace an earlier output. A folder with anything else in it is never replaced.
        report: progress callback.

    Returns:
        Impressions, visits and downloads of the production ranker's log.
    """
    market = build_market(config)
    with simulation_folder(folder, "appstore.toml", config, overwrite=overwrite) as target:
        (target / "truth").mkdir()
        write_days(target / "random.parquet", random_traffic(market), config.random_days, "random traffic", report)
        ranker = ranked_by(production_ranker(market, clicks, report=report))
        days = traffic(market, ranker, range(1, config.log_days + 1), policy="production")
        last, counts = write_days(target / "log.parquet", days, config.log_days, "production traffic", report)
        truth = with_table(last).drop("position", "click", "timestamp", "policy")
        truth.write_parquet(target / "truth" / "candidates.parquet")
    return counts


def write_days(
    path: Path, days: Iterable[ServedVisits], total: int, name: str, report: Report = silent
) -> tuple[ServedVisits, dict[str, float]]:
    """Write days as they are served; return the last one and the counts over all."""
    counts = {"impressions": 0.0, "visits": 0.0, "downloads": 0.0}
    with ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for number, served in enumerate(days, start=1):
            table = served.log.to_arrow()
            writer = writer or stack.enter_context(pq.ParquetWriter(path, table.schema, compression="zstd"))
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            counts["impressions"] += served.log.height
            counts["visits"] += served.log["query_id"].n_unique()
            counts["downloads"] += float(served.log["click"].sum())
            report(name, number, total)
    return served, counts


def with_table(served: ServedVisits) -> pl.DataFrame:
    """Return the log with the true table as a list column."""
    return served.log.with_columns(pl.Series("table", served.table.astype(np.float32)).arr.to_list())
