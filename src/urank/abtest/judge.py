"""One metric of an A/B test: its effect, with and without the time before, day by day, and how far to trust it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from urank.abtest.checks import SplitCheck, split_check
from urank.abtest.estimate import Effect, bootstrap_lift, compare, effect, effects, relative_variance
from urank.abtest.exposures import Exposures
from urank.abtest.metrics import Metric, by_row, by_user
from urank.abtest.moments import Floats, Moments, moments
from urank.abtest.results import ArmTotals, Cuped, DayEffect, Result
from urank.abtest.sequential import ENOUGH_EARNERS, ENOUGH_USERS, Look, looks, running
from urank.evaluate.stats import holm

__all__ = ["Design", "IntervalKind", "Judged", "covariates"]

IntervalKind = Literal["delta", "bootstrap"]


def covariates(before: Exposures, metric: Metric) -> Floats:
    """What each user did before the test, `[users, 2]`: x − R y with the rate R of all users, and whether it was seen.

    Users that were not seen have (0, 0): the first says nothing of them, and the second tells them apart.
    """
    columns = by_user(before, metric)
    x, y = columns.sum(axis=0)
    off = columns[:, 0] - (x / y if y else 0.0) * columns[:, 1]
    return np.stack([off, columns[:, 1] > 0], axis=1)


@dataclass(frozen=True)
class Design:
    """What a test is made of: its log, its arms with the control first, its first and last day."""

    exposures: Exposures
    names: list[str]
    first: int
    last: int
    alpha: float
    expected_lift: float

    @cached_property
    def arms(self) -> list[int]:
        return [self.exposures.arms.index(name) for name in self.names]

    @cached_property
    def log(self) -> Exposures:
        """The users of these arms."""
        return self.exposures.of_arms(self.arms)

    @cached_property
    def during(self) -> Exposures:
        return self.log.between(self.first, self.last)

    @cached_property
    def before(self) -> Exposures | None:
        """The time before the test; none when nobody was seen in it."""
        found = self.log.between(0, self.first - 1)
        return found if len(found.user) else None

    def totals(self) -> list[ArmTotals]:
        """What each arm was shown and did in the test, the control first."""
        during, arms = self.during, len(self.exposures.arms)
        seen = np.bincount(during.user, minlength=during.users) > 0
        users = np.bincount(during.arm[seen], minlength=arms)
        sums = {key: np.bincount(during.arm[during.user], each, arms) for key, each in during.sums.items()}
        return [
            ArmTotals(
                name=name,
                users=int(users[arm]),
                impressions=round(sums["impressions"][arm]),
                clicks=round(sums["clicks"][arm]),
                conversions=round(sums["conversions"][arm]),
                revenue=float(sums["revenue"][arm]) if "revenue" in sums else None,
            )
            for name, arm in zip(self.names, self.arms, strict=True)
        ]


class Judged:
    """One metric of a test; moments are `[arms]` or `[days, arms]`."""

    def __init__(self, test: Design, metric: Metric) -> None:
        self.test, self.metric = test, metric
        columns = by_user(test.during, metric)
        seen = columns[:, 1] > 0
        self.columns, self.arm = columns[seen], test.log.arm[seen]
        self.plain = moments(self.columns, self.arm, len(test.log.arms))
        self.earlier = None if test.before is None else covariates(test.before, metric)[seen]
        self.running = running(test.during, metric)

    def results(self, interval: IntervalKind, *, seed: int) -> list[Result]:
        test, control = self.test, self.test.arms[0]
        found = [effect(self.plain[control], self.plain[arm], alpha=test.alpha) for arm in test.arms[1:]]
        corrected = holm([each.p_value for each in found]).tolist()
        each_day = _by_day(test.log, self.metric)
        return [
            Result(
                metric=self.metric,
                control=test.names[0],
                treatment=name,
                alpha=test.alpha,
                effect=each if interval == "delta" else self._bootstrap(each, arm, seed),
                adjusted_p=p_value,
                cuped=self._cuped(arm),
                looks=self._looks(arm),
                daily=list(_daily(each_day, test, arm)),
            )
            for name, arm, each, p_value in zip(test.names[1:], test.arms[1:], found, corrected, strict=True)
        ]

    def check(self, splits: int, *, seed: int) -> SplitCheck | None:
        """Random halves of everyone in the time before the test, or of the control when there is no such time.

        None when these are too few for two halves, or all of them have the same.
        """
        columns = self.columns[self.arm == self.test.arms[0]]
        if self.test.before is not None:
            earlier = by_user(self.test.before, self.metric)
            columns = earlier[earlier[:, 1] > 0]
        if len(columns) < 2 * ENOUGH_USERS or (columns[:, 0] > 0).sum() < 2 * ENOUGH_EARNERS:
            return None
        if not relative_variance(moments(columns, np.zeros(len(columns), np.int64), 1))[0] > 0:
            return None
        return split_check(columns, metric=self.metric.name, rng=seed, alpha=self.test.alpha, splits=splits)

    def warnings(self) -> Iterator[str]:
        for name, arm in zip(self.test.names, self.test.arms, strict=True):
            if not self.running.enough(arm)[self.test.last]:
                users, earners = int(self.plain.n[arm]), int(self.running.earners[self.test.last, arm])
                yield (
                    f"{name} has {users:,} users, {earners:,} of them with any {self.metric.numerator}: too few for "
                    f"intervals of {self.metric.title}, which need {ENOUGH_USERS} and {ENOUGH_EARNERS}."
                )

    def _looks(self, arm: int) -> list[Look]:
        test = self.test
        days = {"first": test.first, "last": test.last}
        pair = test.arms[0], arm
        return looks(self.running, test.log.days, *pair, **days, alpha=test.alpha, expected_lift=test.expected_lift)

    def _bootstrap(self, found: Effect, arm: int, seed: int) -> Effect:
        control, treatment = (self.columns[self.arm == which] for which in (self.test.arms[0], arm))
        rng = np.random.default_rng([seed, arm])
        low, high = bootstrap_lift(control, treatment, alpha=self.test.alpha, rng=rng)
        return replace(found, lift=replace(found.lift, low=low, high=high))

    def _cuped(self, arm: int) -> Cuped | None:
        if self.earlier is None:
            return None
        columns = np.concatenate([self.columns, self.earlier], axis=1)
        adjusted = moments(columns, self.arm, len(self.test.log.arms))
        chosen = [adjusted[self.test.arms[0]], adjusted[arm]]
        both = [self.plain[self.test.arms[0]], self.plain[arm]]
        error, raw = (float(compare(a, b, "log")[1]) for a, b in (chosen, both))
        return Cuped(
            effect=effect(chosen[0], chosen[1], alpha=self.test.alpha),
            variance_reduction=1 - (error / raw) ** 2 if raw > 0 else 0.0,
            seen_before=float((chosen[0].sums[3] + chosen[1].sums[3]) / (chosen[0].n + chosen[1].n)),
        )


def _by_day(log: Exposures, metric: Metric) -> Moments:
    """Each day alone, `[days, arms]`."""
    days, arms = len(log.days), len(log.arms)
    found = moments(by_row(log, metric), log.day * arms + log.arm[log.user], days * arms)
    return found.reshape(days, arms)


def _daily(each_day: Moments, test: Design, arm: int) -> Iterator[DayEffect]:
    """The days on which both arms have two users at least."""
    found = effects(each_day[:, test.arms[0]], each_day[:, arm], alpha=test.alpha)
    for day, (label, each) in enumerate(zip(test.log.days, found, strict=True)):
        if min(each.control_users, each.treatment_users) >= 2:
            period = "before" if day < test.first else "after" if day > test.last else "test"
            yield DayEffect(label, period, each)
