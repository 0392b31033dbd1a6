"""How many users, and how many days, a test needs for a lift to be found; or which lift is found with so many.

A lift L = |log(1 + lift)| is found with the wanted power when the error s of the log lift is small enough:

    looking once:       L / s = z_{1−α/2} + z_power
    looking every day:  L / s = √((1 + s²/τ²) · log((1 + τ²/s²) / α²)) + z_power

the second with the bound of `sequential`; an earlier look may find the lift too, so its power is rather higher. With n
users in each arm, s² = 2 v / n, where v is the variance of a user's part in the rate, measured by the squared rate.

A log tells how many users U_t are seen by the end of day t, and their variance v_t (`growth`). When a share w of them
is in the test, half in either arm, s_t² = 4 v_t / (w U_t). Users come back, so this falls more slowly than 1/t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil, isnan, sqrt
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri

from urank.abtest.always_valid import ENOUGH_EARNERS, ENOUGH_USERS, log_size, multiplier, running
from urank.abtest.analysis import percent
from urank.abtest.effects import Floats, check_alpha, critical, rates, relative_variance
from urank.abtest.exposures import EVERYONE, MOST_DAYS, Exposures
from urank.abtest.metrics import METRICS, Metric, metric_named
from urank.config import to_jsonable
from urank.errors import ConfigError, DataError

__all__ = [
    "MOST_USERS",
    "Growth",
    "Horizon",
    "Plan",
    "check_numbers",
    "error_needed",
    "growth_of",
    "lift_found",
    "plan",
]


@dataclass(frozen=True, eq=False)
class Growth:
    """Users and their relative variance by the end of each day.

    Attributes:
        users, variance: `[days]`, U_t and v_t; NaN as long as nothing can be said.
        users_power: a.
        error_power: b.
    """

    users: Floats
    variance: Floats
    users_power: float = 1.0
    error_power: float = 1.0

    def at(self, day: int) -> tuple[float, float]:
        """U_t and v_t of a day from 1 on.

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
        """The first day whose U_t and v_t are enough; none within ten years.

        Beyond the log it is found by halves, so `reached` must stay true there once it is; in the log, later days are
        not looked at.
        """
        T = len(self.users)
        for day in range(1, T + 1):
            if reached(*self.at(day)):
                return day
        if not reached(*self.at(MOST_DAYS)):
            return None
        short, enough = T, MOST_DAYS
        while enough - short > 1:
            middle = (short + enough) // 2
            short, enough = (short, middle) if reached(*self.at(middle)) else (middle, enough)
        return enough


def growth_of(exposures: Exposures, metric: Metric) -> tuple[Growth, float]:
    """The curves of a log, all arms in one, and the rate of the metric over all of it.

    Raises:
        DataError: when it has too few users, nobody earned anything, or all have the same.
    """
    pooled = replace(exposures, arms=(EVERYONE,), arm=np.zeros_like(exposures.arm))
    found = running(pooled, metric)
    everyone = found.moments[:, 0]
    enough = found.enough(0)
    if not enough[-1]:
        raise DataError(
            f"{exposures.name} must have {ENOUGH_USERS} users at least, {ENOUGH_EARNERS} of them with any "
            f"{metric.numerator}; it has {int(everyone.n[-1]):,} and {int(found.earners[-1, 0]):,}"
        )
    variance = relative_variance(everyone)
    if not variance[-1] > 0:
        raise DataError(f"all users of {exposures.name} have the same {metric.title}, so no test of it can be planned")
    known = enough & (variance > 0)
    variance = np.where(known, variance, np.nan)
    powers = _power(everyone.n, known), -_power(variance / everyone.n, known)
    curve = Growth(everyone.n, variance, *(float(np.clip(power, 0, 1)) for power in powers))
    return curve, float(rates(everyone)[-1])


def _power(values: Floats, known: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    """The slope of the log of values over the log of the day, on the second half of the days; 0 for a single day."""
    day = np.arange(1, len(values) + 1)
    used = known & (day >= len(values) // 2)
    if used.sum() < 2:
        return 0.0
    x, y = np.log(day[used]), np.log(values[used])
    return float(((x - x.mean()) * y).sum() / ((x - x.mean()) ** 2).sum())


EXPECTED_LIFT = 0.05
MOST_USERS = 10**12
"""In an arm, or new ones on a day."""

_SMALLEST, _LARGEST = 1e-12, 1e12  # of a mean
_LEAST_RATIO, _MOST_RATIO = 1e-6, 1e6  # of a deviation to its mean
_SHOWN = 10**18


@dataclass(frozen=True)
class Horizon:
    """What a test can find.

    Attributes:
        lift: that is found with the wanted power.
        users: in each arm.
        days: how long that takes; none when that is not known, or is more than ten years.
        extrapolated: whether it takes longer than the log is.
    """

    lift: float
    users: int
    days: int | None
    extrapolated: bool


@dataclass(frozen=True)
class Plan:
    """A test to be made.

    Attributes:
        title: of the metric.
        rate: of the metric today.
        relative_variance: v; that of the whole log, if there is one.
        power: the chance to find the lift.
        alpha: the chance to find one where there is none.
        share: of all users, in both arms together.
        expected_lift: what the always-valid interval is made for.
        once: for those who look once, at the end.
        daily: for those who look every day and stop when the lift is found.
    """

    title: str
    rate: float
    relative_variance: float
    power: float
    alpha: float
    share: float
    expected_lift: float
    once: Horizon
    daily: Horizon

    @property
    def sentence(self) -> str:
        """The plan in words."""
        told = [
            f"{when}, a lift of {percent(found.lift)} takes {found.users:,} users in each arm{_in_days(found)}"
            for when, found in (("looking once", self.once), ("looking every day", self.daily))
        ]
        return f"To be found in {self.title} with a power of {100 * self.power:g} %: {'; '.join(told)}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        as_json: dict[str, Any] = to_jsonable(asdict(self) | {"sentence": self.sentence})
        return as_json


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
    """Plan a test from an earlier log, or from two numbers; one of `lift`, `users` and `days` tells the others.

    Args:
        exposures: an earlier log, read with `arms=False` when it has no arms.
        lift: that is to be found.
        users: in each arm.
        days: that the test may take. Whole weeks are better than parts of them.
        metric: by its name, of those that the log can tell.
        mean, variance: without a log: the mean of the metric per user, and its variance among users.
        daily_users: without a log: users that come for the first time on a day, all of them, to tell the days.
        share: of all users, in both arms together.
        power: the chance to find the lift.
        alpha: the chance to find one where there is none.
        expected_lift: what always-valid intervals are made for; the lift when that is given, else 5 %.

    Raises:
        ConfigError: when an argument is missing, superfluous or not a number of its kind.
        DataError: when the log has too few users, at all or by the end of `days`, or all have the same.

    >>> found = plan(lift=0.1, mean=0.5, variance=1.0, daily_users=1000)
    >>> found.once  # n = 2 · (1 / 0.5²) · (1.96 + 0.84)² / log(1.1)²
    Horizon(lift=0.1, users=6913, days=14, extrapolated=False)
    >>> plan(users=6913, mean=0.5, variance=1.0).once.lift
    0.0999...
    """
    _check(lift, users, days, share, power, alpha)
    expected = expected_lift if expected_lift is not None else lift if lift is not None else EXPECTED_LIFT
    growth, rate, title = _known(exposures, metric, mean, variance, daily_users)
    if days is not None and growth is None:
        raise ConfigError("days needs a log, or daily_users, to tell how many users come; got neither")
    v = float(growth.variance[-1]) if growth is not None else variance / mean**2  # type: ignore[operator]
    if days is not None and growth is not None and isnan(growth.at(days)[1]):
        first = growth.first_day(lambda seen, v: v > 0)
        raise DataError(
            f"days must be {first} at least, by whose end the log has {ENOUGH_USERS} users that differ, "
            f"{ENOUGH_EARNERS} of them with any {title.split()[0]}; got {days}"
        )
    found = []
    for tau in (None, log_size(expected, "expected_lift")):
        judge = _Judge(growth, v, share, power, alpha, tau, exposures is not None)
        if lift is not None:
            found.append(judge.by_lift(lift))
        else:
            found.append(judge.by_users(users) if users is not None else judge.by_days(days or 1))
    return Plan(title, rate, v, power, alpha, share, expected, *found)


def error_needed(lift: float, *, power: float = 0.8, alpha: float = 0.05, tau: float | None = None) -> float:
    """The error s of the log lift with which a lift is found; by an always-valid interval when τ is given.

    >>> once, daily = error_needed(0.05), error_needed(0.05, tau=0.0488)
    >>> round(once, 4), round(daily, 4)
    (0.0174, 0.0125)
    """
    distance = log_size(lift, "lift")
    _check_power(power, alpha)
    largest = distance / (critical(alpha) + float(ndtri(power)))
    if tau is None:
        return largest

    def beyond(s: float) -> float:
        return _distance(s, power, alpha, tau) - distance

    # The bound for daily looks is above that for one look, so the error is smaller; and L goes to 0 with it.
    s = largest
    while beyond(s) > 0:
        s /= 2
    return s if s == largest else float(brentq(beyond, s, 2 * s, xtol=1e-12 * s))


def lift_found(error: float, *, power: float = 0.8, alpha: float = 0.05, tau: float | None = None) -> float:
    """The lift that is found when the log lift has this error.

    >>> round(lift_found(0.0174), 3)
    0.05
    """
    with np.errstate(over="ignore"):  # of a τ far below the error, it is beyond all numbers
        return float(np.expm1(_distance(error, power, alpha, tau)))


def _distance(error: float, power: float, alpha: float, tau: float | None) -> float:
    """L = s · (bound + z_power)."""
    bound = critical(alpha) if tau is None else float(multiplier(np.array(error), tau, alpha))
    return error * (bound + float(ndtri(power)))


@dataclass(frozen=True, eq=False)
class _Judge:
    """Lifts, users and days, for one way to look."""

    growth: Growth | None
    variance: float
    share: float
    power: float
    alpha: float
    tau: float | None
    logged: bool

    def by_lift(self, lift: float) -> Horizon:
        needed = error_needed(lift, power=self.power, alpha=self.alpha, tau=self.tau) ** 2
        v, day = self.variance, None
        if self.growth is not None:
            day = self.growth.first_day(lambda seen, v: 4 * v / (self.share * seen) <= needed * (1 + 1e-9))
            v = v if day is None else self.growth.at(day)[1]
        return self._horizon(lift, max(1, ceil(2 * v / needed - 1e-9)), day)

    def by_users(self, users: int) -> Horizon:
        v, day = self.variance, None
        if self.growth is not None:
            day = self.growth.first_day(lambda seen, v: self.share * seen / 2 >= users and v > 0)
            v = v if day is None else self.growth.at(day)[1]
        return self._horizon(self._lift(2 * v / users), users, day)

    def by_days(self, days: int) -> Horizon:
        assert self.growth is not None  # noqa: S101 - it was asked for
        seen, v = self.growth.at(days)
        return self._horizon(self._lift(4 * v / (self.share * seen)), int(self.share * seen / 2), days)

    def _lift(self, squared_error: float) -> float:
        return lift_found(sqrt(squared_error), power=self.power, alpha=self.alpha, tau=self.tau)

    def _horizon(self, lift: float, users: int, day: int | None) -> Horizon:
        beyond = self.logged and self.growth is not None and (day is None or day > len(self.growth.users))
        return Horizon(lift, users, day, beyond)


def _known(
    exposures: Exposures | None, metric: str, mean: float | None, variance: float | None, daily_users: float | None
) -> tuple[Growth | None, float, str]:
    """How users grow, if that can be told, the rate of the metric, and its title."""
    if exposures is not None:
        if mean is not None or variance is not None or daily_users is not None:
            raise ConfigError("a log tells mean, variance and daily_users itself; got one of them besides it")
        chosen = metric_named(metric, exposures)
        return *growth_of(exposures, chosen), chosen.title
    titles = {each.name: each.title for each in METRICS}
    if metric not in titles:
        raise ConfigError(f"metric must be one of {', '.join(titles)}; got '{metric}'")
    if mean is None or variance is None:
        raise ConfigError("plan needs a log, or mean and variance; got neither")
    if not mean > 0 or not variance > 0:
        raise ConfigError(f"mean and variance must be above 0; got {mean} and {variance}")
    check_numbers(mean, sqrt(variance), daily_users, ("mean", "the root of variance", "daily_users"))
    if daily_users is None:
        return None, mean, titles[metric]
    return Growth(np.array([float(daily_users)]), np.array([variance / mean**2])), mean, titles[metric]


def check_numbers(mean: float, deviation: float, daily_users: float | None, names: tuple[str, str, str]) -> None:
    """Refuse numbers of a plan without a log that are out of all proportion, by the names that the caller has for them.

    Raises:
        ConfigError: with the name of the number.
    """
    if not _SMALLEST <= mean <= _LARGEST:
        raise ConfigError(f"{names[0]} must be from {_SMALLEST:g} to {_LARGEST:g}; got {mean}")
    if not _LEAST_RATIO <= deviation / mean <= _MOST_RATIO:
        raise ConfigError(
            f"{names[1]} must be from {_LEAST_RATIO:g} to {_MOST_RATIO:g} times {names[0]}, which is {mean:g}; "
            f"got {deviation:g}"
        )
    if daily_users is not None and not 0 < daily_users <= MOST_USERS:
        raise ConfigError(f"{names[2]} must be above 0 and at most {MOST_USERS:,}; got {_shown(daily_users)}")


def _check(lift: float | None, users: int | None, days: int | None, share: float, power: float, alpha: float) -> None:
    check_alpha(alpha)
    if sum(wanted is not None for wanted in (lift, users, days)) != 1:
        got = ", ".join("None" if each is None else _shown(each) for each in (lift, users))
        raise ConfigError(
            f"one of lift, users and days must be given; got {got} and {'None' if days is None else _shown(days)}"
        )
    if lift is not None:
        log_size(lift, "lift")
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
    """A number in a sentence, in which one of a thousand digits has no place."""
    return str(number) if isinstance(number, float) or abs(number) <= _SHOWN else f"one beyond {_SHOWN:g}"


def _in_days(found: Horizon) -> str:
    if found.days is None:
        return ""
    return f", {found.days:,} day{'' if found.days == 1 else 's'}{' (extrapolated)' if found.extrapolated else ''}"
