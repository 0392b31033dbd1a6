"""A/B test analyses made by hand, so that every figure of a report can be checked against arithmetic."""

from __future__ import annotations

from dataclasses import replace

from urank.abtest.always_valid import Look
from urank.abtest.analysis import Analysis, ArmTotals, Cuped, DayEffect, Result, SampleRatio, SplitCheck
from urank.abtest.effects import Effect, Estimate
from urank.abtest.metrics import METRICS

DAYS = ["2020-05-06", "2020-05-07", "2020-05-08", "2020-05-09"]


def effect(lift: float, half: float, rate: float = 0.05, p_value: float = 0.002) -> Effect:
    """A lift with an interval of so much to either side."""
    around = Estimate(lift, half / 1.96, lift - half, lift + half)
    return Effect(rate, rate * (1 + lift), 5000, 5100, replace(around, value=rate * lift), around, p_value)


def look(day: str, lift: float, half: float) -> Look:
    return Look(day, 5000, 5100, effect(lift, half).lift, lift - 2 * half, lift + 2 * half, 0.002, 0.04)


def result(metric: int, lift: float, rate: float, treatment: str = "B") -> Result:
    """A test of three days, the first day of the log before it."""
    daily = [DayEffect(day, "test" if n else "before", effect(lift * (n > 0), 0.1)) for n, day in enumerate(DAYS)]
    return Result(
        metric=METRICS[metric],
        control="A",
        treatment=treatment,
        alpha=0.05,
        effect=effect(lift, 0.04, rate),
        adjusted_p=0.002,
        cuped=Cuped(effect(lift - 0.01, 0.03, rate), 1 - (0.03 / 0.04) ** 2, 0.62),
        looks=[look(day, lift, half) for day, half in zip(DAYS[1:], (0.12, 0.06, 0.04), strict=True)],
        daily=daily,
    )


def analysis() -> Analysis:
    """An analysis of two metrics, both with a lift of 10 %."""
    return Analysis(
        name="exposures.parquet",
        control="A",
        treatments=["B"],
        days=DAYS,
        start=DAYS[1],
        end=DAYS[3],
        alpha=0.05,
        interval="delta",
        expected_lift=0.05,
        arms=[ArmTotals("A", 5000, 100_000, 5000, 2000, 1234.5), ArmTotals("B", 5100, 102_000, 5610, 2200, 1400.0)],
        results=[result(0, 0.1, 0.05), result(1, 0.1, 0.4)],
        sample_ratio=SampleRatio({"A": 5000, "B": 5100}, {"A": 5050, "B": 5050}, 0.99, 0.32),
        splits=[SplitCheck("ctr", 6000, 1000, 0.048, 0.03, 0.07, 0.05)],
        crossed=0,
        unassigned=0,
        warnings=[],
    )
