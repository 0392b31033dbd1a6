"""What an A/B test is judged by: ratios of sums over users.

    rate of an arm = Σ_u x_u / Σ_u y_u      over the users u that were seen

The paper's Section 5.4 has two: CTR, downloads per impression, and CVR, downloads per visited user. A user is one
observation however often it comes back, so all there is to know of a metric is (x_u, y_u) for each user.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from urank.abtest.effects import Floats
from urank.abtest.exposures import Exposures
from urank.errors import ConfigError

__all__ = ["METRICS", "Metric", "by_row", "by_user", "first_earned", "metric_named", "metrics_of", "so_far"]


@dataclass(frozen=True)
class Metric:
    """A ratio.

    Attributes:
        name: short.
        title: what one reads: "clicks per impression".
        numerator: the sum of `Exposures` that it counts.
        denominator: what it is divided by: impressions, or users that were seen.
    """

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
    """The metrics that a log can tell: all, but for revenue in one without values."""
    return tuple(metric for metric in METRICS if metric.numerator != "revenue" or exposures.revenue is not None)


def metric_named(name: str, exposures: Exposures) -> Metric:
    """One of the metrics that a log can tell.

    Raises:
        ConfigError: when it is none of them.
    """
    known = {metric.name: metric for metric in metrics_of(exposures)}
    if name not in known:
        raise ConfigError(f"metric must be one of {', '.join(known)} for {exposures.name}; got '{name}'")
    return known[name]


def by_row(exposures: Exposures, metric: Metric) -> Floats:
    """(x, y) of each user on each day alone, `[rows, 2]`."""
    x = getattr(exposures, metric.numerator)
    y = exposures.impressions if metric.denominator == "impressions" else np.ones(len(x))
    return np.stack([x, y], axis=1)


def by_user(exposures: Exposures, metric: Metric) -> Floats:
    """(x, y) of each user over all days, `[users, 2]`; (0, 0) for one that was not seen."""
    each = by_row(exposures, metric)
    sums = np.empty((exposures.users, 2))
    for column in range(2):
        sums[:, column] = np.bincount(exposures.user, each[:, column], exposures.users)
    if metric.denominator == "users":
        sums[:, 1] = sums[:, 1] > 0
    return sums


def so_far(exposures: Exposures, metric: Metric) -> tuple[Floats, Floats]:
    """(x, y) of each user from its first day to that of the row, and the same without that day, each `[rows, 2]`."""
    each, first = by_row(exposures, metric), _first_rows(exposures)
    now = _since_first(each, first)
    before = np.where(first[:, None], 0.0, now - each)
    if metric.denominator == "users":
        now[:, 1], before[:, 1] = 1.0, ~first
    return now, before


def first_earned(exposures: Exposures, metric: Metric) -> NDArray[np.bool_]:
    """True at the row of the day on which a user first has an x above 0, `[rows]`."""
    earned = getattr(exposures, metric.numerator) > 0
    days = _since_first(earned[:, None].astype(np.float64), _first_rows(exposures))[:, 0]
    return np.asarray(earned & (days == 1))


def _first_rows(exposures: Exposures) -> NDArray[np.bool_]:
    return np.append(True, np.diff(exposures.user) != 0)[: len(exposures.user)]


def _since_first(each: Floats, first: NDArray[np.bool_]) -> Floats:
    """Sums from the first row of the user on, `[rows, k]`."""
    total = each.cumsum(axis=0)
    return np.asarray(total - (total - each)[first][np.cumsum(first) - 1])
