"""How users and errors grow from day to day, as a log shows it, and how they go on after its last day.

U_t users were seen by the end of day t, and v_t is their relative variance (`estimate.relative_variance`). Beyond the
last day T both go on as a power of t:

    U_t = U_T (t / T)^a,      v_t / U_t = (v_T / U_T) (t / T)^(−b)

with a and b by least squares on the logs of the second half of the days, held between 0 and 1. Who comes back is no new
user, so true curves bend a little more: far beyond the log, take the days for the fewest that it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from urank.abtest.days import MOST_DAYS
from urank.abtest.estimate import rates, relative_variance
from urank.abtest.exposures import EVERYONE, Exposures
from urank.abtest.metrics import Metric
from urank.abtest.moments import Floats
from urank.abtest.sequential import ENOUGH_EARNERS, ENOUGH_USERS, running
from urank.errors import DataError

__all__ = ["Growth", "growth_of"]


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
