"""The log of an app store, day by day: who comes, what is retrieved, how it is ranked, what is downloaded (Section 6).

    random traffic, 120 days ──► how attention falls with position
    warm-up, ranked by popularity ──► the production ranker, a DeepFM ──► its log of eight days

All of a day is array arithmetic over its visits. Every day draws from generators of its own, one for who comes and one
for what happens then, so that two rankers can be shown the same visitors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.log.lists import pad, positions_by_score, where_items
from urank.simulate.market import Market
from urank.simulate.oracle import table_probabilities

__all__ = [
    "FIRST_DAY",
    "Ranker",
    "Requests",
    "Served",
    "by_chance",
    "by_popularity",
    "draw_requests",
    "expected_downloads",
    "serve",
    "traffic",
]

FIRST_DAY = datetime(2020, 5, 6)
"""The date of day 1: that on which the paper's own test began."""

_AT_ONCE = 4096
_KINDS = ("live", "random")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = Literal["live", "random"]


@dataclass(frozen=True, eq=False)
class Requests:
    """The visits of a day, and what was retrieved for each.

    Attributes:
        market: the users and the apps.
        day: 1 is the first of the production ranker's log; days before it are 0, −1, …
        kind: what the ids of the visits begin with, so that the traffic of one day can come in parts.
        user: `[visits]`.
        app: `[visits, n]`, all different in a visit, in an order that tells nothing.
    """

    market: Market
    day: int
    kind: Kind
    user: Ints
    app: Ints

    @property
    def users(self) -> Ints:
        """`[rows]`: the user that each candidate is for."""
        return np.repeat(self.user, self.app.shape[1])

    @property
    def offsets(self) -> Ints:
        """`[visits + 1]`: where the candidates of each visit lie."""
        visits, n = self.app.shape
        return np.asarray(np.arange(visits + 1) * n)

    def only(self, chosen: NDArray[np.bool_]) -> Requests:
        """Some of the visits `[visits]`."""
        return replace(self, user=self.user[chosen], app=self.app[chosen])

    def frame(self) -> pl.DataFrame:
        """The candidates as a ranker sees them, a row for each."""
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
"""Gives the position `[rows]` of every candidate, from what a log would tell of it."""


@dataclass(frozen=True, eq=False)
class Served:
    """What was shown on a day, and the truth about it.

    Attributes:
        log: a row for each impression, visit by visit from the top.
        table: `[impressions, K]`, the true P(download) of each at every position.
    """

    log: pl.DataFrame
    table: Floats


def draw_requests(
    market: Market, day: int, *, kind: Kind = "live", visits: int | None = None, among: NDArray[np.bool_] | None = None
) -> Requests:
    """Who comes on a day, and what is retrieved: all sorts of apps, popular ones and those that fit more often.

    Args:
        market: the users and the apps.
        day: which.
        kind: of the traffic; each kind has random numbers of its own.
        visits: how many; as many as the users' activity has it when left out.
        among: `[users]`, those who can come; all when left out. The others' visits are drawn too, and left out then, so
            that neither who comes nor what is retrieved for them depends on who else is looked at.
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
        wanted += rng.gumbel(size=wanted.shape)  # the highest of these are a sample without replacement
        best = np.argpartition(-wanted, config.candidates - 1, axis=1)[:, : config.candidates]
        apps[some] = rng.permuted(best, axis=1)
    requests = Requests(market, day, kind, user, apps)
    return requests if among is None else requests.only(among[user])


def serve(requests: Requests, ranker: Ranker, *, policy: str) -> Served:
    """Show every visitor the first K apps of a ranker's order, and see what is downloaded.

    Args:
        requests: who came, and what was retrieved.
        ranker: orders the candidates.
        policy: what the log calls it.
    """
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
    return Served(log, table)


def expected_downloads(requests: Requests, ranker: Ranker) -> float:
    """The true expected downloads a visit if every visitor saw the order of a ranker."""
    position = ranker(requests, requests.frame(), _rng(requests.market, requests.day, requests.kind, "clicks"))
    table = requests.market.table(requests.users, requests.app.ravel(), requests.day)
    return float(table_probabilities(table, position).sum()) / max(len(requests.user), 1)


def traffic(market: Market, ranker: Ranker, days: range, *, policy: str) -> Iterator[Served]:
    """The log of some days in which everybody sees the order of one ranker."""
    for day in days:
        yield serve(draw_requests(market, day), ranker, policy=policy)


def by_popularity(noise: float = 1.0) -> Ranker:
    """By yesterday's downloads, blurred: what a store does before it has learned anything."""

    def rank(requests: Requests, frame: pl.DataFrame, rng: np.random.Generator) -> Ints:
        score = np.log(frame["downloads"].to_numpy()) + noise * rng.standard_normal(frame.height)
        return _ranked(score, requests.offsets)

    return rank


def by_chance(requests: Requests, frame: pl.DataFrame, rng: np.random.Generator) -> Ints:
    """In any order, each as likely as any other."""
    return _ranked(rng.random(frame.height), requests.offsets)


def _ranked(score: Floats, offsets: Ints) -> Ints:
    where = where_items(offsets)
    return positions_by_score(pad(score, offsets), where=where)[where]


def _rng(market: Market, day: int, kind: Kind, stream: str) -> np.random.Generator:
    return np.random.default_rng([market.config.seed, 100, market.day(day), _KINDS.index(kind), stream == "clicks"])
