"""The traffic of a store: who comes, what is shown, what is downloaded; tolerances are four standard errors."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_array_equal
from polars.testing import assert_frame_equal
from scipy.stats import chi2

from urank.lab.appstore import (
    FIRST_DAY,
    Ranker,
    Requests,
    ServedVisits,
    by_chance,
    by_popularity,
    draw_requests,
    expected_downloads,
    serve,
    traffic,
)
from urank.lab.market import Market, MarketConfig, build_market
from urank.lab.oracle import table_probabilities

K = 6


def make(**changes: Any) -> Market:
    settings = {"users": 1000, "apps": 60, "visits": 0.4, "candidates": 12, "positions": K, "random_days": 5, **changes}
    return build_market(MarketConfig(**settings))


@pytest.fixture(scope="module")
def market() -> Market:
    return make()


@pytest.fixture(scope="module")
def requests(market: Market) -> Requests:
    return draw_requests(market, 1)


@pytest.fixture(scope="module")
def week() -> tuple[pl.DataFrame, np.ndarray]:
    """The log of some days of a store where much is downloaded, and its true table."""
    days = list(traffic(make(users=5000, visits=1.0, appeal=-1.5), by_popularity(), range(1, 6), policy="popularity"))
    return pl.concat([each.log for each in days]), np.concatenate([each.table for each in days])


# Who comes, and what is retrieved


def test_the_seed_and_the_day_decide_who_comes(market: Market, requests: Requests) -> None:
    again = draw_requests(make(), 1)
    assert_array_equal(again.user, requests.user)
    assert_array_equal(again.app, requests.app)
    for other in (draw_requests(market, 2), draw_requests(make(seed=1), 1), draw_requests(market, 1, kind="random")):
        assert not np.array_equal(other.user, requests.user)


def test_the_apps_of_a_visit_are_distinct(market: Market, requests: Requests) -> None:
    assert requests.app.shape == (len(requests.user), 12)
    assert (np.diff(np.sort(requests.app, axis=1), axis=1) > 0).all()
    assert (requests.app >= 0).all()
    assert (requests.app < 60).all()


def test_users_come_as_often_as_they_are_active(market: Market) -> None:
    days = 40
    users = np.concatenate([draw_requests(market, day).user for day in range(-5, days - 5)])
    visits, expected = np.bincount(users, minlength=1000), days * market.activity
    assert abs(visits.sum() - expected.sum()) < 4 * np.sqrt(expected.sum())
    # Of a Poisson number the squared error relative to its mean λ has mean 1 and variance 2 + 1/λ.
    spread = ((visits - expected) ** 2 / expected).sum()
    assert abs(spread - 1000) < 4 * np.sqrt((2 + 1 / expected).sum())


def test_a_number_of_visits_is_shared_out_by_activity(market: Market) -> None:
    users = draw_requests(market, 1, kind="random", visits=50_000).user
    assert len(users) == 50_000
    expected = 50_000 * market.activity / market.activity.sum()
    spread = ((np.bincount(users, minlength=1000) - expected) ** 2 / expected).sum()
    assert abs(spread - 1000) < 4 * np.sqrt((2 + 1 / expected).sum())


def test_the_visits_of_some_users_are_the_same_whoever_else_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    market = make()
    monkeypatch.setattr("urank.lab.appstore._AT_ONCE", 100)
    everybody = draw_requests(market, 1)
    among = np.random.default_rng(0).random(1000) < 0.3
    some = draw_requests(market, 1, among=among)
    kept = among[everybody.user]
    assert 0 < kept.sum() < len(kept)
    assert_array_equal(some.user, everybody.user[kept])
    assert_array_equal(some.app, everybody.app[kept])
    assert_array_equal(everybody.only(kept).app, some.app)


def test_what_is_popular_and_what_fits_is_retrieved_more_often() -> None:
    market = make(users=20_000, drift=0)
    requests = draw_requests(market, 1)
    shown = np.bincount(requests.app.ravel(), minlength=60)
    assert np.corrcoef(shown, market.popularity[market.day(1)])[0, 1] > 0.5
    fit = np.einsum("rd,rd->r", market.taste[requests.users], market.genre[requests.app.ravel()])
    anyhow = market.taste[requests.user] @ market.genre.mean(axis=0)
    assert fit.mean() > anyhow.mean() + 0.5


def test_the_order_of_the_candidates_tells_nothing(requests: Requests) -> None:
    popularity = requests.market.popularity[requests.market.day(1)][requests.app]
    error = popularity.std() / np.sqrt(len(requests.user))
    assert np.ptp(popularity.mean(axis=0)) < 6 * error


def test_a_frame_says_what_a_ranker_may_know(market: Market, requests: Requests) -> None:
    frame = requests.frame()
    assert frame.columns[:4] == ["query_id", "item_id", "user_id", "value"]
    assert not {"position", "click", "timestamp", "policy"} & set(frame.columns)
    assert frame["query_id"].n_unique() == len(requests.user)
    assert frame["query_id"].rle_id().max() == len(requests.user) - 1  # those of a visit together
    assert frame["item_id"].to_list()[:12] == [f"app-{number:04}" for number in requests.app[0]]
    assert frame["user_id"].to_list()[12] == f"user-{requests.user[1]:06}"
    assert_array_equal(frame["value"], market.bid[requests.app.ravel()].astype(np.float32))
    assert_frame_equal(frame[:, 4:], market.features(requests.users, requests.app.ravel(), 1))


# How it is ranked, and what is shown


def test_every_visit_shows_the_first_positions_from_the_top(requests: Requests) -> None:
    served = serve(requests, by_chance, policy="random")
    log = served.log
    assert log.height == len(requests.user) * K
    assert log["position"].to_list() == list(range(1, K + 1)) * len(requests.user)
    assert (
        log["query_id"].unique(maintain_order=True).to_list() == requests.frame()["query_id"].unique().sort().to_list()
    )
    assert log.group_by("query_id").agg(pl.col("item_id").n_unique() == K)["item_id"].all()
    assert set(log["policy"]) == {"random"}
    assert served.table.shape == (log.height, K)


def test_the_time_of_a_visit_is_on_its_day(market: Market) -> None:
    for day in (1, 3, -4):
        log = serve(draw_requests(market, day), by_chance, policy="random").log
        assert set(log["timestamp"].dt.date()) == {date(2020, 5, 6) + timedelta(days=day - 1)}
        assert log.group_by("query_id").agg(pl.col("timestamp").n_unique())["timestamp"].max() == 1
    assert FIRST_DAY.date() == date(2020, 5, 6)


def test_visits_of_other_days_and_kinds_have_other_names(market: Market) -> None:
    names = [
        set(draw_requests(market, day, kind=kind, visits=50).frame()["query_id"])  # type: ignore[arg-type]
        for day, kind in ((1, "live"), (-1, "live"), (11, "live"), (1, "random"), (-1, "random"))
    ]
    assert len(set().union(*names)) == 5 * 50


def test_serving_twice_shows_the_same_and_other_seeds_do_not(market: Market) -> None:
    first, again = (serve(draw_requests(each, 2), by_popularity(), policy="p") for each in (market, make()))
    assert_frame_equal(first.log, again.log)
    assert_array_equal(first.table, again.table)
    assert not serve(draw_requests(make(seed=1), 2), by_popularity(), policy="p").log.equals(first.log)


def test_a_day_on_which_nobody_comes(market: Market) -> None:
    nobody = draw_requests(market, 1, among=np.zeros(1000, dtype=bool))
    assert (
        serve(nobody, by_chance, policy="random").log.columns
        == serve(draw_requests(market, 1), by_chance, policy="random").log.columns
    )
    assert expected_downloads(nobody, by_chance) == 0


def test_by_popularity_without_noise_sorts_by_downloads(requests: Requests) -> None:
    log = serve(requests, by_popularity(0.0), policy="popularity").log
    fallen = log.with_columns(pl.col("downloads").diff().over("query_id").alias("change"))
    assert fallen["change"].drop_nulls().max() <= 0  # type: ignore[operator]
    noisy = serve(requests, by_popularity(1.0), policy="popularity").log
    first = [each.filter(pl.col("position") == 1)["downloads"].log().mean() for each in (log, noisy)]
    assert first[0] > first[1]  # type: ignore[operator]


def test_by_chance_puts_every_app_everywhere_equally_often() -> None:
    """Where every visit has all n apps, (n − 1)/n · Σ (observed − expected)² / expected is χ² of (n − 1)² degrees."""
    n = 8
    requests = draw_requests(make(apps=n, candidates=n, users=20_000), 1)
    position = by_chance(requests, requests.frame(), np.random.default_rng(5))
    observed = np.zeros((n, n))
    np.add.at(observed, (requests.app.ravel(), position - 1), 1)
    expected = len(requests.user) / n
    statistic = (n - 1) / n * ((observed - expected) ** 2 / expected).sum()
    assert chi2.sf(statistic, (n - 1) ** 2) > 0.001
    assert chi2.cdf(statistic, (n - 1) ** 2) > 0.001


# What is downloaded


@pytest.mark.parametrize("by", [["position"], ["category"], ["position", "category"], ["position", "device"]])
def test_click_rates_match_the_truth(week: tuple[pl.DataFrame, np.ndarray], by: list[str]) -> None:
    log, table = week
    expected = table_probabilities(table, log["position"].to_numpy().astype(np.int64))
    groups = (
        log.with_columns(expected=pl.Series(expected), variance=pl.Series(expected * (1 - expected)))
        .group_by(by)
        .agg(pl.col("click").cast(pl.Float64).sum(), pl.col("expected", "variance").sum())
    )
    # One download of slack: in the smallest groups the normal approximation is coarse.
    error = (groups["click"] - groups["expected"]).abs().to_numpy()
    assert (error <= 4 * np.sqrt(groups["variance"].to_numpy()) + 1).all()


def test_the_table_of_the_served_is_the_markets(requests: Requests) -> None:
    market, served = requests.market, serve(requests, by_chance, policy="random")
    user = served.log["user_id"].str.slice(5).cast(pl.Int64).to_numpy()
    app = served.log["item_id"].str.slice(4).cast(pl.Int64).to_numpy()
    assert_array_equal(served.table, market.table(user, app, 1))


@pytest.mark.parametrize("ranker", [by_chance, by_popularity(0.5)])
def test_expected_downloads_are_those_that_come(ranker: Ranker) -> None:
    market = make(users=20_000, appeal=-1.5)
    requests = draw_requests(market, 1)
    served: ServedVisits = serve(requests, ranker, policy="any")
    expected = table_probabilities(served.table, served.log["position"].to_numpy().astype(np.int64))
    told = expected_downloads(requests, ranker)
    assert told == pytest.approx(expected.sum() / len(requests.user))
    error = np.sqrt((expected * (1 - expected)).sum()) / len(requests.user)
    assert abs(served.log["click"].cast(pl.Float64).sum() / len(requests.user) - told) < 4 * error
