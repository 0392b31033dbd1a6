"""An A/B test from its exposure log: every metric of every treatment against the control, and what to be wary of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date

from urank.abtest.checks import SampleRatio, SplitCheck, sample_ratio
from urank.abtest.estimate import check_alpha
from urank.abtest.exposures import Exposures
from urank.abtest.judge import Design, IntervalKind, Judged
from urank.abtest.metrics import Metric, metrics_of
from urank.abtest.results import Analysis, Result, percent
from urank.abtest.sequential import spread
from urank.errors import ConfigError, DataError
from urank.progress import Report, silent

__all__ = ["analyse"]

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
