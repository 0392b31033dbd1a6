"""Users that come back, for A/B tests whose truth is known: who is seen when, what they click, what that is worth.

    λ_u ~ Gamma(mean 0.35)            visits of user u on a day ~ Poisson(λ_u)
    impressions of a visit            1 + Poisson(4)
    p_u ~ Beta(2, 38)                 clicks on a day ~ Binomial(impressions, p_u · (1 + lift)), the lift in arm B only
    worth of a click                  log-normal, with a deviation of the log of 0.8

A few users make most impressions, and some click much more than others, so what one user does hangs together: errors
that take impressions for independent are too small. The lift changes neither who comes nor how often, so it is the true
lift of clicks per impression, of clicks per user and of revenue per user alike.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from urank.abtest.exposures import Exposures
from urank.errors import ConfigError

__all__ = ["impressions_of", "simulate_visits"]

ARMS = ("A", "B")
VISITS, VISITS_SHAPE = 0.35, 0.8
SHOWN = 4.0
CLICKS = (2.0, 38.0)
WORTH = 0.8
FIRST_DAY = 18_388
"""The sixth of May 2020, in days since 1970: when the paper's test began."""


def simulate_visits(
    users: int, *, days: int = 14, before: int = 0, lift: float = 0.0, share: float = 0.5, rng: np.random.Generator
) -> Exposures:
    """What users of two arms, A and B, were shown and did.

    Args:
        users: how many there are; those that never come are not in the log.
        days: of the test.
        before: days before it, on which the arms do not differ.
        lift: by which share users of arm B click more, in the test.
        share: of the users that are in arm B.
        rng: decides everything.

    >>> found = simulate_visits(1000, days=3, before=2, rng=np.random.default_rng(0))
    >>> found.arms, len(found.days), found.users < 1000
    (('A', 'B'), 5, True)
    """
    if users < 1 or days < 1 or before < 0:
        raise ConfigError(f"users and days must be at least 1, before at least 0; got {users}, {days} and {before}")
    if not -1 <= lift <= 1 or not 0 < share < 1:
        raise ConfigError(f"lift must be from −1 to 1 and share between 0 and 1; got {lift} and {share}")
    activity = rng.gamma(VISITS_SHAPE, VISITS / VISITS_SHAPE, size=users)
    visits = rng.poisson(activity[:, None], size=(users, before + days))
    user, day = np.nonzero(visits)
    came = visits[user, day]
    impressions = came + rng.poisson(SHOWN * came)
    arm = (rng.random(users) < share).astype(np.int64)
    lifted = 1 + lift * ((arm[user] == 1) & (day >= before))
    clicks = rng.binomial(impressions, np.minimum(1.0, rng.beta(*CLICKS, size=users)[user] * lifted))
    rows = np.repeat(np.arange(len(user)), clicks)
    revenue = np.bincount(rows, rng.lognormal(0.0, WORTH, size=len(rows)), len(user))
    seen, index = np.unique(user, return_inverse=True)
    labels = np.arange(FIRST_DAY, FIRST_DAY + before + days).astype("datetime64[D]")
    return Exposures(
        name="the simulated visits",
        arms=ARMS,
        days=tuple(labels.astype(str).tolist()),
        arm=arm[seen],
        user=index.astype(np.int64),
        day=day.astype(np.int64),
        impressions=impressions.astype(np.float64),
        clicks=clicks.astype(np.float64),
        conversions=clicks.astype(np.float64),
        revenue=revenue.astype(np.float64),
    )


def impressions_of(exposures: Exposures, rng: np.random.Generator) -> pl.DataFrame:
    """The same as a log with a row for each impression, in the order of time: what `read_exposures` would add up.

    >>> visits = simulate_visits(50, days=2, rng=np.random.default_rng(0))
    >>> log = impressions_of(visits, np.random.default_rng(1))
    >>> log.columns
    ['user_id', 'arm', 'timestamp', 'click', 'value']
    >>> log.height == int(visits.impressions.sum()), log["click"].sum() == int(visits.clicks.sum())
    (True, True)
    """
    counts = exposures.impressions.astype(np.int64)
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    click = place < exposures.clicks[row]
    seconds = (FIRST_DAY + exposures.day[row]) * 86_400 + rng.integers(86_400, size=len(row))
    earned = np.zeros(len(counts)) if exposures.revenue is None else exposures.revenue
    worth = earned / np.maximum(exposures.conversions, 1)
    frame = pl.DataFrame(
        {
            "user_id": exposures.user[row],
            "arm": pl.Series(list(exposures.arms)).gather(exposures.arm[exposures.user[row]]),
            "timestamp": pl.Series(seconds * 1_000_000).cast(pl.Datetime("us")),
            "click": click.astype(np.int8),
            "value": worth[row],
        }
    )
    return frame.sort("timestamp", "user_id")
