"""Simulated users who return, for A/B tests with a known lift: their visits, clicks and the value of clicks.

    λ_u ~ Gamma(mean 0.35)            visits of user u on a day ~ Poisson(λ_u)
    impressions of a visit            1 + Poisson(4)
    p_u ~ Beta(2, 38)                 clicks on a day ~ Binomial(impressions, p_u · (1 + lift)), the lift in arm B only
    value of a click                  log-normal, with a standard deviation of the log of 0.8

A few users make most impressions, and some click much more than others, so the impressions of a user are correlated:
standard errors that treat them as independent are too small. The lift does not change the visits, so it is the true
lift of clicks per impression, of clicks per user and of revenue per user alike.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from urank.abtest.exposures import Exposures

__all__ = ["impressions_of", "simulate_visits"]

ARMS = ("A", "B")
VISITS, VISITS_SHAPE = 0.35, 0.8
SHOWN = 4.0
CLICKS = (2.0, 38.0)
VALUE = 0.8
FIRST_DAY = 18_388
"""6 May 2020 in days since 1970, the first day of the paper's test."""


def simulate_visits(
    users: int, *, days: int = 14, before: int = 0, lift: float = 0.0, share: float = 0.5, rng: np.random.Generator
) -> Exposures:
    """Simulate the exposures of users in two arms, A and B.

    Args:
        users: number of users; those who never come are not in the log.
        days: of the test.
        before: days before the test, on which the arms do not differ.
        lift: relative increase of the clicks of arm B in the test, from −1 to 1.
        share: of users in arm B.
        rng: random generator.

    >>> found = simulate_visits(1000, days=3, before=2, rng=np.random.default_rng(0))
    >>> found.arms, len(found.days), found.users < 1000
    (('A', 'B'), 5, True)
    """
    activity = rng.gamma(VISITS_SHAPE, VISITS / VISITS_SHAPE, size=users)
    visits = rng.poisson(activity[:, None], size=(users, before + days))
    user, day = np.nonzero(visits)
    came = visits[user, day]
    impressions = came + rng.poisson(SHOWN * came)
    arm = (rng.random(users) < share).astype(np.int64)
    lifted = 1 + lift * ((arm[user] == 1) & (day >= before))
    clicks = rng.binomial(impressions, np.minimum(1.0, rng.beta(*CLICKS, size=users)[user] * lifted))
    rows = np.repeat(np.arange(len(user)), clicks)
    revenue = np.bincount(rows, rng.lognormal(0.0, VALUE, size=len(rows)), len(user))
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
    """Return the log with one row for each impression in order of time, which `read_exposures` aggregates again.

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
    value = earned / np.maximum(exposures.conversions, 1)
    frame = pl.DataFrame(
        {
            "user_id": exposures.user[row],
            "arm": pl.Series(list(exposures.arms)).gather(exposures.arm[exposures.user[row]]),
            "timestamp": pl.Series(seconds * 1_000_000).cast(pl.Datetime("us")),
            "click": click.astype(np.int8),
            "value": value[row],
        }
    )
    return frame.sort("timestamp", "user_id")
