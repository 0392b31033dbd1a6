"""Visits of an app store, the rankers that serve them, and the folder that is written."""

from __future__ import annotations

import tomllib
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from polars.testing import assert_frame_equal
from scipy.stats import chi2

import urank
from urank.clicks.click_settings import ClickConfig
from urank.lab.appstore import (
    FIRST_DAY,
    Ranker,
    Requests,
    ServedVisits,
    by_chance,
    by_popularity,
    draw_requests,
    expected_downloads,
    production_ranker,
    random_traffic,
    ranked_by,
    serve,
    traffic,
    write_appstore,
)
from urank.lab.market import CATEGORIES, Market, MarketConfig, build_market
from urank.lab.user_models import table_probabilities
from urank.learning.training_settings import TrainingConfig
from urank.log.dataset import Dataset
from urank.propensity.randomised import fit_by_category
from urank.ranking.ranking_model import RankingModel

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


FILES = ["appstore.toml", "log.parquet", "random.parquet", "truth/candidates.parquet"]
CONFIG = MarketConfig(
    users=200, apps=40, candidates=12, positions=6, random_days=5, random_visits=50, log_days=3, warmup_days=1, visits=1
)
QUICK = ClickConfig(families=("deepfm",), hidden=(8,), training=TrainingConfig(epochs=2, batch_lists=64))


def write(folder: Path, config: MarketConfig = CONFIG, **options: Any) -> dict[str, bytes]:
    write_appstore(config, folder, clicks=QUICK, **options)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("appstore") / "store"
    write(folder)
    return folder


@pytest.fixture(scope="module")
def log(store: Path) -> pl.DataFrame:
    return pl.read_parquet(store / "log.parquet")


@pytest.fixture(scope="module")
def store_market() -> Market:
    return build_market(CONFIG)


@pytest.fixture(scope="module")
def ranker(store_market: Market) -> RankingModel:
    torch.set_num_threads(1)
    return production_ranker(store_market, QUICK)


# What is written


def test_all_files_are_there_with_the_days_that_were_asked_for(store: Path, log: pl.DataFrame) -> None:
    assert sorted(contents(store)) == FILES
    assert sorted(set(log["timestamp"].dt.date())) == [date(2020, 5, day) for day in (6, 7, 8)]
    assert set(log["policy"]) == {"production"}
    file = pq.ParquetFile(store / "log.parquet")
    assert file.metadata.num_row_groups == 3
    for group in range(3):
        assert len(set(pl.from_arrow(file.read_row_group(group))["timestamp"].dt.date())) == 1  # type: ignore[arg-type, index]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_the_random_traffic_lies_before_all_that_was_ranked(store: Path, log: pl.DataFrame) -> None:
    random = pl.read_parquet(store / "random.parquet")
    assert random.columns == log.columns
    assert set(random["policy"]) == {"random"}
    days = random.group_by(pl.col("timestamp").dt.date()).agg(pl.col("query_id").n_unique()).sort("timestamp")
    assert days["query_id"].to_list() == [50] * 5
    assert days["timestamp"].max() == date(2020, 5, 4)  # the fifth is that of the warm-up
    assert not set(random["query_id"]) & set(log["query_id"])


def test_the_truth_is_that_of_the_last_day(store: Path, log: pl.DataFrame, store_market: Market) -> None:
    truth = pl.read_parquet(store / "truth" / "candidates.parquet")
    last = log.filter(pl.col("timestamp").dt.date() == date(2020, 5, 8))
    hidden = ["position", "click", "timestamp", "policy"]
    assert truth.drop("table").equals(last.drop(hidden))
    user = truth["user_id"].str.slice(5).cast(pl.Int64).to_numpy()
    app = truth["item_id"].str.slice(4).cast(pl.Int64).to_numpy()
    assert_allclose(np.array(truth["table"].to_list()), store_market.table(user, app, 3), rtol=1e-6)


def test_the_counts_are_those_of_the_log(tmp_path: Path, log: pl.DataFrame) -> None:
    told: list[tuple[Any, ...]] = []
    counts = write_appstore(CONFIG, tmp_path / "store", clicks=QUICK, report=lambda *step: told.append(step))
    assert counts == {
        "impressions": log.height,
        "visits": log["query_id"].n_unique(),
        "downloads": log["click"].cast(pl.Int64).sum(),
    }
    assert [step for step in told if step[0] == "random traffic"] == [("random traffic", n, 5) for n in range(1, 6)]
    assert [step for step in told if step[0] == "production traffic"] == [
        ("production traffic", n, 3) for n in range(1, 4)
    ]


def test_the_config_makes_the_same_bytes_again_and_another_seed_others(store: Path, tmp_path: Path) -> None:
    config = MarketConfig(**tomllib.loads((store / "appstore.toml").read_text()))
    assert config == CONFIG
    first = contents(store)
    assert write(tmp_path / "again", config) == first
    other = write(tmp_path / "other", config.model_copy(update={"seed": 1}))
    assert all(other[name] != first[name] for name in FILES)


# The production ranker


def test_what_a_ranker_learns_from(ranker: RankingModel) -> None:
    features = ranker.clicks.featurizer
    measured = {f"{name}_{d}" for name in ("taste", "genre") for d in range(1, 5)}
    assert {each.name for each in (*features.numeric, *features.categorical)} == {
        *("device", "region", "category", "app", "downloads", "thumbnail"),
        *measured,
    }
    assert (ranker.method, ranker.scorer) == ("ctr1", None)


def test_bids_do_not_change_the_order(store_market: Market, ranker: RankingModel) -> None:
    requests, rng = draw_requests(store_market, 1), np.random.default_rng(0)
    frame = requests.frame()
    dear = frame.with_columns(value=pl.col("value") * pl.Series(rng.uniform(0.01, 100, frame.height)))
    rank = ranked_by(ranker)
    assert_array_equal(rank(requests, frame, rng), rank(requests, dear, rng))


def test_it_earns_more_than_popularity_and_that_more_than_chance() -> None:
    torch.set_num_threads(1)
    store_market = build_market(CONFIG.model_copy(update={"users": 600}))
    training = TrainingConfig(epochs=15, batch_lists=64)
    learned = ranked_by(
        production_ranker(store_market, QUICK.model_copy(update={"hidden": (32,), "training": training}))
    )
    requests = draw_requests(store_market, 1)
    earned = [expected_downloads(requests, each) for each in (learned, by_popularity(), by_chance)]
    assert earned[0] > 1.1 * earned[1] > 1.1 * 1.1 * earned[2]


# What the random traffic tells


def test_propensities_by_category_are_the_mean_curves_of_the_categories(tmp_path: Path) -> None:
    settings = {"users": 4000, "apps": 150, "positions": 6, "random_days": 6, "random_visits": 2500, "appeal": -1.0}
    store_market = build_market(MarketConfig(**settings))
    days = list(random_traffic(store_market))
    log, table = pl.concat([each.log for each in days]), np.concatenate([each.table for each in days])
    told = log.select("query_id", "item_id", "position", "click", "category")
    urank.prepare(urank.read(told), tmp_path / "prepared", valid=0, test=0)
    found = fit_by_category(Dataset(tmp_path / "prepared"), column="category")
    assert set(found.curves) == set(CATEGORIES)
    for category, curve in found.curves.items():
        of_it = table[(log["category"] == category).to_numpy()]
        errors = np.array(curve.errors)
        # Clicks weigh apps by their appeal, so they tell the mean curve of what appeals.
        assert (np.abs(curve.values - of_it.sum(axis=0) / of_it[:, 0].sum()) <= 4 * errors + 1e-9).all()
    exponent = {name: store_market.weights[number] for number, name in enumerate(CATEGORIES)}
    flattest, steepest = min(exponent, key=exponent.__getitem__), max(exponent, key=exponent.__getitem__)
    assert all(a > b for a, b in zip(found.curves[flattest].values[1:], found.curves[steepest].values[1:], strict=True))
