"""Sample size and duration of an A/B test: users and days needed to find a lift, or the lift found with these.

A lift L = |log(1 + lift)| is found with the wanted power if the standard error s of the log lift is small enough:

    one look:     L / s = z_{1−α/2} + z_power
    daily looks:  L / s = √((1 + s²/τ²) · log((1 + τ²/s²) / α²)) + z_power

The second uses the bound of `always_valid`; an earlier look may find the lift too, so the actual power is higher. With
n users in each arm, s² = 2 v / n, where v is the variance between users of the linearised rate, relative to the squared
rate.

A log provides the number of users U_t seen by the end of day t, and their variance v_t. If a share w of them is in the
test, half in either arm, s_t² = 4 v_t / (w U_t). Users return, so this falls more slowly than 1/t. Beyond the end T of
the log both are extrapolated by powers, fitted on the second half of its days:

    U_t = U_T · (t / T)^a,      v_t / U_t = (v_T / U_T) · (t / T)^−b      with a and b from 0 to 1
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil, isnan, nan, sqrt
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtri

from urank.abtest.always_valid import ENOUGH_EARNERS, ENOUGH_USERS, log_lift, multiplier, running_totals
from urank.abtest.analysis import percent
from urank.abtest.effects import Floats, check_alpha, critical_value, rates, relative_variance
from urank.abtest.exposures import EVERYONE, MOST_DAYS, Exposures
from urank.abtest.metrics import METRICS, Metric, metric_named
from urank.config import to_jsonable
from urank.errors import ConfigError, DataError

EXPECTED_LIFT = 0.05
MOST_USERS = 10**12
"""In an arm, or new on a day."""

_MEANS = (1e-12, 1e12)
_DEVIATIONS = (1e-6, 1e6)  # relative to the mean
_LARGEST_SHOWN = 10**18


@dataclass(frozen=True, eq=False)
class Growth:
    """U_t and v_t by the end of each day, `[days]`, with the powers a and b; v_t is NaN while users are too few."""

    users: Floats
    variance: Floats
    users_power: float = 1.0
    error_power: float = 1.0

    def at(self, day: int) -> tuple[float, float]:
        """Return U_t and v_t of a day, starting at 1.

        >>> Growth(np.array([100.0, 150.0]), np.array([9.0, 9.0]), users_power=0.5).at(8)  # 9 / 150 / 4 · 300
        (300.0, 4.5)
        """
        T = len(self.users)
        if day <= T:
            return float(self.users[day - 1]), float(self.variance[day - 1])
        users = float(self.users[-1]) * (day / T) ** self.users_power
        error = float(self.variance[-1] / self.users[-1]) * (day / T) ** -self.error_power
        return users, error * users

    def first_day(self, reached: Callable[[float, float], bool]) -> int | None:
        """Return the first day whose U_t and v_t satisfy a condition; None if that takes more than ten years.

        Beyond the log this is a bisection, so the condition must be monotone there.
        """
        T = len(self.users)
        for day in range(1, T + 1):
            if reached(*self.at(day)):
                return day
        beyond = range(T + 1, MOST_DAYS + 1)
        place = bisect_left(beyond, True, key=lambda day: reached(*self.at(day)))
        return beyond[place] if place < len(beyond) else None


def growth_of(exposures: Exposures, metric: Metric) -> tuple[Growth, float]:
    """Return the growth of a log with all arms pooled, and the overall rate of the metric."""
    totals = running_totals(replace(exposures, arms=(EVERYONE,), arm=np.zeros_like(exposures.arm)), metric)
    everyone, enough = totals.moments[:, 0], totals.enough(0)
    if not enough[-1]:
        raise DataError(
            f"{exposures.name} must have at least {ENOUGH_USERS} users, {ENOUGH_EARNERS} of them with any "
            f"{metric.numerator}; it has {int(everyone.n[-1]):,} and {int(totals.earners[-1, 0]):,}"
        )
    variance = relative_variance(everyone)
    if not variance[-1] > 0:
        raise DataError(f"all users of {exposures.name} have the same {metric.title}, so no test of it can be planned")
    known = enough & (variance > 0)
    variance = np.where(known, variance, np.nan)
    powers = _power(everyone.n, known), -_power(variance / everyone.n, known)
    growth = Growth(everyone.n, variance, *(float(np.clip(power, 0, 1)) for power in powers))
    return growth, float(rates(everyone)[-1])


def _power(values: Floats, known: NDArray[np.bool_]) -> float:
    """Return the slope of log values over log days, on the second half of the days; 0 for a single day."""
    day = np.arange(1, len(values) + 1)
    used = known & (day >= len(values) // 2)
    if used.sum() < 2:
        return 0.0
    x, y = np.log(day[used]), np.log(values[used])
    return float(((x - x.mean()) * y).sum() / ((x - x.mean()) ** 2).sum())


def error_needed(lift: float, *, power: float = 0.8, alpha: float = 0.05, tau: float | None = None) -> float:
    """Return the standard error of the log lift with which a lift is found; with τ, by an always-valid interval.

    >>> once, daily = error_needed(0.05), error_needed(0.05, tau=0.0488)
    >>> round(once, 4), round(daily, 4)
    (0.0174, 0.0125)
    """
    distance = log_lift(lift, "lift")
    _check_power(power, alpha)
    largest = distance / (critical_value(alpha) + float(ndtri(power)))
    if tau is None:
        return largest

    def beyond(s: float) -> float:
        return _log_lift_found(s, power, alpha, tau) - distance

    # The bound for daily looks exceeds that for one look, so the error is smaller; and L tends to 0 with it.
    s = largest
    while beyond(s) > 0:
        s /= 2
    return s if s == largest else float(brentq(beyond, s, 2 * s, xtol=1e-12 * s))


def lift_found(error: float, *, power: float = 0.8, alpha: float = 0.05, tau: float | None = None) -> float:
    """Return the lift that is found if the log lift has this standard error.

    >>> round(lift_found(0.0174), 3)
    0.05
    """
    with np.errstate(over="ignore"):  # infinite if τ is far below the error
        return float(np.expm1(_log_lift_found(error, power, alpha, tau)))


def _log_lift_found(error: float, power: float, alpha: float, tau: float | None) -> float:
    """L = s · (bound + z_power)."""
    bound = critical_value(alpha) if tau is None else float(multiplier(np.array(error), tau, alpha))
    return error * (bound + float(ndtri(power)))


@dataclass(frozen=True)
class Horizon:
    """The lift that a test finds with so many users in each arm, and its duration.

    `days` is None if it is unknown or more than ten years; `extrapolated` if it exceeds the days of the log.
    """

    lift: float
    users: int
    days: int | None
    extrapolated: bool


@dataclass(frozen=True)
class Plan:
    """The plan of a test: its arguments (see `plan`), and what it finds."""

    title: str  # title, rate: of the metric, at present
    rate: float
    relative_variance: float  # v; that of the whole log if there is one
    power: float
    alpha: float
    share: float
    expected_lift: float
    once: Horizon  # for a single look at the end
    daily: Horizon  # for daily looks, stopping when the lift is found

    @property
    def sentence(self) -> str:
        """The plan in words."""
        clauses = []
        for when, found in (("with one look", self.once), ("with daily looks", self.daily)):
            clause = f"{when}, a lift of {percent(found.lift)} takes {found.users:,} users in each arm"
            if found.days is not None:
                extrapolated = " (extrapolated)" if found.extrapolated else ""
                clause += f", {found.days:,} day{'' if found.days == 1 else 's'}{extrapolated}"
            clauses.append(clause)
        return f"To be found in {self.title} with a power of {100 * self.power:g} %: {'; '.join(clauses)}."

    def to_frame(self) -> pl.DataFrame:
        """Return a row for one look and one for daily looks."""
        return pl.DataFrame([{"looks": looks, **asdict(getattr(self, looks))} for looks in ("once", "daily")])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return dict(to_jsonable(asdict(self) | {"sentence": self.sentence}))


def plan(
    exposures: Exposures | None = None,
    *,
    lift: float | None = None,
    users: int | None = None,
    days: int | None = None,
    metric: str = "ctr",
    mean: float | None = None,
    variance: float | None = None,
    daily_users: float | None = None,
    share: float = 1.0,
    power: float = 0.8,
    alpha: float = 0.05,
    expected_lift: float | None = None,
) -> Plan:
    """Plan a test from an earlier log, or from a mean and a variance, given one of `lift`, `users` and `days`.

    Args:
        exposures: an earlier log, read with `arms=False` if it has no arms.
        lift: to be found.
        users: in each arm.
        days: duration of the test. Whole weeks are better than parts of them.
        metric: the name of a metric that the log supports.
        mean, variance: without a log: the mean of the metric per user, and its variance between users.
        daily_users: without a log: all users who come for the first time on a day, to compute the days.
        share: of all users, in both arms together.
        power: probability of finding the lift.
        alpha: probability of finding a lift where there is none.
        expected_lift: for which always-valid intervals are tightest; by default the lift if it is given, else 5 %.

    >>> found = plan(lift=0.1, mean=0.5, variance=1.0, daily_users=1000)
    >>> found.once  # n = 2 · (1 / 0.5²) · (1.96 + 0.84)² / log(1.1)²
    Horizon(lift=0.1, users=6913, days=14, extrapolated=False)
    >>> plan(users=6913, mean=0.5, variance=1.0).once.lift
    0.0999...
    """
    _check(lift, users, days, share, power, alpha)
    expected = expected_lift if expected_lift is not None else lift if lift is not None else EXPECTED_LIFT
    if exposures is not None:
        if mean is not None or variance is not None or daily_users is not None:
            raise ConfigError("mean, variance and daily_users come from the log; got one of them besides it")
        chosen = metric_named(metric, exposures)
        title = chosen.title
        growth: Growth | None
        growth, rate = growth_of(exposures, chosen)
        v = float(growth.variance[-1])
    else:
        titles = {each.name: each.title for each in METRICS}
        if metric not in titles:
            raise ConfigError(f"metric must be one of {', '.join(titles)}; got '{metric}'")
        if mean is None or variance is None:
            raise ConfigError("plan needs a log, or mean and variance; got neither")
        if not mean > 0 or not variance > 0:
            raise ConfigError(f"mean and variance must be above 0; got {mean} and {variance}")
        check_numbers(mean, sqrt(variance), daily_users, ("mean", "the root of variance", "daily_users"))
        title, rate, v = titles[metric], mean, variance / mean**2
        growth = None if daily_users is None else Growth(np.array([float(daily_users)]), np.array([v]))
    if days is not None:
        if growth is None:
            raise ConfigError("days needs a log, or daily_users, to know how many users come; got neither")
        if isnan(growth.at(days)[1]):
            first = growth.first_day(lambda seen, v: v > 0)
            raise DataError(
                f"days must be at least {first}, by whose end the log has {ENOUGH_USERS} users that differ, "
                f"{ENOUGH_EARNERS} of them with any {title.split()[0]}; got {days}"
            )

    def horizon(tau: float | None) -> Horizon:
        needed = nan if lift is None else error_needed(lift, power=power, alpha=alpha, tau=tau) ** 2
        day = days
        if growth is not None and lift is not None:
            day = growth.first_day(lambda seen, v: 4 * v / (share * seen) <= needed * (1 + 1e-9))
        elif growth is not None and users is not None:
            day = growth.first_day(lambda seen, v: share * seen / 2 >= users and v > 0)
        seen, v_then = (nan, v) if growth is None or day is None else growth.at(day)
        if lift is not None:
            found, n = lift, max(1, ceil(2 * v_then / needed - 1e-9))
        else:
            n = users if users is not None else int(share * seen / 2)
            squared_error = 2 * v_then / users if users is not None else 4 * v_then / (share * seen)
            found = lift_found(sqrt(squared_error), power=power, alpha=alpha, tau=tau)
        beyond = exposures is not None and growth is not None and (day is None or day > len(growth.users))
        return Horizon(found, n, day, beyond)

    daily = log_lift(expected, "expected_lift")
    return Plan(title, rate, v, power, alpha, share, expected, once=horizon(None), daily=horizon(daily))


def check_numbers(mean: float, deviation: float, daily_users: float | None, names: tuple[str, str, str]) -> None:
    """Validate the numbers of a plan without a log; `names` are those that the caller has for them."""
    if not _MEANS[0] <= mean <= _MEANS[1]:
        raise ConfigError(f"{names[0]} must be from {_MEANS[0]:g} to {_MEANS[1]:g}; got {mean}")
    if not _DEVIATIONS[0] <= deviation / mean <= _DEVIATIONS[1]:
        raise ConfigError(
            f"{names[1]} must be from {_DEVIATIONS[0]:g} to {_DEVIATIONS[1]:g} times {names[0]}, which is {mean:g}; "
            f"got {deviation:g}"
        )
    if daily_users is not None and not 0 < daily_users <= MOST_USERS:
        raise ConfigError(f"{names[2]} must be above 0 and at most {MOST_USERS:,}; got {_shown(daily_users)}")


def _check(lift: float | None, users: int | None, days: int | None, share: float, power: float, alpha: float) -> None:
    check_alpha(alpha)
    if sum(wanted is not None for wanted in (lift, users, days)) != 1:
        got = ["None" if each is None else _shown(each) for each in (lift, users, days)]
        raise ConfigError(f"give one of lift, users per arm and days; got {got[0]}, {got[1]} and {got[2]}")
    if lift is not None:
        log_lift(lift, "lift")
    for name, number, most in (("users", users, MOST_USERS), ("days", days, MOST_DAYS)):
        if number is not None and not 1 <= number <= most:
            raise ConfigError(f"{name} must be a whole number from 1 to {most:,}; got {_shown(number)}")
    if not 0 < share <= 1:
        raise ConfigError(f"share must be above 0 and at most 1; got {share}")
    _check_power(power, alpha)


def _check_power(power: float, alpha: float) -> None:
    if not 0 < power < 1:
        raise ConfigError(f"power must be between 0 and 1; got {power}")
    if power <= alpha:
        raise ConfigError(f"power must be above alpha, which is {alpha}; got {power}")


def _shown(number: float) -> str:
    """Format a number for an error message, also if it has thousands of digits."""
    huge = isinstance(number, int) and abs(number) > _LARGEST_SHOWN
    return f"one beyond {_LARGEST_SHOWN:g}" if huge else str(number)
