"""A market like the app store of Section 6: users with devices and tastes, apps with categories, thumbnails and bids.

A download requires that the user examines the app and that it appeals:

    P(download | user, app, k, day) = examination(app, user's device, k) · appeal(user, app, day).

Examination decreases with position, at a rate that depends on the category, the device and the app's thumbnail
(Figure 1 of the paper): the exponent of `oracle.examination` is a sum over these. Appeal is a logistic function of the
app's popularity, which drifts from day to day, of the match between the user's tastes and the app, and of the user's
eagerness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field, model_validator

from urank.config import Settings
from urank.lab.user_models import examination
from urank.log.columns import MAX_POSITION

CATEGORIES = ("games", "tools", "social", "video", "finance", "education", "shopping", "photo")
DEVICES = ("phone", "foldable", "tablet")
REGIONS = ("north", "east", "south", "west", "centre")
_DEVICE_SHARES = (0.7, 0.1, 0.2)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class MarketConfig(Settings):
    """Settings of a market; the same settings give the same bytes."""

    users: int = Field(40_000, ge=2, le=100_000_000, description="number of users")
    apps: int = Field(400, ge=2, le=1_000_000, description="number of apps")
    visits: float = Field(0.2, gt=0, le=100, description="mean visits per user and day; some users come more often")
    candidates: int = Field(20, ge=2, le=10_000, description="candidates per list")
    positions: int = Field(10, ge=1, le=MAX_POSITION, description="number of positions shown")
    tastes: int = Field(4, ge=1, le=100, description="dimensions of a user's taste")
    appeal: float = Field(-3.0, ge=-20, le=20, description="log odds of a download of the average app, once examined")
    attention: float = Field(1.9, ge=0, le=10, description="exponent of 1/k^attention for the average category")
    steepness: float = Field(1.0, ge=0, le=10, description="spread of the attention exponents of the categories")
    thumbnails: float = Field(0.3, ge=0, le=10, description="how much the best thumbnail flattens the attention curve")
    drift: float = Field(0.1, ge=0, le=10, description="deviation of the daily change of an app's popularity")
    bids: tuple[float, float] = Field((0.5, 5.0), description="lowest and highest bid for a download")
    log_days: int = Field(8, ge=2, le=10_000, description="days of the production ranker's log")
    warmup_days: int = Field(
        3, ge=1, le=1000, description="earlier days whose log the production ranker was trained on"
    )
    random_days: int = Field(120, ge=1, le=10_000, description="days of random traffic before that")
    random_visits: int = Field(3000, ge=1, le=100_000_000, description="visits with a random order per day")
    seed: int = Field(0, ge=0, description="seed of all random numbers")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.positions <= self.candidates <= self.apps:
            raise ValueError(
                "positions must be at most candidates, and candidates at most apps; "
                f"got {self.positions}, {self.candidates} and {self.apps}"
            )
        if not 0 < self.bids[0] <= self.bids[1]:
            raise ValueError(f"bids must be a lowest bid above 0 and a highest; got {self.bids}")
        if self.bids[1] > float(np.finfo(np.float32).max):
            raise ValueError(f"bids must fit 32-bit numbers, so be below 3.4e38; got {self.bids}")
        return self


MORE_DAYS = 60
"""Further days with a popularity, for an A/B test."""


class AbTestSchedule(Settings):
    """Users, arms and days of a simulated A/B test: its settings apart from those of the rankers."""

    market: MarketConfig = Field(
        MarketConfig(users=60_000, visits=0.4, warmup_days=1), description="users and apps, as in `urank appstore`"
    )
    arm_share: float = Field(0.15, gt=0, le=0.5, description="share of the users in each of the two arms")
    before: int = Field(7, ge=1, le=365, description="days of the first A/A test")
    during: int = Field(10, ge=1, le=365, description="days of the A/B test")
    after: int = Field(7, ge=0, le=365, description="days of the second A/A test")
    retrain: int = Field(5, ge=1, le=365, description="days between trainings of the arms' rankers")
    train_days: int = Field(7, ge=1, le=365, description="days of an arm's log on which its ranker is trained")
    method: Literal["score", "match"] = Field("score", description="how lists are ranked: by score or match")
    seed: int = Field(0, ge=0, description="seed of all random numbers; added to those of the rankers")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.days > self.market.log_days + MORE_DAYS:
            raise ValueError(f"before, during and after must be {self.market.log_days + MORE_DAYS} days in all at most")
        return self

    @property
    def days(self) -> int:
        """Days of the whole test."""
        return self.before + self.during + self.after


@dataclass(frozen=True, eq=False)
class Market:
    """The users and the apps; d is the number of tastes."""

    config: MarketConfig
    device: Ints  # [users], index into DEVICES
    region: Ints  # [users], index into REGIONS
    taste: Floats  # [users, d]
    eagerness: Floats  # [users], added to the log odds of every download
    activity: Floats  # [users], expected visits a day
    category: Ints  # [apps], index into CATEGORIES
    genre: Floats  # [apps, d], compared with tastes
    thumbnail: Floats  # [apps], attractiveness from 0 to 1
    bid: Floats  # [apps], the value of a download
    weights: Floats  # of the exponent of attention: one for each category, each device, and the thumbnail
    local: Floats  # [regions, categories], added to the log odds

    @cached_property
    def popularity(self) -> Floats:
        """`[days, apps]` from the day before random traffic: an autoregressive process around each app's level."""
        config = self.config
        rng = _rng(config, "popularity")
        days = 1 + config.random_days + config.warmup_days + config.log_days + MORE_DAYS
        level = rng.standard_normal(config.apps)
        steps = config.drift * rng.standard_normal((days, config.apps))
        return np.asarray(level + np.array(list(accumulate(steps, lambda now, step: 0.95 * now + step))))

    def day(self, day: int) -> int:
        """Return the row of `popularity` of a day; day 1 is the first of the log, earlier days are 0, −1, …"""
        return self.config.random_days + self.config.warmup_days + day

    def examination(self, user: Ints, app: Ints) -> Floats:
        """Compute P(examined | user, app, k) `[rows, K]`."""
        known = np.zeros((len(user), len(self.weights)))
        rows = np.arange(len(user))
        known[rows, self.category[app]] = 1
        known[rows, len(CATEGORIES) + self.device[user]] = 1
        known[:, -1] = self.thumbnail[app]
        return examination(known, self.weights, self.config.positions)

    def appeal(self, user: Ints, app: Ints, day: int) -> Floats:
        """Compute P(download | examined) `[rows]`."""
        fit = np.einsum("rd,rd->r", self.taste[user], self.genre[app])
        local = self.local[self.region[user], self.category[app]]
        logit = self.config.appeal + self.popularity[self.day(day), app] + fit + local + self.eagerness[user]
        return np.asarray(1 / (1 + np.exp(-logit)))

    def table(self, user: Ints, app: Ints, day: int) -> Floats:
        """Compute the true P(download | user, app, k) `[rows, K]`."""
        return self.examination(user, app) * self.appeal(user, app, day)[:, None]

    def features(self, user: Ints, app: Ints, day: int) -> pl.DataFrame:
        """Return the features in the log: tastes measured with noise, and yesterday's popularity, among others."""
        known = self._known
        columns = {
            "device": pl.Series(DEVICES)[self.device[user]],
            "region": pl.Series(REGIONS)[self.region[user]],
            "category": pl.Series(CATEGORIES)[self.category[app]],
            "app": pl.Series(self.app_names)[app],
            "downloads": np.exp(4 + self.popularity[self.day(day - 1), app]).astype(np.float32),
            "thumbnail": self.thumbnail[app].astype(np.float32),
        }
        columns |= {f"taste_{d + 1}": known[user, d] for d in range(self.config.tastes)}
        columns |= {f"genre_{d + 1}": self.genre[app, d].astype(np.float32) for d in range(self.config.tastes)}
        return pl.DataFrame(columns)

    @cached_property
    def _known(self) -> NDArray[np.float32]:
        """The tastes as measured."""
        rng = _rng(self.config, "measured")
        blurred = self.taste + 0.3 * self.taste.std() * rng.standard_normal(self.taste.shape)
        return np.asarray(blurred, dtype=np.float32)

    @cached_property
    def app_names(self) -> list[str]:
        """The id of each app."""
        return [f"app-{number:04}" for number in range(self.config.apps)]

    @cached_property
    def user_names(self) -> list[str]:
        """The id of each user."""
        return [f"user-{number:06}" for number in range(self.config.users)]


_STREAMS = ("users", "apps", "attention", "popularity", "measured")


def _rng(config: MarketConfig, stream: str) -> np.random.Generator:
    return np.random.default_rng([config.seed, _STREAMS.index(stream)])


def build_market(config: MarketConfig) -> Market:
    """Draw the users and the apps of a market."""
    users, apps, attention = (_rng(config, name) for name in ("users", "apps", "attention"))
    device = users.choice(len(DEVICES), size=config.users, p=_DEVICE_SHARES)
    category = apps.integers(len(CATEGORIES), size=config.apps)
    of_category = apps.standard_normal((len(CATEGORIES), config.tastes))
    genre = 0.5 * of_category[category] + 1.3 * apps.standard_normal((config.apps, config.tastes))
    low, high = np.log(config.bids)
    # Evenly spaced exponents, so that the categories differ with every seed.
    steep = config.attention - 1 + config.steepness * attention.permutation(np.linspace(-1, 1, len(CATEGORIES)))
    by_device = attention.permutation(np.linspace(-0.1, 0.1, len(DEVICES)))
    return Market(
        config=config,
        device=device,
        region=users.integers(len(REGIONS), size=config.users),
        taste=users.standard_normal((config.users, config.tastes)) * 1.2 / config.tastes**0.5,
        eagerness=0.6 * users.standard_normal(config.users),
        activity=config.visits * users.gamma(4.0, 0.25, config.users),
        category=category,
        genre=genre,
        thumbnail=apps.beta(2, 2, config.apps),
        bid=np.exp(apps.uniform(low, high, config.apps)),
        weights=np.concatenate([steep, by_device, [-config.thumbnails]]),
        local=0.3 * users.standard_normal((len(REGIONS), len(CATEGORIES))),
    )
