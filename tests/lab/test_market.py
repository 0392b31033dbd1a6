"""The market: what users look at and what appeals to them, against arithmetic; tolerances are four standard errors."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from urank.config import validate
from urank.errors import ConfigError
from urank.lab.market import CATEGORIES, DEVICES, MORE_DAYS, REGIONS, Market, MarketConfig, build_market

SIZES = {
    "users": 500,
    "apps": 80,
    "candidates": 20,
    "positions": 10,
    "log_days": 8,
    "warmup_days": 3,
    "random_days": 20,
}
TASTES = {"tastes": 4, "appeal": -3.0, "attention": 2.0, "steepness": 1.1, "thumbnails": 0.4, "drift": 0.1}


def make(**changes: Any) -> Market:
    return build_market(MarketConfig(**{**SIZES, **TASTES, **changes}))


@pytest.fixture(scope="module")
def market() -> Market:
    return make()


def arrays(market: Market) -> dict[str, Any]:
    return {f.name: getattr(market, f.name) for f in fields(market) if f.name != "config"} | {
        "popularity": market.popularity,
        "features": market.features(np.arange(80), np.arange(80), 1).select("^taste_.*$").to_numpy(),
    }


def test_the_seed_decides_everything(market: Market) -> None:
    again, other = arrays(make()), arrays(make(seed=1))
    for name, array in arrays(market).items():
        assert_array_equal(array, again[name])
        assert not np.array_equal(array, other[name]), name


def test_more_users_are_other_users_of_the_same_apps(market: Market) -> None:
    larger = make(users=600)
    for name in ("category", "genre", "thumbnail", "bid", "weights", "popularity"):
        assert_array_equal(getattr(larger, name), getattr(market, name))


@pytest.mark.parametrize(("user", "app", "day"), [(0, 0, 1), (7, 33, 3), (499, 79, -5)])
def test_the_table_is_examination_times_appeal(market: Market, user: int, app: int, day: int) -> None:
    table = market.table(np.array([user]), np.array([app]), day)
    of_category, of_device = market.weights[market.category[app]], market.weights[len(CATEGORIES) + market.device[user]]
    exponent = 1 + of_category + of_device - 0.4 * market.thumbnail[app]
    examined = np.array([k ** -max(exponent, 0.0) for k in range(1, 11)])
    assert_allclose(market.examination(np.array([user]), np.array([app]))[0], examined)
    odds = -3.0 + market.popularity[20 + 3 + day, app] + market.eagerness[user]
    odds += sum(market.taste[user, d] * market.genre[app, d] for d in range(4))
    odds += market.local[market.region[user], market.category[app]]
    appeal = 1 / (1 + np.exp(-odds))
    assert_allclose(market.appeal(np.array([user]), np.array([app]), day), [appeal])
    assert_allclose(table[0], examined * appeal)


def test_the_exponents_are_those_that_were_asked_for() -> None:
    market = make(attention=2.5, steepness=0.7, thumbnails=0.3)
    categories, devices = market.weights[: len(CATEGORIES)], market.weights[len(CATEGORIES) : -1]
    assert_allclose(np.sort(1 + categories), np.linspace(2.5 - 0.7, 2.5 + 0.7, len(CATEGORIES)))
    assert_allclose(np.sort(devices), [-devices.max(), 0, devices.max()], atol=1e-12)
    assert devices.max() > 0
    assert market.weights[-1] == -0.3


def test_curves_fall_with_position_and_start_at_one(market: Market) -> None:
    user, app = np.repeat(np.arange(500), 80), np.tile(np.arange(80), 500)
    curves = market.examination(user, app)
    assert (curves[:, 0] == 1).all()
    assert (np.diff(curves) < 0).all()
    assert (curves > 0).all()


def test_curves_differ_by_category_device_and_thumbnail(market: Market) -> None:
    """As in Figure 1: the curve of the smaller exponent lies above everywhere but at the top."""

    def curves(**changes: Any) -> np.ndarray:
        alike = {"category": np.zeros(80, int), "thumbnail": np.full(80, 0.5), "device": np.zeros(500, int)}
        return replace(market, **{**alike, **changes}).examination(np.arange(80), np.arange(80))

    steepest, flattest = (int(pick(market.weights[: len(CATEGORIES)])) for pick in (np.argmax, np.argmin))
    assert (curves(category=np.full(80, flattest)) > curves(category=np.full(80, steepest)))[:, 1:].all()
    by_device = market.weights[len(CATEGORIES) : -1]
    one, other = (np.full(500, int(pick(by_device))) for pick in (np.argmin, np.argmax))
    assert (curves(device=one) > curves(device=other))[:, 1:].all()
    assert (curves(thumbnail=np.ones(80)) > curves(thumbnail=np.zeros(80)))[:, 1:].all()
    assert_array_equal(curves(), np.tile(curves()[0], (80, 1)))


def test_popularity_drifts() -> None:
    """wandering_t = 0.95 wandering_{t−1} + drift · noise, about the level that it has without drift."""
    days, apps, drift = 120, 100, 0.3
    market = make(random_days=days, apps=apps, drift=drift)
    wandering = market.popularity - make(random_days=days, apps=apps, drift=0).popularity
    assert len(wandering) == 1 + days + 3 + 8 + MORE_DAYS
    before, after = wandering[:-1].ravel(), wandering[1:].ravel()
    remembered = (before @ after) / (before @ before)
    assert abs(remembered - 0.95) < 4 * drift / np.sqrt(before @ before)
    noise = after - 0.95 * before
    assert abs(noise.std() - drift) < 4 * drift / np.sqrt(2 * len(noise))
    assert abs(noise.mean()) < 4 * drift / np.sqrt(len(noise))


def test_without_drift_nothing_changes_from_day_to_day() -> None:
    market = make(drift=0)
    assert (market.popularity == market.popularity[0]).all()


def test_there_is_a_popularity_for_every_day_that_can_come(market: Market) -> None:
    config = market.config
    first = 1 - config.warmup_days - config.random_days
    assert market.day(first - 1) == 0  # the eve, which the features of the first day tell of
    assert market.day(config.log_days + MORE_DAYS) == len(market.popularity) - 1


def test_the_features_tell_of_yesterday_and_of_tastes_as_measured() -> None:
    market = make(users=3000, tastes=3)
    user, app = np.arange(3000), np.arange(3000) % 80
    features = market.features(user, app, 2)
    assert features.columns == [
        *("device", "region", "category", "app", "downloads", "thumbnail"),
        *("taste_1", "taste_2", "taste_3", "genre_1", "genre_2", "genre_3"),
    ]
    assert_allclose(features["downloads"], np.exp(4 + market.popularity[market.day(1), app]), rtol=1e-6)
    assert features["category"].to_list() == [CATEGORIES[number] for number in market.category[app]]
    assert features["device"].to_list() == [DEVICES[number] for number in market.device]
    assert features["region"].to_list() == [REGIONS[number] for number in market.region]
    assert features["app"].to_list() == [f"app-{number:04}" for number in app]
    assert_allclose(features["thumbnail"], market.thumbnail[app], rtol=1e-6)
    assert_allclose(features["genre_2"], market.genre[app, 1], rtol=1e-6)
    error = features.select("^taste_.*$").to_numpy() - market.taste
    asked = 0.3 * market.taste.std()
    assert abs(error.std() - asked) < 4 * asked / np.sqrt(2 * error.size)
    assert_array_equal(features["taste_1"], market.features(user, app, 5)["taste_1"])  # measured once


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"user": 3}, "user is not a key of the app store; the keys are users, apps, visits"),
        ({"users": 1}, "users in the app store: input should be greater than or equal to 2; got 1"),
        ({"visits": 0}, "visits in the app store: input should be greater than 0; got 0"),
        ({"log_days": 1}, "log_days in the app store: input should be greater than or equal to 2; got 1"),
        ({"drift": float("nan")}, "drift in the app store: input should be a finite number; got nan"),
        ({"seed": -1}, "seed in the app store: input should be greater than or equal to 0; got -1"),
        (
            {"positions": 30},
            "positions must be at most candidates, and candidates at most apps; got 30, 20 and 400",
        ),
        ({"apps": 15}, "positions must be at most candidates, and candidates at most apps; got 10, 20 and 15"),
        ({"bids": (0, 1)}, r"bids must be a lowest bid above 0 and a highest; got \(0.0, 1.0\)"),
        ({"bids": (2, 1)}, r"bids must be a lowest bid above 0 and a highest; got \(2.0, 1.0\)"),
        ({"bids": (1, 1e39)}, r"bids must fit 32-bit numbers, so be below 3.4e38; got \(1.0, 1e\+39\)"),
    ],
)
def test_refusals_are_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}") as refused:
        validate(MarketConfig, {"positions": 10, "candidates": 20, "apps": 400, **changes}, "the app store")
    assert "\n" not in str(refused.value)
