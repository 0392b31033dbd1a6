"""The tables of an A/B test: its arms, its results, its checks, and of a simulated one what was true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from urank.report.numbers import UNKNOWN, Units, number, p_text, percent
from urank.report.tables import Table

if TYPE_CHECKING:
    from urank.abtest.metrics import Metric
    from urank.abtest.results import Analysis, Result
    from urank.simulate.judged import JudgedTest

__all__ = ["Check", "arm_table", "check_table", "checks", "learned_table", "level", "result_table", "verdict_table"]

_LIFT = Units(base=1.0, decimals=3)
"""Lifts are shares already."""

Check = tuple[str, str, bool]
"""What is checked, what was found, and whether that is sound."""


def level(alpha: float) -> str:
    """How sure the intervals are.

    >>> level(0.05), level(0.005)
    ('95 %', '99.5 %')
    """
    return f"{100 * (1 - alpha):g} %"


def arm_table(analysis: Analysis) -> Table:
    """What the users of each arm were shown and did in the test."""
    arms = analysis.arms
    columns = {
        "arm": [arm.name for arm in arms],
        "users": [f"{arm.users:,}" for arm in arms],
        "impressions": [f"{arm.impressions:,}" for arm in arms],
        "clicks": [f"{arm.clicks:,}" for arm in arms],
        "conversions": [f"{arm.conversions:,}" for arm in arms],
    }
    if any(arm.revenue is not None for arm in arms):
        columns["revenue"] = [UNKNOWN if arm.revenue is None else number(arm.revenue, 2) for arm in arms]
    return _by_columns(columns)


def result_table(analysis: Analysis) -> Table:
    """A row for each metric and treatment; the columns that matter most come first, since a narrow terminal leaves out
    the last."""
    results = analysis.results
    several = len(analysis.treatments) > 1
    columns = {"metric": [result.metric.title for result in results]}
    if several:
        columns["arm"] = [result.treatment for result in results]
    columns |= {
        "control": [_rate(result.metric, result.effect.control, result) for result in results],
        "treatment": [_rate(result.metric, result.effect.treatment, result) for result in results],
        "lift": [percent(result.effect.lift.value, sign=True) for result in results],
        f"{level(analysis.alpha)} interval": [
            _LIFT.changes(result.effect.lift.low, result.effect.lift.high) for result in results
        ],
        "p, corrected" if several else "p": [p_text(result.adjusted_p) for result in results],
        "always valid": [_always(result) for result in results],
    }
    if any(result.cuped is not None for result in results):
        columns["CUPED"] = [_cuped(result) for result in results]
    return _by_columns(columns)


def checks(analysis: Analysis) -> Iterator[Check]:
    """Whether the test itself is sound."""
    ratio = analysis.sample_ratio
    counts = ", ".join(
        f"{arm} {users:,} users ({ratio.expected[arm]:,.0f} expected)" for arm, users in ratio.users.items()
    )
    yield "sample ratio", f"{counts}, p = {p_text(ratio.p_value)}", ratio.sound
    crossed = f"{analysis.crossed:,} were" if analysis.crossed > 1 else "one was" if analysis.crossed else "nobody was"
    yield "crossed users", f"{crossed} seen in two arms", not analysis.crossed
    if analysis.splits:
        first = analysis.splits[0]
        shares = ", ".join(f"{percent(check.share)} in {check.metric}" for check in analysis.splits)
        before = any(result.cuped is not None for result in analysis.results)
        whom = "all users before the test" if before else analysis.control
        found = f"of {first.splits:,} random halves of {whom}, so many had p < {first.alpha:g}: {shares}"
        yield "A/A splits", found, all(check.sound for check in analysis.splits)


def check_table(analysis: Analysis) -> Table:
    """The same as a table."""
    head = ("check", "found", "verdict")
    return Table(
        head, [(what, found, "sound" if sound else "beware") for what, found, sound in checks(analysis)], head[1:]
    )


def verdict_table(judged: JudgedTest) -> Table:
    """The parts of a simulated test: what was found in each, and what was true."""
    found = judged.verdicts
    return _by_columns(
        {
            "test": [each.period for each in found],
            "metric": [each.metric.name.upper() for each in found],
            "lift": [percent(each.effect.lift.value, sign=True) for each in found],
            f"{level(judged.ab.alpha)} interval": [
                _LIFT.changes(each.effect.lift.low, each.effect.lift.high) for each in found
            ],
            "0 inside": ["yes" if each.holds_zero else "no" for each in found],
            "true lift": [percent(each.true_lift, sign=True) if each.true_lift else "0 %" for each in found],
            "truth inside": ["yes" if each.holds_truth else "no" for each in found],
            "days": [f"{each.start} – {each.end}" for each in found],
        }
    )


def learned_table(judged: JudgedTest) -> Table:
    """The rankers that were learned while the test ran."""
    learned = judged.run.learned
    return _by_columns(
        {
            "arm": [each.arm for each in learned],
            "from day": [str(each.day) for each in learned],
            "model": [each.model for each in learned],
            "impressions": [f"{each.impressions:,}" for each in learned],
            "seconds": [number(each.seconds, 1) for each in learned],
        }
    )


def _by_columns(columns: dict[str, list[str]]) -> Table:
    rows: Sequence[tuple[str, ...]] = list(zip(*columns.values(), strict=True))
    return Table(tuple(columns), rows)


def _rate(metric: Metric, rate: float, result: Result) -> str:
    """With as many decimals as the control's rate needs; what is at most 1 in percent."""
    if metric.denominator == "impressions":
        shown = number(100 * rate, Units.of(100 * result.effect.control).decimals)
        return shown if shown == UNKNOWN else f"{shown} %"
    return Units.of(result.effect.control).amount(rate)


def _always(result: Result) -> str:
    return _LIFT.changes(result.looks[-1].always_low, result.looks[-1].always_high) if result.looks else UNKNOWN


def _cuped(result: Result) -> str:
    if result.cuped is None:
        return UNKNOWN
    lift = result.cuped.effect.lift
    return f"{percent(lift.value, sign=True)} ({_LIFT.changes(lift.low, lift.high)})"
