"""Confidence intervals that remain valid under daily monitoring and optional stopping.

A 95 % interval misses the truth in one test of twenty if it is computed once. Stopping at the first daily interval that
excludes 0 is wrong far more often. An always-valid interval is wider, so that all looks together miss the truth in at
most one test of twenty: with an estimate d of the log lift δ and its standard error s at any look,

    |d − δ| ≤ s · √((1 + s² / τ²) · log((1 + τ² / s²) / α²))

This is the normal mixture of Robbins (Annals of Mathematical Statistics 1970), the mSPRT of Johari, Koomen, Pekelis and
Walsh (Operations Research 2022), one of the confidence sequences of Howard, Ramdas, McAuliffe and Sekhon (Annals of
Statistics 2021). τ is fixed before the test and only decides where the interval is tightest: near a lift of that size.

Why it holds. Let S_t = d_t / s_t². If new data is independent of old, S has independent increments with variance
1 / s_t², and the mixture Λ = √(s² / (s² + τ²)) · exp(d² τ² / (2 s² (s² + τ²))) is a martingale under δ = 0, which
exceeds 1/α with probability at most α (Ville). Users return, so days are not independent, and the estimate of a ratio
is normal only asymptotically. The requirement is cov(S_s, S_t) ≥ Var S_s, with equality for independent increments: the
larger the covariance, the less the path moves between looks, and by Slepian's inequality the less often it crosses a
one-sided bound. The interval has two sides: the two probabilities add up to at most α plus the probability that a path
with independent increments crosses both bounds, which is small but not 0.

- Rates per impression, users with exchangeable days: equality, although days are correlated, since the differences
  between users enter s_s and s_t alike. If such users join from day to day, the covariance is larger.
- Rates per user: late-comers, who had less time, add variance of their own, and the covariance is smaller (by 3 to
  27 % between the days of two weeks of `benchmarks.ab_visits`). The theory does not guarantee α there.

A few looks are safe under any dependence: at α = 0.05 the bound is never below 3.03 standard errors, so the probability
that any of 20 looks exceeds it is at most 20 · 0.0024. In 60 daily looks at such users, for all three metrics, less
than 2 % exceeded it; `benchmarks/abtest.py` measures two weeks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log1p

import numpy as np
from numpy.typing import NDArray

from urank.abtest.effects import Estimate, Floats, Moments, compare, effects, moments
from urank.abtest.exposures import Exposures
from urank.abtest.metrics import Metric, cumulative, first_earned
from urank.errors import ConfigError

ENOUGH_USERS, ENOUGH_EARNERS = 50, 10
"""Users, and users with a positive numerator, that each arm needs before estimates are approximately normal."""

_LARGEST_LIFT = 1e3


@dataclass(frozen=True)
class Look:
    """The estimate at the end of a day from all days so far.

    `lift` and `p_value` are for a single look; `always_p` is the minimum over this and all earlier looks.
    """

    day: str
    control_users: int
    treatment_users: int
    lift: Estimate
    always_low: float
    always_high: float
    p_value: float
    always_p: float


def multiplier(error: NDArray[np.float64], tau: float, alpha: float) -> Floats:
    """Return the half-width of an always-valid interval in standard errors, √((1 + s²/τ²) · log((1 + τ²/s²) / α²)).

    >>> multiplier(np.array([0.2, 0.05, 0.02, 0.01]), tau=0.05, alpha=0.05).round(2).tolist()  # 1.96 for one look
    [10.14, 3.66, 3.04, 3.1]
    """
    ratio = (error / tau) ** 2
    return np.asarray(np.sqrt((1 + ratio) * (np.log1p(1 / ratio) - 2 * np.log(alpha))))


def always_p(value: NDArray[np.float64], error: NDArray[np.float64], tau: float) -> Floats:
    """Return the always-valid p-value of each look: the minimum of 1 and of 1 / Λ over the looks so far.

    It is below α as soon as one of the intervals excludes 0.

    >>> always_p(np.array([0.1, 0.08, 0.09]), np.array([0.05, 0.03, 0.02]), tau=0.05).round(4).tolist()
    [0.5203, 0.1423, 0.0004]
    """
    s2, t2 = np.square(error), tau**2
    mixture = 0.5 * np.log1p(t2 / s2) - np.square(value) * t2 / (2 * s2 * (s2 + t2))
    return np.minimum.accumulate(np.exp(np.minimum(mixture, 0.0)))


def log_lift(lift: float, name: str, *, smallest: float = 1e-6) -> float:
    """Return |log(1 + lift)|; for the expected lift of a test, this is τ."""
    if not lift > -1 or lift == 0:
        raise ConfigError(f"{name} must be above −1 and not 0; got {lift}")
    if not smallest <= abs(lift) <= _LARGEST_LIFT:
        raise ConfigError(f"{name} must be from {smallest:g} to {_LARGEST_LIFT:,.0f} in size; got {lift}")
    return abs(log1p(lift))


def mixture_tau(expected_lift: float) -> float:
    """Return τ for the lift that a test was planned for."""
    return log_lift(expected_lift, "expected_lift", smallest=1e-12)


@dataclass(frozen=True, eq=False)
class RunningTotals:
    """All arms at the end of each day: moments of (x, y) and users with a positive x, each `[days, arms]`."""

    moments: Moments
    earners: Floats

    def enough(self, arm: int) -> NDArray[np.bool_]:
        """Return a mask `[days]` of the days by whose end an arm has enough users."""
        return (self.moments.n[:, arm] >= ENOUGH_USERS) & (self.earners[:, arm] >= ENOUGH_EARNERS)


def running_totals(exposures: Exposures, metric: Metric) -> RunningTotals:
    """Accumulate the moments of each arm day by day."""
    now, before = cumulative(exposures, metric)
    days, arms = len(exposures.days), len(exposures.arms)
    group = exposures.day * arms + exposures.arm[exposures.user]
    changes = moments(now, group, days * arms, before).reshape(days, arms)
    earners = np.bincount(group, first_earned(exposures, metric), days * arms).reshape(days, arms).cumsum(axis=0)
    return RunningTotals(changes.cumsum(), earners)


def looks(
    totals: RunningTotals,
    labels: tuple[str, ...],
    control: int,
    treatment: int,
    *,
    first: int = 0,
    last: int | None = None,
    alpha: float = 0.05,
    expected_lift: float = 0.05,
) -> list[Look]:
    """Estimate the lift at the end of each day, with the interval for a single look and the always-valid one.

    Days by whose end an arm has fewer than 50 users, or fewer than 10 with a positive numerator, are omitted.

    Args:
        totals, labels: all arms at the end of each day, and the labels of the days.
        control, treatment, first, last: indices of the two arms, and of the days, both included.
        alpha: 1 − level of the intervals.
        expected_lift: the lift that the test was planned for, which determines τ.
    """
    tau = mixture_tau(expected_lift)
    a, b = totals.moments[:, control], totals.moments[:, treatment]
    value, error = compare(a, b, "log")
    day = np.arange(len(labels))
    in_range = (day >= first) & (day <= (len(labels) if last is None else last))
    days = day[totals.enough(control) & totals.enough(treatment) & in_range & (error > 0)]
    value, error = value[days], error[days]
    reach = multiplier(error, tau, alpha) * error
    p = always_p(value, error, tau) if len(days) else error
    with np.errstate(over="ignore"):  # the upper end may overflow if τ is far below the error
        ends = np.expm1([value - reach, value + reach]).T.tolist()
    return [
        Look(labels[day], once.control_users, once.treatment_users, once.lift, low, high, once.p_value, always)
        for day, once, (low, high), always in zip(
            days.tolist(), effects(a[days], b[days], alpha=alpha), ends, p.tolist(), strict=True
        )
    ]
