"""Intervals that also count the chance in the click models of an evaluation, not only that in the clicks it judges.

A model that was fitted on other clicks would give another estimate. For each cut of the queries there are two models
from halves that have no query in common, so θ_1 and θ_2, the estimates by each alone, are independent, and

    (θ_1 − θ_2)² / 4

is, in expectation, the variance that the models add to the mean of both. It is averaged over the cuts. The variance of
an estimate is that over queries plus this; its degrees of freedom are Satterthwaite's. What all models get wrong alike
is not in it: for that see `specification`.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from urank.evaluate.stats import Comparison, Interval

__all__ = ["disagreement", "widened"]

Kind = TypeVar("Kind", bound=Interval)


def disagreement(estimates: NDArray[np.float64]) -> float:
    """The variance that the models add to an estimate, from the estimates by each `[cuts, 2]`.

    >>> round(disagreement(np.array([[0.5, 0.7], [0.6, 0.6]])), 6)
    0.005
    """
    return float(np.mean((estimates[:, 0] - estimates[:, 1]) ** 2) / 4)


def widened(found: Kind, variance: float, cuts: int, level: float = 0.95) -> Kind:
    """The same estimate with the variance of the models added to its own.

    Args:
        found: an interval over queries.
        variance: what `disagreement` gave.
        cuts: how many cuts that was averaged over, its degrees of freedom.
        level: how often the interval shall cover the truth.
    """
    own = found.error**2
    total = own + variance
    if not isfinite(total) or variance == 0 or found.n < 2:
        return found
    degrees = total**2 / (own**2 / (found.n - 1) + variance**2 / cuts)
    error = float(np.sqrt(total))
    half = float(stdtrit(degrees, (1 + level) / 2)) * error
    wider = replace(found, error=error, low=found.mean - half, high=found.mean + half)
    if isinstance(wider, Comparison):
        return replace(wider, p_value=float(2 * stdtr(degrees, -abs(found.mean) / error)))
    return wider
