"""The metrics of an A/B test: ratios of sums over users.

    rate of an arm = Σ_u x_u / Σ_u y_u      over the users u that were seen

The paper's Section 6.2 has two: CTR, downloads per impression, and CVR, downloads per visiting user. A user is one
observation however often it returns, so a metric depends on the log only through (x_u, y_u) of each user.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from urank.abtest.effects import Floats
from urank.abtest.exposures import Exposures
from urank.errors import ConfigError


@dataclass(frozen=True)
class Metric:
    """A ratio of sums over users: of a field of `Exposures`, per impression or per user that was seen."""

    name: str
    title: str
    numerator: Literal["clicks", "conversions", "revenue"]
    denominator: Literal["impressions", "users"]


METRICS = (
    Metric("ctr", "clicks per impression", "clicks", "impressions"),
    Metric("cvr", "conversions per user", "conversions", "users"),
    Metric("revenue", "revenue per user", "revenue", "users"),
)


def metrics_of(exposures: Exposures) -> tuple[Metric, ...]:
    """Return the metrics that a log supports: all, except revenue if the log has no values."""
    return tuple(metric for metric in METRICS if metric.numerator != "revenue" or exposures.revenue is not None)


def metric_named(name: str, exposures: Exposures) -> Metric:
    """Return a metric that the log supports by its name."""
    known = {metric.name: metric for metric in metrics_of(exposures)}
    if name not in known:
        raise ConfigError(f"metric must be one of {', '.join(known)} for {exposures.name}; got '{name}'")
    return known[name]


def by_row(exposures: Exposures, metric: Metric) -> Floats:
    """Return (x, y) of each user on each single day, `[rows, 2]`."""
    x = getattr(exposures, metric.numerator)
    y = exposures.impressions if metric.denominator == "impressions" else np.ones(len(x))
    return np.stack([x, y], axis=1)


def by_user(exposures: Exposures, metric: Metric) -> Floats:
    """Return (x, y) of each user over all days, `[users, 2]`; (0, 0) for users that were not seen."""
    each = by_row(exposures, metric)
    sums: Floats = np.stack([np.bincount(exposures.user, column, exposures.users) for column in each.T], axis=1)
    if metric.denominator == "users":
        sums[:, 1] = sums[:, 1] > 0
    return sums


def cumulative(exposures: Exposures, metric: Metric) -> tuple[Floats, Floats]:
    """Return (x, y) of each user up to the day of the row, including and excluding that day, each `[rows, 2]`."""
    each, first = by_row(exposures, metric), _first_rows(exposures)
    now = _cumsum_by_user(each, first)
    before = np.where(first[:, None], 0.0, now - each)
    if metric.denominator == "users":
        now[:, 1], before[:, 1] = 1.0, ~first
    return now, before


def first_earned(exposures: Exposures, metric: Metric) -> NDArray[np.bool_]:
    """Return a mask `[rows]` of the first day on which each user has a positive x."""
    earned = getattr(exposures, metric.numerator) > 0
    days = _cumsum_by_user(earned[:, None].astype(np.float64), _first_rows(exposures))[:, 0]
    return np.asarray(earned & (days == 1))


def _first_rows(exposures: Exposures) -> NDArray[np.bool_]:
    return np.append(True, np.diff(exposures.user) != 0)[: len(exposures.user)]


def _cumsum_by_user(each: Floats, first: NDArray[np.bool_]) -> Floats:
    """Accumulate the rows of each user, `[rows, k]`."""
    total = each.cumsum(axis=0)
    return np.asarray(total - (total - each)[first][np.cumsum(first) - 1])
