"""Small tests whose numbers can be checked by hand or by another way to compute them."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from urank.abtest.effects import Moments, moments
from urank.abtest.exposures import Exposures, read_exposures

Floats = NDArray[np.float64]


def users(rng: np.random.Generator, n: int, rate: float = 0.2) -> Floats:
    """(x, y) of users: impressions, and clicks that hang together in a user, `[n, 2]`."""
    y = 1 + rng.poisson(rng.gamma(1.0, 5.0, size=n))
    return np.stack([rng.binomial(y, rng.beta(5 * rate, 5 * (1 - rate), size=n)), y], axis=1).astype(np.float64)


def of(columns: Floats) -> Moments:
    """The moments of one group."""
    return moments(columns, np.zeros(len(columns), dtype=np.int64), 1)[0]


def log_of(rows: list[tuple[int, str, int, int, float]]) -> Exposures:
    """A log from (user, arm, day, click, value)."""
    return read_exposures(pl.DataFrame(rows, schema=["user_id", "arm", "day", "click", "value"], orient="row"))
