"""An A/B test from its exposure log: every metric of every treatment against the control, and what to be wary of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cached_property
from math import isnan
from typing import Any, Literal

import numpy as np
from scipy.special import betaincinv, chdtrc

from urank.abtest.always_valid import ENOUGH_EARNERS, ENOUGH_USERS, Look, looks, running, spread
from urank.abtest.effects import (
    Effect,
    Floats,
    Moments,
    bootstrap_lift,
    check_alpha,
    compare,
    effect,
    effects,
    moments,
    p_values,
    random_blocks,
    relative_variance,
)
from urank.abtest.exposures import Exposures
from urank.abtest.metrics import Metric, by_row, by_user, metrics_of
from urank.config import to_jsonable
from urank.errors import ConfigError, DataError
from urank.evaluation.intervals import holm
from urank.progress import Report, silent

__all__ = [
    "Analysis",
    "ArmTotals",
    "Cuped",
    "DayEffect",
    "Design",
    "IntervalKind",
    "Judged",
    "Result",
    "SampleRatio",
    "SplitCheck",
    "analyse",
    "covariates",
    "percent",
    "sample_ratio",
    "split_check",
]

SUSPICIOUS = 0.001
"""The p-value below which the sizes of the arms are not chance."""

_CERTAIN = 0.99
_SPLITS_AT_ONCE = 100


@dataclass(frozen=True)
class SampleRatio:
    """Users of each arm against those that its share lets expect.

    Attributes:
        users, expected: arm -> how many.
        chi_square: Σ (users − expected)² / expected.
        p_value: how likely chance alone makes it as large.
    """

    users: dict[str, int]
    expected: dict[str, float]
    chi_square: float
    p_value: float

    @property
    def sound(self) -> bool:
        """Whether the sizes of the arms may be chance."""
        return not self.p_value < SUSPICIOUS


@dataclass(frozen=True)
class SplitCheck:
    """How often the test calls two random halves of the same users different.

    Attributes:
        metric: which was tested.
        users: how many were split.
        splits: how many times.
        share: of the splits that had p < alpha.
        low, high: the 99 % interval of that share (Clopper and Pearson).
        alpha: what it should be.
    """

    metric: str
    users: int
    splits: int
    share: float
    low: float
    high: float
    alpha: float

    @property
    def sound(self) -> bool:
        """Whether the share may be alpha."""
        return self.low <= self.alpha <= self.high


def sample_ratio(users: Mapping[str, int], shares: Mapping[str, float] | None = None) -> SampleRatio:
    """Whether the arms have as many users as they should, by Pearson's χ² test.

    Arms of the wrong size mean that users got lost, or came twice, in one of them (Fabijan et al., KDD 2019). These are
    seldom users like all others, so that whatever the test says is in doubt. A p-value below 0.001 is taken for that.

    Args:
        users: arm -> how many were seen.
        shares: arm -> its intended share, of any sum; equal when left out.

    >>> found = sample_ratio({"A": 5100, "B": 4900})
    >>> found.chi_square, round(found.p_value, 3), found.sound  # 100² / 5000 twice
    (4.0, 0.046, True)
    """
    if shares is not None:
        for arm in users:
            if not shares.get(arm, 0) > 0:
                raise ConfigError(f"shares must give each arm a share above 0; got {shares.get(arm)} for '{arm}'")
    weights = dict.fromkeys(users, 1.0) if shares is None else {arm: shares[arm] for arm in users}
    total, whole = sum(users.values()), sum(weights.values())
    expected = {arm: total * weight / whole for arm, weight in weights.items()}
    chi_square = sum((count - expected[arm]) ** 2 / expected[arm] for arm, count in users.items()) if total else 0.0
    p_value = float(chdtrc(len(users) - 1, chi_square)) if len(users) > 1 else 1.0
    return SampleRatio(dict(users), expected, chi_square, p_value)


def split_check(
    columns: Floats, *, metric: str, rng: np.random.Generator | int, alpha: float = 0.05, splits: int = 1000
) -> SplitCheck:
    """Split users at random into two halves, again and again, and test them by the log lift as arms are tested.

    Nothing tells the halves apart, so a share alpha of the tests should have p < alpha. It is more when a few users
    earn most of the metric, too few for the normal distribution. It cannot tell whether users are the right unit.

    The test of a split is made from sums, which for all splits are products of one random matrix with the moments of
    users. Above 10,000 users, as many random blocks of users are split in their place.

    Args:
        columns: `[users, 2]`, x and y of each user, y above 0.
        metric: what it is called.
        rng: a generator or a seed.
        alpha: the p-value below which a difference is called one.
        splits: how many.

    >>> clicks = np.random.default_rng(0).binomial(10, 0.1, size=500)
    >>> found = split_check(np.stack([clicks, np.full(500, 10)], axis=1), metric="ctr", rng=0)
    >>> found.sound, 0.03 < found.share < 0.07
    (True, True)
    """
    generator = np.random.default_rng(rng)
    block = random_blocks(len(columns), generator)
    blocks = moments(np.asarray(columns, dtype=np.float64), block, int(block.max()) + 1 if len(block) else 1)
    flat = np.concatenate([blocks.n[:, None], blocks.sums, blocks.products.reshape(-1, 4)], axis=1)
    whole = _moments(flat.sum(axis=0))
    called = 0
    for start in range(0, splits, _SPLITS_AT_ONCE):
        drawn = generator.integers(2, size=(min(_SPLITS_AT_ONCE, splits - start), len(flat)), dtype=np.int8)
        half = _moments(drawn.astype(np.float64) @ flat)
        called += int((p_values(*compare(whole - half, half, "log")) < alpha).sum())
    tail = (1 - _CERTAIN) / 2
    low = float(betaincinv(called, splits - called + 1, tail)) if called else 0.0
    high = float(betaincinv(called + 1, splits - called, 1 - tail)) if called < splits else 1.0
    return SplitCheck(metric, len(columns), splits, called / splits, low, high, alpha)


def _moments(flat: Floats) -> Moments:
    """Moments `[...]` from their numbers in one row, `[..., 7]`."""
    return Moments(flat[..., 0], flat[..., 1:3], flat[..., 3:].reshape(*flat.shape[:-1], 2, 2))


@dataclass(frozen=True)
class ArmTotals:
    """What the users of an arm were shown and did in the test; `revenue` is none in a log without values."""

    name: str
    users: int
    impressions: int
    clicks: int
    conversions: int
    revenue: float | None


@dataclass(frozen=True)
class Cuped:
    """The effect with what users did before the test taken out.

    Attributes:
        effect: adjusted; the rates of the arms are not.
        variance_reduction: by which share the variance of the log lift is smaller.
        seen_before: share of the users of the test that were seen before it.
    """

    effect: Effect
    variance_reduction: float
    seen_before: float


@dataclass(frozen=True)
class DayEffect:
    """One day alone, over the users that were seen on it: the paper's Figures 5 and 6.

    Attributes:
        day: its name.
        period: before, in or after the test: "before", "test", "after".
        effect: of that day.
    """

    day: str
    period: str
    effect: Effect


@dataclass(frozen=True)
class Result:
    """One metric of one treatment against the control.

    Attributes:
        metric: what was measured.
        control, treatment: the names of the arms.
        alpha: one less the level of all intervals.
        effect: over the whole test, for those who look once at its end.
        adjusted_p: the p-value corrected for the number of treatments (Holm).
        cuped: the effect with the time before the test taken out; none when there is no such time.
        looks: at the end of each day.
        daily: each day alone.
    """

    metric: Metric
    control: str
    treatment: str
    alpha: float
    effect: Effect
    adjusted_p: float
    cuped: Cuped | None
    looks: list[Look]
    daily: list[DayEffect]

    @property
    def differs(self) -> bool:
        """Whether the arms are told apart at the end of the test."""
        return self.adjusted_p < self.alpha

    @property
    def decided(self) -> str | None:
        """The first day by whose end the always-valid interval left out 0; none when it never did."""
        return next((look.day for look in self.looks if look.always_low > 0 or look.always_high < 0), None)

    @property
    def sentence(self) -> str:
        """What came out, in words."""
        lift, level = self.effect.lift, f"{100 * (1 - self.alpha):g} %"
        if isnan(lift.value):
            return f"There is no lift in {self.metric.title}, since {self.control} has none at all."
        less = "less" if self.metric.numerator == "revenue" else "fewer"
        more = f"{percent(abs(lift.value))} {'more' if lift.value >= 0 else less} {self.metric.title}"
        p = f"p = {_p(self.effect.p_value)}"
        if self.adjusted_p != self.effect.p_value:
            p += f", corrected for several treatments {_p(self.adjusted_p)}"
        found = (
            f"{self.treatment} earned {more} than {self.control} ({level} interval {_ends(lift.low, lift.high)}, {p})"
        )
        if not self.differs:
            found = f"{self.treatment} and {self.control} cannot be told apart: {found}"
        return "; ".join([found, *self._looked, *self._adjusted]) + "."

    @property
    def _looked(self) -> list[str]:
        if len(self.looks) < 2:
            return []
        found = next((look for look in self.looks if look.day == self.decided), None)
        if found is None:
            ends = _ends(self.looks[-1].always_low, self.looks[-1].always_high)
            return [f"for those who looked daily it is not sure: always-valid interval {ends}"]
        ends = _ends(found.always_low, found.always_high)
        return [f"looking daily was safe from the end of {found.day} on: always-valid interval then {ends}"]

    @property
    def _adjusted(self) -> list[str]:
        if self.cuped is None or isnan(self.cuped.effect.lift.value):
            return []
        lift, less = self.cuped.effect.lift, percent(max(self.cuped.variance_reduction, 0))
        ends = _ends(lift.low, lift.high)
        return [f"with what users did before taken out {percent(lift.value)} ({ends}), {less} less variance"]


@dataclass(frozen=True)
class Analysis:
    """An A/B test.

    Attributes:
        name: of the log.
        control, treatments: the names of the arms.
        days: of the log.
        start, end: the first and the last day of the test.
        alpha: one less the level of all intervals.
        interval: how those of the effect were made: "delta" or "bootstrap".
        expected_lift: what the always-valid intervals were made for.
        arms: totals of the test, the control first.
        results: by metric, then treatment.
        sample_ratio: whether the arms have as many users as they should.
        splits: by metric, how often the test calls nothing something; without those that cannot be told.
        crossed: users seen in two arms, who are left out.
        unassigned: users without an arm, who are left out.
        warnings: what puts the results in doubt, in words.
    """

    name: str
    control: str
    treatments: list[str]
    days: list[str]
    start: str
    end: str
    alpha: float
    interval: str
    expected_lift: float
    arms: list[ArmTotals]
    results: list[Result]
    sample_ratio: SampleRatio
    splits: list[SplitCheck]
    crossed: int
    unassigned: int
    warnings: list[str]

    def result(self, metric: str, treatment: str | None = None) -> Result:
        """The result of a metric, of the first treatment when none is named."""
        wanted = self.treatments[0] if treatment is None else treatment
        for found in self.results:
            if (found.metric.name, found.treatment) == (metric, wanted):
                return found
        raise KeyError(f"nothing is known of metric '{metric}' and treatment '{wanted}'")

    def __str__(self) -> str:
        """A line for each result, then the warnings."""
        return "\n".join([*(result.sentence for result in self.results), *self.warnings])

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        told = asdict(self)
        for each, result in zip(told["results"], self.results, strict=True):
            each |= {"differs": result.differs, "decided": result.decided, "sentence": result.sentence}
        told["sample_ratio"]["sound"] = self.sample_ratio.sound
        for each, check in zip(told["splits"], self.splits, strict=True):
            each["sound"] = check.sound
        as_json: dict[str, Any] = to_jsonable(told)
        return as_json


def percent(share: float) -> str:
    """A share in percent, with two digits at least.

    >>> percent(0.0524), percent(-0.0524), percent(0.0004), percent(12.3)
    ('5.2 %', '−5.2 %', '0.04 %', '1,230 %')
    """
    if isnan(share):
        return "–"
    size = abs(100 * share)
    return f"{100 * share:z,.{2 if size < 1 else 1 if size < 100 else 0}f} %".replace("-", "−")


def _ends(low: float, high: float) -> str:
    return f"{percent(low)} to {percent(high)}"


def _p(p_value: float) -> str:
    return "–" if isnan(p_value) else f"{p_value:.2g}" if p_value >= 0.001 else f"{p_value:.0e}"


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


Day = str | int | date


def analyse(
    exposures: Exposures,
    *,
    control: str,
    treatment: str | Sequence[str] | None = None,
    start: Day | None = None,
    end: Day | None = None,
    shares: Mapping[str, float] | None = None,
    alpha: float = 0.05,
    interval: IntervalKind = "delta",
    expected_lift: float = 0.05,
    splits: int = 1000,
    seed: int = 0,
    report: Report = silent,
) -> Analysis:
    """Judge an A/B test.

    Args:
        exposures: the log.
        control: the arm that the others are held against.
        treatment: one arm or several; all others when left out.
        start: the first day of the test. What users did before is taken out of an estimate of its own (CUPED), and the
            check of false positives is made on that time.
        end: the last day of the test; later days are shown but not counted. Only the days of the test tell who is in
            which arm, and who was seen in two (`Exposures.with_arms_of`).
        shares: arm -> its intended share of the users; equal when left out.
        alpha: one less the level of all intervals.
        interval: of the lift at the end of the test: by the delta method, or by the Poisson bootstrap over users.
            Errors and p-values are those of the delta method in both.
        expected_lift: the lift that the test was planned for, where always-valid intervals are tightest.
        splits: random halves by which false positives are counted; 0 leaves that out.
        seed: of the bootstrap and the halves.
        report: told the metrics that are done.

    Raises:
        ConfigError: when an argument names no arm or day, or is not a number of its kind.
        DataError: when an arm has no users in the test.
    """
    check_alpha(alpha)
    spread(expected_lift)
    if interval not in ("delta", "bootstrap"):
        raise ConfigError(f"interval must be delta or bootstrap; got '{interval}'")
    if splits < 0:
        raise ConfigError(f"splits must be a whole number from 0 up; got {splits}")
    period = _period(exposures, start, end)
    exposures = exposures.with_arms_of(*period)
    names = [control, *_treatments(exposures, control, treatment)]
    test = Design(exposures, names, *period, alpha, expected_lift)
    totals = test.totals()
    for arm in totals:
        if arm.users == 0:
            raise DataError(f"arm '{arm.name}' of {exposures.name} must have users in the test; it has none")
    ratio = sample_ratio({arm.name: arm.users for arm in totals}, shares)
    results: list[Result] = []
    checks: list[SplitCheck] = []
    warnings = list(_warnings(exposures, ratio))
    metrics = metrics_of(exposures)
    for number, metric in enumerate(metrics):
        report("analyse", number, len(metrics), metric.title)
        judged = Judged(test, metric)
        results += judged.results(interval, seed=seed)
        warnings += judged.warnings()
        if splits and (check := judged.check(splits, seed=seed)) is not None:
            checks.append(check)
            warnings += _split_warnings(check, metric)
    report("analyse", len(metrics), len(metrics))
    return Analysis(
        name=exposures.name,
        control=control,
        treatments=names[1:],
        days=list(exposures.days),
        start=exposures.days[test.first],
        end=exposures.days[test.last],
        alpha=alpha,
        interval=interval,
        expected_lift=expected_lift,
        arms=totals,
        results=results,
        sample_ratio=ratio,
        splits=checks,
        crossed=exposures.crossed,
        unassigned=exposures.unassigned,
        warnings=warnings,
    )


def _treatments(exposures: Exposures, control: str, treatment: str | Sequence[str] | None) -> list[str]:
    """The names of the treatments, checked."""
    if treatment is None:
        wanted = [name for name in exposures.arms if name != control]
    else:
        wanted = [treatment] if isinstance(treatment, str) else list(dict.fromkeys(treatment))
    for role, name in [("control", control), *(("treatment", name) for name in wanted)]:
        if name not in exposures.arms:
            raise ConfigError(
                f"{role} must be an arm of {exposures.name}, {', '.join(exposures.arms[:10])}; got '{name}'"
            )
    if not wanted or control in wanted:
        got = ", ".join(wanted) or "none"
        raise ConfigError(f"treatment must be another arm than the control '{control}'; got {got}")
    return wanted


def _period(exposures: Exposures, start: Day | None, end: Day | None) -> tuple[int, int]:
    """The indices of the first and the last day."""
    days = exposures.days
    found = [0, len(days) - 1]
    for place, (name, day) in enumerate((("start", start), ("end", end))):
        if day is not None:
            if str(day) not in days:
                raise ConfigError(
                    f"{name} must be a day of {exposures.name}, from '{days[0]}' to '{days[-1]}'; got '{day}'"
                )
            found[place] = days.index(str(day))
    if found[0] > found[1]:
        raise ConfigError(f"start must not be after end; got {start} and {end}")
    return found[0], found[1]


def _warnings(exposures: Exposures, ratio: SampleRatio) -> Iterator[str]:
    if not ratio.sound:
        counts = ", ".join(
            f"{arm} has {users:,} where {ratio.expected[arm]:,.0f} were expected" for arm, users in ratio.users.items()
        )
        yield (
            f"The arms do not have as many users as they should (p = {ratio.p_value:.0e}): {counts}. Users got lost, "
            "or came twice, in one of them, and results cannot be trusted before it is known why."
        )
    if exposures.crossed:
        share = exposures.crossed / (exposures.crossed + exposures.users)
        yield f"{exposures.crossed:,} users ({percent(share)}) were seen in two arms and are left out."


def _split_warnings(check: SplitCheck, metric: Metric) -> Iterator[str]:
    if not check.sound:
        yield (
            f"Of {check.splits:,} random splits of the same users, {percent(check.share)} differed in {metric.title} "
            f"at p < {check.alpha:g} (99 % interval {percent(check.low)} to {percent(check.high)}); p-values are off."
        )
