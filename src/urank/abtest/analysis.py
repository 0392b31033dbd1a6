"""The analysis of an A/B test: every metric of every treatment against the control, checks, and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import import_module
from math import isnan
from typing import Any, Literal

import numpy as np
import polars as pl
from scipy.special import betaincinv, chdtrc

from urank.abtest.always_valid import ENOUGH_EARNERS, ENOUGH_USERS, Look, looks, mixture_tau, running_totals
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

IntervalKind = Literal["delta", "bootstrap"]
Period = Literal["before", "test", "after"]
Day = str | int | date

SUSPICIOUS = 0.001
"""The p-value below which the sizes of the arms are not due to chance."""
_SPLIT_LEVEL = 0.99
_SPLITS_AT_ONCE = 100


@dataclass(frozen=True)
class SampleRatio:
    """Pearson's χ² test of the intended shares: arm -> users, seen and expected; Σ (users − expected)² / expected."""

    users: dict[str, int]
    expected: dict[str, float]
    chi_square: float
    p_value: float

    @property
    def sound(self) -> bool:
        """Whether the sizes of the arms are plausible."""
        return not self.p_value < SUSPICIOUS


def sample_ratio(users: Mapping[str, int], shares: Mapping[str, float] | None = None) -> SampleRatio:
    """Test for a sample ratio mismatch.

    Arms of the wrong size mean that users got lost, or were counted twice, in one of them (Fabijan et al., KDD 2019).
    Such users are seldom typical, so all results are in doubt. A p-value below 0.001 counts as a mismatch.

    Args:
        users: arm -> number of users seen.
        shares: arm -> intended share, in any unit; equal by default.

    >>> found = sample_ratio({"A": 5100, "B": 4900})
    >>> found.chi_square, round(found.p_value, 3), found.sound  # 100² / 5000 twice
    (4.0, 0.046, True)
    """
    weights = dict.fromkeys(users, 1.0) if shares is None else {arm: shares.get(arm, 0.0) for arm in users}
    for arm, weight in weights.items():
        if not weight > 0:
            raise ConfigError(f"shares must give each arm a share above 0; got {weight:g} for '{arm}'")
    total, whole = sum(users.values()), sum(weights.values())
    expected = {arm: total * weight / whole for arm, weight in weights.items()}
    chi_square = sum((count - expected[arm]) ** 2 / expected[arm] for arm, count in users.items()) if total else 0.0
    p_value = float(chdtrc(len(users) - 1, chi_square)) if len(users) > 1 else 1.0
    return SampleRatio(dict(users), expected, chi_square, p_value)


@dataclass(frozen=True)
class SplitCheck:
    """How often the test finds a difference between random halves of the same users.

    `share` of the splits have p < `alpha`, with a 99 % interval from `low` to `high` (Clopper and Pearson).
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
        """Whether the share is compatible with alpha."""
        return self.low <= self.alpha <= self.high


def split_check(
    columns: Floats, *, metric: str, rng: np.random.Generator | int, alpha: float = 0.05, splits: int = 1000
) -> SplitCheck:
    """Split users at random into halves, repeatedly, and compare the halves like the arms of a test (A/A test).

    The halves do not differ, so a share alpha of the tests should have p < alpha. The share is higher if a few users
    earn most of the metric, too few for the normal approximation. The check cannot detect a wrong sampling unit.

    The test of a split needs only sums, and those of all splits are the product of one random matrix with the moments
    of users. More than 10,000 users are split in 10,000 random blocks.

    Args:
        columns: `[users, 2]`, x and y of each user, y positive.
        metric: its name.
        rng: a generator or a seed.
        alpha, splits: the significance level, and the number of splits.

    >>> clicks = np.random.default_rng(0).binomial(10, 0.1, size=500)
    >>> found = split_check(np.stack([clicks, np.full(500, 10)], axis=1), metric="ctr", rng=0)
    >>> found.sound, 0.03 < found.share < 0.07
    (True, True)
    """
    generator = np.random.default_rng(rng)
    block = random_blocks(len(columns), generator)
    blocks = moments(np.asarray(columns, dtype=np.float64), block, int(block.max()) + 1 if len(block) else 1)
    flat = np.concatenate([blocks.n[:, None], blocks.sums, blocks.products.reshape(-1, 4)], axis=1)

    def unflattened(sums: Floats) -> Moments:
        return Moments(sums[..., 0], sums[..., 1:3], sums[..., 3:].reshape(*sums.shape[:-1], 2, 2))

    whole = unflattened(flat.sum(axis=0))
    called = 0
    for start in range(0, splits, _SPLITS_AT_ONCE):
        drawn = generator.integers(2, size=(min(_SPLITS_AT_ONCE, splits - start), len(flat)), dtype=np.int8)
        half = unflattened(drawn.astype(np.float64) @ flat)
        called += int((p_values(*compare(whole - half, half, "log")) < alpha).sum())
    tail = (1 - _SPLIT_LEVEL) / 2
    low = float(betaincinv(called, splits - called + 1, tail)) if called else 0.0
    high = float(betaincinv(called + 1, splits - called, 1 - tail)) if called < splits else 1.0
    return SplitCheck(metric, len(columns), splits, called / splits, low, high, alpha)


@dataclass(frozen=True)
class ArmTotals:
    """Totals of an arm in the test; `revenue` is None if the log has no values."""

    name: str
    users: int
    impressions: int
    clicks: int
    conversions: int
    revenue: float | None


@dataclass(frozen=True)
class Cuped:
    """The effect adjusted for the behaviour of users before the test; the rates of the arms are not adjusted.

    `variance_reduction` is that of the log lift, relative; `seen_before` is a share of the users of the test.
    """

    effect: Effect
    variance_reduction: float
    seen_before: float


@dataclass(frozen=True)
class DayEffect:
    """The effect on a single day, over the users seen on it: the paper's Figures 5 and 6."""

    day: str
    period: Period
    effect: Effect


@dataclass(frozen=True)
class Result:
    """One metric of one treatment against the control."""

    metric: Metric
    control: str
    treatment: str
    alpha: float
    effect: Effect  # over the whole test, for a single look at its end
    adjusted_p: float  # the p-value corrected for the number of treatments (Holm)
    cuped: Cuped | None  # None if the log has no time before the test
    looks: list[Look]
    daily: list[DayEffect]

    @property
    def differs(self) -> bool:
        """Whether the arms differ significantly at the end of the test."""
        return self.adjusted_p < self.alpha

    @property
    def decided(self) -> str | None:
        """The first day by whose end the always-valid interval excluded 0; None if it never did."""
        return None if self._deciding_look is None else self._deciding_look.day

    @property
    def _deciding_look(self) -> Look | None:
        return next((look for look in self.looks if look.always_low > 0 or look.always_high < 0), None)

    @property
    def sentence(self) -> str:
        """The result in words."""
        lift, level = self.effect.lift, f"{100 * (1 - self.alpha):g} %"
        if isnan(lift.value):
            return f"There is no lift in {self.metric.title}, since {self.control} has none at all."
        less = "less" if self.metric.numerator == "revenue" else "fewer"
        more = f"{percent(abs(lift.value))} {'more' if lift.value >= 0 else less} {self.metric.title}"
        p = f"p = {_p_text(self.effect.p_value)}"
        if self.adjusted_p != self.effect.p_value:
            p += f", corrected for several treatments {_p_text(self.adjusted_p)}"
        interval = _interval_text(lift.low, lift.high)
        clauses = [f"{self.treatment} earned {more} than {self.control} ({level} interval {interval}, {p})"]
        if not self.differs:
            clauses[0] = f"{self.treatment} and {self.control} cannot be told apart: {clauses[0]}"
        if len(self.looks) > 1:
            safe = self._deciding_look
            shown = safe or self.looks[-1]
            always = _interval_text(shown.always_low, shown.always_high)
            if safe is None:
                clauses.append(f"with daily looks the result is not conclusive: always-valid interval {always}")
            else:
                stop = f"with daily looks it was safe to stop from the end of {safe.day} on"
                clauses.append(f"{stop}: always-valid interval then {always}")
        if self.cuped is not None and not isnan(self.cuped.effect.lift.value):
            adjusted, reduction = self.cuped.effect.lift, percent(max(self.cuped.variance_reduction, 0))
            lift_text = f"{percent(adjusted.value)} ({_interval_text(adjusted.low, adjusted.high)})"
            clauses.append(f"adjusted for behaviour before the test {lift_text}, {reduction} less variance")
        return "; ".join(clauses) + "."


@dataclass(frozen=True, repr=False)
class Analysis:
    """The analysis of an A/B test: its arguments (see `analyse`), and what was found.

    Attributes:
        name, days: of the log.
        arms: totals of the test, the control first.
        results: by metric, then treatment.
        splits: false positives of random halves, by metric; without metrics for which there are too few users.
        crossed, unassigned: numbers of users seen in two arms, and without an arm, which are excluded.
        warnings: reasons to doubt the results.
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
        """Return the result of a metric, by default of the first treatment."""
        wanted = self.treatments[0] if treatment is None else treatment
        for found in self.results:
            if (found.metric.name, found.treatment) == (metric, wanted):
                return found
        raise KeyError(f"there is no result for metric '{metric}' and treatment '{wanted}'")

    def __repr__(self) -> str:
        """A line for each result, then the warnings."""
        return "\n".join([*(result.sentence for result in self.results), *self.warnings])

    def to_frame(self) -> pl.DataFrame:
        """Return the lift of each metric and treatment over the control, with its interval, a row for each."""
        rows = [
            {
                "metric": each.metric.name,
                "treatment": each.treatment,
                "control_rate": each.effect.control,
                "treatment_rate": each.effect.treatment,
                "lift": each.effect.lift.value,
                "low": each.effect.lift.low,
                "high": each.effect.lift.high,
                "p_value": each.adjusted_p,
                "always_low": each.looks[-1].always_low if each.looks else None,
                "always_high": each.looks[-1].always_high if each.looks else None,
                "decided": each.decided,
            }
            for each in self.results
        ]
        return pl.DataFrame(rows, infer_schema_length=None)

    def _repr_html_(self) -> str:
        """Return the view in a notebook."""
        return str(import_module("urank.report.abtest_report").analysis_html(self))  # of a higher layer

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        content = asdict(self)
        for each, result in zip(content["results"], self.results, strict=True):
            each |= {"differs": result.differs, "decided": result.decided, "sentence": result.sentence}
        content["sample_ratio"]["sound"] = self.sample_ratio.sound
        for each, check in zip(content["splits"], self.splits, strict=True):
            each["sound"] = check.sound
        return dict(to_jsonable(content))


def percent(share: float) -> str:
    """Format a share in percent for a sentence.

    >>> percent(0.0524), percent(-0.0524), percent(0.0004), percent(12.3)
    ('5.2 %', '−5.2 %', '0.04 %', '1,230 %')
    """
    if isnan(share):
        return "–"
    size = abs(100 * share)
    return f"{100 * share:z,.{2 if size < 1 else 1 if size < 100 else 0}f} %".replace("-", "−")


def _interval_text(low: float, high: float) -> str:
    return f"{percent(low)} to {percent(high)}"


def _p_text(p_value: float) -> str:
    return "–" if isnan(p_value) else f"{p_value:.2g}" if p_value >= 0.001 else f"{p_value:.0e}"


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
    """Analyse an A/B test.

    Args:
        exposures: the log.
        control: the arm that the others are compared with.
        treatment: one arm or several; by default all others.
        start: the first day of the test. Earlier days are used for CUPED and for the check of false positives.
        end: the last day of the test; later days are shown but not counted. Only the days of the test decide who is in
            which arm, and who was seen in two (`Exposures.settle_arms`).
        shares: arm -> intended share of the users; equal by default.
        alpha: 1 − level of all intervals.
        interval: of the lift at the end of the test: by the delta method, or by the Poisson bootstrap over users.
            Standard errors and p-values come from the delta method in both cases.
        expected_lift: the lift that the test was planned for, at which always-valid intervals are tightest.
        splits: number of random halves for the check of false positives; 0 to skip it.
        seed: of the bootstrap and the halves.
        report: Progress callback, in metrics.
    """
    check_alpha(alpha)
    mixture_tau(expected_lift)
    if interval not in ("delta", "bootstrap"):
        raise ConfigError(f"interval must be delta or bootstrap; got '{interval}'")
    if splits < 0:
        raise ConfigError(f"splits must be a whole number from 0 up; got {splits}")
    first, last = _period(exposures, start, end)
    exposures = exposures.settle_arms(first, last)
    names = [control, *_treatments(exposures, control, treatment)]
    design = _Design(exposures, names, first, last, alpha)
    totals = design.totals()
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
        analysis = _MetricAnalysis(design, metric)
        results += analysis.results(interval, expected_lift, seed=seed)
        warnings += analysis.warnings()
        if splits and (check := analysis.check(splits, seed=seed)) is not None:
            checks.append(check)
            if not check.sound:
                warnings.append(
                    f"Of {check.splits:,} random splits of the same users, {percent(check.share)} differed in "
                    f"{metric.title} at p < {check.alpha:g} (99 % interval {_interval_text(check.low, check.high)}); "
                    "the p-values are not reliable."
                )
    report("analyse", len(metrics), len(metrics))
    return Analysis(
        name=exposures.name,
        control=control,
        treatments=names[1:],
        days=list(exposures.days),
        start=exposures.days[first],
        end=exposures.days[last],
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


def _period(exposures: Exposures, start: Day | None, end: Day | None) -> tuple[int, int]:
    """Return the indices of the first and the last day of the test."""
    days = exposures.days
    for name, day in (("start", start), ("end", end)):
        if day is not None and str(day) not in days:
            raise ConfigError(
                f"{name} must be a day of {exposures.name}, from '{days[0]}' to '{days[-1]}'; got '{day}'"
            )
    first = 0 if start is None else days.index(str(start))
    last = len(days) - 1 if end is None else days.index(str(end))
    if first > last:
        raise ConfigError(f"start must not be after end; got {start} and {end}")
    return first, last


def _treatments(exposures: Exposures, control: str, treatment: str | Sequence[str] | None) -> list[str]:
    """Return the validated names of the treatments."""
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


def _warnings(exposures: Exposures, ratio: SampleRatio) -> Iterator[str]:
    if not ratio.sound:
        counts = ", ".join(
            f"{arm} has {users:,} where {ratio.expected[arm]:,.0f} were expected" for arm, users in ratio.users.items()
        )
        yield (
            f"The arms do not have as many users as they should (p = {ratio.p_value:.0e}): {counts}. Users got lost, "
            "or were counted twice, in one of them; do not trust the results before the cause is known."
        )
    if exposures.crossed:
        share = exposures.crossed / (exposures.crossed + exposures.users)
        yield f"{exposures.crossed:,} users ({percent(share)}) were seen in two arms and are left out."


def covariates(before: Exposures, metric: Metric) -> Floats:
    """Return covariates of each user for CUPED, `[users, 2]`: x − R y with the rate R of all users, and whether seen.

    Users that were not seen have (0, 0): the first is neutral, the second distinguishes them.
    """
    columns = by_user(before, metric)
    x, y = columns.sum(axis=0)
    residual = columns[:, 0] - (x / y if y else 0.0) * columns[:, 1]
    return np.stack([residual, columns[:, 1] > 0], axis=1)


class _Design:
    """A test: the log of its arms, the control first, during the test and before; None if nobody was seen before."""

    def __init__(self, exposures: Exposures, names: list[str], first: int, last: int, alpha: float) -> None:
        self.names, self.first, self.last, self.alpha = names, first, last, alpha
        self.arms = [exposures.arms.index(name) for name in names]
        self.log = exposures.where(np.isin(exposures.arm, self.arms)[exposures.user])
        self.during = self.log.between(first, last)
        before = self.log.between(0, first - 1)
        self.before = before if len(before.user) else None

    def totals(self) -> list[ArmTotals]:
        """Return the totals of each arm in the test, the control first."""
        during, arms = self.during, len(self.log.arms)
        seen = np.bincount(during.user, minlength=during.users) > 0
        users = np.bincount(during.arm[seen], minlength=arms)
        sums = {key: np.bincount(during.arm[during.user], each, arms) for key, each in during.sums.items()}
        found = []
        for name, arm in zip(self.names, self.arms, strict=True):
            counts = {key: round(sums[key][arm]) for key in ("impressions", "clicks", "conversions")}
            revenue = float(sums["revenue"][arm]) if "revenue" in sums else None
            found.append(ArmTotals(name, users=int(users[arm]), revenue=revenue, **counts))
        return found


class _MetricAnalysis:
    """One metric of a test; moments are `[arms]` or `[days, arms]`."""

    def __init__(self, design: _Design, metric: Metric) -> None:
        self.design, self.metric = design, metric
        columns = by_user(design.during, metric)
        seen = columns[:, 1] > 0
        self.columns, self.arm = columns[seen], design.log.arm[seen]
        self.moments = moments(self.columns, self.arm, len(design.log.arms))
        self.earlier = None if design.before is None else covariates(design.before, metric)[seen]
        self.totals = running_totals(design.during, metric)

    def results(self, interval: IntervalKind, expected_lift: float, *, seed: int) -> list[Result]:
        """Compare each treatment with the control."""
        design, log, control = self.design, self.design.log, self.design.arms[0]
        found = [effect(self.moments[control], self.moments[arm], alpha=design.alpha) for arm in design.arms[1:]]
        corrected = holm([each.p_value for each in found]).tolist()
        days, arms = len(log.days), len(log.arms)
        by_day = moments(by_row(log, self.metric), log.day * arms + log.arm[log.user], days * arms).reshape(days, arms)
        options: dict[str, Any] = {"first": design.first, "last": design.last, "expected_lift": expected_lift}
        results = []
        for name, arm, each, p_value in zip(design.names[1:], design.arms[1:], found, corrected, strict=True):
            total = each if interval == "delta" else self._bootstrap(each, arm, seed)
            daily_looks = looks(self.totals, log.days, control, arm, alpha=design.alpha, **options)
            days_alone, cuped = list(self._daily(by_day, arm)), self._cuped(arm)
            names = design.names[0], name
            results.append(Result(self.metric, *names, design.alpha, total, p_value, cuped, daily_looks, days_alone))
        return results

    def check(self, splits: int, *, seed: int) -> SplitCheck | None:
        """Split all users of the time before the test, or those of the control if there is no such time.

        None if there are too few users for two halves, or all have the same rate.
        """
        columns = self.columns[self.arm == self.design.arms[0]]
        if self.design.before is not None:
            earlier = by_user(self.design.before, self.metric)
            columns = earlier[earlier[:, 1] > 0]
        if len(columns) < 2 * ENOUGH_USERS or (columns[:, 0] > 0).sum() < 2 * ENOUGH_EARNERS:
            return None
        if not relative_variance(moments(columns, np.zeros(len(columns), np.int64), 1))[0] > 0:
            return None
        return split_check(columns, metric=self.metric.name, rng=seed, alpha=self.design.alpha, splits=splits)

    def warnings(self) -> Iterator[str]:
        last = self.design.last
        for name, arm in zip(self.design.names, self.design.arms, strict=True):
            if not self.totals.enough(arm)[last]:
                users, earners = int(self.moments.n[arm]), int(self.totals.earners[last, arm])
                yield (
                    f"{name} has {users:,} users, {earners:,} of them with any {self.metric.numerator}: too few for "
                    f"intervals of {self.metric.title}, which need {ENOUGH_USERS} and {ENOUGH_EARNERS}."
                )

    def _bootstrap(self, found: Effect, arm: int, seed: int) -> Effect:
        control, treatment = (self.columns[self.arm == which] for which in (self.design.arms[0], arm))
        rng = np.random.default_rng([seed, arm])
        low, high = bootstrap_lift(control, treatment, alpha=self.design.alpha, rng=rng)
        return replace(found, lift=replace(found.lift, low=low, high=high))

    def _cuped(self, arm: int) -> Cuped | None:
        if self.earlier is None:
            return None
        control = self.design.arms[0]
        adjusted = moments(np.concatenate([self.columns, self.earlier], axis=1), self.arm, len(self.design.log.arms))
        a, b = adjusted[control], adjusted[arm]
        error = float(compare(a, b, "log")[1])
        raw = float(compare(self.moments[control], self.moments[arm], "log")[1])
        reduction = 1 - (error / raw) ** 2 if raw > 0 else 0.0
        seen_before = float((a.sums[3] + b.sums[3]) / (a.n + b.n))
        return Cuped(effect(a, b, alpha=self.design.alpha), reduction, seen_before)

    def _daily(self, by_day: Moments, arm: int) -> Iterator[DayEffect]:
        """Yield the days on which both arms have at least two users."""
        design = self.design
        found = effects(by_day[:, design.arms[0]], by_day[:, arm], alpha=design.alpha)
        for day, (label, each) in enumerate(zip(design.log.days, found, strict=True)):
            if min(each.control_users, each.treatment_users) >= 2:
                period: Period = "before" if day < design.first else "after" if day > design.last else "test"
                yield DayEffect(label, period, each)
