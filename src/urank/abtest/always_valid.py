"""Intervals that stay valid when one looks every day and stops when one likes.

A 95 % interval misses the truth one time in twenty when one looks once. Who looks daily and stops at the first that
leaves out 0 is wrong far more often. An always-valid interval is wider, such that all looks together miss the truth
one time in twenty at most: with an estimate d of the log lift δ and its standard error s at any look,

    |d − δ| ≤ s · √((1 + s² / τ²) · log((1 + τ² / s²) / α²))

It is the normal mixture of Robbins (Annals of Mathematical Statistics 1970), the mSPRT of Johari, Koomen, Pekelis and
Walsh (Operations Research 2022), one of the confidence sequences of Howard, Ramdas, McAuliffe and Sekhon (Annals of
Statistics 2021). τ is fixed before the test and decides only where the interval is tightest: near a lift of that size.

Why it holds. Let S_t = d_t / s_t². Where new data is independent of old, S has independent increments with variance
1 / s_t², and the mixture Λ = √(s² / (s² + τ²)) · exp(d² τ² / (2 s² (s² + τ²))) is a martingale under δ = 0, which
passes 1/α with a chance of at most α (Ville). Users come back, so days are not independent, and the estimate of a ratio
is normal only in the limit. What is needed is cov(S_s, S_t) ≥ Var S_s, with equality for independent increments: the
larger the covariance, the less the path moves from look to look, and by Slepian's inequality the less often it passes
a bound on one side. The interval has two sides: the chances of both add up to at most α and the chance that a path with
independent increments passes both bounds, which is small but not 0.

- Rates per impression, users whose days are exchangeable: equality, although days are correlated, since that a user is
  rich is in s_s and s_t alike. When such users join from day to day it is more.
- Rates per user: late-comers, who had less time, add a variance of their own, and the covariance is less (3 to 27 %
  less between the days of two weeks of `simulate.visits`). There the theory does not promise α.

Few looks are safe whatever hangs together: at α = 0.05 the bound is never below 3.03 errors, so the chance that any of
20 looks passes it is 20 · 0.0024 at most. Of 60 daily looks at such users, for all three metrics, less than 2 % passed;
`benchmarks/abtest.py` measures two weeks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log1p

import numpy as np
from numpy.typing import NDArray

from urank.abtest.effects import Estimate, Floats, Moments, compare, effects, moments
from urank.abtest.exposures import Exposures
from urank.abtest.metrics import Metric, first_earned, so_far
from urank.errors import ConfigError

__all__ = [
    "ENOUGH_EARNERS",
    "ENOUGH_USERS",
    "Look",
    "Running",
    "always_p",
    "log_size",
    "looks",
    "multiplier",
    "running",
    "spread",
]

ENOUGH_USERS, ENOUGH_EARNERS = 50, 10
"""A look needs as many users in each arm, and as many of them that earned anything; before, nothing is normal yet."""

_LARGEST_LIFT = 1e3


@dataclass(frozen=True)
class Look:
    """What is known at the end of a day from all days so far.

    Attributes:
        day: its name.
        control_users, treatment_users: seen so far.
        lift: with the interval for those who look once.
        always_low, always_high: the ends of the always-valid interval of the lift.
        p_value: for those who look once.
        always_p: the always-valid p-value, the least of this look and those before.
    """

    day: str
    control_users: int
    treatment_users: int
    lift: Estimate
    always_low: float
    always_high: float
    p_value: float
    always_p: float


@dataclass(frozen=True, eq=False)
class Running:
    """All arms at the end of each day: moments of (x, y), and users that earned, each `[days, arms]`."""

    moments: Moments
    earners: Floats

    def enough(self, arm: int) -> NDArray[np.bool_]:
        """The days by whose end an arm has users enough, `[days]`."""
        return (self.moments.n[:, arm] >= ENOUGH_USERS) & (self.earners[:, arm] >= ENOUGH_EARNERS)


def multiplier(error: NDArray[np.float64], tau: float, alpha: float) -> Floats:
    """How many standard errors an always-valid interval reaches to either side: √((1 + s²/τ²) · log((1 + τ²/s²) / α²)).

    >>> multiplier(np.array([0.2, 0.05, 0.02, 0.01]), tau=0.05, alpha=0.05).round(2).tolist()  # 1.96 for one look
    [10.14, 3.66, 3.04, 3.1]
    """
    ratio = (error / tau) ** 2
    return np.asarray(np.sqrt((1 + ratio) * (np.log1p(1 / ratio) - 2 * np.log(alpha))))


def always_p(value: NDArray[np.float64], error: NDArray[np.float64], tau: float) -> Floats:
    """The always-valid p-value of each look, in their order: min over looks so far of 1 / Λ, and at most 1.

    It is below α as soon as one of the intervals leaves out 0.

    >>> always_p(np.array([0.1, 0.08, 0.09]), np.array([0.05, 0.03, 0.02]), tau=0.05).round(4).tolist()
    [0.5203, 0.1423, 0.0004]
    """
    s2, t2 = np.square(error), tau**2
    mixture = 0.5 * np.log1p(t2 / s2) - np.square(value) * t2 / (2 * s2 * (s2 + t2))
    return np.minimum.accumulate(np.exp(np.minimum(mixture, 0.0)))


def spread(expected_lift: float) -> float:
    """τ: the log of the ratio that a test is planned for.

    Raises:
        ConfigError: when it is not a lift, or none.
    """
    return log_size(expected_lift, "expected_lift", smallest=1e-12)


def log_size(lift: float, name: str, *, smallest: float = 1e-6) -> float:
    """|log(1 + lift)|, of a lift that a test can be made for.

    Raises:
        ConfigError: when it is not a lift, or none, or out of all proportion.
    """
    if not lift > -1 or lift == 0:
        raise ConfigError(f"{name} must be above −1 and not 0; got {lift}")
    if not smallest <= abs(lift) <= _LARGEST_LIFT:
        raise ConfigError(f"{name} must be from {smallest:g} to {_LARGEST_LIFT:,.0f} in size; got {lift}")
    return abs(log1p(lift))


def running(exposures: Exposures, metric: Metric) -> Running:
    """What each arm has at the end of each day, from the rows that are there."""
    now, before = so_far(exposures, metric)
    days, arms = len(exposures.days), len(exposures.arms)
    group = exposures.day * arms + exposures.arm[exposures.user]
    by_day = moments(now, group, days * arms, before).reshape(days, arms)
    earners = np.bincount(group, first_earned(exposures, metric), days * arms).reshape(days, arms).cumsum(axis=0)
    return Running(by_day.over_days(), earners)


def looks(
    found: Running,
    labels: tuple[str, ...],
    control: int,
    treatment: int,
    *,
    first: int = 0,
    last: int | None = None,
    alpha: float = 0.05,
    expected_lift: float = 0.05,
) -> list[Look]:
    """The lift at the end of each day, for those who look once and for those who look every day.

    Days by whose end an arm has fewer than 50 users, or fewer than 10 that earned anything, are left out.

    Args:
        found: all arms at the end of each day.
        labels: what the days are called.
        control, treatment: the indices of the two arms.
        first, last: the days on which to look.
        alpha: one less the level of the intervals.
        expected_lift: the lift that the test was planned for, from which τ is made.
    """
    tau = spread(expected_lift)
    a, b = found.moments[:, control], found.moments[:, treatment]
    value, error = compare(a, b, "log")
    seen = np.arange(len(labels))
    fit = found.enough(control) & found.enough(treatment) & (seen >= first) & (error > 0)
    days = seen[fit if last is None else fit & (seen <= last)]
    value, error = value[days], error[days]
    reach = multiplier(error, tau, alpha) * error
    p = always_p(value, error, tau) if len(days) else error
    with np.errstate(over="ignore"):  # of a τ far below the error, the upper end is beyond all numbers
        ends = np.expm1([value - reach, value + reach]).T.tolist()
    return [
        Look(labels[day], once.control_users, once.treatment_users, once.lift, low, high, once.p_value, always)
        for day, once, (low, high), always in zip(
            days.tolist(), effects(a[days], b[days], alpha=alpha), ends, p.tolist(), strict=True
        )
    ]
